package index

import (
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// Config sets the content of an index and the place of its file.
type Config struct {
	// Classes are the directory names (with WebDataset the labels) of labels 0, 1, ... Without
	// Classes, every directory with an image is a class.
	Classes []string
	// WebDataset reads labels from the other members of an image's group, not from directories.
	WebDataset bool
	// OneShard makes a WebDataset key that occurs in several shards an error, because the shards
	// are to become one.
	OneShard bool
	// MultiLabel gives each image of WebDataset a list of labels: see [Index.Labels].
	MultiLabel bool
	// Pairs, if not nil, makes pairs of images and masks the samples: see [Index.Mask]. They have
	// no classes. It excludes Classes and WebDataset.
	Pairs *Pairs

	// List, if not nil, has the samples and their labels. It excludes WebDataset and Pairs.
	List *List

	MaxSampleBytes int64 // larger samples are never read
	MaxPixels      int64 // the index marks images over this limit; 0: none
	// HoldBytes is the maximum number of bytes of contents that an index of a stream keeps in
	// memory. If the samples have more bytes in all, each is read from the archive every time.
	HoldBytes int64

	// File is the path of the index file. "" selects the archive's folder, or else the user's cache
	// folder.
	File string
	// NoFile neither reads nor writes an index file.
	NoFile bool
	// RefuseOtherLabels makes Load fail if there is an index with labels of the other kind
	// (WebDataset's or directories'). Otherwise Load ignores such an index.
	RefuseOtherLabels bool

	Codec    Codec
	Logger   *slog.Logger
	Progress func(archive.Progress) // called regularly during a walk; may be nil

	// stall starts a timer for a sign of life from the process that makes the index; nil:
	// makingStall.
	stall func() <-chan time.Time
}

// Codec reads the headers of images. Several goroutines may call it.
type Codec interface {
	// Header reads an image's header from the first bytes, or all bytes, of the image. It fails if
	// they are too few.
	Header(data []byte) (imagecapi.Info, error)
}

// ErrNoSamples means that an archive or an epoch has no sample to deliver.
var ErrNoSamples = errors.New("imageloader: no samples")

// noLabels returns the ErrNoSamples of an archive with labels of WebDataset. orphans is the number
// of its images without a label, and named are the first of them.
func noLabels(path string, members, orphans int, named []Orphan) error {
	detail := "it has no files"
	switch {
	case len(named) > 0:
		detail = fmt.Sprintf("%s no label; the first is %q: %s", many(orphans, "image has", "images have"), named[0].Name, named[0].Reason)
	case members > 0:
		detail = fmt.Sprintf("none of its %s is an image with a label of WebDataset", many(members, "member", "members"))
	}
	return fmt.Errorf("%w in %s: %s", ErrNoSamples, path, detail)
}

// NoSamples returns the ErrNoSamples of an archive. orphans is the number of its images without a
// class.
func NoSamples(path string, members, orphans int) error {
	detail := "it has no files"
	switch {
	case orphans > 0:
		detail = fmt.Sprintf("%s outside of any directory; "+
			"a sample's class is the name of the directory that it is in, unless Options.WebDataset or Options.List gives labels", many(orphans, "image lies", "images lie"))
	case members > 0:
		detail = fmt.Sprintf("none of its %s is an image in the directory of a class", many(members, "member", "members"))
	}
	return fmt.Errorf("%w in %s: %s", ErrNoSamples, path, detail)
}

// many returns a number with its noun.
func many(n int, one, several string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, several)
}

// noSamples is the ErrNoSamples of an index without samples. members is how many members its
// archive has, as far as is known.
func (x *Index) noSamples(path string, members int, c *Config) error {
	if c.Pairs != nil {
		return fmt.Errorf("%w in %s: %s", ErrNoSamples, path, x.unpaired)
	}
	if c.WebDataset {
		return noLabels(path, members, x.orphans, x.orphansNamed)
	}
	return leftOutError(x.clues.explain(NoSamples(path, members, x.orphans)), x.left)
}
