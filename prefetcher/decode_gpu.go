package prefetcher

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
	"unsafe"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/internal/decodeplan"
	"github.com/torchstream/torchstream/prefetcher/internal/ring"
	"github.com/torchstream/torchstream/torch"
)

// decoders is the number of decoders that take turns: one copies a batch's plans while the other
// decodes.
const decoders = 2

// Sizes of a decoder's memory for coefficients, samples and columns, in bytes. minScratch suffices
// for the largest plan (kMaxPlanScratch of cshim/src/jpeg/plan.h). A batch that needs more than a
// decoder has is decoded in parts.
const (
	scratchPerImage = 2 << 20
	minScratch      = 256 << 20
	maxScratch      = 512 << 20
)

// gpuDecoding decodes batches on a GPU, with decoders that take turns. Each decoder has a separate
// stream of the lowest priority. P waits for the decoded images before it copies the other rows and
// enqueues the finish. The decoder's stream waits for that finish before the decoder's next batch.
type gpuDecoding struct {
	*decoding
	units     [decoders]gpuDecoder
	turn      int // of the unit that has the batch between Copy and Finish
	staging   []*cuda.Pinned
	flagged   *cuda.Pinned
	inflating *cuda.Pinned   // results of inflating; nil if the source inflates
	entered   []*cuda.Pinned // found; by device slot
	arrived   []*cuda.Event  // by device slot: its images are decoded, and their flags are on the host

	pinned           *cuda.Pinned  // pixels of an image that the host has decoded
	pixels, uploaded *torch.Tensor // pinned, as a tensor; its copy on the device
}

// gpuDecoder is one of the decoders, with its results.
type gpuDecoder struct {
	stream   *cuda.OwnedStream
	decoder  *capi.GPUDecoder
	staged   *torch.Tensor     // images of a batch before the finish
	to       [][]*torch.Tensor // gpuDevice.copyTo with these images
	finished *cuda.Event       // recorded on P: the finish has read staged
}

// openDecoding allocates the decoders and their memory. P is current.
func (d *gpuDevice) openDecoding() error {
	g := &gpuDecoding{decoding: d.decode}
	d.gpu = g
	batch, field := int(d.batch), d.fields[g.images]
	for range d.hosts {
		p, err := cuda.NewPinned(g.head + g.bytes)
		if err != nil {
			return err
		}
		g.staging = append(g.staging, p)
		g.plans = append(g.plans, decodeplan.Plans{Memory: p.Bytes()[g.head:], Rows: make([]decodeplan.Row, batch), Rooms: g.rooms})
	}
	var err error
	if g.flagged, err = cuda.NewPinned(4 * batch * d.depth); err != nil {
		return err
	}
	flags := unsafe.Slice((*int32)(unsafe.Pointer(unsafe.SliceData(g.flagged.Bytes()))), batch*d.depth)
	var results []capi.GPUInflateResult
	if g.rooms > 0 {
		if g.inflating, err = cuda.NewPinned(int(unsafe.Sizeof(results[0])) * batch * d.depth); err != nil {
			return err
		}
		results = unsafe.Slice((*capi.GPUInflateResult)(unsafe.Pointer(unsafe.SliceData(g.inflating.Bytes()))), batch*d.depth)
	}
	for j := range d.depth {
		e, err := cuda.NewEvent(cuda.EventOptions{})
		if err != nil {
			return err
		}
		g.arrived = append(g.arrived, e)
		if err := e.Record(d.p); err != nil {
			return err
		}
		g.rows = append(g.rows, make([]int, 0, batch))
		g.flags = append(g.flags, flags[j*batch:][:batch:batch])
		g.members = append(g.members, nil)
		g.finds, g.found = append(g.finds, nil), append(g.found, nil)
		if g.entries > 0 {
			p, err := cuda.NewPinned(g.entries)
			if err != nil {
				return err
			}
			g.entered = append(g.entered, p)
			g.found[j] = p.Bytes()
		}
		if g.rooms > 0 {
			g.inflated = append(g.inflated, results[j*batch:][:batch:batch])
		}
	}
	if g.pinned, err = cuda.NewPinned(g.row); err != nil {
		return err
	}
	if g.pixels, err = d.own(torch.FromMemory(g.pinned.Bytes(), field.DType, append([]int64{1}, field.Shape...)...)); err != nil {
		return err
	}
	if g.uploaded, err = d.own(torch.EmptySpec(d.device, field, 1)); err != nil {
		return err
	}
	scratch := min(max(scratchPerImage*batch, minScratch), maxScratch)
	for i := range g.units {
		u := &g.units[i]
		// Priority 0 is the lowest: work on a stream of higher priority runs first. The streams
		// share the same bounded set of multiprocessors.
		if u.stream, err = cuda.NewOwnedStream(d.device, cuda.StreamOptions{MaxMultiprocessors: d.multiprocessors}); err != nil {
			return fmt.Errorf("a stream to decode on: %w", err)
		}
		g.multiprocessors = u.stream.Multiprocessors()
		if u.decoder, err = g.newDecoder(int32(d.device), batch, scratch); err != nil {
			return err
		}
		if u.staged, err = d.own(torch.EmptySpec(d.device, field, d.batch)); err != nil {
			return err
		}
		g.memory.Add(int64(g.head+g.bytes+g.rooms+scratch+4*batch) + d.batch*field.Bytes())
		for _, to := range d.copyTo {
			to = slices.Clone(to)
			to[g.images] = u.staged
			u.to = append(u.to, to)
		}
		if u.finished, err = cuda.NewEvent(cuda.EventOptions{}); err != nil {
			return err
		}
		// P used the memory until now.
		if err := u.finished.Record(d.p); err != nil {
			return err
		}
	}
	g.memory.Add(int64(g.row))
	return nil
}

