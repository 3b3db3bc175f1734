// Command 05-parallel runs four independent branches of unequal cost on one GPU. It compares the
// time of running them concurrently with the longest branch alone.
//
//	go run ./examples/05-parallel [-rounds 30] [-json] [-timeline parallel.svg]
//
// Two kinds of branches, both forward only:
//
//   - rows: softmax over 8 rows of 131,072 numbers, 40, 30, 20 and 10 times. A kernel has 8 blocks
//     and takes tens of microseconds: most of the GPU is idle, and the host is far ahead. Streams
//     are made for this case: nn.Parallel takes as long as the longest branch.
//   - convs: 3x3 convolutions of 32 channels on 8 small images, 12, 9, 6 and 3 layers with ReLU. A
//     kernel takes a few microseconds, about as long as its launch: the GPU waits for the host, and
//     more streams do not make it faster. A CUDA graph has no launches, so the branches run
//     concurrently again.
//
// It measures each branch alone, the branches in turn on one stream, and nn.Parallel, each eagerly
// and captured into a graph. The critical path is the longest branch alone. If there is a python3
// with torch, peer.py takes the same measurements with torch.cuda.Stream and torch.cuda.CUDAGraph.
//
// Times are from an event before the first launch to an event after the last kernel, on an idle
// GPU. All figures are medians of the rounds.
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

// times holds microseconds for one kind of branches, eager or in a graph.
type times struct {
	Alone    []float64 `json:"alone"` // each branch alone
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

// order is the order of the figures in the table.
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
	lesson.Main("05-parallel",
		"Runs four independent branches on streams of their own, and compares them with the longest "+
			"branch alone.", 1, func(f *flag.FlagSet) {
			f.IntVar(&rounds, "rounds", rounds,
				"rounds of each measurement")
		},
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
	// Use one goroutine on one stream throughout, as a training loop does.
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
		table = append(table, []string{name, fmt.Sprintf("%.0f", t.critical()),
			fmt.Sprintf("%.0f", t.InTurn), fmt.Sprintf("%.0f", t.Parallel),
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

// work holds the branches of one kind and their input.
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

// inTurn returns a module that runs the branches one after another on the caller's stream and adds
// their outputs.
func (w *work) inTurn() nn.Module {
	return nn.Func(func(x *torch.Tensor) *torch.Tensor {
		y := w.branches[0].Forward(x)
		for _, b := range w.branches[1:] {
			y = y.Add(b.Forward(x))
		}
		return y
	})
}

// forward returns the measured function: a forward pass of the module that frees its results.
func (w *work) forward(m nn.Module) func() error {
	return func() error {
		turn := torch.NewScope("turn")
		defer turn.Close()
		return m.Forward(w.x.NoGrad().In(turn)).Err()
	}
}

// eager measures the branches without a graph.
func (w *work) eager(rounds int) (t times, err error) {
	return w.measured(rounds, func(m nn.Module) (func() error, error) { return w.forward(m), nil })
}

// measured measures the function that prepare returns: for each branch alone, for the branches in
// turn, and for nn.Parallel.
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

// measure returns the median time of run on the device, each time on an idle GPU, after a few
// warm-up runs.
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
		if err := errors.Join(stream.Synchronize(), start.Record(stream), run(), end.Record(stream),
			end.Synchronize()); err != nil {
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

// current returns the stream that run has made current.
func (w *work) current() (cuda.Stream, error) { return cuda.GetCurrentCUDAStream(w.x.Device()) }
