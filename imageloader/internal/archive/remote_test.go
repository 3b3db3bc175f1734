package archive_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/imageloader/internal/sourcetest"
)

// flaky is a server that fails, breaks responses off, and changes its file.
type flaky struct {
	data  []byte
	etag  string
	every int // one of `every` responses to requests for the same end is complete
	n     atomic.Int64
	mode  string

	mu   sync.Mutex
	ends map[string]int
}

func (f *flaky) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	n := f.n.Add(1)
	_, end, _ := strings.Cut(r.Header.Get("Range"), "-")
	f.mu.Lock()
	if f.ends == nil {
		f.ends = map[string]int{}
	}
	f.ends[end]++
	asked := f.ends[end]
	f.mu.Unlock()
	w.Header().Set("ETag", f.etag)
	switch {
	case f.mode == "no ranges":
		w.Write(f.data)
		return
	case f.mode == "gone":
		http.Error(w, "no", http.StatusNotFound)
		return
	case f.mode == "changes" && n > 3:
		http.ServeContent(w, r, "", time.Unix(1e9+1, 0), bytes.NewReader(f.data))
		return
	case f.mode == "down":
		http.Error(w, "busy", http.StatusServiceUnavailable)
		return
	case asked%f.every == 1:
		http.Error(w, "busy", http.StatusServiceUnavailable)
		return
	case asked%f.every != 0:
		w = &breaking{w, 1000 + rand.IntN(90_000)}
	}
	http.ServeContent(w, r, "", time.Unix(1e9, 0), bytes.NewReader(f.data))
}

// breaking breaks a response off after left bytes.
type breaking struct {
	http.ResponseWriter
	left int
}

func (b *breaking) Write(p []byte) (int, error) {
	n, err := b.ResponseWriter.Write(p[:min(len(p), b.left)])
	if b.left -= n; b.left == 0 {
		panic(http.ErrAbortHandler)
	}
	return n, err
}

func byHTTP(client *http.Client) func(context.Context, string) (archive.Source, error) {
	return func(ctx context.Context, url string) (archive.Source, error) {
		return archive.OpenHTTP(ctx, url, client)
	}
}

// TestFailedRequestsAreRepeated: a request that fails or breaks off is repeated. A changed file and
// a server without ranges are errors that name the URL.
func TestFailedRequestsAreRepeated(t *testing.T) {
	data := make([]byte, 500_000)
	for i := range data {
		data[i] = byte(rand.Uint32())
	}
	for mode, want := range map[string]string{"": "", "no ranges": "range requests", "gone": "404",
		"changes": "has changed", "down": "503"} {
		f := &flaky{data: data, etag: `"one"`, every: 3, mode: mode}
		server := httptest.NewServer(f)
		read := func() error {
			file, err := archive.OpenRemote(t.Context(), server.URL+"/x", byHTTP(server.Client()),
				archive.Times(time.Microsecond, time.Minute))
			if err != nil {
				return err
			}
			defer file.Close()
			got, err := io.ReadAll(file)
			if err != nil {
				return err
			}
			if !bytes.Equal(got, data) {
				t.Errorf("ReadAll: %s; want the file's bytes", archivetest.Difference(got, data))
			}
			part := make([]byte, 200_000)
			if _, err := file.ReadAt(part, 123_456); err != nil {
				return err
			}
			if want := data[123_456:][:len(part)]; !bytes.Equal(part, want) {
				t.Errorf("ReadAt of offset 123456: %s; want the file's bytes",
					archivetest.Difference(part, want))
			}
			for _, to := range []int64{400_000, 10, 300, 499_999} {
				if _, err := file.Seek(to, io.SeekStart); err != nil {
					return err
				}
				if _, err := io.ReadFull(file, part[:1]); err != nil || part[0] != data[to] {
					t.Errorf("at %d: %v", to, err)
				}
			}
			if n, err := file.ReadAt(part, int64(len(data))-5); n != 5 || err != io.EOF {
				t.Errorf("at the end: %d, %v, want n = 5, err = %v", n, err, io.EOF)
			}
			return nil
		}
		err := read()
		server.Close()
		if (err == nil) != (want == "") || err != nil &&
			(!strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), server.URL)) {
			t.Errorf("%q: error %v", mode, err)
		}
		if mode == "gone" && !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%q: error %v", mode, err)
		}
	}
}

