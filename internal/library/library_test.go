package library

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"testing"
)

// touch creates empty files in a new folder and returns the folder.
func touch(t *testing.T, files ...string) string {
	t.Helper()
	root := t.TempDir()
	for _, f := range files {
		write(t, filepath.Join(root, f), "")
	}
	return root
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o777); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o666); err != nil {
		t.Fatal(err)
	}
}

// Folders are searched in order. TORCHSTREAM_LIBRARY excludes all others.
func TestFindSearchesInOrder(t *testing.T) {
	root := touch(t, "variable/x.so", "loader/x.so", "program/bin/x.so", "program/lib/x.so",
		"clone/cshim/build/lib/x.so", "installed/lib/x.so", "installed/lib/y.so")
	at := func(folder string) string { return filepath.Join(root, folder) }
	s := Search{Library: at("variable"), LoaderPath: "/nowhere::" + at("loader"),
		Program: at("program/bin"), Clone: at("clone"), Installed: at("installed")}
	find := func(want string) {
		t.Helper()
		if want != "" {
			want = at(want + "/x.so")
		}
		if got := s.Find("x.so"); got != want {
			t.Errorf("found %q, want %q", got, want)
		}
	}
	find("variable")
	if got := s.Find("y.so"); got != "" {
		t.Errorf("with TORCHSTREAM_LIBRARY found %q outside of it, want nothing", got)
	}
	s.Library = ""
	find("loader")
	s.LoaderPath = ""
	find("program/bin")
	if err := os.Remove(at("program/bin/x.so")); err != nil {
		t.Fatal(err)
	}
	find("program/lib")
	s.Program = ""
	find("clone/cshim/build/lib")
	s.Clone = ""
	find("installed/lib")
	s.Installed = ""
	find("")
}

// This process searches the folder of its program, this clone and the cache.
func TestHere(t *testing.T) {
	t.Setenv("TORCHSTREAM_CACHE", t.TempDir())
	t.Setenv("TORCHSTREAM_LIBRARY", "there")
	s := Here("0.1.0")
	if s.Library != "there" || s.Program == "" ||
		!strings.HasPrefix(s.Installed, os.Getenv("TORCHSTREAM_CACHE")+"/shim-0.1.0-linux-") {
		t.Errorf("%+v", s)
	}
	if s.Clone != "" && !exists(filepath.Join(s.Clone, "internal", "library", "library_test.go")) {
		t.Errorf("the clone is not at %s", s.Clone)
	}
	for path, want := range map[string]bool{
		"/home/me/go/pkg/mod/github.com/torchstream/torchstream@v0.1.0": true,
		"/home/me/torchstream": false,
	} {
		if got := inModuleCache(path); got != want {
			t.Errorf("inModuleCache(%s) = %v, want %v", path, got, want)
		}
	}
}

func TestSetupIsOneCommand(t *testing.T) {
	for _, c := range []struct {
		search     Search
		name, want string
	}{
		{Search{Clone: "/no/clone"}, "libtorchstream.so", "make -C /no/clone shim"},
		{Search{Clone: "/no/clone"}, "libtorchstream_image.so", "make -C /no/clone image"},
		{Search{Clone: "/no/clone"}, "libtorchstream_lab.so", "make -C /no/clone lab"},
		{Search{Version: "v0.1.0"}, "libtorchstream.so", "go run " + Module + "/cmd/torchstream@v0.1.0 setup"},
		{Search{}, "libtorchstream_image.so", "go run " + Module + "/cmd/torchstream@latest setup"},
	} {
		if got := c.search.Setup(c.name); got != c.want {
			t.Errorf("%+v: %q, want %q", c.search, got, c.want)
		}
	}
}

func TestLibTorchVersion(t *testing.T) {
	root := t.TempDir()
	write(t, filepath.Join(root, "wheel/lib/libtorch_cpu.so"), "")
	write(t, filepath.Join(root, "wheel/version.py"),
		"from typing import Optional\n\n__version__ = '2.12.1+cu130'\ndebug = False\n")
	write(t, filepath.Join(root, "zip/lib/libtorch_cpu.so"), "")
	write(t, filepath.Join(root, "zip/build-version"), "2.10.0+cpu\n")
	write(t, filepath.Join(root, "bare/lib/libtorch_cpu.so"), "")
	for folder, want := range map[string]string{"wheel": "2.12.1", "zip": "2.10.0", "bare": "", "absent": ""} {
		if got := LibTorchVersion(filepath.Join(root, folder, "lib/libtorch_cpu.so")); got != want {
			t.Errorf("%s: %q, want %q", folder, got, want)
		}
	}
	for _, same := range [][2]string{{"2.11.0", "2.11.3"}, {"2.11", "2.11.0"}} {
		if release(same[0]) != release(same[1]) {
			t.Errorf("%v are different releases", same)
		}
	}
	if got, other := release("2.1.0"), release("2.11.0"); got == other {
		t.Errorf("release of 2.1.0 and 2.11.0 = %s, want two releases", got)
	}
}

