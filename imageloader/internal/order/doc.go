// Package order decides which sample an epoch takes when. It knows numbers only: how many samples
// there are, how large they are, how likely each is. It reads nothing and keeps no images.
//
// The sequence of an epoch has positions 0, 1, 2, ...; a [Sequence] says which sample stands at
// each position: in the archive's order, by a permutation, through a [Shuffler], or by [Weights]. A
// [Deal] hands the positions out to the ranks of a training run in turn; a rank's turn t is the
// t-th position that it takes. [Positions] is the set of those that are already taken, which makes
// resuming with another number of ranks possible.
//
// Every random choice is drawn from a PCG generator that [Seed] seeds from (seed, purpose, epoch,
// index) by chaining splitmix64's steps. No two samples share a generator, so neither the number of
// workers nor the order of their work can change a batch, and an epoch can begin anywhere.
package order
