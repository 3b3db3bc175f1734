package setup

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/torchstream/torchstream/internal/library"
)

func digest(b []byte) string {
	h := sha256.Sum256(b)
	return hex.EncodeToString(h[:])
}

// entry is a file in an archive.
type entry struct {
	name, text string
	mode       fs.FileMode
}

func zipped(t *testing.T, files ...entry) []byte {
	t.Helper()
	var b bytes.Buffer
	z := zip.NewWriter(&b)
	for _, f := range files {
		h := &zip.FileHeader{Name: f.name, Method: zip.Deflate}
		h.SetMode(f.mode | 0o644)
		w, err := z.CreateHeader(h)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, f.text); err != nil {
			t.Fatal(err)
		}
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func tarred(t *testing.T, files ...entry) []byte {
	t.Helper()
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	w := tar.NewWriter(z)
	for _, f := range files {
		h := &tar.Header{Name: f.name, Size: int64(len(f.text)), Mode: int64(f.mode | 0o644), Typeflag: tar.TypeReg}
		if f.mode&fs.ModeSymlink != 0 {
			h.Typeflag, h.Linkname, h.Size, f.text = tar.TypeSymlink, f.text, 0, ""
		}
		if f.mode&fs.ModeNamedPipe != 0 {
			h.Typeflag = tar.TypeFifo
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, f.text); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// server is a package index and file server that interrupts the first response for each file.
type server struct {
	*httptest.Server
	html     bool
	files    map[string][]byte // by path
	requests atomic.Int64
	ranges   atomic.Int64
}

func serve(t *testing.T, html bool, files map[string][]byte) *server {
	s := &server{html: html, files: files}
	broken := map[string]bool{}
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.requests.Add(1)
		if name, ok := strings.CutPrefix(r.URL.Path, "/simple/"); ok {
			s.page(w, r, strings.Trim(name, "/"))
			return
		}
		text, ok := s.files[r.URL.Path]
		if !ok {
			http.NotFound(w, r)
			return
		}
		if r.Header.Get("Range") != "" {
			s.ranges.Add(1)
		} else if !broken[r.URL.Path] {
			broken[r.URL.Path] = true
			w.Header().Set("Content-Length", fmt.Sprint(len(text)))
			w.Write(text[:len(text)/2])
			return
		}
		http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(text))
	}))
	t.Cleanup(s.Close)
	return s
}

func (s *server) page(w http.ResponseWriter, r *http.Request, name string) {
	var links []string
	for path, text := range s.files {
		if strings.HasPrefix(path, "/files/"+strings.ReplaceAll(name, "-", "_")+"-") {
			if s.html {
				links = append(links, fmt.Sprintf(`<a data-x="1" href="../..%s#sha256=%s">x</a>`, path, digest(text)))
			} else {
				links = append(links, fmt.Sprintf(
					`{"filename":"x","url":"../..%s","hashes":{"sha256":"%s"}}`, path, digest(text)))
			}
		}
	}
	switch {
	case len(links) == 0:
		http.NotFound(w, r)
	case s.html:
		fmt.Fprintf(w, "<!DOCTYPE html><html><body>%s</body></html>", strings.Join(links, "<br/>\n"))
	default:
		w.Header().Set("Content-Type", "application/vnd.pypi.simple.v1+json")
		fmt.Fprintf(w, `{"meta":{"api-version":"1.0"},"name":"x","files":[%s]}`, strings.Join(links, ","))
	}
}

