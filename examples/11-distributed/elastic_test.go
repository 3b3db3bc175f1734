//go:build linux

package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/internal/freeport"
	"github.com/torchstream/torchstream/internal/interrupt"
	"github.com/torchstream/torchstream/nn"
)

const (
	// checkpointVariable is the checkpoint's path, for a rank that reports its steps.
	checkpointVariable = "TORCHSTREAM_EXAMPLE_CHECKPOINT"
	// holdVariable names the rank that waits for its signal, and the number of steps before it
	// waits: "1:8". Without the wait the training might end before the signal.
	holdVariable = "TORCHSTREAM_EXAMPLE_HOLD"
	// aloneVariable is the number of steps after which a rank that trains alone waits for its
	// signal.
	aloneVariable = "TORCHSTREAM_EXAMPLE_ALONE"
)

const (
	images        = 576
	globalBatches = images / 24 // per epoch
)

// report is a step, as a rank prints it.
type report struct {
	Rank, World, Epoch, Batch int
	PID                       int
	Names                     []string
	Pixels                    uint32 // a checksum
	Weights                   []parameter
	Loss                      float64
}

// parameter is a parameter after a step.
type parameter struct {
	Name string
	Bits uint32 // a checksum
	Sum  float64
}

const reportPrefix = "step "

// reportSteps prints every step, and writes a checkpoint after every third. After the step in
// holdVariable it waits until the context or the process ends.
func reportSteps(ctx context.Context, o options) options {
	o.checkpoint, o.every, o.epochs = os.Getenv(checkpointVariable), 3, 2
	victim, after := -1, 0
	if restarts := os.Getenv("TORCHELASTIC_RESTART_COUNT"); restarts == "" || restarts == "0" {
		fmt.Sscanf(os.Getenv(holdVariable), "%d:%d", &victim, &after)
	}
	world, _ := strconv.Atoi(os.Getenv("WORLD_SIZE"))
	if alone, err := strconv.Atoi(os.Getenv(aloneVariable)); err == nil && world == 1 {
		victim, after = 0, alone
	}
	steps := 0
	o.onStep = func(s step) error {
		loss, err := s.loss.Float64s()
		if err != nil {
			return err
		}
		onHost := s.images.To(cuda.CPU)
		defer onHost.Close()
		pixels, err := onHost.Bytes()
		if err != nil {
			return err
		}
		r := report{Rank: s.rank, World: world, Epoch: s.epoch, Batch: s.batch, PID: os.Getpid(),
			Pixels: crc32.ChecksumIEEE(pixels), Loss: loss[0]}
		for _, sample := range s.info.Samples {
			r.Names = append(r.Names, sample.Name)
		}
		if r.Weights, err = parametersOf(s.net); err != nil {
			return err
		}
		text, err := json.Marshal(r)
		fmt.Printf("%s%s\n", reportPrefix, text)
		if steps++; s.rank == victim && steps == after {
			<-ctx.Done()
		}
		return err
	}
	return o
}

func parametersOf(net nn.Module) (all []parameter, err error) {
	for _, n := range nn.NamedParameters(net) {
		onHost := n.Tensor.Detach().To(cuda.CPU)
		defer onHost.Close()
		bits, err := onHost.Bytes()
		if err != nil {
			return nil, err
		}
		values, err := onHost.Float64s()
		if err != nil {
			return nil, err
		}
		p := parameter{Name: n.Name, Bits: crc32.ChecksumIEEE(bits)}
		for _, v := range values {
			p.Sum += v
		}
		all = append(all, p)
	}
	return all, nil
}

// leavesLine is printed by each rank that a signal ends.
const leavesLine = "leaves by a signal"

// runRank runs a rank of a test in a separate process.
func runRank(o options) int {
	ctx, stop := interrupt.Context(grace)
	defer stop()
	if os.Getenv(checkpointVariable) != "" {
		o = reportSteps(ctx, o)
	}
	r, err := run(ctx, o, os.Stdout)
	switch {
	case errors.Is(err, errTerminated):
		fmt.Println(leavesLine)
		return interrupt.Status
	case err != nil:
		fmt.Println(err)
		return 1
	}
	n := len(r.losses)
	fmt.Println("learned", n > 0 && r.losses[n-1] < r.losses[0], r.weights)
	return 0
}

