// Command portable checks that the module's packages and tests compile on other platforms.
//
//	go run ./internal/portable [PACKAGE...]
//
// It type-checks the packages and all their dependencies from source, with cgo off. It generates no
// code, so a platform takes 2 seconds of CPU time where go vet takes 45: go vet compiles the
// standard library first. The default is ./... in the current folder.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
)

// platforms are the GOOS/GOARCH that must compile without cgo.
var platforms = []string{"darwin/arm64", "windows/amd64", "linux/arm64", "linux/amd64"}

func main() {
	patterns := os.Args[1:]
	if len(patterns) == 0 {
		patterns = []string{"./..."}
	}
	bad := false
	for _, platform := range platforms {
		for _, err := range check(platform, patterns) {
			bad = true
			fmt.Fprintf(os.Stderr, "portable: %s: %v\n", platform, err)
		}
	}
	if bad {
		os.Exit(1)
	}
}

// listed is a package as `go list -json` describes it.
type listed struct {
	ImportPath string
	Dir        string
	GoFiles    []string
	ImportMap  map[string]string // import path in the source to ImportPath
	DepOnly    bool              // only a dependency
	Standard   bool
	Error      *struct{ Err string }
}

// list returns the packages of the patterns, their tests, and all dependencies, in import order.
func list(platform string, patterns []string) ([]listed, error) {
	goos, goarch, _ := strings.Cut(platform, "/")
	list := exec.Command("go", append([]string{"list", "-e", "-deps", "-test",
		"-json=ImportPath,Dir,GoFiles,ImportMap,DepOnly,Standard,Error", "--"}, patterns...)...)
	list.Env = append(os.Environ(), "GOOS="+goos, "GOARCH="+goarch, "CGO_ENABLED=0")
	list.Stderr = os.Stderr
	out, err := list.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := list.Start(); err != nil {
		return nil, err
	}
	var all []listed
	for d := json.NewDecoder(out); ; {
		var p listed
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			return all, list.Wait()
		} else if err != nil {
			return nil, errors.Join(err, list.Wait())
		}
		all = append(all, p)
	}
}

// check returns the errors of a platform.
func check(platform string, patterns []string) []error {
	all, err := list(platform, patterns)
	if err != nil {
		return []error{err}
	}
	_, goarch, _ := strings.Cut(platform, "/")
	c := checker{files: token.NewFileSet(), done: map[string]*types.Package{"unsafe": types.Unsafe},
		sizes: types.SizesFor("gc", goarch)}
	for _, p := range all {
		c.check(p)
	}
	if !slices.ContainsFunc(all, func(p listed) bool { return !p.DepOnly }) {
		return []error{fmt.Errorf("no package has a file for it in %s", strings.Join(patterns, " "))}
	}
	return c.found
}

type checker struct {
	files *token.FileSet
	sizes types.Sizes
	done  map[string]*types.Package
	found []error
}

// check type-checks a package. The packages that it imports must already be checked.
func (c *checker) check(p listed) {
	if p.Error != nil && !p.DepOnly {
		c.found = append(c.found, errors.New(p.Error.Err))
	}
	if p.ImportPath == "unsafe" || strings.HasSuffix(p.ImportPath, ".test") {
		return
	}
	config := types.Config{
		Importer:         from{c, p.ImportMap},
		Sizes:            c.sizes,
		IgnoreFuncBodies: p.DepOnly,
		Error: func(err error) {
			if !p.Standard { // the compiler declares more than go/types knows
				c.found = append(c.found, err)
			}
		},
	}
	path, _, _ := strings.Cut(p.ImportPath, " ")
	c.done[p.ImportPath], _ = config.Check(path, c.files, c.parse(p), nil)
}

// parse returns the syntax of a package's files.
func (c *checker) parse(p listed) []*ast.File {
	parsed := make([]*ast.File, len(p.GoFiles))
	errs := make([]error, len(p.GoFiles))
	slots := make(chan struct{}, runtime.GOMAXPROCS(0))
	var group sync.WaitGroup
	for i, name := range p.GoFiles {
		group.Go(func() {
			slots <- struct{}{}
			parsed[i], errs[i] = parser.ParseFile(c.files, filepath.Join(p.Dir, name), nil, parser.SkipObjectResolution)
			<-slots
		})
	}
	group.Wait()
	if err := errors.Join(errs...); err != nil {
		c.found = append(c.found, err)
	}
	return parsed
}

// from implements types.Importer for one package.
type from struct {
	*checker
	renamed map[string]string
}

func (f from) Import(path string) (*types.Package, error) {
	if other := f.renamed[path]; other != "" {
		path = other
	}
	if p := f.done[path]; p != nil {
		return p, nil
	}
	return nil, fmt.Errorf("no package %s", path)
}
