//go:build linux

package distributed

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/torchstream/torchstream/checkpoint"
	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/torch"
)

// blockNet is a network of blocks. One block has a parameter twice; one is used twice; one is used
// twice with different parameters; one is partly frozen; one is frozen; one is unused. Outside of
// blocks it has a module, a frozen parameter, and a parameter that is used before the first block
// and after the last one.
type blockNet struct {
	ends, first, tied, twice, half, frozen, unused, last nn.Module
	// after, if not nil, is called with the first block's output.
	after       func(y *torch.Tensor)
	mix         nn.Module
	gain, shift *torch.Tensor
}

func (b *blockNet) Forward(x *torch.Tensor) *torch.Tensor {
	y := b.first.Forward(b.ends.Forward(x.Mul(b.gain)))
	if b.after != nil {
		b.after(y)
	}
	y = b.twice.Forward(b.tied.Forward(y))
	y = b.ends.Forward(b.last.Forward(b.twice.Forward(b.frozen.Forward(b.half.Forward(y)))))
	return b.mix.Forward(y).Add(b.shift).Mul(b.gain.Narrow(1, 0, 3))
}

func (b *blockNet) Parts() nn.Parts {
	return nn.Parts{Parameters: []torch.Named{{Name: "gain", Tensor: b.gain},
		{Name: "again", Tensor: b.gain}, {Name: "shift", Tensor: b.shift}},
		Modules: []nn.Child{{Name: "first", Module: b.first}, {Name: "mix", Module: b.mix},
			{Name: "tied", Module: b.tied}, {Name: "twice", Module: b.twice},
			{Name: "half", Module: b.half}, {Name: "frozen", Module: b.frozen},
			{Name: "unused", Module: b.unused}, {Name: "last", Module: b.last}, {Name: "ends", Module: b.ends}}}
}

// bothEnds is used as the first and the last module of a network.
type bothEnds struct {
	both    *torch.Tensor
	in, out nn.Module
}

func (m bothEnds) Forward(x *torch.Tensor) *torch.Tensor {
	if s := x.Shape(); len(s) > 1 && s[1] == 6 {
		return m.in.Forward(x).Mul(m.both)
	}
	return m.out.Forward(x.Mul(m.both))
}

func (m bothEnds) Parts() nn.Parts {
	return nn.Parts{
		Parameters: []torch.Named{{Name: "both", Tensor: m.both}},
		Modules:    []nn.Child{{Name: "in", Module: m.in}, {Name: "out", Module: m.out}},
	}
}

// tiedLinear uses one weight twice.
type tiedLinear struct{ weight *torch.Tensor }

func (l tiedLinear) Forward(x *torch.Tensor) *torch.Tensor {
	return x.MatMul(l.weight).Tanh().MatMul(l.weight.T())
}

func (l tiedLinear) Parts() nn.Parts {
	return nn.Parts{Parameters: []torch.Named{{Name: "in", Tensor: l.weight}, {Name: "out", Tensor: l.weight}}}
}

// newBlockNet returns a float64 network. wrap makes its blocks.
func newBlockNet(seed uint64, d cuda.Device, wrap func(nn.Module) nn.Module) (*blockNet, error) {
	seeding.Lock()
	defer seeding.Unlock()
	if err := torch.ManualSeed(seed); err != nil {
		return nil, err
	}
	linear := func(in, out int) nn.Module {
		return nn.NewSequential(nn.NewLinear(in, out, nn.LinearOptions{}), nn.NewTanh())
	}
	tied := nn.NewLinear(5, 7, nn.LinearOptions{NoBias: true})
	frozen := nn.NewSequential(nn.NewLinear(7, 7, nn.LinearOptions{}), nn.NewBatchNorm1d(7, nn.BatchNormOptions{}))
	half := nn.NewSequential(nn.NewLinear(7, 13, nn.LinearOptions{}), nn.NewLinear(13, 7, nn.LinearOptions{}))
	if err := errors.Join(nn.Freeze(frozen), nn.Freeze(half.Parts().Modules[0].Module)); err != nil {
		return nil, err
	}
	nn.Train(frozen, false)
	both := nn.NewLinear(1, 1, nn.LinearOptions{NoBias: true})
	ends := bothEnds{nn.Parameters(both)[0], linear(6, 6), nn.NewLinear(3, 3, nn.LinearOptions{})}
	net := &blockNet{first: wrap(linear(6, 7)), tied: wrap(tiedLinear{nn.Parameters(tied)[0]}),
		twice: wrap(linear(7, 7)), half: wrap(half),
		frozen: wrap(frozen), unused: wrap(linear(9, 4)),
		last: wrap(nn.NewLinear(7, 3, nn.LinearOptions{})), ends: wrap(ends)}
	outside := nn.NewLinear(6, 1, nn.LinearOptions{NoBias: true})
	shift := nn.NewLinear(3, 1, nn.LinearOptions{NoBias: true})
	if err := nn.Freeze(shift); err != nil {
		return nil, err
	}
	net.gain, net.shift = nn.Parameters(outside)[0], nn.Parameters(shift)[0]
	net.mix = nn.NewSequential(nn.NewLinear(3, 3, nn.LinearOptions{}), nn.NewTanh())
	return net, errors.Join(nn.ToDType(net, torch.Float64), nn.To(net, d))
}

// shardedCase describes a sharded training run.
type shardedCase struct {
	name       string
	o          FullyShardedOptions
	clip       float64
	accumulate int // passes in each step
	scaled     bool
	build      func(params []*torch.Tensor) (optim.Optimizer, error)
	late       bool // on a GPU, delay each block's work, on rank 1 more than on rank 0
}

