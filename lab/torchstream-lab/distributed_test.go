package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"math"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/distributed"
	"github.com/torchstream/torchstream/internal/clitest"
	"github.com/torchstream/torchstream/internal/collectives"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/torch"
)

// Two processes on the CPU measure everything, and PyTorch too if this machine has it.
func TestBenchDist(t *testing.T) {
	args := []string{"distributed", "-json", "-ranks", "2", "-cpu", "-mib", "1", "-rounds", "1", "-steps",
		"1", "-models", "resnet18", "-batches", "2", "-size", "32",
		"-sharded", tinyGPT, "-sequences", "1", "-context", "8", "-sharded-steps", "1", "-archive",
		clitest.FewPhotos(t, map[string]int{"a": 8, "b": 8}), "-workers", "1"}
	if _, err := exec.LookPath("python3"); err != nil {
		args = append(args, "-python", "")
	}
	c, stderr := clitest.Process(t, args...)
	out, err := c.Output()
	if err != nil {
		t.Fatalf("%v, want no error\n%s", err, stderr)
	}
	var report distReport
	decoder := json.NewDecoder(bytes.NewReader(out))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&report); err != nil {
		t.Fatal(err)
	}
	t.Log(report.PythonNote)
	peer := report.PythonNote == ""
	// For two ranks, from nccl-tests' doc/PERFORMANCE.md.
	factors := map[string]float64{"all-reduce": 1, "reduce-scatter": 0.5, "all-gather": 0.5, "broadcast": 1,
		"all-to-all": 0.5}
	if len(report.Collectives) != len(factors) {
		t.Errorf("collectives: %s, want %d", out, len(factors))
	}
	for _, row := range report.Collectives {
		times := []*collectives.Times{&row.Times}
		if peer {
			times = append(times, row.PyTorch)
		}
		for _, took := range times {
			want := factors[row.Name] * (1 << 20) / 1e6
			if took == nil || took.MS <= 0 || math.Abs(took.BusGBps*took.MS/want-1) > 1e-9 || row.Bytes != 1<<20 {
				t.Errorf("%s of %d bytes: %+v", row.Name, row.Bytes, took)
			}
		}
		delete(factors, row.Name)
	}
	if r := report.Train; len(r) != 1 || r[0].Alone <= 0 || r[0].Together <= 0 || peer &&
		(r[0].PyTorch == nil || r[0].PyTorch.DDP <= 0) {
		t.Errorf("training: %s", out)
	}
	if r := report.Fed; len(r) != 1 || r[0].ImagesPerSecond <= 0 || r[0].Resident <= 0 || r[0].Share <= 0 ||
		r[0].Workers != 1 || r[0].Decode != "host" {
		t.Errorf("fed: %s", out)
	}
	var ways []string
	for _, row := range report.Sharded {
		ways = append(ways, row.Way)
		if row.Model != tinyGPT || row.Batch != 1 || row.Context != 8 || row.Go.StepMS <= 0 || peer &&
			(row.PyTorch == nil || row.PyTorch.StepMS <= 0) {
			t.Errorf("%+v: %+v, %+v", row, row.Go, row.PyTorch)
		}
	}
	if !slices.Equal(ways, shardedWays) {
		t.Errorf("%q, want %q", ways, shardedWays)
	}
	var table strings.Builder
	if err := report.table(&table); err != nil ||
		strings.Count(table.String(), tinyGPT) != len(shardedWays) || !strings.Contains(table.String(), "all-to-all") {
		t.Errorf("got %v\n%s\nwant %d rows of %s and \"all-to-all\"",
			err, table.String(), len(shardedWays), tinyGPT)
	}
}

// The chain of blocks computes the same as the GPT-2 and has all its parameters.
func TestShardedGPTIsTheGPT(t *testing.T) {
	gpt, err := newGPT(tinyGPT)
	if err != nil {
		t.Fatal(err)
	}
	defer nn.Close(gpt)
	nn.Train(gpt, false)
	chain := shardedGPT(gpt)
	blocks := nn.Parameters(chain)
	for _, n := range nn.NamedParameters(gpt) {
		if !slices.Contains(blocks, n.Tensor) {
			t.Errorf("no block has %s", n.Name)
		}
	}
	scope := torch.NewScope("test")
	defer scope.Close()
	tokens, err := torch.FromInt64s([]int64{3, 1, 4, 1, 5, 9})
	if err != nil {
		t.Fatal(err)
	}
	tokens = scope.Own(tokens).View(2, 3)
	same, err := chain.Forward(tokens).Equal(gpt.Forward(tokens))
	if err != nil || !same {
		t.Errorf("equal: %v, %v", same, err)
	}
	first := chain.Parts().Modules[0].Module
	if _, ok := first.(*distributed.ShardedBlock); !ok {
		t.Errorf("the first module is a %T, want a *distributed.ShardedBlock", first)
	}
}

// Concurrent output of two ranks stays intact, and its last line is the reason for their failure.
func TestRanksThatFailGiveTheirReason(t *testing.T) {
	for range 20 {
		var complaint lockedBuffer
		err := collectives.StartRanks(t.Context(), 2, func(ctx context.Context) *exec.Cmd {
			return exec.CommandContext(ctx, "sh", "-c", "echo no module >&2")
		}, io.Discard, &complaint)
		if text := string(complaint.Bytes()); err != nil || text != "no module\nno module\n" {
			t.Fatalf("%v, %q, want \"no module\nno module\n\", nil", err, text)
		}
	}
	if _, ok := any(&lockedBuffer{}).(io.ReaderFrom); ok {
		t.Error("the buffer is an io.ReaderFrom, want io.Copy to write through the lock of Write")
	}
}

func TestPythonFailure(t *testing.T) {
	failed := errors.New("exit status 1")
	for complaint, want := range map[string]string{
		"":                       "python3: exit status 1, without a message",
		"\n":                     "python3: exit status 1, without a message",
		"Traceback\nno module\n": "python3: exit status 1: no module",
	} {
		if err := pythonFailure("python3", failed, []byte(complaint)); err.Error() != want || !errors.Is(err, failed) {
			t.Errorf("%q: %v, want %s", complaint, err, want)
		}
	}
}
