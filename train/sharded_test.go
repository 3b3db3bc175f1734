package train_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/distributed"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/torch"
	"github.com/torchstream/torchstream/train"
)

// shardedWay is the mode of ranks that shard the parameters.
const shardedWay = "train with sharded parameters"

// shardedNet returns a network of blocks, each wrapped by wrap.
func shardedNet(t *testing.T, wrap func(nn.Module) nn.Module) nn.Module {
	t.Helper()
	if err := torch.ManualSeed(7); err != nil {
		t.Fatal(err)
	}
	return nn.NewSequential(wrap(nn.NewSequential(nn.NewLinear(6, 9, nn.LinearOptions{}), nn.NewTanh())),
		wrap(nn.NewLinear(9, 5, nn.LinearOptions{})),
		wrap(nn.NewSequential(nn.NewBatchNorm1d(5, nn.BatchNormOptions{}), nn.NewLinear(5, 3, nn.LinearOptions{}))))
}

func buildAdamW(params []*torch.Tensor) (optim.Optimizer, error) {
	return optim.NewAdamW(params, optim.AdamWOptions{LR: 0.01})
}

// trainSharded trains one rank of a job with a Stepper and resumes from the file.
func trainSharded(t *testing.T, world *distributed.Group) {
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	net := shardedNet(t, func(m nn.Module) nn.Module { return distributed.NewShardedBlock(m) })
	sharded, err := distributed.NewFullyShardedDataParallel(world, net, distributed.FullyShardedOptions{})
	must(err)
	defer sharded.Close()
	opt, err := sharded.NewOptimizer(buildAdamW)
	must(err)
	defer opt.Close()
	ema, err := optim.NewEMA(nn.State(sharded), optim.EMAOptions{Decay: 0.7})
	must(err)
	defer ema.Close()
	c := &train.Checkpoint{Model: sharded, Optimizer: opt, EMA: ema, Device: cuda.CPU, World: world,
		Metadata: map[string]string{"step": "0"}}
	if err := c.Load(os.Getenv(jobPath)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	_, err = train.NewStepper(train.StepperOptions{Model: sharded, Optimizer: opt})
	require(t, err, "needs its Around as Backward")
	stepper, err := train.NewStepper(train.StepperOptions{Model: sharded, Optimizer: opt,
		Backward: sharded.Around, EMA: ema, ClipNorm: 0.1, Autocast: torch.BFloat16})
	must(err)
	defer stepper.Close()
	first, _ := strconv.Atoi(c.Metadata["step"])
	last, _ := strconv.Atoi(os.Getenv(jobSteps))
	for step := first; step < last; step++ {
		must(torch.ManualSeed(uint64(100*step + world.Rank())))
		x, err := torch.Randn(cuda.CPU, torch.Float32, 4, 6)
		must(err)
		labels, err := torch.FromInt64s([]int64{0, 1, 2, int64(step % 3)}, 4)
		must(err)
		_, _, err = stepper.Step(x, labels)
		must(errors.Join(err, x.Close(), labels.Close()))
		c.Metadata = map[string]string{"step": strconv.Itoa(step + 1)}
		saving, err := c.SaveAsync(os.Getenv(jobPath))
		must(err)
		must(saving.Wait())
	}
	state, err := sharded.State()
	must(err)
	averages, err := sharded.EMAState(ema)
	must(err)
	fmt.Println("first", first, "weights", digest(t, append(state, averages...)...))
	other, err := optim.NewEMA(nn.State(sharded)[:1], optim.EMAOptions{})
	must(err)
	defer other.Close()
	if world.Rank() == 0 {
		other = ema
	}
	_, err = sharded.EMAState(other)
	require(t, err, "an average of")
}

// A job whose ranks shard the parameters writes the file that one process would write. It resumes
// with the bits of an uninterrupted job. Other numbers of ranks and a single process can read the
// file.
func TestShardedParametersResumeExactly(t *testing.T) {
	dir := t.TempDir()
	whole, part := filepath.Join(dir, "whole.pt"), filepath.Join(dir, "part.pt")
	want := startJob(t, 2, shardedWay, whole, 6)
	startJob(t, 2, shardedWay, part, 4)
	kept := keptFiles(t, part)
	// The file does not have the running statistics of other ranks.
	got := startJob(t, 2, shardedWay, part, 6)[0]
	if g, w := line(t, got, "first"), strings.Replace(line(t, want[0], "first"), "first 0", "first 4", 1); g != w {
		t.Errorf("%q, want %q", g, w)
	}
	kept.restore(t)
	for _, got := range startJob(t, 3, shardedWay, part, 5) {
		if !strings.HasPrefix(line(t, got, "first"), "first 4 ") {
			t.Errorf("3 ranks: %s", got)
		}
	}
	kept.restore(t)
	net := shardedNet(t, func(m nn.Module) nn.Module { return m })
	defer nn.Close(net)
	opt, err := buildAdamW(nn.Parameters(net))
	if err != nil {
		t.Fatal(err)
	}
	defer opt.Close()
	ema, err := optim.NewEMA(nn.State(net), optim.EMAOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer ema.Close()
	c := &train.Checkpoint{Model: net, Optimizer: opt, EMA: ema, Device: cuda.CPU}
	if err := c.Load(part); err != nil || c.Metadata["step"] != "4" {
		t.Fatalf("%v, %v", c.Metadata, err)
	}
	state, err := opt.State()
	if err != nil || len(state.Tensors) != 3*8 {
		t.Errorf("%d tensors of state, %v, want no error, len(state.Tensors) = %v",
			len(state.Tensors), err, 3*8)
	}
}
