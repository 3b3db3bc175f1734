package serve

import (
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/imageloader/decode"
	"github.com/torchstream/torchstream/tensor"
	"github.com/torchstream/torchstream/torch"
)

// worker runs batches on one device, one at a time, on one OS thread.
type worker struct {
	*core
	gpu     cuda.Device // or cuda.CPU
	device  *device
	decoder *Decoder // nil for rows
	run     Run
	graphed *torch.Graphed    // of run; nil with NoGraphs
	failed  error             // of the latest call of run
	hits    int64             // replays so far
	stream  *cuda.OwnedStream // nil on the CPU, as is restore
	restore func() error
	slot    slot
	back    readback
}

// main opens the worker, sends the result, and runs batches until the queue ends. It calls left
// when it uses the model and the device no longer.
func (w *worker) main(started chan<- error, left func()) {
	defer left()
	// The goroutine stays locked until it exits, and its thread then exits too. LibTorch thereby
	// frees the thread's caches. On the CPU, LibTorch has a thread pool for each calling thread.
	runtime.LockOSThread()
	err := w.open()
	if err == nil {
		err = w.warmUp()
	}
	if started <- err; err == nil {
		for batch := w.queue.take(w.device); batch != nil; batch = w.queue.take(w.device) {
			w.count.began(batch, time.Now())
			w.serve(batch)
		}
	}
	if w.lost() {
		w.keep(left)
	}
	if err := w.close(); err != nil {
		w.o.Logger.Warn("serve: closing a worker", "device", w.device.name, "error", err)
	}
}

// lost reports whether the worker's GPU has failed. Without requests, another worker's failure
// shows only when this worker waits for its work.
func (w *worker) lost() bool {
	return w.stream != nil && (w.queue.isLost(w.device) || w.hooks.probe(w) != nil)
}

// keep blocks until the process ends, and so keeps the memory of a worker on a lost GPU. LibTorch
// ends the process if it frees memory of a failed GPU that several streams have used.
func (w *worker) keep(left func()) {
	left()
	var never chan struct{}
	<-never
	runtime.KeepAlive(w)
}

func (w *worker) open() (err error) {
	if w.gpu != cuda.CPU {
		if w.stream, err = cuda.NewOwnedStream(w.gpu, cuda.StreamOptions{}); err != nil {
			return err
		}
		if w.restore, err = cuda.SetCUDAStream(w.stream.Stream); err != nil {
			return err
		}
		w.back.stream = w.stream.Stream
		if w.back.copied, err = cuda.NewEvent(cuda.EventOptions{Blocking: true}); err != nil {
			return err
		}
	}
	if err := w.slot.open(w.core, w.gpu, w.decoder); err != nil {
		return err
	}
	if w.run, err = w.o.Model(w.gpu); err == nil && w.run == nil {
		err = errors.New("BatcherOptions.Model returned no function")
	}
	if err == nil && !w.o.NoGraphs {
		w.graphed = w.newGraphed()
	}
	if err == nil && w.stream != nil {
		err = w.gpu.Synchronize() // other streams may still write the model's weights
	}
	return err
}

func (w *worker) newGraphed() *torch.Graphed {
	return torch.NewGraphed(func(x []*torch.Tensor) ([]*torch.Tensor, error) { return w.call(x[0]) },
		torch.GraphedOptions{MaxGraphs: len(w.o.Buckets), ReplayFirst: true, Fallback: true, Device: w.gpu})
}

func (w *worker) close() error {
	errs := []error{w.synchronize()}
	if w.graphed != nil {
		errs = append(errs, w.graphed.Close())
	}
	errs = append(errs, w.slot.close(), w.back.close())
	if w.restore != nil {
		errs = append(errs, w.restore())
	}
	return errors.Join(append(errs, w.stream.Close())...)
}

// synchronize waits for the worker's work on its device.
func (w *worker) synchronize() error {
	if w.stream == nil {
		return nil
	}
	return w.stream.Synchronize()
}

