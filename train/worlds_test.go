package train_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/distributed"
	"github.com/torchstream/torchstream/internal/freeport"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/torch"
	"github.com/torchstream/torchstream/train"
)

// inProcess runs n ranks on the CPU as goroutines of this process.
func inProcess(t *testing.T, n int, run func(world *distributed.Group) error) {
	t.Helper()
	for rank, err := range ranksInProcess(t, n, run) {
		if err != nil {
			t.Fatalf("rank %d of %d: %v, want no error", rank, n, err)
		}
	}
}

// ranksInProcess is inProcess for ranks that fail. It returns their errors.
func ranksInProcess(t *testing.T, n int, run func(world *distributed.Group) error) []error {
	t.Helper()
	port, err := freeport.Find()
	if err != nil {
		t.Fatal(err)
	}
	errs := make([]error, n)
	var all sync.WaitGroup
	for rank := range n {
		all.Go(func() {
			world, err := distributed.Init(t.Context(),
				distributed.Options{CPU: true, Timeout: 2 * time.Minute, Environment: &distributed.Environment{
					Launcher: "test", Rank: rank, Size: n, LocalRank: rank, LocalSize: n, Address: "127.0.0.1",
					Port: port}})
			if err == nil {
				err = errors.Join(run(world), world.Close())
			}
			errs[rank] = err
		})
	}
	all.Wait()
	return errs
}

// divided is a rank's part of a training run, or the whole run of a single process without a world.
type divided struct {
	*train.Checkpoint
	sharded *distributed.FullyShardedDataParallel
	opt     interface {
		optim.Optimizer
		Close() error
	}
}

// newDivided returns a network with parameters outside of blocks. The weight of one convolution is
// in a memory format that differs from the order of its dimensions.
func newDivided(world *distributed.Group, value float64) (*divided, error) {
	wrap := func(m nn.Module) nn.Module {
		if world != nil {
			return distributed.NewShardedBlock(m)
		}
		return m
	}
	conv, linear := nn.NewConv2d(3, 5, 3, nn.Conv2dOptions{}), nn.NewLinear(20, 7, nn.LinearOptions{})
	net := nn.NewSequential(wrap(conv), nn.NewSequential(nn.NewBatchNorm2d(5, nn.BatchNorm2dOptions{}),
		nn.NewFlatten()), wrap(linear))
	for i, p := range nn.Parameters(net) {
		if err := p.NoGrad().Fill_(value / float64(i+1)).Err(); err != nil {
			return nil, err
		}
	}
	if err := nn.ToMemoryFormat(net, torch.ChannelsLast); err != nil {
		return nil, err
	}
	d := &divided{Checkpoint: &train.Checkpoint{Model: net, Device: cuda.CPU, World: world}}
	if world != nil {
		d.Device = world.Device()
	}
	var err error
	if world == nil {
		d.opt, err = optim.NewAdamW(nn.Parameters(net), optim.AdamWOptions{LR: 0.01})
	} else if d.sharded, err = distributed.NewFullyShardedDataParallel(
		world, net, distributed.FullyShardedOptions{}); err == nil {
		d.Model = d.sharded
		d.opt, err = d.sharded.NewOptimizer(buildAdamW)
	}
	if err != nil {
		return nil, err
	}
	d.Optimizer = d.opt
	d.EMA, err = optim.NewEMA(nn.State(d.Model), optim.EMAOptions{Decay: 0.7})
	return d, err
}

func (d *divided) close() error {
	err := errors.Join(d.EMA.Close(), d.opt.Close())
	if d.sharded != nil {
		return errors.Join(err, d.sharded.Close())
	}
	return errors.Join(err, nn.Close(d.Model))
}

// inDivided runs n ranks as inProcess does, each with its part of a training run. value determines
// the parameters. If n is 0, inDivided runs a single process without a world.
func inDivided(t *testing.T, n int, value float64, run func(world *distributed.Group, d *divided) error) {
	t.Helper()
	rank := func(world *distributed.Group) error {
		d, err := newDivided(world, value)
		if err != nil {
			return err
		}
		return errors.Join(run(world, d), d.close())
	}
	if n > 0 {
		inProcess(t, n, rank)
	} else if err := rank(nil); err != nil {
		t.Fatal(err)
	}
}