// libtorchWheels returns the wheels of a small LibTorch, and their lock.
func libtorchWheels(t *testing.T) (files map[string][]byte, lock string) {
	torch := zipped(t, entry{"torch/lib/libtorch_cpu.so", "cpu", 0},
		entry{"torch/lib/libtorch_cuda.so", "cuda", 0}, entry{"torch/version.py", "__version__ = '2.11.0+cu130'\n", 0},
		entry{"torch-2.11.0.data/purelib/extra/a.py", "a", 0}, entry{"torch-2.11.0.data/scripts/run", "#!", 0o111})
	nvcc := zipped(t, entry{"nvidia/cu13/bin/nvcc", "#!", 0o100})
	other := zipped(t, entry{"nothing", "of interest", 0})
	files = map[string][]byte{
		"/files/torch-2.11.0-cp312-cp312-manylinux_2_28_x86_64.whl":                     torch,
		"/files/torch-2.11.0-cp313-cp313-manylinux_2_28_x86_64.whl":                     other,
		"/files/nvidia_cuda_nvcc-13.0.88-py3-none-manylinux_2_17_x86_64.whl":            nvcc,
		"/files/nvidia_cuda_nvcc-13.0.88-py3-none-manylinux_2_17_aarch64.whl":           other,
		"/files/nvidia_cuda_nvcc-13.1.0-py3-none-manylinux_2_17_x86_64.whl":             other,
		"/files/nvidia_cuda_nvcc_headers-13.0.88-py3-none-manylinux_2_17_x86_64.x86.wh": other,
	}
	return files, "# a comment\n\ntorch==2.11.0 --hash=sha256:" + digest(torch) +
		"\nnvidia-cuda-nvcc==13.0.88 --hash=sha256:" + digest(nvcc) + "\n"
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// Set-up finds the lock's wheels in a simple index, as HTML or as JSON, downloads them despite
// interruptions, and unpacks them as pip does. A second set-up sends no request.
func TestWheelsAreInstalled(t *testing.T) {
	for _, html := range []bool{false, true} {
		t.Run(map[bool]string{false: "JSON", true: "HTML"}[html], func(t *testing.T) {
			files, lockText := libtorchWheels(t)
			s := serve(t, html, files)
			i := installer{cache: t.TempDir(),
				from: index{urls: []string{s.URL + "/nowhere", s.URL + "/simple"}}, log: io.Discard}
			site := wheels(lockText).folder(i.cache, "2.11.0")
			if err := os.MkdirAll(filepath.Join(site+".tmp", "torch"), 0o777); err != nil { // left by a killed set-up
				t.Fatal(err)
			}
			torch, err := i.install(t.Context(), lockText)
			if err != nil {
				t.Fatal(err)
			}
			if torch != filepath.Join(site, "torch") ||
				read(t, filepath.Join(torch, "lib", "libtorch_cpu.so")) != "cpu" ||
				read(t, filepath.Join(site, "extra", "a.py")) != "a" {
				t.Errorf("LibTorch is in %s, want it in %s, with the files of the wheels",
					torch, filepath.Join(site, "torch"))
			}
			if info, err := os.Stat(filepath.Join(site, "nvidia", "cu13", "bin", "nvcc")); err != nil ||
				info.Mode()&0o011 == 0 {
				t.Errorf("nvcc cannot be run: %v", err)
			}
			left, err := filepath.Glob(filepath.Join(i.cache, "*"))
			if err != nil || len(left) != 2 {
				t.Errorf("the cache has %v, want the folder and its lock", left)
			}
			if n := s.ranges.Load(); n < 2 {
				t.Errorf("%d interrupted downloads were resumed, want at least 2", n)
			}
			if err := os.Mkdir(site+".wheels", 0o777); err != nil { // left by a set-up killed just before its end
				t.Fatal(err)
			}
			before := s.requests.Load()
			if again, err := i.install(t.Context(), lockText); err != nil || again != torch ||
				s.requests.Load() != before {
				t.Errorf("a second set-up: %s, %v, %d requests, want %v, 0, nil",
					again, err, s.requests.Load()-before, torch)
			}
			if _, err := os.Stat(site + ".wheels"); err == nil {
				t.Error("the folder of wheels is left, want it removed")
			}
		})
	}
}

func TestWheelsFromAFolder(t *testing.T) {
	files, lockText := libtorchWheels(t)
	folder := t.TempDir()
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(folder, filepath.Base(name)), text, 0o666); err != nil {
			t.Fatal(err)
		}
	}
	i := installer{cache: t.TempDir(), from: index{files: []string{folder}}, log: io.Discard}
	if _, err := i.install(t.Context(), lockText); err != nil {
		t.Error(err)
	}
	if left, _ := filepath.Glob(filepath.Join(folder, "*")); len(left) != len(files) {
		t.Errorf("%d wheels are left of %d", len(left), len(files))
	}
}

