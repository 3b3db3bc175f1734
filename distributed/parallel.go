package distributed

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/internal/control"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/torch"
)

// DataParallelOptions are the options of [NewDataParallel]. The zero value works. All ranks use the
// same options.
type DataParallelOptions struct {
	// BucketBytes is the size of a bucket. Gradients are collected in buckets, and each bucket is
	// reduced by one collective. A bucket is closed when it has at least this size. 0 means 25 MiB.
	// The first bucket is closed at 1 MiB, or at BucketBytes if that is less, so that the reduction
	// starts early.
	BucketBytes int64
	// ReduceDType is the dtype in which gradients are reduced. Float16 and BFloat16 halve the
	// traffic of float32 gradients, and round them. 0 keeps the parameters' dtype.
	ReduceDType torch.DType
	// FindUnused allows parameters without a gradient, such as the parameters of a branch that was
	// not taken. A parameter that no rank has used then has no gradient, as in one process. Without
	// FindUnused, Backward returns an error that names a parameter without a gradient. FindUnused
	// costs a small collective on the CPU in each backward pass, which cannot be captured in a
	// graph.
	FindUnused bool
}

const (
	defaultBucketBytes = 25 << 20
	firstBucketBytes   = 1 << 20
)

// DataParallel trains one model on several ranks. Each rank computes gradients for its samples, and
// all ranks get the average. Gradients are collected in buckets. A bucket is reduced as soon as it
// is complete, while the rest of backward runs.
//
//	parallel, err := distributed.NewDataParallel(world, net, distributed.DataParallelOptions{})
//	...
//	loss := net.Forward(images).CrossEntropy(labels)
//	if err := parallel.Backward(loss); err != nil {
//		return err
//	}
//	err = opt.Step() // the same on all ranks
//
// After Backward the gradients are the same on every rank, bit for bit. So are the results of
// clipping, GradScaler's decisions, and the parameters after the optimizer's step. A gradient is a
// view of its bucket. After the first two backward passes its address no longer changes, unless
// ReduceDType is set. Dropping gradients before the next backward, as Optimizer.ZeroGrad does,
// costs nothing.
//
// Hooks of Tensor.RegisterPostAccumulateGradHook see this rank's gradient and may change it. The
// gradient is reduced after the hooks, even after hooks that are registered later than
// NewDataParallel.
//
// Buffers, such as BatchNorm2d's running statistics, are made equal once, at the start. After that,
// each rank updates its own buffers. A BatchNorm normalises by the statistics of this rank's
// samples, unless [ConvertSyncBatchNorm] has converted it.
//
// Only one goroutine at a time may use a DataParallel.
type DataParallel struct {
	g       *Group
	o       DataParallelOptions
	named   []torch.Named // the trained parameters
	params  []*torch.Tensor
	reducer *capi.Reducer
	stream  *cuda.OwnedStream // for the reduction of buckets; nil on the CPU
	local   bool              // NoSync is running
	rebuilt bool              // the buckets have been rearranged in the order of backward
	unused  []bool
	closing sync.Once
}

// String returns this rank and the number of trained parameters, for example "DataParallel(rank 0
// of 4, 62 parameters)".
func (d *DataParallel) String() string {
	return fmt.Sprintf("DataParallel(%s, %d parameters)", d.g.place(), len(d.params))
}

// NewDataParallel copies rank 0's parameters and buffers to all ranks and prepares the reduction of
// gradients. The model must be on the group's device and have the same parameters, by name, shape,
// strides and dtype, on all ranks. Otherwise all ranks get an error that names the first
// difference. If a parameter is frozen at this time, its gradient is never reduced.
//
// Close the DataParallel before the group, and after graphs that captured a backward pass. It does
// not own the model.
func NewDataParallel(g *Group, m nn.Module, o DataParallelOptions) (*DataParallel, error) {
	switch {
	case o.BucketBytes < 0:
		return nil, fmt.Errorf("distributed.NewDataParallel: BucketBytes is %d, and must not be "+
			"negative: %w", o.BucketBytes, cuda.ErrInvalidArgument)
	case o.ReduceDType != 0 && o.ReduceDType != torch.BFloat16 && o.ReduceDType != torch.Float16 &&
		o.ReduceDType != torch.Float32:
		return nil, fmt.Errorf("distributed.NewDataParallel: ReduceDType is %v, and must be BFloat16, "+
			"Float16, Float32 or 0: %w", o.ReduceDType, cuda.ErrInvalidArgument)
	}
	if o.BucketBytes == 0 {
		o.BucketBytes = defaultBucketBytes
	}
	d := &DataParallel{g: g, o: o}
	for _, n := range nn.NamedParameters(m) {
		if n.Tensor.RequiresGrad() {
			d.named = append(d.named, n)
			d.params = append(d.params, n.Tensor)
		}
	}
	d.unused = make([]bool, len(d.params))
	if err := d.agree(m); err != nil {
		return nil, fmt.Errorf("distributed.NewDataParallel: %w", err)
	}
	for _, n := range nn.State(m) {
		if n.Tensor.Elements() == 0 {
			continue
		}
		if err := g.Broadcast(n.Tensor, 0); err != nil {
			return nil, fmt.Errorf("distributed.NewDataParallel: %s: %w", n.Name, err)
		}
	}
	if err := d.prepare(); err != nil {
		d.Close()
		return nil, fmt.Errorf("distributed.NewDataParallel: %w", err)
	}
	return d, nil
}

