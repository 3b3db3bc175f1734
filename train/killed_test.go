package train_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/gob"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/torch"
	"github.com/torchstream/torchstream/train"
)

var (
	kills    = flag.Int("kills", 3, "how often TestKilled kills its training")
	killSeed = flag.Uint64("kill-seed", 0, "seed of the moments of TestKilled; 0 draws one")
)

// Environment variables of the process that TestKilled kills.
const (
	killedDir     = "TORCHSTREAM_TEST_KILLED_DIR"
	killedArchive = "TORCHSTREAM_TEST_KILLED_ARCHIVE"
	killedWay     = "TORCHSTREAM_TEST_KILLED_WAY"
	killedDone    = "result"
)

// ways returns one of the training runs of TestKilled, by name.
func ways(name string) job {
	o := job{adam: true, dropout: true, ema: true, withEval: true, Config: train.Config{
		Epochs: 4, ClipNorm: 1, Schedule: optim.CosineLR{Steps: 4 * perE}, SaveSteps: 1, Resume: true,
		Autocast: torch.BFloat16,
	}}
	switch name {
	case "GPU":
		o.gpu = true
	case "GPU with graphs":
		o.gpu, o.Graph = true, true
	}
	return o
}

// TestKilledProcess is the process that TestKilled kills: a training run that resumes if it can.
func TestKilledProcess(t *testing.T) {
	if os.Getenv(killedDir) == "" {
		t.Skip("TestKilled runs it")
	}
	if err := torch.SetNumThreads(1); err != nil {
		t.Fatal(err)
	}
	o := ways(os.Getenv(killedWay))
	if o.gpu { // two runs of the same kernels must compute the same bits
		if err := torch.SetProcessNumerics(torch.Numerics{Deterministic: true}); err != nil {
			t.Fatal(err)
		}
	}
	o.path, o.Dir = os.Getenv(killedArchive), os.Getenv(killedDir)
	j := newJob(t, o)
	scaler, err := optim.NewGradScaler(j.Feed.Device(), optim.GradScalerOptions{InitScale: 256, GrowthInterval: 3})
	if err != nil {
		t.Fatal(err)
	}
	defer scaler.Close()
	j.Scaler = scaler
	j.OnStep = func(s train.Step) error {
		fmt.Printf("step %d\n", s.Step)
		return nil
	}
	report := j.run(t)
	scale, err := scaler.Scale()
	if err != nil {
		t.Fatal(err)
	}
	var result bytes.Buffer
	if err := gob.NewEncoder(&result).Encode(outcome{j.bits(t), figures(report), scale}); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(o.Dir, killedDone), result.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
}

// outcome is the final state of a training run.
type outcome struct {
	Bits    map[string][]uint64
	Figures []train.Epoch
	Scale   float64
}

// A training run with Dropout and augmentation that is killed at random moments ends with the same
// bits as an uninterrupted one: parameters, averages, metrics and loss scale.
func TestKilled(t *testing.T) {
	killed(t, "CPU", *kills)
}

func TestKilledOnGPU(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	n := 5
	if testing.Short() {
		n = 1
	}
	for _, way := range []string{"GPU", "GPU with graphs"} {
		t.Run(way, func(t *testing.T) { killed(t, way, n) })
	}
}

func killed(t *testing.T, way string, times int) {
	path := archive(t)
	whole := runKilled(t, way, path, t.TempDir(), nil)
	if whole == nil {
		t.Fatal("the run without a kill has no result, want one")
	}
	seed := *killSeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("-kill-seed=%d draws these moments again", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	dir, died := t.TempDir(), 0
	for died < times {
		kill := &moment{lines: random.IntN(6), after: time.Duration(random.Int64N(int64(20 * time.Millisecond)))}
		if got := runKilled(t, way, path, dir, kill); got == nil {
			died++
			continue
		}
		// The process finished before the kill, so the next one starts from scratch.
		if err := os.RemoveAll(dir); err != nil {
			t.Fatal(err)
		}
	}
	got := runKilled(t, way, path, dir, nil)
	if got == nil {
		t.Fatal("the resumed run has no result, want one")
	}
	if !reflect.DeepEqual(got.Figures, whole.Figures) || got.Scale != whole.Scale {
		t.Errorf("figures %+v, scale %v\nwant %+v, %v", got.Figures, got.Scale, whole.Figures, whole.Scale)
	}
	for name, bits := range whole.Bits {
		if !reflect.DeepEqual(got.Bits[name], bits) {
			t.Errorf("%s differs", name)
		}
	}
	left, err := filepath.Glob(filepath.Join(dir, "*.tmp*"))
	if err != nil || len(left) > 0 {
		t.Errorf("files are left: %v, %v, want no error, len(left) = 0", left, err)
	}
	t.Logf("killed %d times", died)
}

// moment says when to kill a process: after a number of steps plus a delay.
type moment struct {
	lines int
	after time.Duration
}

// runKilled runs TestKilledProcess and returns its result, or nil if it was killed before it
// finished.
func runKilled(t *testing.T, way, path, dir string, kill *moment) *outcome {
	t.Helper()
	program, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	command := exec.CommandContext(ctx, program, "-test.run=^TestKilledProcess$", "-test.count=1")
	command.Env = append(os.Environ(), killedDir+"="+dir, killedArchive+"="+path, killedWay+"="+way,
		"CUBLAS_WORKSPACE_CONFIG=:4096:8")
	var complaint bytes.Buffer
	command.Stderr = &complaint
	out, err := command.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	var said strings.Builder
	timer := time.AfterFunc(time.Hour, func() { command.Process.Kill() })
	defer timer.Stop()
	lines := bufio.NewScanner(out)
	for n := 0; lines.Scan(); {
		fmt.Fprintln(&said, lines.Text())
		if strings.HasPrefix(lines.Text(), "step ") {
			if kill != nil && n == kill.lines {
				timer.Reset(kill.after)
			}
			n++
		}
	}
	err = command.Wait()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		if status, ok := exit.Sys().(syscall.WaitStatus); kill != nil && ok && status.Signaled() &&
			status.Signal() == syscall.SIGKILL {
			return nil
		}
	}
	if err != nil {
		t.Fatalf("%v\n%s%s\nwant no error", err, said.String(), complaint.String())
	}
	f, err := os.Open(filepath.Join(dir, killedDone))
	if err != nil {
		t.Fatalf("%v\n%s\nwant no error", err, said.String())
	}
	defer f.Close()
	var o outcome
	if err := gob.NewDecoder(f).Decode(&o); err != nil {
		t.Fatal(err)
	}
	return &o
}

