// Package epoch runs one epoch of a loader: it reads samples in the epoch's order, decodes them
// into rows of the memory that a consumer lends, and delivers the batches in order.
//
// [Run] starts the goroutines of a pass. For an archive that is read in its own order they are
//
//	readStream (1: inflate, shuffle) --> place (1: a row for each sample) --> work (Workers: decode
//	into the row) --> assembly --> deliver (1, in order)
//
// An archive with random access is not read before a row is known:
//
//	list (1: a row for each sample) --> fetch (minFetchers or more: read, inflate) --> work (Workers:
//	decode) --> assembly --> deliver (1, in order)
//
// If the consumer decodes from plans, fetch also plans the images that it can, and hands the others
// to work.
//
// The stages are files: stream.go and random.go read, place.go gives rows, decode.go and plan.go
// fill them, assemble.go makes batches, deliver.go hands them out. The stage that decodes
// ([Decoder]) needs no pass, so that a single row can be decoded again.
package epoch
