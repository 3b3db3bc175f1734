//go:build notorch

package main

import (
	"os/exec"
	"strings"
	"testing"
)

// What needs LibTorch says that it is not in this build, and how to get it.
func TestCommandsWithoutLibTorch(t *testing.T) {
	for _, args := range [][]string{
		{"doctor"},
		{"train", "-archive", photos},
		{"bench", "streams"},
		{"bench", "loader", "-archive", photos, "-device", "cpu"},
		{"bench", "loader", "-archive", photos, "-contract", "train-float"},
	} {
		t.Run(strings.Join(args, " "), func(t *testing.T) {
			status, stdout, stderr := command(t, args...)
			if status != 1 || stdout != "" || !strings.Contains(stderr, "without the tag") {
				t.Errorf("status %d, stdout %q, stderr %q", status, stdout, stderr)
			}
		})
	}
	if _, stdout, _ := command(t, "help"); !strings.Contains(stdout, "no LibTorch") {
		t.Errorf("help does not say what is missing:\n%s", stdout)
	}
}

// The build imports nothing that links LibTorch.
func TestImportsWithoutLibTorch(t *testing.T) {
	goTool, err := exec.LookPath("go")
	if err != nil {
		t.Skip("needs Go: ", err)
	}
	out, err := exec.Command(goTool, "list", "-deps", "-tags", "notorch", ".").Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range strings.Fields(string(out)) {
		for _, refused := range []string{"/torch", "/cuda", "/prefetcher", "/train", "/internal/capi"} {
			if path == "github.com/torchstream/torchstream"+refused {
				t.Errorf("%s is imported", path)
			}
		}
	}
}
