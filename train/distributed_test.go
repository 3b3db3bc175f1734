package train_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/distributed"
	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/internal/freeport"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/torch"
	"github.com/torchstream/torchstream/train"
)

// Environment variables of TestJobProcess.
const (
	jobWay   = "TORCHSTREAM_TEST_JOB"
	jobPath  = "TORCHSTREAM_TEST_JOB_PATH"
	jobSteps = "TORCHSTREAM_TEST_JOB_STEPS"
)

// TestJobProcess is a rank of the jobs below.
func TestJobProcess(t *testing.T) {
	way := os.Getenv(jobWay)
	if way == "" {
		t.Skip("other tests run it")
	}
	world, err := distributed.Init(t.Context(),
		distributed.Options{CPU: way != gpuDividedWay && way != gpuAroundWay, Timeout: 2 * time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	switch way {
	case "train", dividedWay:
		trainRank(t, world)
	case shardedWay:
		trainSharded(t, world)
	case gpuDividedWay:
		writeOnGPUs(t, world)
	case aroundWay, gpuAroundWay:
		stepAround(t, world)
	case memoryWay:
		measureMemory(t, world)
	case "errors":
		checkpointErrors(t, world)
	case "data":
		dataErrors(t, world)
	case badWay:
		trainOnBadSamples(t, world)
	}
	if err := world.Close(); err != nil {
		t.Error(err)
	}
}

// startJob is like runJob, but the job must not fail.
func startJob(t *testing.T, size int, way, path string, steps int) []string {
	t.Helper()
	said, errs := runJob(t, size, way, path, steps)
	for rank, err := range errs {
		if err != nil {
			t.Errorf("rank %d of %d: %v\n%s\nwant no error", rank, size, err, said[rank])
		}
	}
	if t.Failed() {
		t.FailNow()
	}
	return said
}

// runJob runs TestJobProcess as the ranks of a job until they exit. It returns their output and the
// errors of ranks that fail.
func runJob(t *testing.T, size int, way, path string, steps int) (said []string, errs []error) {
	t.Helper()
	port, err := freeport.Find()
	if err != nil {
		t.Fatal(err)
	}
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithTimeout(t.Context(), 4*time.Minute)
	defer stop()
	texts := make([]bytes.Buffer, size)
	var ranks []*exec.Cmd
	for rank := range size {
		c := exec.CommandContext(ctx, program, "-test.run=^TestJobProcess$", "-test.count=1")
		number := strconv.Itoa(rank)
		c.Env = append(os.Environ(), jobWay+"="+way, jobPath+"="+path, jobSteps+"="+strconv.Itoa(steps),
			"RANK="+number, "LOCAL_RANK="+number,
			"WORLD_SIZE="+strconv.Itoa(size), "LOCAL_WORLD_SIZE="+strconv.Itoa(size),
			"MASTER_ADDR=127.0.0.1", "MASTER_PORT="+strconv.Itoa(port), "OMP_NUM_THREADS=1")
		if os.Getenv("NCCL_NVLS_ENABLE") == "" { // multicast is shared by the whole machine
			c.Env = append(c.Env, "NCCL_NVLS_ENABLE=0")
		}
		c.Stdout, c.Stderr = &texts[rank], &texts[rank]
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		ranks = append(ranks, c)
	}
	for rank, c := range ranks {
		errs = append(errs, c.Wait())
		said = append(said, texts[rank].String())
	}
	return said, errs
}

// dropoutJob is a training run whose input and Dropout draw from the rank's generator.
func dropoutJob(t *testing.T, world *distributed.Group) *train.Checkpoint {
	t.Helper()
	if err := torch.ManualSeed(7); err != nil {
		t.Fatal(err)
	}
	net := nn.NewSequential(nn.NewLinear(6, 8, nn.LinearOptions{}), nn.NewReLU(), nn.NewDropout(0.5),
		nn.NewLinear(8, 3, nn.LinearOptions{}))
	opt, err := jobOptimizer(world, nn.Parameters(net))
	if err != nil {
		t.Fatal(err)
	}
	scheduler, err := optim.NewScheduler(opt, optim.CosineLR{Steps: 9})
	if err != nil {
		t.Fatal(err)
	}
	ema, err := optim.NewEMA(nn.State(net), optim.EMAOptions{Decay: 0.9})
	if err != nil {
		t.Fatal(err)
	}
	rank := 0
	if world != nil {
		rank = world.Rank()
	}
	if err := torch.ManualSeed(uint64(8 + rank)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ema.Close()
		opt.Close()
		nn.Close(net)
	})
	return &train.Checkpoint{Model: net, Optimizer: opt, Scheduler: scheduler, EMA: ema, Device: cuda.CPU,
		World: world, Metadata: map[string]string{"step": "0"}}
}

// digest is a checksum of tensors.
func digest(t *testing.T, tensors ...torch.Named) string {
	t.Helper()
	sum := sha256.New()
	for _, n := range tensors {
		b, err := n.Tensor.NoGrad().Bytes()
		if err != nil {
			t.Fatal(err)
		}
		sum.Write(b)
	}
	return fmt.Sprintf("%x", sum.Sum(nil)[:8])
}

func trainRank(t *testing.T, world *distributed.Group) {
	c := dropoutJob(t, world)
	if err := c.Load(os.Getenv(jobPath)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	parallel, err := distributed.NewDataParallel(world, c.Model, distributed.DataParallelOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer parallel.Close()
	first, _ := strconv.Atoi(c.Metadata["step"])
	last, _ := strconv.Atoi(os.Getenv(jobSteps))
	for step := first; step < last; step++ {
		x, err := torch.Randn(cuda.CPU, torch.Float32, 4, 6)
		if err != nil {
			t.Fatal(err)
		}
		err = errors.Join(parallel.Backward(c.Model.Forward(x).Square().Sum()), c.Optimizer.Step(),
			c.Optimizer.ZeroGrad(), c.Scheduler.Step(), c.EMA.Update())
		if err != nil {
			t.Fatal(err)
		}
		c.Metadata = map[string]string{"step": strconv.Itoa(step + 1)}
		saving, err := c.SaveAsync(os.Getenv(jobPath))
		if err != nil {
			t.Fatal(err)
		}
		if err := saving.Wait(); err != nil {
			t.Fatal(err)
		}
	}
	generator, err := torch.GeneratorState(cuda.CPU)
	if err != nil {
		t.Fatal(err)
	}
	defer generator.Close()
	fmt.Println("first", first, "weights", digest(t, append(nn.State(c.Model), c.EMA.State()...)...))
	fmt.Println("generator", digest(t, torch.Named{Tensor: generator}))
}

// line returns the line of a rank's output that starts with the word.
func line(t *testing.T, text, word string) string {
	t.Helper()
	for _, l := range strings.Split(text, "\n") {
		if strings.HasPrefix(l, word+" ") {
			return l
		}
	}
	t.Fatalf("no line %q in\n%s", word, text)
	return ""
}

// A job that is stopped and resumed has the same bits as an uninterrupted one: parameters, averages
// and each rank's generator. Jobs with other numbers of ranks can read its file too, and their
// additional ranks draw different random numbers.
func TestJobResumesExactly(t *testing.T) {
	dir := t.TempDir()
	whole, part := filepath.Join(dir, "whole.pt"), filepath.Join(dir, "part.pt")
	want := startJob(t, 2, "train", whole, 6)
	startJob(t, 2, "train", part, 4)
	kept, err := os.ReadFile(part)
	if err != nil {
		t.Fatal(err)
	}
	for rank, got := range startJob(t, 2, "train", part, 6) {
		if g, w := line(t, got, "first"), strings.Replace(line(t, want[rank], "first"), "first 0",
			"first 4", 1); g != w {
			t.Errorf("rank %d: %q, want %q", rank, g, w)
		}
		if g, w := line(t, got, "generator"), line(t, want[rank], "generator"); g != w {
			t.Errorf("rank %d: %q, want %q", rank, g, w)
		}
	}
	for _, size := range []int{1, 3} {
		if err := os.WriteFile(part, kept, 0o644); err != nil {
			t.Fatal(err)
		}
		drawn := map[string]bool{}
		for rank, got := range startJob(t, size, "train", part, 6) {
			generator := line(t, got, "generator")
			if rank < 2 && generator != line(t, want[rank], "generator") {
				t.Errorf("%d ranks: rank %d draws other numbers", size, rank)
			}
			drawn[generator] = true
			if !strings.HasPrefix(line(t, got, "first"), "first 4 ") {
				t.Errorf("%d ranks: %s", size, got)
			}
		}
		if len(drawn) != size {
			t.Errorf("%d ranks draw the numbers of %d", size, len(drawn))
		}
	}
	// A process without a job reads the file like rank 0.
	c := dropoutJob(t, nil)
	if err := os.WriteFile(part, kept, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := c.Load(part); err != nil || c.Metadata["step"] != "4" {
		t.Errorf("%v, %v", c.Metadata, err)
	}
}

// require checks that an error contains all of the texts.
func require(t *testing.T, err error, says ...string) {
	t.Helper()
	for _, want := range says {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: want %q", err, want)
		}
	}
}

// checkpointErrors causes errors on one rank. Both ranks must report each error and then continue.
func checkpointErrors(t *testing.T, world *distributed.Group) {
	c := dropoutJob(t, world)
	dir, mine := os.Getenv(jobPath), ""
	if world.Rank() == 1 {
		mine = "rank 0 could not write the checkpoint: "
	}
	nowhere := filepath.Join(dir, "none", "a.pt")
	require(t, c.Save(nowhere), mine, "none")
	saving, err := c.SaveAsync(nowhere)
	if err != nil {
		t.Fatal(err)
	}
	require(t, saving.Wait(), mine, "none")

	c.Loader = &imageloader.State{} // cannot be saved
	if world.Rank() == 0 {
		c.Loader = nil
		mine = "rank 1 has no checkpoint: "
	} else {
		mine = "no place in an epoch"
	}
	require(t, c.Save(filepath.Join(dir, "a.pt")), mine)
	if _, err := c.SaveAsync(filepath.Join(dir, "a.pt")); err == nil {
		t.Error("SaveAsync without the state of a rank: got no error, want one")
	}
	c.Loader = nil
	if err := c.Load(filepath.Join(dir, "a.pt")); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}

	for _, name := range []string{"a.pt", "b.pt"} {
		if err := c.Save(filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	name := []string{"a.pt", "none.pt"}[world.Rank()]
	require(t, c.Load(filepath.Join(dir, name)), "on the ranks 1, and there is one on the ranks 0",
		"all hosts need the same file")
	name = []string{"a.pt", "b.pt"}[world.Rank()]
	require(t, c.Load(filepath.Join(dir, name)), "is another checkpoint on rank 1 than on rank 0")
	if world.Rank() == 0 {
		if err := os.WriteFile(filepath.Join(dir, "bad.pt"), []byte("no zip"), 0o644); err != nil {
			t.Error(err)
		}
	}
	if err := world.Barrier(); err != nil {
		t.Fatal(err)
	}
	name = []string{"a.pt", "bad.pt"}[world.Rank()]
	if err := c.Load(filepath.Join(dir, name)); err == nil || errors.Is(err, fs.ErrNotExist) ||
		!strings.Contains(err.Error(), "bad.pt") {
		t.Error(err)
	}
	if err := c.Load(filepath.Join(dir, "a.pt")); err != nil {
		t.Error(err)
	}
}

func TestAllRanksReturnCheckpointErrors(t *testing.T) { startJob(t, 2, "errors", t.TempDir(), 0) }

// dataErrors gives the ranks loaders that do not match.
func dataErrors(t *testing.T, world *distributed.Group) {
	archives := strings.Split(os.Getenv(jobPath), ":")
	o := imageloader.Options{BatchSize: 4, Transform: imageloader.Eval(8, 8), Shuffle: true,
		Rank: world.Rank(), World: 2, NoIndex: true}
	check := func(path string, o imageloader.Options) error {
		loader, err := imageloader.Open(path, o)
		if err != nil {
			t.Fatal(err)
		}
		defer loader.Close()
		return train.CheckRanks(world, loader)
	}
	if err := check(archives[0], o); err != nil {
		t.Error(err)
	}
	err := check(archives[world.Rank()], o)
	require(t, err, "rank 1 reads "+archives[1]+", and rank 0 "+archives[0], "rank 1 has an archive of")
	if !errors.Is(err, distributed.ErrMismatch) {
		t.Error(err)
	}
	seeded := o
	seeded.Seed = uint64(world.Rank())
	require(t, check(archives[0], seeded), "rank 1 has Options.Seed 1, and not 0")
	o.Rank, o.World = 0, 1
	require(t, check(archives[0], o), "as rank 0 of 1: open its loader with Options.Rank and World from the group")
}

func TestRanksOfOtherArchivesAreNamed(t *testing.T) {
	first := archive(t)
	data, err := os.ReadFile(first)
	if err != nil {
		t.Fatal(err)
	}
	other := filepath.Join(t.TempDir(), "other.tar")
	if err := os.WriteFile(other, append(data, make([]byte, 512)...), 0o644); err != nil {
		t.Fatal(err)
	}
	startJob(t, 2, "data", first+":"+other, 0)
}
