package torch

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/internal/origin"
)

// Shared is the owner's side of a tensor whose memory other processes of the machine use. The owner
// passes a [SharedHandle] to the other process by any channel, and that process calls [OpenShared].
// Nothing is copied, and each process sees the changes of the others.
//
//	s, err := torch.Share(x)          // the owner
//	bytes, err := s.Handle().MarshalBinary()
//	...
//	var h torch.SharedHandle          // another process
//	err := h.UnmarshalBinary(bytes)
//	y, err := torch.OpenShared(h)     // y.Close() when it is done
//	...
//	err = s.Wait(ctx)                 // the owner: waits for y.Close(), and closes s
//
// The processes must run as the same user and see each other's process numbers. For a GPU's memory
// both must see the GPU. They trust each other: each can write to the memory at any time.
//
// The owner must outlive its users. Close refuses while another process uses the memory. A process
// that ends, however it ends, no longer uses it. If the owner ends first, host memory stays valid
// in the processes that have opened it, but a GPU's memory may not: [SharedHandle.Check] reports
// that the owner has gone. A Shared that becomes unreachable before its Close keeps a GPU's memory
// for ever, since nothing would check whether it is in use.
//
// Any number of goroutines may use a Shared at once.
type Shared struct {
	made    origin.Origin
	handle  SharedHandle
	tensor  *Tensor
	keep    *capi.Tensor // a reference that only Close frees; nil on the CPU
	ready   *cuda.Event  // nil on the CPU
	cleanup runtime.Cleanup

	mu      sync.Mutex
	control *os.File // nil after Close; guarded by mu
}

// Share makes the tensor's memory usable by other processes.
//
// A GPU's tensor is shared without a copy, and stays in memory until the Close of the Shared. The
// work of processes that open it is ordered after the work that is already on the current stream:
// see [Shared.Ready]. LibTorch hands out parts of larger allocations, and the other process maps
// the whole allocation that contains the tensor. The tensor must not be in an expandable segment
// (cuda.ConfigureAllocator).
//
// For a tensor on the CPU, Share makes a contiguous copy in shared memory, which [Shared.Tensor]
// returns.
//
// Share refuses, with cuda.ErrInvalidArgument, tensors without elements, tensors of a slot, whose
// memory later batches overwrite, and tensors whose memory belongs to another process or library.
// In a captured function it returns cuda.ErrCapture.
func Share(t *Tensor) (*Shared, error) {
	s, err := share(t)
	if err != nil {
		if t == nil || t.failure() == nil {
			err = opError("Share", []*Tensor{t}, err)
		}
		return nil, err
	}
	s.made = origin.New("shared tensor")
	s.cleanup = runtime.AddCleanup(s, func(made origin.Origin) { made.Leaked(); made.Closed() }, s.made)
	return s, nil
}

func share(t *Tensor) (s *Shared, err error) {
	c, err := t.acquire()
	if err != nil {
		return nil, err
	}
	defer t.h.release()
	if err := refuseLent(c); err != nil {
		return nil, err
	}
	i, err := capi.DescribeTensor(c)
	if err != nil {
		return nil, err
	}
	if i.NumElements == 0 {
		return nil, invalid("the tensor has no elements to share")
	}
	s = &Shared{handle: SharedHandle{h: sharedHandle{dtype: i.DType, size: make([]int64, i.Dims),
		stride: make([]int64, i.Dims)}}}
	if err := capi.TensorShape(c, s.handle.h.size, s.handle.h.stride); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			s.drop()
			s = nil
		}
	}()
	if i.Device < 0 {
		return s, s.shareHost(t, i.Bytes)
	}
	return s, s.shareDevice(t, c, cuda.Device(i.Device))
}

