package distributed

import (
	"errors"
	"fmt"
	"slices"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/torch"
)

// ShardedBlock is a module whose parameters a [FullyShardedDataParallel] gathers before the module
// computes, and frees afterwards. Put it into the network instead of the module:
//
//	net := nn.NewSequential(
//		distributed.NewShardedBlock(stem),
//		distributed.NewShardedBlock(first),
//		distributed.NewShardedBlock(head),
//	)
//
// Before NewFullyShardedDataParallel, a ShardedBlock behaves like the module. From then on,
// nn.Parameters and nn.State list this rank's shards as the block's parameters. The parameters of
// the wrapped module are empty except while it computes.
//
// The block's backward pass is a separate pass inside the network's backward pass, so that
// FullyShardedDataParallel knows when the block's pass ends. Therefore gradients may reach the
// module only through the block's output, and not through a tensor that the module stores
// elsewhere. The module must not change its input in place, and other code must not change the
// output in place. An output that is a view of a parameter is copied. Other views of parameters
// must not be used after Forward: their memory is freed, and the program crashes.
type ShardedBlock struct {
	module nn.Module
	d      *FullyShardedDataParallel // nil before NewFullyShardedDataParallel

	name    string // the block's name in the network
	prefix  string // prefix of the parameters' names in the network
	flats   []*blockFlat
	params  []*blockParameter
	named   []torch.Named // the shards, by parameter name in the module
	buffers []torch.Named

	gathering
	used bool // a backward pass through the block is expected
	made bool // the current backward pass has reached the block
}

// gathering is the state of a block's gathered parameters.
type gathering struct {
	whole  bool    // the parameters are gathered, or being gathered
	shown  bool    // the module holds the gathered parameters
	works  []*Work // running gathers, on the CPU
	failed error   // error of works: the job has ended
}

// blockFlat is the memory of a block's parameters of one dtype. Trained and frozen parameters have
// separate flat tensors.
type blockFlat struct {
	flatParameters             // f.all has memory only while the block is gathered
	dtype          torch.DType // dtype of f.all; f.mine has the dtype of the parameters
	rounded        bool        // dtype differs from the parameters' dtype
	bytes          int64       // size of f.all
	gradBytes      int64       // size of grads
	held           bool        // f.all has memory, and the statistics count it
	trained        bool
	// grads holds this rank's gradients of f.all, which has share elements for each rank. It has
	// memory only during the reduction. It is nil if the parameters are frozen.
	grads   *torch.Tensor
	sum     *torch.Tensor // [share]: the averaged gradients of mine; nil if mine has none
	added   *torch.Tensor // [share]: averages to add to sum; nil unless a reduction adds to earlier gradients
	work    *Work         // running reduction of grads, on the CPU
	reduced bool          // the current backward pass has reduced grads
}

// blockParameter is a parameter of a block.
type blockParameter struct {
	shardedParameter
	in    *blockFlat
	names []string      // names in the module
	view  *torch.Tensor // view of in.all
	grad  *torch.Tensor // view of in.grads
	row   *torch.Tensor // view of in.sum: the gradient of piece; nil if piece is empty
	got   bool          // the parameter has a gradient in the current backward pass
}

// NewShardedBlock wraps a module in a block.
func NewShardedBlock(m nn.Module) *ShardedBlock { return &ShardedBlock{module: m} }

// Parts returns the parts of the module. After NewFullyShardedDataParallel it returns this rank's
// shards of the parameters, and the buffers.
func (b *ShardedBlock) Parts() nn.Parts {
	switch {
	case b.d != nil:
		return nn.Parts{Parameters: b.named, Buffers: b.buffers}
	case b.module == nil:
		return nn.Parts{}
	}
	return b.module.Parts()
}

// String returns the tree of the module: see nn.Tree. From NewFullyShardedDataParallel on, a block
// is a leaf with this rank's shards.
func (b *ShardedBlock) String() string { return nn.Tree(b) }

