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

// ShardedBlock is a module whose parameters a [FullyShardedDataParallel] gathers together before
// the module computes, and frees after. It takes the module's place in the network:
//
//	net := nn.NewSequential(
//		distributed.NewShardedBlock(stem),
//		distributed.NewShardedBlock(first),
//		distributed.NewShardedBlock(head),
//	)
//
// Before NewFullyShardedDataParallel it is the module. From then on its parameters, as
// nn.Parameters and nn.State list them, are this rank's parts, and those of the module inside are
// empty but while it computes.
//
// Its backward pass is one of its own inside of the network's, so that its end is known. Therefore
// nothing but its output may lead backward into the module, not a tensor that the module leaves
// elsewhere; and neither may the module change its input in place, nor others its output. An output
// that is a view of a parameter is copied. Other views of parameters must not be used after
// Forward: their memory is freed, and the program crashes.
type ShardedBlock struct {
	module nn.Module
	d      *FullyShardedDataParallel // nil before it is made

	name    string // in the network
	prefix  string // of its parameters' names there
	flats   []*blockFlat
	params  []*blockParameter
	named   []torch.Named // the parts, by the names of their parameters in the module
	buffers []torch.Named

	whole bool    // the parameters are gathered, or on their way
	shown bool    // the module has them
	works []*Work // that gather them, on the CPU
	used  bool    // a backward pass is expected
	made  bool    // the backward pass under way has come to the block

	failed error // of works, which is the end of the job
}

// blockFlat is the memory of a block's parameters of one dtype, the trained or the frozen ones.
type blockFlat struct {
	flatParameters             // all has memory while the block is gathered
	dtype          torch.DType // of all; mine has that of the parameters
	rounded        bool        // these differ
	bytes          int64       // of all
	gradBytes      int64       // of grads
	held           bool        // all has memory, which the statistics count
	trained        bool
	grads          *torch.Tensor // [N*share]: this rank's gradients of all, with memory while they are reduced; nil if frozen
	sum            *torch.Tensor // [share]: the averaged gradients of mine; nil while there are none
	added          *torch.Tensor // [share]: what is added to sum, while that is under way
	work           *Work         // that reduces grads, on the CPU
	reduced        bool          // in the backward pass under way
}

// blockParameter is a parameter of a block.
type blockParameter struct {
	shardedParameter
	in    *blockFlat
	names []string      // in the module
	view  *torch.Tensor // of in.all
	grad  *torch.Tensor // of in.grads
	row   *torch.Tensor // of in.sum: the gradient of piece; nil if that is empty
	got   bool          // a gradient in the backward pass under way
}

// NewShardedBlock returns the module as a block.
func NewShardedBlock(m nn.Module) *ShardedBlock { return &ShardedBlock{module: m} }

// Parts returns the parts of the module, or from NewFullyShardedDataParallel on this rank's parts
// of its parameters, and its buffers.
func (b *ShardedBlock) Parts() nn.Parts {
	switch {
	case b.d != nil:
		return nn.Parts{Parameters: b.named, Buffers: b.buffers}
	case b.module == nil:
		return nn.Parts{}
	}
	return b.module.Parts()
}

// SetTraining chooses the mode of the module and all its parts.
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

// forward computes the output of in[0]. The second input makes it have a history also where the
// first one has none.
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
		c.Data = b.d.changes
		b.used = true
	} else {
		c.MarkNonDifferentiable(y)
	}
	return []*torch.Tensor{y}, b.d.leave(b, recorded)
}

