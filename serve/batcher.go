package serve

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"slices"
	"sync"
	"time"
	"unsafe"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/imageloader/decode"
	"github.com/torchstream/torchstream/internal/origin"
	"github.com/torchstream/torchstream/tensor"
	"github.com/torchstream/torchstream/torch"
)

// Run computes the outputs of a batch. x has the rows in its first dimension: the batch size is one
// of BatcherOptions.Buckets, and rows beyond the requests are zero pixels or zeros. Each output has
// the same first dimension, of any dtype except complex ones. Row i of an output must depend on row
// i of x alone.
//
// x has a scope that ends with the batch, so tensors computed from x need no Close. It is marked
// NoGrad. Run must not change x in place: the call that captures a graph runs the same work twice.
// Run queues its work on the current stream, and need not wait for it. A Batcher calls the Run of
// one worker on one OS thread, and never twice at a time. ctx ends if the ctx of Batcher.Close
// does. A panic of Run is an error of its batch.
//
//	func(ctx context.Context, x *torch.Tensor) ([]*torch.Tensor, error) {
//		return model.Run(ctx, x) // of package aoti
//	}
type Run func(ctx context.Context, x *torch.Tensor) ([]*torch.Tensor, error)

// Priority is the class of a request.
type Priority int

const (
	// Interactive requests are served first. It is the zero value.
	Interactive Priority = iota
	// Background requests are served when no Interactive request waits, and at least one with each
	// seven Interactive requests.
	Background
)

// BatcherOptions are the options of a [Batcher]. Model must be set.
type BatcherOptions struct {
	// Model returns the function that computes batches on a device. It is called once for each
	// worker, on the worker's OS thread and stream. The worker then waits for all work of the GPU,
	// so that weights are ready whatever stream has made them. Functions of several workers may
	// share a model, which they use at the same time. The caller closes it after Batcher.Close.
	Model func(device cuda.Device) (Run, error)

	// Images are the options for decoding the requests' images, for each device. The field Device
	// is used if Devices is empty. With OnDevice the GPU decodes whole batches, and a cancelled Do
	// waits until its batch is decoded. Otherwise the host decodes each image as it comes, at most
	// Decode.Workers at a time.
	Images Options
	// Input describes one row of a batch, if requests have a Row instead of an Image: its dtype and
	// shape. The zero value stands for images.
	Input tensor.Spec

	// Devices are the devices that serve, with one queue for all. Empty selects cuda.Default().
	Devices []cuda.Device
	// Workers is the number of goroutines that run batches on each device. 0 selects 1 on the CPU,
	// whose operators use all cores, and 2 on a GPU: one fills and reads while the other computes.
	Workers int

	// NoGraphs calls Run for each batch. Otherwise a GPU captures Run as a CUDA graph for each
	// bucket and worker, and replays it: Run must then do the same work at each call, for any
	// values. A Run that cannot be captured, because it waits or reads a value, is called for each
	// batch.
	NoGraphs bool

	// MaxBatch is the maximum number of requests in a batch; 0 means 32, or the largest of Buckets.
	MaxBatch int
	// Buckets are the batch sizes with which Run is called, in ascending order. A smaller batch is
	// padded. The last one is MaxBatch. nil selects 1, 2, 4 and so on, and MaxBatch.
	Buckets []int
	// MaxDelay is the time that a request may wait for others to fill its batch while a worker is
	// idle. With 0 an idle worker takes the requests that wait. Batches then grow with the load,
	// because requests wait while all workers are busy.
	MaxDelay time.Duration
	// Queue is the maximum number of requests that wait: for their decoding, and for a worker.
	// Further calls of Do return ErrQueueFull at once. 0 means 4 times MaxBatch for each worker,
	// and at least 64.
	Queue int

	// Logger receives a batcher's sizes (Debug), failed batches, smaller buckets and the reason why
	// Run has no graph (Warn), panics and lost devices (Error). nil discards all messages.
	Logger *slog.Logger
}

var (
	// ErrQueueFull is returned by Batcher.Do if BatcherOptions.Queue requests wait. A server
	// answers "try again later".
	ErrQueueFull = errors.New("serve: the queue is full: try again later, or raise BatcherOptions.Queue")
	// ErrRequest is in the error of Batcher.Do for a Request that does not suit BatcherOptions, for
	// example a Row of the wrong length. A fault of an image is a decode.Errors.
	ErrRequest = errors.New("serve: wrong Request")
	// ErrClosed is returned by the methods of a closed Batcher.
	ErrClosed = errors.New("serve: the batcher is closed")
	// ErrDeviceLost is in the errors of requests after their device failed for good, for example
	// after an illegal memory access. Only a new process can use the device. The workers of a lost
	// GPU keep their memory until the process ends, because LibTorch may end the process when
	// memory of such a GPU is freed. Do not free the model's memory there either.
	ErrDeviceLost = errors.New("the device is lost")
)

