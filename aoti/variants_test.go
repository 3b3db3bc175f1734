package aoti

import (
	"archive/zip"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
)

// file is a member of a package.
type file struct {
	name   string
	data   []byte
	method uint16
}

// repacked writes tiny.pt2 with other members to a new file, and returns its path.
func repacked(t *testing.T, change func(files []file) []file) string {
	t.Helper()
	all, err := zip.OpenReader(tiny)
	if err != nil {
		t.Fatal(err)
	}
	defer all.Close()
	var files []file
	for _, f := range all.File {
		r, err := f.Open()
		if err != nil {
			t.Fatal(err)
		}
		data, err := io.ReadAll(r)
		if err := errors.Join(err, r.Close()); err != nil {
			t.Fatal(err)
		}
		files = append(files, file{f.Name, data, zip.Store})
	}
	var b bytes.Buffer
	w := zip.NewWriter(&b)
	for _, f := range change(files) {
		to, err := w.CreateHeader(&zip.FileHeader{Name: f.name, Method: f.method})
		if err == nil {
			_, err = to.Write(f.data)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "changed.pt2")
	if err := os.WriteFile(path, b.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// isMetadata reports whether a member is the metadata of a model.
func isMetadata(f file) bool { return strings.HasSuffix(f.name, "wrapper_metadata.json") }

// withMetadata returns the path of tiny.pt2 with changed metadata.
func withMetadata(t *testing.T, change func(metadata map[string]string)) string {
	t.Helper()
	return repacked(t, func(files []file) []file {
		for i, f := range files {
			if !isMetadata(f) {
				continue
			}
			var metadata map[string]string
			if err := json.Unmarshal(f.data, &metadata); err != nil {
				t.Fatal(err)
			}
			change(metadata)
			text, err := json.Marshal(metadata)
			if err != nil {
				t.Fatal(err)
			}
			files[i].data = text
		}
		return files
	})
}

// loadChanged loads a changed tiny.pt2.
func loadChanged(t *testing.T, path string, o Options) *Model {
	t.Helper()
	if runtime.GOARCH != "amd64" {
		t.Skip("the package has code for amd64")
	}
	t.Setenv("TMPDIR", t.TempDir())
	m, err := Load(path, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	return m
}

// A package that torch._inductor.aoti_compile_and_package has written, without tools/export.py, has
// no description. Its inputs and outputs have the names that PyTorch recorded: mask is a keyword.
func TestPackageWithoutADescriptionRuns(t *testing.T) {
	path := withMetadata(t, func(metadata map[string]string) { delete(metadata, descriptionKey) })
	p, err := Open(path)
	if err != nil || p.Models[0].Inputs != nil {
		t.Fatalf("Open: got the inputs %v, error %v, want none", p.Models[0].Inputs, err)
	}
	m := loadChanged(t, path, Options{})
	var names []string
	for _, v := range append(m.Inputs, m.Outputs...) {
		names = append(names, v.Name)
	}
	if got, want := strings.Join(names, ", "), "argument 0, mask, logits, sums"; got != want {
		t.Errorf("got the inputs and outputs %s, want %s", got, want)
	}
	if got := m.Device(); got != cuda.CPU {
		t.Errorf("got the device %v, want the CPU", got)
	}
	x, mask := inputs(t)
	got, err := run(m, x, mask)
	if err != nil {
		t.Fatal(err)
	}
	near(t, got, results(t))
}

// A package may have several models. Load loads one of them by its name.
func TestModelIsChosenByItsName(t *testing.T) {
	path := repacked(t, func(files []file) []file {
		for _, f := range files {
			if strings.Contains(f.name, "/aotinductor/model/") {
				f.name = strings.Replace(f.name, "/aotinductor/model/", "/aotinductor/other/", 1)
				files = append(files, f)
			}
		}
		return files
	})
	for name, says := range map[string]string{"": "it has 2 models, model, other: choose one with Options.Model",
		"third": `it has no model "third"; it has model, other`} {
		if _, err := Load(path, Options{Model: name}); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("Load of %q: got the error %v, want one with %q", name, err, says)
		}
	}
	m := loadChanged(t, path, Options{Model: "other"})
	if m.Name != "other" {
		t.Errorf("got the model %q, want %q", m.Name, "other")
	}
	x, mask := inputs(t)
	got, err := run(m, x, mask)
	if err != nil {
		t.Fatal(err)
	}
	near(t, got, results(t))
}

// A package that PyTorch could not have written is refused before its code is unpacked.
func TestImpossiblePackagesAreRefused(t *testing.T) {
	twice := func(files []file) []file { return append(files, files...) }
	compressed := func(files []file) []file {
		for i := range files {
			files[i].method = zip.Deflate
		}
		return files
	}
	text := func(text string) func(files []file) []file {
		return func(files []file) []file {
			for i := range files {
				if isMetadata(files[i]) {
					files[i].data = []byte(text)
				}
			}
			return files
		}
	}
	described := func(text string) string {
		return withMetadata(t, func(metadata map[string]string) { metadata[descriptionKey] = text })
	}
	for says, path := range map[string]string{
		"is there twice":                    repacked(t, twice),
		"is compressed, which PyTorch does": repacked(t, compressed),
		"_metadata.json\": ":                repacked(t, text("[]")),
		"has 16777217 bytes, more than":     repacked(t, text(strings.Repeat(" ", 16<<20+1))),
		`metadata "torchstream": `:          described("none"),
		`"x" has an impossible size 0`:      described(`{"inputs": [{"name": "x", "shape": [[5, 4]]}]}`),
		`"mask" has an impossible size 1`:   described(`{"inputs": [{"name": "mask", "shape": [[1, 2], [-1, 4]]}]}`),
		`"logits" has an impossible size 0`: described(`{"outputs": [{"name": "logits", "shape": [[null, 4]]}]}`),
	} {
		if _, err := Open(path); !errors.Is(err, ErrFormat) || !strings.Contains(err.Error(), says) {
			t.Errorf("Open: got the error %v, want ErrFormat with %q", err, says)
		}
		t.Setenv("TMPDIR", t.TempDir())
		if _, err := Load(path, Options{}); !errors.Is(err, ErrFormat) || !strings.Contains(err.Error(), says) {
			t.Errorf("Load: got the error %v, want ErrFormat with %q", err, says)
		}
		if left, _ := filepath.Glob(filepath.Join(os.TempDir(), "*")); len(left) > 0 {
			t.Errorf("%s: Load left %v, want nothing", says, left)
		}
	}
	if _, err := Load(tiny, Options{Instances: -1}); err == nil || !strings.Contains(err.Error(), "Options.Instances is -1") {
		t.Errorf("got the error %v, want one about Instances", err)
	}
	if _, err := Load("absent.pt2", Options{}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got the error %v, want os.ErrNotExist", err)
	}
}

// A structure of another version, or with too many levels, is an error.
func TestStructuresOfOtherKindsAreErrors(t *testing.T) {
	deep := strings.Repeat(`{"type": "builtins.list", "context": "null", "children_spec": [`, 200) + `{"type": null}` +
		strings.Repeat("]}", 200)
	for text, says := range map[string]string{
		"":                    "unexpected end",
		`[2, {"type": null}]`: "version is not 1",
		`[1]`:                 "version is not 1",
		`[1, 5]`:              "cannot unmarshal",
		"[1, " + deep + "]":   "more than 100 levels",
	} {
		if found, err := leaves(text); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%.30s: got %v, error %v, want one with %q", text, found, err, says)
		}
	}
	const wrongKeys = `[1, {"type": "builtins.dict", "context": "[\"a\"]", "children_spec": [{"type": null}, {"type": null}]}]`
	found, err := leaves(wrongKeys)
	if err != nil || len(found) != 2 || found[0].Name != "0" || found[1].Name != "1" {
		t.Errorf("a dictionary with one key for two children: got %v, error %v, want the names 0 and 1", found, err)
	}
}
