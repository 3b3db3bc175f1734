package train

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/distributed"
	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/prefetcher"
)

// job connects a run to the job of Config.World. Its methods also work without World: such a run is
// a job of one process.
type job struct {
	world    *distributed.Group        // nil without World
	parallel *distributed.DataParallel // nil without World
	stop     *distributed.Flag         // raised when the context of a rank ends
	quiet    func() bool               // ends the watch of the context
}

// errJobStops means that the context of some rank has ended. All ranks return it after the same
// step.
var errJobStops = fmt.Errorf("train: the job stops: %w", context.Canceled)

// join makes the run a rank of Config.World. It returns an error if the ranks have different data
// sets, and gives all models the parameters of rank 0.
func (r *runner) join(ctx context.Context) (err error) {
	w := r.World
	if w == nil {
		return nil
	}
	if _, ok := r.Model.(*distributed.FullyShardedDataParallel); ok {
		return fmt.Errorf("train.Run: Model is a FullyShardedDataParallel: Run averages the gradients of whole "+
			"models; train it with a Stepper: %w", cuda.ErrInvalidArgument)
	}
	if r.Feed.Device() != w.Device() {
		return fmt.Errorf("train.Run: Feed is on %v, and this rank's device is %v: %w", r.Feed.Device(), w.Device(),
			cuda.ErrInvalidArgument)
	}
	if r.Loader != nil {
		if err := CheckRanks(w, r.Loader); err != nil {
			return err
		}
	}
	r.job.world = w
	if r.job.parallel, err = distributed.NewDataParallel(w, r.Model, distributed.DataParallelOptions{}); err != nil {
		return err
	}
	r.job.stop = distributed.NewFlag(w)
	r.job.quiet = context.AfterFunc(ctx, r.job.stop.Raise)
	if !r.job.leads() {
		r.Progress = nil
	}
	return nil
}

// close disconnects the run from the job. The group stays open.
func (j *job) close() error {
	var errs []error
	if j.stop != nil {
		j.quiet()
		errs = append(errs, j.stop.Close())
	}
	if j.parallel != nil {
		errs = append(errs, j.parallel.Close())
	}
	return errors.Join(errs...)
}

// leads reports whether this process writes the files.
func (j *job) leads() bool { return j.world == nil || j.world.Rank() == 0 }

// size returns the number of ranks.
func (j *job) size() int {
	if j.world == nil {
		return 1
	}
	return j.world.Size()
}

// backward returns the Stepper's option Backward.
func (j *job) backward() func(func() error) error {
	if j.parallel == nil {
		return nil
	}
	return j.parallel.Around
}

// seed returns the seed of this rank's random numbers. Ranks draw different numbers.
func (j *job) seed(seed uint64) uint64 {
	if j.leads() {
		return seed
	}
	return mix(seed, ^uint64(j.world.Rank()))
}

// feedContext returns the context for reading a feed. In a job of several ranks, a rank must not
// stop in the middle of a step that other ranks make. So this context does not end when ctx ends.
func (j *job) feedContext(ctx context.Context) context.Context {
	if j.world == nil {
		return ctx
	}
	return context.WithoutCancel(ctx)
}

// stopped returns an error if the run must end after the current batch. Every rank calls it after
// each batch, and all ranks return the same error.
func (j *job) stopped(ctx context.Context) error {
	if j.world == nil {
		return ctx.Err()
	}
	up, err := j.stop.Sync()
	if err == nil && up {
		err = errJobStops
	}
	return err
}

// lead calls f on rank 0. All ranks return rank 0's error.
func (j *job) lead(f func() error) error {
	if j.world == nil {
		return f()
	}
	var own error
	said := ""
	if j.leads() {
		if own = f(); own != nil {
			said = own.Error()
		}
	}
	said, err := distributed.BroadcastObject(j.world, said, 0)
	switch {
	case own != nil:
		return own
	case err != nil:
		return err
	case said != "":
		return fmt.Errorf("rank 0: %s", said)
	}
	return nil
}

// tally holds the counts of a meter.
type tally struct {
	Sums      sums     `json:"sums"`
	Confusion []int64  `json:"confusion,omitempty"` // [classes*classes]; nil in training
	Scores    *ranking `json:"scores,omitempty"`    // nil without MultiLabel
	Error     string   `json:"error,omitempty"`
}

// add adds up the totals of all ranks. Every rank calls it. A rank without a total passes the
// reason as failed. All ranks return the sum, or an error.
func (j *job) add(own tally, failed error) (tally, error) {
	if j.world == nil {
		return own, failed
	}
	if failed != nil {
		own = tally{Error: failed.Error()}
	}
	all, err := distributed.AllGatherObject(j.world, own)
	if failed != nil || err != nil {
		return own, cmp.Or(failed, err)
	}
	var sum tally
	for rank, t := range all {
		if t.Error != "" {
			return own, fmt.Errorf("rank %d: %s", rank, t.Error)
		}
		sum.Sums.Samples += t.Sums.Samples
		sum.Sums.Loss += t.Sums.Loss
		sum.Sums.Top1 += t.Sums.Top1
		sum.Sums.Top5 += t.Sums.Top5
		sum.Sums.Classes = max(sum.Sums.Classes, t.Sums.Classes)
		sum.Scores = sum.Scores.join(t.Scores)
		if sum.Confusion == nil { // a rank whose samples were all padding has none
			sum.Confusion = slices.Clone(t.Confusion)
			continue
		}
		for i, n := range t.Confusion {
			sum.Confusion[i] += n
		}
	}
	return sum, nil
}

// shareBuffers gives all ranks the buffers of rank 0. Each rank has computed its buffers, such as
// BatchNorm's running statistics, from its own samples. The evaluation and the checkpoint then use
// the same buffers.
func (j *job) shareBuffers(model nn.Module) error {
	if j.world == nil {
		return nil
	}
	for _, b := range nn.NamedBuffers(model) {
		if err := j.world.Broadcast(b.Tensor.NoGrad(), 0); err != nil {
			return fmt.Errorf("%s: %w", b.Name, err)
		}
	}
	return nil
}

// once finds the padding among the samples that a rank evaluates, so that each sample counts once.
// The padding is the epoch's first samples: the loader repeats these if the ranks cannot divide the
// samples evenly.
type once struct {
	next    int  // 1 + the largest index so far of a sample that is not padding
	padding bool // the padding has started
	again   int  // 1 + the largest index so far in the padding
}

// count returns how many samples of a batch are not padding. Padding is at the end of a batch.
func (o *once) count(batch *prefetcher.Batch) (int, error) {
	var samples []int
	switch info := batch.Info.(type) {
	case imageloader.Info:
		for _, s := range info.Samples {
			samples = append(samples, s.Index)
		}
	case prefetcher.SampleInfo:
		samples = info.Indices
	default:
		return batch.N, nil
	}
	n := 0
	for i, index := range samples {
		switch {
		case !o.padding && index >= o.next:
			o.next, n = index+1, i+1
		case index < o.next && index >= o.again:
			o.padding, o.again = true, index+1
		default:
			return 0, fmt.Errorf("the samples of the evaluation are not in order: open its source without Shuffle: %w",
				cuda.ErrInvalidArgument)
		}
	}
	return n, nil
}
