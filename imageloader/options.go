package imageloader

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/box"
	"github.com/torchstream/torchstream/imageloader/internal/epoch"
	"github.com/torchstream/torchstream/imageloader/internal/index"
	"github.com/torchstream/torchstream/imageloader/internal/mask"
	"github.com/torchstream/torchstream/imageloader/internal/sample"
	"github.com/torchstream/torchstream/imageloader/transform"
	"github.com/torchstream/torchstream/internal/order"
	"github.com/torchstream/torchstream/tensor"
)

// Options of a Loader. The zero value loads every image in archive order, resized and
// centre-cropped to 224, in batches of 32.
type Options struct {
	BatchSize int       // samples; 0: 32
	Transform Transform // zero value: Eval(256, 224)

	Shuffle bool
	// ShuffleBuffer and ShuffleBytes limit the buffer through which a .tar.gz is shuffled: the
	// number of samples (0: 4096) and of compressed bytes (0: 256 MiB), whichever is reached first.
	// An archive with random access needs no buffer. If all samples of a .tar.gz fit in
	// ShuffleBytes, they stay in memory after the first epoch, shuffled or not, and later epochs do
	// not read the archive.
	ShuffleBuffer int
	ShuffleBytes  int64
	Seed          uint64

	// Repeat is the number of passes over the samples in an epoch, each in another order and with
	// other crops; 0: once. Round j of epoch e equals epoch e*Repeat+j of a loader without Repeat.
	Repeat int
	// If Weights is not nil, an epoch draws samples with replacement. Each draw takes a sample with
	// a probability proportional to its weight (0 or more). Open calls Weights once for each
	// sample. Balanced draws each class equally often instead. Draws is the number of draws in a
	// round; 0: the number of samples. Weights and Balanced need random access.
	Weights  func(Sample) float64
	Balanced bool
	Draws    int

	// Rank and World are for several processes that train together. This process has rank Rank
	// (from 0) among World processes. World 0 means 1. All ranks have the same archive and options.
	// The sequence of an epoch is the same on each rank, and its samples are dealt to the ranks in
	// turn. Every rank gets the same number of batches of the same sizes, even with damaged
	// samples. If the samples don't divide evenly, or if a rank skips more bad samples than the
	// others, the first samples of the epoch are repeated. With DropLast, samples are left out
	// instead, so that all batches are full.
	Rank, World int
	// ShareOnHost shares the samples of a compressed archive that is kept in memory (ShuffleBytes)
	// with all processes of this user and host that open the same archive with this option, such as
	// the ranks of a job: they are in memory once, and each is inflated by the process that first
	// needs it. Batches are the same. The memory (memfd_create) ends with the last process, however
	// that ends, and any of the processes may be killed. Where the system does not allow it, Open
	// logs a warning, and each process has a copy. Processes of different containers do not share.
	ShareOnHost bool

	// Workers is the number of goroutines that decode, each using up to one core; 0: GOMAXPROCS,
	// which follows the CPU quota of the process's cgroup. Reading and inflating use another
	// goroutine. With more than four workers, about a quarter as many goroutines inflate a local
	// .tar.gz without an index. Open, and an epoch that a GPU decodes, inflate it on as many
	// goroutines as there are workers, at most GOMAXPROCS and 16, with up to 16 MB of memory each.
	Workers int
	// WorkerNice lowers the priority of the workers' threads by this many steps of nice(2), 0 to
	// 19. WorkerCPUs, if not empty, lists the only CPUs on which the workers run. The default of
	// Workers is then at most len(WorkerCPUs). Both options keep decoding away from the thread that
	// launches kernels. With either option, each worker runs on a dedicated OS thread during an
	// epoch. When the epoch ends, the threads get their old priority and CPUs back.
	WorkerNice int
	WorkerCPUs []int
	// DropLast leaves out the last batch if it is short. PadLast fills it with the first samples of
	// the epoch instead.
	DropLast bool
	PadLast  bool
	// Classes, if not empty, lists the directory names whose labels are 0, 1, ... Give the training
	// archive's classes to the loader of a test archive. Without Classes, Open reads the whole
	// archive once. With Classes, Open does not read a .tar.gz or .tar.zst. The first epoch then
	// delivers samples while it reads the archive, before the archive's own checksum is known. If
	// bytes are damaged and images still decode, their batches are delivered before the
	// *ArchiveError that ends the epoch.
	Classes []string
	// WebDataset takes labels from WebDataset's members, not from directories. A group consists of
	// consecutive members of a shard whose paths are equal up to the first dot of the file name.
	// The group's sample is the image whose extension has no further dot ("0.jpg", not
	// "0.depth.png"). Its label is in its .cls member, or else in the field label, cls or class of
	// its .json member. Further images, and images without a label, are ignored, logged and
	// counted: see Stats.Orphans. Four errors name the member and the shard: a repeated member, a
	// sample whose members are not adjacent, a label that cannot be read, and two labels that
	// contradict each other.
	//
	// If every label is a decimal number, the numbers are the labels: "7" and "007" are 7. In this
	// case a label that is not a whole number from 0 to 1,048,575 is an error that names its image.
	// If any label is not a number, all labels are names of classes, sorted by bytes: "10" is
	// before "9". With Classes all labels are names, in the order of Classes.
	WebDataset bool
	// MultiLabel gives each sample of WebDataset, of a List or of a Parquet file any number of
	// labels. In WebDataset, a sample's labels are the words of its .cls, separated by white space
	// or commas. They may also be an array of strings and whole numbers in its .json, in the field
	// labels, label, cls or class. In a List, they are the words of a field, or in several columns:
	// see ListFormat. In a Parquet file, they are in a column of lists, or in several columns: see
	// Columns. The field "labels" of a batch is then float32 [classes], with a 1 for each label and
	// 0 otherwise, and Sample.Label is 0. WebDataset's rule for numbers and names applies to the
	// labels of all samples together. A sample without labels has only zeros.
	MultiLabel bool
	// List is the path or URL of a CSV or TSV file that lists the samples and their labels. If
	// there is no such file, List is the name of a member of the archive. The separator is a comma,
	// a semicolon or a tab. The text is UTF-8, or UTF-16 with a byte order mark. Labels do not come
	// from directories, and members that are not listed are not samples. Samples stay in the
	// archive's order. WebDataset's rule for numbers and names applies to the labels.
	//
	// If the first line has column names, ListFormat chooses the columns of the names and the
	// labels. A column that it does not choose is found by a usual column name (path, file, image,
	// id, ...; label, class, target, tags, ...). Without column names, names and labels are in the
	// first two columns. A name is a member's path or the end of it, with or without the extension.
	// If all names start with folders that the archive does not have, these folders are ignored.
	//
	// Rows whose image is not in the archive, repeated rows, and images without a row are counted
	// (ListReport) and logged. It is a *ListError with file and line if two rows contradict each
	// other, if a name fits two images, or if no row has an image. A label that is not among
	// Classes is an *UnknownClassError. Open reads a whole archive if it has no index. If the list
	// is a member, Open also reads the archive up to that member.
	List       string
	ListFormat ListFormat
	// Unlabelled makes every image a sample, without a label, also those outside of all
	// directories. Images in hidden directories (.Trash) are ignored. Labels are 0, and there are
	// no classes. Target can make targets from names. Open reads a whole archive if it has no
	// index. Of Parquet files, every row with an image is a sample whatever its path is, and no
	// column of labels is read.
	Unlabelled bool
	// Columns selects the columns of Parquet files with the images and the labels.
	Columns Columns
	// Part selects some of the samples, such as those that are not held out, or those below the
	// folder "train". The zero value selects all. All parts of an archive have the same classes and
	// the same index. Open reads a whole archive if it has no index.
	Part Part
	// Target, if not nil, writes the training target of a sample, TargetWidth numbers. The target
	// replaces the label. The numbers are 0 before the call. For multi-label classification, write
	// a 1 for each class of the image. For regression, write the values. The field "labels" is then
	// float32 [TargetWidth], and MixUp and CutMix mix these numbers. Several goroutines call
	// Target, once for each decoded sample. It must return the same numbers for the same sample
	// every time. An error or a panic makes the sample bad, with the reason Rejected.
	Target      func(s Sample, target []float32) error
	TargetWidth int
	// Masks, if not zero, pairs each image with a mask, for segmentation. Such a sample has no
	// label: the field "masks" replaces "labels". Crop, resize, flip, and the steps of
	// Transform.Ops that move pixels apply equally to both. Every pixel of a transformed mask is a
	// copy of the nearest pixel of the original mask. Masks need random access, so Open reads a
	// whole .tar.gz if it has no index.
	Masks Masks
	// Boxes, if not zero, pairs each image with bounding boxes, for detection. Such a sample has no
	// other label: the field "boxes" replaces "labels". Crop, resize, flip, and the steps of
	// Transform.Ops that move pixels apply equally to both. Classes, if given, has the names of the
	// boxes' labels. Open reads a whole .tar.gz if it has no index. If each image has its own file
	// of boxes, samples need random access.
	Boxes      Boxes
	BadSamples BadSamplePolicy
	// Damaged decides which damaged images are bad samples; 0: Warned, which refuses the images
	// that Pillow and torchvision refuse.
	Damaged DamagePolicy
	// MaxSampleBytes limits a member's size (0: 256 MiB) and MaxPixels an image's width * height
	// (0: 178,956,970, as in Pillow). The limit on pixels is half for a HEIC, and a quarter for an
	// AVIF, because libheif uses more memory for each pixel. A sample that exceeds a limit is bad.
	MaxSampleBytes int64
	MaxPixels      int64
	// MaxTranscodedBytes limits this loader's memory for baseline copies of progressive JPEGs; 0: 1
	// GiB. A GPU decodes the copies instead of the originals (prefetcher.Options.Decode). Ranks on
	// one host do not share copies. If there is no room for the copy of an image, the workers
	// decode the image, which takes several milliseconds. Set 1 to keep no copies.
	MaxTranscodedBytes int64
	// IndexFile is the path of the archive's index, which later runs use again. "" selects the
	// archive's folder (train.tgz.tsidx), or the user's cache folder if the archive's folder can't
	// be written. The cache folder is searched first. The loader never replaces a file that is
	// neither empty nor an index. If IndexFile names such a file, Open returns an error. With
	// NoIndex no index file is read or written: each Open reads the archive's list of samples. A
	// zip and a directory have no index file.
	IndexFile string
	NoIndex   bool
	// The index also stores the entry points of JPEG files: positions in the compressed data at
	// which decoding can start, about 1 % of a file's size. With entry points, only the part of an
	// image that the crop needs is decoded. The pixels are the same. The loader makes the entry
	// points when it first decodes an image. This decoding takes about a tenth longer. A GPU that
	// decodes finds entry points itself (prefetcher.Options.Decode). Entry points of an earlier
	// process are compared with the image when they are first used, so that no entry point changes
	// a pixel. TrustIndex skips this comparison. With NoEntryPoints, entry points are neither made
	// nor used: set it if the archive is read once. Without an index file (NoIndex, a zip, a
	// directory) they last until Close, in an unnamed file in the user's cache folder. If no file
	// can be created there, memory keeps 512 MiB of them.
	//
	// With and without TrustIndex, the index's checksums detect damage, and an index of another
	// archive. They do not detect forgery. The loader checks that each sample follows a tar header
	// with its name and size, and that its label is the label of its directory. It trusts the list
	// of samples, WebDataset's labels, and the windows for inflating a .tar.gz, so anyone who can
	// write the index can change them. If others can write to the archive's folder, set NoIndex, or
	// an IndexFile in a private folder. docs/index-format.md has the details.
	TrustIndex    bool
	NoEntryPoints bool
	// OpenSource opens a path with a scheme, such as "s3://bucket/train.tgz". nil: OpenHTTP, for
	// http and https. Several goroutines may call it. Its ctx is only for opening and ends when
	// OpenSource returns. A Source must therefore not keep this ctx for reading: it reads with the
	// context that ReadRange gets.
	OpenSource func(ctx context.Context, url string) (Source, error)
	Logger     *slog.Logger // nil: silent
	// Progress, if not nil, is called several times a second while Open reads an archive without an
	// index, first at its first member. Open calls it from the caller's goroutine.
	Progress func(Progress)
	// StatsEvery is the interval at which a running epoch logs its Stats; 0: never. Each log line
	// covers the time since the line before it.
	StatsEvery time.Duration
}