// Each message of the dynamic loader is turned into one with advice.
func TestUnusable(t *testing.T) {
	s := Search{Clone: "/no/clone", LoaderPath: "/other/torch/lib"}
	const path = "/lib/libtorchstream.so"
	for _, c := range []struct {
		name, why string
		want      []string
	}{
		{"a library of LibTorch is missing",
			"libtorch_cpu.so: cannot open shared object file: No such file or directory",
			[]string{path, "needs libtorch_cpu.so of LibTorch", "/other/torch/lib", "`make -C /no/clone shim`"}},
		{"a library of CUDA is missing", "libcudart.so.13: cannot open shared object file: No such file or directory",
			[]string{"needs libcudart.so.13 of CUDA"}},
		{"the C library is old",
			"/lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.38' not found (required by /lib/libtorchstream.so)",
			[]string{"GLIBC_2.38", "this system is older"}},
		{"another symbol", path + ": undefined symbol: _ZN3c10", []string{"_ZN3c10", "`make -C /no/clone shim`"}},
		{"the library itself cannot be opened", "libtorchstream.so: cannot open shared object file: Permission denied",
			[]string{"libtorchstream.so: cannot open shared object file: Permission denied: run `make -C /no/clone shim`"}},
		{"another library of torchstream is missing",
			"libtorchstream_image.so: cannot open shared object file: No such file or directory",
			[]string{path + " needs libtorchstream_image.so, which is neither"}},
		{"a library of somebody else is missing",
			"libz.so.1: cannot open shared object file: No such file or directory",
			[]string{path + " needs libz.so.1, which is neither"}},
		{"not a library", path + ": file too short", []string{path, "file too short", "`make -C /no/clone shim`"}},
	} {
		got := s.Unusable(path, c.why)
		for _, want := range c.want {
			if !strings.Contains(got, want) {
				t.Errorf("%s: %q does not say %q", c.name, got, want)
			}
		}
	}
}

// In a clone without the libraries the message first names the command for all of them. If
// TORCHSTREAM_LIBRARY names a folder without them, the message says to unset it, and does not say
// to build existing libraries. Each folder has a line, and so has the advice.
func TestMissingSaysWhatToDo(t *testing.T) {
	const image = "libtorchstream_image.so"
	clone := touch(t, "Makefile")
	const other = ", or set TORCHSTREAM_LIBRARY to the libraries' folder"
	says := func(s Search, name, want string) {
		t.Helper()
		if got := s.Missing(name); !strings.HasSuffix(got, want) {
			t.Errorf("%q does not end with %q", got, want)
		}
	}
	says(Search{Clone: clone}, image, "there is no "+image+" in any of\n  "+filepath.Join(clone, "cshim",
		"build", "lib")+" (the clone)\nrun `make -C "+clone+" shim` (`make -C "+clone+
		" image` for the loader alone, without LibTorch)"+other)
	says(Search{Clone: clone}, "libtorchstream.so", "\nrun `make -C "+clone+" shim`"+other)
	says(Search{Version: "v1.2.3"}, image, "\nrun `go run "+Module+"/cmd/torchstream@v1.2.3 setup`"+other)
	wrong := Search{Library: "/nowhere", Clone: clone}
	says(wrong, "libtorchstream.so",
		"/nowhere (TORCHSTREAM_LIBRARY): unset the variable, and run `make -C "+clone+" shim`")
	built := filepath.Join(clone, "cshim", "build", "lib", image)
	write(t, built, "")
	says(wrong, image, "/nowhere (TORCHSTREAM_LIBRARY): unset the variable, and "+built+" is used")
}

func TestCannotCallNamesThePlatformAndTheRemedy(t *testing.T) {
	for platform, want := range map[string]string{
		"darwin/arm64":  "built for darwin/arm64, where it compiles but cannot call them: run it on Linux",
		"windows/amd64": "built for windows/amd64, where it compiles but cannot call them: run it on Linux",
		"linux/amd64":   "built for linux/amd64 without cgo",
	} {
		goos, goarch, _ := strings.Cut(platform, "/")
		got := CannotCall(goos, goarch)
		if !strings.Contains(got, want) {
			t.Errorf("%s: got %q, want %q in it", platform, got, want)
		}
		if apt := strings.Contains(got, "apt-get"); apt != (goos == "linux") {
			t.Errorf("%s: got %q, with a Debian command: %t, want %t", platform, got, apt, goos == "linux")
		}
	}
}

