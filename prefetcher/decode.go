package prefetcher

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/internal/decodeplan"
	"github.com/torchstream/torchstream/tensor"
	"github.com/torchstream/torchstream/torch"
)

// Decode selects where images are decoded: Options.Decode. The batches have the same bits on each
// choice, and the same samples are bad.
type Decode int

const (
	// Host decodes in the source's workers.
	Host Decode = iota
	// Auto decodes on the device if that is a GPU and the source can leave images to it. Otherwise
	// it is Host.
	Auto
	// Device is Auto, but New returns an error where Auto would decode as Host.
	Device
)

// String returns the constant's name.
func (d Decode) String() string {
	switch d {
	case Host:
		return "Host"
	case Auto:
		return "Auto"
	case Device:
		return "Device"
	}
	return fmt.Sprintf("Decode(%d)", int(d))
}

// planner is a Source that can leave the decoding of images to the prefetcher: imageloader.Loader.
// It is a Describer whose field "images" needs work.
type planner interface {
	Describer
	// PlanBytes returns the size of a slot's memory for plans, or an error that says why there are
	// none.
	PlanBytes() (int, error)
	// FillPlans is Fill, with memory for plans beside each slot.
	FillPlans(ctx context.Context, epoch int, lend func(context.Context) ([][]byte, *decodeplan.Plans, error), deliver func(n int, info any) error) error
	// DecodeRow writes the pixels of a row of a batch, which it decodes on the host.
	DecodeRow(ctx context.Context, info any, row int, dst []byte) error
}

// decoding is the state of decoding on a device that does not depend on the device. Only the ring's
// goroutine uses it, except for plans, which belong to the slots that are lent.
type decoding struct {
	source planner
	images int           // the field
	finish tensor.Finish // of the field
	row    int           // bytes of a row's pixels
	bytes  int           // of a slot's memory for plans
	head   int           // bytes that a run of a decoder writes in front of the plans

	plans []decodeplan.Plans // by host slot
	rows  [][]int            // by device slot: the row of each image that the device was to decode
	flags [][]int32          // by device slot, for each of them: not 0 if the host must decode it

	request []capi.GPUDecodeImage // of the batch that is decoded next; reused

	decoded, again, memory atomic.Int64 // see Stats
}

// maxDecoded is the maximum of max_images of ts_gpu_decoder_new.
const maxDecoded = 65535

// newDecoding returns nil if the host decodes, for the reason in err.
func newDecoding(source Source, s *slots) (*decoding, error) {
	p, ok := source.(planner)
	if !ok {
		return nil, errors.New("the source does not plan images: imageloader does")
	}
	bytes, err := p.PlanBytes()
	if err != nil {
		return nil, err
	}
	if s.batch > maxDecoded {
		return nil, fmt.Errorf("a batch has %d images, and a GPU decodes at most %d at once", s.batch, maxDecoded)
	}
	images := s.field("images")
	if images < 0 || !s.work[images] {
		return nil, errors.New("the source has no field \"images\" that needs a finish")
	}
	return &decoding{source: p, images: images, finish: p.Finishes()[images], row: int(s.fields[images].Bytes()), bytes: bytes,
		head: capi.GPUDecoderHeadBytes(int(s.batch))}, nil
}

// fill runs an epoch of the source.
func (d *decoding) fill(ctx context.Context, epoch int, s *slots, lend func(context.Context) (int, error), deliver func(int, any) error) error {
	return d.source.FillPlans(ctx, epoch, func(ctx context.Context) ([][]byte, *decodeplan.Plans, error) {
		k, err := lend(ctx)
		if err != nil {
			return nil, nil, public(err)
		}
		return s.host[k].bytes, &d.plans[k], nil
	}, deliver)
}

// planned notes which of the first n rows of a host slot the device decodes into a device slot. use
// gets each of them in order.
func (d *decoding) planned(slot, host, n int, use func(row, plan int)) {
	d.rows[slot] = d.rows[slot][:0]
	for row, r := range d.plans[host].Rows[:n] {
		if r.Bytes > 0 {
			d.rows[slot] = append(d.rows[slot], row)
			use(row, r.At)
		}
	}
	d.decoded.Add(int64(len(d.rows[slot])))
}

// requests sets request to the images of the first n rows of a host slot that the device decodes
// into a device slot. The results of a run are rows of pixels, one for each row of the batch.
func (d *decoding) requests(slot, host, n int) {
	d.request = d.request[:0]
	d.planned(slot, host, n, func(row, plan int) {
		d.request = append(d.request, capi.GPUDecodeImage{Plan: uintptr(d.head + plan), Result: uintptr(row * d.row)})
	})
}

// hostRuns calls use with each run of rows whose pixels the source has written.
func (d *decoding) hostRuns(slot, n int, use func(first, rows int) error) error {
	first := 0
	for i := 0; i <= len(d.rows[slot]); i++ {
		end := n
		if i < len(d.rows[slot]) {
			end = d.rows[slot][i]
		}
		if end > first {
			if err := use(first, end-first); err != nil {
				return err
			}
		}
		first = end + 1
	}
	return nil
}

// mend decodes the flagged images of a slot on the host, and hands their pixels to put, which may
// not keep them. The flags must have arrived. It reports whether there were any. bad is an error of
// the source, err one of put.
func (d *decoding) mend(ctx context.Context, slot int, info any, pixels []byte, put func(row int) error) (mended bool, bad, err error) {
	for i, row := range d.rows[slot] {
		if d.flags[slot][i] == 0 {
			continue
		}
		d.again.Add(1)
		if err := d.source.DecodeRow(ctx, info, row, pixels); err != nil {
			return mended, fmt.Errorf("prefetcher: image %d of a batch, which the device could not decode: %w", row, err), nil
		}
		mended = true
		if err := put(row); err != nil {
			return mended, nil, err
		}
	}
	return mended, nil, nil
}

// finishRow enqueues the finish of one image, src, into a row of a batch.
func (d *decoding) finishRow(batch *torch.Tensor, row int, src *torch.Tensor) error {
	dst := batch.Narrow(0, int64(row), 1)
	defer dst.Close()
	if err := dst.Err(); err != nil {
		return err
	}
	return finishField(dst, src, d.finish)
}
