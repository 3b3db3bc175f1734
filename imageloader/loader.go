// Package imageloader turns an archive of labelled images (.tar or .tar.gz of JPEG, PNG, WebP, GIF, BMP and TIFF files) into batches: decoded, cropped, resized and flipped on all
// cores, straight into memory that the consumer lends, in an order that depends on the seed and the epoch alone.
//
// # Labels and members
//
// A sample is a member of the archive that lies in the directory of a class; its label is the number of that directory's name among the classes. A directory
// is a class if it directly holds a member that claims to be an image, by its first bytes or its extension; classes are sorted, as torchvision's ImageFolder
// does. With Options.Classes given these, in their order, are the classes, and an image in any other directory is an *UnknownClassError.
//
// Members in the directory of a class that are no images (README, .DS_Store, links, empty files) are bad samples: see [BadSamplePolicy]. Other members (at the root of the
// archive, in directories without images) are ignored; Stats counts them. Nothing is ever extracted, so what a name looks like does no harm.
//
// # Order
//
// A plain .tar and a directory have random access, and so has a compressed archive that is held in memory or has an index with checkpoints, if Open knows it: a
// shuffled epoch is a permutation of all samples. Anything else is a stream: it is shuffled through a buffer of Options.ShuffleBuffer samples, so an archive
// larger than the buffer should be packed in mixed order, not class by class. While the buffer of a large archive fills, at the start of an epoch, one
// sample leaves it for two that come, so that the first batch is there at once. The sample's index is its position among the
// samples of the archive. All that is random about it is drawn from (Options.Seed, epoch, index): the batches of an epoch are the same bytes with any number
// of workers and any number of slots.
//
// Which samples an epoch has is up to Options.Repeat, Weights and Balanced; which of them this process gets, to Rank and World. docs/imageloader.md has the whole.
package imageloader

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/torchstream/torchstream/imageloader/internal/order"
	"github.com/torchstream/torchstream/imageloader/transform"
)

// Options of a Loader. The zero value loads every image in archive order, resized and centre-cropped to 224, 32 a batch.
type Options struct {
	BatchSize int       // 0: 32
	Transform Transform // zero value: Eval(256, 224)

	Shuffle bool
	// ShuffleBuffer and ShuffleBytes bound the buffer that a .tar.gz is shuffled through: samples (0: 4096) and compressed bytes (0: 256 MiB), whichever is reached
	// first. What has random access needs none. A .tar.gz whose samples fit in ShuffleBytes, shuffled or not, stays in memory after it was read once, and is not
	// read again.
	ShuffleBuffer int
	ShuffleBytes  int64
	Seed          uint64

	// Repeat is how often an epoch goes over the samples, each time in another order and with other crops; 0: once. Round j of epoch e is what epoch e*Repeat+j
	// would be without.
	Repeat int
	// Weights, if not nil, makes an epoch of draws with replacement: each takes a sample with a probability proportional to its weight (0 or more). It is called
	// once for each sample, by Open. Balanced, instead, draws each class equally often. Draws is how many draws a round has; 0: as many as there are samples. Both
	// need random access.
	Weights  func(Sample) float64
	Balanced bool
	Draws    int

	// Rank and World are for several processes that train together: this one is rank Rank (from 0) of World; 0: 1. All have the same archive and options. The
	// sequence of an epoch is the same on each, and its samples are dealt in turn. Every rank gets equally many batches, of the same sizes, whatever is damaged:
	// when samples don't divide evenly, or one rank skips a bad one that the others don't have, the first ones of the epoch come again.
	// With DropLast, instead, samples are left out so that all batches are full.
	Rank, World int

	// Workers is how many goroutines decode, each with a core's worth of work; 0: GOMAXPROCS, which follows the CPU quota of the process's cgroup. Reading and
	// inflating take another one.
	Workers int
	// WorkerNice lowers the priority of the workers' threads by so many steps of nice(2), 0 to 19, and WorkerCPUs, if not empty, are the only CPUs that they run on
	// (Workers is then len(WorkerCPUs) by default, if that is fewer): so that decoding leaves alone the thread that launches kernels. Workers then have
	// threads of their own, which are what they were before when the epoch ends.
	WorkerNice int
	WorkerCPUs []int
	// DropLast leaves out the last batch if it is short. PadLast, instead, fills it up with the first samples of the epoch.
	DropLast bool
	PadLast  bool
	// Classes, if not empty, are the directory names that are labels 0, 1, ... Give the training archive's to the loader of a test archive. A .tar.gz is then
	// not read at Open; without, Open reads the archive through once.
	Classes []string
	// WebDataset takes labels as WebDataset does, not from directories: members that follow each other and whose paths are equal up to the first dot of the last
	// part are a group; its image is a sample, labelled by what its .cls holds, or the field label, cls or class of its .json. Labels that are all whole numbers
	// stand for themselves; others are names of classes.
	WebDataset bool
	BadSamples BadSamplePolicy
	// MaxSampleBytes bounds a member's size (0: 256 MiB) and MaxPixels an image's width * height (0: 178,956,970, as Pillow does): bad samples beyond. Decoding takes
	// at most 8 bytes a pixel in each worker, whatever the format, and so at most 8 * MaxPixels (1.4 GB by default).
	MaxSampleBytes int64
	MaxPixels      int64
	// IndexFile is where the index of the archive is kept from one run to the next; "": beside the archive (train.tgz.tsidx), or if that can't be written in the
	// user's cache folder, which is looked at first. A file that is not empty and no index is never replaced: as IndexFile it is an error. NoIndex: the index is
	// neither read nor written.
	IndexFile string
	NoIndex   bool
	// The index also keeps entry points into JPEG files, about 1 % of their size: the first time that an image is decoded they are made (which costs about a tenth
	// more), and from the next time on only what the crop needs is decoded. The pixels are the same. Those of an earlier process are compared with the image when
	// they are first used, so that nobody's index can change a pixel; TrustIndex leaves that out. NoEntryPoints: they are neither made nor used.
	TrustIndex    bool
	NoEntryPoints bool
	// OpenSource opens what has a scheme: "s3://bucket/train.tgz". nil: OpenHTTP, for http and https. It may be called by several goroutines. Its ctx
	// is for opening alone and ends right after the call: a Source that reads with it, instead of with the one that ReadRange gets, fails at once.
	OpenSource func(ctx context.Context, url string) (Source, error)
	Logger     *slog.Logger // nil: silent
	// StatsEvery is how often a running epoch logs its Stats since the last time; 0: never.
	StatsEvery time.Duration
}

