package distributed

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/torchstream/torchstream/checkpoint"
	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/torch"
)

// dividedOptimizer is an optimizer of this rank's shards of the parameters.
type dividedOptimizer struct {
	name     string // type name, for errors
	g        *Group
	inner    optim.Optimizer
	parts    []*shardedParameter
	order    []*shardedParameter // in the order of the optimizer's state, which is the order of its groups
	gathered []*torch.Tensor     // returned by State
}

// Group returns the group that shards the state.
func (z *dividedOptimizer) Group() *Group { return z.g }

// String returns the optimizer's name, this rank, and the optimizer of the rank's shards:
//
//	ZeroRedundancyOptimizer(rank 0 of 4, SGD(62 parameters, lr 0.1, momentum 0.9))
//
// It reads nothing from a device.
func (z *dividedOptimizer) String() string {
	return fmt.Sprintf("%s(%s, %v)", z.name, z.g.place(), z.inner)
}

// build makes the optimizer of this rank's shards.
func (z *dividedOptimizer) build(build func([]*torch.Tensor) (optim.Optimizer, error)) error {
	if build == nil {
		return fmt.Errorf("build is nil: %w", cuda.ErrInvalidArgument)
	}
	shard := make([]*torch.Tensor, len(z.parts))
	for i, p := range z.parts {
		shard[i] = p.piece
	}
	inner, err := build(shard)
	if err != nil {
		return err
	}
	if inner == nil {
		return fmt.Errorf("build returned no optimizer: %w", cuda.ErrInvalidArgument)
	}
	z.inner = inner
	switch inner.(type) {
	case *optim.LAMB, *optim.Muon:
		return fmt.Errorf("%T computes with whole parameters, of which a rank has a part: use an "+
			"optimizer of single elements, such as AdamW: %w", inner, cuda.ErrInvalidArgument)
	}
	return z.index()
}

// index lists the parts in the optimizer's order.
func (z *dividedOptimizer) index() error {
	of := make(map[*torch.Tensor]*shardedParameter, len(z.parts))
	for _, p := range z.parts {
		of[p.piece] = p
	}
	for _, g := range z.inner.Groups() {
		for _, t := range g.Params {
			p := of[t]
			if p == nil {
				return fmt.Errorf("the optimizer has a parameter that is not of the shard: %w", cuda.ErrInvalidArgument)
			}
			z.order = append(z.order, p)
		}
	}
	return nil
}

// LRs returns the current learning rate of each group.
func (z *dividedOptimizer) LRs() []float64 {
	if z.inner == nil {
		return nil
	}
	return z.inner.LRs()
}

// SetLR sets one learning rate for all groups, or one for each group. All ranks must set the same
// rates.
func (z *dividedOptimizer) SetLR(rates ...float64) error {
	if z.inner == nil {
		return fmt.Errorf("distributed: %s.SetLR: %w", z.name, torch.ErrClosed)
	}
	return z.inner.SetLR(rates...)
}

// Capturable reports whether a captured Step uses the rates of later calls of SetLR.
func (z *dividedOptimizer) Capturable() bool {
	c, ok := z.inner.(interface{ Capturable() bool })
	return ok && c.Capturable()
}

func (z *dividedOptimizer) dropGathered() {
	for _, t := range z.gathered {
		t.Close()
	}
	z.gathered = nil
}

// StateBytes returns the size of this rank's state in bytes, including masters.
func (z *dividedOptimizer) StateBytes() (int64, error) {
	if z.inner == nil {
		return 0, fmt.Errorf("distributed: %s.StateBytes: %w", z.name, torch.ErrClosed)
	}
	s, err := z.inner.State()
	if err != nil {
		return 0, err
	}
	var n int64
	for _, t := range s.Tensors {
		n += t.Tensor.Elements() * int64(t.Tensor.DType().Size())
	}
	return n, nil
}

// shardedState describes one tensor of a rank's state.
type shardedState struct {
	Index  int    // index of the parameter in the optimizer
	Name   string // PyTorch's name, such as "exp_avg"
	DType  torch.DType
	Scalar bool    // one number for the whole parameter, such as the step count
	Value  float64 // value of a scalar
}

func (k shardedState) kind() string {
	if k.Scalar {
		return fmt.Sprintf("one %v", k.DType)
	}
	return fmt.Sprintf("a tensor of %v", k.DType)
}

