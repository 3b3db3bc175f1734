package imageloader

import (
	"github.com/torchstream/torchstream/imageloader/internal/devplan"
	"github.com/torchstream/torchstream/imageloader/internal/index"
	"github.com/torchstream/torchstream/imageloader/internal/sample"
)

// Sample identifies a row of a batch. It has the fields
//
//	Name  string // of the archive's member
//	Index int    // its position among the samples of the archive
//	Label int    // 0 with Options.Masks
type Sample = sample.Sample

// Batch is a batch of Epoch, with pixels in ordinary memory. It is valid until the next iteration
// or the end of the loop. After that another batch may use its memory. If the loop ends by break,
// return or a panic, its last batch stays valid.
type Batch struct {
	N      int     // number of samples: BatchSize, or fewer in the last batch
	Images []byte  // [N, Size, Size, 3]: rows from the top, red, green, blue; not normalised
	Labels []int64 // [N]: labels of the samples before mixing; 0 with Options.Masks
	Masks  []byte  // [N, Size, Size] of Options.Masks.DType, little endian; nil without masks
	// [N, classes]: the labels of mixed images; with Options.Target [N, TargetWidth], with
	// Options.MultiLabel [N, classes]; otherwise nil
	Soft    []float32
	Samples []Sample // [N]; the program may keep them
	State   State    // position after this batch, for Loader.Restore; the program may keep it
}

// Info travels with a batch through a prefetcher, as its Batch.Info.
type Info struct {
	Samples []Sample // one for each row
	State   State    // position after this batch, for Loader.Restore

	known *index.Index
	redos []devplan.Redo // one for each row, for DecodeRow
}
