// Package arena holds compressed images outside of Go's heap. The garbage collector lets the heap
// grow to a multiple of what is alive in it: an archive of 600 MB that is kept there may cost 1.2
// GB and more. Memory of an [Arena] is not counted, and goes back to the system as soon as it is
// freed.
//
// An [Arena] holds bytes that live until the whole arena ends, such as an archive that is kept in
// memory. [Buffers] recycle the memory of samples that come and go.
//
// The garbage collector does not see references into an arena. Bytes of an arena must not be used
// after Free, and must never be handed to the user of a loader.
package arena

import (
	"runtime"
	"sync"

	"golang.org/x/sys/unix"
)

// chunkBytes is how much address space is reserved at a time. Pages cost memory when they are first
// written to.
const chunkBytes = 16 << 20

// Arena hands out memory that is freed all at once. Several goroutines may use it. An arena that
// becomes unreachable is freed too. The zero value is not usable: see New.
type Arena struct {
	mu     sync.Mutex
	rest   []byte // of the last chunk
	mapped *mapping
}

// mapping is the memory of an arena, apart from it so that a cleanup can free it.
type mapping struct {
	chunks [][]byte
	freed  bool
}

func (m *mapping) free() {
	for _, c := range m.chunks {
		_ = unix.Munmap(c) // fails for addresses that are not mapped only
	}
	m.chunks, m.freed = nil, true
}

// New returns an empty arena. It takes no memory before the first Alloc.
func New() *Arena {
	a := &Arena{mapped: &mapping{}}
	runtime.AddCleanup(a, (*mapping).free, a.mapped)
	return a
}

// Alloc returns n bytes of zeros, which end with the arena. Their address is a multiple of 16.
// Where the system gives no memory outside of the heap, and after Free, they are Go's.
func (a *Arena) Alloc(n int) []byte {
	if p := a.alloc(n, 16); p != nil {
		return p
	}
	return make([]byte, n)
}

// alloc returns n > 0 bytes, aligned to a power of 2 up to the size of a page; nil if there are
// none.
func (a *Arena) alloc(n, align int) []byte {
	if n <= 0 {
		return nil
	}
	size := (n + align - 1) &^ (align - 1)
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.mapped.freed {
		return nil
	}
	if size > chunkBytes/4 { // in a mapping of its own, so that the rest of the chunk is not lost
		if p := a.mapped.grow(size); p != nil {
			return p[:n:n]
		}
		return nil
	}
	used := chunkBytes - len(a.rest) // a chunk begins at a page: aligned offsets are aligned addresses
	skip := -used & (align - 1)
	if len(a.rest) < skip+size {
		p := a.mapped.grow(chunkBytes)
		if p == nil {
			return nil
		}
		a.rest, skip = p, 0
	}
	p := a.rest[skip:][:n:n]
	a.rest = a.rest[skip+size:]
	return p
}

// grow maps more memory; nil if the system has none.
func (m *mapping) grow(size int) []byte {
	p, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_NORESERVE)
	if err != nil {
		return nil
	}
	m.chunks = append(m.chunks, p)
	return p
}

// Clone returns a copy of data in the arena.
func (a *Arena) Clone(data []byte) []byte {
	p := a.Alloc(len(data))
	copy(p, data)
	return p
}

// Free gives all memory back to the system. Nobody may use it any more. It may be called more than
// once; a nil arena has nothing to free.
func (a *Arena) Free() {
	if a == nil {
		return
	}
	a.mu.Lock()
	a.mapped.free()
	a.rest = nil
	a.mu.Unlock()
}
