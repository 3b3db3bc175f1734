package devplan

import "testing"

// TestTranscodesAreBounded: a copy is kept once, up to the bound. Without room or after a refusal
// no copy is wanted.
func TestTranscodesAreBounded(t *testing.T) {
	all := newCopies(4, 1000)
	defer all.memory.Free()
	made := func(bytes int) *Copy {
		return &Copy{data: make([]byte, bytes-10), blob: make([]byte, 10)}
	}
	first := made(600)
	if !all.wants(0, 600) || all.keep(0, first) != first || all.used.Load() != 600 {
		t.Fatalf("%d bytes are used", all.used.Load())
	}
	if all.keep(0, made(300)) != first || all.used.Load() != 600 {
		t.Errorf("a second copy of a sample: %d bytes are used", all.used.Load())
	}
	if all.wants(1, 401) || all.keep(1, made(401)) != nil || all.kept[1].Load() != nil {
		t.Error("a copy beyond the bound is kept")
	}
	if all.wants(1, 0) {
		t.Error("a copy that had no room is wanted again")
	}
	if !all.wants(2, 400) || all.keep(2, made(400)) == nil || all.used.Load() != 1000 {
		t.Errorf("the last copy: %d bytes are used", all.used.Load())
	}
	if !all.wants(3, 0) || newCopies(1, 1<<40).wants(0, MaxFile+1) {
		t.Error("an image is not wanted, or one that is too large is")
	}
}
