package order

import "math/rand/v2"

// Purpose separates different random choices for the same sample.
type Purpose uint64

// The purposes. Their values determine every epoch's batches, so they must never change.
const (
	OfEpoch   Purpose = 1 // the order of the samples in an epoch; the index is 0
	OfSample  Purpose = 2 // the crop, the flip and the operations of one sample; the index is the sample's
	OfDraw    Purpose = 3 // the sample of a weighted draw; the index is the draw's position
	OfMixture Purpose = 4 // the mixing of a batch; the index is the first sample's
)

// Seed seeds g for one purpose of the sample with the given index in an epoch.
func Seed(g *rand.PCG, seed uint64, p Purpose, epoch, index int) {
	s := chain(seed, p, epoch, index)
	g.Seed(s, mix64(s))
}

// SeedRepeat is Seed for a sample that occurs several times in an epoch. Each value of repeat gives
// another generator. Repeat 0 gives the same generator as Seed.
func SeedRepeat(g *rand.PCG, seed uint64, p Purpose, epoch, index int, repeat uint64) {
	s := chain(seed, p, epoch, index)
	if repeat != 0 {
		s = mix64(s ^ repeat)
	}
	g.Seed(s, mix64(s))
}

func chain(seed uint64, p Purpose, epoch, index int) uint64 {
	return mix64(mix64(mix64(mix64(seed)^uint64(p))^uint64(epoch)) ^ uint64(index))
}

// mix64 is one step of the generator splitmix64.
func mix64(z uint64) uint64 {
	z += 0x9e3779b97f4a7c15
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}