// step trains on random numbers.
func (d *divided) step() error {
	x, err := torch.Randn(d.Device, torch.Float32, 4, 3, 4, 4)
	if err != nil {
		return err
	}
	defer x.Close()
	return errors.Join(d.sharded.Backward(d.sharded.Forward(x).Square().Mean()), d.opt.Step(), d.EMA.Update())
}

// bits returns the whole state, gathered from all ranks.
func (d *divided) bits() (string, error) {
	state, averages := nn.State(d.Model), d.EMA.State()
	var err error
	if d.sharded != nil {
		if state, err = d.sharded.State(); err != nil {
			return "", err
		}
		if averages, err = d.sharded.EMAState(d.EMA); err != nil {
			return "", err
		}
	}
	moments, err := d.opt.State()
	if err != nil {
		return "", err
	}
	var lines []string // sorted, since optimizers order their state differently
	for _, list := range [][]torch.Named{state, averages, moments.Tensors} {
		for _, n := range list {
			b := make([]byte, torch.Spec{DType: n.Tensor.DType(), Shape: n.Tensor.Shape()}.Bytes())
			if err := n.Tensor.NoGrad().ReadBytes(b); err != nil {
				return "", err
			}
			// differs between ranks
			if !strings.Contains(n.Name, "running") && !strings.Contains(n.Name, "num_batches") {
				lines = append(lines, fmt.Sprintf("%s %v %x", n.Name, n.Tensor.Shape(), b))
			}
		}
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n"), nil
}

// Jobs of one, two and three ranks write checkpoints. Jobs of one to four ranks and a single
// process read the same bits. A job continues from a file that another job wrote.
func TestShardedCheckpointLoadsOnAnyWorldSize(t *testing.T) {
	dir := t.TempDir()
	var from string
	for writers := 1; writers <= 3; writers++ {
		path := filepath.Join(dir, strconv.Itoa(writers)+".pt")
		var want string
		inDivided(t, writers, 1, func(world *distributed.Group, d *divided) error {
			if from != "" {
				if err := d.Load(from); err != nil {
					return err
				}
			}
			if err := errors.Join(d.step(), d.step()); err != nil {
				return err
			}
			saving, err := d.SaveAsync(path)
			if err != nil {
				return err
			}
			// Changes during the save must not affect the file.
			saved, err := d.bits()
			if world.Rank() == 0 {
				want = saved
			}
			err = errors.Join(err, d.step(), saving.Wait())
			changed, failed := d.bits()
			if changed == saved {
				failed = errors.New("the step has changed nothing")
			}
			return errors.Join(err, failed)
		})
		if names, err := filepath.Glob(path + "-*"); err != nil || len(names) != writers {
			t.Errorf("the files of %d ranks: %v, %v, want no error, len(names) = %v",
				writers, names, err, writers)
		}
		for readers := 0; readers <= 4; readers++ { // 0 means a single process
			inDivided(t, readers, 2, func(_ *distributed.Group, d *divided) error {
				if err := d.Load(path); err != nil {
					return err
				}
				got, err := d.bits()
				if err == nil && got != want {
					err = fmt.Errorf("%d ranks read what %d have written as\n%s, and it was\n%s", readers,
						writers, got, want)
				}
				return err
			})
		}
		from = path
	}
}

// If the path is on a different disk on each host, Load and Save return an error on all ranks. The
// error names the rank that does not see rank 0's file. A rank that cannot write is named too. The
// old checkpoint stays, and the job continues.
func TestRanksThatCannotWriteAreNamed(t *testing.T) {
	dir := t.TempDir()
	inDivided(t, 2, 1, func(world *distributed.Group, d *divided) error {
		path := filepath.Join(dir, "last.pt")
		// A new job with such a path gets the error before it trains.
		own := []string{path, filepath.Join(dir, "none", "last.pt")}[world.Rank()]
		if err := d.Load(own); err == nil || errors.Is(err, fs.ErrNotExist) ||
			!strings.Contains(err.Error(), "rank 1 ") ||
			!strings.Contains(err.Error(), "a folder that all hosts share") {
			return fmt.Errorf("%w: want the folder", err)
		}
		if err := d.Load(path); !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("%w: want a first run", err)
		}
		if err := d.Load(filepath.Join(dir, "nowhere", "last.pt")); !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("%w: want a first run, whose Save fails", err)
		}
		if err := errors.Join(d.step(), d.Save(path)); err != nil {
			return err
		}
		before, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		for _, save := range []func() error{
			func() error { return d.Save(own) },
			func() error { _, err := d.SaveAsync(own); return err },
		} {
			if err := save(); err == nil || !strings.Contains(err.Error(), "rank 1 ") ||
				!strings.Contains(err.Error(), "a folder that all hosts share") {
				return fmt.Errorf("%w: want the folder", err)
			}
		}
		// Files with the next checkpoint's number cannot be made, because their names exceed the
		// file name limit.
		long := filepath.Join(dir, strings.Repeat("n", 225))
		if err := d.Save(long); err == nil ||
			!strings.Contains(err.Error(), "rank 1 could not write the checkpoint: ") ||
			!strings.Contains(err.Error(), "rank00001") {
			return fmt.Errorf("%w: want the rank and its file", err)
		}
		if err := world.Barrier(); err != nil {
			return err
		}
		after, err := os.ReadFile(path)
		if err == nil && !bytes.Equal(before, after) {
			err = errors.New("the old checkpoint has changed")
		}
		if names, _ := filepath.Glob(filepath.Join(dir, "*")); err == nil && len(names) != 3 {
			err = fmt.Errorf("files are left: %v", names)
		}
		return errors.Join(err, d.Save(path), d.Load(path))
	})
}

