package distributed

import (
	"errors"
	"fmt"
	"slices"

	"github.com/torchstream/torchstream/checkpoint"
	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/torch"
)

// FullyShardedOptimizer optimizes the parameters of a [FullyShardedDataParallel]. Each rank holds
// the optimizer state of its shard and updates that shard. State and LoadState use whole
// parameters, as an optimizer in one process does, so a checkpoint can be loaded on any number of
// ranks.
//
// GradScaler.Unscale, and GradScaler.Step without an earlier Unscale, are collectives for this
// optimizer: the ranks agree whether any of them found an infinity or NaN. State is a collective
// too, but Step is not. Only one goroutine at a time may use a FullyShardedOptimizer.
type FullyShardedOptimizer struct {
	dividedOptimizer
	d *FullyShardedDataParallel
}

// NewOptimizer calls build with this rank's shards of the parameters,
// [FullyShardedDataParallel.Parameters], and wraps the optimizer that build returns. The optimizer
// must update each element independently: LAMB and Muon are refused. All ranks call NewOptimizer,
// and an error on one rank is an error on all. Close the optimizer before d.
func (d *FullyShardedDataParallel) NewOptimizer(build func(shard []*torch.Tensor) (optim.Optimizer,
	error)) (*FullyShardedOptimizer, error) {
	if err := d.ready("NewOptimizer"); err != nil {
		return nil, err
	}
	o := &FullyShardedOptimizer{dividedOptimizer{name: "FullyShardedOptimizer", g: d.g}, d}
	for _, p := range d.params {
		o.parts = append(o.parts, &p.shardedParameter)
	}
	failure := o.build(build)
	mine := modelText{}
	if failure != nil {
		mine.Err = failure.Error()
	}
	if err := mine.agree(d.g); err != nil || failure != nil {
		o.Close()
		if failure != nil {
			err = failure
		}
		return nil, fmt.Errorf("distributed: FullyShardedDataParallel.NewOptimizer: %w", err)
	}
	return o, nil
}

// Step updates this rank's shards from their gradients and drops the gradients. It returns
// optim.ErrNoGradients, on all ranks, if Backward has not run since the last Step or ZeroGrad. It
// is not a collective: the next Forward gathers the parameters.
func (o *FullyShardedOptimizer) Step() error {
	if o.inner == nil {
		return fmt.Errorf("distributed: FullyShardedOptimizer.Step: %w", torch.ErrClosed)
	}
	if err := o.d.ready("Step"); err != nil {
		return err
	}
	if o.d.version.stepped {
		return fmt.Errorf("distributed: FullyShardedOptimizer.Step: %w", optim.ErrNoGradients)
	}
	o.dropGathered()
	o.d.version.changes++
	err := o.inner.Step()
	if errors.Is(err, optim.ErrNoGradients) { // all shards of this rank are empty
		err = nil
	}
	if k, ok := o.inner.(interface{ KeepsGradients() bool }); err == nil && (!ok || !k.KeepsGradients()) {
		err = o.d.release()
	}
	return err
}

// ZeroGrad drops the gradients of this rank's shards.
func (o *FullyShardedOptimizer) ZeroGrad() error {
	if o.inner == nil {
		return fmt.Errorf("distributed: FullyShardedOptimizer.ZeroGrad: %w", torch.ErrClosed)
	}
	return errors.Join(torch.ClearGrads(o.d.Parameters()...), o.d.release())
}

// Groups returns the optimizer's parameter groups, with this rank's shards.
func (o *FullyShardedOptimizer) Groups() []optim.Group {
	if o.inner == nil {
		return nil
	}
	return o.inner.Groups()
}

// AgreeOnFound tells a GradScaler whether any rank has found an infinity or NaN. On entry found is
// 1 if this rank has a gradient that is not finite, and 0 otherwise. On return it is the maximum
// over all ranks.
func (o *FullyShardedOptimizer) AgreeOnFound(found *torch.Tensor) error {
	return o.g.AllReduce(found, Max)
}

