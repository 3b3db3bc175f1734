package cudatest

import (
	"errors"
	"math"
	"testing"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

func TestPoisonIsNeverExpected(t *testing.T) {
	for d, want := range map[torch.DType]float64{
		torch.Float32: math.NaN(), torch.Float64: math.NaN(), torch.Float16: math.NaN(), torch.BFloat16: math.NaN(),
		torch.Uint8: 165, torch.Int8: -91, torch.Int16: -23131, torch.Int32: -1515870811,
		torch.Int64: -1515870811, torch.Bool: 1,
	} {
		x, err := torch.Zeros(cuda.CPU, d, 2, 2)
		if err != nil {
			t.Fatal(err)
		}
		Poison(t, x)
		values, err := x.Float64s()
		if err != nil {
			t.Fatal(err)
		}
		for _, v := range values {
			if v != want && !(math.IsNaN(v) && math.IsNaN(want)) {
				t.Errorf("%v: %v, want %v", d, v, want)
			}
		}
		x.Close()
	}
	inner(t, func(t testing.TB) { Poison(t, torch.Fail("step", errors.New("broken"))) }).mustFail(t, "broken")
}

func TestDelayWithoutGPUFailsTheTest(t *testing.T) {
	if cuda.DeviceCount() > 0 {
		t.Skip("there is a GPU")
	}
	inner(t, func(t testing.TB) { Delay(t, cuda.Stream{}, time.Millisecond) }).mustFail(t, "GPU")
}

func TestDelayHoldsTheStreamBack(t *testing.T) {
	gpu := RequireGPUs(t, 1)[0]
	s, other := Stream(t, gpu), Stream(t, gpu)
	start := time.Now()
	Delay(t, s, 200*time.Millisecond)
	if done, err := s.Query(); done || err != nil {
		t.Errorf("the delayed stream is done: %t, %v", done, err)
	}
	if err := other.Synchronize(); err != nil {
		t.Error(err)
	}
	if done, err := s.Query(); done || err != nil {
		t.Errorf("the delay ended with another stream's work: %t, %v", done, err)
	}
	if err := s.Synchronize(); err != nil {
		t.Error(err)
	}
	// The clock of a multiprocessor may run at less than its maximum, so there is no upper bound.
	if took := time.Since(start); took < 200*time.Millisecond {
		t.Errorf("held back for %v, want 200 ms or more", took)
	}
	inner(t, func(t testing.TB) { Delay(t, s, -1) }).mustFail(t, "0 to 60 s")
	inner(t, func(t testing.TB) { Delay(t, s, time.Hour) }).mustFail(t, "0 to 60 s")
}

// TestDelayShowsAMissingEdge is the reason for Delay: without an edge the other stream reads the
// old value, and with the edge it reads the new value.
func TestDelayShowsAMissingEdge(t *testing.T) {
	gpu := RequireGPUs(t, 1)[0]
	writer, reader := Stream(t, gpu), Stream(t, gpu)
	x, err := torch.Zeros(gpu, torch.Float32, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	y, err := torch.Zeros(gpu, torch.Float32, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer y.Close()
	run := func(edge bool) float64 {
		t.Helper()
		if err := errors.Join(x.Zero_().Err(), y.Zero_().Err(), gpu.Synchronize()); err != nil {
			t.Fatal(err)
		}
		Delay(t, writer, 50*time.Millisecond)
		err := cuda.WithStream(writer, func() error { return x.Fill_(7).Err() })
		if edge {
			err = errors.Join(err, reader.Wait(writer))
		}
		err = errors.Join(err, cuda.WithStream(reader, func() error { return y.Copy_(x).Err() }), gpu.Synchronize())
		if err != nil {
			t.Fatal(err)
		}
		v, err := y.Float64()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
	if v := run(false); v != 0 {
		t.Errorf("without an edge the reader saw %v, want 0: the delay did not hold the writer back", v)
	}
	if v := run(true); v != 7 {
		t.Errorf("with an edge the reader saw %v, want 7", v)
	}
}

func TestOutOfMemoryEndsWithTheTest(t *testing.T) {
	gpu := RequireGPUs(t, 1)[0]
	large := func() error {
		x, err := torch.Empty(gpu, torch.Uint8, 256<<20)
		if err == nil {
			err = x.Close()
		}
		return errors.Join(err, cuda.EmptyCache())
	}
	inner(t, func(t testing.TB) {
		restore := OutOfMemory(t, gpu)
		if err := large(); !errors.Is(err, cuda.ErrOutOfMemory) {
			t.Fatalf("an allocation of 256 MiB: %v, want ErrOutOfMemory", err)
		}
		restore()
		if err := large(); err != nil {
			t.Fatalf("after restore: %v, want no error", err)
		}
		OutOfMemory(t, gpu)
	}).mustPass(t)
	if err := large(); err != nil {
		t.Errorf("after the test: %v, want no error", err)
	}
}
