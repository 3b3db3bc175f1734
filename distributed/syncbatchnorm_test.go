//go:build linux

package distributed

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/torch"
)

// normNet returns a network with BatchNorms of images and of rows. The first normalises the input,
// which needs no gradient. One has no weights, and one has no running statistics.
func normNet(seed uint64, d cuda.Device, dtype torch.DType) (nn.Module, error) {
	seeding.Lock()
	defer seeding.Unlock()
	if err := torch.ManualSeed(seed); err != nil {
		return nil, err
	}
	net := nn.NewSequential(
		nn.NewBatchNorm2d(2, nn.BatchNorm2dOptions{}),
		nn.NewConv2d(2, 5, 3, nn.Conv2dOptions{Padding: 1}),
		nn.NewBatchNorm2d(5, nn.BatchNorm2dOptions{Momentum: 0.3, Eps: 1e-3}), nn.NewTanh(),
		nn.NewConv2d(5, 4, 3, nn.Conv2dOptions{}),
		nn.NewBatchNorm2d(4, nn.BatchNorm2dOptions{NoAffine: true}), nn.NewTanh(),
		nn.NewFlatten(), nn.NewLinear(8, 6, nn.LinearOptions{}),
		nn.NewBatchNorm1d(6, nn.BatchNorm1dOptions{NoRunningStats: true}), nn.NewTanh(),
		nn.NewLinear(6, 3, nn.LinearOptions{}))
	return net, errors.Join(nn.ToDType(net, dtype), nn.To(net, d))
}

// images returns the samples with the given numbers as images [N 2 4 3]. N may be 0.
func images(scope *torch.Scope, numbers []int, d cuda.Device, dtype torch.DType) (x, y *torch.Tensor) {
	var xs, ys []float64
	for _, i := range numbers {
		for k := range 4 {
			a, _ := sample(5*i + k)
			xs = append(xs, a...)
		}
		_, b := sample(i)
		ys = append(ys, b...)
	}
	tensor := func(values []float64, shape ...int64) *torch.Tensor {
		t, err := torch.Empty(cuda.CPU, torch.Float64, shape...)
		if len(values) > 0 {
			t, err = torch.FromSlice(values, shape...)
		}
		if err != nil {
			return torch.Fail("images", err)
		}
		return scope.Own(scope.Own(t).To(d)).ToDType(dtype)
	}
	n := int64(len(numbers))
	return tensor(xs, n, 2, 4, 3), tensor(ys, n, 3)
}

// precision is a case of a test: the dtypes of the model and of autocast, a learning rate that
// keeps rounding errors small, and the allowed difference from one process.
type precision struct {
	name        string
	dtype, cast torch.DType
	rate        float64
	bound       float64
}

var precisions = []precision{
	{"float64", torch.Float64, 0, 0.1, 1e-12},
	{"bfloat16", torch.BFloat16, 0, 0.01, 0.05},
	{"autocast", torch.Float32, torch.BFloat16, 0.01, 0.01},
}

// trainNorms trains on the samples of rank r of n in each batch. It returns the output of an
// evaluation and the values of all parameters and buffers. parallel is nil for one process.
func trainNorms(net nn.Module, parallel *DataParallel, r, n int, d cuda.Device, p precision) ([]float64, error) {
	opt, err := optim.NewSGD(nn.Parameters(net), optim.SGDOptions{LR: p.rate, Momentum: 0.9})
	if err != nil {
		return nil, err
	}
	defer opt.Close()
	at := 0
	for step, size := range []int{16, 13, 9, 6, 7, 8} {
		var mine []int
		for i := at; i < at+size; i++ {
			// From step 3 on, one rank has the whole batch, and the ranks take turns.
			if step < 3 && i%n == r || step >= 3 && step%n == r {
				mine = append(mine, i)
			}
		}
		at += size
		turn := torch.NewScope("turn")
		x, y := images(turn, mine, d, p.dtype)
		if step%2 == 1 {
			x = x.Contiguous(torch.ChannelsLast)
		}
		if p.cast != 0 {
			x = x.Autocast(p.cast)
		}
		loss := net.Forward(x).MSELoss(y)
		if parallel == nil {
			err = loss.Backward()
		} else {
			err = parallel.Backward(parallel.Weigh(loss, len(mine)))
		}
		if err == nil {
			err = opt.Step()
		}
		turn.Close()
		if err != nil {
			return nil, fmt.Errorf("step %d with %d samples: %w", step, len(mine), err)
		}
	}
	scope := torch.NewScope("evaluation")
	defer scope.Close()
	nn.Train(net, false)
	x, _ := images(scope, []int{100, 101}, d, p.dtype)
	values := []*torch.Tensor{net.Forward(x.NoGrad())}
	for _, s := range nn.State(net) {
		values = append(values, s.Tensor)
	}
	var all []float64
	for _, t := range values {
		v, err := t.NoGrad().ToDType(torch.Float64).Float64s()
		if err != nil {
			return nil, err
		}
		all = append(all, v...)
	}
	return all, nil
}