// warmUp runs each bucket once, the largest first. It leaves out buckets for which the device has
// no memory.
func (w *worker) warmUp() error {
	clear(w.slot.memory)
	for i := len(w.o.Buckets) - 1; i >= 0; {
		bucket := w.o.Buckets[i]
		if bucket > w.queue.limitOf(w.device) {
			i--
			continue
		}
		err := w.first(i)
		switch {
		case err == nil:
			i--
		case !errors.Is(err, cuda.ErrOutOfMemory) || !w.makeRoom(bucket, err):
			return fmt.Errorf("the first batch of %d: %w", bucket, errors.Join(err, w.synchronize()))
		}
	}
	if w.graphed != nil && w.graphed.Stats().Refused != nil {
		w.o.Logger.Warn("serve: the model cannot be captured as a graph, and is called for each batch", "device",
			w.device.name, "error", w.graphed.Stats().Refused)
	}
	return nil
}

// first runs a bucket without requests.
func (w *worker) first(bucket int) error {
	scope := torch.NewScope("warm-up")
	defer scope.Close()
	x, err := w.slot.fill(scope, bucket)
	if err == nil {
		_, err = w.outputs(x, w.o.Buckets[bucket])
	}
	return err
}

// makeRoom frees the memory of larger buckets' graphs for a bucket that lacks memory, or leaves the
// bucket out. It reports false if there is no smaller one.
func (w *worker) makeRoom(bucket int, err error) bool {
	if w.graphed == nil || w.queue.limitOf(w.device) == bucket {
		return w.shrink(bucket, err)
	}
	w.dropGraphs()
	w.limit(bucket, bucket, err)
	return true
}

// dropGraphs closes all graphs, which are captured again when they are needed.
func (w *worker) dropGraphs() {
	if err := w.graphed.Close(); err != nil {
		w.o.Logger.Warn("serve: closing graphs", "device", w.device.name, "error", err)
	}
	w.graphed, w.hits = w.newGraphed(), 0
}

// dropRenewed drops the graphs if some have been captured again because they were stale. Captured
// in another order than in warmUp, the graphs need more memory. It reports whether there were such
// graphs: the batch may then have room.
func (w *worker) dropRenewed() bool {
	if w.graphed == nil || w.graphed.Stats().Stale == 0 {
		return false
	}
	w.dropGraphs()
	return true
}

// bucketOf returns the index of the smallest bucket with room for n requests.
func (c *core) bucketOf(n int) int {
	i, _ := slices.BinarySearch(c.o.Buckets, n)
	return i
}

// serve answers all requests of a batch. If the device has no memory for them, it runs them again
// in smaller batches.
func (w *worker) serve(batch []*request) {
	for batch = w.dropGone(batch); len(batch) > 0; batch = w.dropGone(batch) {
		part := batch[:min(len(batch), w.queue.limitOf(w.device))]
		err := w.attempt(part)
		if errors.Is(err, cuda.ErrOutOfMemory) {
			if w.dropRenewed() {
				continue
			}
			if w.shrink(w.o.Buckets[w.bucketOf(len(part))], err) {
				w.count.outOfMemory()
				continue
			}
		}
		if err != nil {
			err = w.failure(len(part), err)
			w.release(part)
			for _, r := range part {
				r.fail(err)
			}
		}
		batch = batch[len(part):]
	}
}

// dropGone removes the requests that have been cancelled.
func (w *worker) dropGone(batch []*request) []*request {
	return slices.DeleteFunc(batch, func(r *request) bool {
		r.hold()
		defer r.release()
		if r.gone {
			w.release([]*request{r})
		}
		return r.gone
	})
}

// release ends a worker's use of requests. It precedes their answers, so that Stats counts a batch
// when its calls of Do return.
func (w *worker) release(part []*request) {
	for _, r := range part {
		w.buffers.put(r.input)
	}
	w.count.ended(len(part))
}

// shrink lowers the device's maximum batch to half of a bucket, if there is a smaller one.
func (w *worker) shrink(bucket int, err error) bool {
	if bucket == w.o.Buckets[0] {
		return false
	}
	most := w.o.Buckets[0]
	for _, b := range w.o.Buckets {
		if b <= bucket/2 {
			most = b
		}
	}
	w.limit(bucket, most, err)
	return true
}

// limit lowers the device's maximum batch, because a bucket lacks memory.
func (w *worker) limit(bucket, most int, err error) {
	w.queue.shrink(w.device, most)
	w.o.Logger.Warn("serve: out of memory: batches get smaller", "device", w.device.name, "batch", bucket, "now", most,
		"error", err)
}