// A symbol that is missing because LD_LIBRARY_PATH has another LibTorch names that LibTorch.
func TestUndefinedSymbolNamesTheLibTorchThatIsFound(t *testing.T) {
	root := touch(t, "other/lib/libtorch_cpu.so")
	write(t, filepath.Join(root, "other/build-version"), "2.10.0+cpu\n")
	const why = "/lib/libtorchstream.so: undefined symbol: _ZN3c10"
	folder := filepath.Join(root, "other/lib")
	got := Search{Version: "v0.1.0", LoaderPath: "/nowhere:" + folder}.Unusable("/lib/libtorchstream.so", why)
	want := "/lib/libtorchstream.so was built for LibTorch of another version, and " + folder +
		"/libtorch_cpu.so is LibTorch 2.10.0: run `go run " + Module + "/cmd/torchstream@v0.1.0 setup`, " +
		"with LIBTORCH= and LD_LIBRARY_PATH= unset or of that version (" + why + ")"
	if got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// A library of another version than the program says which of the two is older.
func TestOtherVersionSaysWhichIsOlder(t *testing.T) {
	s := Search{Version: "v0.1.0"}
	for have, age := range map[int]string{3: "an older", 5: "a newer"} {
		got := s.OtherVersion("/lib/libtorchstream.so", have, 4)
		want := fmt.Sprintf("/lib/libtorchstream.so is of %s version of torchstream than the program: its ABI version "+
			"is %d, and the program needs 4: run `go run %s/cmd/torchstream@v0.1.0 setup`", age, have, Module)
		if got != want {
			t.Errorf("version %d: got %q, want %q", have, got, want)
		}
	}
	got, want := s.Lacks("/lib/libtorchstream.so", "ts_new"), "/lib/libtorchstream.so has no function ts_new"
	if !strings.HasPrefix(got, want) || !strings.HasSuffix(got, "setup`") {
		t.Errorf("got %q, want %q and the command for setup", got, want)
	}
}

// The advised command names the version of the program's torchstream only if it can be downloaded.
func TestModuleVersionIsOneToDownload(t *testing.T) {
	module := func(path, version string) *debug.Module { return &debug.Module{Path: path, Version: version} }
	replaced := module(Module, "v0.2.0")
	replaced.Replace = module("../torchstream", "")
	for name, c := range map[string]struct {
		main *debug.Module
		deps []*debug.Module
		want string
	}{
		"a dependency": {module("example.com/p", "(devel)"),
			[]*debug.Module{module("golang.org/x/sync", "v0.1.0"), module(Module, "v0.2.0")}, "v0.2.0"},
		"an installed command":   {module(Module, "v0.3.0-20261101000000-abcdefabcdef"), nil, "v0.3.0-20261101000000-abcdefabcdef"},
		"a clone":                {module(Module, "(devel)"), nil, "latest"},
		"a clone with changes":   {module(Module, "v0.3.1-0.20261101000000-abcdefabcdef+dirty"), nil, "latest"},
		"a replaced dependency":  {module("example.com/p", "v1.0.0"), []*debug.Module{replaced}, "latest"},
		"a program without it":   {module("example.com/p", "v1.0.0"), nil, "latest"},
		"a module with its name": {module(Module+"/lab", "v1.0.0"), nil, "latest"},
	} {
		if got := moduleVersion(&debug.BuildInfo{Main: *c.main, Deps: c.deps}); got != c.want {
			t.Errorf("%s: got %q, want %q", name, got, c.want)
		}
	}
}

// The cache's folder is TORCHSTREAM_CACHE, where ~ is the user's home as in a shell, or is below
// the home. Without either there is no cache, and the other folders are searched.
func TestCacheIsBelowTheHome(t *testing.T) {
	home := t.TempDir()
	t.Setenv("HOME", home)
	here, err := filepath.Abs("cache")
	if err != nil {
		t.Fatal(err)
	}
	for variable, want := range map[string]string{"": filepath.Join(home, ".cache/torchstream"),
		"~/big/cache": filepath.Join(home, "big/cache"), "/big/cache": "/big/cache", "cache": here} {
		t.Setenv("TORCHSTREAM_CACHE", variable)
		if got, err := Cache(); err != nil || got != want {
			t.Errorf("TORCHSTREAM_CACHE=%s: got %q, error %v, want %q", variable, got, err, want)
		}
	}
	t.Setenv("HOME", "")
	for _, variable := range []string{"", "~/cache"} {
		t.Setenv("TORCHSTREAM_CACHE", variable)
		if got, err := Cache(); err == nil {
			t.Errorf("without a home, TORCHSTREAM_CACHE=%s: got %q, want an error", variable, got)
		}
		if got := Here("0.1.0").Installed; got != "" {
			t.Errorf("without a home, TORCHSTREAM_CACHE=%s: the cache is searched in %q, want it not to be", variable, got)
		}
	}
}
