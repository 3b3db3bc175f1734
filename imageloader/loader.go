package imageloader

import (
	"context"
	"fmt"
	"io/fs"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/box"
	"github.com/torchstream/torchstream/imageloader/internal/count"
	"github.com/torchstream/torchstream/imageloader/internal/devplan"
	"github.com/torchstream/torchstream/imageloader/internal/index"
	"github.com/torchstream/torchstream/imageloader/internal/sample"
	"github.com/torchstream/torchstream/imageloader/transform"
	"github.com/torchstream/torchstream/internal/order"
)

// queueBytes is the maximum number of compressed bytes that have been read but not yet decoded, not
// counting the shuffle buffer. A single sample may be larger.
const queueBytes = 64 << 20

// Loader is an open archive. It is safe for concurrent use; several epochs may run at the same
// time.
type Loader struct {
	archiveFile
	o Options
	decoding
	indexStore
	weights *order.Weights // nil: every sample once
	labelFile
	counters count.Counters
	spare    spareSlots
	repeated rereader

	queueBytes int64 // the constant queueBytes, or less in a test

	opened order.Kind // order chosen by Open
	loaderState
}

// labelFile is a file with the labels or the boxes of all images. It does not change after Open.
type labelFile struct {
	list  *index.List // from Options.List or Unlabelled, or from Boxes.File if one file has all boxes; otherwise nil
	boxes *box.Set    // nil unless one file has the boxes of all images
}

// archiveFile is the archive of a loader.
type archiveFile struct {
	path     string
	format   string
	info     fs.FileInfo                             // of all shards, when it was opened
	openFile func(path string) (archive.File, error) // nil: the file system's; set in tests
	mappings *archive.Mappings                       // of the archive's files, for all epochs
}

// decoding describes how a loader makes pixels. It does not change after Open.
type decoding struct {
	compiled *transform.Compiled // of Options.Transform
	codec    sample.Codecs
	rules    sample.Rules
}

// indexStore holds the index of a loader, and the entry points and searches that belong to the
// index.
type indexStore struct {
	index    atomic.Pointer[index.Index]         // nil until the archive has been read through
	points   atomic.Pointer[devplan.EntryPoints] // entry points of the index; nil until an epoch needs them
	searched atomic.Pointer[devplan.Searches]    // searches of the index; nil until an epoch needs them
}

// close frees the copies of images, and saves and closes the index.
func (x *indexStore) close() error {
	if p := x.points.Load(); p != nil {
		p.FreeCopies()
	}
	if x := x.index.Load(); x != nil {
		return x.Close()
	}
	return nil
}

// loaderState is the part of a loader that changes between epochs. mu guards it.
type loaderState struct {
	mu      sync.Mutex
	order   order.Kind   // order of epochs from now on: opened, or the order of a restored state
	resume  *order.Start // nil: every epoch is whole
	digest  string       // digest of the index, computed at its first use
	closed  chan struct{}
	running sync.WaitGroup // calls that Close waits for
}

// startCall registers a call. Close then waits until the call has called running.Done. startCall
// returns false if the loader is closed.
func (s *loaderState) startCall() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.isClosed() {
		return false
	}
	s.running.Add(1)
	return true
}

func (s *loaderState) isClosed() bool {
	select {
	case <-s.closed:
		return true
	default:
		return false
	}
}

// end ends running calls and waits for them.
func (s *loaderState) end() {
	s.mu.Lock()
	if !s.isClosed() {
		close(s.closed)
	}
	s.mu.Unlock()
	s.running.Wait()
}

// Open calls OpenContext with context.Background().
func Open(path string, o Options) (*Loader, error) { return OpenContext(context.Background(), path, o) }

