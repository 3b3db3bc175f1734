// Package interrupt ends programs on SIGINT and SIGTERM, also one that waits where no context
// reaches.
package interrupt

import (
	"context"
	"os"
	"os/signal"
	"syscall"
	"time"
)

// Status is the exit status of a program that was interrupted.
const Status = 130

// Grace is how long a program has to end by itself after the first signal.
const Grace = 5 * time.Second

// Context returns a context that the first SIGINT or SIGTERM ends. The process exits with Status if
// it still runs after grace: it may wait in a system call. A second signal kills it at once. stop
// gives the signals back.
func Context(grace time.Duration) (ctx context.Context, stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	stopped := make(chan struct{})
	go func() {
		select {
		case <-signals:
		case <-stopped:
			return
		}
		signal.Stop(signals) // the next one kills
		cancel()
		timer := time.NewTimer(grace)
		defer timer.Stop()
		select {
		case <-signals: // it came before Stop
			os.Exit(Status)
		case <-timer.C:
			os.Exit(Status)
		case <-stopped:
		}
	}()
	return ctx, func() {
		signal.Stop(signals)
		cancel()
		close(stopped)
	}
}
