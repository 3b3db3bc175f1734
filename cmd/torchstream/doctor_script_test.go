package main

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// doctorScript runs a copy of tools/doctor.sh in a clone that contains only the files from prepare,
// with only the given tools in PATH. It returns the rows, keyed by their second column.
func doctorScript(t *testing.T, tools []string, prepare func(clone string)) (rows map[string]string, status int) {
	t.Helper()
	script, err := os.ReadFile("../../tools/doctor.sh")
	if err != nil {
		t.Skip("needs the repository: ", err)
	}
	path, clone := t.TempDir(), t.TempDir()
	for _, tool := range append(tools, "bash", "env") {
		at, err := exec.LookPath(tool)
		if err != nil {
			t.Skip("needs ", tool, ": ", err)
		}
		if err := os.Symlink(at, filepath.Join(path, tool)); err != nil {
			t.Fatal(err)
		}
	}
	write(t, filepath.Join(clone, "tools/doctor.sh"), string(script))
	prepare(clone)
	command := exec.Command(filepath.Join(path, "bash"), filepath.Join(clone, "tools/doctor.sh"))
	command.Env = []string{"PATH=" + path, "HOME=" + clone}
	var stderr bytes.Buffer
	command.Stderr = &stderr
	out, err := command.Output()
	if exit := new(exec.ExitError); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	if stderr.Len() > 0 {
		t.Errorf("the script wrote to stderr: %s", &stderr)
	}
	rows = map[string]string{}
	for _, m := range regexp.MustCompile(`(?m)^(ok|note|missing) +(\S+( \S+)*)  +(.*)$`).FindAllStringSubmatch(string(out), -1) {
		rows[m[2]] = m[1] + " " + m[4]
	}
	return rows, command.ProcessState.ExitCode()
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// On a nearly empty machine the script names what is missing, and fails.
func TestDoctorScriptOnABareMachine(t *testing.T) {
	rows, status := doctorScript(t, nil, func(string) {})
	if status != 1 {
		t.Errorf("status %d, want 1", status)
	}
	for _, name := range []string{"Go", "Python", "g++", "make", "cmake", "ninja", "LibTorch", "image library", "shim"} {
		if !strings.HasPrefix(rows[name], "missing") {
			t.Errorf("%s: %q, want it missing", name, rows[name])
		}
	}
	if !strings.HasPrefix(rows["system"], "ok") {
		t.Errorf("system: %q", rows["system"])
	}
}

func TestDoctorScriptFindsTools(t *testing.T) {
	rows, _ := doctorScript(t, []string{"go", "make", "g++", "df"}, func(string) {})
	for _, name := range []string{"Go", "make", "g++", "disk"} {
		if !strings.HasPrefix(rows[name], "ok") {
			t.Errorf("%s: %q, want ok", name, rows[name])
		}
	}
}

func TestDoctorScriptLooksAtTheShim(t *testing.T) {
	const library, cache = "cshim/build/lib/libtorchstream.so", "cshim/build/CMakeCache.txt"
	for _, c := range []struct {
		name    string
		prepare func(clone string)
		want    string
	}{
		{"of this clone", func(clone string) {
			write(t, filepath.Join(clone, "cshim/src/a.cc"), "")
			write(t, filepath.Join(clone, cache), "CMAKE_HOME_DIRECTORY:INTERNAL="+clone+"/cshim\n")
			write(t, filepath.Join(clone, library), "")
		}, "ok "},
		{"of another clone", func(clone string) {
			write(t, filepath.Join(clone, cache), "CMAKE_HOME_DIRECTORY:INTERNAL=/elsewhere/cshim\n")
			write(t, filepath.Join(clone, library), "")
		}, "missing .*/elsewhere/cshim"},
		{"older than a source", func(clone string) {
			write(t, filepath.Join(clone, cache), "CMAKE_HOME_DIRECTORY:INTERNAL="+clone+"/cshim\n")
			write(t, filepath.Join(clone, library), "")
			source := filepath.Join(clone, "cshim/src/cuda/a.cc")
			write(t, source, "")
			info, err := os.Stat(filepath.Join(clone, library))
			if err != nil {
				t.Fatal(err)
			}
			later := info.ModTime().Add(1e9)
			if err := os.Chtimes(source, later, later); err != nil {
				t.Fatal(err)
			}
		}, "note older than .*cshim/src/cuda/a.cc"},
		{"built elsewhere", func(clone string) { write(t, filepath.Join(clone, library), "") }, "note .*built elsewhere"},
	} {
		t.Run(c.name, func(t *testing.T) {
			rows, _ := doctorScript(t, nil, c.prepare)
			if !regexp.MustCompile("^" + c.want).MatchString(rows["shim"]) {
				t.Errorf("%q, want %q", rows["shim"], c.want)
			}
		})
	}
}
