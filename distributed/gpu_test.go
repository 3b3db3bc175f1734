//go:build linux

package distributed

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/torch"
)

// onGPUs runs the worker as two ranks with one GPU each.
func onGPUs(t *testing.T, worker string) {
	cudatest.RequireGPUs(t, 2)
	requireSuccess(t, launchJob(t, 2, worker))
}

// onOwnGPU returns a worker that runs a rank on its GPU.
func onOwnGPU(run func(g *Group) error) func(context.Context) error {
	return func(ctx context.Context) error {
		o := patient
		o.CPU = false
		g, err := Init(ctx, o)
		if err != nil {
			return err
		}
		if g.Device() == cuda.CPU {
			return errors.New("the job runs on the CPU")
		}
		return errors.Join(run(g), g.Device().Synchronize(), g.Close())
	}
}

func init() {
	workers["collectives on GPUs"] = onOwnGPU(func(g *Group) error {
		return errors.Join(exercise(g, g.Device()), exercise(g, cuda.CPU), subgroupOnGPUs(g))
	})
	workers["order on GPUs"] = onOwnGPU(orderOnGPUs)
	workers["bucket order on GPUs"] = onOwnGPU(bucketOrderOnGPUs)
	workers["train on GPUs"] = onOwnGPU(trainOnGPUs)
	workers["graph on GPUs"] = onOwnGPU(graphOnGPUs)
	workers["reduce for ever on GPUs"] = reduceForEverOnGPUs
}

func TestGPUCollectives(t *testing.T)                 { onGPUs(t, "collectives on GPUs") }
func TestGPUCollectivesAreInOrder(t *testing.T)       { onGPUs(t, "order on GPUs") }
func TestGPUBucketsAreInOrder(t *testing.T)           { onGPUs(t, "bucket order on GPUs") }
func TestGPUProcessesTrainAsOne(t *testing.T)         { onGPUs(t, "train on GPUs") }
func TestGPUStepWithCollectivesIsAGraph(t *testing.T) { onGPUs(t, "graph on GPUs") }

func subgroupOnGPUs(g *Group) error {
	sub, err := g.Subgroup(1, 0)
	if err != nil {
		return err
	}
	x := full(g.Device(), torch.Float32, float64(sub.Rank()), 4)
	defer x.Close()
	if err := sub.Broadcast(x, 0); err != nil {
		return err
	}
	return expectValues("broadcast in a subgroup", x, 0, 0, 0, 0)
}

// delay is how long a test blocks a stream. The host must enqueue the following work in less time.
const delay = 100 * time.Millisecond

// orderOnGPUs delays the work that computes a collective's operand, then the collective itself.
func orderOnGPUs(g *Group) error {
	d := g.Device()
	side, err := cuda.NewOwnedStream(d, cuda.StreamOptions{})
	if err != nil {
		return err
	}
	defer side.Close()
	want := []float64{3, 3}
	return cuda.WithStream(side.Stream, func() error {
		for range 3 {
			// The delay comes before the work that computes the values on the current stream. Each
			// collective is tested alone, because NCCL runs the collectives of one communicator in
			// order, even on different streams.
			x := full(d, torch.Float32, 0, 2)
			y := full(d, torch.Float32, 0, 2)
			if err := errors.Join(x.Err(), y.Err(), d.Synchronize(),
				capi.DelayStream(side.Stream.CAPI(), delay)); err != nil {
				return err
			}
			if err := errors.Join(x.Fill_(float64(g.Rank()+1)).Err(), g.AllReduce(x, Sum),
				expectValues("AllReduce", x, want...)); err != nil {
				return err
			}
			if err := errors.Join(d.Synchronize(), capi.DelayStream(side.Stream.CAPI(), delay),
				y.Fill_(float64(g.Rank()+1)).Err()); err != nil {
				return err
			}
			w, err := g.AllReduceAsync(y, Sum)
			if err != nil {
				return err
			}
			if err := errors.Join(w.Wait(), expectValues("AllReduceAsync", y, want...), w.Close()); err != nil {
				return err
			}
			// Here the delay is on the stream of the collectives.
			if err := errors.Join(y.Fill_(float64(g.Rank()+1)).Err(), d.Synchronize(),
				capi.DelayStream(g.comms.stream.Stream.CAPI(), delay)); err != nil {
				return err
			}
			if w, err = g.AllReduceAsync(y, Sum); err != nil {
				return err
			}
			if err := errors.Join(w.Wait(), expectValues("a late AllReduceAsync", y, want...), w.Close()); err != nil {
				return err
			}
			x.Close()
			y.Close()
		}
		return nil
	})
}