// shareHost copies the tensor into a file that other processes map.
func (s *Shared) shareHost(t *Tensor, bytes int64) (err error) {
	h := &s.handle.h
	if s.control, err = newControl(h, bytes); err != nil {
		return err
	}
	again, err := reopen(h)
	if err != nil {
		return err
	}
	c, err := capi.MapTensor(again, controlBytes, h.size, h.dtype)
	if err != nil {
		closeDescriptor(again)
		return err
	}
	s.tensor = provenance{}.tensor(c)
	if err := capi.TensorShape(c, nil, h.stride); err != nil { // of the copy
		return err
	}
	return s.tensor.CopyFrom(t, CopyOptions{})
}

func (s *Shared) shareDevice(t *Tensor, c *capi.Tensor, d cuda.Device) (err error) {
	h := &s.handle.h
	h.gpu = true
	uuid, err := capi.IdentifyDevice(int32(d))
	if err != nil {
		return err
	}
	h.uuid = uuid.UUID
	if h.memory, h.offset, err = capi.ExportIPC(c); err != nil {
		return err
	}
	if s.tensor = t.reference("Share", nil); s.tensor.Err() != nil {
		return s.tensor.Err()
	}
	if s.keep, err = capi.RetainTensor(c); err != nil {
		return err
	}
	if s.ready, err = cuda.NewEvent(cuda.EventOptions{Interprocess: true}); err != nil {
		return err
	}
	event, err := s.ready.Export(d)
	if err != nil {
		return err
	}
	h.event = event
	if err := s.Ready(); err != nil {
		return err
	}
	s.control, err = newControl(h, 0)
	return err
}

// Tensor returns the tensor in shared memory: on a GPU the shared tensor itself, on the CPU the
// copy. The Shared owns it. It is valid until the Close of the Shared.
func (s *Shared) Tensor() *Tensor {
	if s == nil {
		return failed(invalid("the Shared is nil"))
	}
	return s.tensor
}

// Handle returns the handle for other processes.
func (s *Shared) Handle() SharedHandle {
	if s == nil {
		return SharedHandle{}
	}
	return s.handle
}

// String returns a name for messages: "shared float32[2 3] cpu", "closed shared tensor".
func (s *Shared) String() string {
	if s == nil || !s.open() {
		return "closed shared tensor"
	}
	return "shared " + s.tensor.describe()
}

func (s *Shared) open() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.control != nil
}

// Ready declares that the values are written when the work that is already on the current stream of
// the tensor's GPU is done. A process that calls [OpenShared] later reads the values on its streams
// only after this work. Share calls Ready once. Ready orders nothing for processes that have
// already opened the tensor: share an event with them (cuda.EventOptions.Interprocess). On the CPU
// it does nothing.
func (s *Shared) Ready() error {
	if s == nil || s.tensor == nil {
		return invalid("the Shared is nil or zero: make it with Share")
	}
	if s.ready == nil {
		return s.tensor.use("Ready", func(*capi.Tensor) error { return nil })
	}
	stream, err := cuda.GetCurrentCUDAStream(s.tensor.Device())
	if err != nil {
		return err
	}
	return s.ready.Record(stream)
}

