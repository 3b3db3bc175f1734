//go:build !race

package arena

import (
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"unsafe"
)

// mappedBytes returns the number of bytes of p that the kernel has mapped for this process.
func mappedBytes(t *testing.T, p []byte) (n int) {
	t.Helper()
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	low := uint64(uintptr(unsafe.Pointer(unsafe.SliceData(p))))
	high := low + uint64(len(p))
	for line := range strings.Lines(string(maps)) {
		span, _, _ := strings.Cut(line, " ")
		from, to, _ := strings.Cut(span, "-")
		begin, _ := strconv.ParseUint(from, 16, 64)
		end, _ := strconv.ParseUint(to, 16, 64)
		if b, e := max(low, begin), min(high, end); b < e {
			n += int(e - b)
		}
	}
	return n
}

// The bytes of an arena do not count as Go's heap.
func TestArenaIsOutsideTheHeap(t *testing.T) {
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	a := New()
	defer a.Free()
	const n = 64 << 20
	for range n >> 16 {
		clear(a.Alloc(1 << 16))
	}
	runtime.ReadMemStats(&after)
	if grown := int64(after.HeapAlloc) - int64(before.HeapAlloc); grown > 1<<20 {
		t.Errorf("the heap has grown by %d bytes for %d outside of it, want at most %v", grown, n, 1<<20)
	}
}

// Free returns the memory to the system. Later allocations come from Go's heap.
func TestFreeReturnsTheMemoryToTheSystem(t *testing.T) {
	a := New()
	p := a.Alloc(chunkBytes)
	p[0] = 1
	if n := mappedBytes(t, p); n != len(p) {
		t.Fatalf("%d bytes of the allocation are mapped, want %d", n, len(p))
	}
	a.Free()
	a.Free()
	if n := mappedBytes(t, p); n != 0 { // no other code of this test maps memory there
		t.Errorf("%d bytes are mapped after Free, want 0", n)
	}
	if q := a.Alloc(100); len(q) != 100 {
		t.Errorf("Alloc(100) after Free has %d bytes, want 100", len(q))
	}
	(*Arena)(nil).Free()
}

// advised reports whether p is in memory for which huge pages are wanted.
func advised(t *testing.T, p []byte) bool {
	t.Helper()
	text, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		t.Fatal(err)
	}
	at := uint64(uintptr(unsafe.Pointer(unsafe.SliceData(p))))
	inside := false
	for line := range strings.Lines(string(text)) {
		if flags, ok := strings.CutPrefix(line, "VmFlags:"); ok && inside {
			return strings.Contains(flags, " hg ")
		}
		span, _, _ := strings.Cut(line, " ")
		from, to, isSpan := strings.Cut(span, "-")
		if begin, err := strconv.ParseUint(from, 16, 64); isSpan && err == nil {
			end, _ := strconv.ParseUint(to, 16, 64)
			inside = begin <= at && at < end
		}
	}
	t.Fatalf("no mapping has the address %#x", at)
	return false
}

// Buffers have no huge pages: those would not go back to the system when a buffer's pages do.
func TestOnlyArenasHaveHugePages(t *testing.T) {
	if _, err := os.Stat("/sys/kernel/mm/transparent_hugepage"); err != nil {
		t.Skip("the system has no transparent huge pages")
	}
	a, b := New(), NewBuffers(0)
	defer a.Free()
	defer b.Close()
	if !advised(t, a.Alloc(1000)) {
		t.Error("an arena's memory is without huge pages, want them")
	}
	if advised(t, b.Get(1000)) {
		t.Error("a buffer's memory has huge pages, want none")
	}
}
