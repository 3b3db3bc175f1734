package prefetcher

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"sync/atomic"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/system"
	"github.com/torchstream/torchstream/prefetcher/internal/ring"
	"github.com/torchstream/torchstream/torch"
)

// align is the alignment of fields in a slot, in bytes. Copy engines, vector loads and LibTorch's
// allocations need no larger one.
const align = 256

// slots has the ring's memory, and the operations on it that both kinds of device share. Open
// allocates the memory. It does not change until Close.
type slots struct {
	layout
	depth, hosts int
	decode       *decoding // nil: the source decodes

	allocations
	host []hostSlot
	out  [][]*torch.Tensor // the tensors for the consumer, by device slot

	count copyCounters
}

type hostSlot struct {
	tensors []*torch.Tensor
	bytes   [][]byte
}

// layout describes a slot. It has the fields that the source fills, and the outputs that the finish
// makes from them.
type layout struct {
	fields, outputs []torch.Spec
	batch           int64  // number of samples in a slot
	images, labels  int    // index of the output with that name; -1 if there is none
	work            []bool // whether field i needs the finish
	// enqueue queues the finish. It is nil if no field needs work.
	enqueue func(dst, src []*torch.Tensor) error
}

// copyCounters are the copies' part of Stats. They may be read from any goroutine.
type copyCounters struct {
	bytes    atomic.Int64 // copied to the device
	copyTime atomic.Int64 // nanoseconds
	finishes atomic.Int64 // host time of the finish, nanoseconds
}

// addTo sets the copies' part of the statistics.
func (c *copyCounters) addTo(s *Stats) {
	s.Bytes, s.CopyTime = c.bytes.Load(), time.Duration(c.copyTime.Load())
	s.FinishTime = time.Duration(c.finishes.Load())
}

// allocations holds the tensors and buffers of a device. close frees them.
type allocations struct {
	near   cuda.Device     // pinned memory is on its NUMA node
	owned  []*torch.Tensor // each one once
	pinned []*cuda.Pinned
}

// own records the tensor, so that close frees it.
func (a *allocations) own(t *torch.Tensor, err error) (*torch.Tensor, error) {
	if err == nil {
		err = t.Err()
	}
	if err == nil {
		a.owned = append(a.owned, t)
	}
	return t, err
}

// pin allocates pinned host memory, which close frees.
func (a *allocations) pin(bytes int) (*cuda.Pinned, error) {
	p, err := cuda.NewPinnedNear(a.near, bytes)
	if err == nil {
		a.pinned = append(a.pinned, p)
	}
	return p, err
}

// close frees everything. It closes the tensors first, because they may use pinned memory.
func (a *allocations) close() error {
	var errs []error
	for _, t := range a.owned {
		errs = append(errs, t.Close())
	}
	for _, p := range a.pinned {
		errs = append(errs, p.Close())
	}
	a.owned, a.pinned = nil, nil
	return errors.Join(errs...)
}

func newSlots(source Source) (*slots, error) {
	l, err := newLayout(source)
	if err != nil {
		return nil, err
	}
	return &slots{layout: l}, nil
}