// The file holds the whole model, and no shards, in two cases: if only some ranks of the job shard
// the model, and if the group that shards the model has the ranks in another order.
func TestSubgroupShardsAreWholeInTheFile(t *testing.T) {
	for _, ranks := range [][]int{{1, 0}, {0}} {
		path := filepath.Join(t.TempDir(), "last.pt")
		var want string
		inProcess(t, 2, func(world *distributed.Group) error {
			group, err := world.Subgroup(ranks...)
			if err == nil && group.Rank() < 0 {
				group, err = world.Subgroup(1)
			} else if len(ranks) == 1 {
				_, err = world.Subgroup(1)
			}
			if err != nil {
				return err
			}
			d, err := newDivided(group, 1)
			if err != nil {
				return err
			}
			defer d.close()
			d.World = world
			if err := errors.Join(d.step(), d.Save(path)); err != nil {
				return err
			}
			bits, err := d.bits()
			if world.Rank() == 0 {
				want = bits
			}
			return errors.Join(err, d.Load(path))
		})
		inDivided(t, 0, 2, func(_ *distributed.Group, d *divided) error {
			if err := d.Load(path); err != nil {
				return err
			}
			got, err := d.bits()
			if err == nil && got != want {
				err = fmt.Errorf("the group %v: a process alone reads\n%s, and it was\n%s", ranks, got, want)
			}
			return err
		})
	}
}

// Two checkpoints are written at once, each with the shards of all ranks. One rank finishes the
// first checkpoint first, another rank the second.
func TestCheckpointsOfSeveralPathsAtOnce(t *testing.T) {
	dir := t.TempDir()
	inDivided(t, 3, 1, func(world *distributed.Group, d *divided) error {
		if err := d.step(); err != nil {
			return err
		}
		for round := range 30 {
			var saving [3]*train.Saving
			for i := range saving {
				d.Metadata = map[string]string{"round": strconv.Itoa(round)}
				var err error
				if saving[i], err = d.SaveAsync(filepath.Join(dir, strconv.Itoa(i)+".pt")); err != nil {
					return err
				}
			}
			if err := errors.Join(saving[0].Wait(), saving[1].Wait(), saving[2].Wait()); err != nil {
				return fmt.Errorf("round %d: %w", round, err)
			}
		}
		return nil
	})
	if names, err := filepath.Glob(filepath.Join(dir, "*")); err != nil || len(names) != 3*4 {
		t.Errorf("%v, %v, want no error, len(names) = %v", names, err, 3*4)
	}
}

