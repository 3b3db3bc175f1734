package prefetcher

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/tensor"
	"github.com/torchstream/torchstream/torch"
)

// TestEnginesAreRefusedWhileDeterministic: what a program has asked for are the same bits in each
// run.
func TestEnginesAreRefusedWhileDeterministic(t *testing.T) {
	before, err := torch.ProcessNumerics()
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := torch.SetProcessNumerics(before); err != nil {
			t.Error(err)
		}
	}()
	deterministic := before
	deterministic.Deterministic = true
	if err := torch.SetProcessNumerics(deterministic); err != nil {
		t.Fatal(err)
	}
	source := &plannedSource{rawSource: rawSource{batch: 1}}
	if _, err := New(source, Options{Device: cuda.CPU, Decode: Engines}); err == nil || !strings.Contains(err.Error(), "Deterministic is set for the process: use Device") {
		t.Errorf("%v", err)
	}
	p, err := New(source, Options{Device: cuda.CPU, Decode: Auto})
	if err != nil {
		t.Fatal(err)
	}
	closeFeed(t, p)
}

// engineClasses are the classes of engineArchive: the first ones are for engines. Of the others two
// are too small for entry points. mean and most are the maximum differences of pixels in levels:
// those between libjpeg-turbo's own pixels with interpolated and with repeated chrominance, and a
// little more.
var engineClasses = []struct {
	name       string
	mean, most float64
}{
	{"420", 6.5, 46}, {"422", 4, 34}, {"444", 0.5, 2}, {"tall", 6.5, 46}, {name: "grey"}, {name: "restart"}, {name: "progressive"}, {name: "cmyk"},
}

const (
	forEngines = 4
	ofClass    = 12
)

