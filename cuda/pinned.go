package cuda

import (
	"log/slog"
	"os"
	"runtime"
	"sync/atomic"

	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/internal/origin"
	"github.com/torchstream/torchstream/internal/system"
)

// Pinned is page-locked host memory. The GPU's copy engines read and write it directly, so that a
// copy runs in parallel with the host and with compute.
//
// The memory is C memory, which the garbage collector neither moves nor frees. Close it after the
// last copy from or to it is done. A buffer that becomes unreachable before its Close is not freed,
// since slices of it may exist. [Leaks] counts it.
type Pinned struct {
	made    origin.Origin
	memory  []byte
	c       *capi.Pinned
	closed  atomic.Bool
	cleanup runtime.Cleanup
}

// NewPinned makes a zeroed buffer of exactly the given number of bytes, at least one. It blocks for
// about a millisecond per 10 MB, and needs a GPU: make buffers once and keep them.
func NewPinned(bytes int) (*Pinned, error) {
	if bytes < 1 {
		return nil, invalid("NewPinned", "%d bytes: a buffer has at least one byte", bytes)
	}
	c, err := capi.NewPinned(bytes)
	if err != nil {
		return nil, checked(err)
	}
	return newPinned(c, capi.PinnedBytes(c)), nil
}

// NewPinnedNear is [NewPinned] with memory of the NUMA node to which the GPU is attached. A copy
// from or to the memory of another node may be slower. The driver chooses the memory if the machine
// has one node, if the GPU's node is unknown, or if the process may use neither that node's memory
// nor its CPUs.
func NewPinnedNear(d Device, bytes int) (*Pinned, error) {
	node, found := d.hostNode(os.DirFS("/"))
	if !found {
		return NewPinned(bytes)
	}
	var p *Pinned
	_, err := system.OnNode(node, func() (err error) {
		p, err = NewPinned(bytes)
		return err
	})
	return p, err
}

// RegisterPinned pins existing memory, such as a mapped file or a buffer of another library, so
// that copies from and to it need not wait. The caller keeps the ownership of the memory, which
// must stay mapped until Close. Close unpins the memory and does not free it. RegisterPinned blocks
// for about a millisecond per 10 MB.
//
// RegisterPinned refuses Go memory, since the garbage collector may reuse it: make such buffers
// with [NewPinned]. It accepts Go memory that a runtime.Pinner holds; the Pinner must hold the
// memory until Close. RegisterPinned also refuses memory that is already partly pinned, and a
// read-only mapping.
func RegisterPinned(memory []byte) (*Pinned, error) {
	if len(memory) == 0 {
		return nil, invalid("RegisterPinned", "no memory: a buffer has at least one byte")
	}
	c, err := capi.RegisterPinned(memory)
	if err != nil {
		return nil, checked(err)
	}
	return newPinned(c, memory[:len(memory):len(memory)]), nil
}

// RegisterReadOnly pins existing memory, such as a read-only mapping of a file, so that the kernels
// of all GPUs can read it at its address. The memory must stay mapped until Close, which unpins and
// does not free it. Other processes may change the content, and cut the file: the GPUs then still
// read the old pages.
//
// RegisterReadOnly blocks for about 60 ms per GB, and while pages that are not in memory are read.
// It refuses Go memory, and memory that is already partly pinned. The error is
// [ErrUnsupported] if a GPU cannot read such memory.
func RegisterReadOnly(memory []byte) (*Pinned, error) {
	if len(memory) == 0 {
		return nil, invalid("RegisterReadOnly", "no memory: a buffer has at least one byte")
	}
	c, err := capi.RegisterReadOnly(memory)
	if err != nil {
		return nil, checked(err)
	}
	return newPinned(c, memory[:len(memory):len(memory)]), nil
}

func newPinned(c *capi.Pinned, memory []byte) *Pinned {
	p := &Pinned{made: origin.New("pinned memory"), memory: memory, c: c}
	p.cleanup = runtime.AddCleanup(p, lostPinned.report, lostPinned{p.made, len(memory)})
	return p
}

// lostPinned is a Pinned that the garbage collector has found.
type lostPinned struct {
	made  origin.Origin
	bytes int
}

func (l lostPinned) report() {
	leakedPinned.Add(1)
	leakedPinnedBytes.Add(int64(l.bytes))
	l.made.Leaked()
	l.made.Closed()
	slog.Debug("cuda: a Pinned became unreachable before Close; its memory stays locked", "bytes", l.bytes)
}

// Bytes returns the memory itself, or nil after Close. The slice and its subslices are valid until
// Close. Do not use them later. A copy in progress accesses the memory at the same time as the
// host: wait for the copy's event before changing the memory.
func (p *Pinned) Bytes() []byte {
	if p == nil || p.closed.Load() {
		return nil
	}
	return p.memory
}

// Close frees the memory. For a buffer of [RegisterPinned] it unpins the memory. Close does not
// wait. Before you call it, wait until no copy from or to the memory is in flight, and no goroutine
// uses slices of it. After an error of the driver the buffer stays open, and Close may be called
// again. Further calls, and calls on nil, do nothing and return nil.
func (p *Pinned) Close() error {
	if p == nil || p.closed.Swap(true) {
		return nil
	}
	if err := capi.FreePinned(p.c); err != nil {
		p.closed.Store(false)
		return checked(err)
	}
	p.cleanup.Stop()
	p.made.Closed()
	return nil
}

// PinnedBytes returns the number of bytes of pinned memory that the process holds in open buffers.
func PinnedBytes() int64 { return capi.PinnedBytesLive() }