// If a rank's file is missing, Load returns an error, and not the fs.ErrNotExist of a first run.
func TestMissingRankFileIsAnError(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "last.pt")
	inDivided(t, 2, 1, func(world *distributed.Group, d *divided) error {
		if err := d.Save(path); err != nil {
			return err
		}
		if world.Rank() == 0 {
			names, _ := filepath.Glob(path + "-*-rank00001-*")
			if err := os.Remove(names[0]); err != nil {
				return err
			}
		}
		if err := world.Barrier(); err != nil {
			return err
		}
		if err := d.Load(path); err == nil || errors.Is(err, fs.ErrNotExist) ||
			!strings.Contains(err.Error(), "the file of rank 1 is missing") {
			return fmt.Errorf("%w: want the missing file", err)
		}
		return nil
	})
}

// A flipped bit in a rank's file is an error on all ranks that names the file and the tensor.
func TestDamagedFileOfARankIsFound(t *testing.T) {
	path := filepath.Join(t.TempDir(), "last.pt")
	inDivided(t, 2, 1, func(world *distributed.Group, d *divided) error {
		if err := errors.Join(d.step(), d.Save(path)); err != nil {
			return err
		}
		names, err := filepath.Glob(path + "-*-rank00001-*")
		if err != nil || len(names) != 1 {
			return fmt.Errorf("%v, %w", names, err)
		}
		if world.Rank() == 0 {
			data, err := os.ReadFile(names[0])
			if err != nil {
				return err
			}
			data[8+int(binary.LittleEndian.Uint64(data))] ^= 1 // the first byte of the tensor data
			if err := os.WriteFile(names[0], data, 0o644); err != nil {
				return err
			}
		}
		if err := world.Barrier(); err != nil {
			return err
		}
		err = d.Load(path)
		for _, says := range []string{filepath.Base(names[0]) + ", the file of rank 1: its bytes 0 to ",
			"are not those that were written", "ema.0.bias in "} {
			if err == nil || !strings.Contains(err.Error(), says) {
				return fmt.Errorf("%w: want %q", err, says)
			}
		}
		return nil
	})
}

// gpuDividedWay is the mode of ranks on GPUs that write and read a checkpoint together.
const gpuDividedWay = "write a checkpoint on GPUs"

func writeOnGPUs(t *testing.T, world *distributed.Group) {
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	d, err := newDivided(world, 1)
	must(err)
	defer d.close()
	path := os.Getenv(jobPath)
	if err := d.Load(path); !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	must(errors.Join(d.step(), d.step()))
	saving, err := d.SaveAsync(path)
	must(err)
	saved, err := d.bits()
	must(errors.Join(err, d.step(), saving.Wait()))
	changed, err := d.bits()
	must(err)
	must(d.Load(path))
	loaded, err := d.bits()
	must(err)
	if changed == saved || loaded != saved {
		t.Errorf("saved\n%s\nchanged\n%s\nloaded\n%s\nwant it changed, and loaded as saved", saved, changed,
			loaded)
	}
	must(d.Save(path))
	fmt.Println("bits", strings.ReplaceAll(saved, "\n", ";"))
}

// Ranks on GPUs write their shards during training, and read them again. A single process on the
// CPU reads the same bits.
func TestGPUDividedCheckpoint(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	path := filepath.Join(t.TempDir(), "last.pt")
	said := startJob(t, min(cuda.DeviceCount(), 2), gpuDividedWay, path, 0)
	inDivided(t, 0, 2, func(_ *distributed.Group, d *divided) error {
		if err := d.Load(path); err != nil {
			return err
		}
		got, err := d.bits()
		for rank, text := range said {
			if want := line(t, text, "bits"); err == nil && "bits "+strings.ReplaceAll(got, "\n", ";") != want {
				t.Errorf("rank %d: %s\nread on the CPU: %s", rank, want, got)
			}
		}
		return err
	})
}

// memoryWay is the mode of ranks that measure the memory for saving and loading.
const memoryWay = "measure the memory of checkpoints"

