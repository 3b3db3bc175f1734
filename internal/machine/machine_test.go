package machine

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// script writes an executable into folder that prints a line.
func script(t *testing.T, folder, name, line string) {
	t.Helper()
	path := filepath.Join(folder, name)
	write(t, path, "#!/bin/sh\necho '"+line+"'\n")
	if err := os.Chmod(path, 0o755); err != nil {
		t.Fatal(err)
	}
}

// rows returns findings by name, as "state found -> to do".
func rows(all ...Finding) map[string]string {
	m := map[string]string{}
	for _, f := range all {
		m[f.What] = f.State + " " + f.Found + " -> " + f.ToDo
	}
	return m
}

func want(t *testing.T, rows map[string]string, name, pattern string) {
	t.Helper()
	if got := rows[name]; !regexp.MustCompile("^" + pattern).MatchString(got) {
		t.Errorf("%s: got %q, want %q", name, got, pattern)
	}
}

// On a nearly empty machine each missing program is named, with the way to get it.
func TestBareMachine(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	found := rows(Clone(t.Context(), t.TempDir())...)
	for _, name := range []string{"g++", "make", "cmake", "ninja"} {
		want(t, found, name, "missing not in PATH -> .*apt-get install ")
	}
	want(t, found, "Go", "missing not in PATH -> install Go")
	want(t, found, "system", "ok linux/amd64")
	want(t, found, "optional", "note not installed: ccache .*python3 .*clang-format .*clang")
	want(t, found, "disk", "(ok|missing) .* GB free in ")
}

func TestVersionsOfPrograms(t *testing.T) {
	for _, c := range []struct{ program, line, name, want string }{
		{"go", "go version go1.26.8 linux/amd64", "Go", "ok 1.26.8 -> $"},
		{"go", "go version go1.24 linux/amd64", "Go", "note 1.24 -> it downloads the Go"},
		{"go", "go version go1.20.1 linux/amd64", "Go", "missing 1.20.1 -> install Go"},
		{"go", "no such version", "Go", "missing no such version -> install Go"},
		{"cmake", "cmake version 3.25.1", "cmake", "ok 3.25.1 -> $"},
		{"cmake", "cmake version 4.0.0-rc1", "cmake", "ok 4.0.0-rc1 -> $"},
		{"cmake", "cmake version 3.9.6", "cmake", "missing 3.9.6 -> 3.25 or newer is needed"},
		{"cmake", "broken", "cmake", "missing broken -> "},
		{"g++", "g++ (Debian) 12", "g++", `ok g\+\+ \(Debian\) 12 -> $`},
	} {
		folder := t.TempDir()
		script(t, folder, c.program, c.line)
		t.Setenv("PATH", folder)
		want(t, rows(Clone(t.Context(), t.TempDir())...), c.name, c.want)
	}
}

func TestCloneInAFolderWithSpaces(t *testing.T) {
	t.Setenv("PATH", "")
	want(t, rows(Clone(t.Context(), filepath.Join(t.TempDir(), "a clone"))...), "clone",
		"missing .*a clone -> compiler flags cannot carry spaces")
}

func TestBuilds(t *testing.T) {
	const library, cache = "cshim/build/lib/libtorchstream.so", "cshim/build/CMakeCache.txt"
	configured := func(root string) {
		write(t, filepath.Join(root, cache), "CMAKE_HOME_DIRECTORY:INTERNAL="+root+"/cshim\n")
	}
	newer := func(root, source string) {
		write(t, filepath.Join(root, source), "")
		later := time.Now().Add(time.Hour)
		if err := os.Chtimes(filepath.Join(root, source), later, later); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		name    string
		prepare func(root string)
		shim    string
	}{
		{"not built", func(string) {}, "missing not built -> `make shim`"},
		{"of this clone", func(root string) {
			configured(root)
			write(t, filepath.Join(root, library), "")
		}, "ok /"},
		{"of another clone", func(root string) {
			write(t, filepath.Join(root, cache), "CMAKE_HOME_DIRECTORY:INTERNAL=/elsewhere/cshim\n")
			write(t, filepath.Join(root, library), "")
		}, "missing .*/elsewhere/cshim, the sources of another clone -> `make shim`"},
		{"older than a source", func(root string) {
			configured(root)
			write(t, filepath.Join(root, library), "")
			newer(root, "cshim/src/cuda/a.cc")
		}, "note older than 1 of its sources, such as cshim/src/cuda/a.cc -> `make shim`"},
		{"older than another library's source", func(root string) {
			configured(root)
			write(t, filepath.Join(root, library), "")
			newer(root, "cshim/src/image/a.cc")
		}, "ok /"},
		{"built elsewhere", func(root string) { write(t, filepath.Join(root, library), "") }, "note .*built elsewhere"},
	} {
		t.Run(c.name, func(t *testing.T) {
			root := t.TempDir()
			write(t, filepath.Join(root, "cshim", "CMakeLists.txt"), "")
			old := time.Now().Add(-time.Hour)
			if err := os.Chtimes(filepath.Join(root, "cshim", "CMakeLists.txt"), old, old); err != nil {
				t.Fatal(err)
			}
			c.prepare(root)
			want(t, rows(Builds(root, true)...), "build of the shim", c.shim)
			_, missing := rows(Builds(root, false)...)["build of the image library"]
			if missing {
				t.Error("got a row for a library that is not built, want none")
			}
		})
	}
}

