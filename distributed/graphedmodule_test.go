//go:build linux

package distributed

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/torch"
)

func init() {
	workers["graphed module on GPUs"] = onOwnGPU(graphedModuleOnGPUs)
}

func TestGPUGraphedModuleUnderDataParallel(t *testing.T) { onGPUs(t, "graphed module on GPUs") }

// graphedModuleOnGPUs trains twice: once with CUDA graphs of the passes of the network's middle,
// and once eagerly. Gradients of parameters inside the graphs must fill buckets like other
// gradients.
func graphedModuleOnGPUs(g *Group) error {
	d := g.Device()
	var all [2][]float64
	for i := range all {
		plain, err := smallNetOn(d, 1)
		if err != nil {
			return err
		}
		defer nn.Close(plain)
		m := plain.Parts().Modules
		middle := nn.NewGraphed(nn.NewSequential(m[1].Module, m[2].Module, m[3].Module), torch.GraphedModuleOptions{})
		defer middle.Close()
		net := plain
		if i == 1 {
			net = nn.NewSequential(m[0].Module, middle, m[4].Module)
		}
		parallel, err := NewDataParallel(g, net, DataParallelOptions{BucketBytes: smallBuckets})
		if err != nil {
			return err
		}
		defer parallel.Close()
		opt, err := optim.NewSGD(nn.Parameters(net), optim.SGDOptions{LR: 0.1, Momentum: 0.9})
		if err != nil {
			return err
		}
		defer opt.Close()
		for step := range 10 {
			scope := torch.NewScope("turn")
			first := 4*step + 2*g.Rank()
			loss, err := lossOn(d, net, scope, first, first+1)
			if err != nil {
				return err
			}
			if err := errors.Join(parallel.Backward(loss), opt.Step(), scope.Close()); err != nil {
				return err
			}
		}
		if all[i], err = weights(net); err != nil {
			return err
		}
		if s := middle.Stats(); i == 1 && (s.Replays != 7 || s.Backward != 7 || s.Refused != nil) {
			return fmt.Errorf("the graphs had other than 7 passes: %+v", s)
		}
	}
	if diff := difference(all[0], all[1]); diff > 1e-12 {
		return fmt.Errorf("the weights with graphs differ by %g", diff)
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

// BatchNorms inside an nn.Graphed are refused: if one rank replays a graph while another runs
// eagerly, captured collectives would mix with others.
func TestConvertSyncBatchNormRefusesGraphed(t *testing.T) {
	for rank, err := range inProcess(t, 2, quick, func(g *Group) error {
		norm := nn.NewGraphed(nn.NewSequential(nn.NewBatchNorm1d(2, nn.BatchNorm1dOptions{})),
			torch.GraphedModuleOptions{})
		defer norm.Close()
		return ConvertSyncBatchNorm(g, nn.NewSequential(norm))
	}) {
		if err == nil || !strings.Contains(err.Error(), "nn.Graphed") {
			t.Errorf("rank %d: %v, want an error with %q", rank, err, "nn.Graphed")
		}
	}
}
