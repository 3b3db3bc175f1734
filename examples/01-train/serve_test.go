//go:build linux

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/iotest"

	"github.com/torchstream/torchstream/internal/httpserve"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/torch"
)

// newServer returns a checkpoint of one epoch and a server for it, which is closed when the test
// ends.
func newServer(t *testing.T) (checkpoint string, h *handler) {
	t.Helper()
	_, checkpoint = small(t, "-epochs", "1")
	p, err := newPredictor(checkpoint, "cpu")
	if err != nil {
		t.Fatal(err)
	}
	if h, err = newHandler(p); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { h.decoder.Close() })
	return checkpoint, h
}

// TestServerAnswersAsPredictDoes checks that uploads, also concurrent ones, get the classes that
// the command prints for the files, and that each kind of bad image has a separate status.
func TestServerAnswersAsPredictDoes(t *testing.T) {
	checkpoint, h := newServer(t)
	paths := extract(t, 4)
	_, stdout, _ := command(t, append([]string{"predict", "-checkpoint", checkpoint, "-device", "cpu"}, paths...)...)
	lines := strings.Split(stdout, "\n")
	var all sync.WaitGroup
	for i, path := range paths {
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		all.Go(func() {
			w := httptest.NewRecorder()
			h.ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/", bytes.NewReader(data)))
			var got []answer
			if err := json.Unmarshal(w.Body.Bytes(), &got); err != nil || w.Code != http.StatusOK {
				t.Errorf("%s: status %d, %s, want %v, nil", path, w.Code, w.Body, http.StatusOK)
				return
			}
			fields := []string{path}
			for _, a := range got {
				fields = append(fields, a.Class, fmt.Sprintf("%.1f", 100*a.Probability), "%")
			}
			if !slices.Equal(fields, strings.Fields(lines[i])) {
				t.Errorf("got %q, want %q, as predict prints", fields, lines[i])
			}
		})
	}
	all.Wait()

	image, err := os.ReadFile(paths[0])
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		method string
		body   io.Reader
		status int
		words  string
	}{
		"GET": {http.MethodGet, nil, http.StatusMethodNotAllowed, "POST"},
		"text": {http.MethodPost, strings.NewReader("hello"), http.StatusUnsupportedMediaType,
			"not an image"},
		"half an image": {http.MethodPost, bytes.NewReader(image[:len(image)/2]),
			http.StatusUnprocessableEntity, "damaged"},
		"broken upload": {http.MethodPost,
			io.MultiReader(bytes.NewReader(image), iotest.ErrReader(io.ErrUnexpectedEOF)),
			http.StatusBadRequest, "whole"},
		"too many bytes": {http.MethodPost, io.LimitReader(zeros{}, maxUpload+1),
			http.StatusRequestEntityTooLarge, "bytes"},
	} {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(c.method, "/", c.body))
		if w.Code != c.status || !strings.Contains(w.Body.String(), c.words) {
			t.Errorf("%s: status %d, %q, want %v, it to contain %q",
				name, w.Code, w.Body, c.status, c.words)
		}
	}
}

// Uploads beyond the limit are told to retry before any byte of them is read.
func TestServerBoundsUploads(t *testing.T) {
	h := &handler{uploads: httpserve.NewUploads(maxUpload, maxUpload), places: make(chan struct{}, 1),
		computing: make(chan struct{}, 1)}
	body, client := io.Pipe()
	answered := make(chan int)
	go func() {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/", body))
		answered <- w.Code
	}()
	if _, err := client.Write([]byte("a byte")); err != nil { // returns once the server has read it
		t.Fatal(err)
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/", iotest.ErrReader(errors.New("is read"))))
	if w.Code != http.StatusServiceUnavailable || w.Header().Get("Retry-After") == "" ||
		!strings.Contains(w.Body.String(), "try again") {
		t.Errorf("status %d, Retry-After %q, %q", w.Code, w.Header().Get("Retry-After"), w.Body)
	}
	client.CloseWithError(io.ErrUnexpectedEOF)
	if code := <-answered; code != http.StatusBadRequest {
		t.Errorf("status %d of the upload that breaks off, want %v", code, http.StatusBadRequest)
	}
	w = httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/", iotest.ErrReader(io.ErrUnexpectedEOF)))
	if w.Code != http.StatusBadRequest {
		t.Errorf("status %d after the first upload has ended, want its place", w.Code)
	}
}

// A body whose length is over the limit is refused before a byte of it is read.
func TestServerRefusesLongBodiesUnread(t *testing.T) {
	h := &handler{uploads: httpserve.NewUploads(maxUpload, maxUpload), places: make(chan struct{}, 1)}
	r := httptest.NewRequest(http.MethodPost, "/", iotest.ErrReader(errors.New("is read")))
	r.ContentLength = maxUpload + 1
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	if w.Code != http.StatusRequestEntityTooLarge || !strings.Contains(w.Body.String(), "bytes") {
		t.Errorf("status %d, %q, want %d and the limit", w.Code, w.Body, http.StatusRequestEntityTooLarge)
	}
}

// TestUploadsAllocateTheirLength measures what 20 uploads of each kind allocate.
func TestUploadsAllocateTheirLength(t *testing.T) {
	_, h := newServer(t)
	for name, c := range map[string]struct {
		size, length, most int64 // most: allocated bytes of an upload
		status             int
	}{
		"12 MiB":                    {12 << 20, 12 << 20, 64 << 10, http.StatusRequestEntityTooLarge},
		"12 MiB, length unknown":    {12 << 20, -1, 3 * maxUpload, http.StatusRequestEntityTooLarge},
		"the limit":                 {maxUpload, maxUpload, maxUpload + 64<<10, http.StatusUnsupportedMediaType},
		"1 MiB, length unknown":     {1 << 20, -1, 4 << 20, http.StatusUnsupportedMediaType},
		"the limit, length unknown": {maxUpload, -1, 3 * maxUpload, http.StatusUnsupportedMediaType},
	} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		const uploads = 20
		for range uploads {
			r := httptest.NewRequest(http.MethodPost, "/", io.LimitReader(zeros{}, c.size))
			r.ContentLength = c.length
			w := httptest.NewRecorder()
			if h.ServeHTTP(w, r); w.Code != c.status {
				t.Fatalf("%s: status %d, %s, want %d", name, w.Code, w.Body, c.status)
			}
		}
		runtime.ReadMemStats(&after)
		if got := int64(after.TotalAlloc-before.TotalAlloc) / uploads; got > c.most {
			t.Errorf("%s: an upload allocates %d bytes, want at most %d", name, got, c.most)
		}
	}
}