func sgd(params []*torch.Tensor) (optim.Optimizer, error) {
	return optim.NewSGD(params, optim.SGDOptions{LR: 0.1, Momentum: 0.9})
}

func adamW(params []*torch.Tensor) (optim.Optimizer, error) {
	return optim.NewAdamW(params, optim.AdamWOptions{LR: 0.01, WeightDecay: 0.1})
}

func keptAdam(params []*torch.Tensor) (optim.Optimizer, error) {
	return optim.NewAdam(params, optim.AdamOptions{LR: 0.01, KeepGradients: true})
}

var shardedCases = []shardedCase{
	{"stage 3", FullyShardedOptions{}, 0, 1, false, adamW, false},
	{"stage 2", FullyShardedOptions{KeepAfterForward: true}, 0, 1, false, adamW, false},
	{"stage 3, clipped, of two passes", FullyShardedOptions{}, 0.01, 2, false, sgd, false},
	{"stage 2, clipped, of two passes", FullyShardedOptions{KeepAfterForward: true}, 0.01, 2, false, keptAdam, false},
	{"stage 3, scaled", FullyShardedOptions{}, 0.01, 1, true, sgd, false},
}

// lateModule delays the current stream around its module's forward and backward.
type lateModule struct {
	nn.Module
	device cuda.Device
	by     time.Duration
}

func (l lateModule) hold() error {
	on, err := cuda.GetCurrentCUDAStream(l.device)
	return errors.Join(err, capi.DelayStream(on.CAPI(), l.by))
}

func (l lateModule) Forward(x *torch.Tensor) *torch.Tensor {
	err := l.hold()
	y := l.Module.Forward(x)
	if y.RequiresGrad() {
		_, hooked := y.RegisterHook(func(*torch.Tensor) (*torch.Tensor, error) { return nil, l.hold() })
		err = errors.Join(err, hooked)
	}
	if err = errors.Join(err, y.Err()); err != nil {
		return torch.Fail("late", err)
	}
	return y
}

// shardedRun is a training run in one process, or one rank of a sharded run.
type shardedRun struct {
	g       *Group // nil for a run in one process
	net     *blockNet
	sharded *FullyShardedDataParallel
	opt     optim.Optimizer
	scaler  *optim.GradScaler
	ema     *optim.EMA
	// gradientBytes is Stats().GradientBytes before the latest step.
	gradientBytes int64
}

func startSharded(g *Group, d cuda.Device, c shardedCase, seed uint64) (*shardedRun, error) {
	r := &shardedRun{g: g}
	var err error
	if r.scaler, err = optim.NewGradScaler(d, optim.GradScalerOptions{InitScale: 1024}); err != nil {
		return nil, err
	}
	if g == nil {
		if r.net, err = newBlockNet(seed, d, func(m nn.Module) nn.Module { return m }); err != nil {
			return nil, err
		}
		if r.ema, err = optim.NewEMA(nn.State(r.net), optim.EMAOptions{Decay: 0.8}); err != nil {
			return nil, err
		}
		r.opt, err = c.build(slices.Compact(nn.Parameters(r.net)))
		return r, err
	}
	// The network starts on the CPU, like a network that is larger than one device.
	wrap := func(m nn.Module) nn.Module {
		if c.late {
			m = lateModule{m, d, time.Duration(1+g.Rank()) * 2 * time.Millisecond}
		}
		return NewShardedBlock(m)
	}
	if r.net, err = newBlockNet(seed, cuda.CPU, wrap); err != nil {
		return nil, err
	}
	if r.sharded, err = NewFullyShardedDataParallel(g, r.net, c.o); err != nil {
		return nil, err
	}
	if r.ema, err = optim.NewEMA(nn.State(r.sharded), optim.EMAOptions{Decay: 0.8}); err != nil {
		return nil, err
	}
	r.opt, err = r.sharded.NewOptimizer(c.build)
	return r, err
}

func (r *shardedRun) end() error {
	errs := []error{r.opt.Close(), r.scaler.Close(), r.ema.Close()}
	if r.sharded != nil {
		return errors.Join(append(errs, r.sharded.Close())...)
	}
	return errors.Join(append(errs, nn.Close(r.net))...)
}

// pass computes the gradients for some samples.
func (r *shardedRun) pass(d cuda.Device, c shardedCase, first, size int) error {
	rank, n := 0, 1
	if r.g != nil {
		rank, n = r.g.Rank(), r.g.Size()
	}
	mine := dealt(first, size, rank, n)
	scope := torch.NewScope("turn")
	defer scope.Close()
	x, y, err := batch(mine)
	if err != nil {
		return err
	}
	x, y = scope.Own(scope.Own(x).To(d)), scope.Own(scope.Own(y).To(d))
	var loss *torch.Tensor
	if r.sharded != nil {
		loss = r.sharded.Weigh(r.sharded.Forward(x).MSELoss(y), len(mine))
	} else {
		loss = r.net.Forward(x).MSELoss(y)
	}
	backward := loss.Backward
	if c.scaled {
		backward = func() error { return r.scaler.Backward(loss) }
	}
	if r.sharded != nil {
		return r.sharded.Around(backward)
	}
	return backward()
}