// close frees everything that slots does not own, after all work on P is done.
func (g *gpuDecoding) close() error {
	var errs []error
	for i := range g.units {
		u := &g.units[i]
		if u.stream != nil {
			errs = append(errs, u.stream.Synchronize())
		}
		if u.decoder != nil {
			capi.FreeGPUDecoder(u.decoder)
		}
		errs = append(errs, u.finished.Close(), u.stream.Close())
	}
	for _, e := range g.arrived {
		errs = append(errs, e.Close())
	}
	for _, p := range slices.Concat(g.staging, g.entered, []*cuda.Pinned{g.flagged, g.inflating, g.pinned}) {
		errs = append(errs, p.Close())
	}
	return errors.Join(errs...)
}

// copy enqueues the decoding of a batch's planned images and the copies of all other data, and then
// records copied. P has already waited for the slot.
func (g *gpuDecoding) copy(d *gpuDevice, slot, host, n int, copied *cuda.Event) error {
	g.turn = (g.turn + 1) % decoders
	u := &g.units[g.turn]
	g.requests(slot, host, n)
	if len(g.request) > 0 {
		// An epoch that was left early may still have a batch on the other decoder. That batch
		// writes the flags of the same slot.
		for _, e := range []*cuda.Event{u.finished, g.arrived[slot]} {
			if err := u.stream.WaitEvent(e); err != nil {
				return err
			}
		}
		staging := g.staging[host].Bytes()[:g.head+g.plans[host].Used]
		if err := g.run(u.decoder, slot, staging, u.staged, u.stream.CAPI()); err != nil {
			return err
		}
		d.slots.bytes.Add(int64(len(staging)))
		if err := g.arrived[slot].Record(u.stream.Stream); err != nil {
			return err
		}
		// copied is recorded after this wait, so it also covers the copy of the plans.
		if err := d.p.WaitEvent(g.arrived[slot]); err != nil {
			return err
		}
	}
	return d.rows(n, func(lists ...[]*torch.Tensor) error {
		return g.copyRest(d, slot, n, lists[0], lists[1], copied)
	}, u.to[slot], d.host[host].tensors)
}

// copyRest copies n rows of dst and src, except for images that the device decodes.
func (g *gpuDecoding) copyRest(d *gpuDevice, slot, n int, dst, src []*torch.Tensor, copied *cuda.Event) error {
	var to, from, views []*torch.Tensor
	defer func() {
		for _, v := range views {
			v.Close()
		}
	}()
	at := g.images
	for i := range dst {
		if i != at {
			to, from = append(to, dst[i]), append(from, src[i])
			d.slots.bytes.Add(int64(n) * d.fields[i].Bytes())
		}
	}
	err := g.hostRuns(slot, n, func(first, rows int) error {
		d.slots.bytes.Add(int64(rows * g.row))
		if rows == n {
			to, from = append(to, dst[at]), append(from, src[at])
			return nil
		}
		for _, t := range []*torch.Tensor{dst[at], src[at]} {
			v := t.Narrow(0, int64(first), int64(rows))
			views = append(views, v)
			if err := v.Err(); err != nil {
				return err
			}
		}
		to, from = append(to, views[len(views)-2]), append(from, views[len(views)-1])
		return nil
	})
	if err != nil {
		return err
	}
	if len(to) == 0 {
		return copied.Record(d.p)
	}
	return torch.CopyBatch(d.p, nil, to, from, copied)
}

// check implements gpuDevice.Check.
func (g *gpuDecoding) check(ctx context.Context, d *gpuDevice, slot int, info any, busy func() bool) (ring.Checked, error, error) {
	const shortest, longest = 10 * time.Microsecond, 50 * time.Microsecond
	for pause := shortest; len(g.rows[slot]) > 0; pause = min(2*pause, longest) {
		done, err := g.arrived[slot].Query()
		if err != nil {
			return ring.Unchecked, nil, err
		}
		if done {
			break
		}
		if busy() {
			return ring.Unchecked, nil, nil
		}
		time.Sleep(pause)
	}
	mended, bad, err := g.mend(ctx, slot, info, g.pinned.Bytes(), func(row int) error {
		if err := torch.CopyBatch(d.p, nil, []*torch.Tensor{g.uploaded}, []*torch.Tensor{g.pixels}, nil); err != nil {
			return err
		}
		if err := g.finishRow(d.out[slot][g.images], row, g.uploaded); err != nil {
			return err
		}
		return d.p.Synchronize() // the next image uses the same memory; this is no steady state
	})
	if mended {
		return ring.Mended, bad, err
	}
	return ring.Good, bad, err
}