// blocking is a network whose forward passes wait for a signal.
type blocking struct {
	nn.Module
	entered, release chan struct{}
}

func (b blocking) Forward(x *torch.Tensor) *torch.Tensor {
	b.entered <- struct{}{}
	<-b.release
	return b.Module.Forward(x)
}

// TestCancelledUploadsFreeTheirPlaces cancels a server full of uploads. Only the uploads that the
// network is computing keep their places, so the next uploads are answered.
func TestCancelledUploadsFreeTheirPlaces(t *testing.T) {
	_, h := newServer(t)
	image, err := os.ReadFile(extract(t, 1)[0])
	if err != nil {
		t.Fatal(err)
	}
	upload := func(ctx context.Context) int {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequestWithContext(ctx, http.MethodPost, "/", bytes.NewReader(image)))
		return w.Code
	}
	network := h.p.net
	slow := blocking{network, make(chan struct{}, maxComputing), make(chan struct{})}
	h.p.net = slow
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	answered := make(chan int, maxUploads)
	for range maxUploads {
		go func() { answered <- upload(ctx) }()
	}
	for range maxComputing {
		<-slow.entered
	}
	cancel()
	for range maxUploads - maxComputing {
		<-answered
	}
	if got := len(h.places); got != maxComputing {
		t.Errorf("%d places are taken after all uploads have been cancelled, want the %d that are computed", got,
			maxComputing)
	}
	close(slow.release)
	for range maxComputing {
		<-answered
	}
	h.p.net = network
	for i := range 200 {
		if code := upload(t.Context()); code != http.StatusOK {
			t.Fatalf("upload %d after the cancelled ones: status %d, want %d", i, code, http.StatusOK)
		}
	}
}

// A form gets the advice to send only the photograph.
func TestServerExplainsForms(t *testing.T) {
	_, h := newServer(t)
	r := httptest.NewRequest(http.MethodPost, "/",
		strings.NewReader("--b\r\nContent-Disposition: form-data; name=\"x\"\r\n\r\nphoto\r\n--b--\r\n"))
	r.Header.Set("Content-Type", "multipart/form-data; boundary=b")
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	if w.Code != http.StatusUnsupportedMediaType || !strings.Contains(w.Body.String(), "--data-binary") {
		t.Errorf("status %d, %q, want %v, it to contain \"--data-binary\"",
			w.Code, w.Body, http.StatusUnsupportedMediaType)
	}
}

func TestTakenPortSaysWhatToDo(t *testing.T) {
	_, checkpoint := small(t, "-epochs", "1")
	taken, err := net.Listen("tcp", "localhost:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	err = serveCommand(t.Context(), []string{"-checkpoint", checkpoint, "-device", "cpu", "-address",
		taken.Addr().String()}, io.Discard, io.Discard)
	if err == nil || !strings.Contains(err.Error(), "-address localhost:0") {
		t.Errorf("got %v, want an error with \"-address localhost:0\"", err)
	}
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { clear(b); return len(b), nil }

// TestServeEndsWithItsContext checks that the command prints its address, and ends without an error
// when interrupted.
func TestServeEndsWithItsContext(t *testing.T) {
	_, checkpoint := small(t, "-epochs", "1")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	read, write := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		ended <- serveCommand(ctx, []string{"-checkpoint", checkpoint, "-device", "cpu", "-address",
			"localhost:0"}, write, io.Discard)
	}()
	line := make([]byte, 200)
	n, err := read.Read(line)
	if err != nil {
		t.Fatal(err)
	}
	url := strings.TrimSpace(string(line[strings.Index(string(line[:n]), "http"):n]))
	r, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	r.Body.Close()
	if r.StatusCode != http.StatusMethodNotAllowed {
		t.Errorf("status %d, want %v", r.StatusCode, http.StatusMethodNotAllowed)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
