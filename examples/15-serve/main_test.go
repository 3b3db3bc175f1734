//go:build linux

package main

import (
	"archive/tar"
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"io"
	"math"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/torchstream/torchstream/aoti"
	"github.com/torchstream/torchstream/imageloader/transform"
	"github.com/torchstream/torchstream/internal/clitest"
	"github.com/torchstream/torchstream/internal/httpserve"
)

// TestMain lets this test program act as the example, for tests that need a process.
func TestMain(m *testing.M) {
	os.Exit(clitest.Main(m, func() {
		main()
		os.Exit(0)
	}))
}

const (
	model  = "../../aoti/testdata/images.pt2"
	photos = "../data/photos-test.tgz"
)

// start runs the example as a process, and returns its address.
func start(t *testing.T) (address string, end func()) {
	t.Helper()
	if runtime.GOARCH != "amd64" {
		t.Skip("the package has code for amd64")
	}
	path, err := filepath.Abs(model)
	if err != nil {
		t.Fatal(err)
	}
	c, stderr := clitest.Process(t, "-model", path, "-address", "localhost:0")
	stdout, err := c.StdoutPipe()
	if err == nil {
		err = c.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(stdout).ReadString('\n')
	address, _, found := strings.Cut(line, " ")
	if err != nil || !found {
		t.Fatalf("got the line %q, %v, %s, want an address", line, err, stderr)
	}
	return address, func() {
		if err := c.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		if err := c.Wait(); err != nil {
			t.Errorf("after SIGTERM: %v, %s, want status 0", err, stderr)
		}
	}
}

func TestDescribeInterpolation(t *testing.T) {
	side := aoti.Dim{Min: 32, Max: 32}
	m := &aoti.Model{}
	m.Inputs = []aoti.Value{{DType: "float32", Shape: []aoti.Dim{{Min: 1}, {Min: 3, Max: 3}, side, side}}}
	for name, want := range map[string]transform.Interpolation{"": transform.Bilinear, "bilinear": transform.Bilinear,
		"bicubic": transform.Bicubic, "nearest": transform.Nearest} {
		m.Metadata = map[string]string{"images": `{"resize": 36, "interpolation": "` + name + `"}`}
		if got, _, err := describe(m); err != nil || got.Interpolation != want {
			t.Errorf("%q: got %v, %v, want %v", name, got.Interpolation, err, want)
		}
	}
	m.Metadata = map[string]string{"images": `{"interpolation": "lanczos"}`}
	if _, _, err := describe(m); err == nil || !strings.Contains(err.Error(), `the interpolation "lanczos"`) {
		t.Errorf("got %v, want an error that names lanczos", err)
	}
}

// TestServerEqualsPyTorch uploads photographs concurrently, and compares the probabilities with
// PyTorch's logits. SIGTERM ends the process with status 0.
func TestServerEqualsPyTorch(t *testing.T) {
	address, end := start(t)
	defer end()
	text, err := os.ReadFile("../../aoti/testdata/images.json")
	if err != nil {
		t.Fatal(err)
	}
	var want struct {
		Names  []string
		Logits [][]float64
	}
	if err := json.Unmarshal(text, &want); err != nil {
		t.Fatal(err)
	}
	images := members(t)
	classes := []string{"a cat", "a dog", "neither"}
	var all sync.WaitGroup
	for i, name := range want.Names {
		all.Go(func() {
			response, err := http.Post(address, "image/jpeg", bytes.NewReader(images[name]))
			if err != nil {
				t.Error(err)
				return
			}
			defer response.Body.Close()
			var got httpserve.Answer
			if err := json.NewDecoder(response.Body).Decode(&got); err != nil || len(got.Classes) != len(classes) {
				t.Errorf("%s: %s, %+v, %v, want three classes", name, response.Status, got, err)
				return
			}
			sum := 0.0
			for _, logit := range want.Logits[i] {
				sum += math.Exp(logit)
			}
			for _, c := range got.Classes {
				if p := math.Exp(want.Logits[i][c.Label]) / sum; c.Class != classes[c.Label] || math.Abs(c.Probability-p) > 1e-5 {
					t.Errorf("%s: got %+v, want %s with %g", name, c, classes[c.Label], p)
				}
			}
		})
	}
	all.Wait()
	for path, says := range map[string]string{"": "<!doctype html>", "healthz": "",
		"metrics": `torchstream_batcher_requests_total{result="answered"} 20`} {
		response, err := http.Get(address + path)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(response.Body)
		response.Body.Close()
		if err != nil || response.StatusCode != http.StatusOK || !strings.Contains(string(body), says) {
			t.Errorf("/%s: %s, %s, %v, want 200 and %q", path, response.Status, body, err, says)
		}
	}
	response, err := http.Post(address, "", strings.NewReader("no picture"))
	if err != nil {
		t.Fatal(err)
	}
	response.Body.Close()
	if response.StatusCode != http.StatusUnsupportedMediaType {
		t.Errorf("a text: %s, want %d", response.Status, http.StatusUnsupportedMediaType)
	}
}

// members returns the photographs by name.
func members(t *testing.T) map[string][]byte {
	t.Helper()
	f, err := os.Open(photos)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	all := map[string][]byte{}
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		if err == io.EOF {
			return all
		}
		if err != nil {
			t.Fatal(err)
		}
		if all[h.Name], err = io.ReadAll(r); err != nil {
			t.Fatal(err)
		}
	}
}
