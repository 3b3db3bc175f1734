package distributed_test

import (
	"context"
	"fmt"
	"log"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/distributed"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/torch"
)

// Each rank keeps a shard of the parameters, gradients and optimizer state. This program is started
// alone, so its job has one rank.
func ExampleNewFullyShardedDataParallel() {
	if err := trainSharded(); err != nil {
		log.Fatal(err)
	}
	// Output: trained: true, gathered now: 0 bytes
}

func trainSharded() error {
	world, err := distributed.Init(context.Background(), distributed.Options{CPU: true})
	if err != nil {
		return err
	}
	defer world.Close()
	var blocks []nn.Module
	for range 4 {
		blocks = append(blocks, distributed.NewShardedBlock(nn.NewSequential(nn.NewLinear(16, 16,
			nn.LinearOptions{}), nn.NewTanh())))
	}
	net := nn.NewSequential(blocks...)
	sharded, err := distributed.NewFullyShardedDataParallel(world, net, distributed.FullyShardedOptions{})
	if err != nil {
		return err
	}
	defer sharded.Close()
	opt, err := sharded.NewOptimizer(func(shard []*torch.Tensor) (optim.Optimizer, error) {
		return optim.NewAdamW(shard, optim.AdamWOptions{LR: 1e-2})
	})
	if err != nil {
		return err
	}
	defer opt.Close()
	x, err := torch.Randn(cuda.CPU, torch.Float32, 8, 16) // this rank's samples
	if err != nil {
		return err
	}
	defer x.Close()
	var first, last float64
	for step := range 30 {
		scope := torch.NewScope("step")
		loss := sharded.Forward(x.In(scope)).MSELoss(x)
		if err := sharded.Backward(loss); err != nil {
			return err
		}
		norm, err := sharded.ClipGradNorm(1, optim.ClipOptions{})
		if err != nil {
			return err
		}
		norm.Close()
		if err := opt.Step(); err != nil {
			return err
		}
		if last, err = loss.Float64(); err != nil {
			return err
		}
		if step == 0 {
			first = last
		}
		scope.Close()
	}
	fmt.Printf("trained: %v, gathered now: %d bytes\n", last < first, sharded.Stats().GatheredBytes)
	state, err := sharded.State() // whole tensors on all ranks
	if err != nil || world.Rank() > 0 {
		return err
	}
	_ = state // rank 0 saves it: checkpoint.Save("model.safetensors", state, nil)
	return nil
}
