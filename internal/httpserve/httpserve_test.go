package httpserve

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/imageloader/decode"
	"github.com/torchstream/torchstream/serve"
)

// request is an upload of the body whose Content-Length is length.
func request(body io.Reader, length int64) *http.Request {
	r := httptest.NewRequest(http.MethodPost, "/", body)
	r.ContentLength = length
	return r
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { clear(b); return len(b), nil }

// A body that is too long, or for which there is no memory, is refused before a byte of it is read.
func TestRefusedBodiesAreNotRead(t *testing.T) {
	unread := iotest.ErrReader(errors.New("is read"))
	u := NewUploads(100, 250)
	var long *http.MaxBytesError
	if _, _, err := u.Read(httptest.NewRecorder(), request(unread, 101)); !errors.As(err, &long) || long.Limit != 100 {
		t.Errorf("101 bytes: got %v, want a *http.MaxBytesError of 100", err)
	}
	var releases []func()
	for _, length := range []int64{100, 90} {
		data, release, err := u.Read(httptest.NewRecorder(), request(io.LimitReader(zeros{}, length), length))
		if err != nil || int64(len(data)) != length {
			t.Fatalf("got %d bytes, %v, want %d", len(data), err, length)
		}
		releases = append(releases, release)
	}
	for _, length := range []int64{61, -1} {
		if _, _, err := u.Read(httptest.NewRecorder(), request(unread, length)); !errors.Is(err, ErrBusy) {
			t.Errorf("length %d with 60 bytes free: got %v, want ErrBusy", length, err)
		}
	}
	releases[1]()
	releases[1]() // once is enough
	if _, _, err := u.Read(httptest.NewRecorder(), request(iotest.ErrReader(io.ErrUnexpectedEOF), -1)); !errors.Is(err, ErrIncomplete) {
		t.Errorf("a body that breaks off: got %v, want ErrIncomplete", err)
	}
	if u.free != 150 {
		t.Errorf("%d bytes are free, want 150: the limit without the first body", u.free)
	}
}

// TestBodiesAllocateTheirLength measures what bodies of each kind allocate.
func TestBodiesAllocateTheirLength(t *testing.T) {
	const limit = 10 << 20
	for name, c := range map[string]struct{ size, length, most int64 }{
		"over the limit":                 {limit + 1, limit + 1, 64 << 10},
		"over the limit, length unknown": {limit + 1, -1, limit + limit/4},
		"the limit":                      {limit, limit, limit + 64<<10},
		"100 bytes":                      {100, 100, 64 << 10},
	} {
		u := NewUploads(limit, limit)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		const uploads = 10
		for range uploads {
			data, release, err := u.Read(httptest.NewRecorder(), request(io.LimitReader(zeros{}, c.size), c.length))
			if (err == nil) != (c.size <= limit) || err == nil && int64(len(data)) != c.size {
				t.Fatalf("%s: got %d bytes, %v", name, len(data), err)
			}
			if err == nil {
				release()
			}
		}
		runtime.ReadMemStats(&after)
		if got := int64(after.TotalAlloc-before.TotalAlloc) / uploads; got > c.most {
			t.Errorf("%s: a body allocates %d bytes, want at most %d", name, got, c.most)
		}
	}
}

// pipes is a listener for the connections of a channel.
type pipes chan net.Conn

func (p pipes) Accept() (net.Conn, error) {
	if c, open := <-p; open {
		return c, nil
	}
	return nil, net.ErrClosed
}

func (p pipes) Close() error   { close(p); return nil }
func (p pipes) Addr() net.Addr { return &net.UnixAddr{} }

// TestSlowClientsGiveUpTheirMemory also checks that a request whose body has come may take long.
func TestSlowClientsGiveUpTheirMemory(t *testing.T) {
	const computes = 3 * time.Minute
	for name, c := range map[string]struct {
		announced, sent int
		every           time.Duration // between two bytes
		status          int
		takes           time.Duration
	}{
		"a client that stops":      {10, 3, 0, http.StatusBadRequest, 5 * time.Second},
		"a byte in four seconds":   {100, 100, 4 * time.Second, http.StatusBadRequest, time.Minute},
		"a slow body that arrives": {10, 10, 4 * time.Second, http.StatusOK, 40*time.Second + computes},
		"an empty body":            {0, 0, 0, http.StatusOK, computes},
	} {
		synctest.Test(t, func(t *testing.T) {
			u := NewUploads(100, 100)
			server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				_, release, err := u.Read(w, r)
				if err != nil {
					WriteError(w, r, err)
					return
				}
				defer release()
				time.Sleep(computes) // of the bubble's clock
				if r.Context().Err() != nil {
					t.Errorf("%s: the context has ended: %v, want a live one", name, context.Cause(r.Context()))
				}
			})}
			client, conn := net.Pipe()
			listener := make(pipes, 1)
			listener <- conn
			go server.Serve(listener)
			var sender sync.WaitGroup
			defer sender.Wait()
			defer client.Close()
			defer server.Close()
			began := time.Now()
			sender.Go(func() {
				fmt.Fprintf(client, "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n", c.announced)
				for range c.sent {
					time.Sleep(c.every)
					if _, err := client.Write([]byte{0}); err != nil {
						return // the server has given up
					}
				}
			})
			answer, err := http.ReadResponse(bufio.NewReader(client), nil)
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			if took := time.Since(began); answer.StatusCode != c.status || took != c.takes {
				t.Errorf("%s: status %d after %v, want %d after %v", name, answer.StatusCode, took, c.status, c.takes)
			}
			if synctest.Wait(); u.free != 100 {
				t.Errorf("%s: %d bytes are free, want 100", name, u.free)
			}
		})
	}
}

