package torch

import (
	"bytes"
	"testing"
)

// Any bytes are refused, or give a handle whose bytes are the same.
func FuzzSharedHandle(f *testing.F) {
	for _, h := range []sharedHandle{
		{pid: 1, dtype: int32(Float32), size: []int64{2, 3}, stride: []int64{3, 1}},
		{pid: 1 << 30, fd: 5, dtype: int32(Bool), gpu: true, size: []int64{}, stride: []int64{}},
	} {
		b, err := SharedHandle{h}.MarshalBinary()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var h SharedHandle
		if h.UnmarshalBinary(b) != nil {
			if h.h.pid != 0 {
				t.Errorf("a refused handle has the process %d, want 0 as before", h.h.pid)
			}
			return
		}
		again, err := h.MarshalBinary()
		if err != nil || !bytes.Equal(again, b) {
			t.Errorf("got %x, %v, want %x", again, err, b)
		}
	})
}