// failure returns the answer to the requests of a failed batch. It waits for the work that the
// batch left on the stream, because the next batch reuses its memory. If that fails, the device is
// lost.
func (w *worker) failure(rows int, err error) error {
	lost := w.hooks.probe(w)
	if lost == nil {
		w.o.Logger.Warn("serve: a batch has failed", "device", w.device.name, "batch", rows, "error", err)
		return fmt.Errorf("serve: a batch of %d on %s: %w", rows, w.device.name, err)
	}
	err = fmt.Errorf("serve: a batch of %d: %s: %w: %w; then %w", rows, w.device.name, ErrDeviceLost, err, lost)
	if w.queue.lose(w.device, err) {
		w.o.Logger.Error("serve: a device is lost", "device", w.device.name, "error", err)
	}
	return err
}

// attempt runs requests as one batch and answers them. After an error it has answered none of them.
func (w *worker) attempt(part []*request) error {
	began := time.Now()
	scope := torch.NewScope("batch")
	defer scope.Close()
	bucket := w.bucketOf(len(part))
	x, faults, err := w.fill(scope, part, bucket)
	if err != nil {
		return err
	}
	var outputs []hostOutput
	if x != nil {
		if outputs, err = w.outputs(x, len(part)); err != nil {
			return err
		}
	}
	ran := time.Since(began)
	if x != nil {
		w.count.ran(bucket, len(part), ran)
	}
	w.release(part)
	for i, r := range part {
		if faults[i] != nil {
			r.fail(faults[i])
			continue
		}
		a := Answer{Device: w.gpu, Batch: len(part), Waited: began.Sub(r.entered), Ran: ran}
		for _, o := range outputs {
			a.Outputs = append(a.Outputs, o.row(i))
		}
		r.answered <- outcome{answer: a}
	}
	return nil
}

// fill makes the model's input from the requests. Images that a device decodes may be at fault:
// faults has their errors by row, and x is nil if all of them are.
func (w *worker) fill(scope *torch.Scope, part []*request, bucket int) (x *torch.Tensor, faults []error, err error) {
	faults = make([]error, len(part))
	if w.decoder == nil || w.decoder.units == nil {
		row := w.buffers.size
		writeRows(w.slot.memory[:len(part)*row], part)
		clear(w.slot.memory[len(part)*row : w.o.Buckets[bucket]*row])
		x, err = w.slot.fill(scope, bucket)
		return x, faults, err
	}
	x, err = w.decode(scope, part, bucket, faults)
	return x, faults, err
}

const (
	// bytesPerWriter is the least work for which another goroutine is started: about 0.1 ms.
	bytesPerWriter = 1 << 20
	maxWriters     = 8 // their memory's bandwidth is about a GPU's bus
)

// writeRows writes the rows of requests to memory, which has room for them alone. Several
// goroutines write large batches, because one core copies a batch of images in about the time in
// which a GPU computes it.
func writeRows(memory []byte, part []*request) {
	size := len(memory) / len(part)
	var next atomic.Int64
	var rows sync.WaitGroup // and not of goroutines: one that starts late has no row
	rows.Add(len(part))
	write := func() {
		for i := int(next.Add(1)) - 1; i < len(part); i = int(next.Add(1)) - 1 {
			part[i].write(memory[i*size : (i+1)*size])
			rows.Done()
		}
	}
	for range min(len(part), len(memory)/bytesPerWriter, runtime.GOMAXPROCS(0), maxWriters) - 1 {
		go write()
	}
	write()
	rows.Wait() // the device reads the memory next
}

// decode is fill for images that the device decodes.
func (w *worker) decode(scope *torch.Scope, part []*request, bucket int, faults []error) (*torch.Tensor, error) {
	images := make([][]byte, len(part))
	for i, r := range part {
		r.hold()
		defer r.release()
		if !r.gone { // otherwise nil, which is no image, and nobody waits for the answer
			images[i] = r.lent
		}
	}
	x := w.slot.x[bucket].In(scope).NoGrad()
	decoded, err := w.decoder.into(w.base, x.Narrow(0, 0, int64(len(part))), images)
	var list decode.Errors
	if errors.As(err, &list) {
		for _, f := range list {
			one := *f
			one.Image = 0
			faults[f.Image] = decode.Errors{&one}
		}
		err = nil
	}
	if err != nil || !decoded {
		return nil, err
	}
	if padding := x.Shape()[0] - int64(len(part)); padding > 0 {
		err = x.Narrow(0, int64(len(part)), padding).Zero_().Err()
	}
	return x, err
}

