//go:build linux

package distributed

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/torch"
)

// zeroCase is an optimizer whose state is sharded.
type zeroCase struct {
	name   string
	scaled bool // with a GradScaler and clipping
	build  func(net nn.Module, params []*torch.Tensor) (optim.Optimizer, error)
}

var zeroCases = []zeroCase{
	{"SGD", true, func(_ nn.Module, params []*torch.Tensor) (optim.Optimizer, error) {
		return optim.NewSGD(params, optim.SGDOptions{LR: 0.1, Momentum: 0.9})
	}},
	{"AdamW in groups", false, func(net nn.Module, params []*torch.Tensor) (optim.Optimizer, error) {
		var weights, biases []*torch.Tensor
		for i, p := range nn.Parameters(net) {
			if len(p.Shape()) > 1 {
				weights = append(weights, params[i])
			} else {
				biases = append(biases, params[i])
			}
		}
		return optim.NewAdamW(nil, optim.AdamWOptions{LR: 0.01, WeightDecay: 0.1, AMSGrad: true,
			Groups: []optim.Group{{Params: weights}, {Params: biases, NoWeightDecay: true, LR: 0.03}}})
	}},
	{"Adam with gradients kept", true, func(_ nn.Module, params []*torch.Tensor) (optim.Optimizer, error) {
		return optim.NewAdam(params, optim.AdamOptions{LR: 0.01, KeepGradients: true})
	}},
	{"RMSprop", false, func(_ nn.Module, params []*torch.Tensor) (optim.Optimizer, error) {
		return optim.NewRMSprop(params, optim.RMSpropOptions{LR: 0.01, Momentum: 0.5, Centered: true})
	}},
	{"Adagrad", false, func(_ nn.Module, params []*torch.Tensor) (optim.Optimizer, error) {
		return optim.NewAdagrad(params, optim.AdagradOptions{LR: 0.1})
	}},
}

// zeroRun is a training run in one process, or one rank of a run with sharded state.
type zeroRun struct {
	g        *Group // nil for a run in one process
	net      nn.Module
	parallel *DataParallel
	opt      optim.Optimizer
	close    []func() error
}

func startZero(g *Group, d cuda.Device, c zeroCase) (*zeroRun, error) {
	net, err := smallNetOn(d, 1)
	if err != nil {
		return nil, err
	}
	r := &zeroRun{g: g, net: net, close: []func() error{func() error { return nn.Close(net) }}}
	if g == nil {
		r.opt, err = c.build(net, nn.Parameters(net))
	} else {
		if r.parallel, err = NewDataParallel(g, net, DataParallelOptions{BucketBytes: smallBuckets}); err != nil {
			return nil, err
		}
		r.close = append(r.close, r.parallel.Close)
		r.opt, err = NewZeroRedundancyOptimizer(g, nn.Parameters(net),
			func(shard []*torch.Tensor) (optim.Optimizer, error) { return c.build(net, shard) })
	}
	if err != nil {
		return nil, err
	}
	r.close = append(r.close, r.opt.Close)
	return r, nil
}

func (r *zeroRun) end() error {
	var errs []error
	for _, c := range slices.Backward(r.close) {
		errs = append(errs, c())
	}
	return errors.Join(errs...)
}

