package archive

import (
	"bytes"
	"math/rand/v2"
	"testing"
)

func TestWindowsAreUnpacked(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 5))
	for round := range 500 {
		window := make([]byte, windowBytes)
		for i := range window {
			window[i] = byte(rng.Uint32())
		}
		used := make([]uint64, windowBytes/64)
		for range rng.IntN(60) {
			from := rng.IntN(windowBytes)
			for i := from; i < min(windowBytes, from+rng.IntN(300)); i++ {
				used[i/64] |= 1 << (i % 64)
			}
		}
		switch round {
		case 0:
			clear(used)
		case 1:
			for i := range used {
				used[i] = ^uint64(0)
			}
		case 2:
			clear(used)
			used[0], used[len(used)-1] = 1, 1<<63
		}
		packed := packWindow(window, used)
		got := bytes.Repeat([]byte{9}, windowBytes)
		if err := unpackWindow(packed, got); err != nil {
			t.Fatal(err)
		}
		for i := range window {
			if used[i/64]>>(i%64)&1 == 1 && got[i] != window[i] {
				t.Fatalf("round %d: byte %d is lost", round, i)
			}
		}
		if len(packed) > 0 { // with any bytes, no panic and no write outside
			packed = packed[:rng.IntN(len(packed))]
			for range 3 {
				if len(packed) > 0 {
					packed[rng.IntN(len(packed))] ^= byte(1 << rng.IntN(8))
				}
			}
			_ = unpackWindow(packed, got) // an error or not
		}
	}
}

// FuzzWindow: unpackWindow never writes outside of the window.
func FuzzWindow(f *testing.F) {
	f.Add([]byte{1, 2, 3, 4})
	f.Add([]byte{0xff, 0xff, 0xff, 0xff, 0x0f, 1, 1})
	f.Fuzz(func(t *testing.T, packed []byte) {
		room := bytes.Repeat([]byte{0x5a}, 1200)
		_ = unpackWindow(packed, room[100:1100:1100]) // an error or not
		before, behind := bytes.Trim(room[:100], "\x5a"), bytes.Trim(room[1100:], "\x5a")
		if len(before) > 0 || len(behind) > 0 {
			t.Errorf("unpackWindow wrote %x before and %x behind the window, want no byte", before, behind)
		}
	})
}
