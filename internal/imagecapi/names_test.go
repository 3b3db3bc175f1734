package imagecapi

import (
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

func TestExportedNamesOfFrames(t *testing.T) {
	for function, want := range map[string][2]string{
		"cuda.(*Event).Elapsed":                              {"cuda", "Event.Elapsed"},
		"cuda.Stream.Synchronize":                            {"cuda", "Stream.Synchronize"},
		"cuda.NewOwnedStream":                                {"cuda", "NewOwnedStream"},
		"torch.Full[...]":                                    {"torch", "Full"},
		"torch.(*Future[go.shape.struct { X.Y int }]).Await": {"torch", "Future.Await"},
		"imageloader/decode.(*Decoder).Decode":               {"imageloader/decode", "Decoder.Decode"},
		"internal/capi.EventElapsed":                         {"internal/capi", "EventElapsed"},
		"internal/capi.failure":                              {"internal/capi", ""},
		"cuda.(*graph).Replay":                               {"cuda", ""},
		"cuda.(*Event).record":                               {"cuda", ""},
		"cuda.EmptyCache.func1":                              {"cuda", ""},
		"cuda.(*Slab).Close.gowrap2":                         {"cuda", ""},
		"cuda.init":                                          {"cuda", ""},
	} {
		if folder, name := exported(function); folder != want[0] || name != want[1] {
			t.Errorf("%s: package %q, name %q, want %q", function, folder, name, want)
		}
	}
}

// An error from C has the name of the Go function. This test's functions are not part of the
// module.
func TestErrorsNameTheCall(t *testing.T) {
	_, err := Header([]byte("text"))
	var e *Error
	if !errors.As(err, &e) || e.Origin != "Header" {
		t.Errorf("the error is %#v, want one of Header", err)
	}
}

func TestNamesOfCBecomeThoseOfGo(t *testing.T) {
	for message, want := range map[string]string{
		"elapsed time needs two events with TS_EVENT_FLAG_TIMING": "elapsed time needs two events with " +
			"cuda.EventOptions{Timing: true}",
		"call ts_tensor_backward, or ts_stream_release": "call torch.Tensor.Backward, or " +
			"cuda.OwnedStream.Close",
		"ts_stream_acquire":     "cuda.NewOwnedStream",
		"events_ts_x of aTS_1":  "events_ts_x of aTS_1",
		"ts":                    "ts",
		"":                      "",
		"of ts_of_nobody: none": "of ts_of_nobody: none",
	} {
		if got := goWords(message); got != want {
			t.Errorf("%q became %q, want %q", message, got, want)
		}
	}
}

// literal matches a C++ string. It also matches a comment, where quotes have no meaning.
var literal = regexp.MustCompile(`//[^\n]*|(?s:/\*.*?\*/)|#include[^\n]*|guard\("\w+"|"(?:[^"\\\n]|\\.)*"`)

// namesInMessages returns the C header names in the strings of the C++ sources, each with a file.
// It skips the first argument of guard and the origin of the out-of-memory error, which are not
// messages.
func namesInMessages(t *testing.T) map[string]string {
	t.Helper()
	const root = "../../cshim/src"
	if _, err := os.Stat(root); errors.Is(err, fs.ErrNotExist) {
		t.Skip("reads the C++ sources, which are not here")
	}
	found := map[string]string{}
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || !slices.Contains([]string{".cc", ".cu", ".h"}, filepath.Ext(path)) {
			return err
		}
		text, err := os.ReadFile(path)
		for _, l := range literal.FindAllString(string(text), -1) {
			if l[0] != '"' || l == `"ts_error_new"` {
				continue
			}
			for start, end := cName(l); start >= 0; start, end = cName(l) {
				found[l[start:end]] = path
				l = l[end:]
			}
		}
		return err
	})
	if err != nil || len(found) == 0 {
		t.Fatalf("%d names in the strings of %s, error %v, want some", len(found), root, err)
	}
	return found
}

// If a message names a C function or constant, a Go program sees the Go name.
func TestMessagesOfCHaveGoNames(t *testing.T) {
	names := namesInMessages(t)
	for _, name := range slices.Sorted(maps.Keys(names)) {
		if goName(name) == name {
			t.Errorf("%s: a message names %s, for which goName has no name of Go", names[name], name)
		}
	}
	text, err := os.ReadFile("names.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range regexp.MustCompile(`case "(\w+)":\n\t\treturn "([^"]+)"`).FindAllStringSubmatch(
		string(text), -1) {
		if names[m[1]] == "" {
			t.Errorf("goName has %s, which no message names", m[1])
		}
		if !goHas(t, m[2]) {
			t.Errorf("goName(%s) is %s, which does not exist", m[1], m[2])
		}
	}
}

// goHas reports whether a package declares a name, such as cuda.OwnedStream.Close, or a field in a
// literal, such as cuda.EventOptions{Timing: true}.
func goHas(t *testing.T, name string) bool {
	t.Helper()
	pkg, rest, found := strings.Cut(name, ".")
	folder := map[string]string{"decode": "imageloader/decode", "transform": "imageloader/transform"}[pkg]
	switch {
	case !found:
		folder, rest = "internal/imagecapi", name
	case folder == "":
		folder = pkg
	}
	rest, _, _ = strings.Cut(strings.Replace(rest, "{", ".", 1), ":")
	files, err := filepath.Glob(filepath.Join("../..", folder, "*.go"))
	if err != nil || len(files) == 0 {
		t.Fatalf("%s: no files, error %v", folder, err)
	}
	for _, path := range files {
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		if slices.Contains(declared(file), rest) {
			return true
		}
	}
	return false
}

// declared returns the names of a file's functions, methods, types, fields and constants.
func declared(file *ast.File) (names []string) {
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.FuncDecl:
			name := n.Name.Name
			if n.Recv != nil {
				of := n.Recv.List[0].Type
				if star, ok := of.(*ast.StarExpr); ok {
					of = star.X
				}
				if id, ok := of.(*ast.Ident); ok {
					name = id.Name + "." + name
				}
			}
			names = append(names, name)
		case *ast.TypeSpec:
			names = append(names, n.Name.Name)
			if s, ok := n.Type.(*ast.StructType); ok {
				for _, f := range s.Fields.List {
					for _, id := range f.Names {
						names = append(names, n.Name.Name+"."+id.Name)
					}
				}
			}
		case *ast.ValueSpec:
			for _, id := range n.Names {
				names = append(names, id.Name)
			}
		}
		return true
	})
	return names
}