// trainNormsOn trains with the other ranks of the group, or alone with a nil group.
func trainNormsOn(g *Group, d cuda.Device, p precision) ([]float64, error) {
	net, err := normNet(1, d, p.dtype)
	if err != nil {
		return nil, err
	}
	defer nn.Close(net)
	if g == nil {
		return trainNorms(net, nil, 0, 1, d, p)
	}
	if err := ConvertSyncBatchNorm(g, net); err != nil {
		return nil, err
	}
	parallel, err := NewDataParallel(g, net, DataParallelOptions{BucketBytes: smallBuckets})
	if err != nil {
		return nil, err
	}
	defer parallel.Close()
	return trainNorms(net, parallel, g.Rank(), g.Size(), d, p)
}

// syncNorms compares training on all ranks together with training in one process, which each rank
// does for itself. It compares weights, running statistics and outputs.
func syncNorms(g *Group, d cuda.Device) error {
	for _, p := range precisions {
		want, err := trainNormsOn(nil, d, p)
		if err != nil {
			return fmt.Errorf("%s, alone: %w", p.name, err)
		}
		got, err := trainNormsOn(g, d, p)
		if err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
		if diff := difference(got, want); diff > p.bound {
			return fmt.Errorf("%s: weights, statistics and outputs differ by %g from one process's", p.name, diff)
		}
	}
	return nil
}

func init() {
	workers["sync batch norm"] = func(ctx context.Context) error {
		g, err := Init(ctx, patient)
		if err != nil {
			return err
		}
		return errors.Join(syncNorms(g, cuda.CPU), g.Close())
	}
	workers["sync batch norm on GPUs"] = onOwnGPU(func(g *Group) error { return syncNorms(g, g.Device()) })
	workers["sync batch norm as a graph on GPUs"] = onOwnGPU(syncNormGraph)
}

func TestSyncBatchNormTrainsAsOne(t *testing.T) {
	for _, n := range []int{2, 3} {
		t.Run(fmt.Sprint(n), func(t *testing.T) { requireSuccess(t, launchJob(t, n, "sync batch norm")) })
	}
}

func TestGPUSyncBatchNormTrainsAsOne(t *testing.T) { onGPUs(t, "sync batch norm on GPUs") }
func TestGPUSyncBatchNormIsAGraph(t *testing.T)    { onGPUs(t, "sync batch norm as a graph on GPUs") }

// syncNormGraph compares captured steps with eager ones. Rank 0 has fewer samples than rank 1.
func syncNormGraph(g *Group) error {
	scope := torch.NewScope("fixed")
	defer scope.Close()
	d := g.Device()
	x, y := images(scope, []int{1, 2, 3, 4}[:2+2*g.Rank()], d, torch.Float64)
	eager, replayed, err := eagerAndReplayed(scope.Own(x), scope.Own(y), func() (*steps, error) {
		return startSteps(g, func() (nn.Module, error) {
			net, err := normNet(1, d, torch.Float64)
			if err == nil {
				err = ConvertSyncBatchNorm(g, net)
			}
			return net, err
		})
	})
	if err != nil {
		return err
	}
	// On an H200 the two differed by 3e-16, a rounding error. The kernel that causes it is not
	// known. The likely cause is cuDNN, which may use atomics for the gradients of convolution
	// weights and so add in a varying order: two eager runs can differ too. LibTorch's batch norm
	// kernels add in a fixed order, and the sum of two ranks has the same bits in either order.
	// graphOnGPUs and zeroGraph, whose networks have no convolutions, get equal bits.
	if d := difference(eager, replayed); !(d < 1e-12) {
		return fmt.Errorf("the graph's weights differ by %g", d)
	}
	return nil
}

