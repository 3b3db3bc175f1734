// Package order determines the order of the samples in an epoch. It knows only the number, the
// sizes and the weights of the samples. It reads no archives and holds no images.
//
// An epoch has positions 0, 1, 2, ... A [Sequence] returns the sample at each position: in the
// archive's order, by a permutation, through a [Shuffler], or by [Weights]. A [Deal] deals the
// positions to the ranks of a training run, as cards are dealt to players. Turn t of a rank is the
// t-th position that it takes. [Positions] is the set of positions that are already taken, so that
// a training run can resume with another number of ranks.
//
// Every random choice is drawn from a PCG generator. [Seed] seeds it from (seed, purpose, epoch,
// index) with a chain of splitmix64 steps. No two samples share a generator, so batches do not
// depend on the number of workers or the order of their work, and an epoch can start anywhere.
package order
