package distributed

import (
	"context"
	"testing"
	"time"
)

// Names for tests of package distributed_test, which use packages that import this one.

// Process is a rank that runs in a separate process.
type Process = process

// AddWorker registers a program for LaunchJob.
func AddWorker(name string, run func(ctx context.Context) error) { workers[name] = run }

// LaunchJob starts n processes that run the worker as ranks of one job.
func LaunchJob(t *testing.T, n int, worker string, environment ...string) []*Process {
	t.Helper()
	return launchJob(t, n, worker, environment...)
}

// RequireSuccess waits until all processes have ended without an error.
func RequireSuccess(t *testing.T, all []*Process) {
	t.Helper()
	requireSuccess(t, all)
}

// Text returns the process's output so far.
func (p *process) Text() string { return p.output.String() }

// Ended returns a channel that is closed when the process has ended.
func (p *process) Ended() <-chan struct{} { return p.done }

// Await waits until the process has printed the text, has ended, or the limit is over. It reports
// whether the text was printed.
func (p *process) Await(text string, limit time.Duration) bool { return p.await(text, limit) }
