// Package order decides the order of the samples of an epoch. It knows only the number, the sizes
// and the weights of samples. It reads no archive and holds no images.
//
// The sequence of an epoch has positions 0, 1, 2, ... A [Sequence] gives the sample at each
// position: in the archive's order, by a permutation, through a [Shuffler], or by [Weights]. A
// [Deal] deals the positions to the ranks of a training run in turn. A rank's turn t is the t-th
// position that it takes. [Positions] is the set of the positions that are already taken, so that
// another number of ranks can resume.
//
// Every random choice is drawn from a PCG generator that [Seed] seeds from (seed, purpose, epoch,
// index) by chaining splitmix64's steps. No two samples share a generator, so neither the number of
// workers nor the order of their work can change a batch, and an epoch can start anywhere.
package order
