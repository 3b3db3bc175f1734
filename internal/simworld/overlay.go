package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

const (
	module = "github.com/torchstream/torchstream"
	own    = module + "/internal/simworld/"
)

// replaced maps an import of the product to the package that replaces it in a simulation.
var replaced = map[string]string{
	"os":                           own + "os",
	"sync":                         own + "sync",
	module + "/internal/imagecapi": own + "imagecapi",
	module + "/internal/system":    own + "system",
}

// replacedBelow maps imports that are replaced only in the packages below a folder of the product.
var replacedBelow = map[string]map[string]string{
	"internal/simworld/savesim": {module + "/torch": own + "torch"},
	"internal/control":          {"net": own + "net", "time": own + "time"},
	"checkpoint": {
		"crypto/rand":     own + "rand",
		module + "/cuda":  own + "cuda",
		module + "/torch": own + "torch",
	},
}

// replacement returns the package that replaces an import in a file.
func replacement(file, path string) (string, bool) {
	if to, ok := replaced[path]; ok {
		return to, true
	}
	for folder, imports := range replacedBelow {
		if to, ok := imports[path]; ok && strings.HasPrefix(file, folder+"/") {
			return to, true
		}
	}
	return "", false
}

// real lists packages whose imports stay: the replacements use them, or no scenario calls them.
var real = []string{"cuda", "imageloader/internal/hostmem", "internal/capi", "internal/imagecapi", "internal/library",
	"internal/system", "torch"}

// writeOverlay writes copies of the product's files into folder, with other imports, and a file for
// go build -overlay. It returns the path of that file. changed maps paths in the repository to
// files that are taken instead of the product's.
func writeOverlay(root, folder string, changed map[string]string) (string, error) {
	files, err := productFiles(root)
	if err != nil {
		return "", err
	}
	replace := map[string]string{}
	for _, file := range files {
		from, to := filepath.Join(root, file), filepath.Join(folder, strings.ReplaceAll(file, "/", "_"))
		source := from
		if c, ok := changed[file]; ok {
			source = c
		}
		text, err := os.ReadFile(source)
		if err != nil {
			return "", err
		}
		after, err := withImports(file, string(text))
		if err != nil {
			return "", err
		}
		if after == string(text) && source == from {
			continue
		}
		if err := os.WriteFile(to, []byte(after), 0o666); err != nil {
			return "", err
		}
		replace[from] = to
	}
	text, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return "", err
	}
	path := filepath.Join(folder, "overlay.json")
	return path, os.WriteFile(path, text, 0o666)
}

// productFiles lists the Go files of the packages that the simulated seeds run.
func productFiles(root string) ([]string, error) {
	text, err := output(root, "go", "list", "-deps", "-tags", tag, "-f",
		`{{if .Module}}{{$d := .Dir}}{{range .GoFiles}}{{$d}}/{{.}}{{"\n"}}{{end}}{{end}}`, "-test", own+"seeds")
	if err != nil {
		return nil, err
	}
	var files []string
	for line := range strings.Lines(text) {
		file, err := filepath.Rel(root, strings.TrimSpace(line))
		if err != nil {
			return nil, err
		}
		folder := filepath.ToSlash(filepath.Dir(file))
		_, below := replacedBelow[folder]
		if strings.HasPrefix(file, "..") || slices.Contains(real, folder) ||
			strings.HasPrefix(folder, "internal/simworld") && !below {
			continue
		}
		files = append(files, filepath.ToSlash(file))
	}
	slices.Sort(files)
	files = slices.Compact(files)
	if len(files) == 0 {
		return nil, errors.New("no file of the product is simulated")
	}
	return files, nil
}

// withImports returns the text of a Go file with the imports of a simulation.
func withImports(file, text string) (string, error) {
	set := token.NewFileSet()
	f, err := parser.ParseFile(set, file, text, parser.ImportsOnly)
	if err != nil {
		return "", err
	}
	for _, s := range slices.Backward(f.Imports) {
		path, err := strconv.Unquote(s.Path.Value)
		if err != nil {
			return "", fmt.Errorf("%s: import %s: %w", file, s.Path.Value, err)
		}
		if to, ok := replacement(file, path); ok {
			at, end := set.Position(s.Path.Pos()).Offset, set.Position(s.Path.End()).Offset
			text = text[:at] + strconv.Quote(to) + text[end:]
		}
	}
	return text, nil
}