// SetTraining sets the mode of the module and all its parts.
func (b *ShardedBlock) SetTraining(training bool) { nn.Train(b.module, training) }

// Forward gathers the parameters and computes the module's output.
func (b *ShardedBlock) Forward(x *torch.Tensor) *torch.Tensor {
	if b.module == nil {
		return torch.Fail("distributed.ShardedBlock", fmt.Errorf("the module is nil: %w", cuda.ErrInvalidArgument))
	}
	if b.d == nil || x.Err() != nil {
		return b.module.Forward(x)
	}
	return torch.Function{Name: "ShardedBlock", Forward: b.forward, Backward: b.back}.Apply1(x, b.d.link)
}

// forward computes the output for in[0]. The second input makes the output require gradients even
// if the first input does not.
func (b *ShardedBlock) forward(c *torch.FunctionContext, in []*torch.Tensor) ([]*torch.Tensor, error) {
	x, recorded := in[0], c.NeedsInputGrad(1)
	if recorded {
		x = x.Detach().EnableGrad()
		if c.NeedsInputGrad(0) {
			if err := x.SetRequiresGrad(true); err != nil {
				return nil, err
			}
		}
	}
	if err := b.d.enter(b); err != nil {
		return nil, err
	}
	y, err := b.own(b.module.Forward(x))
	if err != nil {
		return nil, errors.Join(err, b.free())
	}
	if recorded = recorded && y.RequiresGrad(); recorded {
		c.SaveForBackward(y, x)
		c.Data = b.d.version.changes
		b.used = true
	} else {
		c.MarkNonDifferentiable(y)
	}
	return []*torch.Tensor{y}, b.d.leave(b, recorded)
}

// own returns the module's output, or a copy if the output is a view of the parameters' memory,
// such as rows of a table of position embeddings. That memory is freed after the pass, and reading
// it would crash.
func (b *ShardedBlock) own(y *torch.Tensor) (*torch.Tensor, error) {
	if err := y.Err(); err != nil {
		return nil, err
	}
	at, err := y.Pointer()
	if err != nil || y.Elements() == 0 {
		return y, nil // a tensor without an address is not a view
	}
	for _, f := range b.flats {
		if f.share == 0 {
			continue
		}
		begin, err := f.all.Pointer()
		if err != nil {
			return nil, err
		}
		if begin <= at && at < begin+uintptr(f.bytes) {
			y = y.Clone()
			return y, y.Err()
		}
	}
	return y, nil
}

// back runs the backward pass of the module.
func (b *ShardedBlock) back(c *torch.FunctionContext, gradients []*torch.Tensor) ([]*torch.Tensor, error) {
	if c.Data != b.d.version.changes {
		return nil, b.changed()
	}
	if err := b.d.reach(b); err != nil {
		return nil, err
	}
	y, x := c.SavedTensors()[0], c.SavedTensors()[1]
	if err := y.BackwardWith(torch.BackwardOptions{Gradient: gradients[0]}); err != nil {
		return nil, err
	}
	if err := b.finish(); err != nil {
		return nil, err
	}
	if !c.NeedsInputGrad(0) {
		return []*torch.Tensor{nil, nil}, nil
	}
	return []*torch.Tensor{x.Grad(), nil}, nil
}

func (b *ShardedBlock) changed() error {
	return fmt.Errorf("distributed: %s: the parameters have changed since Forward, and backward would "+
		"compute with the new ones: call Backward before Step: %w",
		b.name, cuda.ErrInvalidArgument)
}

// finish starts to average the gradients of the block's backward pass and frees its parameters.
func (b *ShardedBlock) finish() error {
	if err := b.reduce(); err != nil {
		return err
	}
	b.made = true
	b.used = false
	return b.free()
}

