package main

import (
	"bytes"
	"os"
	"strings"
	"testing"
)

// The files of the packages are those of today's headers.
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
		t.Fatalf("got %v", all)
	}
	for i := range want {
		if all[i] != want[i] {
			t.Errorf("got %+v, want %+v", all[i], want[i])
		}
	}
	if _, err := functions("TS_API int ts_a(void (*callback)(int));"); err == nil || !strings.Contains(err.Error(), "0 can be read") {
		t.Errorf("a declaration that cannot be read: %v", err)
	}
}
