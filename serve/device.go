package serve

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/imageloader/decode"
	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/internal/decodeplan"
	"github.com/torchstream/torchstream/torch"
)

// The memory limits of a unit. Images that do not fit are decoded on the host.
const (
	maxPlanned = 256      // images per call
	plansBytes = 32 << 20 // decoding plans, which contain the compressed data
	// scratchBytes is the memory for the coefficients, samples and columns of the largest plan
	// (kMaxPlanScratch of cshim/src/jpeg/plan.h)
	scratchBytes = 256 << 20
)

// units is the pool of a GPU's decoders. A call of Batch holds one unit until the GPU has decoded
// the call's images.
type units struct {
	free   chan *unit
	done   chan struct{} // closed by close
	mu     sync.Mutex    // held by put and close
	closed bool
	device atomic.Int64 // bytes of all open units
	pinned atomic.Int64 // pinned host memory of all open units, in bytes
}

// unit decodes the images of one call at a time, on a separate stream. The caller's stream may have
// a backlog, and decoding must not wait for the work of other calls.
type unit struct {
	device  cuda.Device
	stream  *cuda.OwnedStream // nil on the CPU
	decoder *capi.GPUDecoder
	arrived *cuda.Event // the images are decoded, and the flags are on the host
	memory  []*cuda.Pinned
	staging []byte
	plans   decodeplan.Plans // in staging, after the head
	flags   []int32          // per image: not 0 if the host has to decode it
	rows    []int            // rows of the images that the unit decodes
	images  []capi.GPUDecodeImage
	pending bool // nobody has waited for arrived or the stream yet
}

// newUnits makes n units. On the CPU, for tests, the units run the same arithmetic without streams.
func newUnits(device cuda.Device, n int) (*units, error) {
	s := &units{free: make(chan *unit, n), done: make(chan struct{})}
	for range n {
		u, err := newUnit(device)
		if err != nil {
			s.close()
			return nil, err
		}
		s.count(u, 1)
		s.free <- u
	}
	return s, nil
}

// count adds a unit's memory to the total of all units (by is 1) or subtracts it (by is -1).
func (s *units) count(u *unit, by int64) {
	s.device.Add(by * int64(len(u.staging)+scratchBytes+4*maxPlanned))
	s.pinned.Add(by * int64(len(u.staging)+4*maxPlanned))
}

// end closes a unit permanently.
func (s *units) end(u *unit) {
	u.close()
	s.count(u, -1)
}

func newUnit(device cuda.Device) (*unit, error) {
	u := &unit{device: device}
	head := capi.GPUDecoderHeadBytes(maxPlanned)
	if err := u.open(head); err != nil {
		u.close()
		return nil, err
	}
	u.plans = decodeplan.Plans{Memory: u.staging[head:], Rows: make([]decodeplan.Row, maxPlanned)}
	return u, nil
}

func (u *unit) open(head int) (err error) {
	if u.device == cuda.CPU {
		u.staging = make([]byte, head+plansBytes+decodeplan.Align)
		skip := -uintptr(unsafe.Pointer(unsafe.SliceData(u.staging))) % decodeplan.Align
		u.staging = u.staging[skip:][:head+plansBytes]
		u.flags = make([]int32, maxPlanned)
		u.decoder, err = capi.NewGPUDecoder(capi.DeviceCPU, maxPlanned, len(u.staging), scratchBytes)
		return err
	}
	for _, bytes := range []int{head + plansBytes, 4 * maxPlanned} {
		p, err := cuda.NewPinnedNear(u.device, bytes)
		if err != nil {
			return err
		}
		u.memory = append(u.memory, p)
	}
	u.staging = u.memory[0].Bytes()
	u.flags = unsafe.Slice((*int32)(unsafe.Pointer(unsafe.SliceData(u.memory[1].Bytes()))), maxPlanned)
	if u.stream, err = cuda.NewOwnedStream(u.device, cuda.StreamOptions{}); err != nil {
		return err
	}
	if u.arrived, err = cuda.NewEvent(cuda.EventOptions{}); err != nil {
		return err
	}
	// Made on the unit's stream, the decoder has memory of that stream, which needs no
	// synchronisation with other streams' work.
	return cuda.WithStream(u.stream.Stream, func() (err error) {
		u.decoder, err = capi.NewGPUDecoder(int32(u.device), maxPlanned, len(u.staging), scratchBytes)
		return err
	})
}

