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
	// ErrClosed is returned by the methods of a closed Loader, and by methods that Close
	// interrupts.
	ErrClosed = errors.New("imageloader: the loader is closed")
	// ErrNoSamples means that an archive or an epoch has no sample to deliver.
	ErrNoSamples = index.ErrNoSamples
	// ErrLabels means that a Parquet file has no usable column of labels, or that a sample has an
	// impossible label. Options.Unlabelled needs no labels.
	ErrLabels = archive.ErrLabels
	// ErrNoLibrary means that the image library is not installed, or has another version than this
	// program needs. The message gives the installed and the wanted version, and the command that
	// installs it.
	ErrNoLibrary error = imagecapi.CodeNoLibrary
)

// BadSamplePolicy decides what happens to a sample that can't be decoded. Under every policy the
// sample is counted and named in Stats and in the log, and all batches except the last have
// Options.BatchSize samples.
type BadSamplePolicy = sample.BadSamplePolicy

// The policies.
const (
	// Fail delivers the samples before the bad one and then ends the epoch with a *SampleError.
	Fail = sample.Fail
	// Skip leaves the sample out. The batches are the same as if the archive did not have it.
	Skip = sample.Skip
	// Substitute replaces the sample by the previous good sample of the same batch, including its
	// label. If the batch has no earlier good sample, the next good one is used. Damage therefore
	// never changes the number of batches of an epoch. A batch without a good sample is an error.
	Substitute = sample.Substitute
)

// DamagePolicy decides which damaged images are bad samples. It applies to JPEG and PNG. Under
// every policy, a damaged image of another format is bad, and so is an image without any decodable
// pixel. Damaged images that are decoded are counted and named separately: in Stats.Warned, the
// log, and Report.Warned.
type DamagePolicy = codec.DamagePolicy

// The policies.
const (
	// Warned decodes the damaged images that Pillow and torchvision decode. These are JPEGs that
	// libjpeg-turbo decodes with a warning, and PNGs whose image data inflates to the whole image,
	// even if they have wrong checksums, two palettes or no end. A truncated image is bad.
	Warned = codec.Warned
	// Partial also decodes truncated images, and PNGs with damaged image data, like Pillow with
	// LOAD_TRUNCATED_IMAGES. The missing part is grey in a baseline JPEG. In a PNG it is black or
	// the palette's first colour.
	Partial = codec.Partial
	// Refuse makes every damaged image a bad sample. But under every policy, only the rows of a
	// JPEG or PNG down to the end of the crop are decoded. In the rows below, only damage to the
	// structure of the file is found.
	Refuse = codec.Refuse
)

// Reason is the reason why a sample is bad.
type Reason = sample.Reason

// The reasons. Stats.BadBy has a count for each.
const (
	Damaged     = sample.Damaged     // the image's bytes are cut off or corrupt
	Unsupported = sample.Unsupported // an image of a kind that is not supported
	NotImage    = sample.NotImage    // its first bytes match none of the formats
	Empty       = sample.Empty       // it has no bytes
	TooLarge    = sample.TooLarge    // over Options.MaxSampleBytes or Options.MaxPixels
	NotRegular  = sample.NotRegular  // a link, device or pipe instead of an image
	Sparse      = sample.Sparse      // stored by tar as a sparse file
	Rejected    = sample.Rejected    // a Func of Transform.Ops, or Options.Target, returned an error
	MaskSize    = sample.MaskSize    // the mask's size differs from the image's
	WrongBoxes  = sample.WrongBoxes  // the boxes can't be used, or there are more than Boxes.Max
)

// SampleError reports a bad sample: the member in a class's directory, or the mask or the boxes of
// an image, can't be used. It has the fields
//
//	File   string // the archive
//	Name   string // the member; if the mask or the boxes are bad, their member
//	Index  int    // the sample's index
//	Reason Reason
//	Err    error  // details; may be nil
type SampleError = sample.Error

// ArchiveError reports damage to the archive itself. The members after the damage can't be read.
// The samples before it were delivered.
type ArchiveError = archive.Error
