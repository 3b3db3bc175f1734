package blob

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"image"
	"image/png"
	"io/fs"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"gocloud.dev/blob/memblob"
	"gocloud.dev/gcerrors"

	"github.com/torchstream/torchstream/imageloader"
)

// archive is a .tar of n images in three classes.
func archive(t *testing.T, n int) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	noise := rand.New(rand.NewPCG(1, 2)) // so that a .tgz has checkpoints
	for i := range n {
		m := image.NewRGBA(image.Rect(0, 0, 60, 40))
		for k := range m.Pix {
			m.Pix[k] = byte(noise.Uint32()) | 255*byte(k&3/3) // alpha is 255
		}
		var file bytes.Buffer
		if err := png.Encode(&file, m); err != nil {
			t.Fatal(err)
		}
		if err := w.WriteHeader(&tar.Header{Name: fmt.Sprintf("class%d/%03d.png", i%3, i), Size: int64(file.Len()), Mode: 0o644, Typeflag: tar.TypeReg}); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(file.Bytes()); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func zipped(t *testing.T, data []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	if _, err := w.Write(data); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// epoch loads one epoch: the samples' names and bytes, in their order.
func epoch(t *testing.T, path string, o imageloader.Options) (string, error) {
	t.Helper()
	o.BatchSize, o.Transform, o.Seed = 8, imageloader.Eval(5, 5), 3
	o.ShuffleBytes = 1 // not held in memory
	l, err := imageloader.Open(path, o)
	if err != nil {
		return "", err
	}
	defer l.Close()
	var out strings.Builder
	for b, err := range l.Epoch(t.Context(), 1) {
		if err != nil {
			return "", err
		}
		for i, s := range b.Samples {
			fmt.Fprintf(&out, "%s %d %x\n", s.Name, s.Label, b.Images[i*75:][:75])
		}
	}
	return out.String(), nil
}

// TestBuckets: an archive, or its shards, in a bucket that the program has opened, and in a folder
// by its URL, gives the batches that a file gives; with an index in any order too.
func TestBuckets(t *testing.T) {
	data := archive(t, 60)
	dir := t.TempDir()
	bucket := memblob.OpenBucket(nil)
	defer bucket.Close()
	half := len(archive(t, 30)) - 1024 // where the second half of the members begins
	for name, data := range map[string][]byte{"a.tar": data, "a.tgz": zipped(t, data), "s-0.tgz": zipped(t, data[:half]), "s-1.tgz": zipped(t, data[half:])} {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o644); err != nil {
			t.Fatal(err)
		}
		if err := bucket.WriteAll(t.Context(), "sets/"+name, data, nil); err != nil {
			t.Fatal(err)
		}
	}
	for _, shuffle := range []bool{false, true} {
		want, err := epoch(t, filepath.Join(dir, "a.tar"), imageloader.Options{NoIndex: true, Shuffle: shuffle})
		if err != nil {
			t.Fatal(err)
		}
		for url, open := range map[string]func(context.Context, string) (imageloader.Source, error){
			"mem://bucket/sets/a.tar":          In(bucket),
			"mem://bucket/sets/a.tgz":          In(bucket),
			"mem://bucket/sets/s-{0..1}.tgz":   In(bucket),
			"file://" + dir + "/a.tgz":         Open,
			"file://" + dir + "/s-{0..1}.tgz":  Open,
			"file://" + dir + "/{s-0,s-1}.tgz": Open,
		} {
			index := filepath.Join(t.TempDir(), "index")
			for round := range 2 {
				got, err := epoch(t, url, imageloader.Options{OpenSource: open, IndexFile: index, Shuffle: shuffle})
				if round == 0 && shuffle && !strings.HasSuffix(url, ".tar") { // the order of a stream
					got, want := strings.Split(got, "\n"), strings.Split(want, "\n")
					slices.Sort(got)
					slices.Sort(want)
					if err != nil || !slices.Equal(got, want) {
						t.Errorf("%s: other samples, error %v", url, err)
					}
					continue
				}
				if err != nil || got != want {
					t.Errorf("%s, round %d, shuffle %v: another epoch, error %v", url, round, shuffle, err)
				}
			}
			if info, err := os.Stat(index); err != nil || info.Size() == 0 {
				t.Errorf("%s: index: %v", url, err)
			}
			r, err := imageloader.Inspect(t.Context(), url, imageloader.Options{OpenSource: open}, nil)
			if err != nil || r.Samples != 60 {
				t.Errorf("inspect %s: %+v, error %v", url, r, err)
			}
			made, err := imageloader.MakeIndex(t.Context(), url, imageloader.Options{OpenSource: open, IndexFile: index}, nil)
			if err != nil || made.Samples != 60 || !made.Random {
				t.Errorf("index %s: %+v, error %v", url, made, err)
			}
		}
	}
}

// TestReplacedInBucket: stores that don't compare versions themselves say what they have sent.
func TestReplacedInBucket(t *testing.T) {
	bucket := memblob.OpenBucket(nil)
	defer bucket.Close()
	write := func(data string) {
		if err := bucket.WriteAll(t.Context(), "a", []byte(data), nil); err != nil {
			t.Fatal(err)
		}
	}
	write("one")
	s, err := In(bucket)(t.Context(), "mem://b/a")
	if err != nil {
		t.Fatal(err)
	}
	if r, err := s.ReadRange(t.Context(), 1, 2); err != nil {
		t.Error(err)
	} else if err := r.Close(); err != nil {
		t.Error(err)
	}
	write("two")
	if _, err := s.ReadRange(t.Context(), 1, 2); !errors.Is(err, imageloader.ErrSourceChanged) {
		t.Errorf("error %v", err)
	}
	if err := bucket.Delete(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	if _, err := s.ReadRange(t.Context(), 1, 2); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("error %v", err)
	}
}

// cloud answers like S3, Google Cloud Storage and Azure, as far as reading goes: each in its own
// dialect, all through If-Match, or what Google has for it.
type cloud struct {
	t    *testing.T
	mu   sync.Mutex
	data []byte
	n    int64 // version
	busy int   // so many of the next requests get 503
	asks int   // requests for data that named the version
}

func (c *cloud) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	c.mu.Lock()
	defer c.mu.Unlock()
	fail := func(status int, code string) {
		w.Header().Set("X-Ms-Error-Code", code)
		w.Header().Set("Content-Type", "application/xml")
		w.WriteHeader(status)
		fmt.Fprintf(w, "<?xml version=\"1.0\"?><Error><Code>%s</Code><Message>no</Message></Error>", code)
	}
	w.Header().Set("ETag", fmt.Sprintf(`"v%d"`, c.n))
	w.Header().Set("X-Goog-Generation", fmt.Sprint(c.n))
	w.Header().Set("X-Ms-Creation-Time", time.Unix(1e9, 0).UTC().Format(http.TimeFormat))
	switch {
	case c.busy > 0:
		c.busy--
		fail(http.StatusServiceUnavailable, "ServerBusy")
		return
	case strings.Contains(r.URL.Path, "forbidden"):
		fail(http.StatusForbidden, map[bool]string{true: "AuthenticationFailed", false: "AccessDenied"}[r.Header.Get("X-Ms-Version") != ""])
		return
	case !strings.Contains(r.URL.Path, "train.tgz"):
		fail(http.StatusNotFound, map[bool]string{true: "BlobNotFound", false: "NoSuchKey"}[r.Header.Get("X-Ms-Version") != ""])
		return
	case strings.HasPrefix(r.URL.Path, "/storage/v1/"):
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprintf(w, `{"kind":"storage#object","name":"sets/train.tgz","bucket":"bucket","generation":"%d","size":"%d","etag":"e","updated":"2024-01-01T00:00:00.123Z"}`, c.n, len(c.data))
		return
	}
	if r.Method == http.MethodGet {
		match := r.Header.Get("If-Match")
		if g := r.Header.Get("X-Goog-If-Generation-Match"); g != "" {
			match = `"v` + g + `"`
		} else if g := r.URL.Query().Get("ifGenerationMatch"); g != "" {
			match = `"v` + g + `"`
		}
		if match != "" {
			c.asks++
		}
		if match != "" && match != w.Header().Get("ETag") {
			fail(http.StatusPreconditionFailed, map[bool]string{true: "ConditionNotMet", false: "PreconditionFailed"}[r.Header.Get("X-Ms-Version") != ""])
			return
		}
		if ms := r.Header.Get("X-Ms-Range"); ms != "" {
			r.Header.Set("Range", ms)
		}
		r.Header.Del("If-Match")
	}
	http.ServeContent(w, r, "", time.Unix(1e9, 0), bytes.NewReader(c.data))
}

