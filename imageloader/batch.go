package imageloader

import (
	"encoding/binary"
	"math"

	"github.com/torchstream/torchstream/imageloader/internal/box"
	"github.com/torchstream/torchstream/imageloader/internal/devplan"
	"github.com/torchstream/torchstream/imageloader/internal/index"
	"github.com/torchstream/torchstream/imageloader/internal/sample"
)

// Sample identifies a row of a batch. It has the fields
//
//	Name  string // the member's path in the archive
//	Index int    // position among the samples of the archive
//	Label int    // number of the class; 0 with Options.Masks, Boxes, MultiLabel or Unlabelled
type Sample = sample.Sample

// Batch is one batch of Epoch, with pixels in ordinary memory. A batch is valid until the next
// iteration, or until the loop has run to its end: another batch may then reuse its memory. If
// break, return or a panic leaves the loop early, the batch of that iteration stays valid.
type Batch struct {
	N      int     // number of samples: BatchSize, or fewer in the last batch
	Images []byte  // [N, Size, Size, 3]: rows from the top, red, green, blue; not normalised
	Labels []int64 // [N]: Sample.Label of the samples, before mixing
	Masks  []byte  // [N, Size, Size] of Options.Masks.DType, little endian; nil without masks
	Boxes  [][]Box // [N]: the boxes of each sample; nil without Options.Boxes. The program may keep them
	// Labels as vectors, one for each sample: [N, classes] with Transform.Mix or
	// Options.MultiLabel, [N, TargetWidth] with Options.Target, otherwise nil.
	Soft    []float32
	Samples []Sample // [N]; the program may keep them
	State   State    // position after this batch, for Loader.Restore; the program may keep it
}

// Box is a bounding box in a transformed image: its edges, in pixels from the left and the upper
// edge of the image, and its label.
type Box struct {
	Left, Top, Right, Bottom float32
	Label                    int
}

// readBoxes returns the boxes of n samples from the rows of a batch.
func readBoxes(rows []byte, n int) [][]Box {
	all := make([][]Box, n)
	for i := range all {
		sample := rows[len(rows)/n*i : len(rows)/n*(i+1)]
		for ; len(sample) > 0; sample = sample[4*box.Numbers:] {
			var v [box.Numbers]float32
			for k := range v {
				v[k] = math.Float32frombits(binary.LittleEndian.Uint32(sample[4*k:]))
			}
			if v[4] == box.NoBox {
				break
			}
			all[i] = append(all[i], Box{v[0], v[1], v[2], v[3], int(v[4])})
		}
	}
	return all
}

// Info describes a batch that Fill has produced: see imagefeed.Batch. A prefetcher passes it to its
// consumer as Batch.Info.
type Info struct {
	Samples []Sample // one for each row
	State   State    // position after this batch, for Loader.Restore

	known *index.Index
	redos []devplan.Redo // one for each row: how DecodeRow decodes the row again
}
