package prefetcher

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"

	"github.com/torchstream/torchstream/internal/assembly"
	"github.com/torchstream/torchstream/internal/order"
	"github.com/torchstream/torchstream/torch"
)

// ErrNoSamples means that an epoch of a [SampleSource] has no sample to deliver.
var ErrNoSamples = errors.New("no samples")

// BadSamplePolicy decides what a [SampleSource] does with a sample whose function returns an error
// or panics. It is the same type as imageloader.BadSamplePolicy.
type BadSamplePolicy = assembly.Policy

// The policies. Under each of them all batches except the last have SamplesOptions.BatchSize
// samples.
const (
	// Fail ends the epoch with a *SampleError, after the samples before it were delivered.
	Fail = assembly.Fail
	// Skip leaves the sample out. The batches are the same as if it did not exist.
	Skip = assembly.Skip
	// Substitute replaces the sample by the previous good sample of the same batch. If the batch
	// has no earlier good sample, the next good one is used. Bad samples therefore never change the
	// number of batches. A batch without a good sample is an error.
	Substitute = assembly.Substitute
)

// SamplesOptions are the options of [Samples]. The zero value delivers every sample once in an
// epoch, in ascending order, in batches of 32.
type SamplesOptions struct {
	BatchSize int // samples; 0: 32
	// Shuffle delivers the samples in another order in each epoch. The order depends only on Seed
	// and the epoch.
	Shuffle bool
	Seed    uint64
	// If Weights is not nil, an epoch draws n samples with replacement. Each draw takes a sample
	// with a probability proportional to its weight (0 or more). Samples calls Weights once for
	// each sample.
	Weights func(i int) float64

	// Rank and World are for several processes that train together. This process has rank Rank
	// (from 0) among World processes. World 0 means 1. All ranks have the same samples and options.
	// The sequence of an epoch is the same on each rank, and its samples are dealt to the ranks in
	// turn. Every rank gets the same number of batches of the same sizes, even with bad samples. If
	// the samples don't divide evenly, or if a rank skips more bad samples than the others, the
	// first samples of the epoch are repeated. With DropLast, samples are left out instead, so that
	// all batches are full.
	Rank, World int
	Workers     int // number of goroutines that call the function; 0: GOMAXPROCS
	// DropLast leaves out the last batch if it is short. PadLast fills it with the first samples of
	// the epoch instead.
	DropLast, PadLast bool
	BadSamples        BadSamplePolicy
	// Data identifies the samples in saved states, for example by a file's name and digest. Restore
	// refuses a state with another value.
	Data   string
	Logger *slog.Logger // receives a warning for each bad sample; nil discards them
}

const maxSampleBatch = 1 << 24 // samples