// A custom loop saves and loads its whole state with a Checkpoint.
func TestCheckpoint(t *testing.T) {
	path := archive(t)
	loop := func(file string, from, to int) (*job, *train.Checkpoint) {
		j := newJob(t, job{path: path, dropout: true, adam: true, ema: true})
		step, err := train.NewStepper(train.StepperOptions{Model: j.Model, Optimizer: j.Optimizer, EMA: j.EMA})
		if err != nil {
			t.Fatal(err)
		}
		defer step.Close()
		scheduler, err := optim.NewScheduler(j.Optimizer, optim.CosineLR{Steps: 9})
		if err != nil {
			t.Fatal(err)
		}
		scaler, err := optim.NewGradScaler(cuda.CPU, optim.GradScalerOptions{})
		if err != nil {
			t.Fatal(err)
		}
		defer scaler.Close()
		c := &train.Checkpoint{Model: j.Model, Optimizer: j.Optimizer, Scheduler: scheduler, EMA: j.EMA, Scaler: scaler,
			Device: cuda.CPU, Metadata: map[string]string{"run": "7"}}
		if from > 0 {
			c.Metadata = nil
			if err := c.Load(file); err != nil {
				t.Fatal(err)
			}
			if c.Metadata["run"] != "7" || scheduler.Count() != from {
				t.Errorf("metadata %v, count %d", c.Metadata, scheduler.Count())
			}
			if err := j.Feed.Source().(*imageloader.Loader).Restore(t.Context(), *c.Loader); err != nil {
				t.Fatal(err)
			}
			if s, err := scaler.Scale(); err != nil || s != 3 {
				t.Errorf("scale %v, %v, want no error, s = 3", s, err)
			}
		} else if err := scaler.LoadState(optim.GradScalerState{Scale: 3}); err != nil {
			t.Fatal(err)
		}
		for n := from; n < to; {
			for batch, err := range j.Feed.Epoch(t.Context(), n/perE) {
				if err != nil {
					t.Fatal(err)
				}
				if _, _, err := step.Step(batch.Images, batch.Labels); err != nil {
					t.Fatal(err)
				}
				if err := scheduler.Step(); err != nil {
					t.Fatal(err)
				}
				info := batch.Info.(imageloader.Info)
				c.Loader = &info.State
				if n++; n == to {
					break
				}
			}
		}
		if err := c.Save(file); err != nil {
			t.Fatal(err)
		}
		return j, c
	}
	dir := t.TempDir()
	whole, _ := loop(filepath.Join(dir, "whole.pt"), 0, 8)
	want := whole.bits(t)
	part := filepath.Join(dir, "part.pt")
	loop(part, 0, 3)
	resumed, c := loop(part, 3, 8)
	if got := resumed.bits(t); !reflect.DeepEqual(got, want) {
		t.Error("the resumed loop has other parameters, want the bits of the whole loop")
	}
	if err := (&train.Checkpoint{}).Load(filepath.Join(dir, "none.pt")); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
	plain := filepath.Join(dir, "plain.pt")
	if err := nn.Save(plain, resumed.Model, nil); err != nil {
		t.Fatal(err)
	}
	for says, other := range map[string]train.Checkpoint{
		"random generators":  {Model: c.Model},
		"no state of a sche": {Scheduler: c.Scheduler},
		"GradScaler":         {Scaler: c.Scaler},
		"no averages":        {EMA: c.EMA},
		"optimizer":          {Optimizer: c.Optimizer},
	} {
		if err := other.Load(plain); err == nil || !strings.Contains(err.Error(), says) ||
			!strings.Contains(err.Error(), "plain.pt") {
			t.Errorf("%s: %v, want an error with %q and %q", says, err, says, "plain.pt")
		}
	}
}
