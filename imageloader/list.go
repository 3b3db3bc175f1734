package imageloader

import (
	"context"
	"fmt"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/index"
)

// maxListBytes bounds the file of Options.List, which is read into memory.
const maxListBytes = 1 << 30

// ListError is an error in a line of Options.List.
type ListError = index.ListError

// readList reads the list of the options, if there is one.
func (l *Loader) readList(ctx context.Context) error {
	if l.o.List == "" {
		return nil
	}
	f, err := archive.OpenFile(ctx, l.o.List, l.archiveConfig())
	if err != nil {
		return fmt.Errorf("imageloader: Options.List: %w", err)
	}
	defer func() { _ = f.Close() }() // nothing was written
	info, err := f.Stat()
	if err != nil {
		return fmt.Errorf("imageloader: Options.List: %w", err)
	}
	if info.Size() > maxListBytes {
		return fmt.Errorf("imageloader: Options.List: %s has %d bytes, over the limit of %d", l.o.List, info.Size(), maxListBytes)
	}
	l.list, err = index.ReadList(l.o.List, f)
	return err
}

// checkList refuses options that mean nothing beside a list.
func (o *Options) checkList() error {
	switch {
	case o.List == "":
	case o.WebDataset:
		return fmt.Errorf("imageloader: Options.List and Options.WebDataset exclude each other: labels are those of the list")
	case o.Masks.masked():
		return fmt.Errorf("imageloader: Options.List and Options.Masks exclude each other: an image with a mask has no label")
	}
	return nil
}