func (r *shardedRun) step(d cuda.Device, c shardedCase, first, size int) error {
	for range c.accumulate {
		if err := r.pass(d, c, first, size); err != nil {
			return err
		}
		first += size
	}
	if r.sharded != nil {
		r.gradientBytes = r.sharded.Stats().GradientBytes
	}
	if c.scaled {
		if err := r.scaler.Unscale(r.opt); err != nil {
			return err
		}
	}
	if c.clip > 0 {
		clip := func() (*torch.Tensor, error) {
			return optim.ClipGradNorm(slices.Compact(nn.Parameters(r.net)), c.clip, optim.ClipOptions{})
		}
		if r.sharded != nil {
			clip = func() (*torch.Tensor, error) { return r.sharded.ClipGradNorm(c.clip, optim.ClipOptions{}) }
		}
		norm, err := clip()
		if err != nil {
			return err
		}
		defer norm.Close()
		if v, err := norm.Float64(); err != nil || v <= c.clip {
			return fmt.Errorf("the norm is %v, which is not clipped: %w", v, err)
		}
	}
	if c.scaled {
		return errors.Join(r.scaler.Step(r.opt), r.scaler.Update(), r.opt.ZeroGrad(), r.ema.Update())
	}
	return errors.Join(r.opt.Step(), r.opt.ZeroGrad(), r.ema.Update())
}

const shardedSteps = 8

func (r *shardedRun) train(d cuda.Device, c shardedCase, sizes []int) error {
	first := 0
	for i, size := range sizes {
		if err := r.step(d, c, first, size); err != nil {
			return fmt.Errorf("batch %d of %d: %w", i, size, err)
		}
		first += size * c.accumulate
	}
	return nil
}

// shardedSizes returns batch sizes that the ranks cannot divide evenly. Some are smaller than the
// number of ranks.
func shardedSizes(c shardedCase) (sizes []int) {
	if c.clip > 0 {
		return batchSizes
	}
	for i := range shardedSteps {
		sizes = append(sizes, batchSizes[i%len(batchSizes)])
	}
	return sizes
}

// compareNamed returns the maximum difference between two lists of tensors.
func compareNamed(a, b []torch.Named) (float64, error) {
	var values [2][]float64
	var names [2][]string
	for i, list := range [][]torch.Named{a, b} {
		for _, n := range list {
			names[i] = append(names[i], fmt.Sprint(n.Name, n.Tensor.DType(), n.Tensor.Shape()))
			v, err := n.Tensor.NoGrad().ToDType(torch.Float64).Float64s()
			if err != nil {
				return 0, fmt.Errorf("%s: %w", n.Name, err)
			}
			values[i] = append(values[i], v...)
		}
	}
	if !slices.Equal(names[0], names[1]) {
		return 0, fmt.Errorf("the tensors differ:\n%v\n%v", names[0], names[1])
	}
	return difference(values[0], values[1]), nil
}

// shardedTrainsAsOne compares the parameters, optimizer state and memory of a sharded run with a
// run in one process. Then each run loads the other's state, continues, and they are compared
// again.
func shardedTrainsAsOne(g *Group, d cuda.Device, c shardedCase) error {
	alone, err := startSharded(nil, d, c, 1)
	if err != nil {
		return err
	}
	ranks, err := startSharded(g, d, c, uint64(1+g.Rank())) // only rank 0's seed has an effect
	if err != nil {
		return err
	}
	same := func(when string) error {
		state, err := ranks.sharded.State()
		if err != nil {
			return err
		}
		diff, err := compareNamed(state, nn.State(alone.net))
		if err != nil || diff > 1e-12 {
			return fmt.Errorf("%s: the weights differ by %g: %w", when, diff, err)
		}
		if diff, err = compareStates(alone.opt, ranks.opt); err != nil || diff > 1e-12 {
			return fmt.Errorf("%s: the states differ by %g: %w", when, diff, err)
		}
		averages, err := ranks.sharded.EMAState(ranks.ema)
		if err != nil {
			return err
		}
		if diff, err = compareNamed(averages, alone.ema.State()); err != nil || diff > 1e-12 {
			return fmt.Errorf("%s: the averages differ by %g: %w", when, diff, err)
		}
		return nil
	}
	must := func(errs ...error) error { return errors.Join(errs...) }
	if err := must(same("before training"), alone.train(d, c, shardedSizes(c)),
		ranks.train(d, c, shardedSizes(c))); err != nil {
		return err
	}
	if err := must(same("after training"), memoryIsDivided(g, ranks, c)); err != nil {
		return err
	}
	// Both runs continue. The ranks load the state of the single process into a network that had
	// other values.
	again, err := startSharded(g, d, c, 77)
	if err != nil {
		return err
	}
	state, err := alone.opt.State()
	if err != nil {
		return err
	}
	if err := must(again.sharded.LoadState(nn.State(alone.net)), again.opt.LoadState(state),
		again.sharded.LoadEMAState(again.ema, alone.ema.State()), ranks.end()); err != nil {
		return err
	}
	ranks = again
	if err := must(same("after loading"), alone.train(d, c, batchSizes[3:]),
		ranks.train(d, c, batchSizes[3:]), same("after training on")); err != nil {
		return err
	}
	return must(alone.end(), ranks.end())
}