// agree checks, on all ranks, that the ranks have the same model.
func (d *DataParallel) agree(m nn.Module) error {
	mine := modelText{Options: fmt.Sprintf("%+v", d.o)}
	for _, n := range nn.State(m) {
		if err := n.Tensor.Err(); err != nil {
			mine.Err = fmt.Sprintf("%s: %v", n.Name, err)
			break
		}
		if n.Tensor.Device() != d.g.Device() {
			mine.Err = fmt.Sprintf("%s is on %v, and the group's device is %v: call nn.To before", n.Name,
				n.Tensor.Device(), d.g.Device())
			break
		}
		mine.Tensors = append(mine.Tensors,
			fmt.Sprintf("%s %v%v of strides %v, trained: %v", n.Name, n.Tensor.DType(), n.Tensor.Shape(),
				n.Tensor.Strides(), n.Tensor.RequiresGrad()))
	}
	if mine.Err == "" && len(d.params) == 0 {
		mine.Err = "the model has no parameter to train"
	}
	return mine.agree(d.g)
}

// modelText describes a model and its options for comparison.
type modelText struct {
	Options string
	Tensors []string
	Err     string
}

// agree returns an error if a rank has an error or describes a different model.
func (m modelText) agree(g *Group) error {
	all, err := AllGatherObject(g, m)
	if err != nil {
		return err
	}
	for r, other := range all {
		if other.Err != "" {
			return fmt.Errorf("rank %d: %s: %w", r, other.Err, cuda.ErrInvalidArgument)
		}
	}
	for r, other := range all {
		if difference := all[0].difference(other); difference != "" {
			return fmt.Errorf("%w: rank 0 has %s on rank %d", ErrMismatch, difference, r)
		}
	}
	return nil
}

// difference returns the first difference as "A, and B", or "" if there is none.
func (m modelText) difference(other modelText) string {
	if m.Options != other.Options {
		return fmt.Sprintf("the options %s, and %s", m.Options, other.Options)
	}
	for i := range max(len(m.Tensors), len(other.Tensors)) {
		a, b := "no more parameters", "no more parameters"
		if i < len(m.Tensors) {
			a = m.Tensors[i]
		}
		if i < len(other.Tensors) {
			b = other.Tensors[i]
		}
		if a != b {
			return a + ", and " + b
		}
	}
	return ""
}

func (d *DataParallel) prepare() (err error) {
	if err := d.g.lock(); err != nil {
		return err
	}
	defer d.g.mu.Unlock()
	group, on := d.g.comms.cpu, capi.Stream{}
	if d.g.comms.gpu != nil {
		if d.stream, err = cuda.NewOwnedStream(d.g.Device(), cuda.StreamOptions{Priority: -1}); err != nil {
			return err
		}
		group, on = d.g.comms.gpu, d.stream.CAPI()
	}
	dtype := int32(-1)
	if d.o.ReduceDType != 0 {
		dtype = int32(d.o.ReduceDType)
	}
	err = torch.CAPI("NewDataParallel", d.params, func(p []*capi.Tensor) (err error) {
		d.reducer, err = capi.NewReducer(group, on, p, dtype)
		return err
	})
	if err != nil {
		return err
	}
	order := make([]int64, len(d.params))
	for i := range order {
		order[i] = int64(len(order) - 1 - i) // backward visits the last layer first
	}
	return d.arrange(order)
}

// arrange makes buckets for gradients that arrive in the given order.
func (d *DataParallel) arrange(order []int64) error {
	sizes, dtypes := make([]int64, len(d.params)), make([]torch.DType, len(d.params))
	for i, p := range d.params {
		dtypes[i] = p.DType()
		of := dtypes[i]
		if d.o.ReduceDType != 0 {
			of = d.o.ReduceDType
		}
		sizes[i] = p.Elements() * int64(of.Size())
	}
	arranged, ends := buckets(order, sizes, dtypes, min(firstBucketBytes, d.o.BucketBytes), d.o.BucketBytes)
	return capi.ArrangeReducer(d.reducer, arranged, ends)
}

