// Four independent branches of unequal cost on one GPU: how close does running them side by side
// come to the longest of them alone?
//
//	go run ./examples/05-parallel [-rounds 30] [-json] [-timeline parallel.svg]
//
// Two kinds of branches, both forward only:
//
//   - rows: softmax over 8 rows of 131,072 numbers, 40, 30, 20 and 10 times over. A kernel has 8 blocks and takes tens of microseconds: most of the GPU is idle,
//     and the host is far ahead. This is what streams are for: nn.Parallel costs what the longest branch costs.
//   - convs: 3x3 convolutions of 32 channels on 8 small images, 12, 9, 6 and 3 layers with ReLU. A kernel takes a few microseconds, about what its launch takes: the
//     host is what is waited for, and more streams do not make it faster. In a CUDA graph there are no launches, and the branches run side by side again.
//
// Each is measured branch by branch, with the branches in turn on one stream, and as nn.Parallel;
// eagerly and captured into a graph. The critical path is the longest branch alone. PyTorch's
// figures, from the same measurements with torch.cuda.Stream and torch.cuda.CUDAGraph in peer.py,
// are beside ours when a python3 with torch is there.
//
// Times are from an event before the first launch to one after the last kernel, on an idle GPU;
// medians of the rounds.
package main

import (
	"context"
	_ "embed"
	"errors"
	"flag"
	"fmt"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/examples/internal/lesson"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/torch"
)

//go:embed peer.py
var peer string

// times are microseconds of one kind of branches, eager or in a graph.
type times struct {
	Alone    []float64 `json:"alone"` // each branch
	InTurn   float64   `json:"in_turn"`
	Parallel float64   `json:"parallel"`
}

func (t times) critical() float64 {
	longest := 0.0
	for _, a := range t.Alone {
		longest = max(longest, a)
	}
	return longest
}

type figures map[string]times // "rows eager", "rows graph", "convs eager", "convs graph"

// order of the figures.
var order = []string{"rows eager", "rows graph", "convs eager", "convs graph"}

type result struct {
	GPU           string  `json:"gpu"`
	Rounds        int     `json:"rounds"`
	Microseconds  figures `json:"microseconds"`
	PyTorch       figures `json:"pytorch_microseconds,omitempty"`
	OverCritical  ratios  `json:"parallel_over_longest_branch"`
	PyTorchRatios ratios  `json:"pytorch_parallel_over_longest_branch,omitempty"`
}

type ratios map[string]float64

func (f figures) ratios() ratios {
	if f == nil {
		return nil
	}
	r := ratios{}
	for name, t := range f {
		if c := t.critical(); c > 0 {
			r[name] = t.Parallel / c
		}
	}
	return r
}

func main() {
	rounds := 30
	lesson.Main("05-parallel", 1, func(f *flag.FlagSet) { f.IntVar(&rounds, "rounds", rounds, "how often everything is measured") },
		func(ctx context.Context, l *lesson.Lesson) error { return run(ctx, l, rounds) })
}

