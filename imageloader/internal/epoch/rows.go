package epoch

import (
	"fmt"

	"github.com/torchstream/torchstream/imageloader/internal/devplan"
	"github.com/torchstream/torchstream/imageloader/internal/sample"
	"github.com/torchstream/torchstream/internal/assembly"
	"github.com/torchstream/torchstream/internal/decodeplan"
)

type (
	batches = assembly.Assembly[sample.Sample, *rows]
	ready   = assembly.Ready[sample.Sample, *rows]
)

// Outcome is the result of decoding a sample. The error of a Bad sample is a *sample.Error. Fatal
// means that the archive cannot be read, or that no image can be decoded.
type Outcome = assembly.Outcome

// The outcomes.
const (
	Good  = assembly.Good
	Bad   = assembly.Bad
	Fatal = assembly.Fatal
)

// newAssembly returns the assembly of a pass.
func newAssembly(c *Config, wanted int) *batches {
	return assembly.New[sample.Sample, *rows](assembly.Config{
		Size: c.Batch.Size(), DropLast: c.Batch.Share.DropLast, Policy: c.Policy.BadSamples, Name: "imageloader",
		Fatal: func(bad error) error { return sample.Fatal{Bad: bad.(*sample.Error)} },
	}, wanted)
}

// rows is the lent memory of a batch.
type rows struct {
	images, labels         []byte           // labels, masks, boxes or targets of all rows
	imageBytes, labelBytes int              // of a row; labelBytes is 0 if labels are written when the batch is complete
	staging                *devplan.Staging // nil without plans
	scratch                []byte
}

// newRows returns the rows of a lent slot.
func newRows(c *Config, lent decodeplan.Slot) (*rows, error) {
	size := c.Batch.Size()
	images, labels, what := size*c.Batch.imageBytes(), size*c.Labels.Bytes(), "labels"
	r := &rows{imageBytes: c.Batch.imageBytes()}
	if c.Labels.ByWorkers() {
		r.labelBytes, what = c.Labels.Bytes(), "masks, boxes or targets"
	}
	if len(lent.Images) < images || len(lent.Labels) < labels {
		return nil, fmt.Errorf("imageloader: the lent slot has %d and %d bytes, a batch needs %d for images and %d for %s",
			len(lent.Images), len(lent.Labels), images, labels, what)
	}
	r.images, r.labels = lent.Images[:images], lent.Labels[:labels]
	var err error
	r.staging, err = devplan.NewStaging(lent.Plans, size)
	return r, err
}

// image returns the memory of a row.
func (r *rows) image(row int) []byte { return at(r.images, row, r.imageBytes) }

// label returns the memory of a label that the sample's worker writes. It is empty if labels are
// written when the batch is complete.
func (r *rows) label(row int) []byte { return at(r.labels, row, r.labelBytes) }

func at(memory []byte, row, bytes int) []byte {
	return memory[row*bytes : (row+1)*bytes : (row+1)*bytes]
}

// Exchange implements assembly.Memory.
func (r *rows) Exchange(row int, from *rows, fromRow int, both bool) {
	r.exchange(r.image(row), from.image(fromRow), both)
	r.exchange(r.label(row), from.label(fromRow), both)
	devplan.Exchange(r.staging, row, from.staging, fromRow, both)
}

// exchange overwrites the bytes of to with those of from. If both is set, it swaps them instead.
func (r *rows) exchange(to, from []byte, both bool) {
	if both {
		r.scratch = append(r.scratch[:0], to...)
	}
	copy(to, from)
	if both {
		copy(from, r.scratch)
	}
}

// Substitute implements assembly.Memory.
func (r *rows) Substitute(row, good int) {
	copy(r.image(row), r.image(good))
	copy(r.label(row), r.label(good))
	if r.staging != nil {
		r.staging.Take(row, r.staging, good)
		r.staging.Rows[row].Redo.Substitute = true
	}
}

// putLabel writes label as an int64.
func putLabel(p []byte, label int) {
	v := uint64(label)
	_ = p[7]
	for i := range 8 { // little endian, the byte order of x86-64
		p[i] = byte(v >> (8 * i))
	}
}