// A set-up that cannot succeed returns the reason, and leaves nothing that looks complete.
func TestWheelsThatCannotBeInstalled(t *testing.T) {
	files, lockText := libtorchWheels(t)
	s := serve(t, false, files)
	good := index{urls: []string{s.URL + "/simple"}}
	evil := zipped(t, entry{"../../evil", "x", 0})
	folder := t.TempDir()
	if err := os.WriteFile(filepath.Join(folder, "torch-2.11.0-cp312-cp312-linux_x86_64.whl"), evil,
		0o666); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name, lock string
		from       index
		want       string
	}{
		{"no such file", strings.Replace(lockText, "sha256:", "sha256:00000000",
			1)[:len("# a comment\n\ntorch==2.11.0 --hash=sha256:")+64] + "\n", good, "no package index has the file"},
		{"no such package", "torch==2.11.0 --hash=sha256:" + strings.Repeat("0", 64),
			index{urls: []string{s.URL + "/nowhere"}}, "PIP_INDEX_URL"},
		{"no line", "torch 2.11.0\n", good, `"torch 2.11.0"`},
		{"no torch", "nvidia-nccl==1 --hash=sha256:" + strings.Repeat("0", 64), good, "does not begin with torch"},
		{"full disk", "# on disk: 1e9 GB\n" + lockText, good, "GB free"},
		{"a wheel that leaves its folder", "torch==2.11.0 --hash=sha256:" + digest(evil),
			index{files: []string{folder}}, "evil"},
	} {
		t.Run(c.name, func(t *testing.T) {
			i := installer{cache: t.TempDir(), from: c.from, log: io.Discard}
			_, err := i.install(t.Context(), c.lock)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q", err, c.want)
			}
			if found, _ := filepath.Glob(filepath.Join(i.cache, "*", stamp)); len(found) != 0 {
				t.Errorf("%v says that it is complete, want none", found)
			}
		})
	}
}