// memoryIsDivided requires that each rank holds 1/N of the memory, and gathers at most two blocks
// at a time.
func memoryIsDivided(g *Group, r *shardedRun, c shardedCase) error {
	n := int64(g.Size())
	var whole, trained, unused, padding, outside int64
	var blocks []int64
	for _, b := range r.sharded.blocks {
		var bytes int64
		for _, f := range b.flats {
			bytes += f.bytes
			padding += (n + int64(len(b.params))) * alignment
		}
		for _, p := range b.params {
			whole += 8 * p.elements
			switch {
			case p.in.trained && b.name == "unused": // an unused block gets no gradients
				unused += 8 * p.elements
			case p.in.trained:
				trained += 8 * p.elements
			}
		}
		for _, f := range b.flats {
			for name, t := range map[string]*torch.Tensor{"parameters": f.all, "gradients": f.grads} {
				if t == nil {
					continue
				}
				if at, err := t.Pointer(); err != nil || at != 0 {
					return fmt.Errorf("%s has memory for all %s: %w", b.name, name, err)
				}
			}
		}
		if b == r.sharded.root {
			outside = bytes
			continue
		}
		blocks = append(blocks, bytes)
	}
	s := r.sharded.Stats()
	slices.Sort(blocks)
	two := blocks[len(blocks)-1] + blocks[len(blocks)-2] + outside
	all := whole + padding
	switch {
	case s.GatheredBytes != 0:
		return fmt.Errorf("blocks are gathered still: %+v", s)
	case s.ParameterBytes > (whole+padding)/n || s.ParameterBytes*n < whole:
		return fmt.Errorf("a rank has %d bytes of %d: %+v", s.ParameterBytes, whole, s)
	case r.gradientBytes > (trained+padding)/n || r.gradientBytes*n < trained:
		return fmt.Errorf("a rank has %d bytes of gradients of %d before a step", r.gradientBytes, trained)
	case s.GradientBytes != 0:
		return fmt.Errorf("a rank has %d bytes of gradients after a step", s.GradientBytes)
	case !c.o.KeepAfterForward && s.MaxGatheredBytes > two:
		return fmt.Errorf("%d bytes were gathered, and two blocks have %d: %v", s.MaxGatheredBytes, two, blocks)
	case s.MaxGatheredBytes > all:
		return fmt.Errorf("%d bytes were gathered, and all blocks have %d", s.MaxGatheredBytes, all)
	}
	for _, p := range r.sharded.params {
		if p.param.Elements() != 0 {
			return fmt.Errorf("a parameter has elements outside of its block's computation: %v", p.names)
		}
	}
	state, err := r.opt.(*FullyShardedOptimizer).StateBytes()
	if limit := 2*(trained+unused+padding)/n + 8*64; err != nil || state > limit {
		return fmt.Errorf("a rank has %d bytes of state, of which it may have %d: %w", state, limit, err)
	}
	return nil
}

func init() {
	workers["sharded"] = func(ctx context.Context) error {
		g, err := Init(ctx, patient)
		if err != nil {
			return err
		}
		return errors.Join(allShardedCases(g, cuda.CPU), g.Close())
	}
	workers["late sharded on GPUs"] = onOwnGPU(func(g *Group) error {
		for _, c := range shardedCases[:2] {
			c.late = true
			if err := shardedTrainsAsOne(g, g.Device(), c); err != nil {
				return fmt.Errorf("%s: %w", c.name, err)
			}
		}
		return nil
	})
	workers["sharded graph on GPUs"] = onOwnGPU(shardedGraph)
	workers["gathered on GPUs"] = onOwnGPU(func(g *Group) error {
		return errors.Join(gatheredTrainsAsOne(g, g.Device(), gatheredInFloat32),
			gatheredTrainsAsOne(g, g.Device(), gatheredInBFloat16))
	})
	workers["sharded on GPUs"] = onOwnGPU(func(g *Group) error { return allShardedCases(g, g.Device()) })
}

func allShardedCases(g *Group, d cuda.Device) error {
	for _, c := range shardedCases {
		if err := shardedTrainsAsOne(g, d, c); err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
	}
	return nil
}

func TestFullyShardedTrainsAsOne(t *testing.T) {
	for _, n := range []int{1, 2, 3} {
		t.Run(fmt.Sprint(n), func(t *testing.T) { requireSuccess(t, launchJob(t, n, "sharded")) })
	}
}

func TestGPUFullyShardedTrainsAsOne(t *testing.T) { onGPUs(t, "sharded on GPUs") }

// Gathers, computation and reductions wait for each other, and memory is reused only after its last
// use.
func TestGPUFullyShardedIsInOrder(t *testing.T) { onGPUs(t, "late sharded on GPUs") }

// gatheredNet is a network that uses each block once. If a block is used twice, a sharded run adds
// the two gradients in the shards' dtype, but a run in one process adds them in the dtype of the
// gathers.
func gatheredNet(seed uint64, d cuda.Device, dtype torch.DType, wrap func(nn.Module) nn.Module) (nn.Module, error) {
	seeding.Lock()
	defer seeding.Unlock()
	if err := torch.ManualSeed(seed); err != nil {
		return nil, err
	}
	linear := func(in, out int) nn.Module { return nn.NewLinear(in, out, nn.LinearOptions{}) }
	tied, frozen := nn.NewLinear(5, 7, nn.LinearOptions{NoBias: true}), linear(7, 7)
	if err := nn.Freeze(frozen); err != nil {
		return nil, err
	}
	net := nn.NewSequential(wrap(nn.NewSequential(linear(6, 7), nn.NewTanh())),
		wrap(tiedLinear{nn.Parameters(tied)[0]}),
		wrap(nn.NewSequential(frozen, nn.NewTanh(), linear(7, 11))), wrap(linear(11, 3)))
	return net, errors.Join(nn.ToDType(net, dtype), nn.To(net, d))
}

