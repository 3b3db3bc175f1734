//go:build linux

package cuda

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/internal/capi"
)

// calls returns every call that needs the GPU of the given index, by name.
func calls(d Device) map[string]func() error {
	stream := DefaultStream(d)
	return map[string]func() error{
		"Device.Properties":    func() error { _, err := d.Properties(); return err },
		"Device.Memory":        func() error { _, err := d.Memory(); return err },
		"Device.ResetPeak":     d.ResetPeak,
		"Device.Pools":         func() error { _, err := d.Pools(); return err },
		"Device.UUID":          func() error { _, err := d.UUID(); return err },
		"Device.PCIBusID":      func() error { _, err := d.PCIBusID(); return err },
		"Device.Readings":      func() error { _, err := d.Readings(); return err },
		"Device.Allocator":     func() error { _, err := d.Allocator(); return err },
		"Device.LimitMemory":   func() error { return d.LimitMemory(0.5) },
		"Device.CanAccessPeer": func() error { _, err := d.CanAccessPeer(d); return err },
		"NewMemoryPool":        func() error { _, err := NewMemoryPool(d); return err },
		"ImportEvent":          func() error { _, err := ImportEvent(d, EventHandle{}); return err },
		"WithStreams": func() error {
			return WithStreams([]Stream{stream}, func() error { return errors.New("fn was called") })
		},
		"Device.Synchronize": d.Synchronize,
		"Capture": func() error {
			_, err := Capture(CaptureOptions{Stream: stream}, func() error { return errors.New("fn was called") })
			return err
		},
		"NewStream":            func() error { _, err := NewStream(d, StreamOptions{}); return err },
		"NewOwnedStream":       func() error { _, err := NewOwnedStream(d, StreamOptions{}); return err },
		"ExternalStream":       func() error { _, err := ExternalStream(0, d); return err },
		"GetCurrentCUDAStream": func() error { _, err := GetCurrentCUDAStream(d); return err },
		"SetCUDAStream":        func() error { _, err := SetCUDAStream(stream); return err },
		"WaitCUDAStream":       func() error { return WaitCUDAStream(stream, stream) },
		"WithStream": func() error {
			return WithStream(stream,
				func() error { return errors.New("fn was called") })
		},
		"Stream.Wait":        func() error { return stream.Wait(stream) },
		"Stream.Query":       func() error { _, err := stream.Query(); return err },
		"Stream.Synchronize": stream.Synchronize,
		"Stream.Notify":      func() error { _, err := stream.Notify(); return err },
		"Stream.Forget":      stream.Forget,
		"Stream.SameQueue":   func() error { _, err := stream.SameQueue(stream); return err },
		"Stream.Handle":      func() error { _, err := stream.Handle(); return err },
		"Stream.Priority":    func() error { _, err := stream.Priority(); return err },
	}
}

func TestWithoutGPU(t *testing.T) {
	if DeviceCount() > 0 {
		t.Skip("this machine has a GPU")
	}
	all := calls(0)
	all["NewEvent"] = func() error { _, err := NewEvent(EventOptions{}); return err }
	all["NewPinned"] = func() error { _, err := NewPinned(4096); return err }
	all["NewSlab"] = func() error { _, err := NewSlab(2, 4096); return err }
	all["RegisterPinned"] = func() error { _, err := RegisterPinned(mapped(t, 4096)); return err }
	all["RegisterReadOnly"] = func() error { _, err := RegisterReadOnly(mapped(t, 4096)); return err }
	all["PriorityRange"] = func() error { _, _, err := PriorityRange(); return err }
	all["EmptyCache"] = EmptyCache
	advice := "nvidia-smi"
	if capi.CUDAVersion() == "" {
		advice = "without CUDA"
	}
	for name, call := range all {
		t.Run(name, func(t *testing.T) {
			err := call()
			if !errors.Is(err, ErrNoDevice) {
				t.Errorf("got %v, want ErrNoDevice", err)
			} else if !strings.Contains(err.Error(), advice) || !strings.Contains(err.Error(), "cuda.CPU") {
				t.Errorf("%q does not advise what to do, want it to contain %q, \"cuda.CPU\"", err, advice)
			}
		})
	}
}

// Every call refuses a device that does not exist, with or without GPUs in the machine.
func TestNoSuchDevice(t *testing.T) {
	for name, call := range calls(1000) {
		t.Run(name, func(t *testing.T) {
			if err := call(); !errors.Is(err, ErrNoDevice) {
				t.Errorf("got %v, want ErrNoDevice", err)
			}
		})
	}
}

// Devices that are not GPUs have no streams. Device(-2) must not reach LibTorch, which takes it as
// the current device.
func TestOtherDevicesHaveNoStreams(t *testing.T) {
	for _, d := range []Device{CPU, -2, -1000} {
		for name, call := range calls(d) {
			t.Run(fmt.Sprintf("%d/%s", int(d), name), func(t *testing.T) {
				if err := call(); !errors.Is(err, ErrInvalidArgument) && !errors.Is(err, ErrNoDevice) {
					t.Errorf("got %v, want ErrInvalidArgument or ErrNoDevice", err)
				}
			})
		}
	}
}

func TestDeviceReportsItsMemory(t *testing.T) {
	onGPU(t, 1)
	p := must[DeviceProperties](t)(Device(0).Properties())
	if p.Name == "" || p.Major < 5 || p.Multiprocessors < 1 || p.AsyncEngines < 1 || p.TotalBytes < 1<<30 {
		t.Errorf("got %+v", p)
	}
	check(t, Device(0).ResetPeak())
	before := must[MemoryStats](t)(Device(0).Memory())
	x := must[*capi.Tensor](t)(capi.EmptyTensor([]int64{1 << 20}, capi.Uint8, 0, capi.Contiguous))
	during := must[MemoryStats](t)(Device(0).Memory())
	capi.FreeTensor(x)
	after := must[MemoryStats](t)(Device(0).Memory())
	if during.Allocated != before.Allocated+1<<20 || after.Allocated != before.Allocated ||
		after.PeakAllocated < during.Allocated {
		t.Errorf("1 MiB was allocated and freed: before %+v, during %+v, after %+v", before, during, after)
	}
	if after.Free <= 0 || after.Free > after.Total || after.Reserved < after.Allocated {
		t.Errorf("got %+v, want Free more than 0, Free at most %v, Reserved at least %v",
			after, after.Total, after.Allocated)
	}
	check(t, EmptyCache())
}
