package index

import (
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// Config sets what an index contains and where its file is.
type Config struct {
	// Classes lists the directory names whose labels are 0, 1, ... (with WebDataset, the texts of
	// the labels). If Classes is empty, every directory with an image is a class.
	Classes []string
	// WebDataset reads labels from the other members of an image's group, not from directories.
	WebDataset bool
	// OneShard is for shards that are to be merged into one. A WebDataset key that occurs in
	// several shards is then an error.
	OneShard bool
	// MultiLabel gives each image of WebDataset or of a list several labels: see [Index.Labels].
	MultiLabel bool
	// Pairs, if not nil, selects pairs of an image and a partner as the samples: see
	// [Index.Partner]. Pairs have no classes. Pairs excludes Classes and WebDataset.
	Pairs *Pairs

	// List, if not nil, names the samples and their labels. List excludes WebDataset and Pairs.
	List *List

	// Parquet means that labels come from the columns of Parquet files, not from directories. Load,
	// Build and Make set it. Parquet excludes WebDataset and Pairs. With a List, Parquet is false,
	// because the list has the labels.
	Parquet bool

	// Part selects some of the samples. The index file still describes all of them.
	Part Part

	MaxSampleBytes int64 // larger samples are never read
	MaxPixels      int64 // images with more pixels are marked in the index; 0: no limit
	// HoldBytes limits the bytes of samples that the index of a compressed archive keeps in memory.
	// If all samples together are larger, none is kept, and the samples are read from the archive
	// each time.
	HoldBytes int64
	// ShareOnHost shares these samples with other processes of the host.
	ShareOnHost bool

	// File is the path of the index file. "" selects the archive's folder or, if that is not
	// writable, the user's cache folder.
	File string
	// NoFile disables reading and writing of an index file.
	NoFile bool
	// RefuseOtherLabels makes Load fail with ErrOtherLabels if it finds an index with labels from
	// another source, such as a list. Otherwise Load ignores such an index.
	RefuseOtherLabels bool

	Codec    Codec
	Logger   *slog.Logger
	Progress func(archive.Progress) // called regularly during a walk; may be nil

	// stall starts a timer. If it expires before the process that builds the index makes progress,
	// that process counts as stopped. nil: a timer of makingStall.
	stall func() <-chan time.Time
}

// Codec reads the headers of images. It must be safe for concurrent use.
type Codec interface {
	// Header reads an image's header from data, the first bytes or all bytes of the image. It fails
	// if data is too short.
	Header(data []byte) (imagecapi.Info, error)
}

// ErrNoSamples means that an archive or an epoch has no samples.
var ErrNoSamples = errors.New("imageloader: no samples")

// noLabels returns the error, an ErrNoSamples, for an archive with WebDataset labels. orphans is
// the number of images without a label, and named lists the first of these images.
func noLabels(path string, members, orphans int, named []Orphan) error {
	detail := "it has no files"
	switch {
	case len(named) > 0:
		detail = fmt.Sprintf("%s no label; the first is %q: %s", many(orphans, "image has", "images have"),
			named[0].Name, named[0].Reason)
	case members > 0:
		detail = fmt.Sprintf("none of its %s is an image with a label of WebDataset",
			many(members, "member", "members"))
	}
	return fmt.Errorf("%w in %s: %s", ErrNoSamples, path, detail)
}

// noRows returns an ErrNoSamples for Parquet files.
func noRows(path string, orphans int, named []Orphan) error {
	if len(named) == 0 {
		return fmt.Errorf("%w in %s: none of its rows has the bytes of an image: a Parquet file holds the "+
			"images themselves, not only their paths", ErrNoSamples, path)
	}
	return fmt.Errorf("%w in %s: %s no label; the first is %q: %s", ErrNoSamples, path,
		many(orphans, "image has", "images have"), named[0].Name, named[0].Reason)
}

// byColumns sets Parquet if the archive consists of Parquet files and there is no List.
func (c *Config) byColumns(a *archive.Archive) {
	c.Parquet = a.Format() == archive.Parquet && c.List == nil
}

// NoSamples returns the error, an ErrNoSamples, for an archive. orphans is the number of images
// without a class.
func NoSamples(path string, members, orphans int) error {
	detail := "it has no files"
	switch {
	case orphans > 0:
		detail = fmt.Sprintf("%s outside of any directory; "+
			"a sample's class is the name of the directory that it is in, unless Options.WebDataset or "+
			"Options.List gives labels", many(orphans, "image lies", "images lie"))
	case members > 0:
		detail = fmt.Sprintf("none of its %s is an image in the directory of a class",
			many(members, "member", "members"))
	}
	return fmt.Errorf("%w in %s: %s", ErrNoSamples, path, detail)
}

// many returns a number with its noun, in the singular or the plural.
func many(n int, one, several string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, several)
}

// noSamples returns the error, an ErrNoSamples, for an index without samples. members is the number
// of the archive's members that are known.
func (x *Index) noSamples(path string, members int, c *Config) error {
	if c.Pairs != nil {
		return fmt.Errorf("%w in %s: %s", ErrNoSamples, path, x.unpaired)
	}
	if c.Parquet {
		return noRows(path, x.orphans, x.orphansNamed)
	}
	if c.List != nil && c.List.every {
		return x.clues.explain(fmt.Errorf("%w in %s: none of its %s is an image", ErrNoSamples, path,
			many(members, "member", "members")))
	}
	if c.WebDataset {
		return noLabels(path, members, x.orphans, x.orphansNamed)
	}
	return leftOutError(x.clues.explain(NoSamples(path, members, x.orphans)), x.left)
}
