package cuda

import (
	"log/slog"
	"runtime"
	"sync/atomic"

	"github.com/torchstream/torchstream/internal/capi"
)

// Pinned is page-locked host memory: what the GPU's copy engines can read and write by themselves,
// so that a copy runs beside the host and beside compute.
//
// It is C memory, which the garbage collector neither moves nor frees. It must be closed, after the
// last copy from or to it is done. Since slices of it may be anywhere, a buffer that becomes
// unreachable is not freed: [Leaks] counts it.
type Pinned struct {
	memory  []byte
	c       *capi.Pinned
	closed  atomic.Bool
	cleanup runtime.Cleanup
}

// NewPinned makes a zeroed buffer of exactly that many bytes, at least one. It blocks for about a
// millisecond per 10 MB, and needs a GPU: make buffers once and keep them.
func NewPinned(bytes int) (*Pinned, error) {
	if bytes < 1 {
		return nil, invalid("NewPinned", "%d bytes: a buffer has at least one", bytes)
	}
	c, err := capi.NewPinned(bytes)
	if err != nil {
		return nil, checked(err)
	}
	return newPinned(c, capi.PinnedBytes(c)), nil
}

func newPinned(c *capi.Pinned, memory []byte) *Pinned {
	p := &Pinned{memory: memory, c: c}
	p.cleanup = runtime.AddCleanup(p, func(bytes int) {
		leakedPinned.Add(1)
		leakedPinnedBytes.Add(int64(bytes))
		slog.Debug("cuda: a Pinned became unreachable before Close; its memory stays locked", "bytes", bytes)
	}, len(memory))
	return p
}

// Bytes returns the memory itself, nil after Close. The slice and what is cut from it are valid
// until Close and must not be touched after it. A copy that is under way reads or writes the memory
// beside the host: wait for its event before changing it.
func (p *Pinned) Bytes() []byte {
	if p == nil || p.closed.Load() {
		return nil
	}
	return p.memory
}

// Close gives the memory back. It waits for nothing that the caller should have waited for: no copy
// from or to the memory may be in flight, and nobody may use slices of it. Further calls, and calls
// on nil, do nothing and return nil.
func (p *Pinned) Close() error {
	if p == nil || p.closed.Swap(true) || p.c == nil {
		return nil
	}
	p.cleanup.Stop()
	return checked(capi.FreePinned(p.c))
}

// PinnedBytes returns how many bytes of pinned memory the process holds in buffers that are not
// closed.
func PinnedBytes() int64 { return capi.PinnedBytesLive() }