// TestErrorsHaveStatuses also checks that only errors of the server are logged.
func TestErrorsHaveStatuses(t *testing.T) {
	var log bytes.Buffer
	before := slog.Default()
	defer slog.SetDefault(before)
	slog.SetDefault(slog.New(slog.NewTextHandler(&log, nil)))
	fault := func(kind, err error) error { return decode.Errors{{Kind: kind, Err: err, Offset: -1}} }
	for _, c := range []struct {
		err    error
		status int
		says   string
		logged bool
	}{
		{&http.MaxBytesError{Limit: 7}, http.StatusRequestEntityTooLarge, "over 7 bytes", false},
		{ErrIncomplete, http.StatusBadRequest, "whole", false},
		{ErrBusy, http.StatusServiceUnavailable, "try again", false},
		{serve.ErrQueueFull, http.StatusServiceUnavailable, "try again", false},
		{serve.ErrClosed, http.StatusServiceUnavailable, "shutting down", false},
		{fault(decode.ErrTooLarge, &decode.LimitError{Limit: "MaxPixels", Value: 9, Max: 8}),
			http.StatusRequestEntityTooLarge, "limit of 8", false},
		{fault(decode.ErrDamaged, errors.New("cut off")), http.StatusUnprocessableEntity, "cut off", false},
		{fault(decode.ErrNotImage, errors.New("text")), http.StatusUnsupportedMediaType, "text", false},
		{fmt.Errorf("a secret path: %w", serve.ErrDeviceLost), http.StatusInternalServerError, "log", true},
	} {
		log.Reset()
		w := httptest.NewRecorder()
		WriteError(w, request(http.NoBody, 0), c.err)
		if w.Code != c.status || !strings.Contains(w.Body.String(), c.says) || strings.Contains(w.Body.String(), "Options.") ||
			strings.Contains(w.Body.String(), "secret") || log.Len() > 0 != c.logged ||
			(w.Code == http.StatusServiceUnavailable) != (w.Header().Get("Retry-After") != "") {
			t.Errorf("%v: status %d, %q, log %q, want %d, %q and logged %v", c.err, w.Code, w.Body, &log, c.status, c.says,
				c.logged)
		}
	}
	form := request(http.NoBody, 0)
	form.Header.Set("Content-Type", "multipart/form-data; boundary=b")
	w := httptest.NewRecorder()
	if WriteError(w, form, fault(decode.ErrNotImage, errors.New("text"))); !strings.Contains(w.Body.String(), "--data-binary") {
		t.Errorf("a form: got %q, want how to send the photograph alone", w.Body)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	log.Reset()
	w = httptest.NewRecorder()
	if WriteError(w, request(http.NoBody, 0).WithContext(ctx), errors.New("x")); w.Body.Len() > 0 || log.Len() > 0 {
		t.Errorf("a client that is gone: got %q and the log %q, want nothing", w.Body, &log)
	}
}

// A model that computes NaN is an error with a log line, not an empty answer.
func TestNaNIsAnErrorOfTheServer(t *testing.T) {
	var log bytes.Buffer
	before := slog.Default()
	defer slog.SetDefault(before)
	slog.SetDefault(slog.New(slog.NewTextHandler(&log, nil)))
	for _, c := range []struct {
		probability float64
		status      int
		kind, says  string
		logs        string
	}{
		{0.5, http.StatusOK, "application/json", `{"classes":[{"class":"a<b","label":1,"probability":0.5}],"batch":2,`, ""},
		{math.NaN(), http.StatusInternalServerError, "text/plain; charset=utf-8", "the server's log", "NaN"},
	} {
		log.Reset()
		w := httptest.NewRecorder()
		WriteAnswer(w, request(http.NoBody, 0), Answer{Batch: 2, Classes: []Class{{"a<b", 1, c.probability}}})
		if kind := w.Header().Get("Content-Type"); w.Code != c.status || kind != c.kind || !strings.Contains(w.Body.String(), c.says) ||
			!strings.Contains(log.String(), c.logs) || (log.Len() > 0) != (c.logs != "") {
			t.Errorf("%v: status %d, %s, %q, log %q, want %d, %s, %q, log %q", c.probability, w.Code, kind, w.Body, &log,
				c.status, c.kind, c.says, c.logs)
		}
	}
}

// TestMetrics compares the text with Prometheus's format.
func TestMetrics(t *testing.T) {
	s := serve.BatcherStats{Answered: 3, Refused: 1, Waiting: 2, Running: 1, Rows: 5,
		Buckets: []serve.BucketStats{{Size: 1, Batches: 2, Rows: 2}, {Size: 4, Batches: 1, Rows: 3}},
		Devices: []serve.DeviceStats{{Device: cuda.CPU, MaxBatch: 8}, {Device: 1, Lost: serve.ErrDeviceLost}}}
	s.Ran.Count, s.Ran.Sum = 3, 1500*time.Millisecond
	s.Ran.Counts[0], s.Ran.Counts[2], s.Ran.Counts[len(s.Ran.Counts)-1] = 1, 1, 1
	var counts Counts
	h := counts.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/bad" {
			http.Error(w, "bad", http.StatusTeapot)
		}
	}))
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	for path, ctx := range map[string]context.Context{"/": t.Context(), "/bad": t.Context(), "/gone": gone} {
		h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequestWithContext(ctx, http.MethodPost, path, nil))
	}
	var text bytes.Buffer
	if err := WriteMetrics(&text, s, &counts); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"# HELP torchstream_batcher_requests_total Requests by their result.\n" +
			"# TYPE torchstream_batcher_requests_total counter\n" +
			"torchstream_batcher_requests_total{result=\"answered\"} 3\n",
		"torchstream_batcher_requests_total{result=\"refused\"} 1\n",
		"torchstream_batcher_waiting_requests 2\n",
		"torchstream_batcher_batches_total{size=\"4\"} 1\n",
		"torchstream_batcher_rows_total 5\n",
		"torchstream_batcher_max_batch_requests{device=\"cpu\",index=\"0\"} 8\n",
		"torchstream_batcher_device_lost{device=\"cpu\",index=\"0\"} 0\n" +
			"torchstream_batcher_device_lost{device=\"cuda:1\",index=\"1\"} 1\n",
		"# TYPE torchstream_batcher_ran_seconds histogram\n" +
			"torchstream_batcher_ran_seconds_bucket{le=\"0.00025\"} 1\n" +
			"torchstream_batcher_ran_seconds_bucket{le=\"0.0005\"} 1\n" +
			"torchstream_batcher_ran_seconds_bucket{le=\"0.001\"} 2\n",
		"torchstream_batcher_ran_seconds_bucket{le=\"8.192\"} 2\n" +
			"torchstream_batcher_ran_seconds_bucket{le=\"+Inf\"} 3\n" +
			"torchstream_batcher_ran_seconds_sum 1.5\ntorchstream_batcher_ran_seconds_count 3\n",
		"torchstream_batcher_http_responses_total{code=\"200\"} 1\ntorchstream_batcher_http_responses_total{code=\"418\"} 1\n" +
			"torchstream_batcher_http_responses_total{code=\"499\"} 1\n",
	} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("got\n%s\nwant in it\n%s", &text, want)
		}
	}
}

