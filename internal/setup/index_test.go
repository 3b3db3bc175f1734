package setup

import (
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"slices"
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
		{"a macro", "machine 127.0.0.1 login me password secret\nmacdef init\nmachine 127.0.0.1\n" +
			"login x password y\n\nmachine other login x password y\n", locked.URL, true},
		{"comments", "# machine 127.0.0.1 login x password y\nmachine 127.0.0.1 # login x\n" +
			"login me password secret # password y\n", locked.URL, true},
		{"the password first", "machine 127.0.0.1 password secret login me", locked.URL, true},
		{"quotes", `machine 127.0.0.1 login "me" password s\ecret`, locked.URL, true},
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

// Words of a netrc file are read as by Python's netrc module.
func TestWordsOfNetrc(t *testing.T) {
	for text, want := range map[string]string{
		`machine h login "a b" password #c\"d`: `h: a b #c"d`,
		"machine h\nlogin\na\npassword\nb":     "h: a b",
		"machine h account x login a password b macdef m\nmachine i login c password d\n\n" +
			"machine h login e password f": "h: e f",
		"machine h login a": "",
		"default login a password b machine h user c password d": ": a b, h: c d",
	} {
		logins := parseNetrc(text)
		var got []string
		for _, host := range slices.Sorted(maps.Keys(logins)) {
			password, _ := logins[host].Password()
			got = append(got, host+": "+logins[host].Username()+" "+password)
		}
		if got := strings.Join(got, ", "); got != want {
			t.Errorf("%q: got %q, want %q", text, got, want)
		}
	}
}

// If a page's URL has a name and password, set-up also sends them with requests for files on the
// same host. It does not send them to an http link of an https page.
func TestPasswordsAreNotSentUnencrypted(t *testing.T) {
	w := wheel{name: "torch", version: "1.0", sha256: strings.Repeat("0", 64)}
	for _, c := range []struct{ page, link, want string }{
		{"https", "/a.whl", "https://me:secret@HOST/a.whl"},
		{"https", "https://HOST/a.whl", "https://me:secret@HOST/a.whl"},
		{"https", "http://HOST/a.whl", "http://HOST/a.whl"},
		{"http", "https://HOST/a.whl", "https://me:secret@HOST/a.whl"},
		{"http", "http://HOST/a.whl", "http://me:secret@HOST/a.whl"},
		{"https", "https://other/a.whl", "https://other/a.whl"},
	} {
		handler := http.HandlerFunc(func(out http.ResponseWriter, r *http.Request) {
			fmt.Fprintf(out, `<a href="%s#sha256=%s">a</a>`, strings.Replace(c.link, "HOST", r.Host, 1), w.sha256)
		})
		s := httptest.NewUnstartedServer(handler)
		if c.page == "https" {
			s.StartTLS()
		} else {
			s.Start()
		}
		_, host, _ := strings.Cut(s.URL, "://")
		got, err := find(t.Context(), s.Client(), c.page+"://me:secret@"+host+"/simple/torch/", w)
		s.Close()
		if want := strings.Replace(c.want, "HOST", host, 1); err != nil || got != want {
			t.Errorf("%s page, link %s: got %q, %v, want %q", c.page, c.link, got, err, want)
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
			lines(io.Discard)); err == nil || err.Error() != want {
			t.Errorf("a file: got %v, want %s", err, want)
		}
	})
}

// A slow download reports its progress, and the file's size if the server has reported it.
func TestProgressOfADownload(t *testing.T) {
	for size, want := range map[int64]string{0: "setup: downloading x.whl: 7 MB\n",
		9e6: "setup: downloading x.whl: 7 of 9 MB\n"} {
		var log strings.Builder
		p := &progress{Reader: strings.NewReader(strings.Repeat("x", 2e6)), name: "x.whl",
			report: linesAfter(&log, time.Now().Add(-time.Second)), have: 5e6, size: size}
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
