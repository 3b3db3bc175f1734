package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// The program in README.md compiles unchanged.
func TestReadmeProgramCompiles(t *testing.T) {
	text, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Skip("needs the repository: ", err)
	}
	goTool, err := exec.LookPath("go")
	if err != nil {
		t.Skip("needs Go: ", err)
	}
	_, program, found := strings.Cut(string(text), "```go\npackage main\n")
	program, _, closed := strings.Cut(program, "```\n")
	if !found || !closed {
		t.Fatalf("README.md: found the start of a program %v and its end %v, want both", found, closed)
	}
	file := filepath.Join(t.TempDir(), "main.go")
	if err := os.WriteFile(file, []byte("package main\n"+program), 0o666); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(goTool, "vet", file).CombinedOutput(); err != nil {
		t.Errorf("%v\n%s\nwant no error", err, out)
	}
}
