//go:build linux && cgo

package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"github.com/torchstream/torchstream/internal/cli"
	"github.com/torchstream/torchstream/internal/printable"
	"github.com/torchstream/torchstream/nn"
)

// loadWeights reads the file of -weights into the networks.
func (o *serveOptions) loadWeights(ctx context.Context, networks []*network) error {
	if o.weights == "" {
		return nil
	}
	for _, n := range networks {
		if n.model == nil {
			return cli.Usagef("-weights is for packages (.pt2), and %s is a checkpoint, which has its own weights",
				printable.Name(n.path))
		}
		if _, err := n.model.LoadWeights(ctx, o.weights, nn.LoadOptions{}); err != nil {
			return err
		}
	}
	return nil
}

// reloadOnSignal reads the file of -weights again at each SIGUSR1, until the caller calls stop. If
// the file does not fit, the networks keep their weights.
func (o *serveOptions) reloadOnSignal(ctx context.Context, networks []*network, stdout io.Writer,
	log *slog.Logger) (stop func()) {
	if o.weights == "" {
		return func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGUSR1)
	var reloading sync.WaitGroup
	reloading.Go(func() {
		for {
			select {
			case <-ctx.Done():
				return
			case <-signals:
			}
			if err := o.loadWeights(ctx, networks); err != nil {
				log.Error("the weights are not replaced", "error", err)
				continue
			}
			fmt.Fprintf(stdout, "new weights from %s\n", printable.Name(o.weights))
		}
	})
	return func() {
		signal.Stop(signals)
		cancel()
		reloading.Wait()
	}
}