func newLayout(source Source) (layout, error) {
	l := layout{fields: cloneSpecs(source.Fields()), batch: int64(source.BatchSize())}
	if l.batch < 1 {
		return l, fmt.Errorf("the source's BatchSize is %d", l.batch)
	}
	l.outputs = l.fields
	switch f := source.(type) {
	case Finisher:
		l.enqueue, l.outputs = f.Finish, cloneSpecs(f.Outputs())
	case Describer:
		l.outputs = cloneSpecs(f.Outputs())
	}
	if len(l.fields) == 0 || len(l.fields) != len(l.outputs) {
		return l, fmt.Errorf("the source has %d fields and %d outputs: there must be one output for each field", len(l.fields),
			len(l.outputs))
	}
	for i := range l.fields {
		for _, spec := range []torch.Spec{l.fields[i], l.outputs[i]} {
			if spec.Bytes() < 1 || slices.ContainsFunc(spec.Shape, func(d int64) bool { return d < 1 }) {
				return l, fmt.Errorf("the source's field %q: a sample of type %v and shape %v has no "+
					"elements", spec.Name, spec.DType, spec.Shape)
			}
			if spec.MemoryFormat == torch.ChannelsLast && len(spec.Shape) != 3 {
				return l, fmt.Errorf("the source's field %q: channels_last needs the shape C H W, not %v",
					spec.Name, spec.Shape)
			}
		}
		f, o := l.fields[i], l.outputs[i]
		l.work = append(l.work, f.DType != o.DType || f.MemoryFormat != o.MemoryFormat ||
			!slices.Equal(f.Shape, o.Shape))
	}
	if f, ok := source.(Describer); ok && l.enqueue == nil {
		var err error
		if l.enqueue, err = finishes(l.fields, l.outputs, f.Finishes(), l.work); err != nil {
			return l, err
		}
	}
	l.images, l.labels = l.field("images"), l.field("labels")
	return l, nil
}

// field returns the index of the output with the given name, or -1.
func (l *layout) field(name string) int {
	return slices.IndexFunc(l.outputs, func(o torch.Spec) bool { return o.Name == name })
}

// anyWork reports whether a field needs the finish.
func (l *layout) anyWork() bool { return slices.Contains(l.work, true) }

func cloneSpecs(specs []torch.Spec) []torch.Spec {
	specs = slices.Clone(specs)
	for i := range specs {
		specs[i].Shape = slices.Clone(specs[i].Shape)
	}
	return specs
}

// overMemory returns a tensor for a batch with this spec. The tensor uses the given C memory.
func (s *slots) overMemory(memory []byte, spec torch.Spec) (*torch.Tensor, error) {
	shape := append([]int64{s.batch}, spec.Shape...)
	if spec.MemoryFormat != torch.ChannelsLast {
		return s.own(torch.FromMemory(memory, spec.DType, shape...))
	}
	n, c, h, w := shape[0], shape[1], shape[2], shape[3]
	t, err := s.own(torch.FromMemory(memory, spec.DType, n, h, w, c))
	if err != nil {
		return nil, err
	}
	return s.own(t.Permute(0, 3, 1, 2), nil)
}

// results allocates the device slots. If no field needs work, the caller need not call it: the
// consumer then gets the host slots themselves.
func (s *slots) results(device cuda.Device) error {
	for range s.depth {
		var out []*torch.Tensor
		for _, spec := range s.outputs {
			t, err := s.own(torch.EmptySpec(device, spec, s.batch))
			if err == nil {
				err = t.Lend(true)
			}
			if err != nil {
				return err
			}
			out = append(out, t)
		}
		s.out = append(s.out, out)
	}
	return nil
}

// result returns the tensors for the consumer, with all rows.
func (s *slots) result(slot, host int) []*torch.Tensor {
	if s.out == nil {
		return s.host[host].tensors
	}
	return s.out[slot]
}

// rows calls fn with the first n rows of the tensors in each list. For a short batch it passes
// views, which it closes afterwards.
func (s *slots) rows(n int, fn func(lists ...[]*torch.Tensor) error, lists ...[]*torch.Tensor) error {
	if int64(n) == s.batch {
		return fn(lists...)
	}
	var views []*torch.Tensor
	defer func() {
		for _, v := range views {
			v.Close()
		}
	}()
	made := map[*torch.Tensor]*torch.Tensor{} // a tensor in two lists gets only one view
	for l, list := range lists {
		lists[l] = make([]*torch.Tensor, len(list))
		for i, t := range list {
			v := made[t]
			if v == nil {
				v = t.Narrow(0, 0, int64(n))
				if err := v.Err(); err != nil {
					return err
				}
				made[t] = v
				views = append(views, v)
			}
			lists[l][i] = v
		}
	}
	return fn(lists...)
}

