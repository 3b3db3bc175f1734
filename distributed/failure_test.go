//go:build linux

package distributed

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/torch"
)

// patient holds the options of jobs that lose a rank. The other ranks must notice the loss at once,
// long before these limits.
var patient = Options{CPU: true, Timeout: 5 * time.Minute, Silence: 5 * time.Minute}

// silenceVariable sets Options.Silence of a job.
const silenceVariable = "TORCHSTREAM_DIST_TEST_SILENCE"

func init() {
	workers["reduce for ever"] = reduceForEver
	workers["one rank waits"] = oneRankWaits
	workers["left behind"] = leftBehind
	workers["cancelled"] = cancelled
	workers["late"] = late
	workers["nobody serves"] = nobodyServes
	workers["broken pipes"] = brokenPipes
}

// reduceForEver runs collectives until one fails, and prints the error.
func reduceForEver(ctx context.Context) error {
	o := patient
	if text := os.Getenv(silenceVariable); text != "" {
		var err error
		if o.Silence, err = time.ParseDuration(text); err != nil {
			return err
		}
	}
	g, err := Init(ctx, o)
	if err != nil {
		return err
	}
	x := full(cuda.CPU, torch.Float32, 1, 1000)
	for n := 0; ; n++ {
		if err = g.AllReduce(x, Average); err != nil {
			break
		}
		if n == 10 {
			fmt.Println("running")
		}
	}
	return failedWith(g, err)
}

// If another process uses the port, the error names the port and says what to set.
func TestTakenPortIsNamed(t *testing.T) {
	l, err := net.Listen("tcp", ":0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	o := quick
	o.CPU = true
	o.Environment = &Environment{Launcher: "environment", Size: 2, Address: "127.0.0.1",
		Port: l.Addr().(*net.TCPAddr).Port, LocalSize: 2}
	g, err := Init(t.Context(), o)
	if err == nil {
		g.Close()
	}
	if !errors.Is(err, syscall.EADDRINUSE) ||
		!strings.HasSuffix(err.Error(),
			"another process uses this port: set MASTER_PORT to a free port: address already in use") {
		t.Error(err)
	}
}

// A process of another job that connects to this job's store gets an error with the names of both
// jobs. This job continues.
func TestAnotherJobAtThePortIsNamed(t *testing.T) {
	var port int
	environment := func(rank int, job string) *Environment {
		return &Environment{Launcher: "test", Rank: rank, Size: 2, LocalRank: rank, LocalSize: 2,
			Address: "127.0.0.1", Port: port, Job: job}
	}
	for _, c := range []struct{ job, stranger, says string }{
		{"first", "second", `is of the job "first", and this process is of the job "second": set MASTER_PORT`},
		{"first", "", "have the same rank: another job uses this address: set MASTER_PORT"},
	} {
		port = freePort(t)
		errs := make(chan error, 2)
		met, refused := make(chan bool, 2), make(chan bool)
		for rank := range 2 {
			go func() {
				o := quick
				o.CPU, o.Environment = true, environment(rank, c.job)
				g, err := Init(t.Context(), o)
				met <- true
				if err == nil {
					<-refused
					err = errors.Join(g.AllReduce(full(cuda.CPU, torch.Float32, 1, 10), Sum), g.Close())
				}
				errs <- err
			}()
		}
		<-met
		<-met
		o := quick
		o.CPU, o.Environment = true, environment(1, c.stranger)
		if _, err := Init(t.Context(), o); !errors.Is(err, ErrMismatch) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("the stranger: %v, want the error %v with %q", err, ErrMismatch, c.says)
		}
		close(refused)
		for range 2 {
			if err := <-errs; err != nil {
				t.Error(err)
			}
		}
	}
}