// rank is a process of a job.
type rank struct {
	*exec.Cmd
	lines chan string // closed at the end
	text  strings.Builder
	steps []report
	err   error
}

// start starts the ranks of a job on "cpu" or "gpu". They end with the test at the latest. The
// part's victim waits for its signal.
func start(t *testing.T, device string, c part, checkpoint string) []*rank {
	t.Helper()
	port, err := freeport.Find()
	if err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithTimeout(t.Context(), patience)
	ranks := make([]*rank, c.world)
	for n := range ranks {
		r := &rank{Cmd: exec.CommandContext(ctx, self), lines: make(chan string, 1024)}
		number := strconv.Itoa(n)
		r.Env = append(os.Environ(), variable+"="+device, checkpointVariable+"="+checkpoint, "RANK="+number,
			"LOCAL_RANK="+number,
			"WORLD_SIZE="+strconv.Itoa(c.world), "LOCAL_WORLD_SIZE="+strconv.Itoa(c.world),
			"MASTER_ADDR=127.0.0.1", "MASTER_PORT="+strconv.Itoa(port), "OMP_NUM_THREADS=1",
			fmt.Sprintf("%s=%d:%d", holdVariable, c.victim, c.after))
		out, err := r.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		r.Stderr = r.Stdout
		if err := r.Start(); err != nil {
			t.Fatal(err)
		}
		go func() {
			defer close(r.lines)
			for s := bufio.NewScanner(out); s.Scan(); {
				r.lines <- s.Text()
			}
			r.err = r.Wait()
		}()
		ranks[n] = r
	}
	t.Cleanup(func() {
		stop()
		for _, r := range ranks {
			for range r.lines {
			}
		}
	})
	return ranks
}

// follow reads the ranks' output until they end. It sends the signal to the part's victim after the
// victim's last step.
func follow(t *testing.T, ranks []*rank, c part, signal os.Signal) {
	t.Helper()
	var all sync.WaitGroup
	for n, r := range ranks {
		all.Go(func() {
			for line := range r.lines {
				r.text.WriteString(line + "\n")
				text, isStep := strings.CutPrefix(line, reportPrefix)
				if !isStep {
					continue
				}
				var s report
				if err := json.Unmarshal([]byte(text), &s); err != nil {
					t.Errorf("%q: %v, want no error", line, err)
				}
				r.steps = append(r.steps, s)
				if n == c.victim && len(r.steps) == c.after {
					r.Process.Signal(signal)
				}
			}
		})
	}
	all.Wait()
}

// place is a global batch.
type place struct{ epoch, batch int }

// history records the steps of a training run at each place.
type history struct {
	names  map[place][]string
	losses map[place]float64
	pixels map[place][]uint32 // indexed by rank
}

func newHistory() history {
	return history{map[place][]string{}, map[place]float64{}, map[place][]uint32{}}
}

// add adds the steps that all ranks have completed. They replace earlier steps at the same places,
// which were lost because the run resumed from a checkpoint.
func (h history) add(t *testing.T, ranks []*rank) {
	t.Helper()
	count := len(ranks[0].steps)
	for _, r := range ranks {
		count = min(count, len(r.steps))
	}
	for i := range count {
		at := place{ranks[0].steps[i].Epoch, ranks[0].steps[i].Batch}
		var names []string
		var pixels []uint32
		loss := 0.0
		for _, r := range ranks {
			s := r.steps[i]
			if (place{s.Epoch, s.Batch}) != at {
				t.Fatalf("rank %d is at %d, %d, and rank 0 at %v", s.Rank, s.Epoch, s.Batch, at)
			}
			requireSameWeights(t, s, ranks[0].steps[i])
			names, pixels, loss = append(names, s.Names...), append(pixels, s.Pixels), loss+s.Loss/float64(len(ranks))
		}
		slices.Sort(names)
		h.names[at], h.losses[at] = names, loss
		h.pixels[at] = pixels
	}
}

// requireSameWeights compares the parameters of two ranks after a step.
func requireSameWeights(t *testing.T, got, want report) {
	t.Helper()
	for i, p := range got.Weights {
		if w := want.Weights[i]; p.Bits != w.Bits {
			t.Fatalf("epoch %d, after batch %d: %s differs on the ranks %d and %d: their sums are %v and %v",
				got.Epoch, got.Batch, p.Name, got.Rank, want.Rank, p.Sum, w.Sum)
		}
	}
}