// splitState splits "state.INDEX.NAME".
func splitState(name string) (index int, rest string, ok bool) {
	name, ok = strings.CutPrefix(name, "state.")
	number, rest, found := strings.Cut(name, ".")
	index, err := strconv.Atoi(number)
	return index, rest, ok && found && err == nil && index >= 0
}

// State returns the state of all ranks, in the form in which an optimizer in one process returns
// it. The state can be loaded into that optimizer, or into a ZeroRedundancyOptimizer with any
// number of ranks. Every rank gets whole tensors, on the CPU. The next Step, State, LoadState or
// Close frees them. State is a collective that waits for the device: all ranks call it, and one of
// them then writes a file. An error on one rank ends the job.
//
//	state, err := opt.State()
//	if err == nil && world.Rank() == 0 {
//		err = checkpoint.Save("adamw.safetensors", state.Tensors, state.Metadata)
//	}
//
// optim.Save calls State, so it too must be called on all ranks, each with a different path.
// train.Checkpoint with World does all of this.
func (z *dividedOptimizer) State() (optim.State, error) {
	if z.inner == nil {
		return optim.State{}, fmt.Errorf("distributed: %s.State: %w", z.name, torch.ErrClosed)
	}
	z.dropGathered()
	own, err := z.inner.State()
	kinds, err := z.describe(own, err)
	if err != nil {
		return optim.State{}, fmt.Errorf("distributed: %s.State: %w", z.name, err)
	}
	whole := optim.State{Metadata: own.Metadata}
	scope := torch.NewScope("state on its way")
	defer scope.Close()
	rows := map[stateRow]*torch.Tensor{}
	for _, k := range kinds {
		t, err := z.wholeState(scope, rows, own, k)
		if err != nil {
			err = fmt.Errorf("distributed: %s.State: %s: %w", z.name, stateOf(k), err)
			if known := new(Error); errors.As(err, &known) { // the collective failed
				return optim.State{}, err
			}
			return optim.State{}, z.g.abort(z.name+".State", err)
		}
		z.gathered = append(z.gathered, t)
		whole.Tensors = append(whole.Tensors, torch.Named{Name: stateOf(k), Tensor: t})
	}
	return whole, nil
}

func stateOf(k shardedState) string { return fmt.Sprintf("state.%d.%s", k.Index, k.Name) }

// describe returns the tensors of the whole state, the same list on all ranks. If failure is set on
// a rank, describe returns an error on all ranks. All ranks that have elements of a parameter must
// have state with the same names.
func (z *dividedOptimizer) describe(own optim.State, failure error) ([]shardedState, error) {
	mine := struct {
		State []shardedState
		Err   string
	}{}
	if failure != nil {
		mine.Err = failure.Error()
	}
	for _, n := range own.Tensors {
		k := shardedState{DType: n.Tensor.DType()}
		var ok bool
		if k.Index, k.Name, ok = splitState(n.Name); !ok || k.Index >= len(z.order) {
			mine.Err = fmt.Sprintf("%q is the state of no parameter", n.Name)
			break
		}
		p := z.order[k.Index]
		switch shape := n.Tensor.Shape(); {
		case len(shape) == 0:
			k.Scalar = true
			v, err := n.Tensor.Float64()
			if err != nil {
				mine.Err = err.Error()
			}
			k.Value = v
		case !slices.Equal(shape, []int64{p.hi - p.lo}):
			mine.Err = fmt.Sprintf("%s has the shape %v for %d elements of its parameter", n.Name, shape, p.hi-p.lo)
		}
		mine.State = append(mine.State, k)
	}
	all, err := AllGatherObject(z.g, mine)
	if err != nil {
		return nil, err
	}
	type key struct {
		index int
		name  string
	}
	found := map[key]shardedState{}
	foundOn := map[key]int{} // the first rank with this state
	owners := map[key]int64{}
	for r, other := range all {
		if other.Err != "" {
			return nil, fmt.Errorf("rank %d: %s: %w", r, other.Err, cuda.ErrInvalidArgument)
		}
		for _, k := range other.State {
			at := key{k.Index, k.Name}
			if owners[at] == 0 {
				found[at], foundOn[at] = k, r
			}
			if first := found[at]; first.DType != k.DType || first.Scalar != k.Scalar {
				return nil, fmt.Errorf("%w: the state %s is %s on rank %d and %s on rank %d", ErrMismatch,
					stateOf(k), first.kind(), foundOn[at], k.kind(), r)
			}
			owners[at]++
		}
	}
	for at, n := range owners {
		if want := z.order[at.index].owners(); n != want {
			return nil, fmt.Errorf("%w: %d ranks have the state %s, and %d have elements of its parameter",
				ErrMismatch, n, stateOf(found[at]), want)
		}
	}
	return slices.SortedFunc(maps.Values(found), func(a, b shardedState) int {
		return cmp.Or(cmp.Compare(a.Index, b.Index), cmp.Compare(a.Name, b.Name))
	}), nil
}

