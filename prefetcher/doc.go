// Package prefetcher copies batches to the GPU while the GPU computes.
//
// A [Prefetcher] stands between a [Source], which fills host memory with samples (imageloader is
// one), and the loop that consumes batches:
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
// # The ring
//
//	the source ---fills---> pinned slot k ---copy + finish on stream P---> device slot j ---ready(j)---> the consumer's stream
//	     ^                       |                                              ^                                |
//	     +------ copied(k) ------+                                              +---------- released(j) ---------+
//
// Options.HostSlots pinned slots and Options.Depth device slots are allocated by [New], once, at
// addresses that never change. One goroutine, locked to its OS thread from New to Close, drives one
// stream, P, taken from the pool once. For each batch it queues on P: the copies, as the source's
// raw bytes; then the source's finish (cast, normalisation, layout), if it is a [Describer] or a
// [Finisher]. Nothing is allocated, pinned or waited for on the way.
//
// # The four edges
//
// Copies, finish and the consumer's kernels run beside each other, so there are four ways to
// overwrite memory that somebody still reads or to read memory that nobody has written yet. An
// event guards each:
//
//	hazard                                                           edge
//	the source refills pinned slot k while the copy still reads it   the source (the host) waits for copied(k), recorded on P after the copy
//	a copy overwrites device slot j while kernels still read it      P waits for released(j)
//	the consumer reads slot j before it is copied and finished       the consumer's stream waits for ready(j), recorded on P after the finish
//	released(j) says nothing about the work that read the slot       it is recorded on every stream that used the batch
//
// Only the first makes a host thread wait, and that is the source's, which has nothing better to
// do. The last is why the prefetcher asks for the consumer's current stream: when a batch is handed
// over, and again when its turn ends. So an Epoch inside cuda.WithStream runs on that stream. What
// else uses a batch (a second stream, another goroutine) is told with [Batch.Use].
//
// The package's tests run the ring's own code against a model of CUDA's streams, under tens of
// thousands of schedules, and fail if any read or overwrite is not ordered by an event; leaving out
// any of the four edges is found and named (internal/ring).
//
// # A batch's life
//
// A batch is the consumer's until its turn of the loop ends. Its tensors, and everything that is
// computed from them, belong to a torch.Scope that ends with the turn: they are freed in one call,
// before the release is recorded. Parameters, and what is made from parameters alone, are not
// touched. A tensor used after its turn is cuda.ErrClosed. [Batch.Retain] keeps the batch, its
// scope and its slot until [Batch.Release]; Keep on a tensor that was computed from the batch keeps
// that tensor. Keep on batch.Images itself keeps only a reference to the slot, which the next
// batches overwrite: Clone it instead.
//
// # Without a GPU
//
// On a machine without a GPU, or with Device: cuda.CPU, the same types run with the copies left
// out: the source fills plain memory, Finish writes the output slots on the CPU (in the same
// goroutine), and where no field needs a finish the source's slot itself is handed over. Lifetimes
// and errors are the same.
//
// # Who waits for whom
//
// [Stats] tells. A loop that queues work faster than the GPU does it waits in Epoch, which is no
// loss; what counts is the time that the GPU waits for a batch, and that is what Stats.ConsumerWait
// and [Stats.WaitShare] measure, on the GPU's own clock.
//
// A goroutine changes its OS thread now and then, and LibTorch keeps cuBLAS's workspace (32 MiB on
// a Hopper) for every thread and stream that multiplied matrices. A training loop inside
// cuda.WithStream, or after runtime.LockOSThread, stays on one thread and has one.
//
// # CUDA graphs
//
// Device slots stay where they are: a graph captured on a batch's tensors can replay on later
// batches in the same [Batch.Slot]. While a graph is captured, the prefetcher goes on querying
// events: capture in thread-local mode.
package prefetcher
