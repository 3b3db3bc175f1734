//go:build linux

package distributed

import (
	"fmt"
	"testing"

	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/torch"
)

// The types of a job have String methods, like the types of packages nn and optim. Without these
// methods, fmt would print addresses and values.
func TestTypesOfAJobPrintWhatTheyAre(t *testing.T) {
	requireNone(t, inProcess(t, 1, quick, func(g *Group) error {
		net, err := smallNet(1)
		if err != nil {
			return err
		}
		parallel, err := NewDataParallel(g, net, DataParallelOptions{})
		if err != nil {
			return err
		}
		defer parallel.Close()
		sgd := func(shard []*torch.Tensor) (optim.Optimizer, error) {
			return optim.NewSGD(shard, optim.SGDOptions{LR: 0.1, Momentum: 0.9})
		}
		zero, err := NewZeroRedundancyOptimizer(g, nn.Parameters(net), sgd)
		if err != nil {
			return err
		}
		defer zero.Close()
		block := NewShardedBlock(nn.NewLinear(6, 20, nn.LinearOptions{}))
		before := fmt.Sprint(block)
		inner := nn.NewSequential(nn.NewTanh(), nn.NewLinear(20, 3, nn.LinearOptions{}))
		sharded, err := NewFullyShardedDataParallel(g, nn.NewSequential(block, inner), FullyShardedOptions{})
		if err != nil {
			return err
		}
		defer sharded.Close()
		of, err := sharded.NewOptimizer(sgd)
		if err != nil {
			return err
		}
		defer of.Close()
		for _, c := range []struct{ got, want string }{
			{fmt.Sprint(g), "Group(world, rank 0 of 1, cpu)"},
			{fmt.Sprint(parallel), "DataParallel(rank 0 of 1, 6 parameters)"},
			{fmt.Sprint(zero), "ZeroRedundancyOptimizer(rank 0 of 1, SGD(6 parameters, lr 0.1, momentum 0.9))"},
			{fmt.Sprint(of), "FullyShardedOptimizer(rank 0 of 1, SGD(4 parameters, lr 0.1, momentum 0.9))"},
			{before, "ShardedBlock([20 6])"},
			{fmt.Sprint(block), "ShardedBlock([120])"},
			{fmt.Sprint(sharded), `FullyShardedDataParallel(
  (0): ShardedBlock([120])
  (1): Sequential(
    (0): Tanh()
    (1): Linear([60])
  )
)`},
		} {
			if c.got != c.want {
				t.Errorf("got\n%s\nwant\n%s", c.got, c.want)
			}
		}
		return nil
	}))
}
