//go:build linux && cgo

package imagecapi

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"unsafe"

	"github.com/torchstream/torchstream/internal/library"
)

// compile builds a shared library from C and returns its folder. It skips the test if there is no C
// compiler, as in a bundle of tests.
func compile(t *testing.T, folder, name, source string, options ...string) string {
	t.Helper()
	cc, err := exec.LookPath("cc")
	if err != nil {
		t.Skip("needs a C compiler: ", err)
	}
	c := exec.Command(cc, append([]string{"-shared", "-fPIC", "-x", "c", "-", "-o",
		filepath.Join(folder, name)}, options...)...)
	c.Stdin = strings.NewReader(source)
	if text, err := c.CombinedOutput(); err != nil {
		t.Fatalf("%v, want no error\n%s", err, text)
	}
	return folder
}

// An unusable library is an error that names the library found, the requirement and the remedy. The
// loaded library's functions stay bound.
func TestOpenLibraryExplainsFailures(t *testing.T) {
	bound := func(unsafe.Pointer) string { t.Error("bind was called, want no use of the library"); return "" }
	open := func(folder string, bind func(unsafe.Pointer) string) error {
		_, err := OpenLibrary(library.Search{Program: folder, Clone: "/no/clone"}, LibraryName,
			"ts_image_abi_version", 3, bind)
		return err
	}
	cases := map[string]func(t *testing.T, folder string) ([]string, error){
		"missing": func(t *testing.T, folder string) ([]string, error) {
			_, err := OpenLibrary(library.Search{Program: folder, Clone: "/no/clone"},
				"libtorchstream_none.so", "ts_image_abi_version", 3, bound)
			return []string{"there is no libtorchstream_none.so", folder, "beside the program",
				"/no/clone/cshim/build/lib (the clone)"}, err
		},
		"not where the variable says": func(t *testing.T, folder string) ([]string, error) {
			_, err := OpenLibrary(library.Search{Library: folder, Clone: "/no/clone"}, LibraryName,
				"ts_image_abi_version", 3, bound)
			return []string{"there is no " + LibraryName + " in " + folder, "TORCHSTREAM_LIBRARY"}, err
		},
		"older": func(t *testing.T, folder string) ([]string, error) {
			compile(t, folder, LibraryName, "int ts_image_abi_version(void) { return 2; }")
			return []string{folder, "an older version", "ABI version is 2", "needs 3"}, open(folder, bound)
		},
		"newer": func(t *testing.T, folder string) ([]string, error) {
			compile(t, folder, LibraryName, "int ts_image_abi_version(void) { return 4; }")
			return []string{folder, "a newer version", "ABI version is 4", "needs 3"}, open(folder, bound)
		},
		"lacks a function": func(t *testing.T, folder string) ([]string, error) {
			compile(t, folder, LibraryName, "int ts_image_abi_version(void) { return 3; }")
			return []string{folder, "has no function ts_jpeg_version", "older"}, open(folder, bind)
		},
		"another library": func(t *testing.T, folder string) ([]string, error) {
			compile(t, folder, LibraryName, "int f(void) { return 3; }")
			return []string{folder, "has no function ts_image_abi_version"}, open(folder, bound)
		},
		"no library": func(t *testing.T, folder string) ([]string, error) {
			if err := os.WriteFile(filepath.Join(folder, LibraryName), []byte("text"), 0o666); err != nil {
				t.Fatal(err)
			}
			return []string{folder, "file too short"}, open(folder, bound)
		},
		"a library that it needs is missing": func(t *testing.T, folder string) ([]string, error) {
			compile(t, folder, "libtorch_gone.so", "int gone(void) { return 0; }")
			compile(t, folder, LibraryName,
				"int gone(void); int ts_image_abi_version(void) { return gone(); }", "-Wl,--no-as-needed",
				"-L"+folder, "-ltorch_gone")
			if err := os.Remove(filepath.Join(folder, "libtorch_gone.so")); err != nil {
				t.Fatal(err)
			}
			return []string{folder, "needs libtorch_gone.so of LibTorch"}, open(folder, bound)
		},
		"for another LibTorch": func(t *testing.T, folder string) ([]string, error) {
			torch := filepath.Join(folder, "torch", "lib")
			if err := os.MkdirAll(torch, 0o777); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(folder, "torch", "version.py"),
				[]byte("__version__ = '2.9.1+cpu'\n"), 0o666); err != nil {
				t.Fatal(err)
			}
			compile(t, torch, "libtorch_cpu.so", "int other(void) { return 0; }")
			compile(t, folder, LibraryName,
				"int _ZN3c10(void); int ts_image_abi_version(void) { return _ZN3c10(); }",
				"-Wl,--no-as-needed", "-L"+torch, "-ltorch_cpu",
				"-Wl,--allow-shlib-undefined", "-Wl,-rpath,$ORIGIN/torch/lib")
			return []string{folder, "was built for LibTorch of another version",
				filepath.Join(torch, "libtorch_cpu.so") + " is LibTorch 2.9.1", "_ZN3c10"}, open(folder, bound)
		},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			want, err := c(t, t.TempDir())
			var e *Error
			if !errors.As(err, &e) || !errors.Is(err, CodeNoLibrary) {
				t.Fatalf("got %v, want a CodeNoLibrary", err)
			}
			for _, w := range append(want, "`make -C /no/clone image`", e.Origin) {
				if w == "`make -C /no/clone image`" && name == "missing" {
					w = "`make -C /no/clone shim`"
				}
				if !strings.Contains(err.Error(), w) {
					t.Errorf("%q does not say %q", err, w)
				}
			}
		})
	}
	if v := JPEGVersion(); v == "" {
		t.Errorf("JPEGVersion() of the loaded library = %q, want its version", v)
	}
}

// A call before the library is loaded returns an error, not a crash.
func TestNotLoaded(t *testing.T) {
	if err := NotLoaded(nil); !errors.Is(err, CodeInternal) {
		t.Errorf("got %v, want CodeInternal", err)
	}
	want := &Error{Code: CodeNoLibrary, Origin: LibraryName, Message: "there is none"}
	if err := NotLoaded(want); err != error(want) {
		t.Errorf("got %v, want %v", err, want)
	}
}
