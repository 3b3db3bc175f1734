package distributed

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/tensor"
	"github.com/torchstream/torchstream/torch"
)

// ZeroRedundancyOptimizer is an optimizer whose state is sharded over the ranks of a group (ZeRO
// stage 1; PyTorch's class of the same name). Each rank keeps the state of 1/N of the parameters'
// elements, and with MasterWeights also their float32 masters. It updates these elements and
// receives the others from the ranks that updated them. The result is the same as with the
// optimizer in one process.
//
//	parallel, err := distributed.NewDataParallel(world, net, distributed.DataParallelOptions{})
//	...
//	adamW := func(shard []*torch.Tensor) (optim.Optimizer, error) {
//		return optim.NewAdamW(shard, optim.AdamWOptions{LR: 1e-3})
//	}
//	opt, err := distributed.NewZeroRedundancyOptimizer(world, nn.Parameters(net), adamW)
//	...
//	err = parallel.Backward(loss)
//	...
//	err = opt.Step()
//
// Gradients are not sharded: DataParallel gives every rank the whole gradients, so clipping and
// GradScaler work as usual. A GradScaler's Step waits for the device.
//
// Parameters become views of flat tensors, one for each dtype. Each flat tensor has N equal parts,
// and rank r updates part r. A part may start and end within a parameter, so the optimizer must
// update each element independently. SGD, Adam, AdamW, RMSprop and Adagrad do. LAMB and Muon
// compute norms and products of whole parameters, and are refused.
//
// Step, State and the constructor are collectives: all ranks call them in the same order. Only one
// goroutine at a time may use a ZeroRedundancyOptimizer.
type ZeroRedundancyOptimizer struct {
	dividedOptimizer
	flats []*flatParameters
}

// flatParameters is the memory of the parameters of one dtype.
type flatParameters struct {
	all  *torch.Tensor // [N*share]
	mine *torch.Tensor // [share]: this rank's part of all
	// elements is the number of elements that the parameters and the gaps between them take. The
	// other elements at the end are unused.
	elements, share int64
}

// shardedParameter is a parameter in its flat memory.
type shardedParameter struct {
	param          *torch.Tensor
	marked         *torch.Tensor // param.NoGrad()
	shape, strides []int64       // shape and strides of the parameter
	elements       int64
	flat           *flatParameters
	begin          int64         // index of the parameter's first element in flat.all
	address        uintptr       // address of the parameter
	lo, hi         int64         // range of the parameter's elements, in memory order, that this rank updates
	piece          *torch.Tensor // the elements lo to hi: a leaf [hi-lo], possibly empty
}

func newShardedParameter(p *torch.Tensor) shardedParameter {
	return shardedParameter{param: p, marked: p.NoGrad(), shape: p.Shape(), strides: p.Strides(),
		elements: p.Elements()}
}

// place puts the parameter at the next free position of the flat tensor, aligned for the dtype.
func (p *shardedParameter) place(f *flatParameters, d torch.DType) {
	p.flat, p.begin = f, f.elements
	f.elements += aligned(p.elements, d)
}

// cut computes the range of the parameter's elements that rank r updates.
func (p *shardedParameter) cut(r int64) {
	p.lo, p.hi = p.before(r), p.before(r+1)
}

// before returns the number of the parameter's elements that the ranks before r update.
func (p *shardedParameter) before(r int64) int64 {
	return min(max(r*p.flat.share-p.begin, 0), p.elements)
}

// of returns a view of the parameter in a flat tensor, with the parameter's shape.
func (p *shardedParameter) of(flat *torch.Tensor) *torch.Tensor {
	return flat.Narrow(0, p.begin, p.elements).AsStrided(p.shape, p.strides, torch.AsStridedOptions{})
}

// alignment is the alignment in bytes of parameters and of ranks' parts. This alignment lets fused
// optimizers read several elements at a time.
const alignment = 16

// NewZeroRedundancyOptimizer calls build and shards the state of the optimizer that build returns.
// All ranks call it with the same build and the same parameters, which must be on the group's
// device. An error on one rank is an error on all, and leaves the parameters unchanged.
//
// build gets this rank's shard of each parameter: shard[i] is one-dimensional, and has consecutive
// elements of params[i], or none. build returns an optimizer of all shards. It may choose the
// parameter group of shard[i] by params[i].
//
// The parameters move to new memory: make the optimizer after nn.To and nn.ToDType, and before a
// graph captures the model. Each element gets its value from the rank that updates the element.
// During the call there are two copies of the parameters. The call waits for the device.
//
// Close the optimizer before the group. It does not own the parameters, which stay valid.
func NewZeroRedundancyOptimizer(g *Group, params []*torch.Tensor,
	build func(shard []*torch.Tensor) (optim.Optimizer, error)) (*ZeroRedundancyOptimizer, error) {
	z := &ZeroRedundancyOptimizer{dividedOptimizer: dividedOptimizer{name: "ZeroRedundancyOptimizer", g: g}}
	err := z.agree(params)
	if err == nil {
		err = z.construct(build)
	}
	if err != nil {
		z.Close()
		return nil, fmt.Errorf("distributed.NewZeroRedundancyOptimizer: %w", err)
	}
	return z, nil
}