// step trains on a batch of size samples, starting with sample number first.
func (r *zeroRun) step(d cuda.Device, scaled bool, first, size int) error {
	rank, n := 0, 1
	if r.g != nil {
		rank, n = r.g.Rank(), r.g.Size()
	}
	mine := dealt(first, size, rank, n)
	scope := torch.NewScope("turn")
	defer scope.Close()
	var loss *torch.Tensor
	if len(mine) > 0 {
		var err error
		if loss, err = lossOn(d, r.net, scope, mine...); err != nil {
			return err
		}
	}
	if r.parallel != nil {
		loss = r.parallel.Weigh(loss, len(mine))
	}
	backward := func(loss *torch.Tensor) error {
		if r.parallel != nil {
			return r.parallel.Backward(loss)
		}
		return loss.Backward()
	}
	if !scaled {
		return errors.Join(backward(loss), r.opt.Step(), r.opt.ZeroGrad())
	}
	scaler, err := optim.NewGradScaler(d, optim.GradScalerOptions{InitScale: 1024})
	if err != nil {
		return err
	}
	defer scaler.Close()
	if loss != nil {
		loss = loss.MulScalar(1024) // as scaler.Backward does; a rank without samples has no loss
	}
	if err := errors.Join(backward(loss), scaler.Unscale(r.opt)); err != nil {
		return err
	}
	norm, err := optim.ClipGradNorm(nn.Parameters(r.net), 0.1, optim.ClipOptions{})
	if err != nil {
		return err
	}
	return errors.Join(norm.Close(), scaler.Step(r.opt), scaler.Update(), r.opt.ZeroGrad())
}

func (r *zeroRun) train(d cuda.Device, scaled bool, sizes []int) error {
	first := 0
	for i, size := range sizes {
		rates := r.opt.LRs()
		for k, g := range r.opt.Groups() {
			rates[k] = g.LR / float64(i+1)
		}
		if err := errors.Join(r.opt.SetLR(rates...), r.step(d, scaled, first, size)); err != nil {
			return fmt.Errorf("batch %d of %d: %w", i, size, err)
		}
		first += size
	}
	return nil
}

// compareStates returns the maximum difference between the states of two optimizers.
func compareStates(a, b optim.Optimizer) (float64, error) {
	var values [2][]float64
	var text [2]string
	for i, o := range []optim.Optimizer{a, b} {
		s, err := o.State()
		if err != nil {
			return 0, err
		}
		slices.SortFunc(s.Tensors, func(x, y torch.Named) int { return strings.Compare(x.Name, y.Name) })
		for _, n := range s.Tensors {
			text[i] += fmt.Sprintln(n.Name, n.Tensor.DType(), n.Tensor.Shape())
			v, err := n.Tensor.NoGrad().ToDType(torch.Float64).Float64s()
			if err != nil {
				return 0, err
			}
			values[i] = append(values[i], v...)
		}
		text[i] += s.Metadata["param_groups"] + s.Metadata["optimizer"]
	}
	if text[0] != text[1] {
		return 0, fmt.Errorf("the states differ:\n%s\n%s", text[0], text[1])
	}
	return difference(values[0], values[1]), nil
}

// zeroTrainsAsOne compares an optimizer with sharded state to the same optimizer in one process, by
// the parameters and the state. Then each optimizer loads the other's state, and they are compared
// again.
func zeroTrainsAsOne(g *Group, d cuda.Device, c zeroCase) error {
	alone, err := startZero(nil, d, c)
	if err != nil {
		return err
	}
	ranks, err := startZero(g, d, c)
	if err != nil {
		return err
	}
	if err := errors.Join(alone.train(d, c.scaled, batchSizes), ranks.train(d, c.scaled, batchSizes)); err != nil {
		return err
	}
	same := func(when string) error {
		want, err := weights(alone.net)
		if err != nil {
			return err
		}
		got, err := weights(ranks.net)
		if err != nil {
			return err
		}
		all, err := AllGatherObject(g, floats(got))
		if err != nil {
			return err
		}
		if slices.ContainsFunc(all, func(s string) bool { return s != all[0] }) {
			return fmt.Errorf("%s: the ranks have different weights", when)
		}
		if diff := difference(got, want); diff > 1e-12 {
			return fmt.Errorf("%s: the weights differ by %g", when, diff)
		}
		diff, err := compareStates(alone.opt, ranks.opt)
		if err == nil && diff > 1e-12 {
			err = fmt.Errorf("%s: the states differ by %g", when, diff)
		}
		return err
	}
	if err := errors.Join(same("after training"), memoryIsShared(g, alone.opt, ranks.opt)); err != nil {
		return err
	}
	// Each optimizer continues from the other's state.
	s, err := ranks.opt.State()
	if err != nil {
		return err
	}
	if err := alone.opt.LoadState(s); err != nil {
		return err
	}
	if s, err = alone.opt.State(); err != nil {
		return err
	}
	if err := errors.Join(ranks.opt.Close(), ranks.parallel.Close()); err != nil {
		return err
	}
	again, err := startZero(g, d, c)
	if err != nil {
		return err
	}
	for i, p := range nn.Parameters(again.net) {
		if err := p.NoGrad().CopyFrom(nn.Parameters(ranks.net)[i], torch.CopyOptions{}); err != nil {
			return err
		}
	}
	before := ranks
	ranks = again
	if err := ranks.opt.LoadState(s); err != nil {
		return err
	}
	if err := errors.Join(alone.train(d, c.scaled, batchSizes), ranks.train(d, c.scaled, batchSizes),
		same("after loading")); err != nil {
		return err
	}
	return errors.Join(alone.end(), ranks.end(), before.end())
}

