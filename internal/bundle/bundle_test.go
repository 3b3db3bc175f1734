package bundle

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// world is a folder with a program and with libraries named like a shim's and LibTorch's. The C
// compiler makes them.
type world struct {
	*testing.T
	root string
}

func newWorld(t *testing.T) world {
	t.Helper()
	if _, err := exec.LookPath("cc"); err != nil {
		t.Skip("no C compiler")
	}
	return world{t, t.TempDir()}
}

func (w world) path(name string) string { return filepath.Join(w.root, name) }

// library builds a library whose function calls the functions of the libraries that it needs.
func (w world) library(name, runPath string, needs ...string) {
	w.Helper()
	w.link(name, runPath, []string{"-shared", "-fPIC", "-Wl,-soname," + filepath.Base(name)},
		"int "+function(name)+"(void)", needs)
}

// program builds a program that exits with the number of libraries that its calls reach.
func (w world) program(name, runPath string, needs ...string) {
	w.Helper()
	w.link(name, runPath, nil, "int main(void)", needs)
}

func (w world) link(name, runPath string, options []string, head string, needs []string) {
	w.Helper()
	var source strings.Builder
	calls := ""
	for _, n := range needs {
		source.WriteString("int " + function(n) + "(void);\n")
		calls += " + " + function(n) + "()"
	}
	source.WriteString(head + " { return " + map[bool]string{true: "0",
		false: "1"}[strings.Contains(head, "main")] + calls + "; }\n")
	file := w.path(name)
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		w.Fatal(err)
	}
	if err := os.WriteFile(file+".c", []byte(source.String()), 0o600); err != nil {
		w.Fatal(err)
	}
	args := append([]string{"-o", file, file + ".c", "-Wl,--allow-shlib-undefined", "-Wl,--no-as-needed"}, options...)
	for _, n := range needs {
		args = append(args, w.path(n))
	}
	if runPath != "" {
		args = append(args, "-Wl,-rpath,"+runPath)
	}
	if out, err := exec.Command("cc", args...).CombinedOutput(); err != nil {
		w.Fatalf("cc %s: %v\n%s", name, err, out)
	}
	os.Remove(file + ".c")
}

func function(name string) string {
	return strings.NewReplacer(".", "_", "-", "_").Replace(filepath.Base(name))
}

// shim builds the libraries of a clone and of an installed LibTorch.
func (w world) shim(runPath string) {
	w.Helper()
	const torch, cuda = "site/torch/lib/", "site/nvidia/cu13/lib/"
	w.library(cuda+"libcublas.so.13", "")
	w.library(torch+"libtorch_cpu.so", "$ORIGIN")
	w.library(torch+"libtorch_cuda.so", "$ORIGIN/../../nvidia/cu13/lib:$ORIGIN", cuda+"libcublas.so.13",
		torch+"libtorch_cpu.so")
	w.library(torch+"libtorch_cuda_linalg.so", "$ORIGIN", torch+"libtorch_cuda.so")
	w.library(torch+"libtorch_python.so", "$ORIGIN", torch+"libtorch_cpu.so")
	w.library("clone/lib/"+imageName, "$ORIGIN")
	w.library("clone/lib/"+shimName, runPath, "clone/lib/"+imageName, torch+"libtorch_cpu.so", torch+"libtorch_cuda.so")
	const info = "site/torch-2.11.0.dist-info/"
	for name, text := range map[string]string{
		info + "RECORD": "torch/lib/libtorch_cpu.so,sha256=x,1\n", info + "METADATA": "x",
		info + "licenses/LICENSE": "theirs", info + "licenses/third_party/gloo/LICENSE": "gloo's",
		"clone/share/licenses/torchstream/png/copyright": "png's",
	} {
		if err := os.MkdirAll(filepath.Dir(w.path(name)), 0o755); err != nil {
			w.Fatal(err)
		}
		if err := os.WriteFile(w.path(name), []byte(text), 0o600); err != nil {
			w.Fatal(err)
		}
	}
}

