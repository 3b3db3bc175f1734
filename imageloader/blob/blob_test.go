package blob

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"image"
	"image/png"
	"io"
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

	"github.com/Azure/azure-sdk-for-go/sdk/azcore/policy"
	"github.com/Azure/azure-sdk-for-go/sdk/storage/azblob/container"
	"gocloud.dev/blob/azureblob"
	"gocloud.dev/blob/memblob"
	"gocloud.dev/gcerrors"

	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/internal/parquettest"
)

// archive returns a .tar archive of n images in three classes.
func archive(t *testing.T, n int) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	noise := rand.New(rand.NewPCG(1, 2)) // incompressible, so that a .tgz has checkpoints
	for i := range n {
		m := image.NewRGBA(image.Rect(0, 0, 60, 40))
		for k := range m.Pix {
			m.Pix[k] = byte(noise.Uint32()) | 255*byte(k&3/3) // alpha is 255
		}
		var file bytes.Buffer
		if err := png.Encode(&file, m); err != nil {
			t.Fatal(err)
		}
		if err := w.WriteHeader(&tar.Header{Name: fmt.Sprintf("class%d/%03d.png", i%3, i),
			Size: int64(file.Len()), Mode: 0o644, Typeflag: tar.TypeReg}); err != nil {
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

// epoch loads one epoch and returns the samples' names, labels and pixels in order.
func epoch(t *testing.T, path string, o imageloader.Options) (string, error) {
	t.Helper()
	o.BatchSize, o.Transform, o.Seed = 8, imageloader.Eval(5, 5), 3
	o.ShuffleBytes = 1 // too small to keep the archive in memory
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

// An archive, whole or in shards, gives the same epoch from a file, from a bucket that the program
// has opened, and from the URL of a folder: in order and shuffled, without and with an index.
func TestBucketsGiveTheEpochOfAFile(t *testing.T) {
	data := archive(t, 60)
	dir := t.TempDir()
	bucket := memblob.OpenBucket(nil)
	defer bucket.Close()
	half := len(archive(t, 30)) - 1024 // offset of the second half of the members
	for name, data := range map[string][]byte{"a.tar": data, "a.tgz": zipped(t, data),
		"s-0.tgz": zipped(t, data[:half]), "s-1.tgz": zipped(t, data[half:])} {
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
				// without an index the order is the order of a stream
				if round == 0 && shuffle && !strings.HasSuffix(url, ".tar") {
					got, want := strings.Split(got, "\n"), strings.Split(want, "\n")
					slices.Sort(got)
					slices.Sort(want)
					if err != nil || !slices.Equal(got, want) {
						t.Errorf("%s: error %v or other samples, want those of the .tar", url, err)
					}
					continue
				}
				if err != nil || got != want {
					t.Errorf("%s, round %d, shuffle %v: error %v or another epoch, want the .tar's",
						url, round, shuffle, err)
				}
			}
			if info, err := os.Stat(index); err != nil || info.Size() == 0 {
				t.Errorf("%s: index: %v", url, err)
			}
			r, err := imageloader.Inspect(t.Context(), url, imageloader.Options{OpenSource: open}, nil)
			if err != nil || r.Samples != 60 {
				t.Errorf("inspect %s: %+v, error %v, want no error, r.Samples = 60", url, r, err)
			}
			made, err := imageloader.MakeIndex(t.Context(), url,
				imageloader.Options{OpenSource: open, IndexFile: index}, nil)
			if err != nil || made.Samples != 60 || !made.Random {
				t.Errorf("index %s: %+v, error %v, want no error, made.Samples = 60, made.Random = true",
					url, made, err)
			}
		}
	}
}

// packed returns the members of a tar as a zip, and as a Parquet file.
func packed(t *testing.T, data []byte) (zipFile, table []byte) {
	t.Helper()
	var b bytes.Buffer
	w := zip.NewWriter(&b)
	var rows []parquettest.Row
	for r := tar.NewReader(bytes.NewReader(data)); ; {
		h, err := r.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		to, err := w.Create(h.Name)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := to.Write(content); err != nil {
			t.Fatal(err)
		}
		rows = append(rows, parquettest.Row{Path: h.Name, Image: string(content), Label: len(rows) % 3})
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes(), parquettest.File(t, rows, parquettest.Layout{Classes: []string{"class0", "class1", "class2"}, Group: 9})
}

// TestBucketsReadZipAndParquet: objects that are a zip or a Parquet file give the epoch of a .tar,
// from a bucket that the program has opened and from a URL.
func TestBucketsReadZipAndParquet(t *testing.T) {
	data := archive(t, 60)
	zipFile, table := packed(t, data)
	dir := t.TempDir()
	bucket := memblob.OpenBucket(nil)
	defer bucket.Close()
	for name, data := range map[string][]byte{"a.tar": data, "a.zip": zipFile, "a.parquet": table} {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o644); err != nil {
			t.Fatal(err)
		}
		if err := bucket.WriteAll(t.Context(), name, data, nil); err != nil {
			t.Fatal(err)
		}
	}
	for _, shuffle := range []bool{false, true} {
		want, err := epoch(t, filepath.Join(dir, "a.tar"), imageloader.Options{NoIndex: true, Shuffle: shuffle})
		if err != nil {
			t.Fatal(err)
		}
		for url, open := range map[string]func(context.Context, string) (imageloader.Source, error){
			"mem://bucket/a.zip": In(bucket), "mem://bucket/a.parquet": In(bucket),
			"file://" + dir + "/a.zip": Open, "file://" + dir + "/a.parquet": Open,
		} {
			index := filepath.Join(t.TempDir(), "index")
			for round := range 2 { // the second reads the index of a Parquet file
				got, err := epoch(t, url, imageloader.Options{OpenSource: open, IndexFile: index, Shuffle: shuffle})
				if err != nil || got != want {
					t.Errorf("%s, round %d, shuffle %v: error %v or another epoch, want the .tar's", url, round, shuffle, err)
				}
			}
		}
	}
}

// A replaced object is an error even with a store that does not compare versions itself.
func TestReplacedObjectIsAnError(t *testing.T) {
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
		t.Errorf("error %v, want the error %v", err, imageloader.ErrSourceChanged)
	}
	if err := bucket.Delete(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	if _, err := s.ReadRange(t.Context(), 1, 2); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("error %v, want the error %v", err, fs.ErrNotExist)
	}
}