// memoryIsShared requires that each rank has 1/N of the state.
func memoryIsShared(g *Group, alone, ranks optim.Optimizer) error {
	s, err := alone.State()
	if err != nil {
		return err
	}
	var elements, scalars int64
	for _, n := range s.Tensors {
		if len(n.Tensor.Shape()) == 0 {
			scalars += 4
		} else {
			elements += 8 * n.Tensor.Elements()
		}
	}
	mine, err := ranks.(*ZeroRedundancyOptimizer).StateBytes()
	if err != nil {
		return err
	}
	all, err := AllGatherObject(g, mine)
	if err != nil {
		return err
	}
	var sum int64
	for _, n := range all {
		sum += n
	}
	// A parameter has a step count on every rank that has elements of it, so the sum may exceed the
	// state of one process by these counts.
	if sum < elements || sum > elements+int64(g.Size())*scalars {
		return fmt.Errorf("the ranks have %v bytes of state, and one process %d", all, elements)
	}
	if limit := elements/int64(g.Size()) + elements/50 + scalars; slices.Max(all) > limit {
		return fmt.Errorf("the ranks have %v bytes of state, of which one may have %d", all, limit)
	}
	return nil
}

func init() {
	workers["zero"] = func(ctx context.Context) error {
		g, err := Init(ctx, patient)
		if err != nil {
			return err
		}
		return errors.Join(allZeroCases(g, cuda.CPU), g.Close())
	}
	workers["zero on GPUs"] = onOwnGPU(func(g *Group) error { return allZeroCases(g, g.Device()) })
	workers["zero as a graph on GPUs"] = onOwnGPU(zeroGraph)
}

func allZeroCases(g *Group, d cuda.Device) error {
	for _, c := range zeroCases {
		if err := zeroTrainsAsOne(g, d, c); err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
	}
	return nil
}

func TestZeroRedundancyOptimizerTrainsAsOne(t *testing.T) {
	for _, n := range jobSizes(1, 2, 3, 8) {
		t.Run(fmt.Sprint(n), func(t *testing.T) { requireSuccess(t, launchJob(t, n, "zero")) })
	}
}

func TestGPUZeroRedundancyOptimizerTrainsAsOne(t *testing.T) { onGPUs(t, "zero on GPUs") }
func TestGPUZeroRedundancyStepIsAGraph(t *testing.T)         { onGPUs(t, "zero as a graph on GPUs") }

