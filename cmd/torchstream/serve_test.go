//go:build linux && cgo

package main

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/torchstream/torchstream/aoti"
	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/imageloader/decode"
	"github.com/torchstream/torchstream/imageloader/transform"
	"github.com/torchstream/torchstream/internal/clitest"
	"github.com/torchstream/torchstream/internal/httpserve"
	"github.com/torchstream/torchstream/serve"
	"github.com/torchstream/torchstream/torch"
)

// startServe runs the command in this process until the test ends, and returns its address, which
// ends in a slash. The command must then end with status 0.
func startServe(t *testing.T, args ...string) (url string) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	read, write := io.Pipe()
	var stderr bytes.Buffer
	ended := make(chan int, 1)
	go func() {
		ended <- program().Run(ctx, append([]string{"serve", "-address", "localhost:0"}, args...), write, &stderr)
		write.Close()
	}()
	t.Cleanup(func() {
		cancel()
		if status := <-ended; status != 0 {
			t.Errorf("serve %q: status %d, %s, want 0", args, status, &stderr)
		}
	})
	return addressOf(t, read, &stderr)
}

// addressOf reads the address from the first line of serve.
func addressOf(t *testing.T, stdout io.Reader, stderr *bytes.Buffer) string {
	t.Helper()
	line, err := bufio.NewReader(stdout).ReadString('\n')
	url, _, found := strings.Cut(line, " ")
	if err != nil || !found || !strings.HasPrefix(url, "http://") {
		t.Fatalf("got the line %q, %v, %s, want an address", line, err, stderr)
	}
	return url
}

// post uploads an image and returns the response's status and body.
func post(t *testing.T, url string, body io.Reader) (status int, text []byte) {
	t.Helper()
	r, err := http.Post(url, "image/jpeg", body)
	if err != nil {
		t.Error(err)
		return 0, nil
	}
	defer r.Body.Close()
	if text, err = io.ReadAll(r.Body); err != nil {
		t.Error(err)
	}
	return r.StatusCode, text
}

func get(t *testing.T, url string) (status int, text string) {
	t.Helper()
	r, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	all, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return r.StatusCode, string(all)
}

