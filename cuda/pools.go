package cuda

import (
	"fmt"

	"github.com/torchstream/torchstream/internal/capi"
)

// PoolKind is the purpose of a pool's memory.
type PoolKind int

// The kinds of pools.
const (
	DefaultPool PoolKind = capi.PoolDefault    // memory of no other kind
	OwnPool     PoolKind = capi.PoolMemoryPool // belongs to a MemoryPool
	GraphPool   PoolKind = capi.PoolGraph      // belongs to a Graph, or to several Graphs that share it
	// EndedPool is the pool of a closed MemoryPool or Graph. Live tensors hold its memory, or the
	// allocator has not returned it yet.
	EndedPool PoolKind = capi.PoolEnded
)

// String returns the kind: "default pool", "memory pool", "graph pool", "ended pool".
func (k PoolKind) String() string {
	switch k {
	case DefaultPool:
		return "default pool"
	case OwnPool:
		return "memory pool"
	case GraphPool:
		return "graph pool"
	case EndedPool:
		return "ended pool"
	}
	return fmt.Sprintf("PoolKind(%d)", int(k))
}

// PoolStats is the state of one part of a device's caching allocator, in bytes unless the comment
// says otherwise.
type PoolStats struct {
	ID        int64 // equal in two calls for the same pool; 0 for the default pool
	Kind      PoolKind
	Device    Device
	Reserved  int64 // held from the driver
	Allocated int64 // in live tensors
	// Requested is the sum of the sizes that live tensors asked for. Allocated is the same sum,
	// rounded up to blocks.
	Requested int64
	// Active counts blocks that are live, or freed but still used by a recorded stream.
	Active      int64
	MaxFree     int64 // the largest free block: a larger allocation needs new memory from the driver
	Allocations int64 // number of live allocations
	Segments    int64 // number of pieces of memory held from the driver
}

// String returns the state in one line: "graph pool 3 on cuda:0: 12 allocations of 1.5 GiB, 2 GiB
// reserved in 4 segments, largest free block 512 MiB".
func (s PoolStats) String() string {
	name := s.Kind.String()
	if s.Kind != DefaultPool {
		name += fmt.Sprintf(" %d", s.ID)
	}
	return fmt.Sprintf("%s on %v: %d allocations of %s, %s reserved in %d segments, largest free block %s",
		name, s.Device, s.Allocations, size(s.Allocated), size(s.Reserved), s.Segments, size(s.MaxFree))
}

// Pools returns the state of all pools of the device's caching allocator that hold memory: the
// default pool first, then the pools of graphs and of [NewMemoryPool]. It walks the allocator's
// segments, so do not call it at every step.
func (d Device) Pools() ([]PoolStats, error) {
	if err := d.gpu("Device.Pools"); err != nil {
		return nil, err
	}
	all, err := capi.Pools(int32(d))
	if err != nil {
		return nil, checked(err)
	}
	pools := make([]PoolStats, len(all))
	for i, s := range all {
		pools[i] = poolStats(s)
	}
	return pools, nil
}

func poolStats(s capi.PoolStats) PoolStats {
	return PoolStats{
		ID: s.ID, Kind: PoolKind(s.Kind), Device: Device(s.Device), Reserved: s.Reserved,
		Allocated: s.Allocated, Requested: s.Requested,
		Active: s.Active, MaxFree: s.MaxFree, Allocations: s.Allocations, Segments: s.Segments,
	}
}

// Stats returns the state of the pool. It walks the pool's segments. Otherwise it behaves like
// [MemoryPool.Bytes].
func (p *MemoryPool) Stats() (PoolStats, error) {
	var s PoolStats
	err := p.read("MemoryPool.Stats", func(c *capi.MemoryPool) error {
		stats, err := capi.MemoryPoolStats(c)
		s = poolStats(stats)
		return err
	})
	return s, err
}