func TestIndexIsPips(t *testing.T) {
	folder := t.TempDir()
	conf := filepath.Join(folder, "pip.conf")
	if err := os.WriteFile(conf, []byte("[install]\nindex-url = https://wrong\n[global]\nindex-url = "+
		"https://conf/simple\nfind-links = /wheels file:///more https://page\n"), 0o666); err != nil {
		t.Fatal(err)
	}
	download := filepath.Join(folder, "download.conf")
	if err := os.WriteFile(download, []byte("[download]\n# a comment\nindex_url: "+
		"https://own/simple\nextra-index-url =\n    https://d\n    https://e\ntrusted-host = host:8443\n"),
		0o666); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name        string
		environment map[string]string
		files       []string
		want        index
	}{
		{"nothing", nil, nil, index{urls: []string{"https://pypi.org/simple"}}},
		{"the environment", map[string]string{"PIP_INDEX_URL": "https://a/simple",
			"PIP_EXTRA_INDEX_URL": "https://b https://c"}, []string{conf},
			index{urls: []string{"https://a/simple", "https://b", "https://c"},
				links: []string{"https://page"}, files: []string{"/wheels", "/more"}}},
		{"a file", nil, []string{conf},
			index{urls: []string{"https://conf/simple"}, links: []string{"https://page"},
				files: []string{"/wheels", "/more"}}},
		{"no file", map[string]string{"PIP_CONFIG_FILE": os.DevNull}, []string{conf},
			index{urls: []string{"https://pypi.org/simple"}}},
		{"the section of the command", nil, []string{download, conf},
			index{urls: []string{"https://own/simple", "https://d", "https://e"},
				links: []string{"https://page"}, files: []string{"/wheels", "/more"}, trusted: []string{"host:8443"}}},
		{"no index", map[string]string{"PIP_NO_INDEX": "True", "PIP_FIND_LINKS": "/w"}, []string{conf},
			index{files: []string{"/w"}}},
		{"an index in spite of no-index", map[string]string{"PIP_NO_INDEX": "0", "PIP_FIND_LINKS": "/w"},
			[]string{conf}, index{urls: []string{"https://conf/simple"}, files: []string{"/w"}}},
		{"certificates of other programs",
			map[string]string{"REQUESTS_CA_BUNDLE": "/r.pem", "CURL_CA_BUNDLE": "/c.pem", "HOME": "/h"},
			nil, index{urls: []string{"https://pypi.org/simple"}, cert: "/r.pem", netrc: "/h/.netrc"}},
		{"pip's certificates", map[string]string{"REQUESTS_CA_BUNDLE": "/r.pem", "PIP_CERT": "/p.pem",
			"HOME": "/h", "NETRC": "/n"}, nil,
			index{urls: []string{"https://pypi.org/simple"}, cert: "/p.pem", netrc: "/n"}},
		{"a named file", map[string]string{"PIP_CONFIG_FILE": conf}, nil,
			index{urls: []string{"https://conf/simple"}, links: []string{"https://page"},
				files: []string{"/wheels", "/more"}}},
	} {
		got := readIndex(func(name string) string { return c.environment[name] }, c.files)
		if fmt.Sprint(got) != fmt.Sprint(c.want) {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

func TestChecksumIsBesideTheArchive(t *testing.T) {
	for archive, want := range map[string]string{
		"https://host/a.tar.gz":                "https://host/a.tar.gz.sha256",
		"https://host/a.tar.gz?token=b%2Fc&d":  "https://host/a.tar.gz.sha256?token=b%2Fc&d",
		"https://name:word@host/a%2Fb.tgz?c#d": "https://name:word@host/a%2Fb.tgz.sha256?c#d",
	} {
		u, err := url.Parse(archive)
		if err != nil {
			t.Fatal(err)
		}
		if got := checksumOf(u); got != want {
			t.Errorf("the checksum of %s is at %s, want %s", archive, got, want)
		}
	}
}

// The proxy and the certificates are taken from pip's options.
func TestIndexUsesPipProxyAndCA(t *testing.T) {
	files, lockText := libtorchWheels(t)
	s := serve(t, true, files)
	secure := httptest.NewTLSServer(s.Config.Handler)
	t.Cleanup(secure.Close)
	var asked atomic.Int64
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		if r.Host != "index.invalid" {
			t.Errorf("the proxy is asked for %s, want \"index.invalid\"", r.Host)
		}
		s.Config.Handler.ServeHTTP(w, r)
	}))
	t.Cleanup(proxy.Close)
	cert := filepath.Join(t.TempDir(), "cert.pem")
	block := &pem.Block{Type: "CERTIFICATE", Bytes: secure.Certificate().Raw}
	if err := os.WriteFile(cert, pem.EncodeToMemory(block), 0o666); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name    string
		options map[string]string
		want    string
	}{
		{"proxy", map[string]string{"PIP_INDEX_URL": "http://index.invalid/simple",
			"PIP_PROXY": strings.TrimPrefix(proxy.URL, "http://")}, ""},
		{"certificate", map[string]string{"PIP_INDEX_URL": secure.URL + "/simple", "PIP_CERT": cert}, ""},
		{"no certificate", map[string]string{"PIP_INDEX_URL": secure.URL + "/simple"}, "certificate"},
		{"no file", map[string]string{"PIP_INDEX_URL": secure.URL + "/simple", "PIP_CERT": cert + "s"},
			"pip's option cert"},
		{"a file without certificates",
			map[string]string{"PIP_INDEX_URL": secure.URL + "/simple", "PIP_CERT": "setup_test.go"},
			"no certificate in PEM"},
		{"a trusted host", map[string]string{"PIP_INDEX_URL": secure.URL + "/simple",
			"PIP_TRUSTED_HOST": "other 127.0.0.1"}, ""},
		{"another trusted host",
			map[string]string{"PIP_INDEX_URL": secure.URL + "/simple", "PIP_TRUSTED_HOST": "other"}, "certificate"},
		{"no URL", map[string]string{"PIP_INDEX_URL": secure.URL + "/simple",
			"PIP_PROXY": "http://a:secret@b:c"}, "pip's option proxy: http://b:c is no"},
	} {
		t.Run(c.name, func(t *testing.T) {
			from := readIndex(func(name string) string { return c.options[name] }, nil)
			_, err := installer{cache: t.TempDir(), from: from, log: io.Discard}.install(t.Context(), lockText)
			if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("got %v, want %q", err, c.want)
			}
		})
	}
	if asked.Load() == 0 {
		t.Error("the proxy got no request, want some")
	}
}