// TestClouds: each store's own client reads an archive; a busy store is asked again; what is not
// there, forbidden, or replaced is an error of its kind.
func TestClouds(t *testing.T) {
	data := zipped(t, archive(t, 40))
	path := filepath.Join(t.TempDir(), "a.tgz")
	if err := os.WriteFile(path, data, 0o644); err != nil {
		t.Fatal(err)
	}
	want, err := epoch(t, path, imageloader.Options{NoIndex: true})
	if err != nil {
		t.Fatal(err)
	}
	c := &cloud{t: t, data: data}
	server := httptest.NewServer(c)
	defer server.Close()
	host := strings.TrimPrefix(server.URL, "http://")
	t.Setenv("STORAGE_EMULATOR_HOST", host)
	t.Setenv("AZURE_STORAGE_ACCOUNT", "account")
	t.Setenv("AZURE_STORAGE_KEY", "a2V5")
	t.Setenv("AWS_MAX_ATTEMPTS", "1")
	for name, url := range map[string]string{
		"s3":     "s3://bucket/sets/KEY?region=us-east-1&anonymous=true&use_path_style=true&endpoint=http://" + host,
		"gs":     "gs://bucket/sets/KEY?anonymous=true",
		"azblob": "azblob://bucket/sets/KEY?protocol=http&localemu=true&domain=" + host,
	} {
		t.Run(name, func(t *testing.T) {
			c.mu.Lock()
			c.n, c.asks, c.busy = 1, 0, 0
			c.mu.Unlock()
			at := func(key string) string { return strings.Replace(url, "KEY", key, 1) }
			o := imageloader.Options{OpenSource: Open, NoIndex: true}
			got, err := epoch(t, at("train.tgz"), o)
			if err != nil || got != want {
				t.Errorf("another epoch, error %v", err)
			}
			c.mu.Lock()
			if c.asks == 0 {
				t.Error("no request named the version")
			}
			c.mu.Unlock()
			if _, err := epoch(t, at("none.tgz"), o); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("not there: error %v", err)
			}
			if _, err := epoch(t, at("forbidden.tgz"), o); !errors.Is(err, fs.ErrPermission) && !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("forbidden: error %v", err)
			}
			s, err := Open(t.Context(), at("train.tgz"))
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			c.mu.Lock()
			c.n = 2
			c.mu.Unlock()
			_, err = s.ReadRange(t.Context(), 0, 10)
			if !errors.Is(err, imageloader.ErrSourceChanged) || !strings.Contains(err.Error(), "has changed") || gcerrors.Code(err) != gcerrors.FailedPrecondition {
				t.Errorf("replaced: error %v", err) // with what the store said
			}
			c.mu.Lock()
			c.busy = 2
			c.mu.Unlock()
			if got, err := epoch(t, at("train.tgz"), o); err != nil || got != want {
				t.Errorf("busy: another epoch, error %v", err)
			}
		})
	}
}

// TestWrongURLs: no request is made, and none is tried again.
func TestWrongURLs(t *testing.T) {
	for _, url := range []string{"s3://bucket", "s3://bucket/", "gs://%zz/a", "ftp://host/a.tar", "s3://bucket/a.tar?what=1", "file:///"} {
		_, err := imageloader.Open(url, imageloader.Options{OpenSource: Open})
		if err == nil || !errors.Is(err, errors.ErrUnsupported) || !strings.Contains(err.Error(), url) {
			t.Errorf("%s: error %v", url, err)
		}
	}
	if _, err := imageloader.Open("file:///none/a.tar", imageloader.Options{OpenSource: Open}); err == nil {
		t.Error("no error")
	}
}
