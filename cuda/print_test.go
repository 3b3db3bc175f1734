//go:build linux

package cuda

import (
	"fmt"
	"testing"
	"time"

	"github.com/torchstream/torchstream/internal/capi"
)

// Everything that people print has a name or a line of figures, and nil and zero values have one
// too.
func TestStrings(t *testing.T) {
	closed := &OwnedStream{Stream: Stream{capi.Stream{ID: 35}}}
	closed.closed.Store(true)
	pool := newMemoryPool(nil, 1, func(*capi.MemoryPool) error { return nil })
	for _, c := range []struct {
		value fmt.Stringer
		want  string
	}{
		{Device(1), "cuda:1"},
		{CPU, "cpu"},
		{DefaultStream(0), "cuda:0 default stream"},
		{Stream{capi.Stream{ID: 35, Device: 1}}, "cuda:1 stream 35"},
		{&OwnedStream{Stream: Stream{capi.Stream{ID: 35}}}, "owned cuda:0 stream 35"},
		{closed, "closed cuda:0 stream 35"},
		{(*OwnedStream)(nil), "closed stream"},
		{(*Event)(nil), "closed event"},
		{&Event{}, "closed event"},
		{(*Graph)(nil), "closed graph"},
		{&Graph{}, "closed graph"},
		{(*MemoryPool)(nil), "closed memory pool"},
		{&MemoryPool{}, "closed memory pool"},
		{pool, "memory pool on cuda:1"},
		{(*Pinned)(nil), "closed pinned memory"},
		{&Pinned{memory: make([]byte, 3<<19)}, "pinned memory of 1.5 MiB"},
		{(*Slab)(nil), "closed slab"},
		{newSlab(nil, 4, 1000, 1024), "slab of 4 slots of 1000 B"},
		{(*Sanitizer)(nil), "no stream sanitizer"},
		{NodeKinds{}, "no nodes"},
		{NodeKinds{Kernels: 12, Copies: 2, Others: 1}, "12 kernels, 2 copies, 1 other nodes"},
		{LeakCounts{}, "no leaks"},
		{LeakCounts{Events: 2, Pinned: 1, PinnedBytes: 2048}, "2 events, 1 pinned buffers of 2 KiB"},
		{EventHandle{0xab, 1}, "event handle ab01000000000000..."},
		{DeviceProperties{"NVIDIA H200", 9, 0, 132, 3, 150110011392},
			"NVIDIA H200, compute capability 9.0, 132 multiprocessors, 3 copy engines, 139.8 GiB"},
		{MemoryStats{1 << 30, 2 << 30, 3 << 30, 3 << 30, 120 << 30, 5 << 40},
			"1 GiB allocated (peak 2 GiB), 3 GiB reserved (peak 3 GiB), 120 GiB free of 5 TiB"},
		{AllocatorStats{RequestedBytes: 1025, Allocations: 12, Segments: 9, Retries: 3},
			"12 allocations of 1 KiB, 0 B active, 0 B split, 9 segments, 0 driver allocations, 0 driver " +
				"frees, 3 retries, 0 out of memory"},
		{PinnedStats{ActiveBytes: 96 << 20, ReservedBytes: 128 << 20, PeakBytes: 128 << 20, Allocations: 3,
			DriverAllocations: 4, DriverTime: 31 * time.Millisecond},
			"3 allocations of 96 MiB, 128 MiB reserved (peak 128 MiB), 4 driver allocations, 0 driver " +
				"frees, 31ms in the driver"},
		{ThrottleReasons(0), "none"},
		{PoolStats{}, "default pool on cuda:0: 0 allocations of 0 B, 0 B reserved in 0 segments, largest " +
			"free block 0 B"},
		{PoolStats{ID: 3, Kind: GraphPool, Device: 1, Reserved: 2 << 30, Allocated: 3 << 29,
			MaxFree: 1 << 29, Allocations: 12, Segments: 4},
			"graph pool 3 on cuda:1: 12 allocations of 1.5 GiB, 2 GiB reserved in 4 segments, largest " +
				"free block 512 MiB"},
		{PoolKind(9), "PoolKind(9)"},
		{OutOfMemory{Device: 0, Wanted: 2 << 30, Free: 1 << 30, Limit: 80 << 30, Allocated: 70 << 30,
			Reserved: 72 << 30, Snapshot: "a/b.pickle"},
			"cuda:0 is out of memory: 2 GiB wanted, 1 GiB free, 70 GiB allocated, 72 GiB reserved of 80 " +
				"GiB (snapshot in a/b.pickle)"},
		{ThrottlePowerCap | ThrottleHardwareHeat, "power cap, hardware heat"},
		{ThrottleNotReported, "not reported"},
		{ThrottleReasons(0x1000), "0x1000"},
		{Readings{Power: 412.4, PowerLimit: 700, Energy: 5, Temperature: 61, SMClock: 1755,
			MemoryClock: 2619, MaxSMClock: 1980, MaxMemoryClock: -1,
			Utilization: 98, MemoryUtilization: 43, Throttle: ThrottlePowerCap},
			"412 W of 700 W, 61 °C, SM 1755 MHz of 1980 MHz, memory 2619 MHz, 98 % busy, throttled by power cap"},
		{readings(capi.Readings{PowerMilliwatts: -1, PowerLimitMilliwatts: -1, EnergyMillijoules: -1,
			Temperature: -1, SMClock: -1, MemoryClock: -1,
			MaxSMClock: -1, MaxMemoryClock: -1, Busy: -1, MemoryBusy: -1, ThrottleReasons: -1}), "no readings"},
	} {
		if got := fmt.Sprint(c.value); got != c.want {
			t.Errorf("%T: got %q, want %q", c.value, got, c.want)
		}
	}
	check(t, pool.Close())
}