// OpenContext opens an archive of image files. The first bytes, not the name, determine its format
// (.tar, .tar.gz, .tar.zst, .zip, Parquet). If there is no index yet, OpenContext reads the list of
// samples from the archive: the headers of a .tar, the central directory of a .zip, the labels and
// image sizes of a Parquet file, or a whole .tar.gz. With o.Classes it usually leaves reading a
// .tar.gz to the first epoch. If it finds damage, it returns an *ArchiveError.
//
// If another process is already making the index, OpenContext waits for it and logs this to
// o.Logger. The wait ends when ctx ends, or when that process ends or is stopped.
func OpenContext(ctx context.Context, path string, o Options) (*Loader, error) {
	return open(ctx, path, o, nil, sample.Library{})
}

func open(ctx context.Context, path string, o Options, file func(string) (archive.File, error),
	c sample.Codecs) (*Loader, error) {
	o, err := o.withDefaults()
	if err != nil {
		return nil, err
	}
	compiled, err := transform.Compile(o.Transform)
	if err != nil {
		return nil, err
	}
	l := &Loader{archiveFile: archiveFile{path: path, openFile: file, mappings: archive.NewMappings()}, o: o,
		decoding: decoding{compiled: compiled, codec: c, rules: newRules(path, &o)}, queueBytes: queueBytes}
	l.closed = make(chan struct{})
	a, err := archive.Open(ctx, path, l.archiveConfig())
	if err != nil {
		return nil, archive.StopCause(ctx, err)
	}
	defer a.Close()
	l.info, l.format = a.Info(), a.Format()
	if err := o.checkFormat(a.Path(), a.Format()); err != nil {
		return nil, err
	}
	if err := l.readList(ctx, a); err != nil {
		return nil, archive.StopCause(ctx, err)
	}
	config := l.indexConfig(l.format)
	config.Progress = o.Progress
	x, err := index.Load(a, config)
	if err != nil {
		return nil, archive.StopCause(ctx, err)
	}
	if x == nil && len(o.Classes) > 0 && a.Streamed() && !o.needsIndex() && !o.WebDataset && o.List == "" {
		b, err := index.NewBuilder(a.Path(), config) // checks the classes
		if err != nil {
			return nil, err
		}
		b.Close()
		l.opened = l.chooseOrder(nil)
		l.order = l.opened
		return l, nil
	}
	if x == nil {
		if x, err = index.Build(a, config); err != nil {
			return nil, archive.StopCause(ctx, err)
		}
	}
	if err := o.checkIndex(a.Path(), x); err != nil {
		_ = x.Close() // there is nothing to save
		return nil, err
	}
	l.index.Store(x)
	l.opened = l.chooseOrder(x)
	l.order = l.opened
	if err := l.weigh(x); err != nil {
		_ = x.Close() // there is nothing to save
		return nil, err
	}
	return l, nil
}

// checkIndex returns an error if the options do not fit the archive's index.
func (o *Options) checkIndex(path string, x *index.Index) error {
	if o.MultiLabel && len(x.Classes()) == 0 {
		return fmt.Errorf("%w in %s: Options.MultiLabel, and no image has a label", ErrNoSamples, path)
	}
	if x.Paired() && !x.Random() {
		option := "Masks"
		if o.Boxes.used() {
			option = "Boxes"
		}
		return fmt.Errorf("imageloader: %s: Options.%s needs random access, and this is a stream "+
			"of more than Options.ShuffleBytes (%d): "+
			"repack it as .tar or .tar.gz, or raise ShuffleBytes", path, option, o.ShuffleBytes)
	}
	return nil
}

// chooseOrder chooses the order of epochs. x is the index with which the loader was opened, or nil.
// An index that is made later does not change the order.
func (l *Loader) chooseOrder(x *index.Index) order.Kind {
	switch {
	case l.o.Weights != nil || l.o.Balanced:
		return order.Drawn
	case !l.o.Shuffle:
		return order.Archive
	case x != nil && x.Random():
		return order.Permuted
	}
	return order.Buffered
}

