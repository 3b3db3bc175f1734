package order

import (
	"fmt"
	"sort"
)

// Share says which part of an epoch a process gets.
type Share struct {
	Rank, World int  // this process has rank Rank, from 0, of World processes
	Batch       int  // samples per batch
	DropLast    bool // skip the last batch if it is short
	PadLast     bool // fill the last batch with the epoch's first samples if it is short
}

// Deal assigns the positions of an epoch to ranks, as cards are dealt to players. It gives the
// numbers 0, 1, 2, ... to the positions that are not in Done. In turn t, a rank takes the position
// with the number Rank + t*World. After the last position, the numbers start over at the first
// position, as padding.
//
// All ranks take the same number of turns. A rank that skips a bad sample takes one more turn, so
// that it gets as many batches as the others. A Deal is immutable.
type Deal struct {
	Share
	Done  Positions // positions taken before the deal
	Left  int       // number of positions that are not in Done, or Unknown
	Turns int       // number of turns that this rank takes if there are no bad samples, or Unknown
	Fixed bool      // the rank delivers Turns samples, even if some are bad
}

// NewDeal returns a Deal of the rest of an epoch. total is the epoch's number of positions, or
// Unknown.
func NewDeal(s Share, total int, done Positions) Deal {
	d := Deal{Share: s, Done: done, Left: Unknown, Turns: Unknown, Fixed: s.World > 1 || s.PadLast}
	if total == Unknown {
		return d
	}
	d.Left = max(0, total-done.Len())
	d.Turns = d.Left / s.World
	if short := d.Turns % s.Batch; d.Fixed && s.DropLast {
		d.Turns -= short
		return d
	}
	if d.Left%s.World != 0 {
		d.Turns++
	}
	if short := d.Turns % s.Batch; s.PadLast && short != 0 {
		d.Turns += s.Batch - short
	}
	return d
}

// Batches returns the number of batches that Turns samples make.
func (d *Deal) Batches() int {
	n := d.Turns / d.Batch
	if d.Turns%d.Batch != 0 && !d.DropLast {
		n++
	}
	return n
}

// MaxTurns returns the maximum number of turns of a rank, including turns with bad samples. A rank
// that would need more turns has met as many bad samples as there are samples.
func (d *Deal) MaxTurns() int {
	if d.Fixed && d.Left < Unknown {
		return d.Turns + d.Left
	}
	return d.Turns
}

// At returns the position of a turn, and the number of times that the position was dealt before.
func (d *Deal) At(turn int) (position, before int) {
	number := d.Rank + turn*d.World
	return d.Done.Without(number % d.Left), number / d.Left
}

// Turn is the inverse of At, for a walk over the positions in order. It returns the turn in which
// the rank takes a position that was dealt `before` times before. mine is false if the position
// belongs to another rank.
func (d *Deal) Turn(position, before int) (turn int, mine bool) {
	number, done := d.Done.Rank(position)
	if done {
		return 0, false
	}
	if d.Left < Unknown {
		number += before * d.Left
	}
	if number < d.Rank || (number-d.Rank)%d.World != 0 {
		return 0, false
	}
	return (number - d.Rank) / d.World, true
}

// MaxAhead limits Positions.Ahead. Ranks that are further apart can't be from the same training
// run.
const MaxAhead = 1 << 20

// Take returns Done plus the positions that all ranks have taken since the deal. turns[r] is the
// number of turns of rank r.
func (d *Deal) Take(turns []int) (Positions, error) {
	first := d.Left // the smallest number that no rank has taken
	for rank, t := range turns {
		first = min(first, rank+t*d.World)
	}
	out := Positions{Next: d.Done.Next + d.Left + len(d.Done.Ahead)}
	if first < d.Left {
		out.Next = d.Done.Without(first)
	}
	for _, p := range d.Done.Ahead {
		if p > out.Next {
			out.Ahead = append(out.Ahead, p)
		}
	}
	for rank, t := range turns {
		from := 0
		if first > rank {
			from = (first - rank + d.World - 1) / d.World
		}
		for i := from; i < t && rank+i*d.World < d.Left; i++ {
			if len(out.Ahead) == MaxAhead {
				return out, fmt.Errorf("the ranks are more than %d samples apart", MaxAhead)
			}
			out.Ahead = append(out.Ahead, d.Done.Without(rank+i*d.World))
		}
	}
	sort.Ints(out.Ahead)
	return out, nil
}