// Progress is the part of an archive that has been read.
type Progress = archive.Progress

// withDefaults returns the options with their defaults, or an error that names the wrong field.
// Saved states contain every field that changes the content of a batch: see Loader.fingerprint.
func (o Options) withDefaults() (Options, error) {
	if err := o.checkIndexFile(); err != nil {
		return o, err
	}
	compiled, err := transform.Compile(o.Transform)
	if err != nil {
		return o, fmt.Errorf("imageloader: Options.Transform: %w", err)
	}
	o.Transform = compiled.Transform()
	if err := o.setNumbers(); err != nil {
		return o, err
	}
	threads := o.threads()
	if err := threads.Check(); err != nil {
		return o, err
	}
	if err := cmp.Or(o.check(), o.checkList(), o.checkPart(), o.checkMasks(compiled), o.checkBoxes(compiled),
		o.checkTarget(), o.checkUnlabelled()); err != nil {
		return o, err
	}
	o.Boxes = o.Boxes.withDefaults()
	o.Classes = slices.Clone(o.Classes)
	o.Columns.Labels = slices.Clone(o.Columns.Labels)
	o.WorkerCPUs = slices.Clone(o.WorkerCPUs)
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return o, nil
}

// setNumbers replaces numbers that are 0 by their defaults, and checks their limits.
func (o *Options) setNumbers() error {
	workers := runtime.GOMAXPROCS(0) // follows the cgroup's quota of CPU time
	if n := len(o.WorkerCPUs); n > 0 {
		workers = min(workers, n)
	}
	return cmp.Or(
		setNumber("ShuffleBytes", &o.ShuffleBytes, 256<<20, math.MaxInt64),
		setNumber("MaxSampleBytes", &o.MaxSampleBytes, 256<<20, math.MaxInt32),
		setNumber("MaxTranscodedBytes", &o.MaxTranscodedBytes, 1<<30, math.MaxInt64),
		setNumber("MaxPixels", &o.MaxPixels, 178_956_970, 1<<31),
		setNumber(batchSize, &o.BatchSize, 32, maxBatchSize),
		setNumber("ShuffleBuffer", &o.ShuffleBuffer, 4096, math.MaxInt32),
		setNumber("Workers", &o.Workers, workers, 1<<12),
		setNumber("Repeat", &o.Repeat, 1, 1<<24),
		setNumber("World", &o.World, 1, 1<<24),
		setNumber("Draws", &o.Draws, 0, math.MaxInt32),
	)
}

