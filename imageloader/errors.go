package imageloader

import (
	"errors"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/codec"
	"github.com/torchstream/torchstream/imageloader/internal/index"
	"github.com/torchstream/torchstream/imageloader/internal/sample"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

var (
	// ErrClosed is returned by the methods of a closed Loader, and by those that Close interrupts.
	ErrClosed = errors.New("imageloader: the loader is closed")
	// ErrNoSamples means that an archive or an epoch has no sample to deliver.
	ErrNoSamples = index.ErrNoSamples
	// ErrNoLibrary means that the image library is not installed, or has another version than this
	// program needs. The message says what is there, what is wanted, and the command that installs
	// it.
	ErrNoLibrary error = imagecapi.CodeNoLibrary
)

// BadSamplePolicy decides what happens to a sample that can't be decoded. Under every policy the
// sample is counted and named in Stats and in the log, and all batches but the last have
// Options.BatchSize samples.
type BadSamplePolicy = sample.BadSamplePolicy

// The policies.
const (
	// Fail ends the epoch with a *SampleError, after the samples before it were delivered.
	Fail = sample.Fail
	// Skip leaves the sample out: batches are what they would be if the archive did not have it.
	Skip = sample.Skip
	// Substitute puts the previous good sample of the same batch in its place, or the next good
	// sample if there is none before, label included. So an epoch has the same number of batches
	// whatever is damaged. A batch without a single good sample is an error.
	Substitute = sample.Substitute
)

// DamagePolicy decides which damaged images are bad samples. It is about JPEG and PNG; other
// formats that are damaged are bad under every policy, as is everything that no pixel can be
// decoded of. A damaged image that is decoded all the same is counted and named apart:
// Stats.Warned, the log, and Report.Warned.
type DamagePolicy = codec.DamagePolicy

// The policies.
const (
	// Warned decodes what Pillow and torchvision decode: a JPEG that libjpeg-turbo repairs with a
	// warning, to the pixels of its repair, and a PNG whose image data inflates to all of the
	// image, whatever its checksums (with a palette twice, or without an end, too). An image that
	// is cut off is bad.
	Warned = codec.Warned
	// Partial also decodes images that are cut off, and PNGs with damaged image data, as Pillow
	// does with LOAD_TRUNCATED_IMAGES: the missing part of a baseline JPEG is grey, of a PNG black
	// or the palette's first colour.
	Partial = codec.Partial
	// Refuse has every damaged image be a bad sample. Damage below the part of a JPEG or PNG that a
	// crop needs is found only if it is to the structure of the file, as under the other policies.
	Refuse = codec.Refuse
)

// Reason is the reason why a sample is bad.
type Reason = sample.Reason

// The reasons. Stats counts by them.
const (
	Damaged     = sample.Damaged     // the image's bytes are cut off or corrupt
	Unsupported = sample.Unsupported // an image, but of a kind that is not handled
	NotImage    = sample.NotImage    // none of the formats by its first bytes
	Empty       = sample.Empty       // no bytes at all
	TooLarge    = sample.TooLarge    // over Options.MaxSampleBytes or Options.MaxPixels
	NotRegular  = sample.NotRegular  // a link, device or pipe instead of an image
	Sparse      = sample.Sparse      // stored by tar as a sparse file
	Rejected    = sample.Rejected    // a Func of Transform.Ops, or Options.Target, returned an error
	MaskSize    = sample.MaskSize    // a mask has not the size of its image
)

// SampleError is a bad sample: a member of the archive, in the directory of a class, that does not
// become an image, or the mask of an image. It has the fields
//
//	File   string // the archive
//	Name   string // the member: the mask's if the mask is bad
//	Index  int    // the sample's index
//	Reason Reason
//	Err    error  // details; may be nil
type SampleError = sample.Error

// ArchiveError is damage to the archive itself: the members after the damage can't be read. The
// samples before it were delivered.
type ArchiveError = archive.Error