// gatheredCase is a training run whose parameters are gathered in a different dtype. A run in one
// process computes the same result within the tolerance.
type gatheredCase struct {
	of, in    torch.DType
	build     func(params []*torch.Tensor) (optim.Optimizer, error)
	tolerance float64
}

// The tolerance is 0 for one rank, and for two ranks whose averages are exact: these compute the
// same bits as one process. AdamW is an exception. Its fused code works on vectors of elements, and
// may round the last elements differently if they do not fill a vector.
var (
	gatheredInFloat32  = gatheredCase{torch.Float64, torch.Float32, adamW, 1e-12}
	gatheredInBFloat16 = gatheredCase{torch.Float32, torch.BFloat16, sgd, 0}
)

// gatheredTrainsAsOne compares a sharded run with a run in one process, which computes the
// gradients of each rank's samples separately, with rounded parameters.
func gatheredTrainsAsOne(g *Group, d cuda.Device, c gatheredCase) error {
	none := func(m nn.Module) nn.Module { return m }
	masters, err := gatheredNet(1, d, c.of, none)
	if err != nil {
		return err
	}
	low, err := gatheredNet(1, d, c.in, none)
	if err != nil {
		return err
	}
	net, err := gatheredNet(uint64(1+g.Rank()), cuda.CPU, c.of,
		func(m nn.Module) nn.Module { return NewShardedBlock(m) })
	if err != nil {
		return err
	}
	sharded, err := NewFullyShardedDataParallel(g, net, FullyShardedOptions{GatherDType: c.in})
	if err != nil {
		return err
	}
	params, rounded := slices.Compact(nn.Parameters(masters)), slices.Compact(nn.Parameters(low))
	opt, err := c.build(params)
	if err != nil {
		return err
	}
	divided, err := sharded.NewOptimizer(c.build)
	if err != nil {
		return err
	}
	first := 0
	for _, size := range batchSizes {
		scope := torch.NewScope("turn")
		single := func(rank int) (x, y *torch.Tensor, samples int, err error) {
			mine := dealt(first, size, rank, g.Size())
			if x, y, err = batch(mine); err == nil {
				x, y = scope.Own(x).ToDType(c.in).To(d), scope.Own(y).ToDType(c.in).To(d)
			}
			return x, y, len(mine), err
		}
		for i, p := range rounded {
			if err := p.NoGrad().CopyFrom(params[i].NoGrad(), torch.CopyOptions{}); err != nil {
				return err
			}
		}
		for rank := range g.Size() {
			x, y, samples, err := single(rank)
			if err != nil {
				return err
			}
			loss := low.Forward(x).MSELoss(y)
			if samples == 0 {
				continue
			}
			if err := loss.MulScalar(float64(samples*g.Size()) / float64(size)).Backward(); err != nil {
				return err
			}
			if err := addGradients(scope, params, rounded, 1/float64(g.Size())); err != nil {
				return err
			}
		}
		x, y, samples, err := single(g.Rank())
		if err != nil {
			return err
		}
		loss := sharded.Weigh(sharded.Forward(x).MSELoss(y), samples)
		if err := errors.Join(loss.Err(), sharded.Backward(loss), divided.Step(), opt.Step(),
			opt.ZeroGrad(), scope.Close()); err != nil {
			return err
		}
		first += size
	}
	state, err := sharded.State()
	if err != nil {
		return err
	}
	if diff, err := compareNamed(state, nn.State(masters)); err != nil || diff > c.tolerance {
		return fmt.Errorf("the weights differ by %g: %w", diff, err)
	}
	var blocks []int64
	for _, b := range sharded.blocks {
		var bytes int64
		for _, f := range b.flats {
			if f.dtype != c.in || f.mine.DType() != c.of {
				return fmt.Errorf("%s: %v is gathered in %v", b.name, f.mine.DType(), f.dtype)
			}
			bytes += int64(c.in.Size()) * f.share * int64(g.Size())
		}
		blocks = append(blocks, bytes)
	}
	slices.Sort(blocks)
	if two := blocks[len(blocks)-1] + blocks[len(blocks)-2]; sharded.Stats().MaxGatheredBytes > two {
		return fmt.Errorf("%d bytes were gathered, and two blocks have %d", sharded.Stats().MaxGatheredBytes, two)
	}
	return errors.Join(sharded.LoadState(nn.State(masters)), divided.Close(), sharded.Close(), opt.Close(),
		nn.Close(masters), nn.Close(low))
}

// addGradients adds the gradients of from, times a factor, to the gradients of to, in the dtype of
// to.
func addGradients(scope *torch.Scope, to, from []*torch.Tensor, factor float64) error {
	for i, p := range from {
		grad := p.Grad()
		if grad == nil {
			continue
		}
		part := scope.Own(grad).NoGrad().ToDType(to[i].DType()).MulScalar(factor)
		if sum := to[i].Grad(); sum != nil {
			part = part.Add(scope.Own(sum))
		}
		if err := to[i].SetGrad(part); err != nil {
			return err
		}
	}
	return torch.ClearGrads(from...)
}

// Parameters are gathered in another dtype. They are updated and saved in their original dtype.
func TestFullyShardedGathersInAnotherDType(t *testing.T) {
	for _, n := range []int{1, 2, 3} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			requireNone(t, inProcess(t, n, quick,
				func(g *Group) error { return gatheredTrainsAsOne(g, cuda.CPU, gatheredInFloat32) }))
			if n < 3 {
				requireNone(t, inProcess(t, n, quick,
					func(g *Group) error { return gatheredTrainsAsOne(g, cuda.CPU, gatheredInBFloat16) }))
			}
		})
	}
}

