package cuda

import (
	"fmt"

	"github.com/torchstream/torchstream/internal/capi"
)

// Device is the index of a GPU, 0 to DeviceCount()-1, or [CPU]. The zero value is the first GPU. In
// options, the zero value means [Default], which is the CPU on a machine without a GPU.
type Device int32

// CPU is the host, the device of programs that run without a GPU. It has no streams and no memory
// statistics.
const CPU Device = capi.DeviceCPU

// DeviceCount returns the number of GPUs that the process can use. It returns 0 on a machine
// without a GPU or without its driver. It also returns 0 if the shim cannot be loaded; other calls
// then return [ErrNoLibrary]. DeviceCount never fails.
func DeviceCount() int { return capi.DeviceCount() }

// Default returns the first GPU, or [CPU] if the process can use none. It is the device that the
// zero value selects in options, such as prefetcher.Options and serve.Options.
func Default() Device {
	if DeviceCount() == 0 {
		return CPU
	}
	return 0
}

// String returns LibTorch's name of the device: "cuda:0", "cpu".
func (d Device) String() string {
	if d == CPU {
		return "cpu"
	}
	return fmt.Sprintf("cuda:%d", int32(d))
}

// gpu returns an error for an index that cannot be a GPU's. LibTorch gives some negative indexes a
// special meaning, which Go programs must not reach.
func (d Device) gpu(origin string) error {
	if d >= 0 {
		return nil
	}
	return invalid(origin, "%v is not a GPU: only GPUs, cuda:0 and up, have streams, events and device memory", d)
}

// DeviceProperties describes a GPU.
type DeviceProperties struct {
	Name            string // for example "NVIDIA H200"
	Major, Minor    int    // compute capability, for example 9, 0
	Multiprocessors int
	AsyncEngines    int   // copy engines: the number of copies that can run at once during compute
	TotalBytes      int64 // device memory
}

// Properties returns the driver's description of the device.
func (d Device) Properties() (DeviceProperties, error) {
	if err := d.gpu("Device.Properties"); err != nil {
		return DeviceProperties{}, err
	}
	p, err := capi.DescribeDevice(int32(d))
	return DeviceProperties(p), checked(err)
}

// MemoryStats is the state of a GPU's memory, in bytes. LibTorch's caching allocator reserves
// memory from the driver and keeps the memory of freed tensors.
type MemoryStats struct {
	Allocated     int64 // in live tensors
	PeakAllocated int64 // since the start or the last ResetPeak
	Reserved      int64 // held from the driver by the allocator
	PeakReserved  int64 // since the start or the last ResetPeak
	Free          int64 // available from the driver to all processes
	Total         int64
}

// Memory returns the state of the device's memory.
func (d Device) Memory() (MemoryStats, error) {
	if err := d.gpu("Device.Memory"); err != nil {
		return MemoryStats{}, err
	}
	m, err := capi.DeviceMemory(int32(d))
	return MemoryStats(m), checked(err)
}

// ResetPeak restarts the peaks of [Device.Memory] at the present values.
func (d Device) ResetPeak() error {
	if err := d.gpu("Device.ResetPeak"); err != nil {
		return err
	}
	return checked(capi.ResetPeak(int32(d)))
}

// Synchronize blocks until all work queued so far on all streams of the device is done. It also
// blocks the goroutine's OS thread; other goroutines continue.
func (d Device) Synchronize() error {
	if err := d.gpu("Device.Synchronize"); err != nil {
		return err
	}
	return checked(capi.SynchronizeDevice(int32(d)))
}

// EmptyCache returns the unused memory of every device's caching allocator, and the unused pinned
// memory that LibTorch keeps, to the driver. It may wait for the devices, and waits for the end of
// another goroutine's [Capture]. It returns [ErrBusy] while a goroutine is inside [MemoryPool.Use],
// because the allocator returns nothing then.
func EmptyCache() error { return checked(capi.EmptyCache()) }
