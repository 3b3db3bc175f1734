package decode

import (
	"context"
	"runtime"
	"sync"
	"unsafe"

	"github.com/torchstream/torchstream/internal/decodeplan"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// DecodePlans is [Decoder.Decode] for a consumer that decodes images itself: package serve, on a
// GPU. An image with a plan in plans.Rows has undefined pixels in dst; the plan describes those of
// Decode, to the bit. All other images, the errors and the waiting are as Decode's. An image has a
// plan if it is a baseline JPEG without damage in its headers, if no operation of the transform
// needs the host, and if the plan has room in plans.Memory. The plan has no entry points, so that
// the consumer finds damage in the rest of the file: it calls [Decoder.DecodeRow] then.
//
// Images beyond len(plans.Rows) have no plans. With Options.Planar no image has one. Each of
// Options.Workers keeps up to 4 MiB for plans.
func (d *Decoder) DecodePlans(ctx context.Context, dst []byte, plans *decodeplan.Plans, images ...[]byte) error {
	clear(plans.Rows)
	plans.Used = 0
	return d.decodeInto(ctx, dst, &planning{plans: plans}, images)
}

// DecodeRow decodes an image as Decode does image number row of a call: with the same random
// numbers and limits, and that number in its error. dst has [Decoder.Bytes] bytes.
func (d *Decoder) DecodeRow(ctx context.Context, dst []byte, row int, image []byte) error {
	defer runtime.KeepAlive(d)
	if err := d.room(dst, 1); err != nil {
		return err
	}
	return together([]error{d.pool.decode(ctx, row, image, dst, nil)})
}

// planning hands out the memory for the plans of a call.
type planning struct {
	plans *decodeplan.Plans
	mu    sync.Mutex // held while plans.Used changes
}

// put copies the plan of image i into the memory. It returns false if there is no room.
func (t *planning) put(i int, plan []byte) bool {
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
	return fits
}

// keptPlan is the size in bytes up to which a worker keeps its memory for plans.
const keptPlan = 4 << 20

// plan plans image i of a call by the worker's geometry, and by what its augmenter has drawn. It
// returns false if the host has to decode the image; then the host also judges it.
func (w *worker) plan(i int, data []byte, to *planning) bool {
	if to == nil || i >= len(to.plans.Rows) || w.info.Format != imagecapi.JPEG || w.info.Progressive {
		return false
	}
	var ops []imagecapi.AugmentOp
	if w.augmenter != nil {
		var ok bool
		if ops, ok = w.augmenter.Operations(); !ok {
			return false
		}
	}
	for {
		n, err := w.d.PlanAugmented(data, &w.geometry, nil, nil, ops, w.planned)
		if err != nil || n == 0 || n > len(to.plans.Memory) {
			return false
		}
		if n <= len(w.planned) {
			put := to.put(i, w.planned[:n])
			if len(w.planned) > keptPlan {
				w.planned = nil
			}
			return put
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
