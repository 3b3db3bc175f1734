//go:build linux

package distributed_test

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"math"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/distributed"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/torch"
	"github.com/torchstream/torchstream/train"
)

var (
	kills    = flag.Int("kills", 7, "how many faults TestKills makes")
	gpuKills = flag.Int("gpu-kills", 4, "how many faults TestGPUKills makes")
	killSeed = flag.Uint64("kill-seed", 0, "seed of the faults of TestKills and TestGPUKills; 0 draws one")
)

// killSteps is the number of training steps in TestKills.
const killSteps = 12

// killPatience is the time limit of a run that hangs.
const killPatience = 3 * time.Minute

// killSlack is the time by which a slow and busy machine may exceed the timeouts of TestKills'
// jobs. Timeouts and slack together are still less than the default timeouts.
const killSlack = time.Minute

// killOptions returns the options of TestKills' jobs. On a fast machine a whole job takes 2 s; the
// options allow a machine that is ten times slower. GPUs take longer to connect.
func killOptions(gpu bool) distributed.Options {
	if gpu {
		return distributed.Options{Timeout: 40 * time.Second, Silence: 5 * time.Second}
	}
	return distributed.Options{CPU: true, Timeout: 15 * time.Second, Silence: 6 * time.Second}
}

// faults maps the kinds of faults to functions that cause them on a rank. draw is a random number
// for the fault.
var faults = map[string]func(world *distributed.Group, draw int){
	"kill": func(*distributed.Group, int) { syscall.Kill(os.Getpid(), syscall.SIGKILL) },
	"stop": func(*distributed.Group, int) { syscall.Kill(os.Getpid(), syscall.SIGSTOP) },
	"cut":  func(_ *distributed.Group, draw int) { cutSocket(draw) },
	"disk": func(_ *distributed.Group, draw int) { fillDisk(draw) },
	// A straggler enters a collective late. A stuck rank never enters it.
	"straggle": func(*distributed.Group, int) { work(1 << 20) },
	"stuck": func(world *distributed.Group, _ int) {
		for world != nil && world.Err() == nil {
			work(1000)
		}
	},
}

// inLine lists the faults that block the rank's own goroutine, and thereby its next collective.
// Other faults happen at the same time as the rank's calls.
var inLine = map[string]bool{"straggle": true, "stuck": true, "disk": true}

// work computes for a time that depends on count.
func work(count int) {
	var sum [32]byte
	for range count {
		sum = sha256.Sum256(sum[:])
	}
	if sum == [32]byte{1} {
		fmt.Println(sum)
	}
}

// cutSocket closes one of the process's connections: to the store, the hub, or Gloo.
func cutSocket(draw int) {
	files, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return
	}
	var connected []int
	for _, f := range files {
		fd, err := strconv.Atoi(f.Name())
		if err != nil {
			continue
		}
		if peer, err := syscall.Getpeername(fd); err == nil {
			if _, ok := peer.(*syscall.SockaddrUnix); !ok {
				connected = append(connected, fd)
			}
		}
	}
	if len(connected) > 0 {
		syscall.Shutdown(connected[draw%len(connected)], syscall.SHUT_RDWR)
	}
}

// fillDisk limits the size of every file.
func fillDisk(draw int) {
	signal.Ignore(syscall.SIGXFSZ)
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_FSIZE, &limit); err == nil {
		limit.Cur = uint64(draw % 3000)
		syscall.Setrlimit(syscall.RLIMIT_FSIZE, &limit)
	}
}

// fault is a fault of one rank of a job. It happens before the given call in the rank's loop, after
// some work. A negative Call means before Init.
type fault struct {
	Kind       string
	Rank, Call int
	Work       int
	Draw       int  // random number for the fault
	GPU        bool // the job uses GPUs
	Sharded    bool // the ranks shard the parameters
}

const (
	faultVariable = "TORCHSTREAM_DIST_TEST_FAULT"
	pathVariable  = "TORCHSTREAM_DIST_TEST_PATH"
	faultSays     = "the fault begins"
	closesSays    = "closes its group"
)

func init() { distributed.AddWorker("training with a fault", trainingWithAFault) }