// owners returns the number of ranks that update elements of the parameter.
func (p *shardedParameter) owners() int64 {
	if p.elements == 0 {
		return 0
	}
	return (p.begin+p.elements-1)/p.flat.share - p.begin/p.flat.share + 1
}

// stateRow identifies the state of one name and dtype for all parameters of a flat tensor.
type stateRow struct {
	flat  *flatParameters
	name  string
	dtype torch.DType
}

// wholeState returns a new tensor with the state of all ranks. rows caches gathered rows.
func (z *dividedOptimizer) wholeState(scope *torch.Scope, rows map[stateRow]*torch.Tensor, own optim.State,
	k shardedState) (*torch.Tensor, error) {
	if k.Scalar {
		return torch.Full(cuda.CPU, k.DType, k.Value)
	}
	p := z.order[k.Index]
	at := stateRow{p.flat, k.Name, k.DType}
	if rows[at] == nil {
		row, err := z.gatherRow(scope, own, at)
		if err != nil {
			return nil, err
		}
		rows[at] = row
	}
	t := p.of(rows[at]).Keep()
	return t, t.Err()
}

// gatherRow gathers the state of one name and dtype.
func (z *dividedOptimizer) gatherRow(scope *torch.Scope, own optim.State, at stateRow) (*torch.Tensor, error) {
	var mine []partOf
	for _, n := range own.Tensors {
		index, name, _ := splitState(n.Name)
		p := z.order[index]
		if name == at.name && p.flat == at.flat && n.Tensor.DType() == at.dtype && len(n.Tensor.Shape()) > 0 {
			mine = append(mine, partOf{p, n.Tensor})
		}
	}
	return gatherParts(scope, z.g, z.name+".State", at, mine)
}

// partOf pairs a parameter with a tensor of this rank's elements of the parameter.
type partOf struct {
	p *shardedParameter
	t *torch.Tensor
}

// gatherParts gathers all ranks' parts into a flat tensor on the CPU. mine holds this rank's parts.
// It is a collective.
func gatherParts(scope *torch.Scope, g *Group, call string, at stateRow, mine []partOf) (*torch.Tensor, error) {
	all, err := torch.Zeros(cuda.CPU, at.dtype, at.flat.share*int64(g.Size()))
	if err != nil {
		return nil, err
	}
	all = scope.Own(all)
	first := int64(g.Rank()) * at.flat.share
	own := all.Narrow(0, first, at.flat.share)
	for _, m := range mine {
		if m.p.lo == m.p.hi {
			continue
		}
		if err := own.Narrow(0, m.p.begin+m.p.lo-first, m.p.hi-m.p.lo).CopyFrom(m.t, torch.CopyOptions{}); err != nil {
			return nil, err
		}
	}
	if at.flat.share == 0 {
		return all, nil
	}
	c, err := g.begin(call, at.name, own, all)
	if err != nil {
		return nil, err
	}
	return all, c.sync([]*torch.Tensor{all, own}, allGather)
}

// DividedState returns this rank's shards of the state, and a checkpoint.Divided that describes, by
// name, how the ranks divide each tensor of the whole state. Pass the Divided to
// checkpoint.RankWriter if each rank writes its shard of a checkpoint. Scalars are whole: a step
// count, for example, is the same for all elements. The caller does not own the tensors. Some
// belong to the optimizer. The others are freed together with the tensors that the method State
// returns. DividedState is a collective and copies no tensor data. An error on one rank is an error
// on all.
func (z *dividedOptimizer) DividedState() (optim.State, checkpoint.Divided, error) {
	if z.inner == nil {
		return optim.State{}, nil, fmt.Errorf("distributed: %s.DividedState: %w", z.name, torch.ErrClosed)
	}
	z.dropGathered()
	own, err := z.inner.State()
	kinds, err := z.describe(own, err)
	if err != nil {
		return optim.State{}, nil, fmt.Errorf("distributed: %s.DividedState: %w", z.name, err)
	}
	mine := map[string]*torch.Tensor{}
	for _, n := range own.Tensors {
		mine[n.Name] = n.Tensor
	}
	part, divided := optim.State{Metadata: own.Metadata}, checkpoint.Divided{}
	for _, k := range kinds {
		name := stateOf(k)
		t := mine[name]
		switch {
		case k.Scalar:
			t, err = torch.Full(cuda.CPU, k.DType, k.Value)
			z.gathered = append(z.gathered, t)
		case t == nil: // only other ranks have this tensor
			t, err = torch.Empty(cuda.CPU, k.DType, 0)
			z.gathered = append(z.gathered, t)
		}
		if err != nil {
			return optim.State{}, nil,
				z.g.abort(z.name+".DividedState", fmt.Errorf("distributed: %s.DividedState: %s: %w", z.name, name, err))
		}
		if !k.Scalar {
			divided[t] = z.order[k.Index].division(z.g.Size())
		}
		part.Tensors = append(part.Tensors, torch.Named{Name: name, Tensor: t})
	}
	return part, divided, nil
}