// Request is one image or one row. The caller must not change the memory until Do returns.
type Request struct {
	Image    []byte // an encoded image, if BatcherOptions.Input is not set
	Row      []byte // the elements of a row of BatcherOptions.Input in the order of memory: see RowOf
	Priority Priority
}

// RowOf returns the memory of values, without a copy, as a Request.Row.
func RowOf[T torch.Element](values []T) []byte {
	var zero T
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(values))), len(values)*int(unsafe.Sizeof(zero)))
}

// Answer has the outputs of one request. They belong to the caller.
type Answer struct {
	Outputs []Output      // in the order of Run's results
	Device  cuda.Device   // the device that ran the batch
	Batch   int           // number of requests in the batch
	Waited  time.Duration // from the call of Do until a worker took the request, decoding included
	Ran     time.Duration // from then until the outputs were in Go memory
}

// Output is a request's row of one output, converted to float32.
type Output struct {
	Shape  []int64 // without the batch dimension
	Values []float32
}

// Batcher makes batches of requests, and runs them on one or several devices. Any number of
// goroutines may use it. It must be closed.
type Batcher struct {
	made    origin.Origin
	core    *core
	cleanup runtime.Cleanup
	closed  sync.Once // records the Close
}

// core is the part of a Batcher that its workers use.
type core struct {
	o        BatcherOptions
	queue    *queue
	gate     gate
	count    counters
	buffers  buffers
	decoders []*Decoder // by device; none for rows
	host     tensor.Spec
	devices  []cuda.Device
	hooks    hooks

	base     context.Context // ends when Close gives up
	giveUp   context.CancelCauseFunc
	finished chan struct{} // closed when all workers have left
}

// hooks are the calls that tests replace.
type hooks struct {
	decoder func(Options) (*Decoder, error)
	// probe waits for the worker's work on its device. An error means that the device is lost.
	probe func(w *worker) error
}

// NewBatcher starts the workers, and runs each bucket once on each of them. So it returns when the
// first request would be as fast as any. The error is the first failure of an option, a device or
// the model.
func NewBatcher(o BatcherOptions) (*Batcher, error) {
	return newBatcher(o, hooks{NewDecoder, (*worker).synchronize})
}

func newBatcher(o BatcherOptions, h hooks) (*Batcher, error) {
	c, err := newCore(o, h)
	if err != nil {
		return nil, fmt.Errorf("serve: %w", err)
	}
	b := &Batcher{made: origin.New("batcher"), core: c}
	b.cleanup = runtime.AddCleanup(b, func(lost lostBatcher) { lost.close() }, lostBatcher{b.made, c})
	return b, nil
}

// lostBatcher is a Batcher that the garbage collector has found.
type lostBatcher struct {
	made origin.Origin
	core *core
}

func (l lostBatcher) close() {
	l.made.Leaked()
	l.made.Closed()
	l.core.o.Logger.Warn("serve: a Batcher became unreachable before Close; its workers leave")
	l.core.queue.stop(ErrClosed)
}

func newCore(o BatcherOptions, h hooks) (*core, error) {
	if err := o.setDefaults(); err != nil {
		return nil, err
	}
	c := &core{o: o, devices: o.Devices, hooks: h, host: o.Input, finished: make(chan struct{})}
	c.base, c.giveUp = context.WithCancelCause(context.Background())
	if err := c.openDecoders(); err != nil {
		c.closeDecoders()
		return nil, err
	}
	c.buffers.size = int(c.host.Bytes())
	var devices []*device
	for _, d := range c.devices {
		devices = append(devices, &device{name: d.String(), limit: o.MaxBatch})
	}
	c.queue = newQueue(o.Queue, o.MaxDelay, devices)
	for _, size := range o.Buckets {
		c.count.s.Buckets = append(c.count.s.Buckets, BucketStats{Size: size})
	}
	if err := c.start(); err != nil {
		<-c.finished
		return nil, err
	}
	o.Logger.Debug("serve: a batcher is ready", "devices", o.Devices, "buckets", o.Buckets, "queue", o.Queue)
	return c, nil
}