// Sample says what a row of a batch is.
type Sample struct {
	Name  string // of the archive's member
	Index int    // its position among the samples of the archive
	Label int
}

// Loader is an open archive. Its methods may be called from several goroutines; several epochs may run at the same time.
type Loader struct {
	path     string
	o        Options
	plan     *transform.Plan // of o.Transform
	open     opener
	codec    codec
	index    atomic.Pointer[index]       // nil until the archive was read through
	points   atomic.Pointer[entryPoints] // of the index; nil until a pass asked for them
	weights  *order.Weights              // nil: every sample once
	counters counters
	spare    spareSlots

	queueBytes int64 // see the constant
	inspecting bool  // an index that loaders use is not replaced by one with other labels

	bytes  int64      // of the archive when it was opened
	opened order.Kind // the order that Open chose

	mu      sync.Mutex
	order   order.Kind // of epochs from now on: opened, or that of a restored state
	resume  *resume    // nil: every epoch is whole
	digest  string     // of the index; "" until it is needed
	closed  chan struct{}
	running sync.WaitGroup
}

// Open is OpenContext without a way to stop it.
func Open(path string, o Options) (*Loader, error) { return OpenContext(context.Background(), path, o) }

// OpenContext opens an archive of image files; what it is (.tar, .tar.gz) is told by its first bytes. Unless it is a .tar.gz and o.Classes is given, the
// archive is read through once: the headers of a .tar, all of a .tar.gz. Damage that this meets is an *ArchiveError.
func OpenContext(ctx context.Context, path string, o Options) (*Loader, error) {
	return open(ctx, path, o, openFile, shimCodec{})
}