// engineArchive writes an archive of the JPEGs of the C++ tests.
func engineArchive(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "engines.tar")
	var to bytes.Buffer
	w := tar.NewWriter(&to)
	for class, c := range engineClasses {
		data, err := os.ReadFile(filepath.Join("..", "cshim", "test", "data", c.name+".jpg"))
		if err != nil {
			t.Fatal(err)
		}
		for i := range ofClass {
			h := &tar.Header{Name: fmt.Sprintf("%d/%02d.jpg", class, i), Mode: 0o644, Size: int64(len(data))}
			if err := w.WriteHeader(h); err != nil {
				t.Fatal(err)
			}
			if _, err := w.Write(data); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := errors.Join(w.Close(), os.WriteFile(path, to.Bytes(), 0o600)); err != nil {
		t.Fatal(err)
	}
	return path
}

// withEngines returns a prefetcher with engines, and skips the test without nvJPEG or engines. The
// log goes to the buffer.
func withEngines(t *testing.T, l *imageloader.Loader, to *bytes.Buffer) *Prefetcher {
	t.Helper()
	p, err := New(l, Options{Decode: Engines, Logger: slog.New(slog.NewTextHandler(to, nil))})
	if errors.Is(err, cuda.ErrUnsupported) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// TestGPUEnginesAreNearTheHost: the pixels of images that engines decode are near the host's; those
// of all other images in the same batch are the host's to the bit.
func TestGPUEnginesAreNearTheHost(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	path := engineArchive(t)
	transform := imageloader.Train(64)
	transform.Bytes, transform.DType = true, tensor.Uint8
	o := imageloader.Options{Transform: transform}
	var log bytes.Buffer
	l := newLoader(t, path, o)
	for _, err := range l.Epoch(t.Context(), 0) { // finds the entry points
		if err != nil {
			t.Fatal(err)
		}
	}
	device := withEngines(t, l, &log)
	host := newFeed(t, newLoader(t, path, o), Options{})
	// Maxima, sums and counts by class.
	differences, sums, counts := map[int64]float64{}, map[int64]float64{}, map[int64]float64{}
	for epoch := range 3 {
		want, wantLabels := epochValues(t, host, epoch)
		before := device.Stats().DecodedByEngines
		got, labels := epochValues(t, device, epoch)
		taken := device.Stats().DecodedByEngines - before
		if taken != forEngines*ofClass {
			t.Errorf("engines decode %d images of epoch %d, want %d", taken, epoch, forEngines*ofClass)
		}
		for b := range want {
			if !slices.Equal(labels[b], wantLabels[b]) {
				t.Fatalf("batch %d of epoch %d has other labels", b, epoch)
			}
			row := len(want[b]) / len(labels[b])
			for i, class := range labels[b] {
				for k := i * row; k < (i+1)*row; k++ {
					d := math.Abs(float64(got[b][k] - want[b][k]))
					differences[class] = max(differences[class], d)
					sums[class] += d
					counts[class]++
				}
			}
		}
	}
	for i, c := range engineClasses {
		mean, most := sums[int64(i)]/counts[int64(i)], differences[int64(i)]
		t.Logf("%s: mean difference %.3f levels, at most %.0f", c.name, mean, most)
		if mean > c.mean || most > c.most {
			t.Errorf("%s differs by %.3f levels in the mean, and by %.0f; want %v and %v", c.name, mean, most, c.mean, c.most)
		}
	}
	st := device.Stats()
	if st.EngineFailures != 0 || st.DecodedAgain != 0 || st.DecoderBytes == 0 || log.Len() != 0 {
		t.Errorf("%+v\n%s", st, &log)
	}
	closeFeed(t, host)
	closeFeed(t, device)
}

// TestGPUEnginesKeepOrder: samples, labels and the bad-sample policy are the host's, also after an
// epoch that was left early.
func TestGPUEnginesKeepOrder(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	path := decodeArchive(t, 150)
	for _, policy := range []imageloader.BadSamplePolicy{imageloader.Skip, imageloader.Substitute} {
		o := imageloader.Options{Transform: imageloader.Train(64), BadSamples: policy}
		device, host := withEngines(t, newLoader(t, path, o), &bytes.Buffer{}), newFeed(t, newLoader(t, path, o), Options{})
		for epoch := range 4 {
			_, want := epochValues(t, host, epoch)
			_, got := epochValues(t, device, epoch)
			if !slices.EqualFunc(got, want, slices.Equal[[]int64]) {
				t.Errorf("%v: epoch %d has other labels", policy, epoch)
			}
			if n := device.Stats().DecodedByEngines; epoch == 0 && n != 0 {
				t.Errorf("%v: engines decode %d images that nobody has decoded before", policy, n)
			}
			for _, err := range device.Epoch(t.Context(), epoch) {
				if err != nil {
					t.Fatal(err)
				}
				break
			}
		}
		if st := device.Stats(); st.DecodedByEngines < 2*80 || st.EngineFailures != 0 {
			t.Errorf("%v: %d images by engines, %d failures", policy, st.DecodedByEngines, st.EngineFailures)
		}
		closeFeed(t, host)
		closeFeed(t, device)
	}
}

// TestSanitizerOfEngines: the stream sanitizer finds nothing, with engines or a stand-in for
// nvJPEG.
func TestSanitizerOfEngines(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	l := newLoader(t, decodeArchive(t, 60), imageloader.Options{Transform: imageloader.Train(64), BadSamples: imageloader.Skip})
	for _, err := range l.Epoch(t.Context(), 0) { // finds the entry points
		if err != nil {
			t.Fatal(err)
		}
	}
	cudatest.NoFindings(t)
	p := withEngines(t, l, &bytes.Buffer{})
	for epoch := range 3 {
		for b, err := range p.Epoch(t.Context(), epoch) {
			if err != nil {
				t.Fatal(err)
			}
			sum := b.Images.Sum() // on the consumer's stream
			if err := sum.Err(); err != nil {
				t.Fatal(err)
			}
			sum.Close()
		}
	}
	st := p.Stats()
	closeFeed(t, p)
	if st.DecodedByEngines < 40 {
		t.Errorf("%+v", st)
	}
}