// resize allocates memory for a flat tensor. 0 bytes frees it.
func resize(t *torch.Tensor, bytes int64) error {
	return torch.CAPI("ShardedBlock", []*torch.Tensor{t},
		func(c []*capi.Tensor) error { return capi.ResizeStorage(c[0], bytes) })
}

// hold allocates or frees the memory of f.all, and counts its bytes once.
func (b *ShardedBlock) hold(f *blockFlat, held bool) error {
	bytes, change := int64(0), -f.bytes
	if held {
		bytes, change = f.bytes, f.bytes
	}
	if err := resize(f.all, bytes); err != nil {
		return err
	}
	if f.held != held {
		f.held = held
		b.d.gathered(change)
	}
	return nil
}

// gather starts to gather the parameters. On the collectives' stream the gather follows the work
// enqueued so far.
func (b *ShardedBlock) gather() error {
	if b.whole {
		return nil
	}
	b.whole = true
	return b.d.onStream(func() error {
		for _, f := range b.flats {
			if f.share == 0 {
				continue
			}
			if err := b.hold(f, true); err != nil {
				return err
			}
			mine := f.mine
			if f.rounded { // the rounded copy is closed after the gather
				mine = mine.ToDType(f.dtype)
			}
			work, err := b.d.launch("AllGather of "+b.name, "", f.all, mine, allGather)
			if f.rounded {
				mine.Close()
			}
			if err != nil {
				return err
			}
			if work != nil {
				b.works = append(b.works, work)
			}
		}
		return nil
	})
}

// show waits for the gather and sets the module's parameters. On a GPU the current stream waits,
// not the host.
func (b *ShardedBlock) show() error {
	if err := b.gather(); err != nil {
		return err
	}
	if err := b.await(); err != nil {
		return err
	}
	if b.shown {
		return nil
	}
	if err := b.d.follow(); err != nil {
		return err
	}
	b.shown = true
	for _, p := range b.params {
		if err := p.param.SetData(p.view); err != nil {
			return err
		}
	}
	return nil
}

// await waits for the gathers on the CPU.
func (g *gathering) await() error {
	var errs []error
	for _, w := range g.works {
		errs = append(errs, w.Wait(), w.Close())
	}
	g.works = nil
	if g.failed == nil {
		g.failed = errors.Join(errs...)
	}
	return g.failed
}

// free removes the gathered parameters from the module and frees their memory. The collectives'
// stream may reuse the memory after the work enqueued on the current stream so far.
func (b *ShardedBlock) free() error {
	if !b.whole {
		return nil
	}
	if err := b.await(); err != nil {
		// After the end of the job a thread of Gloo may still write to the memory, so the memory is
		// kept until the tensor is closed.
		return err
	}
	var errs []error
	if b.shown {
		for _, p := range b.params {
			errs = append(errs, p.param.SetData(b.d.empty[p.in.dtype]))
		}
		errs = append(errs, b.d.precede())
	}
	for _, f := range b.flats {
		errs = append(errs, b.hold(f, false))
	}
	b.whole, b.shown = false, false
	return errors.Join(errs...)
}

// missing names the trained parameters that got no gradient in the current backward pass, if the
// pass has reached the block.
func (b *ShardedBlock) missing() (names []string) {
	for _, p := range b.params {
		if b.made && p.in.trained && !p.got {
			names = append(names, b.prefix+p.names[0])
		}
	}
	return names
}