func setNumber[T int | int64](name string, value *T, fallback, limit T) error {
	if *value == 0 {
		*value = fallback
	}
	if *value < 0 || *value > limit {
		return fmt.Errorf("imageloader: Options.%s is %d, not in 1 to %d", name, *value, limit)
	}
	return nil
}

// check returns an error for fields that exclude each other.
func (o *Options) check() error {
	switch {
	case o.StatsEvery < 0:
		return fmt.Errorf("imageloader: Options.StatsEvery is %v", o.StatsEvery)
	case o.Rank < 0 || o.Rank >= o.World:
		return fmt.Errorf("imageloader: Options.Rank is %d, not in 0 to World-1 (%d)", o.Rank, o.World-1)
	case o.DropLast && o.PadLast:
		return errors.New("imageloader: Options.DropLast and Options.PadLast exclude each other")
	case o.Weights != nil && o.Balanced:
		return errors.New("imageloader: Options.Weights and Options.Balanced exclude each other")
	case o.Draws > 0 && o.Weights == nil && !o.Balanced:
		return errors.New("imageloader: Options.Draws is for Options.Weights and Options.Balanced; " +
			"to go over all samples several times, use Repeat")
	case o.Damaged < Warned || o.Damaged > Refuse:
		return fmt.Errorf("imageloader: Options.Damaged is %v, not Warned, Partial or Refuse", o.Damaged)
	case o.BadSamples < Fail || o.BadSamples > Substitute:
		return fmt.Errorf("imageloader: Options.BadSamples is %v, not Fail, Skip or Substitute", o.BadSamples)
	}
	return nil
}

