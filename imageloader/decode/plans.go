package decode

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"sync"
	"unsafe"

	"github.com/torchstream/torchstream/internal/decodeplan"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// Plan writes plans of images for a consumer that decodes them itself: package serve, on a GPU. It
// is not part of the API: only packages of this module can make its argument, and nil is an error.
//
// A plan, in plans.Rows, describes exactly the pixels that Decode would write. An image gets a plan
// if it is a baseline JPEG within the limits and without damage in its headers, if no operation of
// the transform needs the host, and if there is room in plans.Memory and plans.Rows. With
// Options.Planar no image gets a plan. The plan has no entry points, so the consumer itself finds
// damage in the rest of the file. [Decoder.DecodeRows] decodes the images without a plan, including
// the images at fault, and the images that the consumer cannot decode.
//
// Plan waits for Workers, but not for MaxMemory. Each worker keeps up to 4 MiB for plans. Errors
// are faults of the machine or the program, or the end of ctx.
func (d *Decoder) Plan(ctx context.Context, plans *decodeplan.Plans, images ...[]byte) error {
	defer runtime.KeepAlive(d)
	if plans == nil {
		return errors.New("decode: Plan is for packages of torchstream, and has no plans to write to: use Decode")
	}
	clear(plans.Rows)
	plans.Used = 0
	p, to := d.pool, &planning{plans: plans}
	if p.o.Planar {
		return nil
	}
	n := min(len(images), len(plans.Rows))
	err := p.each(ctx, n, func(ctx context.Context, i int) error { return p.planImage(ctx, i, images[i], to) })
	var faults Errors
	if errors.As(err, &faults) {
		return nil
	}
	return err
}

// planImage makes the plan of image i of a call, if possible.
func (p *pool) planImage(ctx context.Context, i int, data []byte, to *planning) error {
	return p.open(ctx, data, func(w *worker) (int64, error) {
		if _, err := p.need(&w.info, math.MaxInt); err != nil {
			return 0, err
		}
		if err := w.draw(p, i); err != nil {
			return 0, err
		}
		w.plan(i, data, to)
		return 0, nil
	})
}

// DecodeRows decodes images[row] for each of rows. It uses the same part of dst, the same random
// numbers and the same errors as Decode of all images. It leaves the other parts of dst unchanged.
// It fails before it decodes anything if a row is repeated or is not an image's number.
func (d *Decoder) DecodeRows(ctx context.Context, dst []byte, rows []int, images [][]byte) error {
	defer runtime.KeepAlive(d)
	if err := d.room(dst, len(images)); err != nil {
		return err
	}
	for _, row := range rows {
		if row < 0 || row >= len(images) {
			return fmt.Errorf("decode: DecodeRows of row %d: the images are %d, from row 0 on", row, len(images))
		}
	}
	p := d.pool
	return p.each(ctx, len(rows), func(ctx context.Context, i int) error {
		row := rows[i]
		return p.decode(ctx, row, images[row], dst[row*p.row:][:p.row])
	})
}

// planning hands out the memory for the plans of a call.
type planning struct {
	plans *decodeplan.Plans
	mu    sync.Mutex // guards plans.Used
}

// put copies the plan of image i to the memory, if there is room.
func (t *planning) put(i int, plan []byte) {
	t.mu.Lock()
	at := t.plans.Used
	fits := len(plan) <= len(t.plans.Memory)-at
	if fits {
		t.plans.Used = min(at+decodeplan.Aligned(len(plan)), len(t.plans.Memory))
	}
	t.mu.Unlock()
	if fits {
		copy(t.plans.Memory[at:], plan)
		t.plans.Rows[i] = decodeplan.Row{At: at, Bytes: len(plan)}
	}
}

// keptPlan is the maximum size in bytes of the memory for plans that a worker keeps.
const keptPlan = 4 << 20

// plan makes the plan of image i of a call, from the worker's geometry and the drawn operations. If
// an image gets no plan, the host decodes it and also checks it for faults.
func (w *worker) plan(i int, data []byte, to *planning) {
	if w.info.Format != imagecapi.JPEG || w.info.Progressive {
		return
	}
	var ops []imagecapi.AugmentOp
	if w.augmenter != nil {
		var ok bool
		if ops, ok = w.augmenter.Operations(); !ok {
			return
		}
	}
	for {
		n, err := w.d.PlanAugmented(data, &w.geometry, nil, nil, ops, w.planned)
		if err != nil || n == 0 || n > len(to.plans.Memory) {
			return
		}
		if n <= len(w.planned) {
			to.put(i, w.planned[:n])
			if len(w.planned) > keptPlan {
				w.planned = nil
			}
			return
		}
		w.planned = aligned(n + n/4)
	}
}

// aligned returns n bytes with the alignment of a plan.
func aligned(n int) []byte {
	memory := make([]byte, n+decodeplan.Align)
	skip := -uintptr(unsafe.Pointer(unsafe.SliceData(memory))) % decodeplan.Align
	return memory[skip:][:n:n]
}