func open(ctx context.Context, path string, o Options, file func(string) (source, error), c codec) (*Loader, error) {
	o, err := o.withDefaults()
	if err != nil {
		return nil, err
	}
	plan, err := transform.Compile(o.Transform)
	if err != nil {
		return nil, err
	}
	l := &Loader{path: path, o: o, plan: plan, open: opener{file, o.OpenSource}, codec: c, queueBytes: queueBytes, closed: make(chan struct{})}
	a, err := openArchive(ctx, path, l.open)
	if err != nil {
		return nil, stopCause(ctx, err)
	}
	defer a.Close()
	l.bytes = a.info.Size()
	x, err := l.loadIndex(a)
	if err != nil {
		return nil, stopCause(ctx, err)
	}
	if x == nil && len(o.Classes) > 0 && a.streamed() && !o.needsIndex() && !o.WebDataset {
		_, err := newIndexer(path, o.Classes) // checks them
		l.opened = l.chooseOrder(nil)
		l.order = l.opened
		return l, err
	}
	if x == nil {
		if x, err = l.scan(a); err != nil {
			return nil, stopCause(ctx, err)
		}
	}
	l.index.Store(x)
	l.opened = l.chooseOrder(x)
	l.order = l.opened
	if err := l.weigh(x); err != nil {
		_ = x.close() // nothing was kept
		return nil, err
	}
	return l, nil
}

// share is the part of an epoch that the options give to this process.
func (o *Options) share() order.Share {
	return order.Share{Rank: o.Rank, World: o.World, Batch: o.BatchSize, DropLast: o.DropLast, PadLast: o.PadLast}
}

// needsIndex says whether an epoch can't begin before it is known how many samples there are.
func (o *Options) needsIndex() bool {
	return o.World > 1 || o.PadLast || o.Repeat > 1 || o.Weights != nil || o.Balanced
}

// chooseOrder is for the index that is there when the loader is opened; nil: none. What comes later does not change the order.
func (l *Loader) chooseOrder(x *index) order.Kind {
	switch {
	case l.o.Weights != nil || l.o.Balanced:
		return order.Drawn
	case !l.o.Shuffle:
		return order.Archive
	case x != nil && x.random():
		return order.Permuted
	}
	return order.Buffered
}

// weigh prepares weighted draws.
func (l *Loader) weigh(x *index) (err error) {
	if l.order != order.Drawn {
		return nil
	}
	if !x.random() {
		return fmt.Errorf("imageloader: %s: Options.Weights and Options.Balanced need random access, and this is a stream of more than Options.ShuffleBytes (%d): "+
			"make an index with torchstream index, repack it as .tar, or raise ShuffleBytes", l.path, l.o.ShuffleBytes)
	}
	weight, option := func(i int) float64 { return l.o.Weights(l.sample(x, i)) }, "Weights"
	if l.o.Balanced {
		perClass := make([]float64, len(x.classes))
		for i := range x.entries {
			perClass[x.entries[i].label]++
		}
		weight, option = func(i int) float64 { return 1 / perClass[x.entries[i].label] }, "Balanced"
	}
	if l.weights, err = order.NewWeights(len(x.entries), weight); err != nil {
		return fmt.Errorf("imageloader: Options.%s: %s: %w", option, l.path, err)
	}
	return nil
}

func (l *Loader) sample(x *index, i int) Sample {
	return Sample{Name: x.name(i), Index: i, Label: int(x.entries[i].label)}
}

// positions is how many positions the sequence of an epoch has; order.Unknown without an index.
func (l *Loader) positions(x *index) int {
	if x == nil {
		return order.Unknown
	}
	return l.perRound(x) * l.o.Repeat
}

func (l *Loader) perRound(x *index) int {
	if l.weights != nil && l.o.Draws > 0 {
		return l.o.Draws
	}
	return len(x.entries)
}

