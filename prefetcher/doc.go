// Package prefetcher copies batches to the GPU while the GPU computes.
//
// A [Prefetcher] connects a [Source], which fills host memory with samples (imageloader is one), to
// the loop that consumes batches:
//
//	feed, err := prefetcher.New(loader, prefetcher.Options{})
//	...
//	for batch, err := range feed.Epoch(ctx, epoch) {
//		if err != nil {
//			return err
//		}
//		loss := net.Forward(batch.Images).CrossEntropy(batch.Labels)
//		...
//	} // everything computed from the batch is freed, and its slot goes back
//
// [Samples] makes a Source of a function that writes one sample: rows of a table, records of a
// database, images with boxes. It has the loader's shuffling, workers, ranks, resume and treatment
// of bad samples.
//
// # The ring
//
//	source --fills--> pinned slot k --copy + finish on P--> device slot j --ready(j)--> consumer
//	   ^                    |                                    ^                         |
//	   +----- copied(k) ----+                                    +------ released(j) ------+
//
// [New] allocates Options.HostSlots pinned slots and Options.Depth device slots once, at addresses
// that never change. One goroutine, locked to its OS thread from New to Close, owns and drives one
// stream, P. For each batch it queues two steps on P: the copies of the source's raw bytes, and
// then the source's finish (cast, normalisation, layout) if the source is a [Describer] or a
// [Finisher]. Neither step allocates, pins or waits.
//
// # The four edges
//
// Copies, finish and the consumer's kernels run concurrently. Without ordering, memory could be
// overwritten while it is still being read, or read before it is written, in four ways. An event
// guards against each:
//
//   - The source refills pinned slot k while the copy still reads it. The source (the host)
//     therefore waits for copied(k), which is recorded on P after the copy.
//   - A copy overwrites device slot j while kernels still read it. P therefore waits for
//     released(j).
//   - The consumer reads slot j before it is copied and finished. The consumer's stream therefore
//     waits for ready(j), which is recorded on P after the finish.
//   - Several streams may read the slot, and a release that is recorded on one of them does not
//     cover the others. released(j) is therefore recorded on every stream that used the batch.
//
// Only the first edge makes a host thread wait: the source's, which has nothing else to do. Because
// of the fourth edge, the prefetcher asks for the consumer's current stream when it hands over a
// batch, and again when the turn ends. An Epoch inside cuda.WithStream therefore runs on that
// stream. Any other use of a batch (on a second stream, in another goroutine) must be announced
// with [Batch.Use].
//
// The package's tests run the ring's code against a model of CUDA's streams, under tens of
// thousands of schedules. They fail if any read or overwrite of a slot is not ordered by an event.
// They also leave out each of the four edges in turn and check that the model finds and names the
// missing edge (internal/ring).
//
// # A batch's life
//
// The consumer may use a batch until its turn of the loop ends. The batch's tensors, and everything
// computed from them, belong to a torch.Scope that ends with the turn. One call frees them all,
// before the release is recorded. Parameters, and results of parameters alone, are not affected.
// Using a tensor after its turn returns cuda.ErrClosed.
//
// [Batch.Retain] keeps the batch, its scope and its slot until [Batch.Release]. To keep only a
// tensor that was computed from the batch, call its method Keep. Keep fails for batch.Images itself
// and for a view of it, because later batches overwrite the slot: use Clone instead.
//
// # Decoding
//
// With [Options.Decode] a GPU decodes the images of a source that can plan them (imageloader). For
// each image the source decides whether the GPU can decode it, and writes a plan for the GPU if so
// (imageloader/internal/devplan). The prefetcher leaves some of these images to the source's idle
// workers (mixture.go). Two decoders, on separate streams, take turns. Their images go through the
// same finish on P. The prefetcher hands a batch out as soon as the GPU has reported the images
// that it could not decode, and the host has decoded these images. The batches equal the batches
// from the source's workers, to the bit.
//
// # Without a GPU
//
// On a machine without a GPU, or with Device: cuda.CPU, the same types run without copies: the
// source fills plain memory, and Finish writes the output slots on the CPU (in the same goroutine).
// If no field needs a finish, the consumer gets the source's slot itself. Lifetimes and errors are
// the same.
//
// # Waiting times
//
// [Stats] reports them. If a loop queues work faster than the GPU executes it, the loop waits in
// Epoch, which costs nothing. The time that matters is the GPU's wait for a batch.
// Stats.ConsumerWait and [Stats.WaitShare] measure it on the GPU's own clock.
//
// # CUDA graphs
//
// Device slots keep their addresses, so a graph captured on a batch's tensors can replay on later
// batches with the same [Batch.Slot]. During a capture the prefetcher continues to query events, so
// capture in thread-local mode.
package prefetcher
