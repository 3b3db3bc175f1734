package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// everywhere returns the same words of an error for all platforms.
func everywhere(says string) map[string]string {
	all := map[string]string{}
	for _, platform := range platforms {
		all[platform] = says
	}
	return all
}

// TestCheckFindsWhatOtherPlatformsLack checks small modules for each platform.
func TestCheckFindsWhatOtherPlatformsLack(t *testing.T) {
	const linuxOnly = "package p\n\nimport \"syscall\"\n\nvar Flag = syscall.EPOLLIN\n"
	for name, c := range map[string]struct {
		files map[string]string
		want  map[string]string // words of the error, by platform
	}{
		"plain Go": {files: map[string]string{"a.go": "package p\n\nconst A = 1\n"}},
		"a symbol of Linux": {files: map[string]string{"a.go": linuxOnly},
			want: map[string]string{"darwin/arm64": "a.go:5:20: undefined: syscall.EPOLLIN",
				"windows/amd64": "a.go:5:20: undefined: syscall.EPOLLIN"}},
		"a symbol of Linux in a file for Linux": {files: map[string]string{"a_linux.go": linuxOnly,
			"a_other.go": "//go:build !linux\n\npackage p\n\nconst Flag = 0\n"}},
		"a symbol of Linux in a test": {files: map[string]string{"a.go": "package p\n",
			"a_test.go": strings.Replace(linuxOnly, "package p", "package p_test", 1)},
			want: map[string]string{"darwin/arm64": "a_test.go:5:20: ", "windows/amd64": "a_test.go:5:20: "}},
		"a stub that is missing": {files: map[string]string{"a.go": "package p\n\nfunc F() { stub() }\n",
			"a_windows.go": "package p\n\nfunc stub() {}\n"},
			want: map[string]string{"darwin/arm64": "undefined: stub", "linux/arm64": "undefined: stub",
				"linux/amd64": "undefined: stub"}},
		"a file with cgo and no other": {files: map[string]string{"a.go": "package p\n\nimport \"C\"\n"},
			want: everywhere("no package has a file for it in ./...")},
		"an import of a package with cgo alone": {files: map[string]string{"a.go": "package p\n\nimport _ \"example.com/p/c\"\n",
			"c/c.go": "package c\n\nimport \"C\"\n"}, want: everywhere("a.go:3:10: could not import example.com/p/c")},
		"no Go": {files: map[string]string{"a_windows.go": "package p\n\nfunc F( {\n", "a.go": "package p\n"},
			want: map[string]string{"windows/amd64": "a_windows.go:3:9: "}},
		"a package that is missing": {files: map[string]string{"a.go": "package p\n\nimport _ \"example.com/p/none\"\n"},
			want: everywhere("example.com/p/none")},
	} {
		dir := t.TempDir()
		c.files["go.mod"] = "module example.com/p\n\ngo 1.25.0\n"
		for file, text := range c.files {
			if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, file)), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		t.Chdir(dir)
		for _, platform := range platforms {
			err := errors.Join(check(platform, []string{"./..."})...)
			if want := c.want[platform]; want == "" && err != nil ||
				want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
				t.Errorf("%s on %s: got errors %v, want %q", name, platform, err, want)
			}
		}
	}
}