// cloud answers read requests like S3, Google Cloud Storage and Azure, each in its own dialect. All
// match versions by If-Match, or by Google's equivalent.
type cloud struct {
	t    *testing.T
	mu   sync.Mutex
	data []byte
	n    int64 // version of data
	busy int   // number of coming requests that get 503
	asks int   // number of requests for data that named the version
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
		fail(http.StatusForbidden,
			map[bool]string{true: "AuthenticationFailed", false: "AccessDenied"}[r.Header.Get("X-Ms-Version") != ""])
		return
	case !strings.Contains(r.URL.Path, "train.tgz"):
		fail(http.StatusNotFound,
			map[bool]string{true: "BlobNotFound", false: "NoSuchKey"}[r.Header.Get("X-Ms-Version") != ""])
		return
	case strings.HasPrefix(r.URL.Path, "/storage/v1/"):
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprintf(w, `{"kind":"storage#object","name":"sets/train.tgz","bucket":"bucket","generation":"%d",`+
			`"size":"%d","etag":"e","updated":"2024-01-01T00:00:00.123Z"}`, c.n, len(c.data))
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
			fail(http.StatusPreconditionFailed,
				map[bool]string{true: "ConditionNotMet",
					false: "PreconditionFailed"}[r.Header.Get("X-Ms-Version") != ""])
			return
		}
		if ms := r.Header.Get("X-Ms-Range"); ms != "" {
			r.Header.Set("Range", ms)
		}
		r.Header.Del("If-Match")
	}
	http.ServeContent(w, r, "", time.Unix(1e9, 0), bytes.NewReader(c.data))
}