// zeroGraph compares captured steps with eager ones.
func zeroGraph(g *Group) error {
	d := g.Device()
	c := zeroCase{"AdamW", false, func(_ nn.Module, params []*torch.Tensor) (optim.Optimizer, error) {
		return optim.NewAdamW(params, optim.AdamWOptions{LR: 0.01, Capturable: true})
	}}
	scope := torch.NewScope("fixed")
	defer scope.Close()
	x, y, err := batch([]int{g.Rank(), g.Rank() + 2, g.Rank() + 4})
	if err != nil {
		return err
	}
	eager, replayed, err := eagerAndReplayed(scope.Own(scope.Own(x).To(d)), scope.Own(scope.Own(y).To(d)),
		func() (*steps, error) {
			r, err := startZero(g, d, c)
			if err != nil {
				return nil, err
			}
			setLR := func(step int) error { return r.opt.SetLR(0.01 / float64(step+1)) }
			return &steps{r.net, r.parallel, r.opt, setLR, r.end}, nil
		})
	if err == nil && !slices.Equal(eager, replayed) {
		err = fmt.Errorf("the graph's weights differ by %g", difference(eager, replayed))
	}
	return err
}

func TestZeroRedundancyOptimizerRefuses(t *testing.T) {
	sgd := func(shard []*torch.Tensor) (optim.Optimizer, error) {
		return optim.NewSGD(shard, optim.SGDOptions{})
	}
	for name, c := range map[string]struct {
		params func(rank int, net nn.Module) []*torch.Tensor
		build  func(shard []*torch.Tensor) (optim.Optimizer, error)
		says   string
	}{
		"LAMB": {nil, func(shard []*torch.Tensor) (optim.Optimizer,
			error) {
			return optim.NewLAMB(shard, optim.LAMBOptions{})
		},
			"*optim.LAMB computes with whole parameters"},
		"no optimizer": {nil, func([]*torch.Tensor) (optim.Optimizer, error) { return nil, nil },
			"build returned no optimizer"},
		"no parameters": {func(int, nn.Module) []*torch.Tensor { return nil }, sgd, "there are no parameters"},
		"other parameters": {func(rank int, net nn.Module) []*torch.Tensor { return nn.Parameters(net)[rank:] }, sgd,
			"rank 0 has parameter 0 float64[20 6] of strides [6 1], and parameter 0 float64[20] of " +
				"strides [1] on rank 1"},
	} {
		t.Run(name, func(t *testing.T) {
			for rank, err := range inProcess(t, 2, quick, func(g *Group) error {
				net, err := smallNet(1)
				if err != nil {
					return err
				}
				defer nn.Close(net)
				params := nn.Parameters(net)
				if c.params != nil {
					params = c.params(g.Rank(), net)
				}
				z, err := NewZeroRedundancyOptimizer(g, params, c.build)
				if err == nil {
					z.Close()
				}
				return err
			}) {
				if err == nil || !strings.Contains(err.Error(), c.says) {
					t.Errorf("rank %d: %v, want %q", rank, err, c.says)
				}
			}
		})
	}
}

// A state with other shapes, a step without gradients and a step after Close are errors.
func TestZeroRedundancyOptimizerErrors(t *testing.T) {
	requireNone(t, inProcess(t, 2, quick, func(g *Group) error {
		r, err := startZero(g, cuda.CPU, zeroCases[0])
		if err != nil {
			return err
		}
		defer r.end()
		if err := r.opt.Step(); !errors.Is(err, optim.ErrNoGradients) {
			return fmt.Errorf("without gradients: %v", err)
		}
		odd := full(cuda.CPU, torch.Float64, 0, 7)
		defer odd.Close()
		err = r.opt.LoadState(optim.State{Tensors: []torch.Named{{Name: "state.0.momentum_buffer",
			Tensor: odd}}, Metadata: map[string]string{"param_groups": "[]"}})
		if err == nil || !strings.Contains(err.Error(),
			"state.0.momentum_buffer: it has the shape [7], and its parameter [20 6]") {
			return fmt.Errorf("a state of another shape: %v", err)
		}
		if err := r.opt.Close(); err != nil {
			return err
		}
		if err := r.opt.SetLR(1); !errors.Is(err, torch.ErrClosed) {
			return fmt.Errorf("closed: %v", err)
		}
		return nil
	}))
}

