package main

import (
	"errors"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/nn"
)

// captured measures the same work as eager, captured into graphs.
func (w *work) captured(rounds int) (t times, err error) {
	stream, err := w.current()
	if err != nil {
		return t, err
	}
	var graphs []*cuda.Graph
	defer func() {
		for _, g := range graphs {
			err = errors.Join(err, g.Close())
		}
	}()
	return w.measured(rounds, func(m nn.Module) (func() error, error) {
		run := w.forward(m)
		// Libraries initialise themselves on their first call.
		if err := errors.Join(run(), stream.Synchronize()); err != nil {
			return nil, err
		}
		g, err := cuda.Capture(cuda.CaptureOptions{Stream: stream}, run)
		if err != nil {
			return nil, err
		}
		graphs = append(graphs, g)
		return func() error { return g.Replay(stream) }, nil
	})
}