// weigh prepares weighted draws, if the options ask for them.
func (l *Loader) weigh(x *index.Index) (err error) {
	if l.order != order.Drawn {
		return nil
	}
	if !x.Random() {
		option := "Weights"
		if l.o.Balanced {
			option = "Balanced"
		}
		return fmt.Errorf("imageloader: %s: Options.%s needs random access, and this is a stream of more than "+
			"%d bytes: make an index with torchstream index, repack it as .tar, or let it stay in memory "+
			"(Options.ShuffleBytes)", archive.Shown(l.path), option, l.o.ShuffleBytes)
	}
	weight, option := func(i int) float64 {
		s := Sample{Name: x.Name(i), Index: i}
		if l.boxes == nil {
			s.Label = x.Label(i)
		}
		return l.o.Weights(s)
	}, "Weights"
	if l.o.Balanced {
		perClass := make([]float64, len(x.Classes()))
		for i := range x.Len() {
			perClass[x.Label(i)]++
		}
		weight, option = func(i int) float64 { return 1 / perClass[x.Label(i)] }, "Balanced"
	}
	if l.weights, err = order.NewWeights(x.Len(), weight); err != nil {
		return fmt.Errorf("imageloader: Options.%s: %s: %w", option, archive.Shown(l.path), err)
	}
	return nil
}

// positions returns the number of positions in the sequence of an epoch, or order.Unknown without
// an index.
func (l *Loader) positions(x *index.Index) int {
	if x == nil {
		return order.Unknown
	}
	return l.perRound(x) * l.o.Repeat
}

// perRound returns the number of positions in one round over the samples.
func (l *Loader) perRound(x *index.Index) int {
	if l.weights != nil && l.o.Draws > 0 {
		return l.o.Draws
	}
	return x.Len()
}

// Len returns the number of samples in the archive, including bad ones. It returns -1 for a
// compressed archive with Options.Classes and without an index, until an epoch has read it to its
// end.
func (l *Loader) Len() int {
	if x := l.index.Load(); x != nil {
		return x.Len()
	}
	return -1
}

// Batches returns the number of batches of an epoch on this rank. It counts samples that the policy
// Skip may leave out. It returns -1 if Len does.
func (l *Loader) Batches() int {
	total := l.positions(l.index.Load())
	if total == order.Unknown {
		return -1
	}
	d := order.NewDeal(l.o.share(), total, order.Positions{})
	return d.Batches()
}

// Classes returns the class names by label. With Options.Boxes they are Options.Classes.
func (l *Loader) Classes() []string {
	if x := l.index.Load(); x != nil && !l.o.Boxes.used() {
		return slices.Clone(x.Classes())
	}
	return slices.Clone(l.o.Classes)
}

// ClassCounts returns the number of samples of each class, by label. With Options.MultiLabel a
// sample counts once for each of its labels. ClassCounts returns nil if Len returns -1, and with
// Options.Masks, Boxes and Unlabelled.
func (l *Loader) ClassCounts() []int {
	x := l.index.Load()
	if x == nil || x.Paired() || l.boxes != nil || l.o.Unlabelled {
		return nil
	}
	counts := make([]int, len(x.Classes()))
	for i := range x.Len() {
		if !l.o.MultiLabel {
			counts[x.Label(i)]++
			continue
		}
		for _, label := range x.Labels(i) {
			counts[label]++
		}
	}
	return counts
}

// Format returns the format of the archive: FormatTar, ...
func (l *Loader) Format() string { return l.format }

// BatchSize returns the number of samples in a batch. The last batch of an epoch may have fewer.
func (l *Loader) BatchSize() int { return l.o.BatchSize }

// Close ends running epochs, which return ErrClosed, and waits for them. It may be called more than
// once, and by several goroutines.
func (l *Loader) Close() error {
	l.loaderState.end()
	l.repeated.mu.Lock()
	l.repeated.close()
	l.repeated.mu.Unlock()
	l.spare.close()
	l.mappings.Close()
	return l.indexStore.close()
}
