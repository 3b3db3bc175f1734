// Package epoch runs one epoch of a loader: it reads samples in the epoch's order, decodes them
// into rows of the memory that a consumer lends, and delivers the batches in order.
//
// A pass is one run over an epoch. [Run] starts its goroutines. Below, the name of each stage is
// followed by the number of its goroutines and its task. For an archive without random access the
// stages are
//
//	readStream (1: inflate, shuffle) --> place (1: a row for each sample) --> work (Workers: decode
//	into the row) --> assembly --> deliver (1, in order)
//
// From an archive with random access, a sample is read only when its row is known:
//
//	list (1: a row for each sample) --> fetch (minFetchers or more: read, inflate) --> work (Workers:
//	decode) --> assembly --> deliver (1, in order)
//
// If the consumer decodes from plans, fetch also plans images. It sends images that it cannot plan
// to work.
//
// Each stage has a file: stream.go and random.go read, place.go assigns rows, decode.go and plan.go
// fill them, package assembly makes batches, and deliver.go delivers them. plan.go decides which
// images a GPU decodes. The decoding stage ([Decoder]) does not need a pass, so it can also decode
// a single row again.
package epoch
