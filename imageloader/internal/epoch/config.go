package epoch

import (
	"log/slog"

	"github.com/torchstream/torchstream/imageloader/internal/box"
	"github.com/torchstream/torchstream/imageloader/internal/count"
	"github.com/torchstream/torchstream/imageloader/internal/sample"
	"github.com/torchstream/torchstream/imageloader/transform"
	"github.com/torchstream/torchstream/internal/order"
	"github.com/torchstream/torchstream/tensor"
)

// Config describes the batches of an epoch. It does not change while the epoch runs.
type Config struct {
	Batch   Batch
	Order   Order
	Labels  Labels
	Policy  Policy
	Threads Threads
}

// Batch describes this process's samples, and their conversion to pixels.
type Batch struct {
	Share     order.Share
	Transform *transform.Compiled
	Side      int // rows and columns of an image in a batch
}

// Size is the number of samples in a batch.
func (b *Batch) Size() int { return b.Share.Batch }

// imageBytes is the size of an image in a batch.
func (b *Batch) imageBytes() int { return 3 * b.Side * b.Side }

// Order describes the order of an archive's samples.
type Order struct {
	Kind     order.Kind
	Seed     uint64
	Repeat   int            // rounds over the archive
	PerRound int            // positions in each round; not used before the index is known
	Weights  *order.Weights // for Kind Drawn
	Buffer   Buffer
}

// Buffer limits the shuffle buffer of a stream.
type Buffer struct {
	Samples int
	Bytes   int64 // compressed bytes
}

// positions returns the number of positions in the sequence of an epoch.
func (o *Order) positions(known bool) int {
	if !known {
		return order.Unknown
	}
	return o.PerRound * o.Repeat
}

// LabelKind is the kind of a sample's label.
type LabelKind int

// The kinds.
const (
	Index  LabelKind = iota // the sample's label as an int64
	Soft                    // the probability of each class; the mixer writes them
	Target                  // numbers written by the decoding worker
	Mask                    // the class of each pixel
	Boxes                   // rows of bounding boxes
)

// Labels describes the labels of a batch.
type Labels struct {
	Kind  LabelKind
	Width int // numbers for each sample
	DType tensor.DType
	// Target computes the numbers of a sample, for the kind Target. It gets a slice of zeros.
	Target func(s sample.Sample, numbers []float32) error
	Fill   int        // class of pixels outside the mask, for the kind Mask
	Boxes  box.Config // for the kind Boxes
	BoxSet BoxSet     // for the kind Boxes, if one file has the boxes of all images
}

// BoxSet has the boxes of all samples. Its zero value means that each sample has its own file of
// boxes.
type BoxSet struct {
	*box.Set
	ImageOf func(sample int) int // the number of a sample's image in the set
}

// files is the number of members of a sample.
func (l *Labels) files() int {
	if l.Kind == Mask || l.Kind == Boxes && l.BoxSet.Set == nil {
		return 2
	}
	return 1
}

// Bytes is the size of a sample's label.
func (l *Labels) Bytes() int { return l.Width * l.DType.Size() }

// ByWorkers reports whether the worker that decodes a sample also writes its label. Then the device
// inflates no members.
func (l *Labels) ByWorkers() bool { return l.Kind == Target || l.Kind == Mask || l.Kind == Boxes }

// Policy selects the treatment of samples that cannot be decoded.
type Policy struct {
	BadSamples sample.BadSamplePolicy
	Damaged    sample.DamagePolicy
}

// Env holds the state that a loader's epochs share. It is safe for concurrent use.
type Env struct {
	Rules    *sample.Rules
	Counters *count.Counters
	Log      *slog.Logger
	Codecs   sample.Codecs
}
