// Package arena holds compressed images outside of Go's heap. The garbage collector lets the heap
// grow to a multiple of its live bytes, so an archive of 600 MB that is kept in the heap may cost
// 1.2 GB and more. The memory of an [Arena] does not count for the collector, and returns to the
// system as soon as the arena is freed.
//
// An [Arena] holds bytes that live as long as the whole arena, such as an archive that is kept in
// memory. [Buffers] recycle the memory of samples, each of which lives for a short time.
//
// Builds with the race detector use Go's heap, because the detector ignores all other memory.
//
// The garbage collector does not track references into an arena. No code may use the bytes of an
// arena after Free, and a loader must never hand them to its user.
package arena

import (
	"runtime"
	"sync"
)

// Arena allocates memory that is freed all at once. It is safe for concurrent use. The garbage
// collector frees an arena that becomes unreachable. The zero value is not usable: see New.
type Arena struct {
	mu     sync.Mutex
	rest   []byte // unused part of the last chunk
	mapped *mapping
}

// mapping is the memory of an arena. It is a separate object so that a cleanup of the arena can
// free it.
type mapping struct {
	chunks [][]byte
	freed  bool
}

func (m *mapping) free() {
	for _, c := range m.chunks {
		unmapPages(c)
	}
	m.chunks, m.freed = nil, true
}

// New returns an empty arena. It maps no memory before the first Alloc.
func New() *Arena {
	a := &Arena{mapped: &mapping{}}
	runtime.AddCleanup(a, (*mapping).free, a.mapped)
	return a
}

// Alloc returns n zero bytes at an address that is a multiple of 16. They are valid until Free. If
// the system has no memory to map, and after Free, Alloc returns memory of Go's heap.
func (a *Arena) Alloc(n int) []byte {
	if p := a.alloc(n, 16); p != nil {
		return p
	}
	return make([]byte, n)
}

// alloc returns n zero bytes at an address that is a multiple of align, a power of 2 up to the size
// of a page. It returns nil if n <= 0, after Free, or if the system has no memory to map.
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
	if size > chunkBytes/4 { // a separate mapping does not waste the rest of the chunk
		if p := a.mapped.grow(size); p != nil {
			return p[:n:n]
		}
		return nil
	}
	// a chunk starts at a page, so aligned offsets are aligned addresses
	used := chunkBytes - len(a.rest)
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

// grow maps more memory. It returns nil if the system has none.
func (m *mapping) grow(size int) []byte {
	p := mapPages(size)
	if p != nil {
		m.chunks = append(m.chunks, p)
	}
	return p
}

// Clone returns a copy of data in the arena.
func (a *Arena) Clone(data []byte) []byte {
	p := a.Alloc(len(data))
	copy(p, data)
	return p
}

// Free returns all memory of the arena to the system. No code may use that memory afterwards. Free
// may be called more than once, and on a nil arena.
func (a *Arena) Free() {
	if a == nil {
		return
	}
	a.mu.Lock()
	a.mapped.free()
	a.rest = nil
	a.mu.Unlock()
}