// runPath returns the run path of a shim built in a clone.
func (w world) runPath() string {
	return "$ORIGIN:$ORIGIN/libtorch/torch/lib:$ORIGIN/libtorch/nvidia/cu13/lib:" +
		w.path("site/torch/lib") + ":" + w.path("site/nvidia/cu13/lib")
}

// status runs a program without LD_LIBRARY_PATH and returns its exit status and output.
func status(t *testing.T, program string) (int, string) {
	t.Helper()
	c := exec.Command(program)
	c.Env = []string{"PATH=/nowhere"}
	out, err := c.CombinedOutput()
	if err != nil && c.ProcessState == nil {
		t.Fatal(err)
	}
	return c.ProcessState.ExitCode(), string(out)
}

func TestBundleRunsElsewhere(t *testing.T) {
	w := newWorld(t)
	w.shim(w.runPath())
	w.program("clone/program", w.path("clone/lib"), "clone/lib/"+shimName)
	want, text := status(t, w.path("clone/program"))
	if want < 3 {
		t.Fatalf("the program itself does not run: %d, want at least 3 lines in %s", want, text)
	}
	r, err := Make(t.Context(), Options{Program: w.path("clone/program"), Out: w.path("out")})
	if err != nil {
		t.Fatal(err)
	}
	var paths []string
	for _, f := range r.Files {
		paths = append(paths, f.Path)
	}
	for _, path := range []string{
		"bin/program", "lib/" + shimName, "lib/" + imageName, "lib/libtorch/torch/lib/libtorch_cpu.so",
		"lib/libtorch/nvidia/cu13/lib/libcublas.so.13", "lib/libtorch/torch/lib/libtorch_cuda_linalg.so",
	} {
		if !slices.Contains(paths, path) {
			t.Errorf("%s is not in the bundle: %q", path, paths)
		}
	}
	if len(r.LeftOut) != 1 || r.LeftOut[0].Path != "torch/lib/libtorch_python.so" {
		t.Errorf("left out: %v, want torch/lib/libtorch_python.so alone", r.LeftOut)
	}
	for name, want := range map[string]string{
		"torch-2.11.0/licenses/LICENSE":                  "theirs",
		"torch-2.11.0/licenses/third_party/gloo/LICENSE": "gloo's", "torchstream/png/copyright": "png's",
	} {
		if got, err := os.ReadFile(w.path("out/share/licenses/" + name)); err != nil || string(got) != want {
			t.Errorf("licence %s: %q, %v, want %v, nil", name, got, err, want)
		}
	}
	// The bundle works at another place, without the clone and LibTorch.
	for _, name := range []string{"clone", "site"} {
		if err := os.RemoveAll(w.path(name)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Rename(w.path("out"), w.path("moved to another place")); err != nil {
		t.Fatal(err)
	}
	if got, text := status(t, w.path("moved to another place/bin/program")); got != want {
		t.Errorf("the moved program exits with %d, want %d: %s", got, want, text)
	}
	for _, f := range r.Files {
		content, err := os.ReadFile(filepath.Join(w.path("moved to another place"), f.Path))
		if err != nil {
			t.Fatal(err)
		}
		if name := filepath.Base(f.Path); (name == shimName || name == "program") &&
			strings.Contains(string(content), w.root) {
			t.Errorf("%s contains a path of the machine that it was made on", f.Path)
		}
	}
}

// A program that opens the shim on first use is not linked to it. The names of the program's
// functions show which libraries it opens.
func TestProgramThatOpensTheShim(t *testing.T) {
	w := newWorld(t)
	w.shim(w.runPath())
	for _, c := range []struct {
		name, text string
		want       []string // files in lib
	}{
		{"tensors", "github.com/torchstream/torchstream/internal/capi.Check", []string{imageName, shimName}},
		{"images", "github.com/torchstream/torchstream/internal/imagecapi.Check", []string{imageName}},
	} {
		t.Run(c.name, func(t *testing.T) {
			file := w.path("clone/" + c.name)
			if err := os.WriteFile(file+".c",
				[]byte(`const char* functions = "`+c.text+
					`"; int main(void) { return functions[0] == 0; }`), 0o600); err != nil {
				t.Fatal(err)
			}
			if out, err := exec.Command("cc", "-o", file, file+".c").CombinedOutput(); err != nil {
				t.Fatalf("%v, want no error\n%s", err, out)
			}
			r, err := Make(t.Context(),
				Options{Program: file, Out: w.path("out-" + c.name),
					Find: func(name string) string { return w.path("clone/lib/" + name) }})
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, f := range r.Files {
				if filepath.Dir(f.Path) == "lib" {
					got = append(got, filepath.Base(f.Path))
				}
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("libraries %q, want %q", got, c.want)
			}
			if _, err := Make(t.Context(),
				Options{Program: file, Out: w.path("none-" + c.name)}); err == nil ||
				!strings.Contains(err.Error(), "-shim") {
				t.Errorf("without a shim: %v, want an error with \"-shim\"", err)
			}
		})
	}
}

func TestRefusedBundles(t *testing.T) {
	w := newWorld(t)
	w.shim(w.runPath())
	w.program("clone/program", w.path("clone/lib"), "clone/lib/"+shimName)
	w.program("clone/plain", "")
	w.library("old/"+imageName, w.path("old"))
	w.program("old/program", w.path("old"), "old/"+imageName)
	w.library("short/"+imageName, "$ORIGIN")
	w.program("short/program", "$ORIGIN", "short/"+imageName)
	w.library("odd/libodd.so", "")
	w.library("odd/"+imageName, "$ORIGIN/nowhere:"+w.path("odd"), "odd/libodd.so")
	w.program("odd/program", w.path("odd"), "odd/"+imageName)
	w.library("lost/liblost.so", "")
	w.library("lost/"+imageName, "$ORIGIN", "lost/liblost.so")
	w.program("lost/program", w.path("lost"), "lost/"+imageName)
	if err := os.Remove(w.path("lost/liblost.so")); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(w.path("script"), []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	full := w.path("full")
	if err := os.MkdirAll(filepath.Join(full, "something"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ name, program, out, says string }{
		{"an output that has something in it", "clone/program", full, "is not empty"},
		{"no such program", "nothing", "", "no such file"},
		{"a script", "script", "", "no program or library of Linux"},
		{"a library", "clone/lib/" + shimName, "", "no program with a dynamic loader"},
		{"a program without torchstream", "clone/plain", "", "does not use torchstream"},
		{"a library that is not there", "lost/program", "", "needs liblost.so"},
		{"a shim that cannot be moved", "old/program", "", "make shim"},
		{"a run path that is too short", "short/program", "", "too short"},
		{"a library that would not be found", "odd/program", "", "would not work"},
	} {
		t.Run(c.name, func(t *testing.T) {
			out := c.out
			if out == "" {
				out = w.path("out")
			}
			_, err := Make(t.Context(), Options{Program: w.path(c.program), Out: out})
			if err == nil || !strings.Contains(err.Error(), c.says) {
				t.Errorf("got %v, want %q", err, c.says)
			}
			if left, _ := filepath.Glob(w.path("out*")); len(left) > 0 {
				t.Errorf("left behind: %q, want none", left)
			}
		})
	}
}

// An interrupted bundle leaves nothing.
func TestInterruptedBundle(t *testing.T) {
	w := newWorld(t)
	w.shim(w.runPath())
	w.program("clone/program", w.path("clone/lib"), "clone/lib/"+shimName)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Make(ctx, Options{Program: w.path("clone/program"), Out: w.path("out")}); !errors.Is(err,
		context.Canceled) {
		t.Error(err)
	}
	if left, _ := filepath.Glob(w.path("out*")); len(left) > 0 {
		t.Errorf("left behind: %q, want none", left)
	}
}

func TestSystemLibrariesStayOut(t *testing.T) {
	for name, want := range map[string]bool{
		"libc.so.6": true, "ld-linux-x86-64.so.2": true, "libcuda.so.1": true, "libm.so.6": true,
		"libcudart.so.13": false, "libstdc++.so.6": false, "libz.so.1": false, "libcudnn.so.9": false,
	} {
		if got := system(name); got != want {
			t.Errorf("system(%s) = %v, want %v", name, got, want)
		}
	}
}
