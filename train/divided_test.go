package train_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/distributed"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/torch"
)

// dividedWay is the mode of ranks whose optimizers shard their state.
const dividedWay = "train with divided state"

// jobOptimizer returns the optimizer of a rank, or of a single process.
func jobOptimizer(world *distributed.Group, params []*torch.Tensor) (optim.Optimizer, error) {
	build := func(params []*torch.Tensor) (optim.Optimizer, error) {
		return optim.NewAdamW(params, optim.AdamWOptions{LR: 0.01})
	}
	if world == nil || os.Getenv(jobWay) != dividedWay {
		return build(params)
	}
	return distributed.NewZeroRedundancyOptimizer(world, params, build)
}

// checkpointFiles maps paths to the contents of a checkpoint's files.
type checkpointFiles map[string][]byte

// keptFiles returns the files of the checkpoint at path. It fails the test if there is only one.
func keptFiles(t *testing.T, path string) checkpointFiles {
	t.Helper()
	names, err := filepath.Glob(path + "*")
	if err != nil || len(names) < 2 {
		t.Fatalf("the files %v, %v, want no error, len(names) at least 2", names, err)
	}
	files := checkpointFiles{}
	for _, name := range names {
		if files[name], err = os.ReadFile(name); err != nil {
			t.Fatal(err)
		}
	}
	return files
}

func (k checkpointFiles) restore(t *testing.T) {
	t.Helper()
	for name, data := range k {
		if err := os.WriteFile(name, data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// A job whose ranks shard the optimizer's state writes the file that one process would write. It
// resumes with the bits of an uninterrupted job. Other numbers of ranks and a single process can
// read the file.
func TestShardedOptimizerResumesExactly(t *testing.T) {
	dir := t.TempDir()
	whole, part := filepath.Join(dir, "whole.pt"), filepath.Join(dir, "part.pt")
	want := startJob(t, 2, dividedWay, whole, 6)
	startJob(t, 2, dividedWay, part, 4)
	kept := keptFiles(t, part)
	for rank, got := range startJob(t, 2, dividedWay, part, 6) {
		if g, w := line(t, got, "first"), strings.Replace(line(t, want[rank], "first"), "first 0",
			"first 4", 1); g != w {
			t.Errorf("rank %d: %q, want %q", rank, g, w)
		}
	}
	for _, j := range []struct {
		size int
		way  string
	}{{3, dividedWay}, {2, "train"}} {
		kept.restore(t)
		for _, got := range startJob(t, j.size, j.way, part, 5) {
			if !strings.HasPrefix(line(t, got, "first"), "first 4 ") {
				t.Errorf("%d ranks, %s: %s", j.size, j.way, got)
			}
		}
	}
	kept.restore(t)
	c := dropoutJob(t, nil)
	if err := c.Load(part); err != nil || c.Metadata["step"] != "4" {
		t.Fatalf("%v, %v", c.Metadata, err)
	}
	state, err := c.Optimizer.State()
	if err != nil || len(state.Tensors) != 3*4 {
		t.Errorf("%d tensors of state, %v, want no error, len(state.Tensors) = %v",
			len(state.Tensors), err, 3*4)
	}
}
