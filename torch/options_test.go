package torch_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/torch"
)

func TestConstructorsTakeAScopeAndAMemoryFormat(t *testing.T) {
	scope := torch.NewScope("constructors")
	o := torch.TensorOptions{Device: cuda.CPU, DType: torch.Float32, Scope: scope, MemoryFormat: torch.ChannelsLast}
	for name, c := range map[string]struct {
		make func(shape ...int64) (*torch.Tensor, error)
		sum  float64
	}{
		"Zeros": {o.Zeros, 0},
		"Ones":  {o.Ones, 120},
		"Full":  {func(shape ...int64) (*torch.Tensor, error) { return o.Full(2, shape...) }, 240},
	} {
		x, err := c.make(2, 3, 4, 5)
		if err != nil {
			t.Fatal(name, err)
		}
		if x.Scope() != scope || !x.IsContiguous(torch.ChannelsLast) {
			t.Errorf("%s: scope %v, channels last %v", name, x.Scope(), x.IsContiguous(torch.ChannelsLast))
		}
		if sum, err := x.Sum().Float64(); err != nil || sum != c.sum {
			t.Errorf("%s: sum %v, %v, want %v, nil", name, sum, err, c.sum)
		}
	}
	for name, make := range map[string]func(...int64) (*torch.Tensor, error){"Empty": o.Empty,
		"Rand": o.Rand, "Randn": o.Randn} {
		if x, err := make(1, 2, 3, 4); err != nil || x.Scope() != scope {
			t.Errorf("%s in %v: %v, want it in %v, nil", name, x.Scope(), err, scope)
		}
	}
	if _, err := o.Ones(3); !errors.Is(err, cuda.ErrInvalidArgument) {
		t.Errorf("channels last with one dimension: %v, want cuda.ErrInvalidArgument", err)
	}
	scope.Close()
	if _, err := o.Ones(1, 1, 1, 1); !errors.Is(err, torch.ErrClosed) {
		t.Errorf("a closed scope: %v, want torch.ErrClosed", err)
	}
	o.Scope = &torch.Scope{}
	if _, err := o.Ones(1, 1, 1, 1); !errors.Is(err, cuda.ErrInvalidArgument) {
		t.Errorf("a zero scope: %v, want cuda.ErrInvalidArgument", err)
	}
}

func TestArangeTakesADeviceAndADType(t *testing.T) {
	devices := []cuda.Device{cuda.CPU}
	if cuda.DeviceCount() > 0 {
		devices = append(devices, gpu)
	}
	for _, d := range devices {
		x, err := torch.TensorOptions{Device: d, DType: torch.Float32}.Arange(4)
		must(t, x, err)
		if v := read(t, x); len(v) != 4 || v[0] != 0 || v[3] != 3 {
			t.Errorf("on %v: %v, want length 4, 0, 3", d, v)
		}
	}
	for _, n := range []int64{0, -1} {
		x, err := torch.Arange(n)
		if must(t, x, err).Elements() != 0 {
			t.Errorf("Arange(%d) has %d elements, want 0", n, x.Elements())
		}
	}
}

func TestPinnedTensorsNeedAGPU(t *testing.T) {
	if cuda.DeviceCount() > 0 {
		t.Skip("there is a GPU")
	}
	if _, err := (torch.TensorOptions{DType: torch.Float32, Pinned: true}).Ones(2); !errors.Is(err, cuda.ErrNoDevice) {
		t.Errorf("Pinned: %v, want cuda.ErrNoDevice", err)
	}
	if err := floats(t, []float32{1}).PinMemory().Err(); !errors.Is(err, cuda.ErrNoDevice) {
		t.Errorf("PinMemory: %v, want cuda.ErrNoDevice", err)
	}
	if _, err := cuda.PinnedAllocator(); !errors.Is(err, cuda.ErrNoDevice) {
		t.Errorf("PinnedAllocator: %v, want cuda.ErrNoDevice", err)
	}
}

func TestLentMemoryIsNotKept(t *testing.T) {
	scope := torch.NewScope("turn")
	defer scope.Close()
	slot := must(t, floats(t, []float32{1, 2, 3, 4}), nil)
	if err := slot.Lend(true); err != nil {
		t.Fatal(err)
	}
	field := slot.In(scope)
	for name, x := range map[string]*torch.Tensor{"the field": field, "a view": field.Narrow(0, 1, 2),
		"detached": field.Detach()} {
		if err := x.Keep().Err(); !errors.Is(err, cuda.ErrInvalidArgument) || !strings.Contains(err.Error(), "Clone") {
			t.Errorf("%s: got %v, want ErrInvalidArgument that says Clone", name, err)
		}
	}
	kept := field.Clone().Keep()
	must(t, kept, kept.Err())
	result := field.AddScalar(1).Keep()
	must(t, result, result.Err())
	if err := slot.Lend(false); err != nil {
		t.Fatal(err)
	}
	again := field.Keep()
	must(t, again, again.Err())
}