// TestSilentResponsesAreRepeated: a request is repeated if its response stops in the middle.
func TestSilentResponsesAreRepeated(t *testing.T) {
	data := archivetest.Images(t, 30, nil)
	var stall atomic.Int32 // number of later responses that stop in the middle
	stall.Store(3)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var first int
		if _, err := fmt.Sscanf(r.Header.Get("Range"), "bytes=%d-", &first); err != nil ||
			r.Header.Get("Range") == "bytes=0-0" || stall.Add(-1) < 0 {
			http.ServeContent(w, r, "", time.Unix(1e9, 0), strings.NewReader(string(data)))
			return
		}
		w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", first, len(data)-1, len(data)))
		w.Header().Set("Content-Length", fmt.Sprint(len(data)-first))
		w.Header().Set("Last-Modified", time.Unix(1e9, 0).UTC().Format(http.TimeFormat))
		w.WriteHeader(http.StatusPartialContent)
		_, _ = w.Write(data[first : first+1000])
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	}))
	defer server.Close()
	file, err := archive.OpenRemote(t.Context(), server.URL, byHTTP(server.Client()),
		archive.Times(time.Microsecond, 300*time.Millisecond))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	got := make([]byte, len(data))
	if _, err := file.ReadAt(got, 0); err != nil || string(got) != string(data) {
		t.Errorf("ReadAt: error %v, %s; want the file's bytes", err,
			archivetest.Difference(got, []byte(data)))
	}
	stall.Store(3)
	for n := 0; n < len(got); {
		k, err := file.Read(got[n:])
		if err != nil {
			t.Fatal(err)
		}
		n += k
	}
	if string(got) != string(data) {
		t.Errorf("Read after a stall: %s; want the file's bytes", archivetest.Difference(got, []byte(data)))
	}
}

// TestSourceTriesAreLimited: a request that fails is repeated a limited number of times. Bytes that
// came before a failure are kept.
func TestSourceTriesAreLimited(t *testing.T) {
	archivetest.Within(t)
	archivetest.NoLeaks(t)
	data := make([]byte, 3_000_000)
	rng := rand.New(rand.NewPCG(3, 4))
	for i := range data {
		data[i] = byte(rng.Uint32())
	}
	times := archive.Times(time.Microsecond, 100*time.Millisecond)
	s := sourcetest.New(5, map[string]sourcetest.Object{"store://x": {Data: string(data), Version: "1"}})
	s.Bad, s.Stops = 0.1, true
	f, err := archive.OpenRemote(t.Context(), "store://x", s.OpenSource, times)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(f); err != nil || !bytes.Equal(got, data) {
		t.Errorf("%d bytes, error %v", len(got), err)
	}
	for range 200 { // forwards and backwards, near and far
		at := rng.Int64N(int64(len(data)))
		if rng.IntN(2) == 0 {
			at = min(int64(len(data))-1, max(0, f.Offset()+rng.Int64N(200_000)-50_000))
		}
		if _, err := f.Seek(at, io.SeekStart); err != nil {
			t.Fatal(err)
		}
		p := make([]byte, 1+rng.IntN(90_000))
		n, err := io.ReadFull(f, p)
		if err != nil && (err != io.ErrUnexpectedEOF || int(at)+n != len(data)) || !bytes.Equal(p[:n], data[at:][:n]) {
			t.Fatalf("%d bytes at %d: %d came, error %v", len(p), at, n, err)
		}
	}
	if err := f.Close(); err != nil {
		t.Error(err)
	}

	s.Bad, s.Asked = 0, 0
	times = archive.Times(time.Microsecond, time.Minute) // nothing stops
	if f, err = archive.OpenRemote(t.Context(), "store://x", s.OpenSource, times); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(f, make([]byte, 1000)); err != nil {
		t.Fatal(err)
	}
	f.Await()
	s.Lock()
	if s.Asked != archive.PiecesAhead {
		t.Errorf("%d requests for the first bytes, want %v", s.Asked, archive.PiecesAhead)
	}
	s.Err = sourcetest.ErrBusy
	s.Unlock()
	came := int64(1000)
	for {
		n, err := f.Read(make([]byte, 100_000))
		if came += int64(n); err != nil {
			if !errors.Is(err, sourcetest.ErrBusy) || !strings.Contains(err.Error(), "store://x") {
				t.Errorf("error %v, want the error %v with %q", err, sourcetest.ErrBusy, "store://x")
			}
			break
		}
	}
	if want := int64(archive.FirstPiece * (1 + 2 + 4 + 8)); came != want {
		t.Errorf("%d bytes came before the error, want %d", came, want)
	}
	if err := f.Close(); err != nil || s.Open != 0 {
		t.Errorf("%d are open, error %v, want no error, s.Open = 0", s.Open, err)
	}
}