// share returns this process's share of an epoch.
func (o *Options) share() order.Share {
	return order.Share{Rank: o.Rank, World: o.World, Batch: o.BatchSize, DropLast: o.DropLast, PadLast: o.PadLast}
}

// threads returns the options for the workers' threads.
func (o *Options) threads() epoch.Threads {
	return epoch.Threads{Workers: o.Workers, Nice: o.WorkerNice, CPUs: o.WorkerCPUs}
}

// needsIndex reports whether an epoch can't start before the number of samples is known.
func (o *Options) needsIndex() bool {
	return o.Part != (Part{}) || o.Unlabelled || o.Masks.masked() || o.Boxes.used() || o.World > 1 || o.PadLast || o.Repeat > 1 ||
		o.Weights != nil || o.Balanced
}

// checkIndexFile returns an error if Options.IndexFile is neither empty nor an index. It runs
// before any other work.
func (o *Options) checkIndexFile() error {
	if o.NoIndex || o.IndexFile == "" {
		return nil
	}
	if err := index.CheckFile(o.IndexFile); err != nil {
		return fmt.Errorf("imageloader: Options.IndexFile: %w", err)
	}
	return nil
}

// maxTargetWidth is the maximum of Options.TargetWidth.
const maxTargetWidth = 1 << 20

// checkTarget returns an error for a target without a width, and for options that can't be used
// with a target.
func (o *Options) checkTarget() error {
	switch {
	case o.MultiLabel && (o.Target != nil || o.Balanced):
		return errors.New("imageloader: Options.MultiLabel excludes Options.Target and Options.Balanced")
	case o.Target == nil && o.TargetWidth != 0:
		return fmt.Errorf("imageloader: Options.TargetWidth is %d, and Options.Target is nil", o.TargetWidth)
	case o.Target == nil:
		return nil
	case o.TargetWidth < 1 || o.TargetWidth > maxTargetWidth:
		return fmt.Errorf("imageloader: Options.TargetWidth is %d, not in 1 to %d", o.TargetWidth, maxTargetWidth)
	case o.Masks.masked():
		return errors.New("imageloader: Options.Target and Options.Masks exclude each other: a sample has one target")
	}
	return nil
}