// buckets divides the parameters, in the given order, into buckets of one dtype. The first bucket
// is closed when its size in bytes reaches first, every later one when its size reaches limit.
// buckets returns the parameters in the order of the buckets, and the end of each bucket in that
// list.
func buckets[D comparable](order, sizes []int64, dtypes []D, first, limit int64) (arranged, ends []int64) {
	type bucket struct {
		parameters []int64
		bytes      int64
	}
	open := map[D]*bucket{}
	var begun []D // dtypes with an open bucket, in the order of their first parameters
	closed := func(b *bucket) {
		arranged = append(arranged, b.parameters...)
		ends = append(ends, int64(len(arranged)))
	}
	for _, i := range order {
		d := dtypes[i]
		b := open[d]
		if b == nil {
			b = &bucket{}
			open[d] = b
			begun = append(begun, d)
		}
		b.parameters = append(b.parameters, i)
		b.bytes += sizes[i]
		if b.bytes >= first {
			closed(b)
			delete(open, d)
			begun = slices.DeleteFunc(begun, func(other D) bool { return other == d })
			first = limit
		}
	}
	for _, d := range begun {
		closed(open[d])
	}
	return arranged, ends
}

// Backward computes the gradients of the loss on this rank and averages them over all ranks. Like
// Tensor.Backward, it returns on a GPU when all work is enqueued, and on the CPU when all work is
// done. A rank without samples passes nil and contributes zeros.
//
// The average is over ranks. If ranks have different numbers of samples, pass the loss that
// [DataParallel.Weigh] returns, to get the gradients of the mean over all samples.
//
// If the loss has an error, Backward returns it and does nothing else. An error or a panic in
// backward ends the job, since the other ranks would wait for this rank's gradients.
func (d *DataParallel) Backward(loss *torch.Tensor) error {
	if loss == nil {
		return d.around(func() error { return nil }, true)
	}
	if err := loss.Err(); err != nil {
		return err
	}
	return d.around(loss.Backward, false)
}

// Around calls a function that makes one backward pass, and averages the gradients as
// [DataParallel.Backward] does. Use it for passes that other code makes:
//
//	err := parallel.Around(func() error { return scaler.Backward(loss) })
func (d *DataParallel) Around(backward func() error) error { return d.around(backward, false) }

// around implements Around. empty says whether this rank has no samples.
func (d *DataParallel) around(backward func() error, empty bool) error {
	if d.local {
		return backward()
	}
	c, err := d.enter()
	if err != nil {
		return err
	}
	if err := capi.BeginReducer(d.reducer); err != nil {
		return c.local(err)
	}
	j := d.g.job
	returned := false
	defer func() {
		if !returned { // The other ranks wait for this rank, but the program may recover from the panic.
			capi.CancelReducer(d.reducer)
			j.member.Abort(fmt.Sprintf("%v ended in a panic", c.call))
		}
	}()
	err = backward()
	if err == nil {
		err = d.join()
	}
	returned = true
	if err != nil {
		capi.CancelReducer(d.reducer)
		if v := j.member.Verdict(); v != nil {
			return c.failed(v)
		}
		j.member.Abort(fmt.Sprintf("%v failed: %v", c.call, err))
		return c.local(err)
	}
	j.member.Leave(c.key, c.call.Seq)
	return d.afterwards(empty)
}

// enter records the pass as a call of the group.
func (d *DataParallel) enter() (*call, error) {
	if err := d.g.check("DataParallel.Backward", nil); err != nil {
		return nil, err
	}
	if err := d.g.lock(); err != nil {
		return nil, err
	}
	defer d.g.mu.Unlock()
	c := &call{g: d.g, key: d.g.name, of: d.g.ranks,
		call: control.Call{Seq: d.g.calls.next(), Name: "DataParallel.Backward", Line: caller()}}
	c.enter()
	if !d.g.job.o.Debug {
		return c, nil
	}
	c.call.What = fmt.Sprintf("%d parameters", len(d.params))
	if err := d.g.job.member.Arrive(d.g.name+"#debug", d.g.ranks, c.call, true, d.g.job.o.Timeout); err != nil {
		return nil, c.failed(err)
	}
	return c, nil
}

// join waits for the reduction. On the CPU it also returns if the job ends.
func (d *DataParallel) join() error {
	if d.stream != nil {
		return capi.JoinReducer(d.reducer, d.unused)
	}
	done := make(chan error, 1)
	go func() { done <- capi.JoinReducer(d.reducer, d.unused) }()
	j := d.g.job
	select {
	case err := <-done:
		if err != nil {
			c := call{g: d.g, key: d.g.name, of: d.g.ranks, call: d.g.latest()}
			err = c.explained(err)
		}
		return err
	case <-j.member.Failed():
		capi.AbortReducer(d.reducer)
		<-done
		return j.member.Verdict()
	}
}

