package main

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// Every edge's text is in its file, and its test exists. The program itself shows that the test
// fails without the edge.
func TestEdgesAreUpToDate(t *testing.T) {
	names := map[string]bool{}
	for _, e := range edges {
		if names[e.name] {
			t.Errorf("two edges are named %q", e.name)
		}
		names[e.name] = true
		if text, err := e.mutated("../.."); err != nil {
			t.Errorf("%s: %v, want no error", e.name, err)
		} else if e.old == e.new || text == "" {
			t.Errorf("%s: the mutation changes nothing", e.name)
		}
		pattern, want := filepath.Join("../..", e.folder, "*_test.go"), "func "+e.test+"(t *testing.T)"
		if e.folder == "cshim" {
			suite, name, _ := strings.Cut(e.test, ".")
			pattern, want = "../../cshim/test/*/*_test.cc", "TEST("+suite+", "+name+")"
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

// docs/streams.md lists the current edges, and every test that it names exists.
func TestDocumentIsUpToDate(t *testing.T) {
	text, err := os.ReadFile("../../docs/streams.md")
	if err != nil {
		t.Fatal(err)
	}
	doc := string(text)
	_, after, ok := strings.Cut(doc, "<!-- edges: go run ./internal/mutate -list -->\n")
	listed, _, ok2 := strings.Cut(after, "<!-- end of edges -->")
	if !ok || !ok2 || strings.TrimSpace(listed) != strings.TrimSpace(table()) {
		t.Errorf("the list of edges is\n%s\nwant what `go run ./internal/mutate -list` prints:\n%s", listed, table())
	}
	exist := map[string]bool{}
	defined := regexp.MustCompile(`(?m)^func (Test\w+)\(|^TEST\((\w+), (\w+)\)`)
	err = filepath.WalkDir("../..", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && slices.Contains([]string{".git", "build", "gpu-bundle"}, d.Name()):
			return filepath.SkipDir
		case !strings.HasSuffix(path, "_test.go") && !strings.HasSuffix(path, "_test.cc"):
			return nil
		}
		text, err := os.ReadFile(path)
		for _, m := range defined.FindAllStringSubmatch(string(text), -1) {
			if m[1] != "" {
				exist[m[1]] = true
			} else {
				exist[m[2]+"."+m[3]] = true
			}
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	named := regexp.MustCompile("`(Test[A-Z]\\w+|[A-Z]\\w*Gpu\\.[A-Z]\\w+)`").FindAllStringSubmatch(doc, -1)
	for _, m := range named {
		if !exist[m[1]] {
			t.Errorf("docs/streams.md names %s, which does not exist", m[1])
		}
	}
	if len(named) < 40 {
		t.Errorf("docs/streams.md names %d tests, want at least 40", len(named))
	}
	// The table has ten mistakes, and each names a test.
	mistakes := regexp.MustCompile(`(?m)^\| (\d+) \|.*\|$`).FindAllString(doc, -1)
	if len(mistakes) != 10 {
		t.Errorf("%d mistakes, want 10", len(mistakes))
	}
	test := regexp.MustCompile("`(Test|[A-Z]\\w*Gpu\\.)")
	for _, m := range mistakes {
		cells := strings.Split(m, "|")
		if !test.MatchString(cells[len(cells)-2]) {
			t.Errorf("no test: %s", m)
		}
	}
}