// reduce starts to average the gradients over the ranks and drops this rank's gradients.
func (b *ShardedBlock) reduce() error {
	if !slices.ContainsFunc(b.flats, func(f *blockFlat) bool { return f.trained }) {
		return nil
	}
	scope := torch.NewScope("gradients of a block")
	defer scope.Close()
	for _, f := range b.flats {
		if !f.trained || f.share == 0 {
			continue
		}
		if err := f.await(); err != nil {
			return err
		}
		if err := b.d.onStream(func() error {
			return errors.Join(resize(f.grads, f.gradBytes),
				b.receive(f))
		}); err != nil {
			return err
		}
	}
	// The memory of grads may have belonged to an earlier block. The collectives' stream may still
	// read that block's gradients.
	if err := b.d.follow(); err != nil {
		return err
	}
	var into, from, whole, none []*torch.Tensor
	for _, p := range b.params {
		if !p.in.trained {
			continue
		}
		g := p.marked.Grad()
		if g == nil { // this pass did not use the parameter: another use of the block may
			none = append(none, p.grad)
			continue
		}
		p.got = true
		whole, into, from = append(whole, p.param), append(into, p.grad), append(from, scope.Own(g))
	}
	var err error
	if len(into) > 0 {
		err = errors.Join(torch.ForeachCopy_(into, from), torch.ClearGrads(whole...))
	}
	if len(none) > 0 {
		err = errors.Join(err, torch.ForeachZero_(none))
	}
	if err != nil {
		return err
	}
	for _, f := range b.flats {
		if f.trained && f.share > 0 {
			if err := b.reduceFlat(f); err != nil {
				return err
			}
		}
	}
	return nil
}

// receive allocates memory for the averaged gradients on the collectives' stream, unless the memory
// exists already.
func (b *ShardedBlock) receive(f *blockFlat) (err error) {
	if f.sum != nil {
		return nil
	}
	if f.sum, err = torch.Empty(b.d.g.Device(), f.grads.DType(), f.share); err != nil {
		f.sum = nil
		return err
	}
	b.d.stats.GradientBytes += f.gradBytes / int64(b.d.g.Size())
	var rows []*blockParameter
	var sizes []int64 // alternating: the size of the gap before each row, and the size of the row
	at := int64(0)
	for _, p := range b.params {
		if p.in == f && p.lo < p.hi {
			begin := p.begin + p.lo - int64(b.d.g.Rank())*f.share
			rows, sizes = append(rows, p), append(sizes, begin-at, p.hi-p.lo)
			at = begin + p.hi - p.lo
		}
	}
	views, err := f.sum.SplitSizes(append(sizes, f.share-at), 0)
	if err != nil {
		return err
	}
	for i, v := range views {
		if i%2 == 1 {
			rows[i/2].row = v
		} else {
			v.Close()
		}
	}
	return nil
}

// release closes the averaged gradients.
func (b *ShardedBlock) release() {
	for _, p := range b.params {
		p.row.Close()
		p.row = nil
	}
	for _, f := range b.flats {
		if f.sum != nil {
			f.sum.Close()
			f.sum = nil
			b.d.stats.GradientBytes -= f.gradBytes / int64(b.d.g.Size())
		}
	}
}

// reduceFlat averages the gradients of one flat tensor over the ranks. It adds the averages to the
// shards' gradients from earlier passes.
func (b *ShardedBlock) reduceFlat(f *blockFlat) error {
	again, err := b.keep(f)
	if err != nil {
		return err
	}
	if err := b.d.precede(); err != nil { // the reduction must follow the copy of the gradients
		return err
	}
	return b.d.onStream(func() error {
		out := f.sum
		if again {
			if f.added, err = torch.Empty(b.d.g.Device(), f.sum.DType(), f.share); err != nil {
				return err
			}
			out = f.added
		}
		f.work, err = b.d.launch("ReduceScatter of "+b.name, Average, out, f.grads, reduceScatter(Average))
		if err != nil {
			return err
		}
		f.reduced = true
		if f.work != nil {
			return nil // await calls settle
		}
		return f.settle()
	})
}

