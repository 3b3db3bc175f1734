package torch_test

import (
	"errors"
	"fmt"
	"reflect"
	"runtime"
	"sync"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

const gpu = cuda.Device(0)

func onGPU(t *testing.T) {
	t.Helper()
	if cuda.DeviceCount() == 0 {
		t.Skip("no GPU")
	}
}

func TestOperatorsOnTheGPU(t *testing.T) {
	onGPU(t)
	s := torch.NewScope("gpu")
	defer s.Close()
	x := floats(t, []float32{1, -2, 3, -4}, 2, 2).In(s).To(gpu)
	if x.Device() != gpu || x.To(cuda.CPU).Device() != cuda.CPU {
		t.Fatalf("got %v", x)
	}
	wantValues(t, x.MatMul(x).ReLU().Add(x), 1, 4, 3, 6)
	if got := x.String(); got != "float32[2 2] cuda:0: 1 -2 3 -4" {
		t.Errorf("got %q", got)
	}
	err := x.Add(floats(t, []float32{1, 2, 3, 4}, 2, 2)).Err()
	if err == nil {
		t.Error("operands on two devices")
	}
	w := leaf(t, []float32{2, 3})
	if err := w.In(s).To(gpu).Square().Sum().Backward(); err != nil { // gradients flow through To
		t.Fatal(err)
	}
	wantValues(t, w.In(s).Grad(), 4, 6)
}

func TestOutOfMemoryIsAnError(t *testing.T) {
	onGPU(t)
	x, err := torch.Ones(gpu, torch.Float32, 2)
	must(t, x, err)
	_, err = torch.Empty(gpu, torch.Float32, 1<<42)
	if !errors.Is(err, cuda.ErrOutOfMemory) {
		t.Errorf("a constructor: %v", err)
	}
	huge := x.Reshape(2, 1).Expand(2, 1<<40).Clone().Sum()
	if err := huge.Backward(); !errors.Is(err, cuda.ErrOutOfMemory) {
		t.Errorf("at the end of a chain: %v", err)
	}
	wantValues(t, x.Add(x), 2, 2) // and work goes on
}

// Device memory of a loop without a Close is flat, at any moment at most one turn's.
func TestDeviceMemoryIsFlat(t *testing.T) {
	onGPU(t)
	// cuBLAS keeps a workspace (32 MiB on Hopper) for every OS thread that ever multiplied a
	// matrix: on another thread than the warm-up's there would be one more.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	settled()
	data, err := torch.Rand(gpu, torch.Float32, 64, 256)
	must(t, data, err)
	w, err := torch.Rand(gpu, torch.Float32, 256, 256)
	must(t, w, err)
	if err := w.SetRequiresGrad(true); err != nil {
		t.Fatal(err)
	}
	var first cuda.MemoryStats
	for turn := range 2000 {
		s := torch.NewScope("turn")
		if err := data.In(s).MatMul(w).ReLU().Mean().Backward(); err != nil {
			t.Fatal(err)
		}
		if err := torch.ClearGrads(w); err != nil {
			t.Fatal(err)
		}
		s.Close()
		if turn == 10 {
			if first, err = gpu.Memory(); err != nil {
				t.Fatal(err)
			}
		}
	}
	last, err := gpu.Memory()
	if err != nil {
		t.Fatal(err)
	}
	if last.Allocated != first.Allocated || last.PeakAllocated != first.PeakAllocated || last.Reserved != first.Reserved {
		t.Errorf("turn 10: %+v, turn 2000: %+v", first, last)
	}
}

// A prefetcher's step by hand: pinned memory to the device on a copy stream, normalised there, and
// used on the default stream after the event.
func TestCopyBatchAndNormalizeOnTheGPU(t *testing.T) {
	onGPU(t)
	stream, err := cuda.NewStream(gpu, cuda.StreamOptions{})
	if err != nil {
		t.Fatal(err)
	}
	ready, err := cuda.NewEvent(cuda.EventOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer ready.Close()
	p, err := cuda.NewPinned(2 * 4 * 4 * 3)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	src, err := torch.FromMemory(p.Bytes(), torch.Uint8, 2, 4, 4, 3)
	must(t, src, err)
	if !src.IsPinned() {
		t.Error("the tensor over pinned memory is not pinned")
	}
	dev, err := torch.Empty(gpu, torch.Uint8, 2, 4, 4, 3)
	must(t, dev, err)
	out, err := torch.EmptySpec(gpu, torch.Spec{DType: torch.Float32, Shape: []int64{3, 4, 4}, MemoryFormat: torch.ChannelsLast}, 2)
	must(t, out, err)
	for round := range 20 {
		for i := range p.Bytes() {
			p.Bytes()[i] = byte(round + i)
		}
		if err := torch.CopyBatch(stream, nil, []*torch.Tensor{dev}, []*torch.Tensor{src}, nil); err != nil {
			t.Fatal(err)
		}
		err := cuda.WithStream(stream, func() error {
			if err := torch.NormalizeImages(out, dev, []float32{0, 0, 0}, []float32{1, 1, 1}); err != nil {
				return err
			}
			return stream.Record(ready)
		})
		if err != nil {
			t.Fatal(err)
		}
		if err := cuda.DefaultStream(gpu).WaitEvent(ready); err != nil {
			t.Fatal(err)
		}
		got, err := out.Float32s()
		if err != nil {
			t.Fatal(err)
		}
		for n := range 2 {
			for c := range 3 {
				for i := range 16 {
					want := float32(byte(round+n*48+i*3+c)) / 255
					if d := got[n*48+c*16+i] - want; d > 1e-6 || d < -1e-6 {
						t.Fatalf("round %d: image %d channel %d pixel %d: %v, want %v", round, n, c, i, got[n*48+c*16+i], want)
					}
				}
			}
		}
	}
	pageable, err := torch.Zeros(cuda.CPU, torch.Uint8, 2, 4, 4, 3)
	must(t, pageable, err)
	if err := torch.CopyBatch(stream, nil, []*torch.Tensor{dev}, []*torch.Tensor{pageable}, ready); !errors.Is(err, cuda.ErrInvalidArgument) {
		t.Errorf("memory that is not pinned: %v", err)
	}
}

func TestConcurrentTrainingOnTheGPU(t *testing.T) {
	onGPU(t)
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			if err := trainAlone(float32(i)); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}

// trainAlone does backward on a stream of its own and checks the gradient.
func trainAlone(value float32) error {
	stream, err := cuda.NewStream(gpu, cuda.StreamOptions{})
	if err != nil {
		return err
	}
	return cuda.WithStream(stream, func() error {
		s := torch.NewScope("goroutine")
		defer s.Close()
		w, err := torch.Full(gpu, torch.Float32, float64(value), 4)
		if err != nil {
			return err
		}
		w = s.Own(w)
		if err := w.SetRequiresGrad(true); err != nil {
			return err
		}
		for range 100 {
			if err := w.Square().Sum().Backward(); err != nil {
				return err
			}
		}
		got, err := w.Grad().Float32s()
		if err != nil {
			return err
		}
		if g := 200 * value; !reflect.DeepEqual(got, []float32{g, g, g, g}) {
			return fmt.Errorf("gradient %v, want %v", got, g)
		}
		return nil
	})
}

func TestSetDataMovesALeaf(t *testing.T) {
	onGPU(t)
	w := leaf(t, []float32{1, 2})
	moved := w.NoGrad().Detach().To(gpu)
	defer moved.Close()
	if err := w.SetData(moved); err != nil {
		t.Fatal(err)
	}
	if w.Device() != gpu || !w.RequiresGrad() {
		t.Fatalf("got %v", w)
	}
	if err := w.Square().Sum().Backward(); err != nil {
		t.Fatal(err)
	}
	g := w.Grad()
	defer g.Close()
	wantValues(t, g, 2, 4)
}
