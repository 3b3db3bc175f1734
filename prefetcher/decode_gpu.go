package prefetcher

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"
	"unsafe"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/internal/decodeplan"
	"github.com/torchstream/torchstream/internal/system"
	"github.com/torchstream/torchstream/prefetcher/internal/ring"
	"github.com/torchstream/torchstream/torch"
)

// decoders is the number of decoders. They take turns: one copies a batch's plans while the other
// decodes.
const decoders = 2

// Sizes of a decoder's memory for coefficients, samples and columns, in bytes. minScratch is enough
// for the largest plan (kMaxPlanScratch in cshim/src/jpeg/plan.h). A batch that needs more memory
// than the decoder has is decoded in parts.
const (
	scratchPerImage = 1 << 20
	minScratch      = 256 << 20
	maxScratch      = 512 << 20
)

// gpuDecoding decodes batches on a GPU, with decoders that take turns. Each decoder has a separate
// stream with the lowest priority. P waits for the decoded images before it copies the other rows
// and runs the finish. The decoder's stream waits for that finish before it decodes its next batch.
type gpuDecoding struct {
	*decoding
	units   [decoders]gpuDecoder
	turn    int           // index of the decoder that has the batch between Copy and Finish
	staging [][]byte      // by host slot: pinned memory for the plans, including the head
	arrived []*cuda.Event // by device slot: its images are decoded and their flags are on the host
	mended  imageUpload   // for the images that the host decodes again
	poll    poller        // of check
	release func()        // ends the hold on the source's files, which the decoders read
}

// imageUpload copies one image at a time from pinned memory to the device.
type imageUpload struct {
	pixels       []byte // memory of host
	host, device *torch.Tensor
}

// open allocates the memory for an image that spec describes. The slots own the memory.
func (u *imageUpload) open(s *slots, device cuda.Device, spec torch.Spec) error {
	pinned, err := s.pin(int(spec.Bytes()))
	if err != nil {
		return err
	}
	u.pixels = pinned.Bytes()
	if u.host, err = s.own(torch.FromMemory(u.pixels, spec.DType, append([]int64{1}, spec.Shape...)...)); err != nil {
		return err
	}
	u.device, err = s.own(torch.EmptySpec(device, spec, 1))
	return err
}

// copy queues the copy of pixels on the stream. pixels must not change until the copy is complete.
func (u *imageUpload) copy(on cuda.Stream) error {
	return torch.CopyBatch(on, nil, []*torch.Tensor{u.device}, []*torch.Tensor{u.host}, nil)
}

// gpuDecoder is one of the decoders, with its results.
type gpuDecoder struct {
	stream   *cuda.OwnedStream
	decoder  *capi.GPUDecoder
	staged   *torch.Tensor     // images of a batch before the finish
	to       [][]*torch.Tensor // like gpuDevice.copyTo, but with staged for the images
	finished *cuda.Event       // recorded on P after the finish has read staged
}

