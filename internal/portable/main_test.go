package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// module writes the files of a module to a new folder, which becomes the current one.
func module(t *testing.T, files map[string]string) {
	t.Helper()
	dir := t.TempDir()
	files["go.mod"] = "module example.com/p\n\ngo 1.25.0\n"
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	t.Chdir(dir)
}

// TestCheckFindsWhatOtherPlatformsLack checks packages for each platform.
func TestCheckFindsWhatOtherPlatformsLack(t *testing.T) {
	const linuxOnly = "package p\n\nimport \"syscall\"\n\nvar Flag = syscall.EPOLLIN\n"
	module(t, map[string]string{
		"plain/a.go":         "package p\n\nconst A = 1\n",
		"symbol/a.go":        linuxOnly,
		"guarded/a_linux.go": linuxOnly,
		"guarded/a_other.go": "//go:build !linux\n\npackage p\n\nconst Flag = 0\n",
		"tested/a.go":        "package p\n",
		"tested/a_test.go":   strings.Replace(linuxOnly, "package p", "package p_test", 1),
		"stub/a.go":          "package p\n\nfunc F() { stub() }\n",
		"stub/a_windows.go":  "package p\n\nfunc stub() {}\n",
		"imports/a.go":       "package p\n\nimport _ \"example.com/p/cgo\"\n",
		"cgo/a.go":           "package cgo\n\nimport \"C\"\n",
		"broken/a.go":        "package p\n",
		"broken/a_darwin.go": "package p\n\nfunc F( {\n",
		"absent/a.go":        "package p\n\nimport _ \"example.com/p/none\"\n",
	})
	const unixes, all = "linux/arm64 linux/amd64 darwin/arm64", "linux/arm64 linux/amd64 darwin/arm64 windows/amd64"
	want := map[string]string{ // platforms by the words of an error
		"symbol/a.go:5:20: undefined: syscall.EPOLLIN":          "darwin/arm64 windows/amd64",
		"tested/a_test.go:5:20: undefined: syscall.EPOLLIN":     "darwin/arm64 windows/amd64",
		"stub/a.go:3:12: undefined: stub":                       unixes,
		"imports/a.go:3:10: could not import example.com/p/cgo": all,
		"broken/a_darwin.go:3:9: ":                              "darwin/arm64",
		"absent/a.go:3:10: could not import example.com/p/none": all,
	}
	for _, platform := range platforms {
		found := check(platform, []string{"./..."})
		for says, on := range want {
			if is, want := strings.Contains(fmt.Sprint(found), says), strings.Contains(on, platform); is != want {
				t.Errorf("%s: got the error %q: %t, want %t; all errors: %v", platform, says, is, want, found)
			}
		}
		for _, err := range found {
			for _, good := range []string{"plain/", "guarded/"} {
				if strings.Contains(err.Error(), good) {
					t.Errorf("%s: got error %v, want none in %s", platform, err, good)
				}
			}
		}
	}
}

// TestPatternsWithoutPackagesAreErrors: a check of nothing would always pass.
func TestPatternsWithoutPackagesAreErrors(t *testing.T) {
	module(t, map[string]string{"cgo/a.go": "package p\n\nimport \"C\"\n"})
	if found := check("linux/arm64", []string{"./..."}); len(found) != 1 ||
		!strings.Contains(found[0].Error(), "no package has a file for it in ./...") {
		t.Errorf("got errors %v, want one about the pattern", found)
	}
}
