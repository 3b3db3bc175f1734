package train

import (
	"bytes"
	"context"
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/resident"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/prefetcher"
	"github.com/torchstream/torchstream/torch"
)

// The bar shows this epoch's rate, the share of time spent waiting, the memory, and the estimated
// time to the end of the last epoch at this process's speed.
func TestBarText(t *testing.T) {
	begin := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for name, c := range map[string]struct {
		at      position
		first   int // step at which the process began
		batches int
		samples int
		waited  time.Duration // since the process started; 2 s of it were before the epoch
		memory  string
		now     time.Duration // since the process started; the epoch started at 10 s
		want    string
	}{
		// 30 steps took 20 s. The rest of this epoch and the two later epochs are 3 * 20 - 10 = 50
		// steps.
		"in the second epoch": {position{Epoch: 1, Step: 30, Batches: 10}, 0, 20, 640, 3 * time.Second,
			"1.25 GB", 20 * time.Second,
			"epoch 2 of 4  64 samples/s  waited 10.0 %  1.25 GB  left 33s"},
		"after a resume, whose steps before do not count": {position{Epoch: 1, Step: 30, Batches: 10}, 20,
			20, 640, 2 * time.Second, "0.90 GB RSS", 20 * time.Second,
			"epoch 2 of 4  64 samples/s  waited 0.0 %  0.90 GB RSS  left 1m40s"},
		"in the last epoch": {position{Epoch: 3, Step: 79, Batches: 19}, 0, 20, 100, 12 * time.Second, "-",
			12500 * time.Millisecond,
			"epoch 4 of 4  40 samples/s  waited 100.0 %  left 0s"},
		"of unknown length": {position{Step: 30, Batches: 30}, 0, 0, 640, 2 * time.Second, "-", 20 * time.Second,
			"epoch 1 of 4  64 samples/s  waited 0.0 %"},
	} {
		r := &runner{Config: Config{Epochs: 4}, at: c.at}
		p := &progress{run: r, begin: begin, first: c.first, batches: c.batches, samples: c.samples,
			epochAt: begin.Add(10 * time.Second),
			before:  prefetcher.Stats{ConsumerWait: 2 * time.Second}}
		if got := p.text(begin.Add(c.now), prefetcher.Stats{ConsumerWait: c.waited}, c.memory); got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

// timed gives three batches of four samples, and records when the first one was ready.
type timed struct{ ready time.Time }

func (*timed) Fields() []torch.Spec {
	return []torch.Spec{{Name: "images", DType: torch.Float32, Shape: []int64{2}}}
}
func (*timed) BatchSize() int { return 4 }
func (s *timed) Fill(ctx context.Context, _ int, lend func(context.Context) ([][]byte, error),
	deliver func(int, any) error) error {
	for i := range 3 {
		slot, err := lend(ctx)
		if err != nil {
			return err
		}
		clear(slot[0])
		if i == 0 {
			s.ready = time.Now()
		}
		if err := deliver(4, nil); err != nil {
			return err
		}
	}
	return nil
}

// The bar measures an epoch from before its first batch and counts that batch's images, as the
// table does. The bar is first drawn after the first step, with that step's percentage.
func TestBarAgreesWithTheTable(t *testing.T) {
	source := &timed{}
	feed, err := prefetcher.New(source, prefetcher.Options{Device: cuda.CPU})
	if err != nil {
		t.Fatal(err)
	}
	defer feed.Close()
	model := nn.NewLinear(2, 1, nn.LinearOptions{})
	defer func() { closeAll(nn.State(model)) }()
	opt, err := optim.NewSGD(nn.Parameters(model), optim.SGDOptions{LR: 0.1})
	if err != nil {
		t.Fatal(err)
	}
	defer opt.Close()
	stepper, err := NewStepper(StepperOptions{Model: model, Optimizer: opt,
		Loss: func(output *torch.Tensor, _ []*torch.Tensor) *torch.Tensor { return output.Mean() }})
	if err != nil {
		t.Fatal(err)
	}
	defer stepper.Close()
	var drawn bytes.Buffer
	r := &runner{Config: Config{Model: model, Optimizer: opt, Feed: feed, Epochs: 1, Progress: &drawn},
		stepper: stepper, report: &Report{}}
	r.progress = newProgress(r)
	r.progress.terminal, r.progress.batches = true, 3
	e, err := r.epoch(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	if !r.progress.epochAt.Before(source.ready) {
		t.Errorf("the clock started %v after the first batch was ready", r.progress.epochAt.Sub(source.ready))
	}
	if !strings.Contains(drawn.String(), " 33% ") {
		t.Errorf("the bar after the first of three steps: %q, want it with %q", drawn.String(), " 33% ")
	}
	end := r.progress.epochAt.Add(time.Duration(math.Round(e.Seconds * 1e9)))
	want := fmt.Sprintf("  %.0f samples/s  ", e.SamplesPerSecond)
	if text := r.progress.text(end, feed.Stats(), "-"); !strings.Contains(text, want) {
		t.Errorf("%q at the end of the epoch, and %q in the table", text, want)
	}
}

// On the CPU the bar shows the memory of the process. Its label differs from the label for a
// device's memory.
func TestMemoryOfTheCPU(t *testing.T) {
	read := func() float64 {
		t.Helper()
		n, err := resident.Bytes()
		if err != nil {
			t.Fatal(err)
		}
		return float64(n)
	}
	const changes = 10e6
	for limit := time.Now().Add(time.Minute); ; {
		before := read()
		text := memory(cuda.CPU)
		// Go may return memory to the system at any time, so the text only counts if the memory is
		// the same before and after it.
		if math.Abs(read()-before) > changes {
			if time.Now().After(limit) {
				t.Fatalf("for a minute no two readings of the memory were within %.0f bytes, want two",
					changes)
			}
			continue
		}
		of := regexp.MustCompile(`^(\d+\.\d\d) GB RSS$`).FindStringSubmatch(text)
		if of == nil {
			t.Fatalf("memory %q, of %v, want not nil", text, of)
		}
		shown, err := strconv.ParseFloat(of[1], 64)
		if err != nil || math.Abs(shown*1e9-before) > changes+5e6 { // GB with two decimals
			t.Errorf("%v GB, and %.0f bytes before, %v", shown, before, err)
		}
		return
	}
}
