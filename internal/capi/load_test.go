package capi

import (
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/internal/imagecapi"
	"github.com/torchstream/torchstream/internal/library"
)

// TestMain runs the subprocesses of the tests below: a process loads the shim only once.
func TestMain(m *testing.M) {
	if os.Getenv("CAPI_TEST_THREADS") != "" {
		runtime.LockOSThread()
		here, elsewhere := NumThreads(), make(chan int)
		go func() { elsewhere <- NumThreads() }() // on another thread
		fmt.Println(here, <-elsewhere)
		return
	}
	if os.Getenv("CAPI_TEST_FIRST_CALLS") == "" {
		os.Exit(m.Run())
	}
	for _, call := range []func() error{
		func() error { return SetCUDAStream(Stream{}) },
		func() error { _, err := EmptyTensor(nil, Float32, DeviceCPU, Contiguous); return err },
		func() error { return StreamGuard{}.Exit() },
		func() error { return EmptyCache() },
		func() error { _, err := imagecapi.NewInflater(0); return err },
		Check,
	} {
		fmt.Println(call())
	}
	fmt.Println(DeviceCount(), NumThreads(), RangeListening(), CUDAVersion() == "")
	FreeEvent(nil)
	FreeTensors([]*Tensor{nil})
}

// firstCalls returns the output of a process that finds its libraries in the folder.
func firstCalls(t *testing.T, folder string) []string {
	t.Helper()
	c := exec.Command(os.Args[0])
	c.Env = append(os.Environ(), "CAPI_TEST_FIRST_CALLS=1", "TORCHSTREAM_LIBRARY="+folder)
	text, err := c.CombinedOutput()
	if err != nil {
		t.Fatalf("%v, want no error\n%s", err, text)
	}
	return strings.Split(strings.TrimSpace(string(text)), "\n")
}

// A program without the shim starts. Every call that can fail returns the same error, which says
// what to do. The others return the values of a machine without a GPU.
func TestCallsWithoutTheShim(t *testing.T) {
	folder := t.TempDir()
	lines := firstCalls(t, folder)
	for _, line := range lines[:len(lines)-1] {
		for _, want := range []string{"library not loaded",
			"there is no " + imagecapi.LibraryName + " in " + folder, "TORCHSTREAM_LIBRARY", "unset the variable"} {
			if !strings.Contains(line, want) {
				t.Errorf("%q does not say %q", line, want)
			}
		}
	}
	if last := lines[len(lines)-1]; len(lines) != 7 || last != "0 0 false true" {
		t.Errorf("got %q, want 7 lines, the last \"0 0 false true\"", lines)
	}
}

// With only the image library, everything works that does not need LibTorch.
func TestCallsWithTheImageLibraryAlone(t *testing.T) {
	folder := t.TempDir()
	imageLibrary(t, folder)
	lines := firstCalls(t, folder)
	for i, line := range lines[:len(lines)-1] {
		if image := i == 4; image != (line == "<nil>") || !image &&
			!strings.Contains(line, "there is no "+LibraryName+" in "+folder) {
			t.Errorf("call %d: %s", i, line)
		}
	}
}

// imageLibrary copies this process's image library into the folder.
func imageLibrary(t *testing.T, folder string) {
	t.Helper()
	if err := Check(); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(library.Mapped()[imagecapi.LibraryName],
		filepath.Join(folder, imagecapi.LibraryName)); err != nil {
		t.Fatal(err)
	}
}