// openDecoding allocates the decoders and their memory. P is current.
func (d *gpuDevice) openDecoding() error {
	g := &gpuDecoding{decoding: d.decode}
	g.release = g.source.Hold()
	d.gpu = g
	var register func([]byte) (func() error, error) // nil: the host reads all files
	if d.options.MaxMappedBytes >= 0 {
		register = (&fileRegistrar{max: d.options.MaxMappedBytes}).register
	}
	batch, field := int(d.batch), d.fields[g.images.index]
	for range d.hosts {
		p, err := d.pin(g.sizes.staging())
		if err != nil {
			return err
		}
		g.staging = append(g.staging, p.Bytes())
		g.plans = append(g.plans,
			decodeplan.Plans{Memory: p.Bytes()[g.sizes.head:], Rows: make([]decodeplan.Row, batch),
				Register: register, Rooms: g.sizes.rooms})
	}
	if err := d.openDecodedSlots(g); err != nil {
		return err
	}
	err := g.mended.open(d.slots, d.options.Device, field)
	if err != nil {
		return err
	}
	scratch := min(max(scratchPerImage*batch, minScratch), maxScratch)
	for i := range g.units {
		u := &g.units[i]
		// Priority 0 is the lowest: work on a stream of higher priority runs first. The streams
		// share the same bounded set of multiprocessors.
		if u.stream, err = cuda.NewOwnedStream(d.options.Device,
			cuda.StreamOptions{MaxMultiprocessors: d.options.DecodeMultiprocessors}); err != nil {
			return fmt.Errorf("a stream to decode on: %w", err)
		}
		g.count.multiprocessors = u.stream.Multiprocessors()
		if u.decoder, err = g.sizes.newDecoder(int32(d.options.Device), batch, scratch); err != nil {
			return err
		}
		if u.staged, err = d.own(torch.EmptySpec(d.options.Device, field, d.batch)); err != nil {
			return err
		}
		g.count.memory.Add(int64(g.sizes.staging()+g.sizes.rooms+scratch+4*batch) + d.batch*field.Bytes())
		for _, to := range d.copyTo {
			to = slices.Clone(to)
			to[g.images.index] = u.staged
			u.to = append(u.to, to)
		}
		if u.finished, err = cuda.NewEvent(cuda.EventOptions{}); err != nil {
			return err
		}
		// P may have used the memory until now.
		if err := u.finished.Record(d.p); err != nil {
			return err
		}
	}
	g.count.memory.Add(int64(g.images.row))
	return nil
}

// openDecodedSlots allocates the state of the device slots. They share the pinned buffers for flags
// and for results of inflating.
func (d *gpuDevice) openDecodedSlots(g *gpuDecoding) error {
	batch := int(d.batch)
	flags, err := pinSlice[int32](d.slots, batch*d.depth)
	if err != nil {
		return err
	}
	var inflated []capi.GPUInflateResult
	if g.sizes.rooms > 0 {
		if inflated, err = pinSlice[capi.GPUInflateResult](d.slots, batch*d.depth); err != nil {
			return err
		}
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
		slot := decodedSlot{rows: make([]int, 0, batch), flags: flags[j*batch:][:batch:batch]}
		if g.sizes.entries > 0 {
			p, err := d.pin(g.sizes.entries)
			if err != nil {
				return err
			}
			slot.found = p.Bytes()
		}
		if g.sizes.rooms > 0 {
			slot.inflated = inflated[j*batch:][:batch:batch]
		}
		g.slots = append(g.slots, slot)
	}
	return nil
}

// fileRegistrar pins parts of files for GPUs.
type fileRegistrar struct {
	max  int64 // Options.MaxMappedBytes
	mu   sync.Mutex
	used int64 // bytes of these parts
}

// register is decodeplan.Plans.Register. Calls run one at a time, so that the parts of this
// prefetcher stay within the limit.
func (r *fileRegistrar) register(memory []byte) (release func() error, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	used, limit := r.used, r.max
	if limit == 0 {
		used, limit = cuda.PinnedBytes(), system.PinnableMemory(os.DirFS("/"))/hostProcesses()
	}
	if used+int64(len(memory)) > limit {
		return nil, fmt.Errorf("%d bytes of memory are pinned, of at most %d (Options.MaxMappedBytes)", used, limit)
	}
	// The driver waits for pages while it holds a lock that other threads of the process need.
	if err := system.ReadPages(memory); err != nil {
		return nil, fmt.Errorf("reading the pages of an archive: %w", err)
	}
	p, err := cuda.RegisterReadOnly(memory)
	if err != nil {
		return nil, err
	}
	r.used += int64(len(memory))
	return func() error {
		err := p.Close()
		if err == nil {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.used -= int64(len(memory))
		}
		return err
	}, nil
}

