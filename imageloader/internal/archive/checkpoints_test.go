package archive

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// TestLastCheckpointBeforeEachMemberIsKept: the checkpointer keeps the last checkpoint before each
// member, in whatever order checkpoints and members come.
func TestLastCheckpointBeforeEachMemberIsKept(t *testing.T) {
	rng := rand.New(rand.NewPCG(2, 2))
	for range 300 {
		var stops, starts []int64
		at := int64(0)
		for range 30 {
			stops = append(stops, at)
			at += 1 + rng.Int64N(100)
		}
		for range 25 {
			starts = append(starts, rng.Int64N(at+50))
		}
		slices.Sort(starts)
		var i, j int
		var kept []Checkpoint
		// the tar has been read up to here
		k := newCheckpointer(func(c Checkpoint) { kept = append(kept, c) }, func() int64 {
			if j < len(starts) {
				return starts[j] - int64(rng.IntN(20))
			}
			return at
		})
		k.note(Checkpoint{Output: stops[0]})
		for i = 1; i < len(stops) || j < len(starts); {
			// A checkpoint comes before any member behind it, and may come long before.
			if i < len(stops) && (j == len(starts) || stops[i] <= starts[j]-60 || rng.IntN(2) == 0) {
				k.note(Checkpoint{Output: stops[i]})
				i++
			} else {
				k.member(starts[j])
				j++
			}
		}
		k.finish()
		want := map[int64]bool{0: true}
		for _, s := range starts {
			best := int64(0)
			for _, c := range stops {
				if c <= s {
					best = c
				}
			}
			want[best] = true
		}
		var got []int64
		for _, c := range kept {
			if !want[c.Output] {
				t.Fatalf("stops %v, starts %v: %d is kept", stops, starts, c.Output)
			}
			delete(want, c.Output)
			got = append(got, c.Output)
		}
		if len(want) > 0 || !slices.IsSorted(got) {
			t.Fatalf("stops %v, starts %v: kept %v", stops, starts, got)
		}
	}
}

// TestFewCheckpointsWaitInALargeMember: while a member of any size is read, few checkpoints wait to
// be kept or dropped.
func TestFewCheckpointsWaitInALargeMember(t *testing.T) {
	read := int64(0)
	kept := 0
	k := newCheckpointer(func(Checkpoint) { kept++ }, func() int64 { return read })
	for i := range int64(10_000) {
		k.note(Checkpoint{Output: i * inflateSpacing})
		if i == 3 {
			k.member(2*inflateSpacing + 5)
		}
		read = max(0, i*inflateSpacing-inflateRoom)
		if most := inflateRoom/inflateSpacing + 3; len(k.pending) > most {
			t.Fatalf("%d checkpoints wait, want at most %d", len(k.pending), most)
		}
	}
	k.member(9_999*inflateSpacing - 1)
	k.finish()
	if kept != 3 {
		t.Errorf("%d checkpoints are kept, want the beginning's and two members'", kept)
	}
}