// keep moves the shards' gradients from earlier passes to f.sum. It reports whether there are any.
func (b *ShardedBlock) keep(f *blockFlat) (any bool, err error) {
	if f.reduced { // the block is used twice
		return true, nil
	}
	var without []*torch.Tensor
	for _, p := range b.params {
		if p.in != f || p.row == nil {
			continue
		}
		g := p.piece.NoGrad().Grad()
		if g == nil {
			without = append(without, p.row)
			continue
		}
		any = true
		at, err := g.Pointer()
		own, err2 := p.row.Pointer()
		if err = errors.Join(err, err2); err == nil && at != own {
			err = p.row.CopyFrom(g, torch.CopyOptions{NonBlocking: true})
		}
		g.Close()
		if err != nil {
			return false, err
		}
	}
	if any && len(without) > 0 {
		err = torch.ForeachZero_(without)
	}
	return any, err
}

// await waits for the reduction on the CPU and settles it.
func (f *blockFlat) await() error {
	if f.work == nil {
		return nil
	}
	err := errors.Join(f.work.Wait(), f.work.Close())
	f.work = nil
	if err != nil {
		return err // a thread of Gloo may still read the memory
	}
	return f.settle()
}

// settle adds the result of the reduction to earlier gradients, and frees the memory of grads on
// the collectives' stream.
func (f *blockFlat) settle() error {
	var err error
	if f.added != nil {
		err = errors.Join(f.sum.Add_(f.added).Err(), f.added.Close())
		f.added = nil
	}
	return errors.Join(err, resize(f.grads, 0))
}

// deliver sets the gradients of the shards to the averages.
func (b *ShardedBlock) deliver() error {
	for _, p := range b.params {
		if p.row == nil || !p.in.reduced {
			continue
		}
		if err := p.piece.SetGrad(p.row); err != nil {
			return err
		}
	}
	b.passed()
	return nil
}

// passed resets the per-pass state after a backward pass of the network.
func (b *ShardedBlock) passed() {
	b.made = false
	for _, p := range b.params {
		p.got = false
	}
	for _, f := range b.flats {
		f.reduced = false
	}
}

// close frees the block's tensors.
func (b *ShardedBlock) close() error {
	err := b.free()
	for _, f := range b.flats {
		err = errors.Join(err, f.await())
		for _, t := range []*torch.Tensor{f.all, f.mine, f.grads} {
			if t != nil {
				err = errors.Join(err, t.Close())
			}
		}
	}
	b.release()
	for _, p := range b.params {
		for _, t := range []*torch.Tensor{p.view, p.grad, p.piece} {
			if t != nil {
				err = errors.Join(err, t.Close())
			}
		}
	}
	return err
}

// lay makes the flat tensors of the block's parameters, with rank 0's values. It also makes the
// shards.
func (b *ShardedBlock) lay() error {
	type kind struct {
		dtype   torch.DType
		trained bool
	}
	of := map[kind]*blockFlat{}
	for _, p := range b.params {
		k := kind{p.param.DType(), p.param.RequiresGrad()}
		if of[k] == nil {
			of[k] = &blockFlat{trained: k.trained, dtype: b.d.gatherDType(k.dtype)}
			b.flats = append(b.flats, of[k])
		}
		p.in = of[k]
		p.place(&p.in.flatParameters, smaller(p.param.DType(), p.in.dtype))
	}
	for _, p := range b.params {
		p.in.divide(b.d.g.Size(), smaller(p.param.DType(), p.in.dtype))
		p.cut(int64(b.d.g.Rank()))
	}
	scope := torch.NewScope("whole parameters of a block")
	defer scope.Close()
	whole := map[*blockFlat]*torch.Tensor{} // flat tensors in the parameters' dtype
	if err := b.d.onStream(func() error { return b.allocate(scope, whole) }); err != nil {
		return err
	}
	b.whole = true
	if err := b.d.follow(); err != nil {
		return err
	}
	for _, p := range b.params {
		if err := p.of(whole[p.in]).CopyFrom(p.marked, torch.CopyOptions{}); err != nil {
			return err
		}
	}
	for _, f := range b.flats {
		if err := b.d.share(whole[f]); err != nil {
			return err
		}
		own := whole[f].Narrow(0, int64(b.d.g.Rank())*f.share, f.share)
		err := f.mine.CopyFrom(own, torch.CopyOptions{NonBlocking: true})
		if err = errors.Join(err, own.Close()); err != nil {
			return err
		}
	}
	if b.d.stream != nil {
		// SetData frees the parameters' old memory to the stream that allocated it. That stream
		// could reuse the memory before the current stream has copied it.
		if err := b.d.g.Device().Synchronize(); err != nil {
			return err
		}
	}
	b.shown = true
	return b.free()
}

