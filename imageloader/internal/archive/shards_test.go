package archive

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestShardPathsExpandPatterns(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"a1.tar", "a2.tar", "a3.tar", "a3.tar.tsidx", "a3.tar.tsidx.123.tmp",
		"a1.tar+2.tsidx.45.tmp", "odd{1..2}.tar"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for pattern, want := range map[string]string{
		"x.tar":             "x.tar",
		"{008..011}.tar":    "008.tar 009.tar 010.tar 011.tar",
		"{8..11}":           "8 9 10 11",
		"{a,b}{1..2}":       "a1 a2 b1 b2",
		"{x{1..2},y}.tar":   "x1.tar x2.tar y.tar",
		"a*.tar":            "a1.tar a2.tar a3.tar",
		"a*":                "a1.tar a2.tar a3.tar",
		"a[23].tar":         "a2.tar a3.tar",
		"odd{1..2}.tar":     "odd{1..2}.tar",
		"{3..1}":            "error",
		"{1..99999999}":     "error",
		"{a..b}":            "error",
		"{a":                "error",
		"none*":             "error",
		"{0..999}{0..999}x": "error",
	} {
		paths, err := ShardPaths(filepath.Join(dir, pattern),
			func(p string) bool { return strings.Contains(p, ".tsidx") })
		for i := range paths {
			paths[i] = strings.TrimPrefix(paths[i], dir+"/")
		}
		got := strings.Join(paths, " ")
		if err != nil {
			got = "error"
		}
		if got != want {
			t.Errorf("%s: %s, error %v; want %s", pattern, got, err, want)
		}
	}
}
