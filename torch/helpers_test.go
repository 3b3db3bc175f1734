package torch_test

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/internal/settle"
	"github.com/torchstream/torchstream/torch"
)

const gpu = cuda.Device(0)

func onDevice(t *testing.T, data []float32, shape ...int64) *torch.Tensor {
	t.Helper()
	moved := floats(t, data, shape...).To(gpu)
	x := moved.Keep() // not the scope's that In gives it to first
	moved.Close()
	return must(t, x, x.Err())
}

func read(t *testing.T, x *torch.Tensor) []float32 {
	t.Helper()
	v, err := x.Float32s()
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func TestMain(m *testing.M) {
	if err := torch.SetNumThreads(1); err != nil { // the tensors here are tiny
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(cudatest.Main(m))
}

// must closes x at the end of the test.
func must(t testing.TB, x *torch.Tensor, err error) *torch.Tensor {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { x.Close() })
	return x
}

func floats(t testing.TB, data []float32, shape ...int64) *torch.Tensor {
	t.Helper()
	x, err := torch.FromFloat32s(data, shape...)
	return must(t, x, err)
}

func ints(t testing.TB, data []int64, shape ...int64) *torch.Tensor {
	t.Helper()
	x, err := torch.FromInt64s(data, shape...)
	return must(t, x, err)
}

// leaf returns a tensor that requires gradients.
func leaf(t testing.TB, data []float32, shape ...int64) *torch.Tensor {
	t.Helper()
	x := floats(t, data, shape...)
	if err := x.SetRequiresGrad(true); err != nil {
		t.Fatal(err)
	}
	return x
}

func wantValues(t testing.TB, x *torch.Tensor, want ...float64) {
	t.Helper()
	got, err := x.Float64s()
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != len(want) {
		t.Fatalf("got %v, want %v", got, want)
	}
	for i := range got {
		if math.Abs(got[i]-want[i]) > 1e-5*(1+math.Abs(want[i])) {
			t.Fatalf("got %v, want %v", got, want)
		}
	}
}

func here(t testing.TB) (file string, line int) {
	_, file, line, ok := runtime.Caller(1)
	if !ok {
		t.Fatal("runtime.Caller(1) knows no caller, want the test's line")
	}
	return filepath.Base(file), line
}

// collect runs the garbage collector until done returns true, at most 1,000 times. It returns
// done's last result.
func collect(done func() bool) bool {
	for range 1000 {
		if done() {
			return true
		}
		runtime.GC()
		runtime.Gosched()
	}
	return done()
}

// settled waits until the garbage collector has freed the tensors of earlier tests, and returns the
// number of references.
func settled(t testing.TB) int64 {
	t.Helper()
	return settle.Wait(t, torch.LiveTensors)
}