// Close frees this rank's state. A later Step returns torch.ErrClosed.
func (o *FullyShardedOptimizer) Close() error {
	o.dropGathered()
	if o.inner == nil {
		return nil
	}
	err := o.inner.Close()
	o.inner = nil
	return err
}

// State returns the whole parameters and the buffers, under the names that nn.State of the network
// returned before the network was sharded. Every rank gets whole parameters, as tensors on the CPU.
// The next State or Close frees these tensors. The buffers belong to the network. State is a
// collective: it gathers one block after the other and waits for the device. All ranks call it, and
// one of them then writes a file.
//
//	state, err := sharded.State()
//	if err == nil && world.Rank() == 0 {
//		err = checkpoint.Save("model.safetensors", state, nil)
//	}
//
// train.Checkpoint with World does all of this.
func (d *FullyShardedDataParallel) State() ([]torch.Named, error) {
	if err := d.ready("State"); err != nil {
		return nil, err
	}
	d.whole.dropState()
	if err := errors.Join(d.freeAll(func(*ShardedBlock) bool { return false }), d.precede()); err != nil {
		return nil, d.fail("FullyShardedDataParallel.State", err)
	}
	whole := map[*shardedParameter]*torch.Tensor{}
	for _, b := range d.blocks {
		if err := errors.Join(d.wholeOf(b, whole), b.free()); err != nil {
			return nil, d.fail("FullyShardedDataParallel.State", fmt.Errorf("%s: %w", b.name, err))
		}
	}
	state, parts := nn.State(d), d.byName()
	for i, n := range state {
		if p := parts[n.Name]; p != nil {
			state[i].Tensor = whole[&p.shardedParameter]
		}
	}
	return state, nil
}

// wholeOf gathers the block's parameters and adds them, on the CPU, to whole.
func (d *FullyShardedDataParallel) wholeOf(b *ShardedBlock, whole map[*shardedParameter]*torch.Tensor) error {
	own := map[*blockFlat][]partOf{} // shards of parameters that are gathered in a different dtype
	for _, p := range b.params {
		if p.in.rounded {
			own[p.in] = append(own[p.in], partOf{&p.shardedParameter, p.piece.NoGrad()})
			continue
		}
		if err := b.show(); err != nil {
			return err
		}
		host := p.view.NoGrad().To(cuda.CPU)
		if d.stream == nil {
			host = p.view.NoGrad().Clone()
		}
		d.whole.state = append(d.whole.state, host)
		if err := host.Err(); err != nil {
			return err
		}
		whole[&p.shardedParameter] = host
	}
	for _, f := range b.flats {
		if err := d.gatherWhole("FullyShardedDataParallel.State", f, own[f], &d.whole.state, whole); err != nil {
			return err
		}
	}
	return nil
}

// LoadState loads this rank's shards and the buffers from whole tensors: from State, from nn.State
// of a network in one process, or from a file. All ranks pass the same tensors. Names and shapes
// must match the network's. Otherwise nothing changes, and the error names the first difference.
// Floating-point tensors of another dtype are converted as nn.Load converts them; other dtypes must
// match. LoadState is not a collective.
func (d *FullyShardedDataParallel) LoadState(state []torch.Named) error {
	if err := d.ready("LoadState"); err != nil {
		return err
	}
	given, specs := map[string]*torch.Tensor{}, map[string]torch.Spec{}
	for _, n := range state {
		if err := n.Tensor.Err(); err != nil {
			return fmt.Errorf("distributed: FullyShardedDataParallel.LoadState: %s: %w", n.Name, err)
		}
		given[n.Name] = n.Tensor
		specs[n.Name] = torch.Spec{Name: n.Name, DType: n.Tensor.DType(), Shape: n.Tensor.Shape()}
	}
	err := d.load(specs, func(scope *torch.Scope, name string, p *blockParameter) (*torch.Tensor, error) {
		if p == nil {
			return given[name], nil
		}
		return p.partOf(scope, given[name])
	})
	if err != nil {
		return fmt.Errorf("distributed: FullyShardedDataParallel.LoadState: %w", err)
	}
	return nil
}

