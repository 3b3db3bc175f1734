//go:build linux

package distributed

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/torch"
)

// languageModel has the parts of GPT-2 that are outside of blocks: a weight that is both the
// embedding of tokens and the output layer, a table of positions, and a normalisation.
type languageModel struct {
	tokens, positions *torch.Tensor
	drop              *nn.Dropout
	layers, norm      nn.Module
}

func (m *languageModel) Forward(x *torch.Tensor) *torch.Tensor {
	y := m.tokens.IndexSelect(0, x.Reshape(-1)).Reshape(-1, 4, 6).Add(m.positions)
	return m.norm.Forward(m.layers.Forward(m.drop.Forward(y))).MatMul(m.tokens.T())
}

func (m *languageModel) Parts() nn.Parts {
	return nn.Parts{
		Parameters: []torch.Named{{Name: "tokens", Tensor: m.tokens}, {Name: "positions", Tensor: m.positions}},
		Modules: []nn.Child{{Name: "drop", Module: m.drop}, {Name: "layers", Module: m.layers},
			{Name: "norm", Module: m.norm},
			{Name: "head", Module: parametersOf{{Name: "weight", Tensor: m.tokens}}}},
	}
}

// parametersOf is a module that only lists parameters.
type parametersOf []torch.Named

func (p parametersOf) Forward(x *torch.Tensor) *torch.Tensor { return x }
func (p parametersOf) Parts() nn.Parts                       { return nn.Parts{Parameters: p} }

func newLanguageModel(wrap func(nn.Module) nn.Module) (*languageModel, error) {
	seeding.Lock()
	defer seeding.Unlock()
	if err := torch.ManualSeed(3); err != nil {
		return nil, err
	}
	weight := func(in, out int) *torch.Tensor {
		return nn.Parameters(nn.NewLinear(in, out, nn.LinearOptions{NoBias: true}))[0]
	}
	layer := func() nn.Module {
		return wrap(nn.NewSequential(nn.NewLinear(6, 11, nn.LinearOptions{}), nn.NewTanh(),
			nn.NewLinear(11, 6, nn.LinearOptions{})))
	}
	m := &languageModel{tokens: weight(6, 9), positions: weight(6, 4), drop: nn.NewDropout(0.5),
		layers: nn.NewSequential(layer(), layer(), layer()),
		norm:   nn.NewLayerNorm([]int{6}, nn.LayerNormOptions{})}
	nn.Train(m.drop, false)
	return m, nn.ToDType(m, torch.Float64)
}

// distinct returns the tensors without duplicates.
func distinct(tensors []*torch.Tensor) (once []*torch.Tensor) {
	for _, t := range tensors {
		if !slices.Contains(once, t) {
			once = append(once, t)
		}
	}
	return once
}

// tokensOf returns the tokens of some rows of a batch.
func tokensOf(rows []int, step int) (*torch.Tensor, error) {
	var tokens []int64
	for _, r := range rows {
		for i := range 4 {
			tokens = append(tokens, int64((r*5+i*i+step)%9))
		}
	}
	return torch.FromInt64s(tokens, int64(len(rows)), 4)
}

// A network with parameters outside of blocks trains as it does in one process. The first and the
// last layer share one of these parameters. The result stays the same with a NoGrad pass between
// forward and backward, and without any block. The state has the names and the order of a run in
// one process.
func TestParametersOutsideBlocksEqualOneProcess(t *testing.T) {
	for name, wrap := range map[string]func(nn.Module) nn.Module{
		"with blocks":    func(m nn.Module) nn.Module { return NewShardedBlock(m) },
		"without blocks": func(m nn.Module) nn.Module { return m },
	} {
		for _, n := range []int{1, 2, 3} {
			t.Run(fmt.Sprintf("%s, %d ranks", name, n), func(t *testing.T) {
				requireNone(t, inProcess(t, n, quick, func(g *Group) error { return outsideTrainsAsOne(g, wrap) }))
			})
		}
	}
}

func outsideTrainsAsOne(g *Group, wrap func(nn.Module) nn.Module) error {
	alone, err := newLanguageModel(func(m nn.Module) nn.Module { return m })
	if err != nil {
		return err
	}
	net, err := newLanguageModel(wrap)
	if err != nil {
		return err
	}
	d, err := NewFullyShardedDataParallel(g, net, FullyShardedOptions{})
	if err != nil {
		return err
	}
	one, err := adamW(distinct(nn.Parameters(alone)))
	if err != nil {
		return err
	}
	opt, err := d.NewOptimizer(adamW)
	if err != nil {
		return err
	}
	loss := func(y *torch.Tensor) *torch.Tensor { return y.Square().Mean().Add(y.Tanh().Mean()) }
	for step := range 6 {
		var rows []int
		for r := range 7 {
			rows = append(rows, r)
		}
		x, err := tokensOf(rows, step)
		if err != nil {
			return err
		}
		own := dealt(0, 7, g.Rank(), g.Size())
		mine, err := tokensOf(own, step)
		if err != nil {
			return err
		}
		sum := loss(alone.Forward(x))
		part := d.Weigh(loss(d.Forward(mine)), len(own))
		between, err := computeUnderNoGrad(d, mine)
		if err != nil {
			return err
		}
		err = errors.Join(sum.Backward(), one.Step(), one.ZeroGrad(), d.Backward(part), opt.Step(), opt.ZeroGrad(),
			sum.Close(), part.Close(), between.Close(), x.Close(), mine.Close())
		if err != nil {
			return err
		}
		if s := d.Stats(); s.GatheredBytes+s.GradientBytes != 0 {
			return fmt.Errorf("something is gathered still: %+v", s)
		}
	}
	state, err := d.State()
	if err != nil {
		return err
	}
	if diff, err := compareNamed(state, nn.State(alone)); err != nil || diff > 1e-12 {
		return fmt.Errorf("the weights differ by %g: %w", diff, err)
	}
	if diff, err := compareStates(one, opt); err != nil || diff > 1e-12 {
		return fmt.Errorf("the states differ by %g: %w", diff, err)
	}
	var whole, held int64
	for _, p := range distinct(nn.Parameters(alone)) {
		whole += p.Elements()
	}
	for _, p := range distinct(nn.Parameters(d)) {
		held += p.Elements()
	}
	if held > whole/int64(g.Size())+64 {
		return fmt.Errorf("nn.Parameters has %d elements of %d", held, whole)
	}
	for _, p := range nn.Parameters(net.norm) {
		if p.Elements() != 0 {
			return errors.New("a parameter outside of blocks has elements outside of a pass")
		}
	}
	// nn.Train also reaches the modules that the sharded network wraps.
	nn.Train(d, true)
	if g.Size() == 1 {
		x, err := tokensOf([]int{1, 2, 3}, 0)
		if err != nil {
			return err
		}
		a, b := d.Forward(x.NoGrad()), d.Forward(x.NoGrad())
		diff, err := compareNamed([]torch.Named{{Tensor: a}}, []torch.Named{{Tensor: b}})
		if err != nil || diff == 0 {
			return fmt.Errorf("Dropout does not train: %w", err)
		}
	}
	return errors.Join(opt.Close(), d.Close(), one.Close())
}