// Masks gives each image a mask, for segmentation: a PNG of the image's size whose pixels are class
// numbers. An image and its mask are two members of the archive, whose names follow two patterns.
type Masks struct {
	// Image and Mask are patterns for names. One "*" matches any text, including slashes, and a
	// ".*" at the end matches any extension. An image and a mask belong together if the "*" matches
	// the same text in both names: "images/*.jpg" and "masks/*.png", or in WebDataset's groups
	// "*.jpg" and "*.seg.png". A name that matches both patterns is a mask. Images without a mask
	// and masks without an image are ignored and logged. A second mask of an image is a *PairError.
	// Two shards may have members of the same names.
	Image, Mask string
	// DType is the dtype of the field "masks": tensor.Uint8 (also the zero value), or tensor.Int64,
	// which masks of 16 bits need.
	DType tensor.DType
	// Fill is the class of pixels that a step of Transform.Ops, such as RandomRotation, reads from
	// outside of the mask. The default 0 is torchvision's. 255 is common for pixels that a loss
	// ignores.
	Fill int
}

// Columns selects the columns of Parquet files by name. An empty Image means the only column of
// bytes, or of a struct with the fields bytes and path, as Hugging Face's datasets writes it. Nil
// Labels mean the only column that datasets describes as ClassLabel, or the column called label.
//
// Labels are integers, strings or booleans. If datasets describes the classes of a column, these
// are the Classes, in their order. Otherwise WebDataset's rule for numbers and names applies. With
// MultiLabel, a row's labels are in a column of lists, or in all the columns of Labels. If the
// values of these columns are numbers, they must be 0 or 1, and a 1 means that the row has the
// column's name as a label.
//
// A row without a label (null, or -1 of datasets) is not a sample: see Stats.Orphans. A row without
// the bytes of an image is ignored and logged. The name of a sample is the path in the row, or else
// the name of the file and the number of the row ("train-00000-of-00002/00000012"). RowNames makes
// names unique. Files in several folders have their paths below the common folder in these names
// ("x/train-0/00000012"), so files that are added below this folder rename no rows.
type Columns struct {
	Image  string   // a column of bytes, or a struct with bytes; dots join the parts of a name
	Labels []string // more than one needs MultiLabel
	// RowNames adds the file and the row to all names, so that each name is unique:
	// "train-00000-of-00002/00000012/cat.jpg". Rows are numbered from 0. The index is then not
	// stored. It excludes Options.List. Archives of other formats ignore it.
	RowNames bool
}

// checkUnlabelled returns an error for options that need labels.
func (o *Options) checkUnlabelled() error {
	if !o.Unlabelled {
		return nil
	}
	for _, other := range []struct {
		option string
		set    bool
	}{{"List", o.List != ""}, {"WebDataset", o.WebDataset}, {"MultiLabel", o.MultiLabel}, {"Classes", len(o.Classes) > 0},
		{"Columns.Labels", len(o.Columns.Labels) > 0}, {"Balanced", o.Balanced}, {"Masks", o.Masks.masked()},
		{"Boxes", o.Boxes.used()}} {
		if other.set {
			return fmt.Errorf("imageloader: Options.Unlabelled excludes Options.%s", other.option)
		}
	}
	return nil
}

// checkFormat returns an error if the options do not fit the format of the archive.
func (o *Options) checkFormat(path, format string) error {
	parquet := format == archive.Parquet
	switch {
	case o.MultiLabel && !o.WebDataset && o.List == "" && !parquet:
		return errors.New("imageloader: Options.MultiLabel is for the labels of Options.WebDataset, Options.List and " +
			"Parquet files; Options.Target makes targets of other labels")
	case !parquet && (o.Columns.Image != "" || len(o.Columns.Labels) > 0):
		return fmt.Errorf("imageloader: Options.Columns is for Parquet files, and %s is a %s", path, format)
	case parquet && o.WebDataset:
		return fmt.Errorf("imageloader: %s is a Parquet file, whose labels are in a column: leave out Options.WebDataset",
			path)
	case parquet && o.Masks.masked():
		return fmt.Errorf("imageloader: %s is a Parquet file: Options.Masks needs a mask as a member of the archive", path)
	case parquet && o.Boxes.used() && !o.Boxes.oneFile():
		return fmt.Errorf("imageloader: %s is a Parquet file: give Options.Boxes.File the column with the boxes, such as "+
			"objects, and no Options.Boxes.Image", path)
	}
	return nil
}