// check sets the defaults, or returns an error that names the wrong field.
func (o *SamplesOptions) check() error {
	for _, f := range []struct {
		name            string
		value           *int
		fallback, limit int
	}{
		{"BatchSize", &o.BatchSize, 32, maxSampleBatch},
		{"World", &o.World, 1, 1 << 24},
		{"Workers", &o.Workers, runtime.GOMAXPROCS(0), 1 << 12},
	} {
		if *f.value == 0 {
			*f.value = f.fallback
		}
		if *f.value < 0 || *f.value > f.limit {
			return fmt.Errorf("SamplesOptions.%s is %d, not in 1 to %d", f.name, *f.value, f.limit)
		}
	}
	switch {
	case o.Rank < 0 || o.Rank >= o.World:
		return fmt.Errorf("SamplesOptions.Rank is %d, not in 0 to World-1 (%d)", o.Rank, o.World-1)
	case o.DropLast && o.PadLast:
		return errors.New("SamplesOptions.DropLast and PadLast exclude each other")
	case o.BadSamples < Fail || o.BadSamples > Substitute:
		return fmt.Errorf("SamplesOptions.BadSamples is %v, not Fail, Skip or Substitute", o.BadSamples)
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return nil
}

// share returns this process's share of an epoch.
func (o *SamplesOptions) share() order.Share {
	return order.Share{Rank: o.Rank, World: o.World, Batch: o.BatchSize, DropLast: o.DropLast, PadLast: o.PadLast}
}

// SampleSource is a [Source] whose samples a Go function writes one by one: see [Samples]. It has
// no resources to close. Several prefetchers may use it at the same time.
type SampleSource struct {
	n       int
	fields  []torch.Spec
	write   func(i int, s *Sample) error
	options SamplesOptions
	kind    order.Kind
	weights *order.Weights
	bad     atomic.Int64

	mu     sync.Mutex
	resume *order.Start // nil: every epoch is whole
}

// Samples returns a source of n samples, numbered from 0, for data that the program can access in
// any order: rows of a table, records of a database, files of a format that imageloader does not
// read.
//
//	rows, err := prefetcher.Samples(len(table), []torch.Spec{
//		{Name: "features", DType: torch.Float32, Shape: []int64{4}},
//		{Name: "labels", DType: torch.Int64},
//	}, func(i int, s *prefetcher.Sample) error {
//		copy(s.Float32("features"), table[i].Features)
//		s.Int64("labels")[0] = table[i].Label
//		return nil
//	}, prefetcher.SamplesOptions{BatchSize: 256, Shuffle: true})
//	...
//	feed, err := prefetcher.New(rows, prefetcher.Options{})
//
// fields describes the tensors of one sample. The batch's tensors are in the same order, and
// Batch.Images and Batch.Labels are the fields "images" and "labels".
//
// write writes sample i to s, straight into the batch's memory, which is pinned for a GPU. Several
// goroutines (SamplesOptions.Workers) call it at the same time, each with another Sample. It must
// write the same values whenever it gets the same sample, epoch and random numbers. Batches then
// depend only on Seed and the epoch, not on the number of workers, and a resumed epoch equals an
// uninterrupted one. An error makes the sample bad: see SamplesOptions.BadSamples. A panic counts
// as an error. If write calls an accessor of s with a wrong name or type, the epoch ends under
// every policy.
//
// The Info of a batch is a [SampleInfo].
func Samples(n int, fields []torch.Spec, write func(i int, s *Sample) error, o SamplesOptions) (*SampleSource, error) {
	if err := cmp.Or(checkSamples(n, fields, write == nil), o.check()); err != nil {
		return nil, fmt.Errorf("prefetcher: Samples: %w", err)
	}
	s := &SampleSource{n: n, fields: cloneSpecs(fields), write: write, options: o, kind: order.Archive}
	if o.Shuffle {
		s.kind = order.Permuted
	}
	if o.Weights != nil {
		var err error
		if s.weights, err = order.NewWeights(n, o.Weights); err != nil {
			return nil, fmt.Errorf("prefetcher: Samples: SamplesOptions.Weights: %w", err)
		}
		s.kind = order.Drawn
	}
	return s, nil
}

// checkSamples checks the arguments of Samples.
func checkSamples(n int, fields []torch.Spec, noWrite bool) error {
	switch {
	case n < 1 || n > math.MaxInt32:
		return fmt.Errorf("n is %d, not in 1 to %d: %w", n, math.MaxInt32, ErrNoSamples)
	case noWrite:
		return errors.New("the function that writes samples is nil")
	case len(fields) == 0:
		return errors.New("there are no fields")
	}
	for i, f := range fields {
		if f.Name == "" || slices.ContainsFunc(fields[:i], func(g torch.Spec) bool { return g.Name == f.Name }) {
			return fmt.Errorf("field %d has the name %q: each field needs another name", i, f.Name)
		}
		if f.Bytes() < 1 || slices.ContainsFunc(f.Shape, func(d int64) bool { return d < 1 }) {
			return fmt.Errorf("field %q of type %v and shape %v has no elements", f.Name, f.DType, f.Shape)
		}
	}
	return nil
}

// Fields implements [Source].
func (s *SampleSource) Fields() []torch.Spec { return cloneSpecs(s.fields) }

// BatchSize implements [Source].
func (s *SampleSource) BatchSize() int { return s.options.BatchSize }

// Len returns the number of samples, of all ranks together.
func (s *SampleSource) Len() int { return s.n }

// Batches returns the number of batches of an epoch on this rank. If World is 1 and the policy is
// Skip, an epoch with bad samples may have fewer.
func (s *SampleSource) Batches() int {
	d := order.NewDeal(s.options.share(), s.n, order.Positions{})
	return d.Batches()
}

// BadSamples returns the number of bad samples so far.
func (s *SampleSource) BadSamples() int64 { return s.bad.Load() }

// String returns a description for messages, for example "1000 samples in batches of 32".
func (s *SampleSource) String() string {
	if s == nil {
		return "no samples"
	}
	return strconv.Itoa(s.n) + " samples in batches of " + strconv.Itoa(s.options.BatchSize)
}

// SampleError reports a bad sample of a [SampleSource].
type SampleError struct {
	Index int    // the sample's number
	Err   error  // the error or the panic of the function that writes samples
	Stack []byte // stack trace of the panic; nil for an error
}

func (e *SampleError) Error() string {
	s := fmt.Sprintf("prefetcher: sample %d: %v", e.Index, e.Err)
	if e.Stack != nil {
		s += "\n" + string(e.Stack)
	}
	return s
}

func (e *SampleError) Unwrap() error { return e.Err }
