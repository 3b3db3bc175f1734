//go:build linux && cgo

package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/torchstream/torchstream/checkpoint"
	"github.com/torchstream/torchstream/models"
	"github.com/torchstream/torchstream/nn"
)

// published is a file of weights, and the server that serves it.
type published struct {
	url, sum string // sum is the checksum of the whole file
	net      nn.Module
	requests int
}

// publish serves the weights of a new mobilenet_v3_small at /w-DIGITS.pth, and ends the first
// response early.
func publish(t *testing.T) *published {
	t.Helper()
	net, err := models.ByName("mobilenet_v3_small", models.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { nn.Close(net) })
	path := filepath.Join(t.TempDir(), "w.pth")
	if err := nn.Save(path, net, nil); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(text)
	p := &published{net: net, sum: hex.EncodeToString(sum[:])}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if p.requests++; p.requests == 1 {
			w.Header().Set("Content-Length", "1000000")
			w.Write(text[:1000])
			return
		}
		http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(text))
	}))
	t.Cleanup(s.Close)
	p.url = s.URL + "/w-" + p.sum[:8] + ".pth"
	return p
}

func TestWeightsAreVerifiedAndConverted(t *testing.T) {
	p := publish(t)
	out := filepath.Join(t.TempDir(), "small.safetensors")
	status, stdout, stderr := command(t, "weights", "mobilenet_v3_small", "-url", p.url, "-o", out)
	if status != 0 || !strings.Contains(stdout, out) ||
		!strings.Contains(stdout, "first 8 digits") || !strings.Contains(stdout, p.sum) {
		t.Fatalf("status %d\n%s%s\nwant status 0 and stdout with %s, %q and %s", status, stdout, stderr, out,
			"first 8 digits", p.sum)
	}
	file, err := checkpoint.Open(out)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if got := file.Metadata()["model"]; got != "mobilenet_v3_small" || file.IsPyTorch() {
		t.Errorf("got model %q, PyTorch's format %t, want mobilenet_v3_small, false", got, file.IsPyTorch())
	}
	if got := file.Metadata()["sha256"]; got != p.sum {
		t.Errorf("got sha256 %q in the metadata, want %q", got, p.sum)
	}
	state := nn.State(p.net)
	if n := len(file.Tensors()); n != len(state) {
		t.Errorf("got %d tensors, want %d", n, len(state))
	}
	for _, want := range state[:8] {
		tensor, err := file.Read(want.Name)
		if err != nil {
			t.Fatal(err)
		}
		got, err := tensor.Float32s()
		if err != nil {
			t.Fatal(err)
		}
		tensor.Close()
		numbers, err := want.Tensor.Float32s()
		if err != nil || !slices.Equal(got, numbers) {
			t.Errorf("%s: got other numbers than those published (%v)", want.Name, err)
		}
	}
	if list, err := os.ReadDir(filepath.Dir(out)); err != nil || len(list) != 1 {
		t.Errorf("%v, %v is left, want only the weights", list, err)
	}
}

// A verified file that does not fit the network is kept: the user may have meant another MODEL.
func TestWeightsOfAnotherNetworkAreRefused(t *testing.T) {
	p := publish(t)
	out := filepath.Join(t.TempDir(), "w.safetensors")
	status, _, stderr := command(t, "weights", "resnet18", "-url", p.url, "-sha256", strings.ToUpper(p.sum), "-o", out)
	if status != 1 || !strings.Contains(stderr, out+".download") || fileExists(out) {
		t.Fatalf("status %d, %s, the file exists: %t; want 1, stderr with %s, false", status, stderr, fileExists(out),
			out+".download")
	}
	before := p.requests
	const whole = "verified by its SHA-256"
	status, stdout, stderr := command(t, "weights", "mobilenet_v3_small", "-url", p.url, "-sha256", p.sum, "-o", out)
	if status != 0 || !strings.Contains(stdout, whole) {
		t.Errorf("the right network: status %d, %s%s, want 0 and %q", status, stdout, stderr, whole)
	}
	if p.requests != before {
		t.Errorf("%d more requests, want 0: the file was there", p.requests-before)
	}
}

func TestWeightsWithAnotherChecksumAreRemoved(t *testing.T) {
	p := publish(t)
	folder := t.TempDir()
	out := filepath.Join(folder, "w.safetensors")
	status, _, stderr := command(t, "weights", "mobilenet_v3_small", "-url", p.url, "-sha256", strings.Repeat("0", 64), "-o", out)
	if status != 1 || !strings.Contains(stderr, "has the SHA-256 "+p.sum) {
		t.Errorf("status %d, %s, want 1 and the file's checksum %s", status, stderr, p.sum)
	}
	if list, err := os.ReadDir(folder); err != nil || len(list) != 0 {
		t.Errorf("%v, %v is left, want nothing", list, err)
	}
}

func TestWeightsCommandLine(t *testing.T) {
	notes := filepath.Join(t.TempDir(), "notes.txt")
	if err := os.WriteFile(notes, []byte("notes"), 0o666); err != nil {
		t.Fatal(err)
	}
	const address = "https://weights.example/resnet18-01234567.pth"
	for _, c := range []struct {
		args   []string
		status int
		says   string
	}{
		{[]string{"resnet19", "-url", address}, 2, "did you mean resnet18?"},
		{[]string{"resnet18"}, 2, "-url URL"},
		{[]string{"resnet18", "-url", "https://weights.example/resnet18.pth"}, 2, "-sha256 SUM"},
		{[]string{"resnet18", "-url", address, "-o", notes}, 1, "notes.txt"},
		{[]string{"resnet18", "-url", address, "-sha256", "01234567"}, 2, "all 64 hexadecimal digits"},
		{[]string{"resnet18", "-url", address, "-sha256", strings.Repeat("0", 65)}, 2, "all 64 hexadecimal digits"},
		{[]string{"resnet18", "-url", address, "-sha256", strings.Repeat("x", 64)}, 2, "all 64 hexadecimal digits"},
		{[]string{"resnet18", "-url", "ftp://weights.example/resnet18-01234567.pth", "-o", notes + ".new"}, 1, "https://"},
	} {
		status, _, stderr := command(t, append([]string{"weights"}, c.args...)...)
		if status != c.status || !strings.Contains(stderr, c.says) {
			t.Errorf("%q: status %d, %s, want %d and %q", c.args, status, stderr, c.status, c.says)
		}
	}
}