// Part selects samples of an archive: see Options.Part. The zero value selects all. It has the
// fields
//
//	Folder  string  // not "": samples in this directory and below it, such as "train"
//	HeldOut float64 // share of each class's samples to hold out, from 0 to below 1
//	Test    bool    // selects the samples that are held out, instead of the others
//	Seed    uint64  // another seed holds out other samples
//
// A hash of Seed and a sample's name decides whether it is held out, so images that are added later
// move no others. Samples with masks or boxes count as one class. A class of at least two samples
// has at least one on each side. With ListFormat.GroupColumn, all samples of a group are on one
// side, and the held-out share of each class is near HeldOut; groups that are added later may move
// others. Test and Seed need HeldOut.
type Part = index.Part

// checkPart returns an error for a wrong part.
func (o *Options) checkPart() error {
	if err := o.Part.Check(); err != nil {
		return fmt.Errorf("imageloader: Options.Part: %w", err)
	}
	return nil
}

// ListFormat chooses the columns of Options.List, by their names in the first line or by their
// positions, from "1". Names are not case-sensitive. The zero value finds the columns: see
// Options.List. It has the fields
//
//	NameColumn   string   // paths or ids of the images
//	LabelColumns []string // labels; several: one-hot, or class names; "*": all other columns
//	GroupColumn  string   // group of each image, such as a patient, which Part.HeldOut keeps whole
//	Separator    string   // between labels in a field; "": the first of | ; , found, or white space
//	Folder       string   // folder that the names are relative to; "." for the archive; "": any
//
// In a one-hot column, a 1 means that the image has the class with the column's name, and other
// values are 0. Separator and several columns of class names need Options.MultiLabel. With Folder,
// images outside of it have no label.
type ListFormat = index.ListFormat

// PairError is an image with two masks, or a mask with two images, according to Options.Masks. With
// Options.Boxes it is about files of boxes instead of masks.
type PairError = index.PairError

// masked reports whether there are masks.
func (m *Masks) masked() bool { return *m != Masks{} }

// clearPairs makes each sample one member.
func (o *Options) clearPairs() { o.Masks, o.Boxes = Masks{}, Boxes{} }

// pairs returns the patterns, or nil if there are no masks.
func (m *Masks) pairs() (*index.Pairs, error) {
	if !m.masked() {
		return nil, nil
	}
	return parsePairs("Masks", "Mask", m.Image, m.Mask)
}

// parsePairs parses the patterns of an option, whose second pattern is in the given field.
func parsePairs(option, field, image, partner string) (p *index.Pairs, err error) {
	p = &index.Pairs{}
	if p.Image, err = index.ParsePattern(image); err != nil {
		return nil, fmt.Errorf("imageloader: Options.%s.Image: %w", option, err)
	}
	if p.Partner, err = index.ParsePattern(partner); err != nil {
		return nil, fmt.Errorf("imageloader: Options.%s.%s: %w", option, field, err)
	}
	if p.Image == p.Partner {
		return nil, fmt.Errorf("imageloader: Options.%s.Image and %s are both %q", option, field, image)
	}
	return p, nil
}

// checkMasks returns an error for wrong masks, and for options that can't be used with masks.
func (o *Options) checkMasks(compiled *transform.Compiled) error {
	m := &o.Masks
	if _, err := m.pairs(); err != nil || !m.masked() {
		return err
	}
	if err := compiled.ForMasks(); err != nil {
		return fmt.Errorf("imageloader: Options.Masks: Options.Transform: %w", err)
	}
	without := func(option string) error {
		return fmt.Errorf("imageloader: Options.Masks excludes Options.%s: an image with a mask has no label", option)
	}
	switch {
	case m.DType != tensor.Uint8 && m.DType != tensor.Int64:
		return fmt.Errorf("imageloader: Options.Masks.DType is %v, not uint8 or int64", m.DType)
	case m.Fill < 0 || m.Fill > mask.MaxClass(m.DType):
		return fmt.Errorf("imageloader: Options.Masks.Fill is %d, not in 0 to %d (DType is %v)", m.Fill,
			mask.MaxClass(m.DType), m.DType)
	case o.WebDataset:
		return fmt.Errorf("imageloader: Options.Masks excludes Options.WebDataset: an image with a mask has no label; "+
			"the groups' images and masks are given by Masks.Image %q and Masks.Mask %q", "*.jpg", "*.seg.png")
	case len(o.Classes) > 0:
		return without("Classes")
	case o.Balanced:
		return without("Balanced")
	}
	return nil
}