// trainingWithAFault trains from its checkpoint, and prints the weights or its error.
func trainingWithAFault(ctx context.Context) error {
	var f fault
	if err := json.Unmarshal([]byte(os.Getenv(faultVariable)), &f); err != nil {
		return err
	}
	mine := os.Getenv("RANK") == strconv.Itoa(f.Rank)
	call := -1
	at := func(world *distributed.Group) {
		if mine && call == f.Call {
			happen := func() {
				work(f.Work)
				fmt.Println(faultSays)
				faults[f.Kind](world, f.Draw)
			}
			if inLine[f.Kind] {
				happen()
			} else {
				go happen()
			}
		}
		call++
	}
	weights, err := trainFrom(ctx, os.Getenv(pathVariable), killOptions(f.GPU), f.Sharded, at)
	if err != nil {
		fmt.Println("failed:", err)
		return nil
	}
	text, err := json.Marshal(weights)
	fmt.Println("learned:", string(text))
	return err
}

// killedModel is the model that TestKills' jobs train.
type killedModel struct {
	model     nn.Module // saved in the checkpoint
	optimizer optim.Optimizer
	forward   func(x *torch.Tensor) *torch.Tensor
	state     func() ([]torch.Named, error)
	// start is called after the checkpoint is loaded.
	start    func() error
	backward func(loss *torch.Tensor) error
	end      func() error
}

func killedSGD(params []*torch.Tensor) (optim.Optimizer, error) {
	return optim.NewSGD(params, optim.SGDOptions{LR: 0.01, Momentum: 0.9})
}

// newKilledModel returns a model that is whole on every rank.
func newKilledModel(world *distributed.Group) (*killedModel, error) {
	net := nn.NewSequential(nn.NewLinear(6, 8, nn.LinearOptions{}), nn.NewTanh(),
		nn.NewLinear(8, 3, nn.LinearOptions{}))
	if err := errors.Join(nn.ToDType(net, torch.Float64), nn.To(net, world.Device())); err != nil {
		return nil, err
	}
	opt, err := killedSGD(nn.Parameters(net))
	if err != nil {
		return nil, err
	}
	var parallel *distributed.DataParallel
	return &killedModel{
		model: net, optimizer: opt, forward: net.Forward,
		state: func() ([]torch.Named, error) { return nn.State(net), nil },
		start: func() (err error) {
			parallel, err = distributed.NewDataParallel(world, net, distributed.DataParallelOptions{})
			return err
		},
		backward: func(loss *torch.Tensor) error { return parallel.Backward(loss) },
		end: func() error {
			if parallel == nil {
				return nil
			}
			return parallel.Close()
		},
	}, nil
}

// newShardedKilledModel returns a model that is sharded over the ranks.
func newShardedKilledModel(world *distributed.Group) (*killedModel, error) {
	net := nn.NewSequential(distributed.NewShardedBlock(nn.NewLinear(6, 8, nn.LinearOptions{})), nn.NewTanh(),
		distributed.NewShardedBlock(nn.NewLinear(8, 3, nn.LinearOptions{})))
	if err := nn.ToDType(net, torch.Float64); err != nil {
		return nil, err
	}
	sharded, err := distributed.NewFullyShardedDataParallel(world, net, distributed.FullyShardedOptions{})
	if err != nil {
		return nil, err
	}
	opt, err := sharded.NewOptimizer(killedSGD)
	if err != nil {
		return nil, err
	}
	return &killedModel{
		model: sharded, optimizer: opt, forward: sharded.Forward, state: sharded.State,
		start: func() error { return nil }, backward: sharded.Backward,
		end: func() error { return errors.Join(opt.Close(), sharded.Close()) },
	}, nil
}

