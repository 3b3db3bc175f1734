// Package imagefeed opens an archive of images as batches on a device in one call. It joins an
// imageloader.Loader and a prefetcher.Prefetcher. A program may also open the two separately.
package imagefeed

import (
	"context"
	"errors"
	"fmt"
	"iter"

	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/prefetcher"
)

// Options are the options of the two parts. The zero value gives every image in archive order,
// resized and cropped to 224, in batches of 32, on the first GPU or the CPU.
type Options struct {
	Loader     imageloader.Options
	Prefetcher prefetcher.Options
}

// Feed delivers the batches of an archive. A Feed must be closed.
type Feed struct {
	*prefetcher.Prefetcher
	Loader *imageloader.Loader // for the classes, Restore and statistics; Close closes it
}

// Batch is a batch of a Feed. Functions that expect a prefetcher.Batch get its field Batch.
type Batch struct {
	*prefetcher.Batch
	// Info has the samples of the rows, and the position after the batch. It hides the field of the
	// same name of prefetcher.Batch, which has no type. The program may keep it.
	Info imageloader.Info
}

// Open opens an archive, a directory, or shards: see imageloader.Open. ctx is only for opening.
//
//	feed, err := imagefeed.Open(ctx, "train.tgz", imagefeed.Options{
//		Loader: imageloader.Options{Transform: imageloader.Train(224), Shuffle: true}})
//	...
//	defer feed.Close()
//	for batch, err := range feed.Epoch(ctx, 0) {
//
// To train from the feed, set Feed: feed.Prefetcher in a train.Config.
func Open(ctx context.Context, path string, o Options) (*Feed, error) {
	loader, err := imageloader.OpenContext(ctx, path, o.Loader)
	if err != nil {
		return nil, err
	}
	feed, err := prefetcher.New(loader, o.Prefetcher)
	if err != nil {
		return nil, errors.Join(err, loader.Close())
	}
	return &Feed{Prefetcher: feed, Loader: loader}, nil
}

// Epoch returns the batches of an epoch in order: see prefetcher.Prefetcher.Epoch.
func (f *Feed) Epoch(ctx context.Context, epoch int) iter.Seq2[*Batch, error] {
	return func(yield func(*Batch, error) bool) {
		for b, err := range f.Prefetcher.Epoch(ctx, epoch) {
			if err != nil {
				yield(nil, err)
				return
			}
			info, ok := b.Info.(imageloader.Info)
			if !ok {
				yield(nil, fmt.Errorf("imagefeed: %v: the info is a %T, want an imageloader.Info", b, b.Info))
				return
			}
			if !yield(&Batch{b, info}, nil) {
				return
			}
		}
	}
}

// Close closes the prefetcher and then the loader. While an epoch is running, it does nothing and
// returns prefetcher.ErrRunning.
func (f *Feed) Close() error {
	err := f.Prefetcher.Close()
	if errors.Is(err, prefetcher.ErrRunning) {
		return err
	}
	return errors.Join(err, f.Loader.Close())
}
