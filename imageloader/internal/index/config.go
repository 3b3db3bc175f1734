package index

import (
	"errors"
	"fmt"
	"log/slog"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// Config says what an index is made of and where its file lies.
type Config struct {
	// Classes are the directory names (with WebDataset the labels) that are labels 0, 1, ... None:
	// every directory with an image is a class.
	Classes []string
	// WebDataset takes labels from members beside an image, not from directories.
	WebDataset bool

	MaxSampleBytes int64 // larger samples are never read
	MaxPixels      int64 // the index tells images over it from others; 0: it does not
	// HoldBytes is how many bytes of contents an index of a stream keeps in memory at most. Samples
	// of more bytes in all are read from the archive each time.
	HoldBytes int64

	// File is the path of the index file; "": beside the archive, or in the user's cache folder.
	File string
	// NoFile: no index file is read or written.
	NoFile bool
	// RefuseOtherLabels makes Load fail if there is an index with labels of the other kind
	// (WebDataset's or those of directories). Otherwise Load passes over it.
	RefuseOtherLabels bool

	Codec    Codec
	Logger   *slog.Logger
	Progress func(archive.Progress) // called now and then during a walk; may be nil
}

// Codec reads the headers of images. Several goroutines may call it.
type Codec interface {
	// Header returns what the first bytes of an image, or all of them, say of it. It fails if they
	// are too few.
	Header(data []byte) (imagecapi.Info, error)
}

// ErrNoSamples means that an archive or an epoch has no sample to deliver.
var ErrNoSamples = errors.New("imageloader: no samples")

// NoSamples is the ErrNoSamples of an archive. orphans is how many of its members are images that
// have no class; web says that classes are labels of WebDataset.
func NoSamples(path string, members, orphans int, web bool) error {
	detail := "it is empty"
	switch {
	case orphans > 0 && web:
		detail = fmt.Sprintf("%d images have no label: neither a .cls member of the same name, "+
			"nor a .json with the field label, cls or class", orphans)
	case orphans > 0:
		detail = fmt.Sprintf("%d images lie outside of any directory; "+
			"a sample's class is the name of the directory that it is in", orphans)
	case members > 0 && web:
		detail = fmt.Sprintf("none of its %d members is an image with a label of WebDataset", members)
	case members > 0:
		detail = fmt.Sprintf("none of its %d members is an image in the directory of a class", members)
	}
	return fmt.Errorf("%w in %s: %s", ErrNoSamples, path, detail)
}
