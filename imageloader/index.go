package imageloader

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/box"
	"github.com/torchstream/torchstream/imageloader/internal/devplan"
	"github.com/torchstream/torchstream/imageloader/internal/index"
	"github.com/torchstream/torchstream/imageloader/internal/sample"
)

// ErrNeedsNoIndex is the error of MakeIndex and InspectIndex for a directory or a zip.
var ErrNeedsNoIndex = errors.New("needs no index")

// ErrOtherLabels is the error of InspectIndex for an index that was made with other options: its
// labels are from another source, such as Options.List. MakeIndex replaces such an index.
var ErrOtherLabels = index.ErrOtherLabels

// IndexReport describes the index that MakeIndex has made.
type IndexReport = index.Report

// UnknownClassError is the error of an image in a directory that is not one of Options.Classes.
type UnknownClassError = index.UnknownClassError

// Orphan is an image without a label. It is not a sample.
type Orphan = index.Orphan

// indexConfig returns the configuration of the index of an archive in a format. It has no Progress.
func (l *Loader) indexConfig(format string) index.Config {
	pairs, _ := l.o.Masks.pairs() // withDefaults has already checked the pairs
	classes := l.o.Classes
	if l.o.Boxes.used() {
		classes = nil // Options.Classes has the labels of boxes, not of images
		if !l.o.Boxes.oneFile() {
			pairs, _ = l.o.Boxes.pairs()
		}
	}
	return index.Config{
		Classes:        classes,
		WebDataset:     l.o.WebDataset,
		Pairs:          pairs,
		MultiLabel:     l.o.MultiLabel,
		List:           l.list,
		Part:           l.o.Part,
		MaxSampleBytes: l.o.MaxSampleBytes,
		MaxPixels:      l.o.MaxPixels,
		HoldBytes:      l.o.ShuffleBytes,
		ShareOnHost:    l.o.ShareOnHost,
		File:           l.o.IndexFile,
		NoFile:         l.o.NoIndex || l.o.Columns.RowNames && format == archive.Parquet,
		Codec:          l.codec,
		Logger:         l.o.Logger,
	}
}

// MakeIndex reads a whole archive and writes its index, even if one exists. The first epoch over an
// archive also makes the index.
//
// MakeIndex uses the options IndexFile, Classes, WebDataset, Masks, Boxes, List, ListFormat,
// Unlabelled, MultiLabel, OpenSource and Logger. A loader can use the index only if its WebDataset
// is the same, and if Masks, Boxes, List and Unlabelled are each set in both calls or in neither.
// If progress is not nil, MakeIndex calls it now and then from the caller's goroutine. A directory
// or a zip needs no index and is an error. So are Parquet files with Columns.RowNames, whose index
// is not stored. MakeIndex does not wait for other processes. OpenContext, in any
// process, waits for MakeIndex.
func MakeIndex(ctx context.Context, path string, o Options, progress func(Progress)) (*IndexReport, error) {
	o.NoIndex, o.Part, o.ListFormat.GroupColumn = false, Part{}, "" // the index has all samples
	o, err := o.withDefaults()
	if err != nil {
		return nil, err
	}
	l := &Loader{archiveFile: archiveFile{path: path}, o: o, decoding: decoding{codec: sample.Library{}}}
	a, err := archive.Open(ctx, path, l.archiveConfig())
	if err != nil {
		return nil, archive.StopCause(ctx, err)
	}
	defer func() { _ = a.Close() }() // nothing was written
	if err := l.o.checkFormat(a.Path(), a.Format()); err != nil {
		return nil, err
	}
	if f := a.Format(); f == archive.Tree || f == archive.Zip {
		return nil, fmt.Errorf("imageloader: %s is a %s, which %w", a.Path(), f, ErrNeedsNoIndex)
	}
	if l.o.Columns.RowNames && a.Format() == archive.Parquet {
		return nil, fmt.Errorf("imageloader: %s: an index with Options.Columns.RowNames is not stored: leave RowNames out, "+
			"or open the files without an index", a.Path())
	}
	if err := l.readList(ctx, a); err != nil {
		return nil, archive.StopCause(ctx, err)
	}
	c := l.indexConfig(a.Format())
	c.HoldBytes, c.ShareOnHost, c.Progress = 0, false, progress
	r, err := index.Make(a, c)
	return r, archive.StopCause(ctx, err)
}

// archiveConfig returns the settings with which the loader opens its archive.
func (l *Loader) archiveConfig() archive.Config {
	return archive.Config{OpenFile: l.openFile, OpenSource: l.o.OpenSource, Ignore: index.IsFile,
		Columns: archive.Columns{Image: l.o.Columns.Image, Labels: l.o.Columns.Labels, Lists: l.o.MultiLabel,
			Unlabelled: l.o.List != "" || l.o.Unlabelled || l.o.Boxes.used(), Boxes: l.o.Boxes.column()},
		RowNames: l.o.Columns.RowNames || l.o.Boxes.oneFile(), // lists need unique names
		Requests: &archive.Requests{Logger: l.o.Logger}, Inflaters: min(runtime.GOMAXPROCS(0), l.o.Workers)}
}