// The page loads nothing from elsewhere.
func TestPageLoadsNothing(t *testing.T) {
	w := httptest.NewRecorder()
	Page(w, nil)
	for _, word := range []string{"http:", "https:", "src=\"/", "href", "@import", "url("} {
		if strings.Contains(w.Body.String(), word) {
			t.Errorf("the page has %q, want no address", word)
		}
	}
	if policy := w.Header().Get("Content-Security-Policy"); !strings.HasPrefix(policy, "default-src 'none';") {
		t.Errorf("got the policy %q, want one that allows nothing by default", policy)
	}
}

// A request that does not end within the limit is broken off, and Run returns an error.
func TestRunEndsAfterItsLimit(t *testing.T) {
	listener, err := net.Listen("tcp", "localhost:0")
	if err != nil {
		t.Fatal(err)
	}
	started := make(chan struct{})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- Run(ctx, listener, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			close(started)
			<-r.Context().Done()
		}), time.Nanosecond)
	}()
	answered := make(chan error, 1)
	go func() {
		r, err := http.Get("http://" + listener.Addr().String())
		if err == nil {
			r.Body.Close()
		}
		answered <- err
	}()
	<-started
	cancel()
	if err := <-ended; !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v, want DeadlineExceeded", err)
	}
	if err := <-answered; err == nil {
		t.Error("the request was answered, want an error")
	}
}