func TestConvertSyncBatchNormKeepsNames(t *testing.T) {
	requireNone(t, inProcess(t, 2, quick, func(g *Group) error {
		net, err := normNet(1, cuda.CPU, torch.Float32)
		if err != nil {
			return err
		}
		defer nn.Close(net)
		before := nn.State(net)
		if err := ConvertSyncBatchNorm(g, net); err != nil {
			return err
		}
		if !slices.Equal(before, nn.State(net)) {
			return errors.New("parameters and buffers are others")
		}
		return nil
	}))
}

func TestConvertSyncBatchNormComparesModels(t *testing.T) {
	for rank, err := range inProcess(t, 2, quick, func(g *Group) error {
		net := nn.NewSequential(nn.NewBatchNorm1d(2, nn.BatchNorm1dOptions{}))
		if g.Rank() == 1 {
			net = nn.NewSequential(nn.NewLinear(2, 2, nn.LinearOptions{}))
		}
		return ConvertSyncBatchNorm(g, net)
	}) {
		if !errors.Is(err, ErrMismatch) || !strings.Contains(err.Error(), "1 BatchNorms on rank 0, and 0 on rank 1") {
			t.Errorf("rank %d: %v, want the error %v with %q",
				rank, err, ErrMismatch, "1 BatchNorms on rank 0, and 0 on rank 1")
		}
	}
}

// A single value per channel in the whole job has no variance and is an error. Two values on two
// ranks are enough.
func TestSyncBatchNormNeedsTwoValues(t *testing.T) {
	for rank, err := range inProcess(t, 2, quick, func(g *Group) error {
		norm := nn.NewBatchNorm1d(3, nn.BatchNorm1dOptions{})
		if err := ConvertSyncBatchNorm(g, norm); err != nil {
			return err
		}
		scope := torch.NewScope("batch")
		defer scope.Close()
		x := scope.Own(full(cuda.CPU, torch.Float32, float64(g.Rank()), 1, 3))
		y, err := norm.Forward(x).NoGrad().Float64s()
		if err != nil {
			return err
		}
		want := (float64(g.Rank()) - 0.5) / math.Sqrt(0.25+1e-5)
		if d := difference(y, []float64{want, want, want}); d > 1e-6 {
			return fmt.Errorf("%v, want %v", y, want)
		}
		none := scope.Own(full(cuda.CPU, torch.Float32, 0, int64(g.Rank()), 3))
		return norm.Forward(none).Err()
	}) {
		if !errors.Is(err, cuda.ErrInvalidArgument) || !strings.Contains(err.Error(), "1 values per channel together") {
			t.Errorf("rank %d: %v, want the error %v with %q",
				rank, err, cuda.ErrInvalidArgument, "1 values per channel together")
		}
	}
}

// The collective of a backward pass is not recorded, so gradients of gradients would be wrong.
func TestSyncBatchNormRefusesGradientsOfGradients(t *testing.T) {
	for rank, err := range inProcess(t, 2, quick, func(g *Group) error {
		norm := nn.NewBatchNorm1d(3, nn.BatchNorm1dOptions{})
		if err := ConvertSyncBatchNorm(g, norm); err != nil {
			return err
		}
		scope := torch.NewScope("batch")
		defer scope.Close()
		x := scope.Own(full(cuda.CPU, torch.Float32, float64(g.Rank()), 2, 3))
		if err := x.SetRequiresGrad(true); err != nil {
			return err
		}
		_, err := torch.Grad([]*torch.Tensor{norm.Forward(x).Square().Sum()}, []*torch.Tensor{x},
			torch.GradOptions{CreateGraph: true})
		return err
	}) {
		if !errors.Is(err, cuda.ErrInvalidArgument) || !strings.Contains(err.Error(), "no gradients of gradients") {
			t.Errorf("rank %d: %v, want the error %v with %q",
				rank, err, cuda.ErrInvalidArgument, "no gradients of gradients")
		}
	}
}