// If an index has another file of the same name, or its page does not list the file, the search
// continues with the next index. The lock's own index is tried last.
func TestNextIndexIsAsked(t *testing.T) {
	files, lockText := libtorchWheels(t)
	good := serve(t, false, files)
	for name, handler := range map[string]http.HandlerFunc{
		"another file": func(w http.ResponseWriter, r *http.Request) {
			if strings.HasPrefix(r.URL.Path, "/simple/") { // links without checksums
				fmt.Fprint(w, `<a href="/torch-2.11.0-cp312-cp312-manylinux_2_28_x86_64.whl">x</a>`+
					`<a href="/nvidia_cuda_nvcc-13.0.88-py3-none-manylinux_2_17_x86_64.whl">x</a>`)
				return
			}
			fmt.Fprint(w, "another file")
		},
		"no file": func(w http.ResponseWriter, r *http.Request) {
			if strings.HasPrefix(r.URL.Path, "/simple/") {
				for path, text := range files {
					fmt.Fprintf(w, `<a href="%s#sha256=%s">x</a>`, path, digest(text))
				}
				return
			}
			http.NotFound(w, r)
		},
	} {
		t.Run(name, func(t *testing.T) {
			bad := httptest.NewServer(handler)
			t.Cleanup(bad.Close)
			i := installer{cache: t.TempDir(),
				from: index{urls: []string{bad.URL + "/simple", good.URL + "/simple"}}, log: io.Discard}
			if _, err := i.install(t.Context(), lockText); err != nil {
				t.Error(err)
			}
			i = installer{cache: t.TempDir(), from: index{urls: []string{bad.URL + "/simple"}}, log: io.Discard}
			if _, err := i.install(t.Context(), "# index: "+good.URL+"/simple\n"+lockText); err != nil {
				t.Error(err)
			}
			if _, err := i.install(t.Context(),
				lockText+"nvidia-nccl==1 --hash=sha256:"+strings.Repeat("0", 64)+"\n"); err == nil ||
				!strings.Contains(err.Error(), bad.URL) {
				t.Errorf("got %v, want one that names %s", err, bad.URL)
			}
		})
	}
}

// No message contains a URL's user name, password or token.
func TestErrorsKeepSecrets(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasPrefix(r.URL.Path, "/links/") {
			fmt.Fprintf(w, `<a href="http://user:secret@%s:x/torch-1-py3-none-x86_64.whl">x</a>`, r.Host)
			return
		}
		http.Error(w, "", http.StatusForbidden)
	}))
	t.Cleanup(s.Close)
	host := strings.TrimPrefix(s.URL, "http://")
	closed := httptest.NewServer(nil)
	closed.Close()
	lockText := "torch==1 --hash=sha256:" + strings.Repeat("0", 64) + "\n"
	for _, address := range []string{
		"http://user:secret@" + host + "/simple", "http://secret@" + host + "/simple",
		"http://user:secret@" + host + "/links",
		"http://user:secret@" + strings.TrimPrefix(closed.URL, "http://"), "http://user:sec\x7fret@" + host,
		"http://user:secret/x@" + host,
		"http://user:secret#x@" + host, "http://user:secret@" + host + ":port",
	} {
		i := installer{cache: t.TempDir(), from: index{urls: []string{address}}, log: io.Discard}
		_, err := i.install(t.Context(), lockText)
		if err == nil || strings.Contains(err.Error(), "sec") || strings.Contains(err.Error(), "user") {
			t.Errorf("%q: %v", address, err)
		}
	}
	for _, address := range []string{"https://user:secret@" + host + "/x.tar.gz?token=secret",
		"http://user:secret@" + host} {
		o := options(t, nil)
		o.From, o.SHA256 = address, ""
		if _, err := Run(t.Context(), o); err == nil || strings.Contains(err.Error(), "secret") ||
			strings.Contains(err.Error(), "user") {
			t.Errorf("%q: %v", address, err)
		}
	}
}