const (
	memoryBlocks = 16
	memoryWidth  = 1024
	// A block has a float32 weight and bias. AdamW has two moments of each, and an EMA one average.
	memoryWhole = 4 * 4 * memoryBlocks * memoryWidth * (memoryWidth + 1)
)

// statusBytes returns a field of this process's status in bytes (proc_pid_status(5)).
func statusBytes(t *testing.T, field string) int64 {
	t.Helper()
	text, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	var kib int64
	_, rest, _ := strings.Cut(string(text), field+":")
	if _, err := fmt.Sscan(rest, &kib); err != nil {
		t.Fatal(err)
	}
	return kib << 10
}

// highest returns the process's largest resident memory during call.
func highest(t *testing.T, call func() error) int64 {
	t.Helper()
	if err := os.WriteFile("/proc/self/clear_refs", []byte("5"), 0); err != nil { // resets VmHWM
		t.Skipf("the kernel does not measure the memory of a part of a program: %v", err)
	}
	if err := call(); err != nil {
		t.Fatal(err)
	}
	return statusBytes(t, "VmHWM")
}

func measureMemory(t *testing.T, world *distributed.Group) {
	var blocks []nn.Module
	for range memoryBlocks {
		blocks = append(blocks, distributed.NewShardedBlock(nn.NewLinear(memoryWidth, memoryWidth, nn.LinearOptions{})))
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	sharded, err := distributed.NewFullyShardedDataParallel(world, nn.NewSequential(blocks...),
		distributed.FullyShardedOptions{})
	must(err)
	defer sharded.Close()
	opt, err := sharded.NewOptimizer(buildAdamW)
	must(err)
	defer opt.Close()
	ema, err := optim.NewEMA(nn.State(sharded), optim.EMAOptions{})
	must(err)
	defer ema.Close()
	x, err := torch.Randn(cuda.CPU, torch.Float32, 2, memoryWidth)
	must(err)
	defer x.Close()
	must(errors.Join(sharded.Backward(sharded.Forward(x).Square().Mean()), opt.Step(), opt.ZeroGrad()))
	path := os.Getenv(jobPath)
	c := &train.Checkpoint{Model: sharded, Optimizer: opt, EMA: ema, Device: cuda.CPU, World: world}
	// Load is measured before SaveAsync, because the allocator keeps the memory that a call has
	// freed, and the process does not grow when a later call uses that memory.
	share, slack := int64(memoryWhole/world.Size()), int64(24<<20)
	first := statusBytes(t, "VmRSS")
	for _, of := range []struct {
		name string
		max  int64
		call func() error
	}{
		{"Save", slack, func() error { return c.Save(path) }},
		{"Load", share + slack, func() error { return c.Load(path) }},
		{"SaveAsync", share + slack, func() error {
			saving, err := c.SaveAsync(path)
			if err != nil {
				return err
			}
			return saving.Wait()
		}},
	} {
		before := statusBytes(t, "VmRSS")
		got := highest(t, of.call) - before
		fmt.Printf("%s: %d MiB of %d, a rank's share is %d\n", of.name, got>>20, memoryWhole>>20, share>>20)
		if got > of.max {
			t.Errorf("%s needs %d bytes of memory, and this rank's share of the state is %d, want at "+
				"most %v", of.name, got, share, of.max)
		}
	}
	// Control: the measurement must show the size of a whole state, which is above the limits. The
	// allocator may have kept memory of the calls above, so the control counts from before those
	// calls.
	whole := highest(t, func() error {
		_, err1 := sharded.State()
		_, err2 := opt.State()
		_, err3 := sharded.EMAState(ema)
		return errors.Join(err1, err2, err3)
	}) - first
	if least := max(share+slack, memoryWhole/2); whole <= least {
		t.Errorf("the whole state took %d bytes by this measure, want more than %d of its %d", whole, least,
			memoryWhole)
	}
}

// A rank's host holds no more than the rank's share of a checkpoint during save and load.
func TestShardedCheckpointNeedsOneShardOfMemory(t *testing.T) {
	said := startJob(t, 4, memoryWay, filepath.Join(t.TempDir(), "last.pt"), 0)
	t.Log(said[0])
}