// requireEnd requires that the ranks have finished training with equal weights.
func requireEnd(t *testing.T, ranks []*rank) {
	t.Helper()
	for n, r := range ranks {
		if r.err != nil || !strings.Contains(r.text.String(), "learned ") {
			t.Fatalf("rank %d: %v, want nil and \"learned \" in\n%s", n, r.err, r.text.String())
		}
	}
}

// requireEqual compares an interrupted training run with an uninterrupted one. At each place both
// must have the same samples, and losses that differ only by rounding, because the order of a
// reduction may differ. Each sample must occur once per epoch. Where the same number of ranks
// shared a batch, each rank must have the same pixels.
func requireEqual(t *testing.T, got, want history, rounding float64) {
	t.Helper()
	if len(want.names) != 2*globalBatches {
		t.Fatalf("%d places, want %v", len(want.names), 2*globalBatches)
	}
	if !reflect.DeepEqual(got.names, want.names) {
		t.Errorf("the batches have the samples\n%v\nwant\n%v", got.names, want.names)
	}
	for epoch := range 2 {
		seen := map[string]int{}
		for at, names := range got.names {
			for _, name := range names {
				if at.epoch == epoch {
					seen[name]++
				}
			}
		}
		for name, n := range seen {
			if n != 1 {
				t.Errorf("epoch %d has %s %d times, want 1", epoch, name, n)
			}
		}
		if len(seen) != images {
			t.Errorf("epoch %d has %d samples of %d", epoch, len(seen), images)
		}
	}
	largest := 0.0
	for at, loss := range want.losses {
		largest = max(largest, math.Abs(got.losses[at]-loss))
	}
	t.Logf("losses differ by %.2g at most", largest)
	if !(largest < rounding) {
		t.Errorf("losses differ by %g", largest)
	}
	for at, pixels := range got.pixels {
		if len(pixels) == len(want.pixels[at]) && !slices.Equal(pixels, want.pixels[at]) {
			t.Errorf("%v: a rank's batch has other pixels", at)
		}
	}
}

// If the processes of a training run are killed, fewer or more processes can resume from the
// checkpoint, and get the results of an uninterrupted run.
func TestElastic(t *testing.T) {
	if testing.Short() {
		t.Skip("trains five times")
	}
	elastic(t, "cpu", 1e-4, part{3, 1, 8}, part{2, 0, 7}, part{3, 2, 13}, part{2, 1, 4}, part{3, -1, 0})
}

// On GPUs the losses may differ more, because a GPU uses other matrix kernels for other batch
// sizes.
func TestGPUElastic(t *testing.T) {
	cudatest.RequireGPUs(t, 2)
	elastic(t, "gpu", 0.02, part{2, 1, 8}, part{1, 0, 7}, part{2, 0, 13}, part{1, 0, 4}, part{2, -1, 0})
}

// part is a part of a training run: its number of ranks, the rank that gets a signal (-1 for none),
// and the number of steps before the signal.
type part struct{ world, victim, after int }

func elastic(t *testing.T, device string, rounding float64, parts ...part) {
	t.Helper()
	want := newHistory()
	whole := part{world: parts[0].world, victim: -1}
	ranks := start(t, device, whole, filepath.Join(t.TempDir(), "whole.pt"))
	follow(t, ranks, whole, nil)
	want.add(t, ranks)
	requireEnd(t, ranks)

	got, path := newHistory(), filepath.Join(t.TempDir(), "last.pt")
	for part, c := range parts {
		ranks := start(t, device, c, path)
		follow(t, ranks, c, os.Kill)
		got.add(t, ranks)
		if c.victim < 0 {
			requireEnd(t, ranks)
			continue
		}
		for n, r := range ranks {
			text := r.text.String()
			if n == c.victim {
				continue
			}
			if r.err == nil || !strings.Contains(text, fmt.Sprintf("rank %d", c.victim)) ||
				!strings.Contains(text, "is lost") {
				t.Errorf("part %d: rank %d: %v, want an error that rank %d is lost\n%s",
					part, n, r.err, c.victim, text)
			}
			if part > 0 && n == 0 && !strings.Contains(text, "goes on in epoch") {
				t.Errorf("part %d begins anew\n%s", part, text)
			}
		}
	}
	requireEqual(t, got, want, rounding)
}