// A failure on one rank ends the job at once, so that the others do not wait for that rank.
func TestZeroRedundancyOptimizerFailsOnAllRanks(t *testing.T) {
	for name, c := range map[string]struct {
		fail func(z *ZeroRedundancyOptimizer, net nn.Module) error // on rank 1
		call func(z *ZeroRedundancyOptimizer) error
		says string
	}{
		"a parameter has moved": {func(_ *ZeroRedundancyOptimizer,
			net nn.Module) error {
			return nn.ToDType(net, torch.Float32)
		},
			(*ZeroRedundancyOptimizer).Step, "parameter 0 has moved"},
		// The failure comes after the first collective of State, while rank 0 waits in the second
		// one.
		"a state does not fit": {func(z *ZeroRedundancyOptimizer, _ nn.Module) error {
			z.order[0].strides = []int64{1200, 1}
			return nil
		}, func(z *ZeroRedundancyOptimizer) error { _, err := z.State(); return err }, "state.0.exp_avg: "},
	} {
		t.Run(name, func(t *testing.T) {
			o := quick
			begun := time.Now()
			for rank, err := range inProcess(t, 2, o, func(g *Group) error {
				r, err := startZero(g, cuda.CPU, zeroCases[2]) // Adam
				if err != nil {
					return err
				}
				defer r.end()
				if err := r.train(cuda.CPU, false, []int{4}); err != nil {
					return err
				}
				z := r.opt.(*ZeroRedundancyOptimizer)
				x := full(cuda.CPU, torch.Float64, 0, 2, 6)
				defer x.Close()
				if err := r.parallel.Backward(r.net.Forward(x).Sum()); err != nil {
					return err
				}
				if g.Rank() == 1 {
					if err := c.fail(z, r.net); err != nil {
						return err
					}
				}
				err = c.call(z)
				select { // The other rank has not closed its group.
				case <-g.job.member.Failed():
				case <-time.After(o.Timeout):
				}
				return err
			}) {
				var e *Error
				if err == nil || !strings.Contains(err.Error(), c.says) || rank == 0 &&
					(!errors.As(err, &e) || e.Culprit != 1) {
					t.Errorf("rank %d: %v", rank, err)
				}
			}
			if took := time.Since(begun); took >= o.Timeout {
				t.Errorf("the job has ended by its timeout, after %v, want below %v", took, o.Timeout)
			}
		})
	}
}

// otherState is an optimizer whose state has another dtype than usual.
type otherState struct {
	optim.Optimizer
	dtype torch.DType
	scope *torch.Scope
}

func (o otherState) State() (optim.State, error) {
	s, err := o.Optimizer.State()
	if err != nil {
		return s, err
	}
	s.Tensors = slices.Clone(s.Tensors)
	for i, n := range s.Tensors {
		t := n.Tensor.ToDType(o.dtype).In(o.scope)
		if err := t.Err(); err != nil {
			return s, err
		}
		s.Tensors[i].Tensor = t
	}
	return s, nil
}

// A parameter whose elements are on two ranks must have state of the same dtype on both.
func TestZeroRedundancyStateOfTwoDTypesIsNamed(t *testing.T) {
	for rank, err := range inProcess(t, 2, quick, func(g *Group) error {
		r, err := startZero(g, cuda.CPU, zeroCases[2]) // Adam
		if err != nil {
			return err
		}
		defer r.end()
		if err := r.train(cuda.CPU, false, []int{4}); err != nil {
			return err
		}
		z := r.opt.(*ZeroRedundancyOptimizer)
		scope := torch.NewScope("state of another dtype")
		defer scope.Close()
		if g.Rank() == 1 {
			own := z.inner
			z.inner = otherState{own, torch.Float32, scope}
			defer func() { z.inner = own }()
		}
		_, err = z.State()
		return err
	}) {
		if want := ".exp_avg is a tensor of float64 on rank 0 and a tensor of float32 on rank 1"; !errors.Is(err,
			ErrMismatch) || !strings.Contains(err.Error(), want) {
			t.Errorf("rank %d: %v, want the error %v with %q", rank, err, ErrMismatch, want)
		}
	}
}
