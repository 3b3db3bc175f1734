//go:build linux && cgo

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
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

// Built without cgo, the program examines a machine that has only Go, and installs LibTorch. Its
// other commands say that a C compiler is needed.
func TestProgramWithoutCgo(t *testing.T) {
	goTool, err := exec.LookPath("go")
	if err != nil {
		t.Skip("needs the go command: ", err)
	}
	program := filepath.Join(t.TempDir(), "torchstream")
	build := exec.Command(goTool, "build", "-o", program, ".")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("got %v, want a program\n%s", err, out)
	}
	site := t.TempDir()
	write(t, filepath.Join(site, "torch", "lib", "libtorch_cpu.so"), "")
	for _, c := range []struct {
		args   []string
		status int
		stdout string // printed on stdout
		stderr string // printed on stderr
	}{
		{[]string{"doctor"}, 1, "-> `make setup` as root, or: apt-get install g++\n", ""},
		{[]string{"setup", "-only-libtorch"}, 0, site + "\n", ""},
		{[]string{"setup", "-only-libtorch", "-cpu", "-libtorch", "2.15"}, 1, "", "it goes with neither -libtorch"},
		{[]string{"setup", "-only-libtorch", "2.15"}, 1, "", `unexpected argument "2.15"`},
		{[]string{"doctor", "x"}, 1, "", `unexpected argument "x"`},
		{[]string{"setup"}, 1, "", "without cgo"},
		{[]string{"train"}, 1, "", "install a C compiler (apt-get install gcc"},
		{nil, 1, "", "without cgo"},
	} {
		run := exec.Command(program, c.args...)
		run.Env = []string{"PATH=", "HOME=/nowhere", "LIBTORCH=" + site}
		var stderr strings.Builder
		run.Stderr = &stderr
		stdout, _ := run.Output() // the status says whether it failed
		if status := run.ProcessState.ExitCode(); status != c.status ||
			!strings.Contains(string(stdout), c.stdout) || !strings.Contains(stderr.String(), c.stderr) ||
			(c.stderr == "") != (stderr.Len() == 0) {
			t.Errorf("%q: got status %d, stdout %q, stderr %q; want status %d, %q and %q in them", c.args,
				status, stdout, &stderr, c.status, c.stdout, c.stderr)
		}
	}
}

// The options of setup that contradict each other are refused before anything is installed.
func TestSetupOptionsThatContradict(t *testing.T) {
	for _, args := range [][]string{{"-only-libtorch", "-from", "x"}, {"-only-libtorch", "-image"},
		{"-cpu", "-image"}, {"-cpu", "-from", "x"}, {"-cpu", "-libtorch", "2.15"}} {
		if status, stdout, stderr := command(t, append([]string{"setup"}, args...)...); status != 2 ||
			stdout != "" || !strings.Contains(stderr, "it goes with neither ") {
			t.Errorf("setup %q: got status %d, stdout %q, stderr %q; want status 2 and a message", args,
				status, stdout, stderr)
		}
	}
}