// Boxes gives each image bounding boxes, for detection. Either each image has its own file of
// boxes, and both are members of the archive whose names follow two patterns, or one file has the
// boxes of all images: see File.
//
// A file for one image is JSON if its name ends with .json, and otherwise text. A line of text has
// a label and four numbers, as YOLO writes it. JSON is an array of objects, or an object with such
// an array (annotations or objects), or an object with an array of boxes and an array of labels.
// Each object of the array has a box (bbox) and a label (category_id, label, category or class),
// like COCO's annotations. Objects with iscrowd 1 are left out. Labels are whole numbers from 0 to
// 1,048,575, or names among Options.Classes; a number in text is not a name. If the file has COCO's
// categories, Classes selects labels by their names. A file without boxes, such as an empty one,
// means that the image has no objects. The digest of a State covers the names and sizes of these
// files, not their contents.
//
// If JSON has COCO's width and height of the image, boxes in pixels need an image of this size.
//
// The field "boxes" of a batch is float32 [Max, 5]: left, top, right and bottom edge in pixels of
// the transformed image, and the label. The rows after the last box are 0, 0, 0, 0, -1. The boxes
// follow the image as torchvision's tv_tensors.BoundingBoxes do: after each step they are clamped
// to the image, and a rotated box becomes the bounding box of its corners. Finally, boxes smaller
// than MinSize are left out, as by torchvision's SanitizeBoundingBoxes.
type Boxes struct {
	// Image and File are patterns for names, as in Masks: "images/*.jpg" and "labels/*.txt", or in
	// WebDataset's groups "*.jpg" and "*.json". Images without a file and files without an image
	// are ignored and logged.
	//
	// A File without "*" has the boxes of all images, in COCO's format ("instances_val2017.json"),
	// and Image is empty. It is a path, a URL, or the name of a member of the archive. Its images
	// are the samples: see Options.List for the rules of names. Classes selects labels by the names
	// of categories. Without Classes, labels are the ids of categories.
	//
	// For Parquet files, File is the column of boxes ("objects"): a struct of lists, or a list of
	// structs, with the fields bbox and category, as Hugging Face's datasets writes them. The names
	// of categories in the file are the Classes, unless Classes is given. Names of samples have the
	// file and the row, as with Columns.RowNames.
	Image, File string
	// Format is the meaning of a box's four numbers. Normalized means that they are fractions of
	// the image's width and height instead of pixels. A Format other than DefaultBoxFormat applies
	// to text and to JSON.
	Format     BoxFormat
	Normalized bool
	// Max is the maximum number of boxes of an image, before the transform; 0: 100. An image with
	// more boxes is a bad sample.
	Max int
	// MinSize is the minimum width and height of a transformed box, in pixels; 0: 1.
	MinSize float64
	// Stored means that boxes are positions in the image as stored. Without Stored, and with
	// Transform.ApplyEXIFOrientation, they are positions in the upright image, as most tools for
	// annotation write them. With neither, an image that EXIF turns is a bad sample if it has
	// boxes, unless COCO's width and height are those of the stored image.
	Stored bool
}

// BoxFormat is the meaning of a box's four numbers.
type BoxFormat = box.Format

// The formats.
const (
	// DefaultBoxFormat is CXCYWH with Boxes.Normalized in text, as YOLO writes it, and XYWH in
	// pixels in the field bbox of JSON, as COCO. Other fields need another Format.
	DefaultBoxFormat = box.Default
	XYXY             = box.XYXY   // left, top, right and bottom edge
	XYWH             = box.XYWH   // left and top edge, width, height
	CXCYWH           = box.CXCYWH // centre, width, height
)

// maxBoxes is the maximum of Boxes.Max.
const maxBoxes = 1 << 16

// column returns the column of Parquet files with the boxes.
func (b *Boxes) column() string {
	if !b.oneFile() {
		return ""
	}
	return b.File
}

// oneFile reports whether one file, or a column of Parquet files, has the boxes of all images.
func (b *Boxes) oneFile() bool { return b.File != "" && !strings.Contains(b.File, "*") }

// used reports whether there are boxes.
func (b *Boxes) used() bool { return *b != Boxes{} }

// pairs returns the patterns.
func (b *Boxes) pairs() (*index.Pairs, error) {
	p, err := parsePairs("Boxes", "File", b.Image, b.File)
	if err != nil {
		return nil, err
	}
	p.Boxes = true
	return p, nil
}

func (b Boxes) withDefaults() Boxes {
	if b.used() {
		b.Max, b.MinSize = cmp.Or(b.Max, 100), cmp.Or(b.MinSize, 1)
	}
	return b
}

