//go:build linux

package distributed

import (
	"errors"
	"fmt"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/torch"
)

// steps is a training run whose steps can be captured.
type steps struct {
	net      nn.Module
	parallel interface {
		Backward(loss *torch.Tensor) error
	}
	opt    optim.Optimizer
	before func(step int) error // nil, or called before each step
	end    func() error
}

// startSteps starts a training run of the net with SGD.
func startSteps(g *Group, build func() (nn.Module, error)) (*steps, error) {
	net, err := build()
	if err != nil {
		return nil, err
	}
	parallel, err := NewDataParallel(g, net, DataParallelOptions{BucketBytes: smallBuckets})
	if err != nil {
		return nil, errors.Join(err, nn.Close(net))
	}
	opt, err := optim.NewSGD(nn.Parameters(net), optim.SGDOptions{LR: 0.1, Momentum: 0.9, Capturable: true})
	if err != nil {
		return nil, errors.Join(err, parallel.Close(), nn.Close(net))
	}
	return &steps{net: net, parallel: parallel, opt: opt, end: func() error {
		return errors.Join(opt.Close(), parallel.Close(), nn.Close(net))
	}}, nil
}

// eagerAndReplayed returns the weights of two training runs on one batch. In the first run all
// steps are eager. In the second run all steps except the first ones replay a graph. On the CPU
// both runs are eager.
func eagerAndReplayed(x, y *torch.Tensor, start func() (*steps, error)) (eager, replayed []float64, err error) {
	var weightsOf [2][]float64
	for i := range weightsOf {
		s, err := start()
		if err != nil {
			return nil, nil, err
		}
		weightsOf[i], err = s.train(x, y, i == 1)
		if err := errors.Join(err, s.end()); err != nil {
			return nil, nil, err
		}
	}
	return weightsOf[0], weightsOf[1], nil
}

// train runs eight steps and returns the weights.
func (s *steps) train(x, y *torch.Tensor, replay bool) ([]float64, error) {
	graphed := torch.NewGraphed(func(in []*torch.Tensor) ([]*torch.Tensor, error) {
		loss := s.net.Forward(in[0]).MSELoss(in[1])
		return []*torch.Tensor{loss}, errors.Join(s.parallel.Backward(loss), s.opt.Step())
	}, torch.GraphedOptions{})
	defer graphed.Close()
	call := graphed.CallEager
	if replay {
		call = graphed.Call
	}
	for step := range 8 {
		if s.before != nil {
			if err := s.before(step); err != nil {
				return nil, err
			}
		}
		if _, err := call(x, y); err != nil {
			return nil, err
		}
	}
	if stats := graphed.Stats(); replay && stats.Hits == 0 && x.Device() != cuda.CPU {
		return nil, fmt.Errorf("nothing was replayed: %+v", stats)
	}
	return weights(s.net)
}