// SIGTERM to one rank ends all ranks after the same step, with a checkpoint after that step.
func TestTerminated(t *testing.T) {
	path := filepath.Join(t.TempDir(), "last.pt")
	c := part{2, 1, 4}
	ranks := start(t, "cpu", c, path)
	follow(t, ranks, c, syscall.SIGTERM)
	last := ranks[0].steps[len(ranks[0].steps)-1]
	for n, r := range ranks {
		var exit *exec.ExitError
		if !errors.As(r.err, &exit) || exit.ExitCode() != interrupt.Status {
			t.Errorf("rank %d: %v\n%s", n, r.err, r.text.String())
		}
		if got := r.steps[len(r.steps)-1]; got.Epoch != last.Epoch || got.Batch != last.Batch {
			t.Errorf("rank %d left after batch %d of epoch %d, rank 0 after batch %d of epoch %d", n,
				got.Batch, got.Epoch, last.Batch, last.Epoch)
		}
	}
	o := small()
	o.checkpoint, o.epochs, o.dist.Environment = path, last.Epoch+1, alone()
	var out bytes.Buffer
	if _, err := run(t.Context(), o, &out); err != nil {
		t.Fatal(err)
	}
	if want := fmt.Sprintf("goes on in epoch %d after batch %d", last.Epoch+1,
		last.Batch); !strings.Contains(out.String(), want) {
		t.Errorf("%q is not in\n%s", want, out.String())
	}
}

// torchrunPython returns a Python with torchrun, or skips the test.
func torchrunPython(t *testing.T) string {
	t.Helper()
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("needs python3")
	}
	if err := exec.Command(python, "-c", "import torch.distributed.run").Run(); err != nil {
		t.Skip("needs a python3 with torch")
	}
	return python
}

// torchrun restarts the ranks when one is killed, and they resume from the checkpoint. The test
// needs a Python with torch.
func TestTorchrunRestarts(t *testing.T) {
	python := torchrunPython(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithTimeout(t.Context(), patience)
	defer stop()
	c := exec.CommandContext(ctx, python, "-m", "torch.distributed.run", "--standalone",
		"--local-addr=127.0.0.1", "--nproc-per-node=2", "--max-restarts=1", "--no-python", self)
	c.Env = append(os.Environ(), variable+"=cpu",
		checkpointVariable+"="+filepath.Join(t.TempDir(), "last.pt"), holdVariable+"=1:8", "OMP_NUM_THREADS=1")
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	c.Stderr = c.Stdout
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	var text strings.Builder
	steps := 0
	for lines := bufio.NewScanner(out); lines.Scan(); {
		step, isStep := strings.CutPrefix(lines.Text(), reportPrefix)
		var r report
		if !isStep || json.Unmarshal([]byte(step), &r) != nil {
			text.WriteString(lines.Text() + "\n")
		} else if r.Rank == 1 {
			if steps++; steps == 8 {
				syscall.Kill(r.PID, syscall.SIGKILL)
			}
		}
	}
	if err := c.Wait(); err != nil {
		t.Fatalf("%v, want no error\n%s", err, text.String())
	}
	for _, want := range []string{"goes on in epoch 1 after batch ", "rank 1 (pid ", "is lost"} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("%q is not in\n%s", want, text.String())
		}
	}
	if n := strings.Count(text.String(), "learned "); n != 2 {
		t.Errorf("%d ranks have learned, want 2\n%s", n, text.String())
	}
}

// agent is a torchrun with one process. It simulates a host.
type agent struct {
	*exec.Cmd
	lines chan string // closed at the end
}