// config returns the configuration of the decoder. classes are the names of labels.
func (b *Boxes) config(classes []string) box.Config {
	return box.Config{Format: b.Format, Normalized: b.Normalized, Stored: b.Stored, Max: b.Max, MinSize: b.MinSize,
		Classes: classes}
}

// checkBoxes returns an error for wrong boxes, and for options that can't be used with boxes.
func (o *Options) checkBoxes(compiled *transform.Compiled) error {
	b := &o.Boxes
	if !b.used() {
		return nil
	}
	if o.Masks.masked() {
		return errors.New("imageloader: Options.Boxes and Options.Masks exclude each other")
	}
	if b.oneFile() && b.Image != "" {
		return fmt.Errorf("imageloader: Options.Boxes.Image is %q, and Options.Boxes.File %q has no \"*\": leave out "+
			"Image if one file in COCO's format has the boxes of all images", b.Image, b.File)
	}
	if _, err := b.pairs(); err != nil && !b.oneFile() {
		return err
	}
	if err := compiled.ForBoxes(); err != nil {
		return fmt.Errorf("imageloader: Options.Boxes: Options.Transform: %w", err)
	}
	switch {
	case b.Format < DefaultBoxFormat || b.Format > CXCYWH:
		return fmt.Errorf("imageloader: Options.Boxes.Format is %v, not XYXY, XYWH or CXCYWH", b.Format)
	case b.Normalized && b.Format == DefaultBoxFormat:
		return errors.New("imageloader: Options.Boxes.Normalized needs Options.Boxes.Format")
	case b.Max < 0 || b.Max > maxBoxes:
		return fmt.Errorf("imageloader: Options.Boxes.Max is %d, not in 1 to %d", b.Max, maxBoxes)
	case !(b.MinSize >= 0) || math.IsInf(b.MinSize, 0):
		return fmt.Errorf("imageloader: Options.Boxes.MinSize is %v, not 0 or more", b.MinSize)
	case o.WebDataset:
		return fmt.Errorf("imageloader: Options.Boxes excludes Options.WebDataset, which needs a label for each image; "+
			"the groups' images and boxes are given by Boxes.Image %q and Boxes.File %q", "*.jpg", "*.json")
	}
	for _, other := range []struct {
		option string
		set    bool
	}{{"List", o.List != ""}, {"Balanced", o.Balanced}, {"MultiLabel", o.MultiLabel},
		{"Target", o.Target != nil}} {
		if other.set {
			return fmt.Errorf("imageloader: Options.Boxes excludes Options.%s", other.option)
		}
	}
	return nil
}

// Transform describes how an image file becomes a part of a batch. Package transform documents it
// and has the operations for its fields Ops and Mix.
type Transform = transform.Transform

// Train returns the usual transform for training: RandomResizedCrop(size) and a horizontal flip
// with probability 1/2, normalised with ImageNet's mean and standard deviation.
func Train(size int) Transform { return transform.Train(size) }

// Eval returns the usual transform for evaluation: Resize(resize) and CenterCrop(size), normalised
// with ImageNet's mean and standard deviation.
func Eval(resize, size int) Transform { return transform.Eval(resize, size) }

// checkList returns an error for options that can't be used with a list.
func (o *Options) checkList() error {
	switch {
	case o.List == "" && !o.ListFormat.IsZero():
		return errors.New("imageloader: Options.ListFormat needs Options.List")
	case o.List == "":
	case o.Columns.RowNames:
		return errors.New("imageloader: Options.Columns.RowNames and Options.List exclude each other")
	case o.ListFormat.Separator != "" && !o.MultiLabel:
		return errors.New("imageloader: Options.ListFormat.Separator needs Options.MultiLabel")
	case o.ListFormat.GroupColumn != "" && o.Part.HeldOut == 0:
		return errors.New("imageloader: Options.ListFormat.GroupColumn is for Options.Part.HeldOut, which is 0")
	case o.WebDataset:
		return fmt.Errorf("imageloader: Options.List and Options.WebDataset exclude each other: labels " +
			"are those of the list")
	case o.Masks.masked():
		return fmt.Errorf("imageloader: Options.List and Options.Masks exclude each other: an image with " +
			"a mask has no label")
	}
	return nil
}

// batchSize is the one Options field that changes a batch and yet may differ between a state and
// the loader that restores it. It may differ only if World differs too.
const (
	batchSize    = "BatchSize"
	maxBatchSize = 1 << 24
)

// newRules returns the rules that classify samples as good or bad.
func newRules(path string, o *Options) sample.Rules {
	return sample.Rules{File: archive.Shown(path), MaxBytes: o.MaxSampleBytes, MaxPixels: o.MaxPixels}
}
