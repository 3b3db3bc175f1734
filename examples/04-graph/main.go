// Command 04-graph measures the gain from a CUDA graph when the host cannot queue kernels as fast
// as the GPU runs them. It measures sequences of operators: clipping 64 small gradients by their
// common norm, kernel by kernel and with LibTorch's foreach operators, and an optimizer's step. It
// runs each sequence eagerly and as a captured graph, and prints PyTorch's times for the same work.
//
//	go run ./examples/04-graph [-json] [-timeline graph.svg]
//
// Then it shows the consequences of a graph storing addresses. If the program closes an argument,
// the graph keeps its memory alive. If the program replaces an argument, torch.Graphed notices, and
// either captures again or refuses. If the program copies a value into an argument, the next replay
// reads that value. Finally it measures how much memory two graphs save by sharing a pool.
//
// It needs a GPU.
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
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/torch"
)

//go:embed peer.py
var peer string

func main() {
	rounds := 51
	lesson.Main("04-graph", "Measures what a CUDA graph saves where the host cannot queue kernels fast "+
		"enough, and shows what a graph remembers.", 1,
		func(f *flag.FlagSet) { f.IntVar(&rounds, "rounds", rounds, "rounds of each measurement") },
		func(ctx context.Context, l *lesson.Lesson) error {
			return run(ctx, l, rounds)
		})
}

// sequence is a sequence of operators that runs repeatedly, eagerly and as a graph. Times are in
// microseconds.
type sequence struct {
	Name  string  `json:"name"`
	Nodes int     `json:"nodes"`
	Eager float64 `json:"eager_us"` // until the device has finished
	Graph float64 `json:"graph_us"`
	Host  float64 `json:"replay_host_us"` // until Replay returns

	PyTorchEager float64 `json:"pytorch_eager_us,omitempty"`
	PyTorchGraph float64 `json:"pytorch_graph_us,omitempty"`
	PyTorchHost  float64 `json:"pytorch_replay_host_us,omitempty"`

	fn   func() error
	peer string
}

type figures struct {
	Sequences []*sequence `json:"sequences"`
	Hazards   []hazard    `json:"hazards"`
	Pools     pools       `json:"pools"`
	Peer      string      `json:"peer,omitempty"` // why PyTorch's times are missing
}

type hazard struct {
	What   string `json:"what"`
	Result string `json:"result"`
}

type pools struct {
	OneMiB      float64 `json:"one_graph_mib"`
	SharedMiB   float64 `json:"two_graphs_shared_mib"`
	SeparateMiB float64 `json:"two_graphs_separate_mib"`
}

func run(ctx context.Context, l *lesson.Lesson, rounds int) error {
	scope := torch.NewScope("04-graph")
	defer scope.Close()
	var f figures
	var err error
	if f.Sequences, err = sequences(l.Device, scope); err != nil {
		return err
	}
	for _, s := range f.Sequences {
		if err := s.measure(l.Device, rounds); err != nil {
			return fmt.Errorf("%s: %w", s.Name, err)
		}
	}
	if f.Hazards, err = hazards(l.Device, scope); err != nil {
		return err
	}
	if f.Pools, err = sharedPools(l.Device); err != nil {
		return err
	}
	theirs := map[string]float64{}
	switch err := l.Peer(ctx, peer, &theirs); {
	case errors.Is(err, lesson.ErrNoPeer):
		f.Peer = err.Error()
	case err != nil:
		return err
	}
	for _, s := range f.Sequences {
		s.PyTorchEager, s.PyTorchGraph, s.PyTorchHost = theirs[s.peer+"_eager"], theirs[s.peer+
			"_graph"], theirs[s.peer+"_host"]
	}
	if _, err := l.Record("a clip of 64 tensors, eager and as a graph",
		func() error { return f.Sequences[0].show(l.Device) }); err != nil {
		return err
	}
	return l.Result(f, func() error { return f.print(l) })
}

const (
	tensors  = 64
	elements = 1000
)