// outputs runs the model, and copies the first rows of its outputs to the host.
func (w *worker) outputs(x *torch.Tensor, rows int) ([]hostOutput, error) {
	scope, bucket := x.Scope(), x.Shape()[0]
	results, err := w.replay(x)
	if err != nil {
		return nil, err
	}
	return w.back.read(scope, results, bucket, int64(rows))
}

// replay runs the model, on a GPU as the bucket's graph.
func (w *worker) replay(x *torch.Tensor) ([]*torch.Tensor, error) {
	if w.graphed == nil {
		return w.call(x)
	}
	w.failed = nil
	results, err := w.graphed.Call(x)
	if hits := w.graphed.Stats().Hits; hits > w.hits {
		w.hits = hits
		w.count.replayed()
	}
	if w.failed != nil && err != nil {
		err = w.failed // without the graph's name
	}
	return results, err
}

// call calls the user's function. A panic is an error.
func (w *worker) call(x *torch.Tensor) (results []*torch.Tensor, err error) {
	defer func() {
		if p := recover(); p != nil {
			w.o.Logger.Error("serve: the model panicked", "panic", p, "stack", string(debug.Stack()))
			err = fmt.Errorf("the model panicked: %v", p)
		}
		w.failed = err
	}()
	return w.run(w.base, x)
}

// slot is a worker's memory for the input of a batch.
type slot struct {
	scope   *torch.Scope // owns the tensors; nil before open
	memory  []byte       // MaxBatch rows of host memory, pinned for a GPU
	decoder *Decoder
	host    []*torch.Tensor // by bucket: memory, pixels on the device, and the model's input
	staged  []*torch.Tensor // nil unless a GPU normalises pixels
	x       []*torch.Tensor
}

func (s *slot) open(c *core, on cuda.Device, decoder *Decoder) error {
	s.scope, s.decoder = torch.NewScope("the input of a worker"), decoder
	most := int64(c.o.MaxBatch)
	o := torch.TensorOptions{Device: cuda.CPU, DType: c.host.DType, MemoryFormat: c.host.MemoryFormat, Scope: s.scope,
		Pinned: on != cuda.CPU}
	host, err := o.Empty(append([]int64{most}, c.host.Shape...)...)
	if err != nil {
		return err
	}
	if s.memory, err = host.Bytes(); err != nil {
		return err
	}
	var staged *torch.Tensor
	x := host // rows on the CPU need no copy
	if decoder != nil && on != cuda.CPU {
		if staged, err = s.empty(on, c.host, most); err != nil {
			return err
		}
	}
	switch {
	case decoder != nil:
		x, err = s.empty(on, decoder.output, most)
	case on != cuda.CPU:
		x, err = s.empty(on, c.o.Input, most)
	}
	if err != nil {
		return err
	}
	s.host, s.x = views(host, c.o.Buckets), views(x, c.o.Buckets)
	if staged != nil {
		s.staged = views(staged, c.o.Buckets)
	}
	return nil
}

func (s *slot) empty(on cuda.Device, spec tensor.Spec, rows int64) (*torch.Tensor, error) {
	t, err := torch.EmptySpec(on, spec, rows)
	if err != nil {
		return nil, err
	}
	return s.scope.Own(t), nil
}

// views returns the first rows of t for each bucket.
func views(t *torch.Tensor, buckets []int) (list []*torch.Tensor) {
	for _, bucket := range buckets {
		list = append(list, t.Narrow(0, 0, int64(bucket)))
	}
	return list
}

func (s *slot) close() error { return s.scope.Close() }