// InUse reports whether a process has the tensor open. A process has it open while its tensor of
// [OpenShared], or anything that shares this tensor's memory, is not closed, or while GPU work that
// uses the memory is not done.
func (s *Shared) InUse() (bool, error) {
	if s == nil {
		return false, ErrClosed
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.control == nil {
		return false, ErrClosed
	}
	return isLocked(s.control, usersByte)
}

// Close frees the memory. If a process has the tensor open, it instead returns an error that
// matches cuda.ErrBusy. Nothing has changed then, and Close may be called again. After Close, calls
// of OpenShared fail. Further calls, and calls on nil, do nothing and return nil.
func (s *Shared) Close() error {
	if s == nil {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.control == nil {
		return nil
	}
	switch free, err := lock(s.control, usersByte, exclusive); {
	case err != nil:
		return err
	case !free:
		return &capi.Error{
			Code: capi.CodeBusy, Origin: "torch.Shared.Close",
			Message: "another process has the tensor open, and its memory would go away under it: wait " +
				"for the process, or call Wait",
		}
	}
	s.cleanup.Stop()
	s.drop()
	s.made.Closed()
	return nil
}

// drop releases s's resources. The caller holds mu or is the only owner of s.
func (s *Shared) drop() {
	if s.control != nil {
		s.control.Close() // which releases the owner's lock
		s.control = nil
	}
	if s.tensor != nil {
		s.tensor.Close()
	}
	if s.keep != nil {
		capi.FreeTensor(s.keep)
		s.keep = nil
	}
	s.ready.Close()
}

// Wait waits until no process has the tensor open, and closes the Shared. It checks every few
// milliseconds. If ctx ends first, it returns the context's error, and the Shared stays open.
func (s *Shared) Wait(ctx context.Context) error {
	for pause := time.Millisecond; ; pause = min(2*pause, 50*time.Millisecond) {
		if err := s.Close(); !errors.Is(err, cuda.ErrBusy) {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pause):
		}
	}
}

// OpenShared returns a tensor over the memory of another process's [Shared]. The caller owns the
// tensor. The owner's Shared counts it as a use until the tensor and everything that shares its
// memory is closed.
//
// A GPU's tensor is on the same GPU, which may have another index here. Work that is later queued
// on the current stream is ordered after the owner's [Shared.Ready]. When the tensor ends, the use
// lasts until the work is done that is then on the current stream of the call of OpenShared, and on
// the streams of [Tensor.RecordStream]. The owner cannot open its own GPU's tensor. In a captured
// function OpenShared returns cuda.ErrCapture.
//
// The error matches [ErrClosed] if the owner has closed the Shared, or has ended.
func OpenShared(h SharedHandle) (*Tensor, error) {
	c, err := openShared(&h.h)
	return made("OpenShared", c, err)
}

func openShared(h *sharedHandle) (*capi.Tensor, error) {
	if err := h.check(); err != nil {
		return nil, err
	}
	d := cuda.CPU
	if h.gpu {
		if int(h.pid) == os.Getpid() {
			return nil, invalid("the tensor is this process's own: use Shared.Tensor")
		}
		var err error
		if d, err = h.device(); err != nil {
			return nil, err
		}
	}
	file, err := claim(h)
	if err != nil {
		return nil, err
	}
	var c *capi.Tensor
	if h.gpu {
		c, err = openDevice(h, d, file)
	} else {
		c, err = capi.MapTensor(file, controlBytes, h.size, h.dtype)
	}
	if err != nil {
		closeDescriptor(file)
	}
	return c, err
}

// openDevice takes ownership of the descriptor if it succeeds.
func openDevice(h *sharedHandle, d cuda.Device, file int) (*capi.Tensor, error) {
	ready, err := cuda.ImportEvent(d, h.event)
	if err != nil {
		return nil, err
	}
	defer ready.Close()
	stream, err := cuda.GetCurrentCUDAStream(d)
	if err != nil {
		return nil, err
	}
	if err := stream.WaitEvent(ready); err != nil {
		return nil, err
	}
	return capi.OpenIPC(int32(d), h.memory, h.offset, h.size, h.stride, h.dtype, file)
}

// device returns the GPU of the handle.
func (h *sharedHandle) device() (cuda.Device, error) {
	for i := range cuda.DeviceCount() {
		id, err := capi.IdentifyDevice(int32(i))
		if err != nil {
			return 0, err
		}
		if id.UUID == h.uuid {
			return cuda.Device(i), nil
		}
	}
	return 0, &capi.Error{
		Code: capi.CodeNoDevice, Origin: "torch.OpenShared",
		Message: fmt.Sprintf("the tensor is on the GPU %x, which this process does not see: check "+
			"CUDA_VISIBLE_DEVICES", h.uuid),
	}
}