// Group returns the group that shards the parameters.
func (d *FullyShardedDataParallel) Group() *Group { return d.g }

// Divided describes how the ranks divide the parameters in nn.State(d). Pass the result to
// checkpoint.RankWriter if each rank writes its shard of a checkpoint. Divided is not a collective.
func (d *FullyShardedDataParallel) Divided() checkpoint.Divided {
	divided := checkpoint.Divided{}
	for _, p := range d.params {
		divided[p.piece] = p.division(d.g.Size())
	}
	return divided
}

// LoadCheckpoint is like [FullyShardedDataParallel.LoadState], but reads an open file. It reads
// only this rank's shards and the buffers, one tensor at a time.
func (d *FullyShardedDataParallel) LoadCheckpoint(c *checkpoint.File) error {
	if err := d.ready("LoadCheckpoint"); err != nil {
		return err
	}
	specs := map[string]torch.Spec{}
	for _, s := range c.Tensors() {
		specs[s.Name] = s
	}
	err := d.load(specs, func(scope *torch.Scope, name string, p *blockParameter) (*torch.Tensor, error) {
		stored, err := c.Tensor(name)
		if err != nil {
			return nil, err
		}
		return p.read(scope, stored)
	})
	if err != nil {
		return fmt.Errorf("distributed: FullyShardedDataParallel.LoadCheckpoint: %s: %w", c.Path(), err)
	}
	return nil
}

// read reads this rank's shard of a parameter, or the whole tensor if p is nil.
func (p *blockParameter) read(scope *torch.Scope, stored *checkpoint.StoredTensor) (t *torch.Tensor, err error) {
	if p == nil {
		t, err = stored.Read()
	} else {
		t, err = stored.ReadPart(p.strides, p.lo, p.hi-p.lo)
	}
	if err != nil {
		return nil, err
	}
	return scope.Own(t), nil
}

// load checks specs against the network and then replaces the parameters and buffers. read returns
// this rank's shard of a parameter, or a whole buffer if p is nil.
func (d *FullyShardedDataParallel) load(specs map[string]torch.Spec,
	read func(scope *torch.Scope, name string, p *blockParameter) (*torch.Tensor, error)) error {
	state, parts := nn.State(d), d.byName()
	names := map[string]bool{}
	for _, n := range state {
		dtype, shape := n.Tensor.DType(), n.Tensor.Shape()
		if p := parts[n.Name]; p != nil {
			shape = p.shape
		}
		s, ok := specs[n.Name]
		switch {
		case !ok:
			return fmt.Errorf("there is no tensor %s: %w", n.Name, cuda.ErrInvalidArgument)
		case !slices.Equal(s.Shape, shape):
			return fmt.Errorf("%s is %v%v there, and %v%v in the network: %w", n.Name, s.DType, s.Shape,
				dtype, shape, cuda.ErrInvalidArgument)
		case s.DType != dtype && !(floating(s.DType) && floating(dtype)):
			return fmt.Errorf("%s is %v there, and %v in the network: convert it before, or load the "+
				"file with nn.Load before the network is sharded: %w",
				n.Name, s.DType, dtype, cuda.ErrInvalidArgument)
		}
		names[n.Name] = true
	}
	for name := range specs {
		if !names[name] {
			return fmt.Errorf("the network has no tensor %s: %w", name, cuda.ErrInvalidArgument)
		}
	}
	d.version.changes++
	for _, n := range state {
		if err := d.loadOne(n, parts[n.Name], read); err != nil {
			return fmt.Errorf("%s: %w", n.Name, err)
		}
	}
	return nil
}