// failedWith prints the error of a collective, and closes the group.
func failedWith(g *Group, err error) error {
	var e *Error
	if !errors.As(err, &e) {
		return fmt.Errorf("not an Error: %w", err)
	}
	fmt.Printf("culprit %d lost=%v timeout=%v left=%v: %v\n", e.Culprit, errors.Is(err, ErrRankLost),
		errors.Is(err, ErrTimeout), errors.Is(err, ErrLeft), err)
	begun := time.Now()
	closed := g.Close()
	if closed == nil {
		return errors.New("Close returns nil after a failure")
	}
	// The collective has returned the reason, so Close must not repeat it.
	if e.Culprit >= 0 && (!strings.HasSuffix(closed.Error(), ": the job had failed before") ||
		errors.Is(closed, ErrRankLost) != errors.Is(err, ErrRankLost)) {
		return fmt.Errorf("Close repeats the failure, or is of another kind: %w", closed)
	}
	if took := time.Since(begun); took > 20*time.Second { // shorter than the job's limits
		return fmt.Errorf("Close took %v", took)
	}
	return nil
}

// requireErrors checks that the processes end, and that the errors of the ranks name the culprit.
// If speaks is false, requireErrors does not check the error of the culprit itself.
func requireErrors(t *testing.T, all []*process, culprit int, speaks bool, says ...string) {
	t.Helper()
	for _, p := range all {
		if p.rank == culprit && !speaks {
			continue
		}
		p.wait(t)
		text := p.output.String()
		if p.err != nil {
			t.Errorf("rank %d: %v\n%s\nwant nil", p.rank, p.err, text)
		}
		for _, want := range append(says, fmt.Sprintf("culprit %d", culprit)) {
			if !strings.Contains(text, want) {
				t.Errorf("rank %d does not say %q:\n%s", p.rank, want, text)
			}
		}
	}
}

func TestKilledRankIsNamed(t *testing.T) {
	for _, culprit := range []int{0, 2} {
		t.Run(fmt.Sprint(culprit), func(t *testing.T) {
			all := launchJob(t, 3, "reduce for ever")
			for _, p := range all {
				p.expect(t, "running")
			}
			all[culprit].Process.Kill()
			requireErrors(t, all, culprit, false, "lost=true", fmt.Sprintf("rank %d", culprit), "is lost: ",
				"AllReduce #", "failure_test.go:")
		})
	}
}

// A write to the socket of a dead rank sends SIGPIPE to the writing thread. The process must
// survive the signal on every thread of the group, and the call must return an error.
func TestBrokenPipesDoNotEndTheProcess(t *testing.T) {
	requireSuccess(t, launchJob(t, 2, "broken pipes"))
}

// brokenPipes sends SIGPIPE to every thread that Init starts. Go's own threads ignore the signal.
func brokenPipes(ctx context.Context) error {
	x := full(cuda.CPU, torch.Float32, 1, 1000)
	if err := x.Add(x).Err(); err != nil { // starts those of LibTorch's threads that do not belong to a group
		return err
	}
	before, err := os.ReadDir("/proc/self/task")
	if err != nil {
		return err
	}
	g, err := Init(ctx, patient)
	if err != nil {
		return err
	}
	after, err := os.ReadDir("/proc/self/task")
	if err != nil {
		return err
	}
	started := 0
	for _, task := range after {
		if slices.ContainsFunc(before, func(b os.DirEntry) bool { return b.Name() == task.Name() }) {
			continue
		}
		id, err := strconv.Atoi(task.Name())
		if err != nil {
			return err
		}
		name, err := os.ReadFile("/proc/self/task/" + task.Name() + "/comm")
		if err != nil || strings.HasPrefix(string(name), "cuda") {
			continue // the thread has ended or belongs to the driver
		}
		fmt.Printf("signals thread %d, %s", id, name)
		_, _, errno := syscall.Syscall(syscall.SYS_TGKILL, uintptr(os.Getpid()), uintptr(id), uintptr(syscall.SIGPIPE))
		if errno != 0 && errno != syscall.ESRCH { // the thread may have ended
			return errno
		}
		started++
	}
	if started == 0 {
		return errors.New("Init has started no thread")
	}
	return errors.Join(g.AllReduce(x, Sum), g.Close())
}

func TestStoppedRankIsNamed(t *testing.T) {
	t.Parallel()
	for _, culprit := range []int{0, 1} {
		t.Run(fmt.Sprint(culprit), func(t *testing.T) {
			t.Parallel()
			// Silence is longer than the pauses that a busy machine causes.
			all := launchJob(t, 3, "reduce for ever", silenceVariable+"=8s")
			for _, p := range all {
				p.expect(t, "running")
			}
			all[culprit].Process.Signal(syscall.SIGSTOP)
			requireErrors(t, all, culprit, false, "lost=true", "no sign of life for 8s", "AllReduce #")
		})
	}
}

