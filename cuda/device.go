package cuda

import (
	"fmt"

	"github.com/torchstream/torchstream/internal/capi"
)

// Device is the index of a GPU, 0 to DeviceCount()-1, or [CPU]. The zero value is the first GPU.
type Device int32

// CPU is the host: what a program names that runs without a GPU. It has no streams and no memory
// statistics.
const CPU Device = capi.DeviceCPU

// DeviceCount returns how many GPUs the process can use: 0 on a machine without one, or without its
// driver. It never fails.
func DeviceCount() int { return capi.DeviceCount() }

// String returns LibTorch's name of the device: "cuda:0", "cpu".
func (d Device) String() string {
	if d == CPU {
		return "cpu"
	}
	return fmt.Sprintf("cuda:%d", int32(d))
}

// gpu refuses what cannot be a GPU's index. LibTorch gives some negative indexes a meaning of its
// own, which is not for Go programs.
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
	AsyncEngines    int   // copy engines: how many copies can run at once beside compute
	TotalBytes      int64 // device memory
}

// Properties returns what the driver says about the device.
func (d Device) Properties() (DeviceProperties, error) {
	if err := d.gpu("Device.Properties"); err != nil {
		return DeviceProperties{}, err
	}
	p, err := capi.DescribeDevice(int32(d))
	return DeviceProperties(p), checked(err)
}

// MemoryStats is the state of a GPU's memory, in bytes. LibTorch's caching allocator reserves
// memory from the driver and keeps what tensors give back.
type MemoryStats struct {
	Allocated     int64 // in live tensors
	PeakAllocated int64 // since the start or the last ResetPeak
	Reserved      int64 // held from the driver by the allocator
	PeakReserved  int64 // since the start or the last ResetPeak
	Free          int64 // what the driver can still give, to all processes
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

// ResetPeak makes the peaks of [Device.Memory] start again from the present values.
func (d Device) ResetPeak() error {
	if err := d.gpu("Device.ResetPeak"); err != nil {
		return err
	}
	return checked(capi.ResetPeak(int32(d)))
}

// Synchronize blocks until all work queued so far on all streams of the device is done. The
// goroutine's OS thread is blocked with it; other goroutines go on.
func (d Device) Synchronize() error {
	if err := d.gpu("Device.Synchronize"); err != nil {
		return err
	}
	return checked(capi.SynchronizeDevice(int32(d)))
}

// EmptyCache gives memory that the caching allocator of any device holds without use back to the
// driver, and pinned memory that LibTorch keeps. It may wait for the devices, and waits for the end
// of another goroutine's [Capture]. While a goroutine is inside [MemoryPool.Use] it is [ErrBusy]:
// the allocator gives nothing back then.
func EmptyCache() error { return checked(capi.EmptyCache()) }