// A shim built for another LibTorch than the loaded one is refused, even if the symbols match.
func TestOtherLibTorchIsRefused(t *testing.T) {
	cc, err := exec.LookPath("cc")
	if err != nil {
		t.Skip("needs a C compiler: ", err)
	}
	names := map[string]bool{}
	text, err := os.ReadFile("table_gen.c") // has all functions that this package calls
	if errors.Is(err, fs.ErrNotExist) {
		t.Skip("needs the sources: ", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range regexp.MustCompile(`(?m)^  "(ts_\w+)",$`).FindAllStringSubmatch(string(text), -1) {
		names[m[1]] = true
	}
	if len(names) < 100 {
		t.Fatalf("table_gen.c names %d functions, want at least 100", len(names))
	}
	delete(names, "ts_abi_version")
	delete(names, "ts_libtorch_version")
	delete(names, "ts_range_listeners")
	source := fmt.Sprintf("int ts_abi_version(void) { return %d; }\n", abiVersion) +
		"const char* ts_libtorch_version(void) { return \"2.11.0\"; }\n" +
		"static int listeners;\nint* ts_range_listeners(void) { return &listeners; }\n"
	for name := range names {
		source += "void* " + name + "(void) { return 0; }\n"
	}
	for version, refused := range map[string]bool{"2.12.0": true, "2.11.1": false} {
		t.Run(version, func(t *testing.T) {
			folder := t.TempDir()
			imageLibrary(t, folder)
			torch := filepath.Join(folder, "torch", "lib")
			if err := os.MkdirAll(torch, 0o777); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(folder, "torch", "version.py"),
				[]byte("__version__ = '"+version+"+cu130'\n"), 0o666); err != nil {
				t.Fatal(err)
			}
			compile(t, cc, filepath.Join(torch, "libtorch_cpu.so"), "int other(void) { return 0; }")
			compile(t, cc, filepath.Join(folder, LibraryName), source, "-Wl,--no-as-needed", "-L"+torch,
				"-ltorch_cpu", "-Wl,-rpath,$ORIGIN/torch/lib")
			says := firstCalls(t, folder)[5]
			if !refused {
				if says != "<nil>" {
					t.Error(says)
				}
				return
			}
			for _, want := range []string{folder, "was built for LibTorch 2.11.0", torch,
				"is LibTorch 2.12.0", "run `"} {
				if !strings.Contains(says, want) {
					t.Errorf("%q does not say %q", says, want)
				}
			}
		})
	}
}

func compile(t *testing.T, cc, library, source string, options ...string) {
	t.Helper()
	c := exec.Command(cc, append([]string{"-shared", "-fPIC", "-x", "c", "-", "-o", library}, options...)...)
	c.Stdin = strings.NewReader(source)
	if text, err := c.CombinedOutput(); err != nil {
		t.Fatalf("%v, want no error\n%s", err, text)
	}
}

// A function that calls C without having a C object may be a program's first call, so it must call
// Check.
func TestFirstCallsCheck(t *testing.T) {
	for _, folder := range []string{".", "../imagecapi"} {
		functions := declared(t, folder)
		if len(functions) == 0 {
			t.Skip("needs the sources")
		}
		checks := map[string]bool{"Check": true}
		callC := map[string]bool{}
		for range 3 { // through helpers
			for _, fn := range functions {
				ast.Inspect(fn, func(n ast.Node) bool {
					if call, ok := n.(*ast.CallExpr); ok {
						name := types.ExprString(call.Fun)
						checks[fn.Name.Name] = checks[fn.Name.Name] || checks[name]
						callC[fn.Name.Name] = callC[fn.Name.Name] || strings.HasPrefix(name, "C.ts_")
					}
					return true
				})
			}
		}
		looked := 0
		for _, fn := range functions {
			name := fn.Name.Name
			if callC[name] && fn.Name.IsExported() {
				looked++
				if !checks[name] && !takesObject(fn) && !cannotFail[name] {
					t.Errorf("%s: %s takes no object and does not call Check", folder, name)
				}
			}
		}
		if looked < 10 {
			t.Errorf("%s: looked at %d functions, want at least 10", folder, looked)
		}
	}
}

// declared returns the functions of a package, except its tests'.
func declared(t *testing.T, folder string) (all []*ast.FuncDecl) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(folder, "*.go"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range file.Decls {
			if fn, ok := d.(*ast.FuncDecl); ok {
				all = append(all, fn)
			}
		}
	}
	return all
}

// cannotFail lists functions without a meaningful result, which do not check, and NewError, which
// is called by C code.
var cannotFail = map[string]bool{"Noop": true, "FreeTensors": true, "TakeBorrowed": true, "TakeError": true,
	"NewError": true, "ReleaseCallbacks": true}

// takesObject reports whether a function has a parameter or receiver that requires a loaded
// library.
func takesObject(fn *ast.FuncDecl) bool {
	fields := fn.Type.Params.List
	if fn.Recv != nil {
		fields = append(fields, fn.Recv.List...)
	}
	for _, f := range fields {
		if star, ok := f.Type.(*ast.StarExpr); ok {
			if name, ok := star.X.(*ast.Ident); ok && !map[string]bool{"Geometry": true}[name.Name] {
				return true
			}
		}
	}
	return false
}

// threads starts a process with the environment. It returns how many of LibTorch's threads an
// operator uses, for operators on two of the process's threads.
func threads(t *testing.T, environment ...string) string {
	t.Helper()
	c := exec.Command(os.Args[0])
	inherited := slices.DeleteFunc(os.Environ(), func(v string) bool {
		return strings.HasPrefix(v, "OMP_NUM_THREADS=") || strings.HasPrefix(v, "MKL_NUM_THREADS=")
	})
	c.Env = append(append(inherited, "CAPI_TEST_THREADS=1"), environment...)
	text, err := c.CombinedOutput()
	if err != nil {
		t.Fatalf("%v, want no error\n%s", err, text)
	}
	return strings.TrimSpace(string(text))
}

// Every thread of the program has at most GOMAXPROCS LibTorch threads inside an operator, unless
// the environment sets LibTorch's threads.
func TestThreadsAreBoundedByGOMAXPROCS(t *testing.T) {
	if got := threads(t, "GOMAXPROCS=1"); got != "1 1" {
		t.Errorf("with GOMAXPROCS=1 LibTorch has %s threads, want 1 1", got)
	}
	// LibTorch itself interprets these variables.
	for _, variable := range []string{"OMP_NUM_THREADS=2", "MKL_NUM_THREADS=2"} {
		if got, want := threads(t, "GOMAXPROCS=1", variable), threads(t, "GOMAXPROCS=64", variable); got != want {
			t.Errorf("with GOMAXPROCS=1 and %s LibTorch has %s threads, want %s", variable, got, want)
		}
	}
}