// smallNetOn is smallNet on a GPU.
func smallNetOn(d cuda.Device, seed uint64) (nn.Module, error) {
	net, err := smallNet(seed)
	if err != nil {
		return nil, err
	}
	return net, nn.To(net, d)
}

// lossOn is lossOf on a GPU.
func lossOn(d cuda.Device, net nn.Module, scope *torch.Scope, numbers ...int) (*torch.Tensor, error) {
	x, y, err := batch(numbers)
	if err != nil {
		return nil, err
	}
	x, y = scope.Own(x).To(d), scope.Own(y).To(d)
	return net.Forward(x).MSELoss(y), nil
}

// bucketOrderOnGPUs delays the gradients in even passes and their reduction in odd passes.
func bucketOrderOnGPUs(g *Group) error {
	d := g.Device()
	net, err := smallNetOn(d, 1)
	if err != nil {
		return err
	}
	defer nn.Close(net)
	alone := torch.NewScope("alone")
	defer alone.Close()
	loss, err := lossOn(d, net, alone, 0, 1)
	if err != nil {
		return err
	}
	if err := loss.Backward(); err != nil {
		return err
	}
	want, err := gradients(net)
	if err != nil {
		return err
	}
	if err := torch.ClearGrads(nn.Parameters(net)...); err != nil {
		return err
	}
	parallel, err := NewDataParallel(g, net, DataParallelOptions{BucketBytes: smallBuckets})
	if err != nil {
		return err
	}
	defer parallel.Close()
	side, err := cuda.NewOwnedStream(d, cuda.StreamOptions{})
	if err != nil {
		return err
	}
	defer side.Close()
	if err := side.Wait(cuda.DefaultStream(d)); err != nil { // wait for rank 0's parameters
		return err
	}
	return cuda.WithStream(side.Stream, func() error {
		for pass := range 6 {
			scope := torch.NewScope("pass")
			defer scope.Close()
			loss, err := lossOn(d, net, scope, g.Rank())
			if err != nil {
				return err
			}
			late := side.Stream
			if pass%2 == 1 {
				late = parallel.stream.Stream
			}
			if err := errors.Join(d.Synchronize(), capi.DelayStream(late.CAPI(), delay),
				parallel.Backward(loss)); err != nil {
				return err
			}
			if err := requireGradients(net, want, 1e-12); err != nil {
				return fmt.Errorf("pass %d: %w", pass, err)
			}
			// The gradients are views of the buckets. The next pass must not reduce these values.
			for _, p := range nn.Parameters(net) {
				grad := p.Grad()
				if err := grad.Fill_(-5).Err(); err != nil {
					return err
				}
				grad.Close()
			}
			if err := torch.ClearGrads(nn.Parameters(net)...); err != nil {
				return err
			}
		}
		return nil
	})
}

