package order

import "testing"

// TestRampYieldsEarly: a buffer with Ramp yields its first element when it has two, holds half of
// the elements until it is full, and loses none.
func TestRampYieldsEarly(t *testing.T) {
	s := NewShuffler[int](10, 1<<20, 1, 1)
	s.Ramp = true
	out, peak := 0, 0
	for i := range 100 {
		for s.Full(1) {
			s.Take()
			out++
		}
		s.Add(i, 1)
		peak = max(peak, s.Len())
		if s.Len() > i/2+1 || s.Len()+out != i+1 {
			t.Fatalf("after %d samples %d are out and %d held", i+1, out, s.Len())
		}
	}
	if peak != 10 {
		t.Errorf("the buffer held up to %d samples, want 10", peak)
	}
}

// TestShufflerIsBoundedInBytes: the buffer is bounded in bytes too.
func TestShufflerIsBoundedInBytes(t *testing.T) {
	s := NewShuffler[int](1000, 100, 1, 1)
	for i := range 50 {
		size := 1 + i*7%40
		for s.Full(int64(size)) {
			s.Take()
		}
		s.Add(i, int64(size))
		if s.bytes > 100 {
			t.Fatalf("%d bytes are in the buffer, want at most 100", s.bytes)
		}
	}
	if s.Full(1 << 40); s.Len() == 0 {
		t.Fatal("Len() = 0, want samples left in the buffer")
	}
	for s.Len() > 0 {
		s.Take()
	}
	if s.Full(1 << 40) {
		t.Error("Full(1 << 40) of an empty buffer = true, want false")
	}
}