// sequences returns the same operations as peer.py.
func sequences(device cuda.Device, scope *torch.Scope) ([]*sequence, error) {
	grads, params := make([]*torch.Tensor, tensors), make([]*torch.Tensor, tensors)
	for i := range tensors {
		for _, at := range []*[]*torch.Tensor{&grads, &params} {
			t, err := torch.Randn(device, torch.Float32, elements)
			if err != nil {
				return nil, err
			}
			(*at)[i] = scope.Own(t)
		}
		if err := params[i].SetRequiresGrad(true); err != nil {
			return nil, err
		}
		if err := params[i].SetGrad(grads[i]); err != nil {
			return nil, err
		}
	}
	sgd, err := optim.NewSGD(params, optim.SGDOptions{LR: 0.01, Momentum: 0.9, KeepGradients: true})
	if err != nil {
		return nil, err
	}
	zero, err := torch.Zeros(device, torch.Float32)
	if err != nil {
		return nil, err
	}
	zero = scope.Own(zero)
	return []*sequence{
		{Name: "clip of 64 tensors, kernel by kernel", peer: "loop", fn: func() error { return clip(zero, grads) }},
		{Name: "clip of 64 tensors, foreach", peer: "foreach", fn: func() error {
			turn := torch.NewScope("clip")
			defer turn.Close()
			norm, err := optim.ClipGradNorm(params, 1, optim.ClipOptions{})
			if err == nil {
				err = norm.Close()
			}
			return err
		}},
		{Name: "SGD step of 64 tensors", peer: "step", fn: sgd.Step},
	}, nil
}

// clip is the simplest global-norm clipping, with about three kernels per tensor.
func clip(zero *torch.Tensor, grads []*torch.Tensor) error {
	turn := torch.NewScope("clip")
	defer turn.Close()
	total := zero.In(turn).Clone().Zero_()
	for _, g := range grads {
		total = total.Add(g.In(turn).Norm().PowScalar(2))
	}
	factor := total.Sqrt().AddScalar(1e-6).Reciprocal().MulScalar(1).ClampMax(1)
	for _, g := range grads {
		if err := g.Mul_(factor).Err(); err != nil {
			return err
		}
	}
	return nil
}

func (s *sequence) measure(device cuda.Device, rounds int) error {
	stream, err := cuda.NewOwnedStream(device, cuda.StreamOptions{})
	if err != nil {
		return err
	}
	defer stream.Close()
	// The tensors were made on the default stream.
	if err := stream.Wait(cuda.DefaultStream(device)); err != nil {
		return err
	}
	// Use one thread for all calls: a library must be used on a thread once before a capture on
	// that thread.
	return cuda.WithStream(stream.Stream, func() error {
		for range 3 {
			if err := s.fn(); err != nil {
				return err
			}
		}
		if s.Eager, _, err = median(device, rounds, s.fn); err != nil {
			return err
		}
		graph, err := cuda.Capture(cuda.CaptureOptions{Stream: stream.Stream}, s.fn)
		if err != nil {
			return err
		}
		defer graph.Close()
		s.Nodes = graph.Nodes()
		s.Graph, s.Host, err = median(device, rounds, func() error { return graph.Replay(stream.Stream) })
		return err
	})
}

// median returns the microseconds until the device has finished fn, and until fn returns.
func median(device cuda.Device, rounds int, fn func() error) (done, host float64, err error) {
	var all, queued []float64
	for i := range rounds + 5 {
		if err := device.Synchronize(); err != nil {
			return 0, 0, err
		}
		start := time.Now()
		if err := fn(); err != nil {
			return 0, 0, err
		}
		returned := time.Since(start)
		if err := device.Synchronize(); err != nil {
			return 0, 0, err
		}
		if i >= 5 {
			all, queued = append(all, micro(time.Since(start))), append(queued, micro(returned))
		}
	}
	return lesson.Median(all), lesson.Median(queued), nil
}

func micro(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }

// show runs the sequence three times eagerly and three times as a graph, for the timeline.
func (s *sequence) show(device cuda.Device) error {
	graph, err := cuda.Capture(cuda.CaptureOptions{Stream: cuda.DefaultStream(device)}, s.fn)
	if err != nil {
		return err
	}
	defer graph.Close()
	for _, fn := range []func() error{s.fn, func() error { return graph.Replay(cuda.DefaultStream(device)) }} {
		for range 3 {
			if err := fn(); err != nil {
				return err
			}
		}
		if err := device.Synchronize(); err != nil {
			return err
		}
	}
	return nil
}

