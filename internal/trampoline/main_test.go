package main

import (
	"bytes"
	"os"
	"strings"
	"testing"
)

// The files of the packages are those of today's headers.
func TestTablesAreUpToDate(t *testing.T) {
	const include = "../../cshim/include/"
	for name, headers := range map[string][]string{
		"imagecapi": {include + "torchstream_image.h"},
		"capi":      {include + "torchstream.h", include + "bench/torchstream_bench.h"},
	} {
		want, err := generate("../"+name, headers)
		if err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile("../" + name + "/table_gen.c")
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("internal/%s/table_gen.c is out of date: go generate ./internal/%s", name, name)
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