// smaller returns the dtype whose elements have fewer bytes.
func smaller(a, b torch.DType) torch.DType {
	if b.Size() < a.Size() {
		return b
	}
	return a
}

// allocate makes the block's tensors on the collectives' stream, so that their memory belongs to
// that stream. It adds the whole parameters of each flat tensor to wholeOf; the scope owns them.
func (b *ShardedBlock) allocate(scope *torch.Scope, wholeOf map[*blockFlat]*torch.Tensor) error {
	device, n := b.d.g.Device(), int64(b.d.g.Size())
	made := func(t *torch.Tensor, err error) *torch.Tensor {
		if err != nil {
			return torch.Fail("distributed.ShardedBlock", err)
		}
		return t
	}
	dtypes := map[*blockFlat]torch.DType{}
	for _, p := range b.params {
		dtypes[p.in] = p.param.DType()
	}
	for _, f := range b.flats {
		d := dtypes[f]
		f.bytes, f.gradBytes = n*f.share*int64(f.dtype.Size()), n*f.share*int64(d.Size())
		f.all = made(torch.Zeros(device, f.dtype, n*f.share))
		f.mine = made(torch.Zeros(device, d, f.share))
		wholeOf[f] = scope.Own(f.all.Keep())
		f.held = true
		b.d.gathered(f.bytes)
		b.d.stats.ParameterBytes += f.share * int64(d.Size())
		if f.rounded = f.dtype != d; f.rounded {
			wholeOf[f] = scope.Own(made(torch.Zeros(device, d, n*f.share)))
		}
		if f.trained {
			f.grads = made(torch.Empty(device, d, n*f.share))
		}
	}
	part := func(p *blockParameter, flat *torch.Tensor) *torch.Tensor {
		begin := int64(0)
		if p.lo < p.hi {
			begin = p.begin + p.lo - int64(b.d.g.Rank())*p.flat.share
		}
		t := flat.Narrow(0, begin, p.hi-p.lo)
		defer t.Close()
		return t.Detach()
	}
	whole := func(p *blockParameter, flat *torch.Tensor) *torch.Tensor {
		t := flat.Narrow(0, p.begin, p.elements)
		defer t.Close()
		return t.AsStrided(p.shape, p.strides, torch.AsStridedOptions{})
	}
	for _, p := range b.params {
		p.view, p.piece = whole(p, p.in.all), part(p, p.in.mine)
		if err := errors.Join(p.view.Err(), p.piece.Err(), p.piece.SetRequiresGrad(p.in.trained)); err != nil {
			return err
		}
		if !p.in.trained {
			continue
		}
		p.grad = whole(p, p.in.grads)
		if err := p.grad.Err(); err != nil {
			return err
		}
	}
	for _, f := range b.flats {
		if f.trained {
			if err := resize(f.grads, 0); err != nil {
				return err
			}
		}
	}
	return nil
}

// list names the shards and the buffers for Parts, in the module's order. The root block, which
// holds the parameters outside of blocks, has no module.
func (b *ShardedBlock) list() {
	for _, n := range nn.NamedParameters(b.module) {
		i := slices.IndexFunc(b.params, func(p *blockParameter) bool { return slices.Contains(p.names, n.Name) })
		b.named = append(b.named, torch.Named{Name: n.Name, Tensor: b.params[i].piece})
	}
	b.buffers = nn.NamedBuffers(b.module)
}