// loadOne replaces this rank's shard of a parameter, or a buffer.
func (d *FullyShardedDataParallel) loadOne(n torch.Named, p *blockParameter,
	read func(*torch.Scope, string, *blockParameter) (*torch.Tensor, error)) error {
	to := n.Tensor
	if p != nil {
		if p.lo == p.hi {
			return nil
		}
		to = p.piece.NoGrad()
	}
	scope := torch.NewScope("a tensor on its way")
	defer scope.Close()
	t, err := read(scope, n.Name, p)
	if err != nil {
		return err
	}
	return to.CopyFrom(t, torch.CopyOptions{})
}

// EMAState gathers the sharded averages and returns them for whole parameters, as the EMA of a
// single process would hold them. Every rank gets whole averages of the parameters, as tensors on
// the CPU. The next EMAState or Close frees these tensors. The averages of buffers belong to the
// EMA. EMAState is a collective that waits for the device.
func (d *FullyShardedDataParallel) EMAState(e *optim.EMA) ([]torch.Named, error) {
	const call = "FullyShardedDataParallel.EMAState"
	if err := d.ready("EMAState"); err != nil {
		return nil, err
	}
	d.whole.dropAverages()
	state, parts := e.State(), d.byName()
	if err := d.agreeOnAverages(state, parts); err != nil {
		return nil, fmt.Errorf("distributed: %s: %w", call, err)
	}
	own := map[*flatParameters][]partOf{}
	for _, n := range state {
		if p := parts[n.Name]; p != nil {
			own[p.flat] = append(own[p.flat], partOf{&p.shardedParameter, n.Tensor})
		}
	}
	whole := map[*shardedParameter]*torch.Tensor{}
	for _, b := range d.blocks {
		for _, f := range b.flats {
			if err := d.gatherWhole(call, f, own[&f.flatParameters], &d.whole.averages, whole); err != nil {
				return nil, d.fail(call, fmt.Errorf("%s: %w", b.name, err))
			}
		}
	}
	for i, n := range state {
		if p := parts[n.Name]; p != nil {
			state[i].Tensor = whole[&p.shardedParameter]
		}
	}
	return state, nil
}

// DividedAverages describes how the ranks divide the averages in e.State(). Pass the result to
// checkpoint.RankWriter if each rank writes its shard of a checkpoint. DividedAverages is a
// collective: the ranks compare which tensors they average.
func (d *FullyShardedDataParallel) DividedAverages(e *optim.EMA) (checkpoint.Divided, error) {
	if err := d.ready("DividedAverages"); err != nil {
		return nil, err
	}
	state, parts, divided := e.State(), d.byName(), checkpoint.Divided{}
	if err := d.agreeOnAverages(state, parts); err != nil {
		return nil, fmt.Errorf("distributed: FullyShardedDataParallel.DividedAverages: %w", err)
	}
	for _, n := range state {
		if p := parts[n.Name]; p != nil {
			divided[n.Tensor] = p.division(d.g.Size())
		}
	}
	return divided, nil
}

// agreeOnAverages requires that all ranks average the same tensors. An average of a parameter must
// have the shape of this rank's shard.
func (d *FullyShardedDataParallel) agreeOnAverages(state []torch.Named, parts map[string]*blockParameter) error {
	mine := modelText{}
	for _, n := range state {
		mine.Tensors = append(mine.Tensors, fmt.Sprintf("an average of %v of %s", n.Tensor.DType(), n.Name))
		if p := parts[n.Name]; p != nil {
			if shape := n.Tensor.Shape(); !slices.Equal(shape, []int64{p.hi - p.lo}) {
				mine.Err = fmt.Sprintf("the average of %s has the shape %v, and this rank's part of the "+
					"parameter %d elements: make the EMA of nn.State of the FullyShardedDataParallel",
					n.Name, shape, p.hi-p.lo)
			}
		}
	}
	return mine.agree(d.g)
}