// options returns the options for a set-up from an archive, with an installed LibTorch.
func options(t *testing.T, archive []byte) Options {
	t.Helper()
	path := filepath.Join(t.TempDir(), "torchstream.tar.gz")
	if err := os.WriteFile(path, archive, 0o666); err != nil {
		t.Fatal(err)
	}
	site := t.TempDir()
	if err := os.Mkdir(filepath.Join(site, "nvidia"), 0o777); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(site, "torch", "lib"), 0o777); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"lib/libtorch_cpu.so": "", "lib/libtorch_cuda.so": "",
		"version.py": "__version__ = '2.11.3'\n"} {
		if err := os.WriteFile(filepath.Join(site, "torch", name), []byte(text), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	return Options{From: path, SHA256: digest(archive), LibTorch: site, Cache: t.TempDir(),
		Version: "0.1.0", Log: io.Discard}
}

var lockEntry = entry{"t/share/torchstream/libtorch-2.11.lock",
	"torch==2.11.0 --hash=sha256:" + strings.Repeat("0", 64) + "\n", 0}

// A release archive is unpacked into the folder that programs search, and gets links to LibTorch.
// It replaces an earlier release.
func TestReleaseIsInstalled(t *testing.T) {
	for _, version := range []string{"first", "second"} {
		o := options(t, tarred(t, entry{"t/lib/libtorchstream.so", version, 0o111},
			entry{"t/lib/libtorchstream_image.so", version, 0o111},
			entry{"t/lib/link.so", "libtorchstream.so", fs.ModeSymlink}, lockEntry))
		lib, err := Run(t.Context(), o)
		if err != nil {
			t.Fatal(err)
		}
		if lib != filepath.Join(library.Installed(o.Cache, "0.1.0"), "lib") ||
			read(t, filepath.Join(lib, "link.so")) != version {
			t.Errorf("installed in %s", lib)
		}
		for _, path := range []string{"libtorch/torch/lib/libtorch_cpu.so", "libtorch/nvidia"} {
			if _, err := os.Stat(filepath.Join(lib, path)); err != nil {
				t.Error(err)
			}
		}
		if left, _ := filepath.Glob(filepath.Join(o.Cache, "*")); len(left) != 2 {
			t.Errorf("the cache has %v, want length 2", left)
		}
		// The next set-up replaces the installation.
		o2 := options(t, tarred(t, entry{"t/lib/libtorchstream_image.so", "image", 0}))
		o2.Cache, o2.Image = o.Cache, true
		if lib, err = Run(t.Context(), o2); err != nil ||
			read(t, filepath.Join(lib, "libtorchstream_image.so")) != "image" {
			t.Error(err)
		}
		if _, err := os.Stat(filepath.Join(lib, "libtorchstream.so")); err == nil {
			t.Error("the new installation has libtorchstream.so of the old one, want only the new files")
		}
	}
}

// If a file downloaded in one piece has the wrong checksum, download gives up. If the file came
// from a resumed download, download tries once more.
func TestAnotherFileIsNotDownloadedAgain(t *testing.T) {
	s := serve(t, false, map[string][]byte{"/x": []byte("another file")})
	path := filepath.Join(t.TempDir(), "x")
	for _, part := range []string{"", "old"} {
		if err := os.WriteFile(path+".part", []byte(part), 0o666); err != nil {
			t.Fatal(err)
		}
		before := s.requests.Load()
		if err := download(t.Context(), http.DefaultClient, s.URL+"/x", path, strings.Repeat("0", 64),
			lines(io.Discard)); err == nil {
			t.Error("download of a file with another checksum: got no error, want one")
		}
		if n := s.requests.Load() - before; n > 3 { // interrupted, resumed and complete downloads
			t.Errorf("after the part %q: %d requests, want at most 3", part, n)
		}
	}
}

// A local archive is not removed, whether From is a path or a file URL.
func TestLocalReleaseStays(t *testing.T) {
	o := options(t, tarred(t, entry{"t/lib/libtorchstream_image.so", "", 0}))
	path := o.From
	o.From, o.Image = "file://"+path, true
	if _, err := Run(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); err != nil {
		t.Errorf("Stat of the user's archive: got %v, want it to be there", err)
	}
}

// An installation is kept if its replacement does not work. It also survives if set-up is killed
// while it replaces the installation.
func TestInstalledStays(t *testing.T) {
	archive := tarred(t, entry{"t/lib/libtorchstream_image.so", "first", 0})
	o := options(t, archive)
	o.Image = true
	lib, err := Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	tried := ""
	next := options(t, tarred(t, entry{"t/lib/libtorchstream_image.so", "second", 0}))
	next.Image, next.Cache = true, o.Cache
	next.Try = func(folder string) error {
		tried = read(t, filepath.Join(folder, "libtorchstream_image.so"))
		return fs.ErrInvalid
	}
	if _, err := Run(t.Context(), next); !errors.Is(err, fs.ErrInvalid) || tried != "second" {
		t.Errorf("%v after trying %q, want fs.ErrInvalid, \"second\"", err, tried)
	}
	target := filepath.Dir(lib)
	if err := os.Rename(target, old(target)); err != nil { // the state if replace is killed
		t.Fatal(err)
	}
	if _, err := Run(t.Context(), next); !errors.Is(err, fs.ErrInvalid) {
		t.Error(err)
	}
	if got := read(t, filepath.Join(lib, "libtorchstream_image.so")); got != "first" {
		t.Errorf("%q is installed, want \"first\"", got)
	}
	if left, _ := filepath.Glob(filepath.Join(o.Cache, "*")); len(left) != 2 {
		t.Errorf("the cache has %v, want length 2", left)
	}
}

func TestReleasesThatAreRefused(t *testing.T) {
	good := tarred(t, entry{"t/lib/libtorchstream.so", "", 0}, entry{"t/lib/libtorchstream_image.so", "", 0}, lockEntry)
	for _, c := range []struct {
		name    string
		archive []byte
		change  func(*Options)
		want    string
	}{
		{"another checksum", good, func(o *Options) { o.SHA256 = strings.Repeat("0", 64) }, "damaged or another file"},
		{"no checksum", good, func(o *Options) { o.SHA256 = "" }, "-sha256"},
		{"no file", good, func(o *Options) { o.SHA256, o.From = "", filepath.Join(o.Cache, "none.tgz") },
			"the archive: stat"},
		{"not a checksum", good, func(o *Options) { o.SHA256 = "12" }, "64 hexadecimal digits"},
		{"no archive", []byte("text"), nil, "no .tar.gz"},
		{"cut off", good[:len(good)-20], nil, "unexpected EOF"},
		{"without the shim", tarred(t, entry{"t/lib/libtorchstream_image.so", "", 0}, lockEntry), nil,
			"no lib/libtorchstream.so"},
		{"without a lock", tarred(t, entry{"t/lib/libtorchstream.so", "", 0},
			entry{"t/lib/libtorchstream_image.so", "", 0}), nil, "0 files share/torchstream/libtorch-*.lock"},
		{"a name outside", tarred(t, entry{"t/../../evil", "", 0}), nil, "evil"},
		{"through a link outside",
			tarred(t, entry{"t/out", "/tmp", fs.ModeSymlink}, entry{"t/out/evil", "x", 0}), nil, "evil"},
		{"a pipe", tarred(t, entry{"t/pipe", "", fs.ModeNamedPipe}), nil, "which no release archive has"},
		{"http", good, func(o *Options) { o.From = "http://127.0.0.1/x.tar.gz" }, "https://"},
		{"a LibTorch release", good, func(o *Options) { o.Release = "2.15" }, "for one LibTorch"},
		{"no LibTorch", good, func(o *Options) { o.LibTorch = o.Cache }, "libtorch_cpu.so"},
		{"LibTorch without CUDA", good,
			func(o *Options) { os.Remove(filepath.Join(o.LibTorch, "torch", "lib", "libtorch_cuda.so")) },
			"without CUDA"},
		{"another LibTorch", good, func(o *Options) {
			if err := os.WriteFile(filepath.Join(o.LibTorch, "torch", "version.py"),
				[]byte("__version__ = '2.15.0'\n"), 0o666); err != nil {
				t.Fatal(err)
			}
		}, "LibTorch 2.15.0, and LibTorch 2.11 is wanted"},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := options(t, c.archive)
			if c.change != nil {
				c.change(&o)
			}
			lib, err := Run(t.Context(), o)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %q, %v, want %q", lib, err, c.want)
			}
			if _, err := os.Stat(library.Installed(o.Cache, "0.1.0")); err == nil {
				t.Error("a library is installed after the failure, want none")
			}
		})
	}
}