func (s *slots) finish(dst, src []*torch.Tensor, n int) error {
	began := time.Now()
	defer func() { s.count.finishes.Add(int64(time.Since(began))) }()
	return s.rows(n, func(lists ...[]*torch.Tensor) error { return s.enqueue(lists[0], lists[1]) }, dst, src)
}

// gpuDevice is the ring's device for a GPU. The comment of ring.Device says which goroutine calls
// which method.
type gpuDevice struct {
	*slots
	options Options // the options of New, with the GPU as Device

	copyStream
	starved *starved
	begun   []*cuda.Event     // by host slot: the start of the copies, for CopyTime
	copyTo  [][]*torch.Tensor // by device slot: the destinations of the copies
	gpu     *gpuDecoding      // nil: the source decodes
}

// copyStream is P. Between open and close, P is the current stream of the ring's goroutine.
type copyStream struct {
	p       cuda.Stream       // the stream's value
	stream  *cuda.OwnedStream // not shared, so that no other work delays a batch
	restore func() error      // nil unless P is current
}

func (s *copyStream) open(device cuda.Device, priority int) (err error) {
	if s.stream, err = cuda.NewOwnedStream(device, cuda.StreamOptions{Priority: priority}); err != nil {
		return err
	}
	s.p = s.stream.Stream
	s.restore, err = cuda.SetCUDAStream(s.p)
	return err
}

// drain makes P wait for the events, and waits until P is idle.
func (s *copyStream) drain(events []*cuda.Event) error {
	if s.restore == nil {
		return nil
	}
	var errs []error
	for _, e := range events {
		errs = append(errs, s.p.WaitEvent(e))
	}
	return errors.Join(append(errs, s.p.Synchronize())...)
}

func (s *copyStream) close() error {
	var err error
	if s.restore != nil {
		err = s.restore()
	}
	return errors.Join(err, s.stream.Close())
}

// streams returns the streams of the open device by their names in recordings.
func (d *gpuDevice) streams() map[string]cuda.Stream {
	named := map[string]cuda.Stream{"prefetcher": d.p}
	if d.gpu != nil {
		for i := range d.gpu.units {
			named[fmt.Sprintf("decoder %d", i)] = d.gpu.units[i].stream.Stream
		}
	}
	return named
}

func (d *gpuDevice) Open() (err error) {
	// The goroutine stays locked until it exits. Its thread then exits too, and LibTorch frees the
	// thread's caches.
	runtime.LockOSThread()
	nameThread()
	// Check polls at short intervals. An error only makes the intervals longer.
	_ = system.SetTimerSlack(time.Microsecond)
	if err = d.copyStream.open(d.options.Device, d.options.Priority); err != nil {
		return err
	}
	for range d.hosts {
		begun, err := cuda.NewEvent(cuda.EventOptions{Timing: true})
		if err != nil {
			return err
		}
		d.begun = append(d.begun, begun)
		if err := d.openHostSlot(); err != nil {
			return err
		}
	}
	// P is current here, so the allocator also orders reuse of the memory by P.
	if err := d.results(d.options.Device); err != nil {
		return err
	}
	staged := make([]*torch.Tensor, len(d.fields)) // one set is enough, because only P uses these tensors
	for i, spec := range d.fields {
		if d.work[i] && (d.decode == nil || i != d.decode.images.index) {
			if staged[i], err = d.own(torch.EmptySpec(d.options.Device, spec, d.batch)); err != nil {
				return err
			}
		}
	}
	for _, out := range d.out {
		to := slices.Clone(out)
		for i, t := range staged {
			if t != nil {
				to[i] = t
			}
		}
		d.copyTo = append(d.copyTo, to)
	}
	if d.decode != nil {
		return d.openDecoding()
	}
	return nil
}