func TestPinnedTensors(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	before, err := cuda.PinnedAllocator()
	if err != nil {
		t.Fatal(err)
	}
	const n = 3 << 20
	x, err := torch.TensorOptions{DType: torch.Float32, Pinned: true}.Full(2, n)
	must(t, x, err)
	if !x.IsPinned() || x.Device() != cuda.CPU {
		t.Errorf("pinned %v, on %v", x.IsPinned(), x.Device())
	}
	now, err := cuda.PinnedAllocator()
	if err != nil || now.ActiveBytes-before.ActiveBytes < 4*n || now.ReservedBytes < 4*n ||
		now.Allocations <= before.Allocations {
		t.Errorf("%+v after %+v, %v", now, before, err)
	}
	y := floats(t, []float32{1, 2}).PinMemory()
	must(t, y, y.Err())
	if v := read(t, y); !y.IsPinned() || v[1] != 2 {
		t.Errorf("PinMemory: pinned %v, values %v", y.IsPinned(), v)
	}
}

// Results of NonBlocking copies to the host are there when anything reads them.
func TestCopiesToTheHostAreThereWhenRead(t *testing.T) {
	o := newOrdering(t)
	pinned, err := torch.TensorOptions{DType: torch.Float32, Pinned: true, Scope: o.scope}.Zeros(orderedElements)
	o.check(err)
	late := func(copy func() *torch.Tensor) *torch.Tensor {
		o.reset()
		o.check(pinned.Zero_().Err())
		var host *torch.Tensor
		o.on(o.streams[0], func() error {
			if err := errors.Join(o.busy(), o.src.Fill_(freshValue).Err()); err != nil {
				return err
			}
			host = copy()
			return host.Err()
		})
		return host
	}
	to := func() *torch.Tensor { return o.src.ToWith(cuda.CPU, torch.ToOptions{NonBlocking: true}) }
	into := func() *torch.Tensor {
		o.check(pinned.CopyFrom(o.src, torch.CopyOptions{NonBlocking: true}))
		return pinned
	}
	last := int64(orderedElements - 1)
	for name, copy := range map[string]func() *torch.Tensor{"ToWith": to, "CopyFrom": into} {
		if v := read(t, late(copy)); v[0] != freshValue || v[last] != freshValue {
			t.Errorf("%s, Float32s: %v, %v, want %v, %v", name, v[0], v[last], freshValue, freshValue)
		}
		if v, err := late(copy).Narrow(0, last, 1).Float64(); err != nil || v != freshValue {
			t.Errorf("%s, Float64: %v, %v, want %v, nil", name, v, err, freshValue)
		}
		if b, err := late(copy).Bytes(); err != nil || b[len(b)-1] != 0x40 || b[len(b)-2] != 0xe0 { // 7 is 0x40e00000
			t.Errorf("%s, Bytes: %v, %v, want %v, %v, nil", name, b[len(b)-4:], err, 0x40, 0xe0)
		}
		if v := read(t, late(copy).AddScalar(1)); v[0] != freshValue+1 || v[last] != freshValue+1 {
			t.Errorf("%s, an operator: %v, %v, want %v, %v",
				name, v[0], v[last], freshValue+1, freshValue+1)
		}
	}
}

// A copy from pinned memory on another stream comes after the copy that writes the memory.
func TestCopiesThroughTheHostAreOrdered(t *testing.T) {
	o := newOrdering(t)
	pinned, err := torch.TensorOptions{DType: torch.Float32, Pinned: true, Scope: o.scope}.Zeros(orderedElements)
	o.check(err)
	for _, batch := range []bool{false, true} {
		o.reset()
		o.check(pinned.Zero_().Err())
		o.on(o.streams[0], func() error {
			return errors.Join(o.busy(), o.src.Fill_(freshValue).Err(),
				pinned.CopyFrom(o.src, torch.CopyOptions{NonBlocking: true}))
		})
		if batch {
			o.check(torch.CopyBatch(o.streams[1], nil, []*torch.Tensor{o.read}, []*torch.Tensor{pinned}, nil))
		} else {
			o.on(o.streams[1], func() error { return o.read.CopyFrom(pinned, torch.CopyOptions{NonBlocking: true}) })
		}
		o.want("a copy through the host", freshValue)
	}
}

// A copy of memory that is not pinned is refused by name, and breaks no capture.
func TestACapturedCopyOfPageableMemoryIsRefused(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	x, host := onDevice(t, []float32{1, 2}), floats(t, []float32{3, 4})
	for name, copy := range map[string]func() error{
		"CopyFrom the host": func() error { return x.CopyFrom(host, torch.CopyOptions{NonBlocking: true}) },
		"CopyFrom a device": func() error { return host.CopyFrom(x, torch.CopyOptions{NonBlocking: true}) },
		"ToWith":            func() error { return host.ToWith(gpu, torch.ToOptions{NonBlocking: true}).Err() },
	} {
		var refused error
		g, err := cuda.Capture(cuda.CaptureOptions{}, func() error {
			refused = copy()
			return x.AddScalar_(1).Err()
		})
		if err != nil {
			t.Fatal(name, err)
		}
		g.Close()
		if !errors.Is(refused, cuda.ErrCapture) || !strings.Contains(refused.Error(), "not pinned") {
			t.Errorf("%s: got %v, want ErrCapture that names the memory", name, refused)
		}
	}
}
