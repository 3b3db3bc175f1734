package order

import "math/rand/v2"

// Kind is how the samples of an epoch are put into sequence. Its text is part of a saved state.
type Kind string

// The kinds.
const (
	Archive  Kind = "archive"     // as the samples lie in the archive
	Permuted Kind = "permutation" // shuffled evenly; needs random access
	Buffered Kind = "buffer"      // through a shuffle buffer, as the samples come out of a stream
	Drawn    Kind = "draws"       // weighted, with replacement; needs random access
)

// Permutation returns the numbers 0 to n-1 in the order that an epoch takes them in.
func Permutation(n int, seed uint64, epoch int) []int32 {
	order := make([]int32, n)
	for i := range order {
		order[i] = int32(i)
	}
	var g rand.PCG
	Seed(&g, seed, OfEpoch, epoch, 0)
	rand.New(&g).Shuffle(n, func(i, j int) { order[i], order[j] = order[j], order[i] })
	return order
}

// Sequence says which sample stands at each position of an epoch, for archives with random access.
// One goroutine uses it.
type Sequence struct {
	Kind     Kind
	Seed     uint64
	Epoch    int
	Rounds   int                     // how often the epoch goes over the samples, at least 1
	PerRound int                     // positions of a round
	Weights  *Weights                // of Drawn
	Shuffled func(epoch int) []int32 // of Permuted and Buffered: the order of one round

	round int // the round that order belongs to, where order is not nil
	order []int32
}

// At returns the sample at a position, and how its random choices are seeded: with an epoch, and
// with a number (see SeedRepeat) that separates several draws of the same sample. Round j of epoch
// e has the choices of epoch e*Rounds + j.
func (s *Sequence) At(position int) (index, epoch int, repeat uint64) {
	round, i := position/s.PerRound, position%s.PerRound
	epoch = s.Epoch*s.Rounds + round
	switch s.Kind {
	case Drawn:
		return s.Weights.Draw(s.Seed, epoch, i), epoch, uint64(i) + 1
	case Archive:
		return i, epoch, 0
	}
	if s.order == nil || s.round != round {
		s.order, s.round = s.Shuffled(epoch), round
	}
	return int(s.order[i]), epoch, 0
}
