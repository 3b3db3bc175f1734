package devplan

import (
	"bytes"
	"testing"

	"github.com/torchstream/torchstream/internal/decodeplan"
)

// TestPlansAreMoved: exchanged rows keep their plans. Without room the plans are lost, and the host
// decodes the rows.
func TestPlansAreMoved(t *testing.T) {
	plan := func(b byte, n int) []byte { return bytes.Repeat([]byte{b}, n) }
	slots := func(capacity int) (a, b *Staging) {
		for _, s := range []**Staging{&a, &b} {
			st, err := NewStaging(&decodeplan.Plans{Memory: alignedBytes(capacity), Rows: make([]decodeplan.Row, 3)}, 3)
			if err != nil {
				t.Fatal(err)
			}
			*s = st
		}
		return a, b
	}
	set := func(s *Staging, row int, p []byte) {
		to, r, ok := s.reserve(decodeplan.Row{Bytes: len(p)})
		if !ok {
			t.Fatalf("reserve of %d bytes for row %d = false, want true", len(p), row)
		}
		copy(to, p)
		s.Rows[row] = Placed{Row: r, Redo: Redo{Size: int64(len(p))}}
	}
	a, b := slots(100)
	set(a, 0, plan('a', 20))
	set(b, 2, plan('b', 30))
	Exchange(a, 0, b, 2, true)
	if got := planIn(a, 0); !bytes.Equal(got, plan('b', 30)) || a.Rows[0].Redo.Size != 30 {
		t.Errorf("%q", got)
	}
	if got := planIn(b, 2); !bytes.Equal(got, plan('a', 20)) || b.Rows[2].Redo.Size != 20 {
		t.Errorf("%q", got)
	}
	Exchange(a, 0, a, 1, true)
	if got := planIn(a, 1); !bytes.Equal(got, plan('b', 30)) || a.Rows[0].Bytes != 0 {
		t.Errorf("%q", got)
	}
	Exchange(b, 0, a, 1, false) // 32 bytes after 64
	if !b.Rows[0].Lost && b.Rows[0].Bytes != 30 {
		t.Errorf("%+v", b.Rows[0])
	}
	a, b = slots(48)
	set(a, 0, plan('a', 40))
	set(b, 0, plan('b', 40))
	Exchange(a, 0, b, 0, true)
	for _, s := range []*Staging{a, b} {
		if r := s.Rows[0]; !r.Lost || r.Bytes != 0 || r.Redo.Size != 40 {
			t.Errorf("%+v, want r.Lost = true, r.Bytes = 0, r.Redo.Size = 40", r)
		}
	}
}

// TestMembersAreMoved: a member's row moves together with its compressed bytes and its room, and
// shares them with no other row.
func TestMembersAreMoved(t *testing.T) {
	row := decodeplan.Row{Bytes: 16, Member: decodeplan.Member{Input: 16, InputBytes: 5, Window: 21,
		WindowBytes: 3, Skip: 7, Bytes: 100}}
	room := row.Member.Room()
	slots := func(rooms int) (a, b *Staging) {
		for _, s := range []**Staging{&a, &b} {
			st, err := NewStaging(&decodeplan.Plans{Memory: alignedBytes(96),
				Rows: make([]decodeplan.Row, 3), Rooms: rooms}, 3)
			if err != nil {
				t.Fatal(err)
			}
			*s = st
		}
		to, at, ok := a.reserve(row)
		if !ok {
			t.Fatal("reserve of a row with an inflated member = false, want true")
		}
		copy(to, "plan of 16 bytes inputwin")
		a.Rows[0] = Placed{Row: at, Redo: Redo{Size: 9}}
		return a, b
	}
	a, b := slots(2 * room)
	Exchange(b, 1, a, 0, false)
	moved := b.Rows[1]
	if got := b.plans.Memory[moved.At:][:moved.Span()]; string(got) != "plan of 16 bytes inputwi" ||
		moved.Member != row.Member || moved.Lost {
		t.Errorf("%q, %+v", got, moved)
	}
	b.Take(0, b, 1) // a substitute
	if second := b.Rows[0]; second.At == moved.At || second.Bytes != 16 || second.Lost ||
		b.rooms.Load() != uint64(2*room) {
		t.Errorf("%+v beside %+v", second, moved)
	}
	b.Take(2, b, 1)
	if third := b.Rows[2]; !third.Lost || third.Bytes != 0 || third.Redo.Size != 9 {
		t.Errorf("without a room: %+v, want third.Lost = true, third.Bytes = 0, third.Redo.Size = 9", third)
	}
	Exchange(b, 0, b, 1, true)
	if b.Rows[0] != moved || b.rooms.Load() != uint64(2*room) {
		t.Errorf("an exchange within the slot: %+v", b.Rows)
	}
}

// planIn returns the memory of a row's plan.
func planIn(s *Staging, row int) []byte {
	r := s.Rows[row].Row
	return s.plans.Memory[r.At : r.At+r.Bytes]
}