// close frees the unit's memory. The stream has no work.
func (u *unit) close() {
	if u.decoder != nil {
		capi.FreeGPUDecoder(u.decoder)
	}
	errs := []error{u.arrived.Close(), u.stream.Close()}
	for _, p := range u.memory {
		errs = append(errs, p.Close())
	}
	if err := errors.Join(errs...); err != nil {
		slog.Debug("serve: closing a decoder", "error", err)
	}
}

// close ends the idle units. put ends the units that calls still hold.
func (s *units) close() {
	s.mu.Lock()
	again := s.closed
	s.closed = true
	s.mu.Unlock() // put adds no more units, and u.close calls CUDA
	if again {
		return
	}
	close(s.done)
	for {
		select {
		case u := <-s.free:
			s.end(u)
		default:
			return
		}
	}
}

// take waits for an idle unit.
func (s *units) take(ctx context.Context) (*unit, error) {
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	select {
	case u := <-s.free:
		return u, nil
	case <-s.done:
		return nil, decode.ErrClosed
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// put returns a unit to the pool. The next call reuses the unit's memory, so put first waits for
// work that a failed call left on the stream.
func (s *units) put(u *unit) {
	if u.pending {
		if err := u.stream.Synchronize(); err != nil {
			slog.Debug("serve: waiting for a decoder", "error", err) // the next call returns the same error
		}
		u.pending = false
	}
	s.mu.Lock()
	closed := s.closed
	if !closed {
		s.free <- u // does not block: the channel has room for all units
	}
	s.mu.Unlock()
	if closed {
		s.end(u)
	}
}

// request sets rows and images from the first n rows of plans, skipping rows without a plan. Each
// row of the result has the given number of bytes.
func (u *unit) request(n, bytes int) {
	head := len(u.staging) - len(u.plans.Memory)
	u.rows, u.images = u.rows[:0], u.images[:0]
	for row, r := range u.plans.Rows[:min(n, len(u.plans.Rows))] {
		if r.Bytes > 0 {
			u.rows = append(u.rows, row)
			u.images = append(u.images, capi.GPUDecodeImage{Plan: uintptr(head + r.At), Result: uintptr(row * bytes)})
		}
	}
}

// decode enqueues the decoding of the requested images on the unit's stream, and makes the current
// stream wait for it. It returns the pixels as uint8 of the given shape. Rows that were not
// requested are undefined.
func (u *unit) decode(shape []int64) (*torch.Tensor, error) {
	if u.stream == nil {
		pixels, err := torch.Empty(u.device, torch.Uint8, shape...)
		if err == nil {
			err = u.run(pixels, capi.Stream{Device: capi.DeviceCPU})
		}
		return closeOnError(pixels, err)
	}
	current, err := cuda.GetCurrentCUDAStream(u.device)
	if err != nil {
		return nil, err
	}
	// The pixels' memory belongs to the unit's stream. Memory of the current stream could still be
	// in use by that stream's earlier work.
	var pixels *torch.Tensor
	err = cuda.WithStream(u.stream.Stream, func() (err error) {
		pixels, err = torch.Empty(u.device, torch.Uint8, shape...)
		return err
	})
	if err == nil {
		err = pixels.RecordStream(current)
	}
	if err == nil {
		u.pending = true
		err = u.run(pixels, u.stream.CAPI())
	}
	if err == nil {
		err = u.arrived.Record(u.stream.Stream)
	}
	if err == nil {
		err = current.WaitEvent(u.arrived)
	}
	return closeOnError(pixels, err)
}

// closeOnError returns the tensor, or closes it if err is not nil.
func closeOnError(t *torch.Tensor, err error) (*torch.Tensor, error) {
	if err != nil {
		if t != nil {
			t.Close()
		}
		return nil, err
	}
	return t, nil
}

func (u *unit) run(pixels *torch.Tensor, on capi.Stream) error {
	head := len(u.staging) - len(u.plans.Memory)
	return torch.CAPI("decode", []*torch.Tensor{pixels}, func(results []*capi.Tensor) error {
		return capi.RunGPUDecoder(u.decoder, u.staging[:head+u.plans.Used], u.images, results[0], u.flags, on)
	})
}

// decoded waits until the images are decoded, and returns the rows that the host need not decode.
func (u *unit) decoded() (rows []int, err error) {
	if u.pending {
		if err := u.arrived.Synchronize(); err != nil {
			return nil, err
		}
		u.pending = false
	}
	for i, row := range u.rows {
		if u.flags[i] == 0 {
			rows = append(rows, row)
		}
	}
	return rows, nil
}

// batchOnDevice is Batch with a unit. It returns the unit before the host decodes the remaining
// images, which may take long.
func (d *Decoder) batchOnDevice(ctx context.Context, finish finisher, images [][]byte) (*torch.Tensor, error) {
	there, err := d.decodeThere(ctx, finish, images)
	if err != nil {
		return nil, err
	}
	defer there.close() // queued work may still use the memory: it is reused in stream order
	if len(there.good) == 0 {
		return d.batchOnHost(ctx, finish, images)
	}
	if len(there.good) == len(images) {
		return there.take(), nil
	}
	host, err := d.hostPixels(len(images))
	if err != nil {
		return nil, fmt.Errorf("serve: %w", err)
	}
	defer host.Close()
	faults, err := d.decodeRest(ctx, host, there.good, images)
	if err != nil {
		return nil, err
	}
	if len(faults) == len(images) {
		return nil, faults
	}
	if err := d.finishRest(finish, there, host); err != nil {
		return nil, fmt.Errorf("serve: %w", err)
	}
	if len(faults) > 0 {
		return there.take(), faults
	}
	return there.take(), nil
}

// decoded is a unit's result for one call.
type decoded struct {
	good   []int         // the rows that the unit decoded, in order
	pixels *torch.Tensor // uint8 [N Size Size 3], other rows undefined; nil if good is empty
	out    *torch.Tensor // the batch, if it was queued; nil if the host has to decode a row first
}

// take returns the batch and passes its ownership to the caller: close no longer closes it.
func (d *decoded) take() *torch.Tensor {
	out := d.out
	d.out = nil
	return out
}

func (d *decoded) close() {
	for _, t := range []*torch.Tensor{d.pixels, d.out} {
		if t != nil {
			t.Close()
		}
	}
}

// decodeThere decodes images with a unit and waits for the result.
func (d *Decoder) decodeThere(ctx context.Context, finish finisher, images [][]byte) (*decoded, error) {
	u, err := d.units.take(ctx)
	if err != nil {
		return nil, err
	}
	defer d.units.put(u)
	if err := d.d.Plan(ctx, &u.plans, images...); err != nil {
		return nil, err
	}
	there := &decoded{}
	if u.request(len(images), d.d.Bytes()); len(u.rows) == 0 {
		return there, nil
	}
	d.planned.Add(int64(len(u.rows)))
	n, size := int64(len(images)), d.output.Shape[1]
	if there.pixels, err = u.decode([]int64{n, size, size, 3}); err == nil && len(u.rows) == len(images) {
		// Normalise the batch at once. Rows that the device could not decode are normalised again
		// later.
		there.out, err = finish(there.pixels)
	}
	if err == nil {
		there.good, err = u.decoded()
	}
	if err != nil {
		there.close()
		return nil, fmt.Errorf("serve: %w", err)
	}
	d.again.Add(int64(len(u.rows) - len(there.good)))
	return there, nil
}

// decodeRest decodes the rows that are not in good on the host.
func (d *Decoder) decodeRest(ctx context.Context, host *torch.Tensor, good []int,
	images [][]byte) (faults decode.Errors, err error) {
	memory, err := host.Bytes()
	if err != nil {
		return nil, fmt.Errorf("serve: %w", err)
	}
	var rest []int
	_ = decodeplan.Gaps(good, len(images), func(first, rows int) error { // the error is the callback's, always nil
		for row := first; row < first+rows; row++ {
			rest = append(rest, row)
		}
		return nil
	})
	err = d.d.DecodeRows(ctx, memory, rest, images)
	if errors.As(err, &faults) {
		return faults, nil
	}
	return nil, err
}

// finishRest queues the copies of the host's rows to the device and their normalisation. If the
// batch was not queued yet, it normalises the whole batch instead.
func (d *Decoder) finishRest(finish finisher, there *decoded, host *torch.Tensor) (err error) {
	n := int(there.pixels.Shape()[0])
	if err := decodeplan.Gaps(there.good, n, func(first, rows int) error {
		if err := onRows(there.pixels, host, first, rows, copyPixels); err != nil || there.out == nil {
			return err
		}
		return onRows(there.out, there.pixels, first, rows, d.normalise)
	}); err != nil {
		return err
	}
	if there.out == nil {
		there.out, err = finish(there.pixels)
	}
	return err
}

// onRows calls fn with some rows of two tensors.
func onRows(dst, src *torch.Tensor, first, rows int, fn func(dst, src *torch.Tensor) error) error {
	to, from := dst.Narrow(0, int64(first), int64(rows)), src.Narrow(0, int64(first), int64(rows))
	defer to.Close()
	defer from.Close()
	return fn(to, from)
}

func copyPixels(dst, src *torch.Tensor) error {
	return dst.CopyFrom(src, torch.CopyOptions{NonBlocking: true})
}