// own returns the output of the module, or a copy of one that lies in the parameters' memory, such
// as rows of a table of positions: that memory is freed, and a read of it is a crash.
func (b *ShardedBlock) own(y *torch.Tensor) (*torch.Tensor, error) {
	if err := y.Err(); err != nil {
		return nil, err
	}
	at, err := y.Pointer()
	if err != nil || y.Elements() == 0 {
		return y, nil // a tensor without an address is no view
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

// back makes the backward pass of the module.
func (b *ShardedBlock) back(c *torch.FunctionContext, gradients []*torch.Tensor) ([]*torch.Tensor, error) {
	if c.Data != b.d.changes {
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
	return fmt.Errorf("distributed: %s: the parameters have changed since Forward, and backward would compute with the new ones: call Backward before Step: %w",
		b.name, cuda.ErrInvalidArgument)
}

// finish averages the gradients that the block's backward pass has made.
func (b *ShardedBlock) finish() error {
	if err := b.reduce(); err != nil {
		return err
	}
	b.made = true
	b.used = false
	return b.free()
}

// resize gives a flat tensor memory, or with 0 bytes takes it away.
func resize(t *torch.Tensor, bytes int64) error {
	return torch.CAPI("ShardedBlock", []*torch.Tensor{t}, func(c []*capi.Tensor) error { return capi.ResizeStorage(c[0], bytes) })
}

// hold gives the parameters of f memory, or takes it away, and counts its bytes once.
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

// gather begins to gather the parameters, behind what the collectives' stream has so far.
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
			if f.rounded { // the rounded part ends with the gather
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

// show waits for the parameters, on a GPU on the current stream, and gives them to the module.
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

// await waits for the collectives on the CPU.
func (b *ShardedBlock) await() error {
	var errs []error
	for _, w := range b.works {
		errs = append(errs, w.Wait(), w.Close())
	}
	b.works = nil
	if b.failed == nil {
		b.failed = errors.Join(errs...)
	}
	return b.failed
}

// free takes the parameters away from the module and gives back their memory, which the
// collectives' stream may use after what the current stream has so far.
func (b *ShardedBlock) free() error {
	if !b.whole {
		return nil
	}
	if err := b.await(); err != nil {
		// After the end of the job a thread of Gloo may still write to the memory, which therefore
		// stays, until the tensor goes.
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

// missing names the trained parameters to which the backward pass under way, which has come to the
// block, gave no gradient.
func (b *ShardedBlock) missing() (names []string) {
	for _, p := range b.params {
		if b.made && p.in.trained && !p.got {
			names = append(names, b.prefix+p.names[0])
		}
	}
	return names
}

// reduce begins to average the gradients over the ranks, and drops this rank's.
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
		if err := b.d.onStream(func() error { return errors.Join(resize(f.grads, f.gradBytes), b.receive(f)) }); err != nil {
			return err
		}
	}
	// The memory may be that of an earlier block, which the collectives' stream has still to read.
	if err := b.d.follow(); err != nil {
		return err
	}
	var into, from, whole, none []*torch.Tensor
	for _, p := range b.params {
		if !p.in.trained {
			continue
		}
		g := p.marked.Grad()
		if g == nil { // as of one that another use of the block needs
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

// receive gives the averaged gradients memory, of the collectives' stream, unless they have some.
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
	var sizes []int64 // of each row, and of the gap before it
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

// reduceFlat averages the gradients of a flat memory, and adds what the parts have from earlier
// passes.
func (b *ShardedBlock) reduceFlat(f *blockFlat) error {
	again, err := b.keep(f)
	if err != nil {
		return err
	}
	if err := b.d.precede(); err != nil { // after the copy of the gradients
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
			return nil // await does the rest
		}
		return f.settle()
	})
}

// keep moves the gradients that the parts have from earlier passes to f.sum, and reports whether it
// has any gradients.
func (b *ShardedBlock) keep(f *blockFlat) (any bool, err error) {
	if f.reduced { // of a block that is used twice
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

// await waits for the reduction on the CPU, and settles it.
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

// settle adds to earlier gradients, and gives back the memory, on the collectives' stream.
func (f *blockFlat) settle() error {
	var err error
	if f.added != nil {
		err = errors.Join(f.sum.Add_(f.added).Err(), f.added.Close())
		f.added = nil
	}
	return errors.Join(err, resize(f.grads, 0))
}

// deliver gives the averaged gradients to the parts.
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

// passed ends a backward pass of the network.
func (b *ShardedBlock) passed() {
	b.made = false
	for _, p := range b.params {
		p.got = false
	}
	for _, f := range b.flats {
		f.reduced = false
	}
}

// close frees everything.
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

// lay makes the flat memories of the block's parameters, with rank 0's values, and the parts.
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
	whole := map[*blockFlat]*torch.Tensor{} // in the parameters' dtype
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
		// Taken away from the parameters, their old memory may be used again by the stream that it
		// belongs to, which need not wait for the current one's copy.
		if err := b.d.g.Device().Synchronize(); err != nil {
			return err
		}
	}
	b.shown = true
	return b.free()
}

// smaller returns the dtype of fewer bytes.
func smaller(a, b torch.DType) torch.DType {
	if b.Size() < a.Size() {
		return b
	}
	return a
}

// allocate makes the tensors of the block, on the collectives' stream, which their memory belongs
// to, and memory of the scope for the whole parameters.
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

// list names the parts and the buffers for Parts, in the module's order. What is outside of blocks
// has no module.
func (b *ShardedBlock) list() {
	for _, n := range nn.NamedParameters(b.module) {
		i := slices.IndexFunc(b.params, func(p *blockParameter) bool { return slices.Contains(p.names, n.Name) })
		b.named = append(b.named, torch.Named{Name: n.Name, Tensor: b.params[i].piece})
	}
	b.buffers = nn.NamedBuffers(b.module)
}
