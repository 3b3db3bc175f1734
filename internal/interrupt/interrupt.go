// Package interrupt ends programs on SIGINT and SIGTERM, even while they block in a call that takes
// no context.
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

// Grace is the default time that a program has to end by itself after the first signal.
const Grace = 5 * time.Second

// Context returns a context that the first SIGINT or SIGTERM cancels. If the process still runs
// after grace, for example because it blocks in a system call, it exits with Status. A second
// signal kills the process at once. stop restores the signals' default behaviour, and is called
// once.
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
		signal.Stop(signals) // the next signal kills the process
		cancel()
		timer := time.NewTimer(grace)
		defer timer.Stop()
		select {
		case <-signals: // the second signal came before Stop
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