func TestGPUFullyShardedGathersInAnotherDType(t *testing.T) { onGPUs(t, "gathered on GPUs") }

func TestGPUFullyShardedStepIsAGraph(t *testing.T) { onGPUs(t, "sharded graph on GPUs") }

// shardedGraph captures whole steps, with gathers and reductions, as one graph, for both ZeRO
// stages.
func shardedGraph(g *Group) error {
	d := g.Device()
	scope := torch.NewScope("fixed")
	defer scope.Close()
	x, y, err := batch([]int{g.Rank(), g.Rank() + 2, g.Rank() + 4})
	if err != nil {
		return err
	}
	x, y = scope.Own(scope.Own(x).To(d)), scope.Own(scope.Own(y).To(d))
	for _, c := range shardedCases[:2] {
		c.build = func(params []*torch.Tensor) (optim.Optimizer, error) {
			return optim.NewAdamW(params, optim.AdamWOptions{LR: 0.01, Capturable: true})
		}
		eager, replayed, err := eagerAndReplayed(x, y, func() (*steps, error) {
			r, err := startSharded(g, d, c, 1)
			if err != nil {
				return nil, err
			}
			setLR := func(step int) error { return r.opt.SetLR(0.01 / float64(step+1)) }
			return &steps{r.sharded, r.sharded, r.opt, setLR, r.end}, nil
		})
		if err == nil && !slices.Equal(eager, replayed) {
			err = fmt.Errorf("the graph's weights differ by %g", difference(eager, replayed))
		}
		if err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
	}
	return nil
}

// When backward reaches the output of the first block, the later blocks must have freed their
// gradients and parameters.
func TestFullyShardedFreesReducedGradients(t *testing.T) {
	requireNone(t, inProcess(t, 2, quick, func(g *Group) error {
		r, err := startSharded(g, cuda.CPU, shardedCases[0], 1)
		if err != nil {
			return err
		}
		asked := 0
		r.net.after = func(y *torch.Tensor) {
			_, err = y.RegisterHook(func(*torch.Tensor) (*torch.Tensor, error) {
				asked++
				for _, b := range r.sharded.blocks[1:] {
					if b == r.sharded.root {
						continue
					}
					for _, p := range b.params {
						if g := p.marked.Grad(); g != nil || b.whole {
							return nil, fmt.Errorf("%s: %s has a gradient: %v, gathered: %v", b.name,
								p.names[0], g != nil, b.whole)
						}
					}
				}
				return nil, nil
			})
		}
		trained := r.train(cuda.CPU, shardedCases[0], []int{6, 6})
		if asked != 2 {
			err = errors.Join(err, fmt.Errorf("the hook was called %d times", asked))
		}
		return errors.Join(err, trained, r.end())
	}))
}

func TestFullyShardedRefuses(t *testing.T) {
	linear := func() nn.Module { return nn.NewLinear(6, 6, nn.LinearOptions{}) }
	shared := nn.NewLinear(6, 6, nn.LinearOptions{})
	for name, c := range map[string]struct {
		net  func(rank int) nn.Module
		says string
	}{
		"no parameter": {func(int) nn.Module { return nn.NewTanh() }, "the network has no parameter"},
		"tied outside": {func(int) nn.Module { return nn.NewSequential(shared, NewShardedBlock(shared)) },
			"1.weight and 0.weight are one parameter in two blocks, or in one and outside of blocks"},
		"a block in a block": {func(
			int) nn.Module {
			return NewShardedBlock(nn.NewSequential(NewShardedBlock(linear())))
		}, "0 is a block inside of another block"},
		"tied over blocks": {func(int) nn.Module {
			return nn.NewSequential(NewShardedBlock(shared), NewShardedBlock(nn.NewSequential(shared)))
		},
			"0.weight and 1.0.weight are one parameter in two blocks"},
		"graphs": {func(int) nn.Module {
			return nn.NewSequential(NewShardedBlock(nn.NewGraphed(linear(), torch.GraphedModuleOptions{})))
		}, "0 is an nn.Graphed"},
		"other networks": {func(rank int) nn.Module {
			return NewShardedBlock(nn.NewLinear(6, 6, nn.LinearOptions{NoBias: rank == 1}))
		}, "rank 0 has bias"},
	} {
		t.Run(name, func(t *testing.T) {
			var nets []nn.Module
			for rank := range 2 {
				nets = append(nets, c.net(rank))
			}
			for rank, err := range inProcess(t, 2, quick, func(g *Group) error {
				_, err := NewFullyShardedDataParallel(g, nets[g.Rank()], FullyShardedOptions{})
				return err
			}) {
				if err == nil || !strings.Contains(err.Error(), c.says) {
					t.Errorf("rank %d: %v, want an error with %q", rank, err, c.says)
				}
			}
		})
	}
}

// If a rank is lost in the middle of a pass, the errors of the other ranks name it. The other ranks
// do not wait for it.
func TestFullyShardedNamesALostRank(t *testing.T) {
	for _, where := range []string{"forward", "backward"} {
		t.Run(where, func(t *testing.T) {
			all := launchJob(t, 2, "sharded until a rank ends", "WHERE="+where)
			all[1].wait(t)
			all[0].wait(t)
			if text := all[0].output.String(); !strings.Contains(text, "rank 1 is lost: true") ||
				!strings.Contains(text, "culprit 1") {
				t.Errorf("rank 0:\n%s\nwant text with %q and %q", text, "rank 1 is lost: true", "culprit 1")
			}
		})
	}
}

