//go:build linux && cgo

package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"math"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/torchstream/torchstream/aoti"
	"github.com/torchstream/torchstream/checkpoint"
	"github.com/torchstream/torchstream/internal/httpserve"
	"github.com/torchstream/torchstream/torch"
)

// saveScaled saves the weights of imagesPackage with a head that is multiplied by a factor.
func saveScaled(t *testing.T, path string, factor float64) {
	t.Helper()
	m, err := aoti.Load(imagesPackage, aoti.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	scope := torch.NewScope("weights")
	defer scope.Close()
	var all []torch.Named
	for _, w := range m.Weights() {
		x, err := m.Weight(w.Name)
		if err != nil {
			t.Fatal(err)
		}
		x = scope.Own(x)
		if strings.HasPrefix(w.Name, "head.") {
			x = x.MulScalar(factor)
		}
		all = append(all, torch.Named{Name: w.Name, Tensor: x})
	}
	if err := checkpoint.Save(path, all, nil); err != nil {
		t.Fatal(err)
	}
}

// SIGUSR1 makes serve read the weights again. A file that does not fit changes nothing.
func TestServeReadsWeightsAgainOnSIGUSR1(t *testing.T) {
	want := readPyTorchImages(t)
	weights := filepath.Join(t.TempDir(), "w.safetensors")
	saveScaled(t, weights, 1)
	ctx, cancel := context.WithCancel(context.Background())
	stdout, toStdout := io.Pipe()
	stderr, toStderr := io.Pipe()
	ended := make(chan int, 1)
	go func() {
		ended <- program().Run(ctx, []string{"serve", "-address", "localhost:0", "-model", imagesPackage, "-weights", weights},
			toStdout, toStderr)
	}()
	lines, failures := bufio.NewReader(stdout), bufio.NewReader(stderr)
	var none bytes.Buffer
	url := addressOf(t, lines, &none)
	image := photo(t, want.Names[0])
	check := func(factor float64) {
		t.Helper()
		status, text := post(t, url, bytes.NewReader(image))
		var got httpserve.Answer
		if err := json.Unmarshal(text, &got); err != nil || status != http.StatusOK {
			t.Fatalf("status %d, %s, %v, want 200 and classes", status, text, err)
		}
		sum := 0.0
		for _, logit := range want.Logits[0] {
			sum += math.Exp(factor * logit)
		}
		for _, c := range got.Classes {
			if w := math.Exp(factor*want.Logits[0][c.Label]) / sum; math.Abs(float64(c.Probability)-w) > 2e-3 {
				t.Errorf("with a head times %v, class %d has the probability %v, want %v", factor, c.Label, c.Probability, w)
			}
		}
	}
	reload := func(from *bufio.Reader, says string) {
		t.Helper()
		if err := syscall.Kill(os.Getpid(), syscall.SIGUSR1); err != nil {
			t.Fatal(err)
		}
		if line, err := from.ReadString('\n'); err != nil || !strings.Contains(line, says) {
			t.Errorf("got the line %q, error %v, want one with %q", line, err, says)
		}
	}
	check(1)
	saveScaled(t, weights, 2)
	check(1)
	reload(lines, "new weights from "+weights)
	check(2)
	if err := os.WriteFile(weights, []byte("no weights"), 0o600); err != nil {
		t.Fatal(err)
	}
	reload(failures, "the weights are not replaced")
	go func() { _, _ = io.Copy(io.Discard, failures) }() // later lines must not block the server
	check(2)
	cancel()
	if status := <-ended; status != 0 {
		t.Errorf("status %d, want 0", status)
	}
}

// A checkpoint has its own weights.
func TestServeRefusesWeightsForACheckpoint(t *testing.T) {
	o := serveOptions{weights: "w.safetensors"}
	if err := o.loadWeights(context.Background(), []*network{{path: "best.pt"}}); err == nil ||
		!strings.Contains(err.Error(), "best.pt is a checkpoint") {
		t.Errorf("got the error %v, want one that best.pt is a checkpoint", err)
	}
}

// SIGUSR1 without -weights is an error in the log, and does not end the process.
func TestServeWithoutWeightsAnswersSIGUSR1(t *testing.T) {
	signals, stop := reloadSignals()
	defer stop()
	read, write := io.Pipe()
	defer (&serveOptions{}).reloadOnSignal(t.Context(), signals, nil, io.Discard, slog.New(slog.NewTextHandler(write, nil)))()
	if err := syscall.Kill(os.Getpid(), syscall.SIGUSR1); err != nil {
		t.Fatal(err)
	}
	if line, err := bufio.NewReader(read).ReadString('\n'); err != nil || !strings.Contains(line, "serve has no -weights") {
		t.Errorf("got the line %q, error %v, want one that serve has no -weights", line, err)
	}
}

// If a device fails, the error names the devices that have the new weights.
func TestServeNamesTheDevicesWithNewWeights(t *testing.T) {
	weights := filepath.Join(t.TempDir(), "w.safetensors")
	saveScaled(t, weights, 2)
	var networks []*network
	for range 2 {
		m, err := aoti.Load(imagesPackage, aoti.Options{})
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		networks = append(networks, &network{path: imagesPackage, model: m, device: m.Device()})
	}
	if err := networks[1].model.Close(); err != nil {
		t.Fatal(err)
	}
	o := serveOptions{weights: weights}
	err := o.loadWeights(t.Context(), networks)
	if !errors.Is(err, aoti.ErrClosed) || !strings.Contains(err.Error(), "cpu already has the new weights") {
		t.Errorf("got the error %v, want ErrClosed, and that cpu already has the new weights", err)
	}
}

// threadWriter sends the number of the OS thread of each Write.
type threadWriter chan int

func (w threadWriter) Write(p []byte) (int, error) {
	w <- syscall.Gettid()
	return len(p), nil
}

// All signals are answered on one OS thread, because LibTorch keeps a thread pool for each OS
// thread that copies weights.
func TestServeReadsWeightsOnOneThread(t *testing.T) {
	signals, stop := reloadSignals()
	defer stop()
	threads := threadWriter(make(chan int))
	o := serveOptions{}
	defer o.reloadOnSignal(t.Context(), signals, nil, io.Discard, slog.New(slog.NewTextHandler(threads, nil)))()
	first := 0
	for i := range 50 {
		if err := syscall.Kill(os.Getpid(), syscall.SIGUSR1); err != nil {
			t.Fatal(err)
		}
		got := <-threads
		if i == 0 {
			first = got
		}
		if got != first {
			t.Fatalf("signal %d was answered on thread %d, want thread %d of the first signal", i, got, first)
		}
		busy := make(chan struct{}) // other goroutines take the idle threads
		for range 8 {
			go func() {
				defer func() { busy <- struct{}{} }()
				_ = syscall.Kill(os.Getpid(), 0) // a system call that changes nothing
			}()
		}
		for range 8 {
			<-busy
		}
	}
}