// hazards shows ways to give a graph new input. Replacing or closing the input fails with plain
// CUDA graphs. Copying into it is correct.
func hazards(device cuda.Device, scope *torch.Scope) ([]hazard, error) {
	full := func(v float64) (*torch.Tensor, error) {
		t, err := torch.Full(device, torch.Float32, v, 4)
		if err != nil {
			return nil, err
		}
		return scope.Own(t), nil
	}
	square := func(in []*torch.Tensor) ([]*torch.Tensor, error) { return []*torch.Tensor{in[0].Square()}, nil }
	x, err := full(3)
	if err != nil {
		return nil, err
	}
	replaced, err := full(5)
	if err != nil {
		return nil, err
	}
	var h []hazard
	note := func(what string, results []*torch.Tensor, err error) {
		text := ""
		if err == nil {
			var v []float64
			if v, err = results[0].Float64s(); err == nil {
				text = fmt.Sprintf("%v", v[0])
			}
		}
		if err != nil {
			text = "refused: " + err.Error()
		}
		h = append(h, hazard{what, text})
	}
	strict := torch.NewGraphed(square, torch.GraphedOptions{FixedArguments: true})
	defer strict.Close()
	loose := torch.NewGraphed(square, torch.GraphedOptions{})
	defer loose.Close()
	for _, g := range []*torch.Graphed{strict, loose} {
		if _, err := g.Call(x); err != nil {
			return nil, err
		}
	}
	r, err := strict.Call(x)
	note("the square of 3, replayed", r, err)
	r, err = strict.Call(replaced)
	note("input replaced by a tensor of 5, FixedArguments", r, err)
	r, err = loose.Call(replaced)
	note("input replaced by a tensor of 5", r, err)
	if err := x.CopyFrom(replaced, torch.CopyOptions{}); err != nil {
		return nil, err
	}
	r, err = strict.Call(x)
	note("5 copied into the input", r, err)

	y, err := full(7)
	if err != nil {
		return nil, err
	}
	var out *torch.Tensor
	graph, err := cuda.Capture(cuda.CaptureOptions{Stream: cuda.DefaultStream(device)}, func() error {
		out = y.Square()
		return out.Err()
	})
	if err != nil {
		return nil, err
	}
	defer graph.Close()
	y.Close()
	other, err := full(1) // could reuse the closed tensor's memory
	if err != nil {
		return nil, err
	}
	err = errors.Join(other.Err(), graph.Replay(cuda.DefaultStream(device)))
	note("input of 7 closed before the replay", []*torch.Tensor{out}, err)
	return h, nil
}

// sharedPools measures the memory of two graphs, each with 256 MiB of intermediate results, with
// and without a shared pool.
func sharedPools(device cuda.Device) (pools, error) {
	var p pools
	work := func() error {
		turn := torch.NewScope("work")
		defer turn.Close()
		x, err := torch.Ones(device, torch.Float32, 64<<20)
		if err != nil {
			return err
		}
		return turn.Own(x).Sum().Err()
	}
	reserved := func() (float64, error) {
		if err := cuda.EmptyCache(); err != nil {
			return 0, err
		}
		m, err := device.Memory()
		return float64(m.Reserved) / (1 << 20), err
	}
	if err := work(); err != nil {
		return p, err
	}
	start, err := reserved()
	if err != nil {
		return p, err
	}
	var graphs []*cuda.Graph
	defer func() {
		for _, g := range graphs {
			g.Close()
		}
	}()
	for i, out := range []*float64{&p.OneMiB, &p.SharedMiB, &p.SeparateMiB} {
		o := cuda.CaptureOptions{Stream: cuda.DefaultStream(device)}
		if i == 1 {
			o.SharePool = graphs[0]
		}
		g, err := cuda.Capture(o, work)
		if err != nil {
			return p, err
		}
		graphs = append(graphs, g)
		now, err := reserved()
		if err != nil {
			return p, err
		}
		*out = now - start
	}
	p.SeparateMiB -= p.SharedMiB - p.OneMiB // subtracts the second graph
	return p, nil
}

func (f *figures) print(l *lesson.Lesson) error {
	rows := [][]string{{"µs", "nodes", "eager", "graph", "host", "PyTorch eager", "graph", "host"}}
	number := func(v float64) string {
		if v == 0 {
			return "-"
		}
		return fmt.Sprintf("%.1f", v)
	}
	for _, s := range f.Sequences {
		rows = append(rows, []string{s.Name, fmt.Sprint(s.Nodes), number(s.Eager), number(s.Graph),
			number(s.Host), number(s.PyTorchEager), number(s.PyTorchGraph), number(s.PyTorchHost)})
	}
	if err := l.Table(rows); err != nil {
		return err
	}
	if f.Peer != "" {
		fmt.Fprintln(l.Out, f.Peer)
	}
	fmt.Fprintln(l.Out)
	for _, h := range f.Hazards {
		fmt.Fprintf(l.Out, "%s: %s\n", h.What, h.Result)
	}
	_, err := fmt.Fprintf(l.Out,
		"\nmemory of one graph %.0f MiB, of two that share it %.0f MiB, of two that do not %.0f MiB\n",
		f.Pools.OneMiB, f.Pools.SharedMiB, f.Pools.SeparateMiB)
	return err
}