// lyingSource reports a wrong size, and sends neither a byte nor an end.
type lyingSource struct{ size int64 }

func (l lyingSource) Info() archive.SourceInfo { return archive.SourceInfo{Size: l.size} }
func (l lyingSource) Close() error             { return nil }

func (l lyingSource) ReadRange(context.Context, int64, int64) (io.ReadCloser, error) {
	return io.NopCloser(nothing{}), nil
}

type nothing struct{}

func (nothing) Read([]byte) (int, error) { return 0, nil }

// TestSourceThatBreaksItsContractIsAnError: a Source that breaks its contract is an error, never a
// hang.
func TestSourceThatBreaksItsContractIsAnError(t *testing.T) {
	archivetest.Within(t)
	for size, want := range map[int64]string{-1: "-1 bytes", 0: "empty", 5000: io.ErrNoProgress.Error()} {
		times := archive.Times(time.Microsecond, time.Minute)
		f, err := archive.OpenRemote(t.Context(), "store://x",
			func(context.Context, string) (archive.Source, error) { return lyingSource{size}, nil }, times)
		if err == nil {
			_, err = f.ReadAt(make([]byte, 10), 0)
			if err == io.EOF {
				err = errors.New("empty")
			}
			f.Close()
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%d bytes: error %v, want an error with %q", size, err, want)
		}
	}
}

// trickle sends a byte every millisecond, without end.
type trickle struct{ ctx context.Context }

func (trickle) Info() archive.SourceInfo { return archive.SourceInfo{Size: 1 << 20} }
func (trickle) Close() error             { return nil }

func (trickle) ReadRange(ctx context.Context, _, _ int64) (io.ReadCloser, error) {
	return io.NopCloser(trickle{ctx}), nil
}

func (r trickle) Read([]byte) (int, error) {
	select {
	case <-r.ctx.Done():
		return 0, r.ctx.Err()
	case <-time.After(time.Millisecond):
		return 1, nil
	}
}

// TestTrickleCountsAsStopped: a store that sends only a few bytes a second counts as stopped.
func TestTrickleCountsAsStopped(t *testing.T) {
	archivetest.Within(t)
	f, err := archive.OpenRemote(t.Context(), "store://x",
		func(context.Context, string) (archive.Source, error) { return trickle{}, nil },
		archive.Times(time.Microsecond, 20*time.Millisecond))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.ReadAt(make([]byte, 1<<20), 0); err == nil ||
		!strings.Contains(err.Error(), "less than 32768 bytes have come in 20ms") {
		t.Errorf("error %v, want an error with %q", err, "less than 32768 bytes have come in 20ms")
	}
}

// failing is a Source whose n-th request fails with the error that fail returns, or returns bytes
// if the error is nil.
type failing struct {
	fail  func(n int) error
	asked []time.Duration // times of the requests, since the start
	began time.Time
}

func (f *failing) open(context.Context, string) (archive.Source, error) { return f, f.next() }

func (f *failing) next() error {
	f.asked = append(f.asked, time.Since(f.began))
	return f.fail(len(f.asked))
}

func (f *failing) Info() archive.SourceInfo { return archive.SourceInfo{Size: 1 << 20} }
func (f *failing) Close() error             { return nil }
func (f *failing) ReadRange(_ context.Context, _, n int64) (io.ReadCloser, error) {
	return io.NopCloser(bytes.NewReader(make([]byte, n))), f.next()
}

