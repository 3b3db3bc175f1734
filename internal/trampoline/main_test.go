package main

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// The generated files match the headers.
func TestTablesAreUpToDate(t *testing.T) {
	const include = "cshim/include/"
	for folder, header := range map[string]string{
		"internal/imagecapi":   include + "torchstream_image.h",
		"internal/capi":        include + "torchstream.h",
		"lab/internal/labcapi": "lab/" + include + "torchstream_lab.h",
	} {
		const root = "../../"
		want, err := generate(root+folder, []string{root + header})
		if err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(root + folder + "/table_gen.c")
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("%s/table_gen.c is out of date: run go generate there", folder)
		}
	}
}

func TestFunctions(t *testing.T) {
	all, err := functions(`
#define TS_API __attribute__((visibility("default")))
/* TS_API void ts_commented(void); */
TS_API void ts_a(void);
TS_API const char* const* ts_b(const ts_x* x);
TS_API ts_error* ts_c(ts_tensor* const* tensors,
                      int64_t count);
`)
	if err != nil {
		t.Fatal(err)
	}
	want := []function{
		{"void", "ts_a", "void", ""},
		{"const char* const*", "ts_b", "const ts_x* x", "x"},
		{"ts_error*", "ts_c", "ts_tensor* const* tensors, int64_t count", "tensors, count"},
	}
	if len(all) != len(want) {
		t.Fatalf("got %v, want %d", all, len(want))
	}
	for i := range want {
		if all[i] != want[i] {
			t.Errorf("got %+v, want %+v", all[i], want[i])
		}
	}
	if _, err := functions("TS_API int ts_a(void (*callback)(int));"); err == nil ||
		!strings.Contains(err.Error(), "0 can be read") {
		t.Errorf("a declaration that cannot be read: %v, want an error with \"0 can be read\"", err)
	}
}

// whole reads the parts that a header includes, but not the headers that these parts include.
func TestHeaderIsReadWithItsParts(t *testing.T) {
	folder := t.TempDir()
	for name, text := range map[string]string{
		"all.h":           "#include \"torchstream/a.h\"\n#include \"other.h\"\nTS_API void ts_all(void);\n",
		"torchstream/a.h": "#include \"torchstream/b.h\"\nTS_API void ts_a(void);\n",
		"torchstream/b.h": "TS_API void ts_b(void);\n",
		"other.h":         "TS_API void ts_other(void);\n",
		"missing.h":       "#include \"torchstream/missing.h\"\n",
	} {
		path := filepath.Join(folder, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o777); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	text, err := whole(filepath.Join(folder, "all.h"))
	if err != nil {
		t.Fatal(err)
	}
	all, err := functions(text)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, f := range all {
		names = append(names, f.name)
	}
	if want := []string{"ts_all", "ts_a"}; !slices.Equal(names, want) {
		t.Errorf("got functions %q, want %q", names, want)
	}
	if _, err := whole(filepath.Join(folder, "missing.h")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a part that is missing: got error %v, want %v", err, fs.ErrNotExist)
	}
}