// trainFrom trains until step killSteps. Before each call that involves other ranks, trainFrom
// calls the function that its parameter at holds.
func trainFrom(ctx context.Context, path string, o distributed.Options, sharded bool,
	at func(world *distributed.Group)) (weights []float64, err error) {
	at(nil)
	world, err := distributed.Init(ctx, o)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err == nil {
			fmt.Println(closesSays)
		}
		at(world)
		err = errors.Join(err, world.Close())
	}()
	if err := torch.ManualSeed(5); err != nil {
		return nil, err
	}
	newModel := newKilledModel
	if sharded {
		newModel = newShardedKilledModel
	}
	m, err := newModel(world)
	if err != nil {
		return nil, err
	}
	defer m.end()
	if err := torch.ManualSeed(uint64(6 + world.Rank())); err != nil {
		return nil, err
	}
	c := train.Checkpoint{Model: m.model, Optimizer: m.optimizer, Device: world.Device(), World: world}
	at(world)
	if err := c.Load(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	at(world)
	if err := m.start(); err != nil {
		return nil, err
	}
	first, _ := strconv.Atoi(c.Metadata["step"])
	var saving *train.Saving
	for step := first; step < killSteps; step++ {
		x, err := torch.Randn(world.Device(), torch.Float64, 4, 6)
		if err != nil {
			return nil, err
		}
		at(world)
		if err := m.backward(m.forward(x).Square().Mean()); err != nil {
			return nil, err
		}
		if err := errors.Join(m.optimizer.Step(), m.optimizer.ZeroGrad()); err != nil {
			return nil, err
		}
		at(world)
		if err := exchange(world, step); err != nil {
			return nil, err
		}
		if saving != nil {
			if err := saving.Wait(); err != nil {
				return nil, err
			}
		}
		c.Metadata = map[string]string{"step": strconv.Itoa(step + 1)}
		at(world)
		if saving, err = c.SaveAsync(path); err != nil {
			return nil, err
		}
	}
	if saving != nil {
		if err := saving.Wait(); err != nil {
			return nil, err
		}
	}
	state, err := m.state()
	if err != nil {
		return nil, err
	}
	for _, n := range state {
		values, err := n.Tensor.NoGrad().To(cuda.CPU).Float64s()
		if err != nil {
			return nil, err
		}
		weights = append(weights, values...)
	}
	return weights, nil
}

// exchange runs one of the collectives that training does not use.
func exchange(world *distributed.Group, step int) error {
	switch step % 4 {
	case 0:
		return world.Barrier()
	case 1:
		all, err := distributed.AllGatherObject(world, world.Rank())
		if err == nil && len(all) != world.Size() {
			err = fmt.Errorf("%v from %d ranks", all, world.Size())
		}
		return err
	case 2:
		x, err := torch.Zeros(world.Device(), torch.Float32, 1<<16)
		if err != nil {
			return err
		}
		defer x.Close()
		w, err := world.AllReduceAsync(x, distributed.Max)
		if err != nil {
			return err
		}
		return errors.Join(w.Wait(), w.Close())
	}
	_, err := world.Subgroup(1, 0)
	return err
}

// A fault may hit a rank at any moment, whether or not the model is sharded. Every other rank must
// end within the documented time, with an error that names a rank. The restarted job must compute
// the same weights as an uninterrupted job. A harmless fault changes nothing, for example a
// straggler within the time limits.
func TestKills(t *testing.T) {
	t.Parallel()
	makeFaults(t, *kills, 3, fault{Rank: -1}, "kill", "stop", "cut", "disk", "straggle", "stuck", "kill")
}

func TestGPUKills(t *testing.T) {
	cudatest.RequireGPUs(t, 2)
	makeFaults(t, *gpuKills, 2, fault{Rank: -1, GPU: true}, "kill", "stop", "disk", "cut")
}

