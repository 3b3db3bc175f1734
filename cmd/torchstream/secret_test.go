//go:build linux && cgo

package main

import (
	"fmt"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/torchstream/torchstream/internal/clitest"
)

// secretServer serves a file to requests with the secret. The value of most is the number of
// requests that it serves. It refuses later ones, as a store does after a URL's signature has
// expired.
func secretServer(t *testing.T, file string, most *atomic.Int64) (address string) {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		user, password, _ := r.BasicAuth()
		if user != "SECRET" || password != "SECRET" || r.URL.Query().Get("X-Amz-Signature") != "SECRET" {
			t.Errorf("%s has no secret", r.URL)
		}
		if most.Add(-1) < 0 {
			w.WriteHeader(http.StatusBadRequest)
			fmt.Fprint(w, "<Error><Code>ExpiredToken</Code><Message>SECRET</Message></Error>")
			return
		}
		http.ServeFile(w, r, file)
	}))
	t.Cleanup(server.Close)
	return strings.Replace(server.URL, "://", "://SECRET:SECRET@", 1) + "/" +
		filepath.Base(filepath.Dir(file)) + ".tar?X-Amz-Signature=SECRET"
}

// The user, password and query of a URL may be secret. No command prints or writes them, on success
// or failure.
func TestCommandsHaveNoSecretOfURLs(t *testing.T) {
	folder := t.TempDir()
	t.Setenv("XDG_CACHE_HOME", filepath.Join(folder, "cache"))
	in := func(name string) string { return filepath.Join(folder, name) }
	archive := clitest.FewPhotos(t, map[string]int{"cat": 5, "dog": 5})
	damaged := clitest.WriteTar(t, map[string]string{"cat/a.jpg": "\xff\xd8\xff\xe0", "dog/a.jpg": "no image"})
	var most, others atomic.Int64
	others.Store(1 << 40)
	url, test, bad := secretServer(t, archive, &most), secretServer(t,
		clitest.FewPhotos(t, map[string]int{"cat": 2, "dog": 2}), &others), secretServer(t, damaged, &others)
	train := []string{"train", "-archive", url, "-size", "32", "-batch", "4", "-epochs", "1", "-device", "cpu"}
	evaluate := []string{"evaluate", "-checkpoint", in("run/best.pt"), "-archive", url, "-device", "cpu", "-batch", "4"}
	const all = 1 << 40
	for _, c := range []struct {
		status int
		most   int64 // requests that succeed
		args   []string
	}{
		{0, all, []string{"index", "-json", url}},
		{0, all, []string{"index", "-o", in("index"), url}},
		{0, all, []string{"inspect", url}},
		{0, all, []string{"inspect", "-json", "-index", url}},
		{0, all, []string{"inspect", "-fix", in("fixed.tar"), url}},
		{0, all, []string{"preview", "-archive", url, "-o", in("sheet.png"), "-size", "32", "-batch", "4"}},
		{0, all, append(train, "-test", test, "-tensorboard", "-o", in("run"))},
		{0, all, evaluate},
		{0, all, append(evaluate, "-json", "-o", in("figures"))},
		{0, all, []string{"bench", "loader", "-seconds", "0.01", "-archive", url}},
		{0, all, []string{"bench", "loader", "-seconds", "0.01", "-json", "-outputs", in("outputs"), "-archive", url}},
		{2, all, append(train, "-test", url, "-o", in("other"))},
		{1, all, []string{"inspect", bad}},
		{1, all, []string{"train", "-archive", bad, "-size", "32", "-batch", "2", "-epochs", "1", "-device",
			"cpu", "-o", in("bad")}},
		{1, 0, []string{"index", url}},
		{1, 0, append(train, "-o", in("refused"))},
		{1, 6, append(train, "-o", in("expired"))}, // the signature expires while train reads samples in random order
		{1, 3, evaluate},
		{1, 0, []string{"inspect", "-list", url, archive}},
		{1, all, []string{"index", strings.Replace(url, "http:", "ftp:", 1)}},
	} {
		most.Store(c.most)
		status, stdout, stderr := command(t, c.args...)
		if c.status != status || strings.Contains(stdout+stderr, "SECRET") {
			t.Errorf("%q with %d answers: status %d, want %d; no output may have SECRET:\n%s\n%s", c.args,
				c.most, status, c.status, stdout, stderr)
		}
		if c.most < all && !strings.Contains(stdout+stderr, "ExpiredToken") {
			t.Errorf("%q with %d answers: want ExpiredToken, got\n%s\n%s", c.args, c.most, stdout, stderr)
		}
	}
	files := 0
	err := filepath.WalkDir(folder, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		files++
		data, err := os.ReadFile(path)
		if strings.Contains(path+string(data), "SECRET") {
			t.Errorf("%s has the secret %q, want it nowhere", path, "SECRET")
		}
		return err
	})
	if err != nil || files < 10 {
		t.Errorf("%d files were searched, want 10 and more; error %v", files, err)
	}
}