func run(ctx context.Context, l *lesson.Lesson, rounds int) error {
	if rounds < 1 {
		return errors.New("-rounds must be at least 1")
	}
	properties, err := l.Device.Properties()
	if err != nil {
		return err
	}
	r := result{GPU: properties.Name, Rounds: rounds, Microseconds: figures{}}
	stream, err := cuda.NewStream(l.Device, cuda.StreamOptions{})
	if err != nil {
		return err
	}
	// One goroutine, on one stream from beginning to end: what a training loop does.
	err = cuda.WithStream(stream, func() error {
		for _, kind := range []struct {
			name  string
			build func(cuda.Device) (*work, error)
		}{{"rows", rows}, {"convs", convs}} {
			w, err := kind.build(l.Device)
			if err != nil {
				return err
			}
			defer w.close()
			if r.Microseconds[kind.name+" eager"], err = w.eager(rounds); err != nil {
				return fmt.Errorf("%s: %w", kind.name, err)
			}
			if r.Microseconds[kind.name+" graph"], err = w.captured(rounds); err != nil {
				return fmt.Errorf("%s in a graph: %w", kind.name, err)
			}
			if kind.name == "rows" {
				if _, err := l.Record("nn.Parallel: four branches on an idle GPU", func() error {
					_, err := w.measure(3, w.forward(w.parallel))
					return err
				}); err != nil {
					return err
				}
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	r.OverCritical = r.Microseconds.ratios()
	peerErr := l.Peer(ctx, peer, &r.PyTorch, fmt.Sprint(int(l.Device)), fmt.Sprint(rounds))
	if peerErr != nil && !errors.Is(peerErr, lesson.ErrNoPeer) {
		return peerErr
	}
	r.PyTorchRatios = r.PyTorch.ratios()
	return l.Result(r, func() error {
		fmt.Fprintf(l.Out, "%s, medians of %d rounds, µs\n\n", r.GPU, r.Rounds)
		if peerErr != nil {
			fmt.Fprintf(l.Out, "%v\n\n", peerErr)
		}
		return l.Table(r.table())
	})
}

func (r result) table() [][]string {
	table := [][]string{{"", "longest branch alone", "branches in turn", "nn.Parallel", "over the longest", "speed-up"}}
	row := func(name string, t times) {
		table = append(table, []string{name, fmt.Sprintf("%.0f", t.critical()), fmt.Sprintf("%.0f", t.InTurn), fmt.Sprintf("%.0f", t.Parallel),
			fmt.Sprintf("%+.1f %%", 100*(t.Parallel/t.critical()-1)), fmt.Sprintf("%.2f", t.InTurn/t.Parallel)})
	}
	for _, name := range order {
		row(name, r.Microseconds[name])
		if t, ok := r.PyTorch[name]; ok {
			row("  PyTorch", t)
		}
	}
	return table
}

// work is the branches of one kind and their input.
type work struct {
	branches []nn.Module
	parallel nn.Module
	x        *torch.Tensor
}

func newWork(x *torch.Tensor, branches ...nn.Module) (*work, error) {
	w := &work{branches: branches, parallel: nn.NewParallel(nn.Sum(), branches...), x: x}
	if err := errors.Join(x.Err(), nn.Err(w.parallel)); err != nil {
		return nil, err
	}
	return w, nil
}

func (w *work) close() {
	nn.Close(w.parallel)
	w.x.Close()
}

func rows(d cuda.Device) (*work, error) {
	x, err := torch.Rand(d, torch.Float32, 8, 131072)
	if err != nil {
		return nil, err
	}
	softmax := func(times int) nn.Module {
		return nn.Func(func(x *torch.Tensor) *torch.Tensor {
			for range times {
				x = x.Softmax(1)
			}
			return x
		})
	}
	return newWork(x, softmax(40), softmax(30), softmax(20), softmax(10))
}

func convs(d cuda.Device) (*work, error) {
	x, err := torch.Rand(d, torch.Float32, 8, 32, 28, 28)
	if err != nil {
		return nil, err
	}
	stack := func(layers int) nn.Module {
		var modules []nn.Module
		for range layers {
			modules = append(modules, nn.NewConv2d(32, 32, 3, nn.Conv2dOptions{Padding: 1, NoBias: true}), nn.NewReLU())
		}
		return nn.NewSequential(modules...)
	}
	w, err := newWork(x, stack(12), stack(9), stack(6), stack(3))
	if err != nil {
		return nil, err
	}
	return w, nn.To(w.parallel, d)
}

// inTurn is the branches one after the other on the caller's stream, and their sum.
func (w *work) inTurn() nn.Module {
	return nn.Func(func(x *torch.Tensor) *torch.Tensor {
		y := w.branches[0].Forward(x)
		for _, b := range w.branches[1:] {
			y = y.Add(b.Forward(x))
		}
		return y
	})
}

// forward returns a forward pass of the module that frees what it has made: what is measured.
func (w *work) forward(m nn.Module) func() error {
	return func() error {
		turn := torch.NewScope("turn")
		defer turn.Close()
		return m.Forward(w.x.NoGrad().In(turn)).Err()
	}
}

// eager measures the branches as they are.
func (w *work) eager(rounds int) (t times, err error) {
	return w.measured(rounds, func(m nn.Module) (func() error, error) { return w.forward(m), nil })
}

// measured measures what prepare makes of every branch alone, of the branches in turn and of the
// Parallel.
func (w *work) measured(rounds int, prepare func(nn.Module) (func() error, error)) (t times, err error) {
	one := func(m nn.Module) float64 {
		run, e := prepare(m)
		if e == nil {
			var took time.Duration
			if took, e = w.measure(rounds, run); e == nil {
				return float64(took.Nanoseconds()) / 1e3
			}
		}
		err = errors.Join(err, e)
		return 0
	}
	for _, b := range w.branches {
		t.Alone = append(t.Alone, one(b))
	}
	t.InTurn, t.Parallel = one(w.inTurn()), one(w.parallel)
	return t, err
}

// measure returns the median time of run on the device, each on an idle GPU, after a few runs that
// do not count.
func (w *work) measure(rounds int, run func() error) (time.Duration, error) {
	start, err := cuda.NewEvent(cuda.EventOptions{Timing: true})
	if err != nil {
		return 0, err
	}
	defer start.Close()
	end, err := cuda.NewEvent(cuda.EventOptions{Timing: true})
	if err != nil {
		return 0, err
	}
	defer end.Close()
	stream, err := w.current()
	if err != nil {
		return 0, err
	}
	var took []time.Duration
	const warm = 5
	for i := range rounds + warm {
		if err := errors.Join(stream.Synchronize(), start.Record(stream), run(), end.Record(stream), end.Synchronize()); err != nil {
			return 0, err
		}
		d, err := cuda.Elapsed(start, end)
		if err != nil {
			return 0, err
		}
		if i >= warm {
			took = append(took, d)
		}
	}
	return lesson.Median(took), nil
}

// current is the stream that run has made current.
func (w *work) current() (cuda.Stream, error) { return cuda.GetCurrentCUDAStream(w.x.Device()) }