// nameThread names the calling goroutine's locked thread for top, perf and reports of CPU time by
// thread. Nothing else depends on it, so errors are ignored.
func nameThread() { _ = os.WriteFile("/proc/thread-self/comm", []byte("prefetcher"), 0) }

// openHostSlot allocates one host slot: a single buffer for all fields.
func (d *gpuDevice) openHostSlot() error {
	size := 0
	var at []int
	for _, spec := range d.fields {
		at = append(at, size)
		size += (int(d.batch*spec.Bytes()) + align - 1) / align * align
	}
	pinned, err := d.pin(size)
	if err != nil {
		return err
	}
	var h hostSlot
	for i, spec := range d.fields {
		end := at[i] + int(d.batch*spec.Bytes())
		memory := pinned.Bytes()[at[i]:end:end]
		t, err := d.overMemory(memory, spec)
		if err != nil {
			return err
		}
		h.tensors, h.bytes = append(h.tensors, t), append(h.bytes, memory)
	}
	d.host = append(d.host, h)
	return nil
}

func (d *gpuDevice) Close(released []*cuda.Event) error {
	errs := []error{d.drain(released)}
	if d.gpu != nil {
		errs = append(errs, d.gpu.close())
	}
	errs = append(errs, d.allocations.close())
	for _, e := range d.begun {
		errs = append(errs, e.Close())
	}
	d.starved.close()
	return errors.Join(append(errs, d.copyStream.close())...)
}

func (d *gpuDevice) NewEvent(timed bool) (*cuda.Event, error) {
	return cuda.NewEvent(cuda.EventOptions{Timing: timed})
}

func (d *gpuDevice) FreeEvent(e *cuda.Event) { e.Close() }
func (d *gpuDevice) P() cuda.Stream          { return d.p }
func (d *gpuDevice) Current() (cuda.Stream, error) {
	return cuda.GetCurrentCUDAStream(d.options.Device)
}
func (d *gpuDevice) Record(e *cuda.Event, s cuda.Stream) error { return e.Record(s) }
func (d *gpuDevice) Wait(s cuda.Stream, e *cuda.Event) error   { return s.WaitEvent(e) }

func (d *gpuDevice) Copy(slot, host, n int, released []*cuda.Event, copied *cuda.Event) error {
	for _, e := range released {
		if err := d.p.WaitEvent(e); err != nil {
			return err
		}
	}
	// The start must be recorded after the wait for released and before the copies. CopyBatch
	// therefore can't do the wait.
	if err := d.begun[host].Record(d.p); err != nil {
		return err
	}
	if d.gpu != nil {
		return d.gpu.copy(d, slot, host, n, copied)
	}
	err := d.rows(n, func(lists ...[]*torch.Tensor) error {
		return torch.CopyBatch(d.p, nil, lists[0], lists[1], copied)
	}, d.copyTo[slot], d.host[host].tensors)
	if err != nil {
		return err
	}
	for _, spec := range d.fields {
		d.count.bytes.Add(int64(n) * spec.Bytes())
	}
	return nil
}

func (d *gpuDevice) Finish(slot, host, n int) error {
	from := d.copyTo[slot]
	if d.gpu != nil {
		from = d.gpu.units[d.gpu.turn].to[slot]
	}
	var err error
	if d.enqueue != nil {
		err = d.finish(d.out[slot], from, n)
	}
	if d.gpu != nil { // even after an error, because part of the finish may have been queued
		err = errors.Join(err, d.gpu.units[d.gpu.turn].finished.Record(d.p))
	}
	if err != nil {
		return err
	}
	return d.starved.arrive(slot, d.p)
}

func (d *gpuDevice) Check(ctx context.Context, slot, _ int, info any, busy func() bool) (ring.Checked, error, error) {
	return d.gpu.check(ctx, d, slot, info, busy)
}

