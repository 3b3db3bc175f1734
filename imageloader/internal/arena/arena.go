// Package arena keeps compressed images outside of Go's heap. The garbage collector lets the heap
// grow to a multiple of its live bytes, so an archive of 600 MB in the heap may cost 1.2 GB or
// more. The collector ignores the memory of an [Arena], and the system gets it back as soon as the
// arena is freed.
//
// An [Arena] is for bytes that live as long as the whole arena, such as an archive that is kept in
// memory. [Buffers] are for short-lived samples: they reuse the memory of one sample for another.
//
// Builds with the race detector use Go's heap, because the detector ignores all other memory.
//
// The garbage collector does not track references into an arena. The bytes of an arena must not be
// used after Free, so a loader must never pass them to its user.
package arena

import (
	"runtime"
	"sync"
)

// Arena allocates memory that is freed all at once. It is safe for concurrent use. The garbage
// collector frees an arena that is no longer reachable. The zero value is not usable: see New.
type Arena struct {
	mu     sync.Mutex
	rest   []byte // unused part of the last chunk
	mapped *mapping
}

// mapping is the memory of an arena. It is a separate object, because a cleanup of the arena frees
// it.
type mapping struct {
	chunks [][]byte
	freed  bool
	small  bool // no huge pages
}

func (m *mapping) free() {
	for _, c := range m.chunks {
		unmapPages(c)
	}
	m.chunks, m.freed = nil, true
}

// New returns an empty arena. The first Alloc maps its memory.
func New() *Arena {
	a := &Arena{mapped: &mapping{}}
	runtime.AddCleanup(a, (*mapping).free, a.mapped)
	return a
}

// newSmallPages returns an empty arena without huge pages, for memory of which parts go back to the
// system before Free. A huge page has the memory of several such parts.
func newSmallPages() *Arena {
	a := New()
	a.mapped.small = true
	return a
}

// Alloc returns n zero bytes at an address that is a multiple of 16. They are valid until Free.
// After Free, or if the system can't map memory, Alloc returns memory from Go's heap.
func (a *Arena) Alloc(n int) []byte {
	if p := a.alloc(n, 16); p != nil {
		return p
	}
	return make([]byte, n)
}

// alloc returns n zero bytes at an address that is a multiple of align, a power of 2 up to the size
// of a page. It returns nil if n <= 0, after Free, or if the system can't map memory.
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
	if size > chunkBytes/4 { // a chunk for it alone does not waste the rest of the current chunk
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

// grow maps more memory. It returns nil if the system can't map it.
func (m *mapping) grow(size int) []byte {
	p := mapPages(size)
	if p == nil {
		return nil
	}
	if !m.small {
		adviseHuge(p)
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

// Free returns all memory of the arena to the system. The memory must not be used afterwards. Free
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