func init() {
	workers["sharded until a rank ends"] = func(ctx context.Context) error {
		g, err := Init(ctx, patient)
		if err != nil {
			return err
		}
		r, err := startSharded(g, cuda.CPU, shardedCases[0], 1)
		if err != nil {
			return err
		}
		if err := r.train(cuda.CPU, shardedCases[0], []int{6}); err != nil {
			return err
		}
		r.net.after = func(y *torch.Tensor) {
			if g.Rank() == 0 {
				return
			}
			if os.Getenv("WHERE") == "forward" {
				os.Exit(0)
			}
			y.RegisterHook(func(*torch.Tensor) (*torch.Tensor, error) {
				os.Exit(0)
				return nil, nil
			})
		}
		err = r.train(cuda.CPU, shardedCases[0], []int{6, 6})
		var e *Error
		if errors.As(err, &e) {
			fmt.Printf("rank 1 is lost: %v, culprit %d\n", errors.Is(err, ErrRankLost), e.Culprit)
		}
		return err
	}
}

// Each misuse of a sharded network is an error that says what is wrong, and only on the rank that
// makes it.
func TestFullyShardedMisuse(t *testing.T) {
	requireNone(t, inProcess(t, 1, quick, func(g *Group) error {
		r, err := startSharded(g, cuda.CPU, shardedCases[0], 1)
		if err != nil {
			return err
		}
		x := full(cuda.CPU, torch.Float64, 0.5, 2, 6)
		defer x.Close()
		says := func(err error, text string) error {
			if err == nil || !strings.Contains(err.Error(), text) {
				return fmt.Errorf("got %w, want %q", err, text)
			}
			return nil
		}
		errs := []error{
			says(r.net.first.Forward(x).Err(), "the block computes outside of FullyShardedDataParallel.Forward"),
			says(r.net.first.(*ShardedBlock).module.Forward(x).Err(), "mat2"),
			says(r.opt.Step(), optim.ErrNoGradients.Error()),
			says(r.sharded.LoadState(nil), "there is no tensor gain"),
			says(r.sharded.Backward(torch.Fail("loss", errors.New("a planned failure"))), "a planned failure"),
		}
		// A pass under NoGrad leaves nothing gathered, and its output requires no gradient.
		y := r.sharded.Forward(x.NoGrad())
		if y.Err() != nil || y.RequiresGrad() || r.sharded.Stats().GatheredBytes != 0 {
			errs = append(errs, fmt.Errorf("a pass under NoGrad: %v, %v, %+v", y.Err(), y.RequiresGrad(),
				r.sharded.Stats()))
		}
		y.Close()
		if errors.Join(errs...) != nil {
			return errors.Join(errs...)
		}
		loss := r.sharded.Forward(x).Sum()
		return errors.Join(says(loss.Backward(),
			"its backward pass is not one of FullyShardedDataParallel.Backward"), loss.Close(), r.end(),
			says(r.sharded.Forward(x).Err(), torch.ErrClosed.Error()))
	}))
}

// If memory is allocated for only some parameters of a block, exactly that memory is freed and
// counted.
func TestFullyShardedCountsGatheredBytes(t *testing.T) {
	requireNone(t, inProcess(t, 1, quick, func(g *Group) error {
		block := NewShardedBlock(nn.NewSequential(table{full(cuda.CPU, torch.Float64, 3, 4, 5)},
			table{full(cuda.CPU, torch.Float32, 3, 7)}))
		d, err := NewFullyShardedDataParallel(g, block, FullyShardedOptions{})
		if err != nil {
			return err
		}
		if len(block.flats) != 2 {
			return fmt.Errorf("the block has %d flat memories, want 2", len(block.flats))
		}
		if err := block.flats[1].all.Close(); err != nil { // makes the allocation fail
			return err
		}
		if err := block.gather(); !errors.Is(err, torch.ErrClosed) {
			return fmt.Errorf("gather: %w", err)
		}
		if n := d.Stats().GatheredBytes; n != 4*5*8 {
			return fmt.Errorf("%d bytes are gathered, want %d", n, 4*5*8)
		}
		if err := block.free(); !errors.Is(err, torch.ErrClosed) {
			return fmt.Errorf("free: %w", err)
		}
		if n := d.Stats().GatheredBytes; n != 0 {
			return fmt.Errorf("%d bytes are gathered after all was freed", n)
		}
		d.Close() // fails with the same error as free
		return nil
	}))
}

// forgetful has a parameter that it does not use.
type forgetful struct{ nn.Module }

func (forgetful) Forward(x *torch.Tensor) *torch.Tensor { return x.Narrow(1, 0, 3).MulScalar(2) }

// table is a module whose output is a view of its parameter.
type table struct{ rows *torch.Tensor }

func (m table) Forward(*torch.Tensor) *torch.Tensor { return m.rows.Narrow(0, 1, 2) }

func (m table) Parts() nn.Parts {
	return nn.Parts{Parameters: []torch.Named{{Name: "rows", Tensor: m.rows}}}
}

