package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Every edge is where the table says, and its test exists. That leaving it out makes the test fail is what the program itself shows.
func TestEdgesAreUpToDate(t *testing.T) {
	names := map[string]bool{}
	for _, e := range edges {
		if names[e.name] {
			t.Errorf("two edges are named %q", e.name)
		}
		names[e.name] = true
		if text, err := e.mutated("../.."); err != nil {
			t.Errorf("%s: %v", e.name, err)
		} else if e.old == e.new || text == "" {
			t.Errorf("%s: nothing is left out", e.name)
		}
		pattern, want := filepath.Join("../..", e.folder, "*_test.go"), "func "+e.test+"(t *testing.T)"
		if e.folder == "cshim" {
			suite, name, _ := strings.Cut(e.test, ".")
			pattern, want = "../../cshim/test/*_test.cc", "TEST("+suite+", "+name+")"
		}
		files, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		found := false
		for _, f := range files {
			text, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			found = found || strings.Contains(string(text), want)
		}
		if !found {
			t.Errorf("%s: no %s in %s", e.name, want, e.folder)
		}
	}
}