// fill queues the work that makes a bucket's input from the host memory. The scope owns the handle
// that it returns.
func (s *slot) fill(scope *torch.Scope, bucket int) (*torch.Tensor, error) {
	x, pixels := s.x[bucket], s.host[bucket]
	var err error
	switch {
	case s.decoder == nil && x.Device() == cuda.CPU: // x is the host memory
	case s.decoder == nil:
		err = copyPixels(x, pixels)
	default:
		if s.staged != nil {
			pixels = s.staged[bucket]
			err = copyPixels(pixels, s.host[bucket])
		}
		if err == nil {
			err = s.decoder.normalise(x, pixels)
		}
	}
	if err != nil {
		return nil, err
	}
	return x.In(scope).NoGrad(), nil
}

// hostOutput is an output's rows of requests in host memory.
type hostOutput struct {
	shape  []int64 // of one row
	values []float32
	size   int // elements of a row
}

// row returns a copy of a row.
func (o hostOutput) row(i int) Output {
	return Output{Shape: slices.Clone(o.shape), Values: slices.Clone(o.values[i*o.size : (i+1)*o.size])}
}

// readback copies outputs to the host.
type readback struct {
	stream cuda.Stream  // the current stream on a GPU
	copied *cuda.Event  // nil on the CPU
	pinned *cuda.Pinned // nil until a GPU's first outputs, and on the CPU
}

// read waits until a batch's outputs are computed, and returns the rows of the requests. The values
// are valid until the next call, or until the scope ends.
func (b *readback) read(scope *torch.Scope, outputs []*torch.Tensor, bucket, rows int64) ([]hostOutput, error) {
	list, sources, bytes := make([]hostOutput, len(outputs)), make([]*torch.Tensor, len(outputs)), 0
	for i, t := range outputs {
		t = t.In(scope)
		if err := t.Err(); err != nil {
			return nil, fmt.Errorf("output %d: %w", i, err)
		}
		shape := t.Shape()
		if len(shape) == 0 || shape[0] != bucket {
			return nil, fmt.Errorf("output %d has the shape %v, want the batch's %d rows first", i, shape, bucket)
		}
		sources[i] = t.Narrow(0, 0, rows).ToDType(torch.Float32).Contiguous(torch.Contiguous)
		if err := sources[i].Err(); err != nil {
			return nil, fmt.Errorf("output %d: %w", i, err)
		}
		row := tensor.Spec{DType: torch.Float32, Shape: shape[1:]}
		list[i] = hostOutput{shape: row.Shape, size: int(row.Elements())}
		bytes += int(rows * row.Bytes())
	}
	if b.copied != nil {
		return list, b.copy(list, sources, rows, bytes)
	}
	for i, source := range sources {
		values, err := torch.Memory[float32](source)
		if err != nil {
			return nil, fmt.Errorf("output %d: %w", i, err)
		}
		list[i].values = values
	}
	return list, nil
}

// copy copies the sources from a GPU to pinned memory, and waits.
func (b *readback) copy(list []hostOutput, sources []*torch.Tensor, rows int64, bytes int) error {
	if err := b.reserve(bytes); err != nil {
		return err
	}
	memory := b.pinned.Bytes()
	for i, source := range sources {
		n := 4 * int(rows) * list[i].size
		if n == 0 {
			continue
		}
		part := memory[:n:n]
		memory = memory[n:]
		list[i].values = unsafe.Slice((*float32)(unsafe.Pointer(unsafe.SliceData(part))), n/4)
		target, err := torch.FromMemory(part, torch.Float32, source.Shape()...)
		if err != nil {
			return err
		}
		defer target.Close()
		if err := copyPixels(target, source); err != nil {
			return err
		}
	}
	if err := b.copied.Record(b.stream); err != nil {
		return err
	}
	return b.copied.Synchronize() // the next batch may then use all memory of the worker again
}

// reserve makes room for outputs. All copies to the pinned memory are done.
func (b *readback) reserve(bytes int) (err error) {
	if b.pinned != nil && len(b.pinned.Bytes()) >= bytes {
		return nil
	}
	if b.pinned != nil {
		if err := b.pinned.Close(); err != nil {
			return err
		}
	}
	b.pinned, err = cuda.NewPinnedNear(b.stream.Device(), max(bytes, 1))
	return err
}

func (b *readback) close() error {
	var errs []error
	if b.pinned != nil {
		errs = append(errs, b.pinned.Close())
	}
	if b.copied != nil {
		errs = append(errs, b.copied.Close())
	}
	return errors.Join(errs...)
}