// oneRankWaits has a rank that keeps running but never enters the collective.
func oneRankWaits(ctx context.Context) error {
	o := patient
	o.Timeout = 8 * time.Second
	g, err := Init(ctx, o)
	if err != nil {
		return err
	}
	x := full(cuda.CPU, torch.Float32, 1, 1000)
	if err := g.AllReduce(x, Sum); err != nil {
		return err
	}
	if g.Rank() == 1 {
		for g.Err() == nil {
			time.Sleep(10 * time.Millisecond)
		}
		return failedWith(g, g.Err())
	}
	if os.Getenv("BARRIER") != "" {
		err = g.Barrier()
	} else {
		err = g.AllReduce(x, Sum)
	}
	return failedWith(g, err)
}

func TestAbsentRankIsNamed(t *testing.T) {
	t.Parallel()
	for name, variable := range map[string]string{"Barrier #2": "BARRIER=1", "AllReduce #2": "BARRIER="} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			all := launchJob(t, 3, "one rank waits", variable)
			requireErrors(t, all, 1, true, "timeout=true", name, "rank 1", "AllReduce #1 at failure_test.go")
		})
	}
}

// leftBehind has a rank that closes its group while the others still use it.
func leftBehind(ctx context.Context) error {
	g, err := Init(ctx, patient)
	if err != nil {
		return err
	}
	if g.Rank() == 1 {
		if err := g.Close(); !errors.Is(err, ErrLeft) {
			return fmt.Errorf("Close: %w", err)
		}
		return nil
	}
	return failedWith(g, g.AllReduce(full(cuda.CPU, torch.Float32, 1, 10), Sum))
}

func TestRankThatLeavesIsNamed(t *testing.T) {
	all := launchJob(t, 3, "left behind")
	requireErrors(t, all, 1, false, "left=true", "rank 1", "closed its group at failure_test.go", "AllReduce #1")
	requireSuccess(t, all[1:2])
}

// cancelled has a rank whose context is cancelled while the others wait for it.
func cancelled(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	g, err := Init(ctx, patient)
	if err != nil {
		return err
	}
	if err := g.Barrier(); err != nil { // now every rank has its group
		return err
	}
	if g.Rank() == 2 {
		cancel(errors.New("the operator pressed a button"))
	}
	x := full(cuda.CPU, torch.Float32, 1, 10)
	for err == nil {
		err = g.AllReduce(x, Sum)
	}
	return failedWith(g, err)
}

func TestCancelledContextEndsTheJob(t *testing.T) {
	all := launchJob(t, 3, "cancelled")
	requireErrors(t, all, 2, true, "left=true", "rank 2", "the operator pressed a button")
}

// late waits for more ranks than were started.
func late(ctx context.Context) error {
	o := patient
	o.Timeout = 5 * time.Second
	_, err := Init(ctx, o)
	if err == nil || !errors.Is(err, ErrTimeout) || !strings.Contains(err.Error(), "rank 2 (it never connected)") {
		return fmt.Errorf("Init: %w", err)
	}
	return nil
}

func TestMissingRankIsNamed(t *testing.T) {
	all := launchJob(t, 2, "late", "WORLD_SIZE=3", "LOCAL_WORLD_SIZE=3")
	requireSuccess(t, all)
}

// nobodyServes waits for a rank 0 that has already ended.
func nobodyServes(ctx context.Context) error {
	if os.Getenv("RANK") == "0" {
		return nil
	}
	o := patient
	o.Timeout = time.Second
	begun := time.Now()
	_, err := Init(ctx, o)
	if took := time.Since(begun); took > patience {
		return fmt.Errorf("Init took %v", took)
	}
	if !errors.Is(err, ErrTimeout) {
		return fmt.Errorf("no timeout: %w", err)
	}
	fmt.Println(err)
	return nil
}