// An output that is a view of a parameter can still be read after the parameter's memory is freed.
func TestFullyShardedOutputsOutliveParameters(t *testing.T) {
	requireNone(t, inProcess(t, 1, quick, func(g *Group) error {
		for _, trained := range []bool{true, false} {
			rows := full(cuda.CPU, torch.Float64, 3, 4, 5)
			if err := rows.SetRequiresGrad(trained); err != nil {
				return err
			}
			d, err := NewFullyShardedDataParallel(g, NewShardedBlock(table{rows}), FullyShardedOptions{})
			if err != nil {
				return err
			}
			x := full(cuda.CPU, torch.Float64, 1, 1)
			y := d.Forward(x)
			got, err := y.Sum().Float64()
			if err != nil || got != 30 || y.RequiresGrad() != trained || d.Stats().GatheredBytes != 0 {
				return fmt.Errorf("trained %v: %v, %v, %v, %+v", trained, got, err, y.RequiresGrad(), d.Stats())
			}
			if trained {
				err = d.Backward(y.Sum())
				grad := d.Parameters()[0].Grad()
				if got, err2 := grad.Sum().Float64(); err != nil || err2 != nil || got != 10 {
					return fmt.Errorf("the gradient is %v: %w", got, errors.Join(err, err2))
				}
			}
			if err := d.Close(); err != nil {
				return err
			}
		}
		return nil
	}))
}

// A failure in a backward pass ends the job.
func TestFullyShardedBackwardFails(t *testing.T) {
	for name, c := range map[string]struct {
		fail func(r *shardedRun, x *torch.Tensor) error
		says string
	}{
		"a step before Backward": {func(r *shardedRun, x *torch.Tensor) error {
			if err := r.train(cuda.CPU, shardedCases[0], []int{3}); err != nil {
				return err
			}
			loss := r.sharded.Forward(x).Sum()
			defer loss.Close()
			if err := r.sharded.LoadState(nil); err == nil {
				return errors.New("no error of LoadState")
			}
			state, err := r.sharded.State()
			if err := errors.Join(err, r.sharded.LoadState(state)); err != nil {
				return err
			}
			return r.sharded.Backward(loss)
		}, "the parameters have changed since Forward"},
		"an unused parameter": {func(r *shardedRun, x *torch.Tensor) error {
			last := r.net.last.(*ShardedBlock)
			last.module = forgetful{last.module}
			loss := r.sharded.Forward(x).Sum()
			defer loss.Close()
			return r.sharded.Backward(loss)
		}, "backward made no gradient for last.weight, last.bias on rank 0"},
		"a panic": {func(r *shardedRun, x *torch.Tensor) (err error) {
			defer func() { err = fmt.Errorf("%v, and then %w", recover(), r.g.Barrier()) }()
			return r.sharded.Around(func() error { panic("planned") })
		}, "planned, and then distributed: rank 0: "},
	} {
		t.Run(name, func(t *testing.T) {
			errs := inProcess(t, 1, quick, func(g *Group) error {
				r, err := startSharded(g, cuda.CPU, shardedCases[0], 1)
				if err != nil {
					return err
				}
				x := full(cuda.CPU, torch.Float64, 0.5, 2, 6)
				defer x.Close()
				return c.fail(r, x)
			})
			if errs[0] == nil || !strings.Contains(errs[0].Error(), c.says) {
				t.Error(errs[0])
			}
		})
	}
}

// A half-precision file loads into a sharded network with the same values as with nn.Load. If the
// file has integers where the network has a parameter, the error names the tensor.
func TestFullyShardedConvertsFloatingPointNumbers(t *testing.T) {
	path := filepath.Join(t.TempDir(), "half.safetensors")
	half := nn.NewSequential(nn.NewLinear(3, 5, nn.LinearOptions{}), nn.NewBatchNorm1d(5, nn.BatchNorm1dOptions{}))
	want := nn.NewSequential(nn.NewLinear(3, 5, nn.LinearOptions{}), nn.NewBatchNorm1d(5, nn.BatchNorm1dOptions{}))
	err := errors.Join(nn.ToDType(half, torch.Float16), nn.Save(path, half, nil), nn.Close(half))
	if err == nil {
		_, err = nn.Load(path, want)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer nn.Close(want)
	whole := nn.State(want)
	integers, err := torch.Zeros(cuda.CPU, torch.Int32, 5, 3)
	if err != nil {
		t.Fatal(err)
	}
	defer integers.Close()
	wrong := slices.Clone(whole)
	wrong[0].Tensor = integers
	requireNone(t, inProcess(t, 2, quick, func(g *Group) error {
		net := nn.NewSequential(NewShardedBlock(nn.NewLinear(3, 5, nn.LinearOptions{})),
			nn.NewBatchNorm1d(5, nn.BatchNorm1dOptions{}))
		d, err := NewFullyShardedDataParallel(g, net, FullyShardedOptions{})
		if err != nil {
			return err
		}
		file, err := checkpoint.Open(path)
		if err != nil {
			return err
		}
		defer file.Close()
		if err := d.LoadCheckpoint(file); err != nil {
			return err
		}
		state, err := d.State()
		if err != nil {
			return err
		}
		if diff, err := compareNamed(state, whole); err != nil || diff != 0 {
			err = fmt.Errorf("the weights differ by %g, want 0: %w", diff, err)
			return errors.Join(err, d.Close())
		}
		const says = "0.weight is int32 there, and float32 in the network: convert it before"
		if err := d.LoadState(wrong); err == nil || !strings.Contains(err.Error(), says) {
			return fmt.Errorf("got %w, want %q", err, says)
		}
		return errors.Join(d.Close(), nn.Close(net))
	}))
}
