package devplan

import "testing"

// TestTranscodesAreBounded: each sample has at most one copy, and all copies together stay within
// the bound. A sample whose copy had no room is never wanted again.
func TestTranscodesAreBounded(t *testing.T) {
	all := newCopies(4, 1000)
	defer all.memory.Free()
	made := func(bytes int) *Copy {
		return &Copy{data: make([]byte, bytes-10), blob: make([]byte, 10)}
	}
	first := made(600)
	if !all.wants(0, 600) || all.keep(0, first) != first || all.used.Load() != 600 {
		t.Fatalf("after the first copy %d bytes are used, want 600", all.used.Load())
	}
	if all.keep(0, made(300)) != first || all.used.Load() != 600 {
		t.Errorf("after a second copy of the sample %d bytes are used, want 600", all.used.Load())
	}
	wants := all.wants(1, 401)
	if kept := all.keep(1, made(401)); wants || kept != nil || all.kept[1].Load() != nil {
		t.Errorf("a copy over the bound: wants = %v, keep = %p, stored %p, want false, nil, nil",
			wants, kept, all.kept[1].Load())
	}
	if all.wants(1, 0) {
		t.Error("wants() of a copy that had no room = true, want false")
	}
	if !all.wants(2, 400) || all.keep(2, made(400)) == nil || all.used.Load() != 1000 {
		t.Errorf("after the last copy %d bytes are used, want 1000", all.used.Load())
	}
	if fits, large := all.wants(3, 0), newCopies(1, 1<<40).wants(0, MaxFile+1); !fits || large {
		t.Errorf("wants() of an image that fits and of one over MaxFile = %v, %v, want true, false", fits,
			large)
	}
}
