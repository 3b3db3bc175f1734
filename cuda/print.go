package cuda

import (
	"fmt"
	"strings"
)

// size formats a number of bytes with the largest binary unit that leaves at least 1: "1.5 MiB".
func size(bytes int64) string {
	units := [...]string{"KiB", "MiB", "GiB", "TiB"}
	if bytes > -1024 && bytes < 1024 {
		return fmt.Sprintf("%d B", bytes)
	}
	v, unit := float64(bytes), ""
	for _, unit = range units {
		if v /= 1024; v > -1024 && v < 1024 {
			break
		}
	}
	return strings.Replace(fmt.Sprintf("%.1f %s", v, unit), ".0 ", " ", 1)
}

// String returns the properties in one line: "NVIDIA H200, compute capability 9.0, 132
// multiprocessors, 3 copy engines, 139.8 GiB".
func (p DeviceProperties) String() string {
	return fmt.Sprintf("%s, compute capability %d.%d, %d multiprocessors, %d copy engines, %s",
		p.Name, p.Major, p.Minor, p.Multiprocessors, p.AsyncEngines, size(p.TotalBytes))
}

// String returns the state in one line: "1.5 GiB allocated (peak 2 GiB), 3 GiB reserved (peak 3
// GiB), 120 GiB free of 139.8 GiB".
func (m MemoryStats) String() string {
	return fmt.Sprintf("%s allocated (peak %s), %s reserved (peak %s), %s free of %s",
		size(m.Allocated), size(m.PeakAllocated), size(m.Reserved), size(m.PeakReserved), size(m.Free), size(m.Total))
}

// String returns the state in one line: "12 allocations of 1.5 GiB, 1.6 GiB active, 20 MiB split, 9
// segments, 14 driver allocations, 5 driver frees, 0 retries, 0 out of memory".
func (s AllocatorStats) String() string {
	return fmt.Sprintf("%d allocations of %s, %s active, %s split, %d segments, %d driver allocations, "+
		"%d driver frees, %d retries, %d out of memory",
		s.Allocations, size(s.RequestedBytes), size(s.ActiveBytes), size(s.SplitBytes), s.Segments,
		s.DriverAllocations, s.DriverFrees,
		s.Retries, s.OutOfMemory)
}

// String returns the state in one line: "3 allocations of 96 MiB, 128 MiB reserved (peak 128 MiB),
// 4 driver allocations, 0 driver frees, 31ms in the driver".
func (s PinnedStats) String() string {
	return fmt.Sprintf("%d allocations of %s, %s reserved (peak %s), %d driver allocations, %d driver "+
		"frees, %v in the driver",
		s.Allocations, size(s.ActiveBytes), size(s.ReservedBytes), size(s.PeakBytes), s.DriverAllocations,
		s.DriverFrees, s.DriverTime)
}

// String returns a name for messages: "memory pool on cuda:0", "closed memory pool". It does not
// ask the allocator: see [MemoryPool.Bytes].
func (p *MemoryPool) String() string {
	if p == nil || p.memoryPool == nil || p.closed.Load() {
		return "closed memory pool"
	}
	return "memory pool on " + p.device.String()
}

// String returns a name for messages: "pinned memory of 1.5 MiB", "closed pinned memory".
func (p *Pinned) String() string {
	if p == nil || p.closed.Load() {
		return "closed pinned memory"
	}
	return "pinned memory of " + size(int64(len(p.memory)))
}

// String returns a name for messages: "slab of 4 slots of 1.5 MiB".
func (s *Slab) String() string {
	if s == nil {
		return "closed slab"
	}
	return fmt.Sprintf("slab of %d slots of %s", len(s.flights), size(int64(s.bytes)))
}

// String returns a name for messages: "owned cuda:0 stream 35".
func (o *OwnedStream) String() string {
	switch {
	case o == nil:
		return "closed stream"
	case o.closed.Load():
		return "closed " + o.Stream.String()
	}
	return "owned " + o.Stream.String()
}

// String lists the counts that are not 0: "12 kernels, 2 copies". Without any it returns "no
// nodes".
func (n NodeKinds) String() string {
	return counts("no nodes", "kernels", n.Kernels, "copies", n.Copies, "fills", n.Fills, "host functions",
		n.HostFunctions,
		"event records", n.EventRecords, "event waits", n.EventWaits, "empty nodes", n.Empty, "other nodes", n.Others)
}

// String lists the counts that are not 0: "2 events, 1 pinned buffers of 1.5 MiB". If all are 0 it
// returns "no leaks".
func (l LeakCounts) String() string {
	s := counts("no leaks", "events", int(l.Events), "graphs", int(l.Graphs), "streams", int(l.Streams),
		"pinned buffers", int(l.Pinned))
	if l.Pinned > 0 {
		s += " of " + size(l.PinnedBytes)
	}
	return s
}

// counts formats pairs of a name and a count, except pairs whose count is 0.
func counts(none string, pairs ...any) string {
	var parts []string
	for i := 0; i+1 < len(pairs); i += 2 {
		if pairs[i+1] != 0 {
			parts = append(parts, fmt.Sprintf("%d %s", pairs[i+1], pairs[i]))
		}
	}
	if len(parts) == 0 {
		return none
	}
	return strings.Join(parts, ", ")
}

// String returns a name for messages: the first bytes of the handle.
func (h EventHandle) String() string { return fmt.Sprintf("event handle %x...", h[:8]) }

// String returns a name for messages: "stream sanitizer with 2 errors in 3 findings".
func (s *Sanitizer) String() string {
	if s == nil {
		return "no stream sanitizer"
	}
	return fmt.Sprintf("stream sanitizer with %d errors in %d findings", s.Errors(), len(s.Findings()))
}
