//go:build linux && cgo

package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"runtime"
	"strings"
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
	}
	var changed []string
	for _, n := range networks {
		if _, err := n.model.LoadWeights(ctx, o.weights, nn.LoadOptions{}); err != nil {
			err = fmt.Errorf("%v: %w", n.device, err)
			if len(changed) > 0 {
				err = fmt.Errorf("%w: %s already has the new weights: send SIGUSR1 again", err, strings.Join(changed, " and "))
			}
			return err
		}
		changed = append(changed, n.device.String())
	}
	return nil
}

// reloadSignals returns a channel of SIGUSR1, which ends the process otherwise, also while models
// are opened and closed.
func reloadSignals() (signals chan os.Signal, stop func()) {
	signals = make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGUSR1)
	return signals, func() { signal.Stop(signals) }
}

// reloadOnSignal reads the file of -weights again at each signal, until the caller calls stop. If
// the file does not fit, the networks keep their weights.
func (o *serveOptions) reloadOnSignal(ctx context.Context, signals <-chan os.Signal, networks []*network,
	stdout io.Writer, log *slog.Logger) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var reloading sync.WaitGroup
	reloading.Go(func() {
		// LibTorch has a thread pool for each OS thread that copies large tensors on the CPU. The
		// goroutine stays locked until it exits, so that there is one pool for all signals.
		runtime.LockOSThread()
		for {
			select {
			case <-ctx.Done():
				return
			case <-signals:
			}
			if o.weights == "" {
				log.Error("SIGUSR1 reads the file of -weights again, and serve has no -weights")
				continue
			}
			if err := o.loadWeights(ctx, networks); err != nil {
				log.Error("the weights are not replaced", "error", err)
				continue
			}
			fmt.Fprintf(stdout, "new weights from %s\n", printable.Name(o.weights))
		}
	})
	return func() {
		cancel()
		reloading.Wait()
	}
}