// makeFaults causes faults of the given kinds in turn: as many as count says, in jobs with at least
// two and at most largest ranks.
func makeFaults(t *testing.T, count, largest int, none fault, kinds ...string) {
	t.Helper()
	seed := *killSeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("-kill-seed=%d makes these faults again", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	type job struct {
		size    int
		sharded bool
	}
	want := map[job][]float64{}
	for size := 2; size <= largest; size++ {
		for _, sharded := range []bool{false, true} {
			none.Sharded = sharded
			want[job{size, sharded}] = learned(t, launchTraining(t, size, filepath.Join(t.TempDir(), "whole.pt"), none))
		}
	}
	var mu sync.Mutex
	ended := map[string]int{}
	t.Cleanup(func() { t.Logf("of %d faults these ended the job: %v", count, ended) })
	for n := range count {
		size := 2 + random.IntN(largest-1)
		f := fault{Kind: kinds[n%len(kinds)], Rank: random.IntN(size), Call: random.IntN(3*killSteps+5) - 1,
			Work: random.IntN(1 << 12),
			// Each kind is tested with both models.
			Draw: random.IntN(1 << 16), GPU: none.GPU, Sharded: (n%len(kinds)+n/len(kinds))%2 == 1}
		if f.Kind == "disk" && !f.Sharded {
			f.Rank = 0 // rank 0 writes the checkpoint
		}
		if f.Call < 0 {
			f.Work = random.IntN(1 << 20) // during Init
		}
		none := none
		none.Sharded = f.Sharded
		name := fmt.Sprintf("%d %s rank %d of %d", n, f.Kind, f.Rank, size)
		if f.Sharded {
			name += ", divided"
		}
		t.Run(name, func(t *testing.T) {
			if !f.GPU { // jobs on GPUs share the GPUs
				t.Parallel()
			}
			t.Logf("%+v", f)
			path := filepath.Join(t.TempDir(), "last.pt")
			if kill(t, size, path, f) {
				mu.Lock()
				ended[f.Kind]++
				mu.Unlock()
			}
			requireWeights(t, size, learned(t, launchTraining(t, size, path, none)), want[job{size, f.Sharded}])
			want := 1
			if f.Sharded {
				want += size // one file for each rank
			}
			if left, _ := filepath.Glob(path + "*"); len(left) != want {
				t.Errorf("files are left: %v, want %v", left, want)
			}
		})
	}
}

func launchTraining(t *testing.T, size int, path string, f fault) []*distributed.Process {
	t.Helper()
	text, err := json.Marshal(f)
	if err != nil {
		t.Fatal(err)
	}
	return distributed.LaunchJob(t, size, "training with a fault", pathVariable+"="+path,
		faultVariable+"="+string(text))
}

// learned waits for the end of a training run. It returns the weights, which must be equal on all
// ranks.
func learned(t *testing.T, all []*distributed.Process) (weights []float64) {
	t.Helper()
	for rank, p := range all {
		p.Await("no such text", killPatience)
		_, text, ok := strings.Cut(p.Text(), "learned: ")
		var own []float64
		if !ok || json.Unmarshal([]byte(strings.TrimSpace(text)), &own) != nil {
			t.Fatalf("rank %d has not learned:\n%s", rank, p.Text())
		}
		if rank == 0 {
			weights = own
		}
		requireWeights(t, 2, own, weights)
	}
	return weights
}

// requireWeights compares weights. With three ranks, a resumed run may add gradients in a different
// order, because it rearranges its buckets again. The weights may then differ by rounding.
func requireWeights(t *testing.T, size int, got, want []float64) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%d weights, want %d", len(got), len(want))
	}
	for i := range want {
		if size == 2 && got[i] != want[i] || math.Abs(got[i]-want[i]) > 1e-14 {
			t.Fatalf("weight %d is %v, want %v", i, got[i], want[i])
		}
	}
}

// kill runs a job with a fault, and reports whether the fault ended the job.
func kill(t *testing.T, size int, path string, f fault) bool {
	t.Helper()
	all := launchTraining(t, size, path, f)
	victim := all[f.Rank]
	victim.Await(faultSays, killPatience) // or until the process has ended
	begun := time.Now()
	o := killOptions(f.GPU)
	limit := time.NewTimer(o.Timeout + o.Silence + killSlack)
	defer limit.Stop()
	failed := false
	for rank, p := range all {
		if rank == f.Rank && f.Kind == "stop" {
			continue // the process is stopped, or has finished
		}
		select {
		case <-p.Ended():
		case <-limit.C:
			t.Fatalf("rank %d has not ended %v after the fault:\n%s", rank, time.Since(begun), p.Text())
		}
		text := p.Text()
		if rank == f.Rank && f.Kind == "kill" && strings.Contains(text, faultSays) {
			failed = true
			continue
		}
		if strings.Contains(text, "learned: ") {
			continue
		}
		failed = true
		_, reason, ok := strings.Cut(text, "failed: ")
		named := fmt.Sprintf("rank %d", f.Rank)
		if f.Kind == "cut" { // the error may name either end of the connection
			named = "rank "
		}
		if !ok || rank != f.Rank && !strings.Contains(reason, named) {
			t.Errorf("rank %d does not name %q:\n%s", rank, named, text)
		}
	}
	if f.Kind == "stop" { // a launcher also kills a stopped process before it restarts the job
		victim.Process.Kill()
		<-victim.Ended()
	}
	// A rank that dies in Close may have finished training.
	closes := strings.Contains(victim.Text(), closesSays)
	for rank, p := range all {
		if failed && !closes && f.Kind != "cut" && strings.Contains(p.Text(), "learned: ") && rank != f.Rank {
			t.Errorf("rank %d has learned, and others have failed:\n%s", rank, p.Text())
		}
	}
	t.Logf("ended the job: %v, after %.1f s", failed, time.Since(begun).Seconds())
	return failed
}