// openAgain opens the loader's archive again, with a copy of archiveConfig. It returns an error if
// the archive has changed since Open.
func (l *Loader) openAgain(ctx context.Context, c archive.Config) (*archive.Archive, error) {
	c.Again = true
	a, err := archive.Open(ctx, l.path, c)
	if err != nil {
		return nil, err
	}
	if err := a.Changed(l.info); err != nil {
		_ = a.Close() // nothing was written
		return nil, err
	}
	return a, nil
}

// readThrough makes the index of an archive that was opened without one.
func (l *Loader) readThrough(ctx context.Context) (*index.Index, error) {
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	go func() {
		select {
		case <-l.closed:
			stop(ErrClosed)
		case <-ctx.Done():
		}
	}()
	a, err := l.openAgain(ctx, l.archiveConfig())
	if err != nil {
		return nil, archive.StopCause(ctx, err)
	}
	defer a.Close()
	x, err := index.Build(a, l.indexConfig(l.format))
	if err != nil {
		return nil, archive.StopCause(ctx, err)
	}
	if !l.index.CompareAndSwap(nil, x) {
		_ = x.Close() // an error loses nothing, as nothing was written
	}
	return l.index.Load(), nil
}

// entryPoints returns the entry points of an index. It returns nil if the options disable them.
func (l *Loader) entryPoints(x *index.Index) *devplan.EntryPoints {
	if x == nil || l.o.NoEntryPoints {
		return nil
	}
	for {
		p := l.points.Load()
		if p.Of(x) {
			return p
		}
		if l.points.CompareAndSwap(p, devplan.NewEntryPoints(x, x.Len(), l.o.TrustIndex)) {
			return l.points.Load()
		}
	}
}

// searches returns the Searches of an index, which record the images that the consumer no longer
// searches for entry points. It returns nil without an index, and under Refuse. Under Refuse,
// damage in a scan makes an image bad. The loader has to know this when it composes a batch, but
// the consumer decodes the image only later.
func (l *Loader) searches(x *index.Index) *devplan.Searches {
	if x == nil || l.o.Damaged == Refuse {
		return nil
	}
	for {
		s := l.searched.Load()
		if s.Of(x) {
			return s
		}
		if l.searched.CompareAndSwap(s, devplan.NewSearches(x)) {
			return l.searched.Load()
		}
	}
}

// ListError is an error in a line of Options.List.
type ListError = index.ListError

// ListReport is the result of comparing Options.List with the archive.
type ListReport = index.ListReport

// ListReport returns the result of comparing Options.List with the archive. If one file has the
// boxes of all images, it compares the images in that file instead. Without either, it returns nil.
func (l *Loader) ListReport() *ListReport {
	x := l.index.Load()
	if x == nil || x.List() == nil || l.o.Unlabelled {
		return nil
	}
	r := *x.List()
	return &r
}

// readList reads the list of the options, if there is one, or makes a list of every image.
func (l *Loader) readList(ctx context.Context, a *archive.Archive) (err error) {
	switch {
	case l.o.Boxes.oneFile() && a.Format() == archive.Parquet:
		return l.readBoxColumn(a)
	case l.o.Boxes.oneFile():
		return l.readBoxSet(ctx)
	}
	if l.o.Unlabelled {
		l.list = index.EveryImage(a.Format() == archive.Parquet) // rows are in no directory
		return nil
	}
	if l.o.List == "" {
		return nil
	}
	l.list, err = index.OpenList(ctx, l.o.List, l.path, index.ListOptions{Format: l.o.ListFormat,
		MultiLabel: l.o.MultiLabel, Archive: l.archiveConfig(), Logger: l.o.Logger})
	if err != nil && !index.IsWrongList(err) {
		return fmt.Errorf("imageloader: Options.List: %w", err)
	}
	return err
}

// readBoxColumn reads the boxes of all images from a column of Parquet files. If Options.Classes is
// empty, the classes are those that the files name.
func (l *Loader) readBoxColumn(a *archive.Archive) error {
	r := archive.NewReader(a)
	defer r.Close()
	classes := l.o.Classes
	if len(classes) == 0 {
		var err error
		if classes, err = r.BoxClasses(); err != nil {
			return fmt.Errorf("imageloader: Options.Boxes.File: %w", err)
		}
	}
	b := box.NewSetBuilder(classes)
	if err := r.Boxes(b.Add); err != nil {
		return fmt.Errorf("imageloader: Options.Boxes.File: %w", err)
	}
	l.o.Classes, l.boxes = classes, &b.Set
	var err error
	l.list, err = index.NumberedList(a.Path(), b.Set.Names, "names from rows, boxes in column "+l.o.Boxes.File)
	return err
}

// readBoxSet reads the boxes of all images from one file. The images become a list, in which the
// label of an image is its number in the file.
func (l *Loader) readBoxSet(ctx context.Context) error {
	o := index.ListOptions{Archive: l.archiveConfig(), Logger: l.o.Logger}
	err := index.OpenListFile(ctx, l.o.Boxes.File, l.path, o, func(file string, in io.Reader) (err error) {
		if l.boxes, err = box.ReadSet(in, l.o.Boxes.config(l.o.Classes)); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
		l.list, err = index.NumberedList(file, l.boxes.Names, "names in images, boxes in annotations")
		return err
	})
	if err != nil {
		return fmt.Errorf("imageloader: Options.Boxes.File: %w", err)
	}
	return nil
}
