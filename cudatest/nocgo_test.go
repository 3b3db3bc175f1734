//go:build !linux || !cgo

package cudatest_test

import (
	"errors"
	"runtime"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/torch"
)

func TestCallsWithoutCSayWhatIsMissing(t *testing.T) {
	_, err := torch.Zeros(cuda.CPU, torch.Float32, 2)
	if !errors.Is(err, cuda.ErrNoLibrary) || !errors.Is(err, errors.ErrUnsupported) {
		t.Fatalf("got error %v, want one that is cuda.ErrNoLibrary and errors.ErrUnsupported", err)
	}
	want := "built for " + runtime.GOOS + "/" + runtime.GOARCH
	if !strings.Contains(err.Error(), want) {
		t.Errorf("got error %v, want one with %q", err, want)
	}
	if runtime.GOOS == "linux" && !strings.Contains(err.Error(), "CGO_ENABLED=1") {
		t.Errorf("got error %v, want one with %q", err, "CGO_ENABLED=1")
	}
	if n := cuda.DeviceCount(); n != 0 {
		t.Errorf("got %d GPUs, want 0", n)
	}
}

func TestTestsOfGPUsAreSkippedWithoutC(t *testing.T) {
	t.Setenv(cudatest.RequireVariable, "")
	skipped := false
	t.Run("GPU", func(t *testing.T) {
		defer func() { skipped = t.Skipped() }()
		cudatest.RequireGPUs(t, 1)
	})
	if !skipped {
		t.Error("RequireGPUs went on, want a skipped test")
	}
}

func TestTestsOfTensorsAreSkippedWithoutC(t *testing.T) {
	skipped := false
	t.Run("CPU", func(t *testing.T) {
		defer func() { skipped = t.Skipped() }()
		cudatest.RequireLibrary(t)
	})
	if !skipped {
		t.Error("RequireLibrary went on, want a skipped test")
	}
}