// Without rank 0 there is no store. The other ranks report this within the timeout, and LibTorch
// prints no warnings.
func TestMissingRankZeroIsNamed(t *testing.T) {
	all := launchJob(t, 2, "nobody serves")
	requireSuccess(t, all)
	text := all[1].output.String()
	if !strings.Contains(text, "rank 0 did not serve it within 1s") ||
		!strings.Contains(text, "connection refused") || strings.Count(text, "\n") != 1 {
		t.Error(text)
	}
}

func TestAddressThatDoesNotResolveIsNamed(t *testing.T) {
	o := quick
	o.CPU, o.Timeout = true, time.Second
	// RFC 2606
	o.Environment = &Environment{Launcher: "test", Rank: 1, Size: 2, LocalRank: 0, Address: "rank0.invalid",
		Port: freePort(t)}
	_, err := Init(t.Context(), o)
	if !errors.Is(err, ErrTimeout) || !strings.Contains(err.Error(), "set MASTER_ADDR") ||
		!strings.Contains(err.Error(), "rank0.invalid") {
		t.Error(err)
	}
}

func TestDebugNamesBothLines(t *testing.T) {
	o := quick
	o.Debug = true
	t.Run("equal", func(t *testing.T) {
		requireNone(t, inProcess(t, 2, o, func(g *Group) error { return exercise(g, cuda.CPU) }))
	})
	for name, c := range map[string]struct {
		run  func(g *Group) error
		says []string
	}{
		"shapes": {func(g *Group) error {
			return g.AllReduce(full(cuda.CPU, torch.Float32, 1, 3+int64(g.Rank())), Sum)
		}, []string{"AllReduce(float32[4] cpu, sum) #1", "AllReduce(float32[3] cpu, sum)", "rank 1", "rank 0"}},
		"order": {func(g *Group) error {
			x := full(cuda.CPU, torch.Float32, 1, 3)
			if g.Rank() == 0 {
				return g.Broadcast(x, 0)
			}
			return g.AllReduce(x, Max)
		}, []string{"AllReduce(float32[3] cpu, max)", "Broadcast(float32[3] cpu, 0)"}},
	} {
		t.Run(name, func(t *testing.T) {
			for rank, err := range inProcess(t, 2, o, c.run) {
				if !errors.Is(err, ErrMismatch) {
					t.Fatalf("rank %d: %v, want the error %v", rank, err, ErrMismatch)
				}
				for _, want := range append(c.says, "failure_test.go:") {
					if !strings.Contains(err.Error(), want) {
						t.Errorf("rank %d does not say %q: %v", rank, want, err)
					}
				}
			}
		})
	}
}

// Ranks with different options, or with different sizes of the job, are refused when they connect.
func TestUnequalOptionsAreRefused(t *testing.T) {
	port := freePort(t)
	errs := make(chan error, 2)
	for rank := range 2 {
		o := quick
		o.CPU, o.Debug = true, rank == 1
		o.Environment = &Environment{Launcher: "test", Rank: rank, Size: 2, LocalRank: rank, LocalSize: 2,
			Address: "127.0.0.1", Port: port}
		go func() {
			_, err := Init(context.Background(), o)
			errs <- err
		}()
	}
	for range 2 {
		if err := <-errs; !errors.Is(err, ErrMismatch) || !strings.Contains(err.Error(), "debug true") {
			t.Error(err)
		}
	}
}

// A store is freed only after the last call that uses it, even if that call was abandoned.
func TestStoreOutlivesAbandonedCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		port := freePort(t)
		store, err := capi.ConnectStore("127.0.0.1", port, true, "test", patience)
		if err != nil {
			t.Fatal(err)
		}
		serves := func() bool {
			conn, err := net.Dial("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
			if err == nil {
				conn.Close()
			}
			return err == nil
		}
		j := &job{connections: connections{store: store}}
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		answer := make(chan struct{})
		if _, err := await(ended, j, func() (none struct{}, err error) {
			<-answer
			return none, nil
		}, func(struct{}) {}); !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
		j.disconnect()
		synctest.Wait()
		if !serves() {
			t.Error("the store has stopped during a call, want it to serve until the call's end")
		}
		close(answer)
		synctest.Wait()
		if serves() {
			t.Error("the store still serves after the last call, want it stopped")
		}
	})
}