// TestRequestsAreRepeatedForALimitedTime: requests are repeated for a limited time, measured in a
// synctest bubble.
func TestRequestsAreRepeatedForALimitedTime(t *testing.T) {
	busy := errors.New("busy")
	always := func(err error) func(int) error { return func(int) error { return err } }
	after := func(first int, err error) func(int) error { // after the archive was opened
		return func(n int) error {
			if n < first {
				return nil
			}
			return err
		}
	}
	for name, c := range map[string]struct {
		fail  func(n int) error
		want  string // of the error; "": none
		tries int
		least time.Duration // from the first request to the last
		most  time.Duration
	}{
		"down": {always(busy), "busy (6 tries in 3.1s)", 6, 3100 * time.Millisecond,
			3100 * time.Millisecond},
		"goes down": {after(2, busy), "busy (18 tries in 1m52.7s)", 19, 100 * time.Second,
			2 * time.Minute},
		"is back in a minute": {func(n int) error { return map[bool]error{true: busy}[n > 1 && n < 13] },
			"", 13, 50 * time.Second, time.Minute},
		"opening waits as asked": {func(n int) error {
			return map[bool]error{true: archive.RetryAfter(busy,
				40*time.Second)}[n < 3]
		}, "", 4, 80 * time.Second, 80 * time.Second},
		"reading waits as asked": {func(n int) error {
			return map[bool]error{true: archive.RetryAfter(busy,
				100*time.Second)}[n == 2]
		}, "", 3, 100 * time.Second, 100 * time.Second},
		"asks for less": {always(archive.RetryAfter(busy, time.Millisecond)), "busy (6 tries", 6,
			3100 * time.Millisecond, 3100 * time.Millisecond},
		"asks for an hour": {after(2, archive.RetryAfter(busy, time.Hour)),
			"busy, and asks to wait 1h0m0s: the loader waits up to 2m0s in all", 2, 0, 0},
		"asks again and again": {always(archive.RetryAfter(busy, 50*time.Second)),
			"busy, and asks to wait 50s", 3, 100 * time.Second, 100 * time.Second},
		"is gone": {after(2, fs.ErrNotExist), "not exist", 2, 0, 0},
	} {
		synctest.Test(t, func(t *testing.T) {
			s := &failing{fail: c.fail, began: time.Now()}
			f, err := archive.OpenRemote(t.Context(), "store://x", s.open, archive.DefaultTimes)
			if err == nil {
				defer f.Close()
				_, err = f.ReadAt(make([]byte, 1000), 5)
			}
			last := s.asked[len(s.asked)-1]
			if len(s.asked) != c.tries || last < c.least || last > c.most ||
				(err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
				t.Errorf("%s: %d tries in %v, error %v", name, len(s.asked), last, err)
			}
		})
	}
}

// TestRetryAfterIsHonoured: the wait that a server asks for, in seconds or as a date, is honoured.
func TestRetryAfterIsHonoured(t *testing.T) {
	for _, c := range []struct {
		status      int
		header      string
		least, most time.Duration
	}{
		{http.StatusTooManyRequests, "7", 7 * time.Second, 7 * time.Second},
		{http.StatusServiceUnavailable, "120", 2 * time.Minute, 2 * time.Minute},
		{http.StatusServiceUnavailable, time.Now().Add(time.Hour).UTC().Format(http.TimeFormat),
			59 * time.Minute, time.Hour},
		{http.StatusServiceUnavailable, time.Now().Add(-time.Hour).UTC().Format(http.TimeFormat), 0, 0},
		{http.StatusServiceUnavailable, "soon", 0, 0},
		{http.StatusServiceUnavailable, "-3", 0, 0},
		{http.StatusServiceUnavailable, "99999999999999999999", 0, 0},
		{http.StatusNotFound, "7", 0, 0},
	} {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Retry-After", c.header)
			http.Error(w, "no", c.status)
		}))
		_, err := archive.OpenHTTP(t.Context(), server.URL, server.Client())
		server.Close()
		if got := archive.AskedToWait(err); err == nil || got < c.least || got > c.most {
			t.Errorf("%d, %q: waits %v, error %v, want an error, got at least %v, got at most %v",
				c.status, c.header, got, err, c.least, c.most)
		}
	}
}