// agree checks, on all ranks, that the ranks have the same parameters.
func (z *ZeroRedundancyOptimizer) agree(params []*torch.Tensor) error {
	mine := modelText{}
	seen := map[*torch.Tensor]bool{}
	for i, p := range params {
		switch {
		case p.Err() != nil:
			mine.Err = fmt.Sprintf("parameter %d: %v", i, p.Err())
		case p.Device() != z.g.Device():
			mine.Err = fmt.Sprintf("parameter %d is on %v, and the group's device is %v: call nn.To before",
				i, p.Device(), z.g.Device())
		case !tensor.Dense(p.Shape(), p.Strides()):
			mine.Err = fmt.Sprintf("parameter %d has the shape %v and the strides %v, with gaps in "+
				"memory or overlapping elements: use a Contiguous copy", i, p.Shape(), p.Strides())
		case seen[p]:
			mine.Err = fmt.Sprintf("parameter %d is in the list twice", i)
		}
		seen[p] = true
		part := newShardedParameter(p)
		z.parts = append(z.parts, &part)
		mine.Tensors = append(mine.Tensors,
			fmt.Sprintf("parameter %d %v%v of strides %v", i, p.DType(), p.Shape(), p.Strides()))
	}
	if len(params) == 0 {
		mine.Err = "there are no parameters"
	}
	return mine.agree(z.g)
}

// construct makes the optimizer of this rank's shards. When all ranks have succeeded, it moves the
// parameters to flat memory.
func (z *ZeroRedundancyOptimizer) construct(build func([]*torch.Tensor) (optim.Optimizer, error)) error {
	scope := torch.NewScope("parameters on their way")
	defer scope.Close()
	z.layOut()
	views, failure := z.fill(scope)
	if failure == nil {
		failure = z.build(build)
	}
	mine := modelText{}
	if failure != nil {
		mine.Err = failure.Error()
	}
	if err := mine.agree(z.g); err != nil || failure != nil {
		return cmp.Or(failure, err)
	}
	for i, p := range z.parts {
		err := p.param.SetData(views[i])
		if err == nil {
			p.address, err = p.param.Pointer()
		}
		if err != nil {
			return z.g.abort("NewZeroRedundancyOptimizer", err)
		}
	}
	if err := z.gatherParameters("NewZeroRedundancyOptimizer"); err != nil {
		return err
	}
	return z.synchronize()
}

// layOut places the parameters in flat tensors and computes this rank's ranges.
func (z *ZeroRedundancyOptimizer) layOut() {
	byDType := map[torch.DType]*flatParameters{}
	for _, p := range z.parts {
		dtype := p.param.DType()
		f := byDType[dtype]
		if f == nil {
			f = &flatParameters{}
			byDType[dtype] = f
			z.flats = append(z.flats, f)
		}
		p.place(f, p.param.DType())
	}
	for _, p := range z.parts {
		p.flat.divide(z.g.Size(), p.param.DType())
		p.cut(int64(z.g.Rank()))
	}
}

// divide divides the flat tensor into n equal parts.
func (f *flatParameters) divide(n int, d torch.DType) {
	f.share = aligned((f.elements+int64(n)-1)/int64(n), d)
}

// aligned rounds a number of elements up to the alignment.
func aligned(n int64, d torch.DType) int64 {
	step := max(alignment/int64(d.Size()), 1)
	return (n + step - 1) / step * step
}

// fill allocates the flat tensors and copies the parameters' values to them.
func (z *ZeroRedundancyOptimizer) fill(scope *torch.Scope) (views []*torch.Tensor, err error) {
	for _, p := range z.parts {
		f := p.flat
		if f.all == nil {
			all, err := torch.Zeros(z.g.Device(), p.param.DType(), f.share*int64(z.g.Size()))
			if err != nil {
				return nil, err
			}
			f.all, f.mine = all, all.In(scope).Narrow(0, int64(z.g.Rank())*f.share, f.share).Keep()
			if err := f.mine.Err(); err != nil {
				return nil, err
			}
		}
		all := f.all.In(scope)
		view := p.of(all)
		if err := view.CopyFrom(p.marked, torch.CopyOptions{NonBlocking: true}); err != nil {
			return nil, err
		}
		p.piece = all.Narrow(0, p.begin+p.lo, p.hi-p.lo).Detach().Keep()
		if err := errors.Join(p.piece.Err(), p.piece.SetRequiresGrad(true)); err != nil {
			return nil, err
		}
		views = append(views, view)
	}
	// After this wait nothing reads the parameters' old memory, and other streams may use the new
	// memory.
	return views, z.synchronize()
}