// The labels equal the ones of a stable sort by the probabilities.
func TestAnswerHasTheMostProbableClasses(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		values := make([]float32, random.IntN(30))
		for i := range values {
			values[i] = float32(random.IntN(6)) // with equal ones
			if random.IntN(20) == 0 {
				values[i] = float32(math.NaN())
			}
		}
		want := make([]int, len(values))
		for i := range want {
			want[i] = i
		}
		slices.SortStableFunc(want, func(a, b int) int { return cmp.Compare(values[b], values[a]) })
		top := random.IntN(33)
		want = want[:min(top, len(want))]
		answer := NewAnswer(serve.Answer{Outputs: []serve.Output{{Values: values}}}, []string{"zero"}, top)
		var got []int
		for _, c := range answer.Classes {
			got = append(got, c.Label)
			if name := map[bool]string{true: "zero", false: strconv.Itoa(c.Label)}[c.Label == 0]; c.Class != name {
				t.Errorf("label %d: got the name %q, want %q", c.Label, c.Class, name)
			}
		}
		if !slices.Equal(got, want) {
			t.Fatalf("the %d of %v: got %v, want %v", top, values, got, want)
		}
	}
}

func BenchmarkAnswer(b *testing.B) {
	values := make([]float32, 1000)
	random := rand.New(rand.NewPCG(1, 2))
	for i := range values {
		values[i] = random.Float32()
	}
	a := serve.Answer{Outputs: []serve.Output{{Values: values}}}
	for b.Loop() {
		NewAnswer(a, nil, 5)
	}
}