// Each store's own client reads an archive. The loader retries a busy store. An object that is
// absent, forbidden or replaced is an error of its kind.
func TestCloudClientsReadAnArchive(t *testing.T) {
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
				t.Errorf("error %v or another epoch, want the epoch of the other stores", err)
			}
			c.mu.Lock()
			if c.asks == 0 {
				t.Error("0 requests named the version, want at least 1")
			}
			c.mu.Unlock()
			if _, err := epoch(t, at("none.tgz"), o); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("absent: error %v, want the error %v", err, fs.ErrNotExist)
			}
			if _, err := epoch(t, at("forbidden.tgz"), o); !errors.Is(err, fs.ErrPermission) &&
				!errors.Is(err, fs.ErrNotExist) {
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
			if !errors.Is(err, imageloader.ErrSourceChanged) ||
				!strings.Contains(err.Error(), "has changed") || gcerrors.Code(err) != gcerrors.FailedPrecondition {
				t.Errorf("replaced: error %v", err) // the error includes the store's own
			}
			c.mu.Lock()
			c.busy = 2
			c.mu.Unlock()
			if got, err := epoch(t, at("train.tgz"), o); err != nil || got != want {
				t.Errorf("busy: error %v or another epoch, want the whole epoch", err)
			}
		})
	}
}

// A wrong URL is an error that the loader does not retry, and makes no request.
func TestWrongURLsAreNotRetried(t *testing.T) {
	for _, url := range []string{
		"s3://bucket", "s3://bucket/", "gs://%zz/a", "ftp://host/a.tar", "s3://bucket/a.tar?what=SECRET", "file:///",
		"s3://bucket?token=SECRET", "gs://%zz/a?token=SECRET", "ftp://host/a.tar?token=SECRET",
	} {
		t.Run(url, func(t *testing.T) {
			shown, _, _ := strings.Cut(url, "?") // a query may be secret
			_, err := imageloader.Open(url, imageloader.Options{OpenSource: Open})
			if err == nil || !errors.Is(err, errors.ErrUnsupported) || !strings.Contains(err.Error(), shown) {
				t.Errorf("error %v, want the error %v with %q", err, errors.ErrUnsupported, shown)
			}
			_, alone := Open(t.Context(), url)
			if text := fmt.Sprint(err, alone); alone == nil || strings.Contains(text, "SECRET") {
				t.Errorf("errors %s, alone %v, want alone not nil, text without %q", text, alone, "SECRET")
			}
		})
	}
	if _, err := imageloader.Open("file:///none/a.tar", imageloader.Options{OpenSource: Open}); err == nil {
		t.Error("Open of a missing file:// archive: got no error, want one")
	}
}

// Azure's client quotes the URL of a request that fails, with the signature of its container.
func TestErrorsOfRequestsHaveNoSignature(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !strings.Contains(r.URL.RawQuery, "SECRET") {
			t.Errorf("%s has no signature, want it with %q", r.URL, "SECRET")
		}
		panic(http.ErrAbortHandler) // the connection breaks off
	}))
	defer server.Close()
	options := &container.ClientOptions{ClientOptions: policy.ClientOptions{Retry: policy.RetryOptions{MaxRetries: -1}}}
	client, err := container.NewClientWithNoCredential(server.URL+"/account/bucket?sv=2022-11-02&sig=SECRET", options)
	if err != nil {
		t.Fatal(err)
	}
	bucket, err := azureblob.OpenBucket(t.Context(), client, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer bucket.Close()
	_, err = In(bucket)(t.Context(), "azblob://bucket/train.tgz")
	if text := fmt.Sprint(err); err == nil || strings.Contains(text, "SECRET") || !strings.Contains(text, "train.tgz") {
		t.Errorf("error %v, text %v, want an error, text with no %q, but %q",
			err, text, "SECRET", "train.tgz")
	}
}