// HostWait polls, because a thread that waits inside CUDA can't be interrupted when the context
// ends. With enough CPUs it first spins, because a copy whose batch has passed Check is complete in
// a few microseconds. The longer the wait, the longer are the intervals: they delay the source by a
// sixteenth.
func (d *gpuDevice) HostWait(host int, copied *cuda.Event, stop func() error) error {
	const spin, shortest, longest = 100 * time.Microsecond, 20 * time.Microsecond, 500 * time.Microsecond
	var p poller
	for began := time.Now(); ; {
		done, err := copied.Query()
		if err != nil {
			return err
		}
		if done {
			took, err := cuda.Elapsed(d.begun[host], copied)
			d.count.copyTime.Add(int64(took))
			return err
		}
		if err := stop(); err != nil {
			return err
		}
		if waited := time.Since(began); waited > spin || !p.maySpin() {
			system.Sleep(min(max(waited/16, shortest), longest))
		}
	}
}

// cpuDevice is the ring's device without a GPU. It has no streams: every call has completed its
// work when it returns, and the ring's lock orders the accesses.
type cpuDevice struct {
	*slots
	src [][]*torch.Tensor // inputs of Finish, by host slot and device slot
}

func (d *cpuDevice) Open() error {
	runtime.LockOSThread()
	for range d.hosts {
		var h hostSlot
		for _, spec := range d.fields {
			t, err := d.own(torch.EmptySpec(cuda.CPU, spec, d.batch))
			if err != nil {
				return err
			}
			memory, err := t.Bytes()
			if err == nil {
				err = t.Lend(true)
			}
			if err != nil {
				return err
			}
			h.tensors, h.bytes = append(h.tensors, t), append(h.bytes, memory)
		}
		d.host = append(d.host, h)
	}
	if !d.anyWork() {
		return nil // the consumer gets the host slots
	}
	if err := d.results(cuda.CPU); err != nil {
		return err
	}
	for k := range d.hosts {
		for j := range d.depth {
			src := slices.Clone(d.out[j])
			for i, t := range d.host[k].tensors {
				if d.work[i] {
					src[i] = t
				}
			}
			d.src = append(d.src, src)
		}
	}
	return nil
}

func (d *cpuDevice) Close([]*cuda.Event) error                     { return d.close() }
func (d *cpuDevice) NewEvent(bool) (*cuda.Event, error)            { return nil, nil }
func (d *cpuDevice) FreeEvent(*cuda.Event)                         {}
func (d *cpuDevice) P() cuda.Stream                                { return cuda.Stream{} }
func (d *cpuDevice) Current() (cuda.Stream, error)                 { return cuda.Stream{}, nil }
func (d *cpuDevice) Record(*cuda.Event, cuda.Stream) error         { return nil }
func (d *cpuDevice) Wait(cuda.Stream, *cuda.Event) error           { return nil }
func (d *cpuDevice) HostWait(int, *cuda.Event, func() error) error { return nil }

// Check is never called, because only a GPU decodes.
func (d *cpuDevice) Check(context.Context, int, int, any, func() bool) (ring.Checked, error, error) {
	return ring.Good, nil, nil
}

// Copy copies the fields that need no work, such as labels. It does so only if another field needs
// work. The copied fields are small.
func (d *cpuDevice) Copy(slot, host, n int, _ []*cuda.Event, _ *cuda.Event) error {
	if d.out == nil {
		return nil
	}
	return d.rows(n, func(lists ...[]*torch.Tensor) error {
		for i := range lists[0] {
			if !d.work[i] {
				if err := lists[0][i].CopyFrom(lists[1][i], torch.CopyOptions{}); err != nil {
					return err
				}
			}
		}
		return nil
	}, d.out[slot], d.host[host].tensors)
}

func (d *cpuDevice) Finish(slot, host, n int) error {
	switch {
	case d.enqueue == nil:
		return nil
	case d.out == nil:
		return d.finish(d.host[host].tensors, d.host[host].tensors, n)
	}
	return d.finish(d.out[slot], d.src[host*d.depth+slot], n)
}
