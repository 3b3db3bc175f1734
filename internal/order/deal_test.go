package order

import (
	"math/rand/v2"
	"testing"
)

// TestDealTakesEachPositionOnce: every position of an epoch is dealt once, also if other ranks take
// the rest, and Turn is the inverse of At.
func TestDealTakesEachPositionOnce(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		total := rng.IntN(60)
		taken := map[int]bool{}
		done := Positions{}
		for deals := 0; ; deals++ {
			s := Share{Batch: 1 + rng.IntN(4), World: 1 + rng.IntN(5)}
			var turns []int
			var d Deal
			for s.Rank = range s.World {
				d = NewDeal(s, total, done)
				if d.Left != total-len(taken) {
					t.Fatalf("%d are left, %d of %d were taken, want %v",
						d.Left, len(taken), total, total-len(taken))
				}
				n := rng.IntN(d.Turns + 2)
				if deals == 3 {
					n = d.Turns
				}
				turns = append(turns, n)
				for turn := range n {
					if d.Left == 0 {
						break
					}
					p, before := d.At(turn)
					if back, mine := d.Turn(p, before); !mine || back != turn {
						t.Fatalf("position %d, dealt %d times before, is turn %d, mine %v; it was dealt "+
							"in turn %d, want mine = true, back = %v", p, before, back, mine, turn, turn)
					}
					if p < 0 || p >= total || before == 0 && taken[p] {
						t.Fatalf("position %d of %d is dealt twice", p, total)
					}
				}
			}
			for s.Rank = range s.World {
				d = NewDeal(s, total, done)
				for turn := range turns[s.Rank] {
					if d.Left > 0 {
						if p, before := d.At(turn); before == 0 {
							taken[p] = true
						}
					}
				}
			}
			var err error
			if done, err = d.Take(turns); err != nil {
				t.Fatal(err)
			}
			if done.Len() != len(taken) {
				t.Fatalf("%+v, but %d were taken", done, len(taken))
			}
			for p := range total {
				if _, in := done.Rank(p); in != taken[p] {
					t.Fatalf("%+v, but position %d was taken: %v", done, p, taken[p])
				}
			}
			if deals == 3 {
				if len(taken) != total {
					t.Fatalf("%d of %d positions were never dealt", total-len(taken), total)
				}
				break
			}
		}
	}
}