// division describes which elements of the parameter each of n ranks has.
func (p *shardedParameter) division(n int) checkpoint.Division {
	d := checkpoint.Division{Shape: p.shape, Strides: p.strides, First: make([]int64, n+1)}
	for r := range d.First {
		d.First[r] = p.before(int64(r))
	}
	return d
}

// LoadState loads this rank's shards from a whole state, made by State or by an optimizer in one
// process. It also sets the learning rates. It is not a collective: every rank passes the whole
// state.
func (z *dividedOptimizer) LoadState(s optim.State) error {
	scope := torch.NewScope("a part of a state")
	defer scope.Close()
	part := optim.State{Metadata: s.Metadata}
	for _, n := range s.Tensors {
		t := n.Tensor
		cut, err := optim.Cut{}, t.Err()
		if err == nil {
			cut, err = z.CutState(n.Name, t.Shape())
		}
		if err == nil && cut.Row {
			t, err = cutOf(scope, t, cut)
		}
		if err != nil {
			return fmt.Errorf("distributed: %s.LoadState: %s: %w", z.name, n.Name, err)
		}
		if !cut.None {
			part.Tensors = append(part.Tensors, torch.Named{Name: n.Name, Tensor: t})
		}
	}
	return z.LoadParts(part)
}

// LoadParts is like LoadState, but the tensors of s are already cut for this rank, as CutState
// describes.
func (z *dividedOptimizer) LoadParts(s optim.State) error {
	if z.inner == nil {
		return fmt.Errorf("distributed: %s.LoadState: %w", z.name, torch.ErrClosed)
	}
	if err := z.inner.LoadState(s); err != nil {
		return err
	}
	z.dropGathered()
	return nil
}

// CutState describes which elements of a tensor of the whole state belong to this rank.
func (z *dividedOptimizer) CutState(name string, shape []int64) (optim.Cut, error) {
	index, state, ok := splitState(name)
	if !ok || index >= len(z.order) {
		return optim.Cut{}, nil // LoadParts of the optimizer returns the error
	}
	p := z.order[index]
	switch {
	case state != "step" && !slices.Equal(shape, p.shape):
		return optim.Cut{}, fmt.Errorf("it has the shape %v, and its parameter %v: %w", shape, p.shape,
			cuda.ErrInvalidArgument)
	case p.lo == p.hi:
		return optim.Cut{None: true}, nil
	case state == "step":
		return optim.Cut{}, nil
	}
	return optim.Cut{Row: true, Strides: p.strides, First: p.lo, Elements: p.hi - p.lo}, nil
}

// partOf returns this rank's elements of a tensor that has the parameter's shape, as a row.
func (p *shardedParameter) partOf(scope *torch.Scope, whole *torch.Tensor) (*torch.Tensor, error) {
	return cutOf(scope, whole, optim.Cut{Row: true, Strides: p.strides, First: p.lo, Elements: p.hi - p.lo})
}

func cutOf(scope *torch.Scope, whole *torch.Tensor, c optim.Cut) (*torch.Tensor, error) {
	row, err := torch.Empty(whole.Device(), whole.DType(), whole.Elements())
	if err != nil {
		return nil, err
	}
	row = scope.Own(row)
	if err := row.AsStrided(whole.Shape(), c.Strides, torch.AsStridedOptions{}).CopyFrom(whole.NoGrad(),
		torch.CopyOptions{}); err != nil {
		return nil, err
	}
	return row.Narrow(0, c.First, c.Elements), nil
}
