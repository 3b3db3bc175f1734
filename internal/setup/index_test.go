package setup

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// The name and password of a host are read from a netrc file, as pip reads them. A name and
// password in the URL have precedence.
func TestIndexTakesPasswordsFromNetrc(t *testing.T) {
	files, lockText := libtorchWheels(t)
	s := serve(t, false, files)
	locked := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if name, password, _ := r.BasicAuth(); name != "me" || password != "secret" {
			http.Error(w, "", http.StatusUnauthorized)
			return
		}
		s.Config.Handler.ServeHTTP(w, r)
	}))
	t.Cleanup(locked.Close)
	own := strings.Replace(locked.URL, "http://", "http://me:secret@", 1)
	for _, c := range []struct {
		name, netrc, url string
		ok               bool
	}{
		{"the host", "machine other login x password y\nmachine 127.0.0.1 login me\n  password secret\n",
			locked.URL, true},
		{"the default", "machine other login x password y default login me password secret", locked.URL, true},
		{"another host", "machine other login me password secret", locked.URL, false},
		{"an empty file", "", locked.URL, false},
		{"a cut-off file", "machine 127.0.0.1 login", locked.URL, false},
		{"the URL", "machine 127.0.0.1 login x password y", own, true},
	} {
		netrc := filepath.Join(t.TempDir(), "netrc")
		writeFile(t, netrc, c.netrc)
		i := installer{cache: t.TempDir(), from: index{urls: []string{c.url + "/simple"}, netrc: netrc},
			log: io.Discard}
		if _, err := i.install(t.Context(), lockText); (err == nil) != c.ok || err != nil &&
			(!strings.Contains(err.Error(), "401") || strings.Contains(err.Error(), "secret")) {
			t.Errorf("%s: got %v, want success: %v", c.name, err, c.ok)
		}
	}
}

// A URL of find-links is a page with links to wheels.
func TestPageOfFindLinks(t *testing.T) {
	files, lockText := libtorchWheels(t)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if text, ok := files[r.URL.Path]; ok {
			w.Write(text)
			return
		}
		for path := range files {
			fmt.Fprintf(w, "<a href=%q>x</a>\n", path)
		}
	}))
	t.Cleanup(s.Close)
	i := installer{cache: t.TempDir(), from: index{links: []string{s.URL + "/page.html"}}, log: io.Discard}
	if _, err := i.install(t.Context(), lockText); err != nil {
		t.Errorf("got %v, want the wheels of the page", err)
	}
}

// silentServer accepts a request and sends nothing.
type silentServer struct{}

func (silentServer) RoundTrip(r *http.Request) (*http.Response, error) {
	<-r.Context().Done()
	return nil, r.Context().Err()
}

func TestSilentServerIsAnError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := &http.Client{Transport: silentServer{}}
		const want = "https://index.example/simple/torch/: the server has sent nothing for 1m0s"
		if _, err := get(t.Context(), client, "https://index.example/simple/torch/", ""); err == nil ||
			err.Error() != want {
			t.Errorf("a page: got %v, want %s", err, want)
		}
		part := filepath.Join(t.TempDir(), "torch.whl.part")
		if err := continued(t.Context(), client, "https://index.example/simple/torch/", part,
			io.Discard); err == nil || err.Error() != want {
			t.Errorf("a file: got %v, want %s", err, want)
		}
	})
}

// A download that takes long reports its progress, with the size if it is known.
func TestProgressOfADownload(t *testing.T) {
	for size, want := range map[int64]string{0: "setup: downloading x.whl: 7 MB\n",
		9e6: "setup: downloading x.whl: 7 of 9 MB\n"} {
		var log strings.Builder
		p := &progress{Reader: strings.NewReader(strings.Repeat("x", 2e6)), log: &log, name: "x.whl",
			have: 5e6, size: size, next: time.Now().Add(-time.Second)}
		if n, err := p.Read(make([]byte, 2e6)); n != 2e6 || err != nil {
			t.Fatalf("got %d, %v, want 2000000 bytes", n, err)
		}
		if _, err := p.Read(make([]byte, 1)); err != io.EOF {
			t.Errorf("got %v, want EOF", err)
		}
		if log.String() != want {
			t.Errorf("got %q, want %q once", log.String(), want)
		}
	}
}

// The variable for the system's certificates may name a folder.
func TestCertificatesOfAFolder(t *testing.T) {
	if _, err := certificates(t.TempDir()); err == nil || !strings.Contains(err.Error(), "has no certificate in PEM") {
		t.Errorf("got %v of an empty folder, want that it has no certificate", err)
	}
}
