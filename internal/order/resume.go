package order

import (
	"errors"
	"fmt"
	"slices"
)

// Start is the position at which an epoch starts. If all fields except Epoch are zero, it is the
// start of the epoch.
type Start struct {
	Epoch   int
	Done    Positions // positions taken before the deal
	Turn    int       // turn of the deal
	Batches int       // batches of the deal that are already delivered
	Before  int       // batches of the epoch that were delivered before the deal
}

// Remaining returns the number of samples that a rank still has to deliver, if that number is
// fixed.
func (d *Deal) Remaining(s *Start) int { return max(0, d.Turns-s.Batches*d.Batch) }

// End returns the turn at which reading for a rank stops. If skips is set, bad samples are left
// out, and the pass ends earlier when it has enough samples.
func (d *Deal) End(s *Start, skips bool) int {
	switch {
	case d.Fixed && d.Remaining(s) == 0:
		return s.Turn
	case d.Fixed && skips:
		return d.MaxTurns()
	}
	return d.Turns
}

// Mark is a rank's position in an epoch, right after a batch. Saved states contain marks.
type Mark struct {
	Epoch   int
	Kind    Kind
	Share   Share     // share of the run that made the mark
	Done    Positions // positions taken before the deal
	Before  int       // batches of the epoch that were delivered before the deal
	Batches int       // batches of the deal that are delivered
	Turns   int       // turns of the deal that the rank has taken
}

const maxCount = 1 << 48 // maximum of every count in a mark: the sum of two does not overflow

// Check returns an error for values that no mark can have.
func (m *Mark) Check() error {
	for _, c := range []struct {
		name  string
		value int
	}{{"epoch", m.Epoch}, {"next", m.Done.Next}, {"before", m.Before}, {"batches", m.Batches}, {"turns", m.Turns}} {
		if err := CheckCount(c.name, c.value); err != nil {
			return err
		}
	}
	if s := m.Share; s.World < 1 || s.World > 1<<24 || s.Rank < 0 || s.Rank >= s.World {
		return fmt.Errorf("rank %d of %d", s.Rank, s.World)
	}
	if !slices.Contains([]Kind{Archive, Permuted, Buffered, Drawn}, m.Kind) {
		return fmt.Errorf("order %q", m.Kind)
	}
	if len(m.Done.Ahead) > MaxAhead {
		return fmt.Errorf("%d positions in %q", len(m.Done.Ahead), "ahead")
	}
	last := m.Done.Next
	for _, p := range m.Done.Ahead {
		if p <= last || p > maxCount {
			return fmt.Errorf("%q is not ascending from %d", "ahead", m.Done.Next)
		}
		last = p
	}
	return nil
}

// CheckCount returns an error if a number in a saved state is negative or too large.
func CheckCount(name string, value int) error {
	if value < 0 || value > maxCount {
		return fmt.Errorf("%q is %d", name, value)
	}
	return nil
}

// all returns the number of batches of the epoch before the mark.
func (m *Mark) all() int { return m.Before + m.Batches }

// deal returns the deal of a rank of the mark's run.
func (m *Mark) deal(rank, total int) Deal {
	share := m.Share
	share.Rank = rank
	return NewDeal(share, total, m.Done)
}

// fits returns an error if the mark was not made after the same batch as first, or if an epoch of
// total positions is too short for the mark.
func (m *Mark) fits(first *Mark, total int) error {
	if m.Epoch != first.Epoch || m.Share.World != first.Share.World || m.Before != first.Before ||
		m.Batches != first.Batches || m.Kind != first.Kind || m.Done.Next != first.Done.Next ||
		!slices.Equal(m.Done.Ahead, first.Done.Ahead) {
		return fmt.Errorf("the states were not made at the same time: "+
			"epoch %d after %d batches, rank %d of %d, and epoch %d after %d batches, rank %d of %d",
			first.Epoch, first.all(), first.Share.Rank, first.Share.World, m.Epoch, m.all(), m.Share.Rank, m.Share.World)
	}
	d := m.deal(m.Share.Rank, total)
	n := len(m.Done.Ahead)
	if m.Done.Len() > total || n > 0 && m.Done.Ahead[n-1] >= total || m.Turns > d.MaxTurns() ||
		m.Batches > d.Batches() {
		return fmt.Errorf("it is damaged: epochs have %d samples, and it lies behind them", total)
	}
	return nil
}

// Resume returns the position at which a rank continues the epoch of the marks. total is the
// epoch's number of positions. The marks are from one or more ranks of one run. If they include
// this rank's mark and World is unchanged, the rank continues after its mark. Otherwise the rest of
// the epoch is dealt again. If skips is set, the ranks may have taken different numbers of turns,
// so dealing again needs the marks of all ranks.
func Resume(marks []Mark, share Share, total int, skips bool) (Start, error) {
	if len(marks) == 0 {
		return Start{}, errors.New("there is no state")
	}
	first := &marks[0]
	byRank := map[int]*Mark{}
	for i := range marks {
		m := &marks[i]
		if err := m.fits(first, total); err != nil {
			return Start{}, err
		}
		if other, twice := byRank[m.Share.Rank]; twice && other.Turns != m.Turns {
			return Start{}, fmt.Errorf("there are two different states of rank %d", m.Share.Rank)
		}
		byRank[m.Share.Rank] = m
	}
	if own, given := byRank[share.Rank]; given && first.Share.World == share.World {
		return Start{Epoch: own.Epoch, Done: own.Done, Turn: own.Turns, Batches: own.Batches, Before: own.Before}, nil
	}
	if len(byRank) < first.Share.World && skips {
		return Start{}, fmt.Errorf("there are the states of %d of %d ranks: "+
			"to go on as rank %d of %d under the policy skip it takes those of all ranks, after the same batch",
			len(byRank), first.Share.World, share.Rank, share.World)
	}
	// Unless skips is set, a rank without a mark has taken as many turns as the rank of the first
	// mark.
	turns := make([]int, first.Share.World)
	for rank := range turns {
		turns[rank] = first.Turns
		if m, given := byRank[rank]; given {
			turns[rank] = m.Turns
		}
	}
	d := first.deal(first.Share.Rank, total)
	done, err := d.Take(turns)
	if err != nil {
		return Start{}, err
	}
	return Start{Epoch: first.Epoch, Done: done, Before: first.all()}, nil
}