// gatherWhole gathers parameters of a flat tensor from all ranks. own holds this rank's shards.
// gatherWhole adds the whole tensors, on the CPU, to whole and to kept.
func (d *FullyShardedDataParallel) gatherWhole(call string, f *blockFlat, own []partOf,
	kept *[]*torch.Tensor, whole map[*shardedParameter]*torch.Tensor) error {
	if len(own) == 0 {
		return nil
	}
	scope := torch.NewScope("parts on their way")
	defer scope.Close()
	all, err := gatherParts(scope, d.g, call, stateRow{&f.flatParameters, "parts", own[0].t.DType()}, own)
	if err != nil {
		return err
	}
	for _, part := range own {
		t := part.p.of(all).Keep()
		*kept = append(*kept, t)
		if err := t.Err(); err != nil {
			return err
		}
		whole[part.p] = t
	}
	return nil
}

// LoadEMAState copies this rank's shards of averages into an EMA of nn.State(d). state holds
// averages of whole parameters, from EMAState or from the EMA of a single process. All ranks pass
// the same tensors. Names and shapes must match the network's, or nothing changes. LoadEMAState is
// not a collective.
func (d *FullyShardedDataParallel) LoadEMAState(e *optim.EMA, state []torch.Named) error {
	if err := d.ready("LoadEMAState"); err != nil {
		return err
	}
	scope := torch.NewScope("averages on their way")
	defer scope.Close()
	parts := d.byName()
	part := make([]torch.Named, len(state))
	for i, n := range state {
		part[i] = n
		p := parts[n.Name]
		if p == nil || n.Tensor.Err() != nil { // e.LoadState returns the error
			continue
		}
		if shape := n.Tensor.Shape(); !slices.Equal(shape, p.shape) {
			return fmt.Errorf("distributed: FullyShardedDataParallel.LoadEMAState: %s has the shape %v, "+
				"and its parameter %v: %w", n.Name, shape, p.shape, cuda.ErrInvalidArgument)
		}
		var err error
		if part[i].Tensor, err = p.partOf(scope, n.Tensor); err != nil {
			return fmt.Errorf("distributed: FullyShardedDataParallel.LoadEMAState: %s: %w", n.Name, err)
		}
	}
	return e.LoadState(part)
}

// LoadEMAFrom is like [FullyShardedDataParallel.LoadEMAState], but reads the averages from a file.
// stored maps names to tensors of the file. LoadEMAFrom reads only this rank's shards and the
// buffers.
func (d *FullyShardedDataParallel) LoadEMAFrom(e *optim.EMA, stored map[string]*checkpoint.StoredTensor) error {
	if err := d.ready("LoadEMAFrom"); err != nil {
		return err
	}
	scope := torch.NewScope("averages on their way")
	defer scope.Close()
	parts, state := d.byName(), make([]torch.Named, 0, len(stored))
	for name, s := range stored {
		p := parts[name]
		if shape := s.Spec().Shape; p != nil && !slices.Equal(shape, p.shape) {
			return fmt.Errorf("distributed: FullyShardedDataParallel.LoadEMAFrom: %s has the shape %v, "+
				"and its parameter %v: %w", name, shape, p.shape, cuda.ErrInvalidArgument)
		}
		t, err := p.read(scope, s)
		if err != nil {
			return fmt.Errorf("distributed: FullyShardedDataParallel.LoadEMAFrom: %s: %w", name, err)
		}
		state = append(state, torch.Named{Name: name, Tensor: t})
	}
	return e.LoadState(state)
}

// byName returns the parameters by the names of their shards in nn.State.
func (d *FullyShardedDataParallel) byName() map[string]*blockParameter {
	of := map[*torch.Tensor]*blockParameter{}
	for _, p := range d.params {
		of[p.piece] = p
	}
	parts := map[string]*blockParameter{}
	for _, n := range nn.State(d) {
		if p := of[n.Tensor]; p != nil {
			parts[n.Name] = p
		}
	}
	return parts
}
