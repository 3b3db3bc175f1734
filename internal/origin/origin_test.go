package origin

import (
	"runtime"
	"strings"
	"sync"
	"testing"
	"unsafe"
)

// made returns the counts of the handles of the kind that the function made.
func made(kind, function string) (open, leaked int64) {
	for _, s := range Sites() {
		if s.Kind != kind {
			continue
		}
		frame, _ := runtime.CallersFrames(s.PCs).Next()
		if strings.HasSuffix(frame.Function, function) {
			open += s.Open
			leaked += s.Leaked
		}
	}
	return open, leaked
}

func want(t *testing.T, kind string, open, leaked int64) {
	t.Helper()
	if !Enabled {
		open, leaked = 0, 0
	}
	if o, l := made(kind, "origin."+t.Name()); o != open || l != leaked {
		t.Errorf("%s: %d open and %d leaked, want %d and %d", kind, o, l, open, leaked)
	}
}

func TestOpenAndLeakedHandlesAreCounted(t *testing.T) {
	const kind = "counted"
	a, b := New(kind), New(kind)
	var c Origin // the zero value counts nothing
	want(t, kind, 2, 0)
	a.Closed()
	b.Leaked()
	b.Closed()
	c.Closed()
	want(t, kind, 0, 1)
}

func TestHoldsEndOneByOneAndTogether(t *testing.T) {
	const kind = "held"
	var h Holds
	h.Drop() // no claim yet
	h.Add(kind)
	h.Add(kind)
	h.Add(kind)
	want(t, kind, 3, 0)
	h.Drop()
	want(t, kind, 2, 0)
	h.DropAll()
	h.DropAll()
	want(t, kind, 0, 0)
}

func TestCountsAreExactUnderConcurrency(t *testing.T) {
	const kind = "concurrent"
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range 1000 {
				New(kind).Closed()
			}
		})
	}
	all.Wait()
	want(t, kind, 0, 0)
}

// deep makes a handle n calls deeper than itself.
func deep(n int, kind string) {
	if n == 0 {
		_ = New(kind)
		return
	}
	deep(n-1, kind)
}

func TestStackIsCutAtItsMaximumDepth(t *testing.T) {
	const kind = "deep"
	deep(100, kind)
	for _, s := range Sites() {
		if s.Kind == kind && len(s.PCs) != 32 {
			t.Errorf("the stack has %d calls, want 32", len(s.PCs))
		}
	}
	if open, _ := made(kind, "origin.deep"); Enabled && open != 1 {
		t.Errorf("%d open, want 1", open)
	}
}

// Without the tag an Origin adds no size and no allocations to a handle.
func TestCostsNothingWithoutTheTag(t *testing.T) {
	if Enabled {
		t.Skip("built with the tag debug")
	}
	type handle struct {
		_ Origin
		_ uintptr
	}
	if size := unsafe.Sizeof(handle{}); size != unsafe.Sizeof(uintptr(0)) {
		t.Errorf("a handle with an Origin has %d bytes, want %v", size, unsafe.Sizeof(uintptr(0)))
	}
	if n := testing.AllocsPerRun(100, func() {
		o := New("free")
		o.Leaked()
		o.Closed()
		var h Holds
		h.Add("free")
		h.DropAll()
	}); n != 0 || Sites() != nil {
		t.Errorf("%g allocations, %d sites", n, len(Sites()))
	}
}
