package library

import (
	"os"
	"path/filepath"
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
	says := func(s Search, name, want string) {
		t.Helper()
		if got := s.Missing(name); !strings.HasSuffix(got, want) {
			t.Errorf("%q does not end with %q", got, want)
		}
	}
	says(Search{Clone: clone}, image, "there is no "+image+" in any of\n  "+filepath.Join(clone, "cshim",
		"build", "lib")+" (the clone)\nrun `make -C "+clone+" shim` (`make -C "+clone+
		" image` for the loader alone, without LibTorch)")
	says(Search{Clone: clone}, "libtorchstream.so", "\nrun `make -C "+clone+" shim`")
	says(Search{Version: "v1.2.3"}, image, "\nrun `go run "+Module+"/cmd/torchstream@v1.2.3 setup`")
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