// hostProcesses returns the number of processes that may use GPUs of this host: torchrun's number,
// or one for each GPU.
func hostProcesses() int64 {
	if n, err := strconv.Atoi(os.Getenv("LOCAL_WORLD_SIZE")); err == nil && n > 0 {
		return int64(n)
	}
	return int64(max(1, cuda.DeviceCount()))
}

// pinSlice returns n elements in pinned memory, which the slots own.
func pinSlice[T any](s *slots, n int) ([]T, error) {
	var element T
	p, err := s.pin(n * int(unsafe.Sizeof(element)))
	if err != nil {
		return nil, err
	}
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(p.Bytes()))), n), nil
}

// close frees everything that does not belong to the slots. All work on P must be complete.
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
	g.release() // after the decoders' streams have been synchronised
	for _, e := range g.arrived {
		errs = append(errs, e.Close())
	}
	return errors.Join(errs...)
}

// copy queues the decoding of a batch's planned images and the copies of all other data, and then
// records copied. P has already waited for the slot.
func (g *gpuDecoding) copy(d *gpuDevice, slot, host, n int, copied *cuda.Event) error {
	g.turn = (g.turn + 1) % decoders
	u := &g.units[g.turn]
	g.requests(slot, host, n)
	if len(g.request.images) > 0 {
		// If the loop has left an epoch early, the other decoder may still be decoding a batch into
		// the same slot and writing the slot's flags.
		for _, e := range []*cuda.Event{u.finished, g.arrived[slot]} {
			if err := u.stream.WaitEvent(e); err != nil {
				return err
			}
		}
		staging := g.staging[host][:g.sizes.head+g.plans[host].Used]
		if err := g.run(u.decoder, slot, staging, u.staged, u.stream.CAPI()); err != nil {
			return err
		}
		d.count.bytes.Add(int64(len(staging)))
		if err := g.arrived[slot].Record(u.stream.Stream); err != nil {
			return err
		}
		// copied is recorded after this wait, so reaching copied also means that the plans have
		// been copied.
		if err := d.p.WaitEvent(g.arrived[slot]); err != nil {
			return err
		}
	}
	return d.rows(n, func(lists ...[]*torch.Tensor) error {
		return g.copyRest(d, slot, n, lists[0], lists[1], copied)
	}, u.to[slot], d.host[host].tensors)
}

// copyRest copies n rows of src to dst, except for images that the device decodes.
func (g *gpuDecoding) copyRest(d *gpuDevice, slot, n int, dst, src []*torch.Tensor, copied *cuda.Event) error {
	var to, from, views []*torch.Tensor
	defer func() {
		for _, v := range views {
			v.Close()
		}
	}()
	at := g.images.index
	for i := range dst {
		if i != at {
			to, from = append(to, dst[i]), append(from, src[i])
			d.count.bytes.Add(int64(n) * d.fields[i].Bytes())
		}
	}
	err := g.slots[slot].hostRuns(n, func(first, rows int) error {
		d.count.bytes.Add(int64(rows * g.images.row))
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
func (g *gpuDecoding) check(ctx context.Context, d *gpuDevice, slot int, info any,
	busy func() bool) (ring.Checked, error, error) {
	const shortest, longest = 10 * time.Microsecond, 50 * time.Microsecond
	defer g.poll.forget()
	for pause, began := shortest, time.Now(); len(g.slots[slot].rows) > 0; pause = min(2*pause, longest) {
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
		g.poll.pause(pause, time.Since(began))
	}
	mended, bad, err := g.mend(ctx, slot, info, g.mended.pixels, func(row int) error {
		if err := g.mended.copy(d.p); err != nil {
			return err
		}
		if err := g.images.finishRow(d.out[slot][g.images.index], row, g.mended.device); err != nil {
			return err
		}
		return d.p.Synchronize() // the next image uses the same memory; speed does not matter in this rare case
	})
	if mended {
		return ring.Mended, bad, err
	}
	return ring.Good, bad, err
}