// photo returns a member of photos.
func photo(t *testing.T, name string) []byte {
	t.Helper()
	file, err := os.Open(photos)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	unzipped, err := gzip.NewReader(file)
	if err != nil {
		t.Fatal(err)
	}
	all, err := io.ReadAll(unzipped)
	if err != nil {
		t.Fatal(err)
	}
	data, err := fs.ReadFile(tarFiles(t, all), name)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// TestServeEqualsPyTorch uploads photographs concurrently, and compares the probabilities with
// PyTorch's logits.
func TestServeEqualsPyTorch(t *testing.T) {
	want := readPyTorchImages(t)
	url := startServe(t, "-model", imagesPackage, "-batch", "8")
	classes := []string{"a cat", "a dog", "neither"}
	var all sync.WaitGroup
	for i, name := range want.Names {
		image := photo(t, name)
		all.Go(func() {
			status, text := post(t, url, bytes.NewReader(image))
			var got httpserve.Answer
			if err := json.Unmarshal(text, &got); err != nil || status != http.StatusOK || len(got.Classes) != 3 {
				t.Errorf("%s: status %d, %s, %v, want 200 and three classes", name, status, text, err)
				return
			}
			sum, last := 0.0, math.Inf(1)
			for _, logit := range want.Logits[i] {
				sum += math.Exp(logit)
			}
			for _, c := range got.Classes {
				p := math.Exp(want.Logits[i][c.Label]) / sum
				if c.Class != classes[c.Label] || math.Abs(c.Probability-p) > 1e-5 || c.Probability > last {
					t.Errorf("%s: got %+v, want %s with %g, in falling order", name, got.Classes, classes[c.Label], p)
				}
				last = c.Probability
			}
			if got.Batch < 1 || got.Batch > 8 || got.QueueMS <= 0 || got.ModelMS <= 0 {
				t.Errorf("%s: got %+v, want a batch of 1 to 8, and its times", name, got)
			}
		})
	}
	all.Wait()
	if status, page := get(t, url); status != http.StatusOK || !strings.Contains(page, "<!doctype html>") {
		t.Errorf("the page: status %d, %.40s, want 200 and HTML", status, page)
	}
	if status, text := get(t, url+"healthz"); status != http.StatusOK || text != "ok\n" {
		t.Errorf("/healthz: status %d, %q, want 200 and ok", status, text)
	}
	status, text := get(t, url+"metrics")
	for _, line := range []string{`torchstream_batcher_requests_total{result="answered"} 20`,
		`torchstream_batcher_http_responses_total{code="200"} 20`, `torchstream_batcher_device_lost{device="cpu",index="0"} 0`} {
		if status != http.StatusOK || !strings.Contains(text, line+"\n") {
			t.Errorf("/metrics: status %d, %s, want 200 and the line %s", status, text, line)
		}
	}
}

// With a checkpoint of torchstream train, serve gives the same answers as predict.
func TestServeAnswersAsPredictDoes(t *testing.T) {
	checkpoint, _ := untrained(t, "a", "b", "c", "d")
	image := photo(t, "test/cat/000.jpg")
	path := filepath.Join(t.TempDir(), "cat.jpg")
	writeFile(t, path, string(image))
	status, stdout, stderr := command(t, "predict", "-checkpoint", checkpoint, "-device", "cpu", "-top", "2", "-json", path)
	var want predictedFile
	if err := json.Unmarshal([]byte(stdout), &want); err != nil || status != 0 {
		t.Fatalf("predict: status %d, %s%s, %v", status, stdout, stderr, err)
	}
	url := startServe(t, "-model", checkpoint, "-device", "cpu", "-top", "2")
	status, text := post(t, url, bytes.NewReader(image))
	var got httpserve.Answer
	if err := json.Unmarshal(text, &got); err != nil || status != http.StatusOK || len(got.Classes) != len(want.Classes) {
		t.Fatalf("status %d, %s, %v, want 200 and %+v", status, text, err, want.Classes)
	}
	for i, c := range got.Classes {
		if w := want.Classes[i]; c.Class != w.Class || c.Label != w.Label || math.Abs(c.Probability-w.Probability) > 1e-6 {
			t.Errorf("class %d: got %+v, want %+v, as predict prints", i, c, w)
		}
	}
}

// TestServeOnGPU uploads photographs to a GPU that also decodes them, and compares with predict on
// the CPU.
func TestServeOnGPU(t *testing.T) {
	if cuda.DeviceCount() == 0 {
		t.Skip("needs a GPU")
	}
	checkpoint, _ := untrained(t, "a", "b", "c", "d")
	for _, where := range []string{"host", "device"} {
		url := startServe(t, "-model", checkpoint, "-device", "cuda:0", "-decode", where)
		var all sync.WaitGroup
		for _, name := range []string{"test/cat/000.jpg", "test/cat/001.jpg", "test/clock/000.jpg", "test/rocket/000.jpg"} {
			image := photo(t, name)
			path := filepath.Join(t.TempDir(), "image.jpg")
			writeFile(t, path, string(image))
			_, stdout, _ := command(t, "predict", "-checkpoint", checkpoint, "-device", "cpu", "-top", "4", "-json", path)
			var want predictedFile
			if err := json.Unmarshal([]byte(stdout), &want); err != nil {
				t.Fatal(err)
			}
			all.Go(func() {
				status, text := post(t, url, bytes.NewReader(image))
				var got httpserve.Answer
				if err := json.Unmarshal(text, &got); err != nil || status != http.StatusOK {
					t.Errorf("-decode %s, %s: status %d, %s, %v, want 200", where, name, status, text, err)
					return
				}
				for _, w := range want.Classes {
					at := slices.IndexFunc(got.Classes, func(c httpserve.Class) bool { return c.Class == w.Class })
					if at < 0 || math.Abs(got.Classes[at].Probability-w.Probability) > 1e-3 {
						t.Errorf("-decode %s, %s: got %+v, want %+v", where, name, got.Classes, want.Classes)
					}
				}
			})
		}
		all.Wait()
	}
}

// TestServeTurnsPhotographsUpright uploads an image that is stored on its side. With -upright the
// answer equals the answer for the upright image.
func TestServeTurnsPhotographsUpright(t *testing.T) {
	checkpoint, _ := untrained(t, "a", "b", "c", "d")
	readPyTorchImages(t)
	upright, turned := orientedPNGs(t)
	probabilities := func(url, image string) (all []float64) {
		t.Helper()
		status, text := post(t, url, strings.NewReader(image))
		var got httpserve.Answer
		if err := json.Unmarshal(text, &got); err != nil || status != http.StatusOK {
			t.Fatalf("status %d, %s, %v, want 200", status, text, err)
		}
		for _, c := range got.Classes {
			all = append(all, c.Probability)
		}
		return all
	}
	plain := startServe(t, "-model", imagesPackage, "-resize", "32")
	turning := startServe(t, "-model", imagesPackage, "-resize", "32", "-upright")
	want := probabilities(plain, upright)
	if got := probabilities(turning, turned); !slices.Equal(got, want) {
		t.Errorf("with -upright: got %v, want %v", got, want)
	}
	if got := probabilities(plain, turned); slices.Equal(got, want) {
		t.Errorf("without -upright: got %v for the turned and the upright image, want others", got)
	}
	status, _, stderr := command(t, "serve", "-address", "localhost:0", "-model", checkpoint, "-device", "cpu", "-upright")
	if status != 2 || !strings.Contains(stderr, "-upright") {
		t.Errorf("a checkpoint of images as stored: status %d, %s, want 2 and -upright", status, stderr)
	}
}

// Each kind of bad upload has its HTTP status. Wrong methods and addresses get the usual statuses.
// With two workers the model computes two requests at the same time: here each waits for the other.
func TestServeWorkersComputeAtTheSameTime(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var serving atomic.Bool // false while the workers warm up
	meet := make(chan struct{})
	n := &network{device: cuda.CPU, transform: transform.Eval(8, 8), batch: aoti.Dim{Min: 1, Max: 1},
		run: func(_ context.Context, x *torch.Tensor) (*torch.Tensor, error) {
			if serving.Load() {
				select {
				case meet <- struct{}{}:
				case <-meet:
				case <-ctx.Done():
					return nil, errors.New("the other request is not in the model")
				}
			}
			return x.Flatten(1, -1).Narrow(1, 0, 3), nil
		}}
	o := serveOptions{network: networkOptions{instances: 2}, batch: 1, maxBytes: 1 << 20}
	b, err := o.newBatcher([]*network{n}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close(t.Context())
	serving.Store(true)
	image := photo(t, readPyTorchImages(t).Names[0])
	var requests sync.WaitGroup
	for range 2 {
		requests.Go(func() {
			if _, err := b.Do(t.Context(), serve.Request{Image: image}); err != nil {
				t.Errorf("got the error %v, want two requests in the model at the same time", err)
			}
		})
	}
	requests.Wait()
}

func TestServeStatuses(t *testing.T) {
	readPyTorchImages(t)
	labels := filepath.Join(t.TempDir(), "names.txt")
	writeFile(t, labels, "red\ngreen\nblue\n")
	url := startServe(t, "-model", imagesPackage, "-labels", labels, "-max-bytes", "1M")
	image := photo(t, "test/cat/000.jpg")
	for name, c := range map[string]struct {
		body   io.Reader
		status int
		says   string
	}{
		"an image":                  {bytes.NewReader(image), http.StatusOK, `"class":"red"`},
		"text":                      {strings.NewReader("hello"), http.StatusUnsupportedMediaType, "not an image"},
		"nothing":                   {http.NoBody, http.StatusUnsupportedMediaType, "no bytes"},
		"half an image":             {bytes.NewReader(image[:len(image)/2]), http.StatusUnprocessableEntity, "damaged"},
		"too many bytes":            {bytes.NewReader(make([]byte, 1<<20+1)), http.StatusRequestEntityTooLarge, "over 1048576 bytes"},
		"too many, length unknown":  {io.LimitReader(zeros{}, 1<<20+1), http.StatusRequestEntityTooLarge, "over 1048576 bytes"},
		"the limit, length unknown": {io.LimitReader(zeros{}, 1<<20), http.StatusUnsupportedMediaType, "not an image"},
	} {
		if status, text := post(t, url, c.body); status != c.status || !strings.Contains(string(text), c.says) {
			t.Errorf("%s: status %d, %s, want %d and %q", name, status, text, c.status, c.says)
		}
	}
	r, err := http.NewRequest(http.MethodPut, url, bytes.NewReader(image))
	if err != nil {
		t.Fatal(err)
	}
	response, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	response.Body.Close()
	if response.StatusCode != http.StatusMethodNotAllowed {
		t.Errorf("PUT: status %d, want %d", response.StatusCode, http.StatusMethodNotAllowed)
	}
	if status, _ := get(t, url+"other"); status != http.StatusNotFound {
		t.Errorf("/other: status %d, want %d", status, http.StatusNotFound)
	}
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { clear(b); return len(b), nil }

// TestServeDrainsOnSIGTERM sends SIGTERM while an upload is half read. The server accepts no more
// connections, answers the upload, and ends with status 0.
func TestServeDrainsOnSIGTERM(t *testing.T) {
	readPyTorchImages(t)
	model, err := filepath.Abs(imagesPackage)
	if err != nil {
		t.Fatal(err)
	}
	c, stderr := clitest.Process(t, "serve", "-model", model, "-address", "localhost:0")
	stdout, err := c.StdoutPipe()
	if err == nil {
		err = c.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	url := addressOf(t, stdout, stderr)
	image := photo(t, "test/cat/000.jpg")
	body, upload := io.Pipe()
	reads := make(chan struct{})
	trace := httptrace.ClientTrace{Got100Continue: func() { close(reads) }}
	r, err := http.NewRequestWithContext(httptrace.WithClientTrace(t.Context(), &trace), http.MethodPost, url, body)
	if err != nil {
		t.Fatal(err)
	}
	r.ContentLength = int64(len(image))
	r.Header.Set("Expect", "100-continue")
	answered := make(chan string, 1)
	go func() {
		client := http.Client{Transport: &http.Transport{ExpectContinueTimeout: patience}}
		response, err := client.Do(r)
		if err != nil {
			answered <- err.Error()
			return
		}
		defer response.Body.Close()
		text, _ := io.ReadAll(response.Body) // compared below
		answered <- response.Status + " " + string(text)
	}()
	<-reads
	if _, err := upload.Write(image[:100]); err != nil {
		t.Fatal(err)
	}
	if err := c.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	address := strings.TrimSuffix(strings.TrimPrefix(url, "http://"), "/")
	for { // until the listener is closed; the test's deadline bounds the loop
		connection, err := net.Dial("tcp", address)
		if err != nil {
			break
		}
		connection.Close()
	}
	if _, err := upload.Write(image[100:]); err != nil {
		t.Fatal(err)
	}
	upload.Close()
	if got := <-answered; !strings.HasPrefix(got, `200 OK {"classes":[{"class":`) {
		t.Errorf("the upload that had started: got %s, want 200 and classes", got)
	}
	if err := c.Wait(); err != nil {
		t.Errorf("got %v, %s, want status 0", err, stderr)
	}
}

// TestServeCancelledRequestsFreeTheirMemory fills the server while its model is busy, and cancels
// all requests. They end at once, and the next ones have room.
func TestServeCancelledRequestsFreeTheirMemory(t *testing.T) {
	entered, release := make(chan struct{}), make(chan struct{})
	var busy sync.Once
	n := &network{device: cuda.CPU, batch: aoti.Dim{Min: 1}, transform: transform.Eval(36, 32)}
	batcher, err := serve.NewBatcher(serve.BatcherOptions{Devices: []cuda.Device{cuda.CPU}, Buckets: buckets(n.batch, 1),
		Queue: 50, Images: serve.Options{Decode: decode.Options{Transform: n.transform}},
		Model: func(cuda.Device) (serve.Run, error) {
			warm := true
			return func(_ context.Context, x *torch.Tensor) ([]*torch.Tensor, error) {
				if !warm {
					busy.Do(func() {
						close(entered)
						<-release
					})
				}
				warm = false
				return []*torch.Tensor{x.Flatten(1, -1).Narrow(1, 0, 3)}, nil
			}, nil
		}})
	if err != nil {
		t.Fatal(err)
	}
	defer batcher.Close(context.Background())
	image := photo(t, "test/cat/000.jpg")
	h := &imageHandler{batcher: batcher, classes: []string{"a", "b", "c"}, top: 1,
		uploads: httpserve.NewUploads(1<<20, 20*int64(len(image)))}
	upload := func(ctx context.Context) int {
		w := httptest.NewRecorder()
		h.routes().ServeHTTP(w, httptest.NewRequestWithContext(ctx, http.MethodPost, "/", bytes.NewReader(image)))
		return w.Code
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var all sync.WaitGroup
	for range 20 {
		all.Go(func() { upload(ctx) })
	}
	<-entered
	cancel()
	all.Wait() // ends although the model is busy
	close(release)
	for i := range 200 {
		if code := upload(t.Context()); code != http.StatusOK {
			t.Fatalf("upload %d after the cancelled ones: status %d, want %d", i, code, http.StatusOK)
		}
	}
}

func TestServeCommandLine(t *testing.T) {
	readPyTorchImages(t)
	labels := filepath.Join(t.TempDir(), "names.txt")
	writeFile(t, labels, "red\ngreen\n")
	taken, err := net.Listen("tcp", "localhost:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	for _, c := range []struct {
		args   string
		status int
		says   string
	}{
		{"-batch 0", 2, "-batch"},
		{"-workers -1", 2, "-workers -1"},
		{"-workers 1000", 2, "-workers 1000"},
		{"-drain 2h", 2, "-drain"},
		{"-max-bytes 10M -max-memory 5M", 2, "-max-memory"},
		{"-decode auto", 2, "host or device"},
		{"-model " + imagesPackage + " -decode device", 2, "needs a GPU"},
		{"-model " + imagesPackage + " -batch 17", 2, "at most 16 images"},
		{"-model " + imagesPackage + " -device cpu,cpu", 2, "twice"},
		{"-model " + imagesPackage + " -labels " + labels, 1, "names 2 classes, and the model has 3"},
		{"-model " + imagesPackage + " -labels missing.txt", 1, "missing.txt"},
		{"-model missing.pt2", 1, "missing.pt2"},
		{"-model " + imagesPackage + " -weights missing.safetensors", 1, "missing.safetensors"},
		{"-model " + imagesPackage + " -address " + taken.Addr().String(), 1, "-address localhost:0"},
	} {
		args := append([]string{"serve", "-address", "localhost:0"}, strings.Fields(c.args)...)
		status, stdout, stderr := command(t, args...)
		if status != c.status || !strings.Contains(stderr, c.says) || stdout != "" {
			t.Errorf("serve %s: status %d, %q, %q, want %d, and %q on stderr", c.args, status, stdout, stderr, c.status, c.says)
		}
	}
}

// All batch sizes are within the range that the network accepts.
func TestBuckets(t *testing.T) {
	for _, c := range []struct {
		sizes aoti.Dim
		most  int
		want  []int
	}{
		{aoti.Dim{Min: 1}, 32, []int{1, 2, 4, 8, 16, 32}},
		{aoti.Dim{Min: 1, Max: 12}, 32, []int{1, 2, 4, 8, 12}},
		{aoti.Dim{Min: 3, Max: 64}, 10, []int{3, 4, 8, 10}},
		{aoti.Dim{Min: 8, Max: 8}, 32, []int{8}},
		{aoti.Dim{Min: 0, Max: 4}, 1, []int{1}},
		{aoti.Dim{Min: 16, Max: 64}, 4, []int{16}},
	} {
		if got := buckets(c.sizes, c.most); !slices.Equal(got, c.want) {
			t.Errorf("%v, at most %d: got %v, want %v", c.sizes, c.most, got, c.want)
		}
	}
}