// setDefaults checks the options.
func (o *BatcherOptions) setDefaults() error {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.Model == nil {
		return errors.New("BatcherOptions.Model is nil: set a function that returns the model's Run")
	}
	o.Devices = slices.Clone(o.Devices)
	if len(o.Devices) == 0 {
		o.Devices = []cuda.Device{o.Images.Device}
	}
	workers := 0
	for i, d := range o.Devices {
		if d == 0 {
			o.Devices[i] = cuda.Default()
		}
		workers += o.workers(o.Devices[i])
	}
	if err := o.setBuckets(); err != nil {
		return err
	}
	if o.Queue == 0 {
		o.Queue = max(64, 4*o.MaxBatch*workers)
	}
	if o.Workers < 0 || o.Queue < 0 || o.MaxDelay < 0 {
		return fmt.Errorf("BatcherOptions.Workers is %d, Queue %d and MaxDelay %v: they must not be negative", o.Workers,
			o.Queue, o.MaxDelay)
	}
	for _, size := range o.Input.Shape {
		if size < 1 {
			return fmt.Errorf("BatcherOptions.Input: the shape %v has no elements", o.Input.Shape)
		}
	}
	return nil
}

// workers returns the number of workers on a device.
func (o *BatcherOptions) workers(d cuda.Device) int {
	switch {
	case o.Workers != 0:
		return o.Workers
	case d == cuda.CPU:
		return 1
	}
	return 2
}

// setBuckets sets MaxBatch and Buckets.
func (o *BatcherOptions) setBuckets() error {
	if o.MaxBatch == 0 {
		o.MaxBatch = 32
		if n := len(o.Buckets); n > 0 {
			o.MaxBatch = o.Buckets[n-1]
		}
	}
	o.Buckets = slices.Clone(o.Buckets)
	if len(o.Buckets) == 0 {
		for size := 1; size < o.MaxBatch; size *= 2 {
			o.Buckets = append(o.Buckets, size)
		}
		o.Buckets = append(o.Buckets, o.MaxBatch)
	}
	before := 0
	for _, size := range o.Buckets {
		if size <= before {
			return fmt.Errorf("BatcherOptions.Buckets is %v: sizes must be positive and ascending", o.Buckets)
		}
		before = size
	}
	if before != o.MaxBatch {
		return fmt.Errorf("BatcherOptions.Buckets is %v and MaxBatch %d: the last bucket must be MaxBatch", o.Buckets,
			o.MaxBatch)
	}
	return nil
}

// openDecoders makes a decoder for each device, unless requests have rows.
func (c *core) openDecoders() error {
	if len(c.host.Shape) > 0 {
		return nil
	}
	for _, d := range c.devices {
		o := c.o.Images
		o.Device, o.Concurrent = d, max(o.Concurrent, c.o.workers(d))
		decoder, err := c.hooks.decoder(o)
		if err != nil {
			return fmt.Errorf("BatcherOptions.Images: %w", err)
		}
		c.decoders = append(c.decoders, decoder)
	}
	size := c.decoders[0].output.Shape[1]
	c.host = tensor.Spec{Name: "pixels", DType: torch.Uint8, Shape: []int64{size, size, 3}}
	c.gate.room = c.o.Images.Decode.Workers
	if c.gate.room == 0 {
		c.gate.room = runtime.GOMAXPROCS(0)
	}
	return nil
}

func (c *core) closeDecoders() {
	for _, d := range c.decoders {
		_ = d.Close() // never fails
	}
}

// start starts the workers one after the other, so that one warms up at a time.
func (c *core) start() error {
	var all sync.WaitGroup
	defer func() {
		go func() {
			all.Wait()
			c.closeDecoders()
			close(c.finished)
		}()
	}()
	for i, d := range c.devices {
		for range c.o.workers(d) {
			w := &worker{core: c, gpu: d, device: c.queue.devices[i]}
			if len(c.decoders) > 0 {
				w.decoder = c.decoders[i]
			}
			started := make(chan error)
			all.Add(1)
			go w.main(started, sync.OnceFunc(all.Done))
			if err := <-started; err != nil {
				c.queue.stop(ErrClosed) // the other workers leave
				return fmt.Errorf("%v: %w", d, err)
			}
		}
	}
	return nil
}

// Do waits until the model has computed the request's outputs, or until ctx ends.
//
// If BatcherOptions.Queue requests wait, it returns [ErrQueueFull] at once. If ctx ends, the
// request's place in the queue is free at once, and Do returns ctx's cause. Only an image that is
// being decoded is finished first: with Images.OnDevice this is the decoding of its whole batch.
// Requests in the same batch do not notice.
//
// A Request that does not suit the options is an [ErrRequest]. A fault of the image is a
// [decode.Errors], as documented at Decoder.Batch. An error of Run is the
// answer to all requests of its batch, and later batches run as before. After a failure of the
// device the error matches [ErrDeviceLost].
func (b *Batcher) Do(ctx context.Context, r Request) (Answer, error) {
	defer runtime.KeepAlive(b)
	c, began := b.core, time.Now()
	answer, err := c.do(ctx, r)
	c.count.returned(time.Since(began), err, err != nil && ctx.Err() != nil && errors.Is(err, context.Cause(ctx)))
	return answer, err
}