// trainOnGPUs compares training on all ranks together with training on one GPU, which each rank
// does for itself.
func trainOnGPUs(g *Group) error {
	d := g.Device()
	var all [2][]float64
	for i := range all {
		net, err := smallNetOn(d, 1)
		if err != nil {
			return err
		}
		defer nn.Close(net)
		var parallel *DataParallel
		if i == 1 {
			if parallel, err = NewDataParallel(g, net, DataParallelOptions{BucketBytes: smallBuckets}); err != nil {
				return err
			}
			defer parallel.Close()
		}
		opt, err := optim.NewSGD(nn.Parameters(net), optim.SGDOptions{LR: 0.1, Momentum: 0.9})
		if err != nil {
			return err
		}
		defer opt.Close()
		at := 0
		for _, size := range append(batchSizes, 1) { // in the last batch rank 1 has no sample
			var mine []int
			for k := at; k < at+size; k++ {
				if parallel == nil || (k-at)%2 == g.Rank() {
					mine = append(mine, k)
				}
			}
			at += size
			scope := torch.NewScope("turn")
			var loss *torch.Tensor
			if len(mine) > 0 {
				if loss, err = lossOn(d, net, scope, mine...); err != nil {
					return err
				}
			}
			if parallel == nil {
				err = loss.Backward()
			} else {
				err = parallel.Backward(parallel.Weigh(loss, len(mine)))
			}
			if err = errors.Join(err, opt.Step()); err != nil {
				return err
			}
			scope.Close()
		}
		if all[i], err = weights(net); err != nil {
			return err
		}
	}
	if diff := difference(all[0], all[1]); diff > 1e-12 {
		return fmt.Errorf("the weights differ by %g", diff)
	}
	same, err := AllGatherObject(g, floats(all[1]))
	if err != nil {
		return err
	}
	if same[0] != same[1] {
		return errors.New("the ranks have different weights")
	}
	return nil
}

// graphOnGPUs captures forward, backward with its reduction, and the optimizer's step as one graph.
func graphOnGPUs(g *Group) error {
	scope := torch.NewScope("fixed")
	defer scope.Close()
	x, y, err := batch([]int{g.Rank(), g.Rank() + 2, g.Rank() + 4})
	if err != nil {
		return err
	}
	d := g.Device()
	eager, replayed, err := eagerAndReplayed(scope.Own(scope.Own(x).To(d)), scope.Own(scope.Own(y).To(d)),
		func() (*steps, error) {
			return startSteps(g, func() (nn.Module, error) { return smallNetOn(d, 1) })
		})
	if err == nil && !slices.Equal(eager, replayed) {
		err = fmt.Errorf("the graph's weights differ by %g", difference(eager, replayed))
	}
	return err
}

// TestCallsOfStepsAreEqual runs the graph tests on the CPU. The CPU captures nothing, so both runs
// of a comparison are eager and must give equal weights.
func TestCallsOfStepsAreEqual(t *testing.T) {
	for name, compare := range map[string]func(*Group) error{
		"DataParallel": graphOnGPUs, "SyncBatchNorm": syncNormGraph, "ZeroRedundancyOptimizer": zeroGraph,
		"FullyShardedDataParallel": shardedGraph,
	} {
		t.Run(name, func(t *testing.T) {
			for rank, err := range inProcess(t, 2, quick, compare) {
				if err != nil {
					t.Errorf("rank %d: %v, want no error", rank, err)
				}
			}
		})
	}
}

// reduceForEverOnGPUs is reduceForEver with NCCL.
func reduceForEverOnGPUs(ctx context.Context) error {
	o := patient
	o.CPU = false
	g, err := Init(ctx, o)
	if err != nil {
		return err
	}
	x := full(g.Device(), torch.Float32, 1, 1000)
	for n := 0; ; n++ {
		if err = g.AllReduce(x, Average); err != nil {
			break
		}
		if n%10 == 0 {
			if err := g.Device().Synchronize(); err != nil {
				return err
			}
		}
		if n == 100 {
			fmt.Println("running")
		}
	}
	if err := g.Device().Synchronize(); err != nil {
		return fmt.Errorf("the device, after the failure: %w", err)
	}
	return failedWith(g, err)
}

func TestGPUKilledRankIsNamed(t *testing.T) {
	cudatest.RequireGPUs(t, 2)
	all := launchJob(t, 2, "reduce for ever on GPUs")
	for _, p := range all {
		p.expect(t, "running")
	}
	all[1].Process.Kill()
	requireErrors(t, all, 1, false, "lost=true", "rank 1", "AllReduce #")
}