// The image library's row covers only the headers that it includes.
func TestBuildOfTheImageLibraryHasItsOwnHeaders(t *testing.T) {
	root := t.TempDir()
	write(t, filepath.Join(root, "cshim/include/torchstream_image.h"), "#include \"torchstream/image.h\"\n")
	write(t, filepath.Join(root, "cshim/build/lib/libtorchstream_image.so"), "")
	write(t, filepath.Join(root, "cshim/build/CMakeCache.txt"), "CMAKE_HOME_DIRECTORY:INTERNAL="+root+"/cshim\n")
	later := time.Now().Add(time.Hour)
	for header, pattern := range map[string]string{"tensor.h": "ok ",
		"image.h": "note older than 1 of its sources, such as cshim/include/torchstream/image.h"} {
		path := filepath.Join(root, "cshim/include/torchstream", header)
		write(t, path, "")
		if err := os.Chtimes(path, later, later); err != nil {
			t.Fatal(err)
		}
		want(t, rows(Builds(root, true)...), "build of the image library", pattern)
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
}

func TestLibTorchOfABuild(t *testing.T) {
	cache, site := t.TempDir(), t.TempDir()
	t.Setenv("TORCHSTREAM_CACHE", cache)
	t.Setenv("TORCHSTREAM_LIBTORCH", "")
	t.Setenv("LIBTORCH", "")
	check := func(pattern string) { t.Helper(); want(t, rows(LibTorch()), "LibTorch", pattern) }
	check("missing not in " + cache + ", where .* GB are free -> ")
	folders, err := exec.Command("sh", "-c",
		"grep -v '^#' ../../cshim/libtorch-2.11-cpu.lock | grep . | tr -d '\\n' | sha256sum | cut -c1-12").Output()
	if err != nil {
		t.Fatal(err)
	}
	folder := filepath.Join(cache, "libtorch-2.11.0+cpu-"+strings.TrimSpace(string(folders)))
	write(t, filepath.Join(folder, ".torchstream-complete"), "")
	check("missing not in ")
	t.Setenv("TORCHSTREAM_LIBTORCH", "2.11-cpu")
	check("ok " + regexp.QuoteMeta(folder))
	t.Setenv("TORCHSTREAM_LIBTORCH", "1.0")
	check("missing there is no LibTorch 1.0 to install .*want 2.11 or 2.15 or 2.11-cpu")
	t.Setenv("LIBTORCH", site)
	check("missing LIBTORCH=" + site + ": neither .* is in it -> give the site-packages")
	write(t, filepath.Join(site, "torch/lib/libtorch_cpu.so"), "")
	check("note LIBTORCH=" + site + ", which has no CUDA")
	write(t, filepath.Join(site, "torch/lib/libtorch_cuda.so"), "")
	check("ok " + site + "/torch ")
}

// A change of any source makes a library old.
func TestBuildsKnowAllSources(t *testing.T) {
	folders, err := os.ReadDir("../../cshim/src")
	if err != nil {
		t.Fatal(err)
	}
	for _, folder := range folders {
		root := t.TempDir()
		write(t, filepath.Join(root, "cshim/build/CMakeCache.txt"), "CMAKE_HOME_DIRECTORY:INTERNAL="+root+"/cshim\n")
		source := filepath.Join(root, "cshim/src", folder.Name(), "a.cc")
		write(t, source, "")
		later := time.Now().Add(time.Hour)
		if err := os.Chtimes(source, later, later); err != nil {
			t.Fatal(err)
		}
		old := 0
		for _, l := range libraries {
			write(t, filepath.Join(root, "cshim/build/lib", l.file), "")
		}
		for _, f := range Builds(root, true) {
			if f.State == Note && strings.HasPrefix(f.Found, "older than 1 of its sources") {
				old++
			}
		}
		if old == 0 {
			t.Errorf("cshim/src/%s has a newer source: got no library that is older, want one", folder.Name())
		}
	}
}
