package order

import "math/rand/v2"

// Kind is a way to order the samples of an epoch. Its text is part of a saved state.
type Kind string

// The kinds.
const (
	Archive  Kind = "archive"     // in the archive's order
	Permuted Kind = "permutation" // shuffled uniformly; needs random access
	Buffered Kind = "buffer"      // through a shuffle buffer, for a stream
	Drawn    Kind = "draws"       // weighted, with replacement; needs random access
)

// Permutation returns the numbers 0 to n-1 in the order for an epoch.
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

// Sequence returns the sample at each position of an epoch, for archives with random access. It
// belongs to one goroutine.
type Sequence struct {
	Kind     Kind
	Seed     uint64
	Epoch    int
	Rounds   int                     // number of rounds over the samples in an epoch, at least 1
	PerRound int                     // number of positions in a round
	Weights  *Weights                // for Drawn
	Shuffled func(epoch int) []int32 // for Permuted and Buffered: returns the order of one round

	round int // the round for which order holds, if order is not nil
	order []int32
}

// At returns the sample at a position. It also returns two arguments of SeedRepeat for the sample's
// random choices: an epoch, and a number that distinguishes repeated draws of one sample. Round j
// of epoch e has the same choices as epoch e*Rounds + j.
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