// synchronize waits for the device.
func (z *ZeroRedundancyOptimizer) synchronize() error {
	if z.g.Device() == cuda.CPU {
		return nil
	}
	return z.g.Device().Synchronize()
}

// gatherParameters overwrites each part of the flat tensors with the values of the rank that
// updates the part.
func (z *ZeroRedundancyOptimizer) gatherParameters(name string) error {
	for _, f := range z.flats {
		if f.share == 0 {
			continue
		}
		c, err := z.g.begin(name, "", f.mine, f.all)
		if err != nil {
			return err
		}
		if err := c.sync([]*torch.Tensor{f.all, f.mine}, allGather); err != nil {
			return err
		}
	}
	return nil
}

// Step updates this rank's shards from their gradients, which are the same on all ranks, and
// gathers the other shards. It then drops all gradients, unless the optimizer was made with
// KeepGradients. If there are no gradients it returns optim.ErrNoGradients on all ranks. On a GPU
// it enqueues its work on the current stream, and can be captured in a graph if the optimizer is
// Capturable. An error on one rank ends the job.
func (z *ZeroRedundancyOptimizer) Step() error {
	if err := z.g.check("ZeroRedundancyOptimizer.Step", nil); err != nil {
		return err
	}
	if z.inner == nil {
		return fmt.Errorf("distributed: ZeroRedundancyOptimizer.Step: %w", torch.ErrClosed)
	}
	for i, p := range z.parts {
		if at, err := p.param.Pointer(); err != nil || at != p.address {
			return z.g.abort("ZeroRedundancyOptimizer.Step",
				errors.Join(err, fmt.Errorf("distributed: ZeroRedundancyOptimizer.Step: parameter %d has "+
					"moved to other memory: make the optimizer after nn.To: %w", i, cuda.ErrInvalidArgument)))
		}
	}
	z.dropGathered()
	err := z.update()
	switch {
	case errors.Is(err, optim.ErrNoGradients), errors.Is(err, cuda.ErrCapture):
		return err // the same on all ranks
	case err != nil:
		return z.g.abort("ZeroRedundancyOptimizer.Step", err)
	}
	if err := z.gatherParameters("ZeroRedundancyOptimizer.Step"); err != nil {
		return err
	}
	if k, ok := z.inner.(interface{ KeepsGradients() bool }); ok && k.KeepsGradients() {
		return nil
	}
	return z.ZeroGrad()
}

// update steps this rank's shards.
func (z *ZeroRedundancyOptimizer) update() (err error) {
	scope := torch.NewScope("gradients of a shard")
	defer scope.Close()
	var stepped []*torch.Tensor // pieces that have a gradient
	some := false
	for _, p := range z.parts {
		grad := p.marked.Grad()
		if grad == nil {
			continue
		}
		some = true
		grad = scope.Own(grad)
		if p.lo == p.hi {
			continue
		}
		if !slices.Equal(grad.Strides(), p.strides) {
			like := scope.Own(p.marked.EmptyLike())
			if err := like.CopyFrom(grad, torch.CopyOptions{NonBlocking: true}); err != nil {
				return err
			}
			grad = like
		}
		row := grad.AsStrided([]int64{p.elements}, []int64{1}, torch.AsStridedOptions{}).Narrow(0, p.lo, p.hi-p.lo)
		if err := errors.Join(row.Err(), p.piece.SetGrad(row)); err != nil {
			return err
		}
		stepped = append(stepped, p.piece)
	}
	if !some {
		return fmt.Errorf("distributed: ZeroRedundancyOptimizer.Step: %w", optim.ErrNoGradients)
	}
	if len(stepped) > 0 {
		err = z.inner.Step()
	}
	return errors.Join(err, torch.ClearGrads(stepped...))
}

// ZeroGrad drops the gradients of all parameters.
func (z *ZeroRedundancyOptimizer) ZeroGrad() error {
	params := make([]*torch.Tensor, len(z.parts))
	for i, p := range z.parts {
		params[i] = p.param
	}
	return torch.ClearGrads(params...)
}

// Groups returns the optimizer's parameter groups, with whole parameters.
func (z *ZeroRedundancyOptimizer) Groups() []optim.Group {
	if z.inner == nil {
		return nil
	}
	groups, at := z.inner.Groups(), 0
	for _, g := range groups {
		for i := range g.Params {
			g.Params[i] = z.order[at].param
			at++
		}
	}
	return groups
}

// Close frees this rank's state and the optimizer that build made. A later Step returns
// torch.ErrClosed.
func (z *ZeroRedundancyOptimizer) Close() error {
	z.dropGathered()
	var err error
	if z.inner != nil {
		err = z.inner.Close()
		z.inner = nil
	}
	for _, p := range z.parts {
		p.piece.Close()
	}
	for _, f := range z.flats {
		f.mine.Close()
		f.all.Close()
	}
	return err
}