// startAgent starts a torchrun that trains with one host or two. The first one has the store for
// the hosts' rendezvous. TORCH_DISABLE_SHARE_RDZV_TCP_STORE makes rank 0 host the ranks' store and
// announce it after each start. Without it, torchrun hosts the store and announces it only after
// the first start.
func startAgent(ctx context.Context, t *testing.T, python string, port int, checkpoint string, first bool,
	env ...string) *agent {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	a := &agent{exec.CommandContext(ctx, python, "-m", "torch.distributed.run", "--nnodes=1:2",
		"--nproc-per-node=1", "--max-restarts=3", "--rdzv-id=scales",
		"--rdzv-backend=c10d", fmt.Sprintf("--rdzv-endpoint=127.0.0.1:%d", port), "--local-addr=127.0.0.1",
		"--monitor-interval=0.1", "--no-python",
		fmt.Sprintf("--rdzv-conf=is_host=%t,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3", first), self),
		make(chan string, 1024)}
	a.Env = append(os.Environ(), variable+"=cpu", checkpointVariable+"="+checkpoint, aloneVariable+"=5",
		"OMP_NUM_THREADS=1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1")
	a.Env = append(a.Env, env...)
	out, err := a.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	a.Stderr = a.Stdout
	if err := a.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(a.lines)
		for s := bufio.NewScanner(out); s.Scan(); {
			a.lines <- s.Text()
		}
	}()
	return a
}

// When a host dies the other one continues, and a new host can join. torchrun restarts the ranks
// each time, and they resume from the checkpoint with the results of an uninterrupted training.
func TestTorchrunScales(t *testing.T) {
	python := torchrunPython(t)
	port, err := freeport.Find()
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithTimeout(t.Context(), patience)
	defer stop()
	want := newHistory()
	whole := part{world: 2, victim: -1}
	ranks := start(t, "cpu", whole, filepath.Join(t.TempDir(), "whole.pt"))
	follow(t, ranks, whole, nil)
	want.add(t, ranks)

	checkpoint := filepath.Join(t.TempDir(), "last.pt")
	stays := startAgent(ctx, t, python, port, checkpoint, true)
	other := startAgent(ctx, t, python, port, checkpoint, false)
	var text strings.Builder
	processes := map[int]*rank{} // by PID
	var order []int
	steps := func(line string) (r report, ok bool) {
		step, isStep := strings.CutPrefix(line, reportPrefix)
		if !isStep || json.Unmarshal([]byte(step), &r) != nil {
			text.WriteString(line + "\n")
			return r, false
		}
		if processes[r.PID] == nil {
			processes[r.PID] = &rank{}
			order = append(order, r.PID)
		}
		processes[r.PID].steps = append(processes[r.PID].steps, r)
		return r, true
	}
	t.Cleanup(func() {
		for pid := range processes {
			if t.Failed() { // a rank may wait for a signal that torchrun no longer sends
				syscall.Kill(pid, syscall.SIGKILL)
			}
		}
	})
	died, came := false, false // the other host
	for stays.lines != nil || other.lines != nil {
		select {
		case line, open := <-stays.lines:
			if !open {
				stays.lines = nil
				break
			}
			if r, ok := steps(line); ok && died && !came && r.World == 1 && len(processes[r.PID].steps) == 5 {
				came = true
				other.Wait() // it was killed
				other = startAgent(ctx, t, python, port, checkpoint, false)
			}
		case line, open := <-other.lines:
			if !open {
				other.lines = nil
				break
			}
			if r, ok := steps(line); ok && !died && len(processes[r.PID].steps) == 8 {
				died = true
				other.Process.Kill()
				syscall.Kill(r.PID, syscall.SIGKILL)
			}
		}
	}
	if err := errors.Join(stays.Wait(), other.Wait()); err != nil {
		t.Fatalf("%v, want no error\n%s", err, text.String())
	}
	var worlds []int
	got := newHistory()
	for i := 0; i < len(order); {
		first := processes[order[i]]
		world := first.steps[0].World
		if i+world > len(order) {
			t.Fatalf("%d of %d ranks have trained, want all\n%s", len(order)-i, world, text.String())
		}
		together := make([]*rank, world)
		for n := range together {
			p := processes[order[i+n]]
			together[p.steps[0].Rank] = p
		}
		got.add(t, together)
		worlds = append(worlds, world)
		i += world
	}
	if n := len(worlds); n < 3 || !slices.Equal(worlds[n-3:], []int{2, 1, 2}) {
		t.Errorf("trained with %v ranks, want 2, 1, 2 at the end\n%s", worlds, text.String())
	}
	if n := strings.Count(text.String(), "learned "); n != 2 {
		t.Errorf("%d ranks have learned, want 2\n%s", n, text.String())
	}
	requireEqual(t, got, want, 1e-4)
}