// afterwards handles parameters without gradients. After the first pass it rearranges the buckets.
func (d *DataParallel) afterwards(empty bool) error {
	if d.o.FindUnused {
		if err := d.dropUnused(); err != nil {
			return err
		}
	} else if !empty && slices.Contains(d.unused, true) {
		var names []string
		for i, unused := range d.unused {
			if unused {
				names = append(names, d.named[i].Name)
			}
		}
		return fmt.Errorf("distributed: backward made no gradient for %s on rank %d: set "+
			"DataParallelOptions.FindUnused if that is meant, or freeze the parameters before NewDataParallel: %w",
			abbreviated(names), d.g.rank, cuda.ErrInvalidArgument)
	}
	if d.rebuilt {
		return nil
	}
	if d.stream != nil {
		current, err := cuda.GetCurrentCUDAStream(d.g.Device())
		if err != nil {
			return err
		}
		if capturing, err := current.Capturing(); err != nil || capturing {
			return err
		}
	}
	return d.rebuild()
}

func abbreviated(names []string) string {
	if len(names) > 5 {
		return fmt.Sprintf("%s and %d more", strings.Join(names[:5], ", "), len(names)-5)
	}
	return strings.Join(names, ", ")
}

// dropUnused drops the gradients of parameters that no rank has used. These gradients are zeros.
func (d *DataParallel) dropUnused() error {
	used := make([]byte, len(d.unused))
	for i, unused := range d.unused {
		if !unused {
			used[i] = 1
		}
	}
	t, err := torch.FromBytes(used, int64(len(used)))
	if err != nil {
		return err
	}
	defer t.Close()
	if err := d.g.AllReduce(t, Max); err != nil {
		return err
	}
	if err := t.ReadBytes(used); err != nil {
		return err
	}
	var nobody []*torch.Tensor
	for i, u := range used {
		if u == 0 {
			nobody = append(nobody, d.params[i])
		}
	}
	return torch.ClearGrads(nobody...)
}

// rebuild rearranges the buckets in the order in which rank 0's gradients arrived.
func (d *DataParallel) rebuild() error {
	order, err := capi.ReducerOrder(d.reducer, len(d.params))
	if err != nil {
		return err
	}
	if order, err = BroadcastObject(d.g, order, 0); err != nil {
		return err
	}
	for i := len(d.params) - 1; i >= 0; i-- {
		if !slices.Contains(order, int64(i)) {
			order = append(order, int64(i))
		}
	}
	d.rebuilt = true
	return d.arrange(order)
}

// NoSync calls fn. Backward passes in fn accumulate gradients on this rank only. The next Backward
// outside of NoSync averages the accumulated gradients. All ranks must use NoSync for the same
// passes.
func (d *DataParallel) NoSync(fn func() error) error {
	was := d.local
	d.local = true
	defer func() { d.local = was }()
	return fn()
}

// Weigh multiplies the loss by this rank's number of samples, divided by the average of the ranks'
// numbers. The loss must be the mean over this rank's samples. The gradients of the weighted
// losses, averaged over the ranks, are then the gradients of the mean over all samples. All ranks
// call Weigh. A rank without samples passes 0 and a nil loss, and gets nil. With
// [ConvertSyncBatchNorm] such a rank instead passes the loss of a batch with zero rows, whose value
// may be NaN. Weigh runs a small collective. On a GPU the host does not wait for it.
func (d *DataParallel) Weigh(loss *torch.Tensor, samples int) *torch.Tensor {
	return weigh(d.g, loss, samples)
}

func weigh(g *Group, loss *torch.Tensor, samples int) *torch.Tensor {
	if samples < 0 || loss == nil && samples > 0 {
		return torch.Fail("distributed.Weigh", fmt.Errorf("%d samples: a rank with samples has a loss: %w",
			samples, cuda.ErrInvalidArgument))
	}
	total, err := torch.Full(g.Device(), torch.Float64, float64(samples))
	if err != nil {
		return torch.Fail("distributed.Weigh", err)
	}
	defer total.Close()
	if err := g.AllReduce(total, Average); err != nil {
		return torch.Fail("distributed.Weigh", err)
	}
	if loss == nil {
		return nil
	}
	share := total.Reciprocal()
	defer share.Close()
	factor := share.MulScalar(float64(samples))
	defer factor.Close()
	return loss.Mul(factor)
}

// Close removes the hooks from the parameters. It does not wait, and may be called more than once.
func (d *DataParallel) Close() error {
	var err error
	d.closing.Do(func() {
		if d.reducer != nil {
			capi.FreeReducer(d.reducer)
		}
		if d.stream != nil {
			err = errors.Join(err, d.stream.Close())
		}
	})
	return err
}