func (o Options) withDefaults() (Options, error) {
	if err := o.checkIndexFile(); err != nil {
		return o, err
	}
	plan, err := transform.Compile(o.Transform)
	if err != nil {
		return o, fmt.Errorf("imageloader: Options.Transform: %w", err)
	}
	o.Transform = plan.Transform()
	for _, d := range []struct {
		name     string
		value    *int64
		fallback int64
		max      int64
	}{
		{"ShuffleBytes", &o.ShuffleBytes, 256 << 20, math.MaxInt64},
		{"MaxSampleBytes", &o.MaxSampleBytes, 256 << 20, math.MaxInt32},
		{"MaxPixels", &o.MaxPixels, 178_956_970, 1 << 31},
	} {
		if *d.value == 0 {
			*d.value = d.fallback
		}
		if *d.value < 0 || *d.value > d.max {
			return o, fmt.Errorf("imageloader: Options.%s is %d, not in 1 to %d", d.name, *d.value, d.max)
		}
	}
	workers := runtime.GOMAXPROCS(0) // follows the cgroup's quota of CPU time
	if n := len(o.WorkerCPUs); n > 0 {
		workers = min(workers, n)
	}
	for _, d := range []struct {
		name     string
		value    *int
		fallback int
		max      int
	}{
		{"BatchSize", &o.BatchSize, 32, 1 << 24},
		{"ShuffleBuffer", &o.ShuffleBuffer, 4096, math.MaxInt32},
		{"Workers", &o.Workers, workers, 1 << 12},
		{"Repeat", &o.Repeat, 1, 1 << 24},
		{"World", &o.World, 1, 1 << 24},
		{"Draws", &o.Draws, 0, math.MaxInt32},
	} {
		if *d.value == 0 {
			*d.value = d.fallback
		}
		if *d.value < 0 || *d.value > d.max {
			return o, fmt.Errorf("imageloader: Options.%s is %d, not in 1 to %d", d.name, *d.value, d.max)
		}
	}
	if err := o.checkThreads(); err != nil {
		return o, err
	}
	switch {
	case o.StatsEvery < 0:
		return o, fmt.Errorf("imageloader: Options.StatsEvery is %v", o.StatsEvery)
	case o.Rank < 0 || o.Rank >= o.World:
		return o, fmt.Errorf("imageloader: Options.Rank is %d, not in 0 to World-1 (%d)", o.Rank, o.World-1)
	case o.DropLast && o.PadLast:
		return o, errors.New("imageloader: Options.DropLast and Options.PadLast exclude each other")
	case o.Weights != nil && o.Balanced:
		return o, errors.New("imageloader: Options.Weights and Options.Balanced exclude each other")
	case o.Draws > 0 && o.Weights == nil && !o.Balanced:
		return o, errors.New("imageloader: Options.Draws is for Options.Weights and Options.Balanced; to go over all samples several times, use Repeat")
	}
	if o.BadSamples < Fail || o.BadSamples > Substitute {
		return o, fmt.Errorf("imageloader: Options.BadSamples is %v, not Fail, Skip or Substitute", o.BadSamples)
	}
	o.Classes = slices.Clone(o.Classes)
	o.WorkerCPUs = slices.Clone(o.WorkerCPUs)
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return o, nil
}

func (l *Loader) noSamples(members, orphans int) error {
	detail := "it is empty"
	switch {
	case orphans > 0:
		detail = fmt.Sprintf("%d images lie outside of any directory; a sample's class is the name of the directory that it is in", orphans)
	case members > 0:
		detail = fmt.Sprintf("none of its %d members is an image in the directory of a class", members)
	}
	return fmt.Errorf("%w in %s: %s", ErrNoSamples, l.path, detail)
}

// stopCause replaces the marker for "the context ended" by the reason.
func stopCause(ctx context.Context, err error) error {
	if err != nil && ctx.Err() != nil && (errors.Is(err, errStopped) || errors.Is(err, ctx.Err())) {
		return context.Cause(ctx)
	}
	return err
}

// Len is how many samples the archive has, bad ones included; -1 for a .tar.gz with Options.Classes until an epoch was read to its end.
func (l *Loader) Len() int {
	if x := l.index.Load(); x != nil {
		return len(x.entries)
	}
	return -1
}

// Batches is how many batches an epoch has on this rank, if the policy Skip leaves none out; -1 if Len is.
func (l *Loader) Batches() int {
	total := l.positions(l.index.Load())
	if total == order.Unknown {
		return -1
	}
	d := order.NewDeal(l.o.share(), total, order.Positions{})
	return d.Batches()
}

// Classes are the class names by label.
func (l *Loader) Classes() []string {
	if x := l.index.Load(); x != nil {
		return slices.Clone(x.classes)
	}
	return slices.Clone(l.o.Classes)
}

// BatchSize is how many samples a batch has; the last one of an epoch may have fewer.
func (l *Loader) BatchSize() int { return l.o.BatchSize }

// Close ends running epochs, which return ErrClosed, and waits for them. It may be called more than once.
func (l *Loader) Close() error {
	l.mu.Lock()
	if !l.isClosed() {
		close(l.closed)
	}
	l.mu.Unlock()
	l.running.Wait()
	l.spare.close()
	if x := l.index.Load(); x != nil {
		return x.close()
	}
	return nil
}

func (l *Loader) isClosed() bool {
	select {
	case <-l.closed:
		return true
	default:
		return false
	}
}