// The program contains every file that a build needs, and its scripts are executable.
func TestSourcesAreWhole(t *testing.T) {
	folder := t.TempDir()
	if err := writeSources(folder); err != nil {
		t.Fatal(err)
	}
	for _, part := range []string{"CMakeLists.txt", "cmake", "include", "src", "setup", "libtorch-2.11.lock"} {
		err := filepath.WalkDir(filepath.Join("../../cshim", part), func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || strings.Contains(path, "__pycache__") || d.Name() == ".clang-format" {
				return err
			}
			if got := read(t, filepath.Join(folder, strings.TrimPrefix(path, "../../cshim/"))); got != read(t, path) {
				t.Errorf("%s differs", path)
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	}
	if info, err := os.Stat(filepath.Join(folder, "setup", "shim.sh")); err != nil || info.Mode()&0o100 == 0 {
		t.Errorf("shim.sh cannot be run: %v", err)
	}
	if r := Releases(); len(r) == 0 || r[0] != DefaultRelease {
		t.Errorf("releases %q, and the default is %s", r, DefaultRelease)
	}
}

// A checksum may consist of the first digits alone, as in the names of published weights. An
// interrupted download is continued. A file that exists already is not downloaded again.
func TestDownloadByTheFirstDigitsOfAChecksum(t *testing.T) {
	text := []byte(strings.Repeat("weights", 1000))
	s := serve(t, false, map[string][]byte{"/w-12345678.pth": text})
	path := filepath.Join(t.TempDir(), "w.pth")
	var last int64
	report := func(_ string, have, size int64) {
		if last = have; size != int64(len(text)) {
			t.Errorf("got size %d, want %d", size, len(text))
		}
	}
	sum, err := Download(t.Context(), s.URL+"/w-12345678.pth", path, strings.ToUpper(digest(text)[:8]), report)
	if err != nil || sum != digest(text) {
		t.Fatalf("got the checksum %s, %v, want %s, nil", sum, err, digest(text))
	}
	if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, text) || last != int64(len(text)) {
		t.Errorf("got %d bytes, %v, %d reported, want %d, nil", len(got), err, last, len(text))
	}
	if s.ranges.Load() == 0 {
		t.Error("no range was requested, want the interrupted download continued")
	}
	before := s.requests.Load()
	if _, err := Download(t.Context(), s.URL+"/w-12345678.pth", path, digest(text), report); err != nil {
		t.Error(err)
	}
	if n := s.requests.Load() - before; n != 0 {
		t.Errorf("%d requests for a file that is there, want 0", n)
	}
}

func TestDownloadRefusesBadURLsAndChecksums(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x")
	for _, c := range []struct{ url, sum, want string }{
		{"ftp://host.example/x", strings.Repeat("0", 64), "want a URL that begins with https:// or http://"},
		{"https:///x", strings.Repeat("0", 64), "want a URL"},
		{"https://host.example/x", "", "want 8 to 64 hexadecimal digits"},
		{"https://host.example/x", "1234567", "want 8 to 64 hexadecimal digits"},
		{"https://host.example/x", strings.Repeat("0", 65), "want 8 to 64 hexadecimal digits"},
		{"https://host.example/x", "1234567g", "want 8 to 64 hexadecimal digits"},
	} {
		if _, err := Download(t.Context(), c.url, path, c.sum, lines(io.Discard)); err == nil ||
			!strings.Contains(err.Error(), c.want) {
			t.Errorf("%s, %q: got error %v, want one with %q", c.url, c.sum, err, c.want)
		}
	}
}
