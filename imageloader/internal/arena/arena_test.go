package arena

import (
	"bytes"
	"runtime"
	"sync"
	"testing"
	"unsafe"
)

func TestAllocationsAreZeroedAlignedAndDisjoint(t *testing.T) {
	a := New()
	defer a.Free()
	sizes := []int{1, 15, 16, 17, 4096, 100_000, chunkBytes / 4, chunkBytes/4 + 1, chunkBytes, 3, chunkBytes + 5}
	var all [][]byte
	for i, n := range sizes {
		p := a.Alloc(n)
		if len(p) != n || cap(p) != n || uintptr(unsafe.Pointer(unsafe.SliceData(p)))%16 != 0 {
			t.Fatalf("%d bytes: len %d, cap %d, at %p", n, len(p), cap(p), p)
		}
		if bytes.ContainsFunc(p, func(r rune) bool { return r != 0 }) {
			t.Errorf("%d bytes are not zero", n)
		}
		for k := range p {
			p[k] = byte(i + 1)
		}
		all = append(all, p)
	}
	for i, p := range all {
		if c := bytes.Count(p, []byte{byte(i + 1)}); c != len(p) {
			t.Errorf("allocation %d has kept %d of its %d bytes", i, c, len(p))
		}
	}
	if p := a.Alloc(0); len(p) != 0 {
		t.Errorf("Alloc(0) has %d bytes, want 0", len(p))
	}
	if got := a.Clone([]byte("text")); string(got) != "text" {
		t.Errorf("the clone is %q, want %q", got, "text")
	}
}

func TestClassForIsTheSmallestClassThatFits(t *testing.T) {
	for n := 1; n < 1<<31; n += 1 + n/7 {
		c := classFor(n)
		if capacityOf(c) < n || c > 0 && capacityOf(c-1) >= n || classFor(capacityOf(c)) != c {
			t.Fatalf("%d bytes are in class %d of %d bytes", n, c, capacityOf(c))
		}
	}
}

// Get returns enough room, and reuses a buffer that was put back.
func TestBuffersAreReused(t *testing.T) {
	b := NewBuffers(1 << 20)
	defer b.Close()
	p := b.Get(50_000)
	b.Put(p)
	if q := b.Get(40_000); &p[0] != &q[0] || len(q) != 40_000 {
		t.Errorf("Get(40000) has %d bytes at %p, want 40000 of the returned buffer at %p", len(q), &q[0],
			&p[0])
	}
	b.Put(nil)
	b.Put(make([]byte, 5000)) // Put ignores memory that Get did not return
	if q := b.Get(5000); cap(q) != capacityOf(classFor(5000)) {
		t.Errorf("%d bytes lie in %d", len(q), cap(q))
	}
}

// If an arena has no memory, buffers come from Go's heap, and are not reused.
func TestBuffersWithoutArena(t *testing.T) {
	b := NewBuffers(1 << 20)
	b.Get(100)
	b.Close() // from here on the arena has no memory
	for _, n := range []int{1, 100, pageBytes, pageBytes + 1, 50_000} {
		p := b.Get(n)
		for i := range p {
			p[i] = 1
		}
		b.Put(p)
		if q := b.Get(n); len(p) != n || len(q) != n || &q[0] == &p[0] {
			t.Errorf("%d bytes: %d, then %d, or the same", n, len(p), len(q))
		}
		runtime.KeepAlive(p)
	}
}

// The size of a sample bounds the capacity of its buffer.
func TestBuffersAreNotMuchLarger(t *testing.T) {
	b := NewBuffers(1 << 40)
	defer b.Close()
	var all [][]byte
	for n := 1 << 12; n < 1<<24; n += n / 3 {
		all = append(all, b.Get(n))
	}
	for _, p := range all {
		b.Put(p)
	}
	for n := 1 << 12; n < 1<<22; n += n / 5 {
		if p := b.Get(n); cap(p) > 2*n+n/4 {
			t.Errorf("%d bytes lie in %d, want at most %v", n, cap(p), 2*n+n/4)
		}
	}
}

// Buffers over the limit return their pages to the system and can be reused.
func TestBuffersOverTheLimitReturnTheirPages(t *testing.T) {
	b := NewBuffers(0)
	defer b.Close()
	p := b.Get(3 * pageBytes)
	for i := range p {
		p[i] = 1
	}
	b.Put(p)
	q := b.Get(3 * pageBytes)
	if &p[0] != &q[0] {
		t.Fatalf("Get returns memory at %p, want the returned buffer's address space at %p", &q[0], &p[0])
	}
	if q[0] != 0 || q[len(q)-1] != 0 {
		t.Errorf("first and last byte of a buffer over the limit = %d, %d, want the zeros of fresh pages",
			q[0], q[len(q)-1])
	}
}

// Two goroutines never have the same buffer at a time.
func TestConcurrentGoroutinesNeverShareABuffer(t *testing.T) {
	b := NewBuffers(1 << 18)
	defer b.Close()
	var all sync.WaitGroup
	for g := range 8 {
		all.Go(func() {
			for i := range 2000 {
				p := b.Get(1 + (i*7919+g*104729)%70_000)
				p[0], p[len(p)-1] = byte(g), byte(g)
				runtime.Gosched()
				if p[0] != byte(g) || p[len(p)-1] != byte(g) {
					t.Errorf("goroutine %d finds %d and %d in its buffer, want its own number", g, p[0],
						p[len(p)-1])
				}
				b.Put(p)
			}
		})
	}
	all.Wait()
}