// TestDroppedResponseIsNotACutFile: the error of a response that ends too early names the dropped
// connection, and does not claim that the file is cut off.
func TestDroppedResponseIsNotACutFile(t *testing.T) {
	for _, name := range []string{"aborted", "closed"} {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			var first, last int
			if _, err := fmt.Sscanf(r.Header.Get("Range"), "bytes=%d-%d", &first, &last); err != nil {
				t.Error(err)
			}
			text := fmt.Sprintf("bytes %d-%d/600", first, last)
			if last == 0 || name == "aborted" {
				w.Header().Set("Content-Range", text)
				w.WriteHeader(http.StatusPartialContent)
				w.Write([]byte("x"))
				w.(http.Flusher).Flush()
				if last > 0 {
					panic(http.ErrAbortHandler)
				}
				return
			}
			conn, buffered, err := w.(http.Hijacker).Hijack()
			if err != nil {
				t.Error(err)
				return
			}
			fmt.Fprintf(buffered, "HTTP/1.1 206 Partial Content\r\nContent-Length: %d\r\nContent-Range: "+
				"%s\r\n\r\nx", last+1-first, text)
			buffered.Flush()
			conn.Close()
		}))
		file, err := archive.OpenRemote(t.Context(), server.URL, byHTTP(server.Client()),
			archive.Times(time.Microsecond, time.Minute))
		if err != nil {
			t.Fatal(err)
		}
		_, err = file.ReadAt(make([]byte, 600), 0)
		file.Close()
		server.Close()
		if err = archive.Explain(err); !strings.Contains(err.Error(), "the connection was dropped at byte") ||
			strings.Contains(err.Error(), "cut off") || errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("%s: error %v", name, err)
		}
	}
}

// A URL's user, password and query may be secret, also in a redirection.
func TestErrorsOfURLsHaveNoSecret(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/moved.tgz":
			http.Redirect(w, r, "http://name:SECRET@127.0.0.1:0/there.tgz?token=SECRET", http.StatusFound)
		default:
			http.Error(w, "no", http.StatusForbidden)
		}
	}))
	defer server.Close()
	for path, want := range map[string]string{"/refused.tgz": "/refused.tgz", "/moved.tgz": "/there.tgz",
		"/%zz.tgz": "no valid URL"} {
		address := strings.Replace(server.URL, "://", "://name:SECRET@", 1) + path + "?token=SECRET"
		_, err := archive.OpenHTTP(t.Context(), address, server.Client())
		if err == nil || strings.Contains(err.Error(), "SECRET") {
			t.Errorf("OpenHTTP of %s: %v, want an error, err.Error() without %q", path, err, "SECRET")
		}
		if path == "/moved.tgz" { // tried again for long
			if !strings.Contains(fmt.Sprint(err), want) {
				t.Errorf("%v, want %q", err, want)
			}
			continue
		}
		_, err = archive.Open(t.Context(), address, archive.Config{})
		if err == nil || strings.Contains(err.Error(), "SECRET") || !strings.Contains(err.Error(), want) {
			t.Errorf("Open of %s: %v, want %q", path, err, want)
		}
	}
}

// A Source's error may quote the URL of its request. The error keeps its kind.
func TestErrorsOfSourcesHaveNoSecret(t *testing.T) {
	for _, kind := range []error{fs.ErrNotExist, archive.ErrSourceChanged} {
		open := func(context.Context, string) (archive.Source, error) {
			return nil, fmt.Errorf(`Get "https://store/a.tgz?sig=SECRET": %w`, kind)
		}
		_, err := archive.Open(t.Context(), "store://name:SECRET@bucket/a.tgz?token=SECRET",
			archive.Config{OpenSource: open})
		if text := fmt.Sprint(err); !errors.Is(err, kind) || strings.Contains(text, "SECRET") ||
			!strings.Contains(text, "https://store/a.tgz") ||
			!strings.Contains(text, "store://bucket/a.tgz") {
			t.Errorf("error %v, text %v, want the error %v, text with no %q, but %q and %q",
				err, text, kind, "SECRET", "https://store/a.tgz", "store://bucket/a.tgz")
		}
	}
}
