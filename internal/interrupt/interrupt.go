// Package interrupt ends programs on SIGINT, SIGTERM and SIGHUP, even while they block in a call
// without a context.
package interrupt

import (
	"context"
	"os"
	"os/signal"
	"syscall"
	"time"
)

// Status is the exit status of an interrupted program.
const Status = 130

// Grace is the default time for a program to end by itself after the first signal.
const Grace = 5 * time.Second

// Context returns a context that the first SIGINT, SIGTERM or SIGHUP cancels. If the process was
// started with SIGHUP ignored, as with nohup, SIGHUP stays ignored.
//
// If the process still runs after grace, for example because it blocks in a system call, it exits
// with Status. A second SIGINT or SIGTERM kills the process at once. A second SIGHUP does not,
// since the shell and the kernel may each send one when a terminal is closed.
//
// After the first signal, writing to a closed pipe returns an error instead of killing the process:
// the programs that read the pipe may have ended with the terminal.
//
// stop restores the signals' default behaviour if no signal arrived. Call it once.
func Context(grace time.Duration) (ctx context.Context, stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, ending()...)
	stopped := make(chan struct{})
	go func() {
		select {
		case <-signals:
		case <-stopped:
			return
		}
		signal.Ignore(syscall.SIGHUP, syscall.SIGPIPE)
		signal.Stop(signals) // the next SIGINT or SIGTERM kills the process
		cancel()
		exitAfter(grace, signals, stopped)
	}()
	return ctx, func() {
		signal.Stop(signals)
		cancel()
		close(stopped)
	}
}

// exitAfter exits after grace, or on a signal that arrived before signal.Stop, unless the program
// stops first.
func exitAfter(grace time.Duration, signals <-chan os.Signal, stopped <-chan struct{}) {
	timer := time.NewTimer(grace)
	defer timer.Stop()
	for {
		select {
		case second := <-signals:
			if second != syscall.SIGHUP {
				os.Exit(Status)
			}
		case <-timer.C:
			os.Exit(Status)
		case <-stopped:
			return
		}
	}
}

// ending returns the signals that end the program.
func ending() []os.Signal {
	all := []os.Signal{os.Interrupt, syscall.SIGTERM}
	if !signal.Ignored(syscall.SIGHUP) {
		all = append(all, syscall.SIGHUP)
	}
	return all
}
