package main

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
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

// Every link between documents points to a file or heading that exists.
func TestLinksOfDocumentsExist(t *testing.T) {
	pages, err := filepath.Glob("../../docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	if len(pages) == 0 {
		t.Skip("needs the repository")
	}
	pages = append(pages, "../../README.md", "../../CONTRIBUTING.md", "../../lab/journal.md")
	link, code := regexp.MustCompile(`\]\(([^)\s]+)\)`), regexp.MustCompile("(?s)```.*?```|`[^`\n]*`")
	links := 0
	for _, page := range pages {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range link.FindAllStringSubmatch(code.ReplaceAllString(string(text), "code"), -1) {
			path, heading, anchored := strings.Cut(m[1], "#")
			if strings.Contains(path, "://") {
				continue
			}
			links++
			to := page
			if path != "" {
				to = filepath.Join(filepath.Dir(page), path)
			}
			if _, err := os.Stat(to); err != nil {
				t.Errorf("%s links to %s: %v, want a file", page, m[1], err)
			} else if anchored && !headings(t, to)[heading] {
				t.Errorf("%s links to %s, want one of the headings of %s", page, m[1], to)
			}
		}
	}
	if links < 100 {
		t.Errorf("got %d links, want 100 or more", links)
	}
}

// Every test that docs/guarantees.md names exists.
func TestGuaranteesNameTests(t *testing.T) {
	text, err := os.ReadFile("../../docs/guarantees.md")
	if err != nil {
		t.Skip("needs the repository: ", err)
	}
	exist := map[string]bool{}
	defined := regexp.MustCompile(`(?m)^func (Test\w+)\(`)
	err = filepath.WalkDir("../..", func(path string, d fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		code, err := os.ReadFile(path)
		for _, m := range defined.FindAllSubmatch(code, -1) {
			exist[string(m[1])] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	named := regexp.MustCompile("`(Test\\w+)`").FindAllSubmatch(text, -1)
	for _, m := range named {
		if !exist[string(m[1])] {
			t.Errorf("docs/guarantees.md names %s, want a test that exists", m[1])
		}
	}
	if len(named) < 15 {
		t.Errorf("docs/guarantees.md names %d tests, want at least 15", len(named))
	}
}

// headings returns the anchors that GitHub gives to the headings of a document.
func headings(t *testing.T, page string) map[string]bool {
	t.Helper()
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	punctuation := regexp.MustCompile(`[^\p{L}\p{N} _-]`)
	found := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^#+ (.*)$`).FindAllStringSubmatch(string(text), -1) {
		found[strings.ReplaceAll(punctuation.ReplaceAllString(strings.ToLower(m[1]), ""), " ", "-")] = true
	}
	return found
}