// computeUnderNoGrad computes an output under NoGrad.
func computeUnderNoGrad(d *FullyShardedDataParallel, x *torch.Tensor) (*torch.Tensor, error) {
	y := d.Forward(x.NoGrad())
	if err := y.Err(); err != nil {
		return nil, err
	}
	if y.RequiresGrad() {
		return nil, errors.New("an output under NoGrad has a history")
	}
	return y, nil
}

// An output of the network never shares memory with a parameter outside of blocks, because the
// parameter's memory is freed. If a program calls loss.Backward instead of
// FullyShardedDataParallel.Backward, the next Forward returns an error that names a parameter with
// a gradient.
func TestOutputsOutsideBlocksShareNoMemory(t *testing.T) {
	done := false
	errs := inProcess(t, 1, quick, func(g *Group) error {
		weight := full(cuda.CPU, torch.Float32, 2, 1000)
		if err := weight.SetRequiresGrad(true); err != nil {
			return err
		}
		m := namedFunc{[]torch.Named{{Name: "w", Tensor: weight}}, func(x *torch.Tensor) *torch.Tensor {
			if x.Elements() == 2 {
				return weight.NoGrad().Reshape(10, 100)
			}
			return weight.Reshape(10, 100)
		}}
		d, err := NewFullyShardedDataParallel(g, m, FullyShardedOptions{})
		if err != nil {
			return err
		}
		x := full(cuda.CPU, torch.Float32, 1, 1)
		y, err := computeUnderNoGrad(d, full(cuda.CPU, torch.Float32, 1, 2))
		if err != nil {
			return err
		}
		if v, err := y.Sum().Float64(); err != nil || v != 2000 {
			return fmt.Errorf("the output is %v, %w", v, err)
		}
		loss := d.Forward(x).Sum()
		if err := loss.Backward(); err != nil {
			return err
		}
		if err := d.Forward(x).Err(); err == nil ||
			!strings.Contains(err.Error(), "w has a gradient that is not of FullyShardedDataParallel.Backward") {
			return fmt.Errorf("%w: want the gradient", err)
		}
		first := d.Forward(x).Sum()
		opt, err := d.NewOptimizer(sgd)
		if err != nil {
			return err
		}
		if err := errors.Join(d.Backward(first), opt.Step()); err != nil {
			return err
		}
		stale := d.Forward(x).Sum()
		state, err := d.State()
		if err == nil {
			err = d.LoadState(state)
		}
		if err != nil {
			return err
		}
		if err := d.Backward(stale); err == nil || !strings.Contains(err.Error(), "have changed since Forward") {
			return fmt.Errorf("%w: want the change", err)
		}
		done = true
		return errors.Join(opt.Close(), d.Close())
	})
	if !done { // the last error has ended the job
		t.Error(errs[0])
	}
}

type namedFunc struct {
	parametersOf
	compute func(x *torch.Tensor) *torch.Tensor
}

func (f namedFunc) Forward(x *torch.Tensor) *torch.Tensor { return f.compute(x) }

// If a pass does not use a trained parameter outside of blocks, the error names the parameter.
func TestUnusedParameterOutsideBlocksIsNamed(t *testing.T) {
	errs := inProcess(t, 1, quick, func(g *Group) error {
		used, unused := full(cuda.CPU, torch.Float32, 2, 10), full(cuda.CPU, torch.Float32, 2, 10)
		if err := errors.Join(used.SetRequiresGrad(true), unused.SetRequiresGrad(true)); err != nil {
			return err
		}
		m := namedFunc{[]torch.Named{{Name: "used", Tensor: used}, {Name: "unused", Tensor: unused}},
			func(x *torch.Tensor) *torch.Tensor { return x.Mul(used) }}
		d, err := NewFullyShardedDataParallel(g, m, FullyShardedOptions{})
		if err != nil {
			return err
		}
		return d.Backward(d.Forward(full(cuda.CPU, torch.Float32, 1, 10)).Sum())
	})
	if errs[0] == nil || !strings.Contains(errs[0].Error(), "backward made no gradient for unused on rank 0") {
		t.Error(errs[0])
	}
}