func (c *core) do(ctx context.Context, r Request) (Answer, error) {
	if ctx.Err() != nil {
		return Answer{}, context.Cause(ctx)
	}
	if err := c.check(r); err != nil {
		return Answer{}, err
	}
	if err := c.queue.enter(); err != nil {
		return Answer{}, err
	}
	q := newRequest(r.Priority)
	if err := c.prepare(ctx, q, r); err != nil {
		c.buffers.put(q.input)
		c.queue.exit()
		return Answer{}, err
	}
	c.queue.push(q)
	select {
	case out := <-q.answered:
		return out.answer, out.err
	case <-ctx.Done():
	}
	if c.queue.cancel(q) {
		c.buffers.put(q.input)
	} else {
		q.leave()
	}
	return Answer{}, context.Cause(ctx)
}

// check compares a request with the options.
func (c *core) check(r Request) error {
	switch {
	case r.Priority != Interactive && r.Priority != Background:
		return fmt.Errorf("%w: Priority is %d: use Interactive or Background", ErrRequest, r.Priority)
	case len(c.decoders) > 0 && r.Row != nil:
		return fmt.Errorf("%w: Row is set, but BatcherOptions.Input is not: send an Image", ErrRequest)
	case len(c.decoders) > 0:
		return nil
	case r.Image != nil:
		return fmt.Errorf("%w: Image is set, but BatcherOptions.Input describes rows: send a Row", ErrRequest)
	case int64(len(r.Row)) != c.host.Bytes():
		return fmt.Errorf("%w: Row has %d bytes, want %d: %v%v", ErrRequest, len(r.Row), c.host.Bytes(), c.host.DType,
			c.host.Shape)
	}
	return nil
}

// prepare decodes the image on the host into a buffer of the batcher. It leaves rows, and images
// that a device decodes, in the caller's memory.
func (c *core) prepare(ctx context.Context, q *request, r Request) error {
	switch {
	case len(c.decoders) == 0:
		q.lent = r.Row
		return nil
	case c.decoders[0].units != nil:
		q.lent = r.Image
		return nil
	}
	if err := c.gate.enter(ctx, q); err != nil {
		return err
	}
	defer c.gate.leave()
	q.input = c.buffers.get()
	err := c.decoders[0].d.Decode(ctx, q.input, r.Image)
	if !errors.Is(err, decode.ErrClosed) {
		return err
	}
	if err := c.queue.err(); err != nil {
		return err // why the workers have left and closed the decoder
	}
	return ErrClosed
}

// Err returns nil while the batcher accepts requests, ErrClosed after the start of Close, and
// [ErrDeviceLost] with the devices' errors when no device is left. It suits a server's health
// check.
func (b *Batcher) Err() error { return b.core.queue.err() }

// Stats returns the current figures. It may be called at any time, also after Close.
func (b *Batcher) Stats() BatcherStats {
	c := b.core
	s := c.count.stats()
	q := c.queue
	q.mu.Lock()
	defer q.mu.Unlock()
	s.Waiting = q.entered
	for i, d := range q.devices {
		s.Devices = append(s.Devices, DeviceStats{Device: c.devices[i], MaxBatch: d.limit, Lost: d.lost})
	}
	return s
}

// Close lets no further request enter, and waits until all others are answered and the workers have
// left. If ctx ends first, it answers waiting requests with ErrClosed, ends the context of running
// batches, and waits for these alone, because they use the model. It then returns ctx's cause.
// Close may be called again.
func (b *Batcher) Close(ctx context.Context) error {
	c := b.core
	c.queue.close()
	var err error
	select {
	case <-c.finished:
	case <-ctx.Done():
		err = fmt.Errorf("serve: Close: requests were not served: %w", context.Cause(ctx))
		c.queue.stop(ErrClosed)
		c.giveUp(ErrClosed)
		<-c.finished
	}
	c.giveUp(ErrClosed)
	b.closed.Do(func() {
		b.cleanup.Stop()
		b.made.Closed()
	})
	return err
}

// buffers are rows of host memory that requests reuse.
type buffers struct {
	size int
	mu   sync.Mutex
	free [][]byte
}

func (b *buffers) get() []byte {
	b.mu.Lock()
	defer b.mu.Unlock()
	if n := len(b.free); n > 0 {
		row := b.free[n-1]
		b.free = b.free[:n-1]
		return row
	}
	return make([]byte, b.size)
}

// put takes a row back; nil is no row.
func (b *buffers) put(row []byte) {
	if row == nil {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.free = append(b.free, row)
}
