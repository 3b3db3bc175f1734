package imageloader

import (
	"github.com/torchstream/torchstream/imageloader/internal/devplan"
	"github.com/torchstream/torchstream/imageloader/internal/index"
	"github.com/torchstream/torchstream/imageloader/internal/sample"
)

// Sample identifies a row of a batch. It has the fields
//
//	Name  string // the member's path in the archive
//	Index int    // position among the samples of the archive
//	Label int    // number of the class; 0 with Options.Masks
type Sample = sample.Sample

// Batch is one batch of Epoch, with pixels in ordinary memory. A batch is valid until the next
// iteration, or until the loop has run to its end: another batch may then reuse its memory. If
// break, return or a panic leaves the loop early, the batch of that iteration stays valid.
type Batch struct {
	N      int     // number of samples: BatchSize, or fewer in the last batch
	Images []byte  // [N, Size, Size, 3]: rows from the top, red, green, blue; not normalised
	Labels []int64 // [N]: labels of the samples before mixing; 0 with Options.Masks
	Masks  []byte  // [N, Size, Size] of Options.Masks.DType, little endian; nil without masks
	// Labels as vectors, one for each sample: [N, classes] with Transform.Mix or
	// Options.MultiLabel, [N, TargetWidth] with Options.Target, otherwise nil.
	Soft    []float32
	Samples []Sample // [N]; the program may keep them
	State   State    // position after this batch, for Loader.Restore; the program may keep it
}

// Info describes a batch that Fill has produced: see imagefeed.Batch. A prefetcher passes it to its
// consumer as Batch.Info.
type Info struct {
	Samples []Sample // one for each row
	State   State    // position after this batch, for Loader.Restore

	known *index.Index
	redos []devplan.Redo // one for each row: how DecodeRow decodes the row again
}
