//go:build linux && cgo

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"syscall"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/distributed"
	"github.com/torchstream/torchstream/internal/cli"
	"github.com/torchstream/torchstream/internal/freeport"
	"github.com/torchstream/torchstream/internal/interrupt"
	"github.com/torchstream/torchstream/internal/printable"
)

// jobOptions are the options of training by several processes, and the job of this process.
type jobOptions struct {
	gpus, ranks int
	world       *distributed.Group // nil if this process trains alone
	release     func() bool        // keeps ctx from ending the job at once; see join
}

// collectiveTimeout is how long a rank may let the others wait, for example while it makes an index
// or evaluates. The other ranks notice at once if a process ends.
const collectiveTimeout = time.Hour

// rank returns this process's rank.
func (j *jobOptions) rank() int {
	if j.world == nil {
		return 0
	}
	return j.world.Rank()
}

// size returns the number of ranks.
func (j *jobOptions) size() int {
	if j.world == nil {
		return 1
	}
	return j.world.Size()
}

// onHost returns the number of ranks on this host.
func (j *jobOptions) onHost() int {
	if j.world == nil {
		return 1
	}
	return max(1, j.world.Environment().LocalSize)
}

// processes returns the number of ranks that this process starts. It is 0 if this process trains,
// alone or as a rank that a launcher has started.
func (o *trainOptions) processes(env distributed.Environment) (int, error) {
	if err := o.checkJob(); err != nil {
		return 0, err
	}
	n, option := o.job.gpus, "gpus"
	if o.job.ranks > 0 {
		n, option = o.job.ranks, "ranks"
	}
	launched := env.Launcher != "none"
	if launched && n > 0 && env.LocalSize > 0 && n != env.LocalSize {
		return 0, cli.Usagef("-%s %d: %s has started %s on this host already: leave the option out", option, n,
			env.Launcher, printable.Counted(env.LocalSize, "process", "processes"))
	}
	size := max(1, n)
	if launched {
		size = env.Size
	}
	if size > 1 && o.batch%size != 0 {
		return 0, cli.Usagef("-batch %d: %d processes cannot share it equally: choose a multiple of %[2]d", o.batch, size)
	}
	if size > 1 && !slices.Contains([]string{"", "cpu", "cuda"}, o.device) {
		return 0, cli.Usagef("-device %s: each process has another GPU: use -device cuda, and CUDA_VISIBLE_DEVICES to "+
			"choose", printable.Name(o.device))
	}
	if gpus := cuda.DeviceCount(); o.job.gpus > gpus {
		return 0, fmt.Errorf("-gpus %d: this machine has %s; on the CPU, -ranks %[1]d -device cpu trains with as many "+
			"processes", o.job.gpus, printable.Counted(gpus, "GPU", "GPUs"))
	}
	if launched || n < 2 {
		return 0, nil
	}
	return n, nil
}

// checkJob refuses -gpus and -ranks that contradict each other or -device.
func (o *trainOptions) checkJob() error {
	if o.accumulate > 1 && (o.job.gpus > 1 || o.job.size() > 1) {
		return cli.UsageError{Message: "-accumulate is for one GPU: with several, give each a smaller -batch"}
	}
	j := &o.job
	switch {
	case j.gpus < 0 || j.ranks < 0:
		return cli.Usagef("-gpus %d, -ranks %d: must be at least 1", j.gpus, j.ranks)
	case j.gpus > 0 && j.ranks > 0:
		return cli.UsageError{Message: "-gpus and -ranks exclude each other"}
	case j.gpus > 0 && o.device == "cpu":
		return cli.UsageError{Message: "-gpus is for GPUs, and -device is cpu: use -ranks"}
	case j.ranks > 0 && o.device != "cpu":
		return cli.UsageError{Message: "-ranks needs -device cpu; for GPUs use -gpus"}
	}
	return nil
}

// join makes this process a rank of the job that a launcher has started, if there is one. Until fit
// calls release, the end of ctx ends the job at once.
func (o *trainOptions) join(ctx context.Context, env distributed.Environment) error {
	if env.Size < 2 {
		return nil
	}
	whole, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	o.job.release = context.AfterFunc(ctx, func() { cancel(context.Cause(ctx)) })
	var err error
	o.job.world, err = distributed.Init(whole, distributed.Options{CPU: o.device == "cpu", Timeout: collectiveTimeout,
		Environment: &env})
	return err
}

// inTurn calls f first on one rank of each host and then on the host's other ranks. If f makes an
// index, only the first rank of a host does so.
func (j *jobOptions) inTurn(f func() error) error {
	if j.world == nil {
		return f()
	}
	if j.world.Environment().LocalRank == 0 {
		if err := f(); err != nil {
			return err
		}
		return j.world.Barrier()
	}
	if err := j.world.Barrier(); err != nil {
		return err
	}
	return f()
}

// close leaves the job. err is the error of the training run. If err is not nil, an error from
// closing the job is expected and dropped.
func (j *jobOptions) close(err error) error {
	if j.world == nil {
		return err
	}
	j.release()
	closed := j.world.Close()
	if err == nil {
		return closed
	}
	return j.explain(err)
}

// explain returns the error that this rank prints. Only one rank prints why the job has ended: the
// rank that left with an error of its own, or else rank 0, or rank 1 if rank 0 is lost. Only rank 0
// prints the message of an interruption.
func (j *jobOptions) explain(err error) error {
	rank := j.rank()
	if errors.As(err, &cli.InterruptedError{}) {
		if rank > 0 {
			return cli.InterruptedError{}
		}
		return err
	}
	var e *distributed.Error
	if errors.As(err, &e) && e.Culprit >= 0 && e.Culprit != e.Rank {
		speaker := 0
		switch {
		case errors.Is(err, distributed.ErrLeft):
			speaker = e.Culprit
		case e.Culprit == 0:
			speaker = 1
		}
		if e.Rank == speaker {
			return err
		}
		if env := j.world.Environment(); env.LocalSize == env.Size { // the same terminal shows the speaker's error
			return cli.ErrFound
		}
		return fmt.Errorf("rank %d ends with the job: rank %d says why", e.Rank, speaker)
	}
	if rank > 0 {
		return fmt.Errorf("rank %d: %w", rank, err)
	}
	return err
}

// ending is the end of a process.
type ending struct {
	rank int
	err  error // of Cmd.Wait
}

// After a rank has failed, the others end by themselves. A rank that has not ended after leaveTime
// gets SIGTERM, and after another leaveTime SIGKILL.
const leaveTime = 10 * time.Second

// startRanks starts n processes of this command line as the ranks of a job on this host, and waits
// for them. Rank 0 writes to stdout. When ctx ends or a rank fails, startRanks ends all ranks.
func startRanks(ctx context.Context, n int, stdout, stderr io.Writer) error {
	// Pdeathsig makes the kernel end the ranks when the thread that has started them ends, so this
	// goroutine must keep its thread.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	program, err := os.Executable()
	if err != nil {
		return err
	}
	port, err := freeport.Find()
	if err != nil {
		return err
	}
	var running []*exec.Cmd
	ended := make(chan ending, n)
	job, count := fmt.Sprintf("train %d at %d", os.Getpid(), time.Now().UnixNano()), strconv.Itoa(n)
	for rank := range n {
		c := exec.Command(program, os.Args[1:]...)
		c.Stderr = stderr
		if rank == 0 {
			c.Stdout = stdout
		}
		c.Env = append(os.Environ(), "RANK="+strconv.Itoa(rank), "LOCAL_RANK="+strconv.Itoa(rank), "WORLD_SIZE="+count,
			"LOCAL_WORLD_SIZE="+count, "MASTER_ADDR=127.0.0.1", "MASTER_PORT="+strconv.Itoa(port),
			"TORCHSTREAM_JOB="+job)
		// The ranks have separate process groups, so a terminal's Ctrl-C only reaches this process,
		// which passes the signal on. Otherwise a rank would get the signal twice, and the second
		// one would end the rank while it writes its checkpoint.
		c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
		if err = c.Start(); err != nil {
			break
		}
		running = append(running, c)
		go func() { ended <- ending{rank, c.Wait()} }()
	}
	if err != nil {
		signalAll(running, syscall.SIGKILL)
		return errors.Join(err, awaitRanks(context.WithoutCancel(ctx), running, ended))
	}
	return awaitRanks(ctx, running, ended)
}

func signalAll(running []*exec.Cmd, s os.Signal) {
	for _, c := range running {
		_ = c.Process.Signal(s) // it may have ended
	}
}

// status returns the exit status, or -1 if a signal or another failure has ended the process.
func (e *ending) status() int {
	var exit *exec.ExitError
	if errors.As(e.err, &exit) {
		return exit.ExitCode()
	}
	return -1
}

// awaitRanks waits until all ranks have ended, and returns the first failure. If ctx has
// ended, it prefers the error of an interrupted rank to the errors of ranks that have lost it.
func awaitRanks(ctx context.Context, running []*exec.Cmd, ended <-chan ending) error {
	told := ctx.Done()
	var limit <-chan time.Time
	last := syscall.SIGTERM // the next signal after limit
	var first *ending
	interrupted := false
	for left := len(running); left > 0; {
		select {
		case <-told:
			told = nil
			signalAll(running, syscall.SIGTERM)
		case <-limit:
			signalAll(running, last)
			last, limit = syscall.SIGKILL, time.After(leaveTime)
		case e := <-ended:
			left--
			if e.err != nil && first == nil {
				first, limit = &e, time.After(leaveTime)
			}
			interrupted = interrupted || e.err != nil && e.status() == interrupt.Status
		}
	}
	if first == nil {
		return nil
	}
	switch status := first.status(); {
	case status == interrupt.Status, interrupted && ctx.Err() != nil:
		return cli.InterruptedError{} // rank 0 has printed how to continue
	case status > 0:
		return cli.ErrFound // the rank has said why
	}
	return fmt.Errorf("rank %d has ended: %w", first.rank, first.err)
}
