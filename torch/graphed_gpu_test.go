package torch_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"reflect"
	"strings"
	"sync"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/prefetcher"
	"github.com/torchstream/torchstream/torch"
)

// The results of a graphed function equal the function's results for any values of the arguments,
// and each address has a separate graph.
func TestGraphedEqualsEager(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	w := onDevice(t, []float32{1, 2, 3, 4, 5, 6}, 3, 2)
	fn := func(in []*torch.Tensor) ([]*torch.Tensor, error) {
		h := in[0].MatMul(w).ReLU()
		return []*torch.Tensor{h.Sum(), h.Softmax(1)}, nil
	}
	g := torch.NewGraphed(fn, torch.GraphedOptions{})
	defer g.Close()
	a, b := onDevice(t, make([]float32, 12), 4, 3), onDevice(t, make([]float32, 12), 4, 3)
	for i := range 12 {
		x := []*torch.Tensor{a, b}[i%2]
		turn := torch.NewScope("turn")
		if f := x.NoGrad().Normal_(float64(i), 2); f.Err() != nil {
			t.Fatal(f.Err())
		}
		want, err := fn([]*torch.Tensor{x.In(turn)})
		if err != nil {
			t.Fatal(err)
		}
		got, err := g.Call(x.In(turn))
		if err != nil {
			t.Fatal(err)
		}
		for j := range want {
			if !reflect.DeepEqual(read(t, got[j]), read(t, want[j])) {
				t.Errorf("call %d, result %d: %v, want %v", i, j, got[j], want[j])
			}
		}
		turn.Close()
	}
	if want := (torch.GraphedStats{Calls: 12, Hits: 10, Eager: 2, Captures: 2, Graphs: 2}); g.Stats() != want {
		t.Errorf("got %+v, want %+v", g.Stats(), want)
	}
}

// A whole training step with forward, backward, clipping, optimizer and a changing learning rate
// gives the same losses and parameters as without a graph.
func TestGraphedTrainingStepEqualsEager(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	train := func(graphed bool) (losses []float64, params [][]float32, stats torch.GraphedStats) {
		if err := torch.ManualSeed(7); err != nil {
			t.Fatal(err)
		}
		net := nn.NewSequential(nn.NewLinear(8, 32, nn.LinearOptions{}), nn.NewReLU(),
			nn.NewLinear(32, 3, nn.LinearOptions{}))
		defer nn.Close(net)
		if err := nn.To(net, gpu); err != nil {
			t.Fatal(err)
		}
		opt, err := optim.NewSGD(nn.Parameters(net),
			optim.SGDOptions{LR: 0.1, Momentum: 0.9, WeightDecay: 1e-3, Capturable: true})
		if err != nil {
			t.Fatal(err)
		}
		defer opt.Close()
		step := func(in []*torch.Tensor) ([]*torch.Tensor, error) {
			loss := net.Forward(in[0]).CrossEntropy(in[1])
			if err := loss.Backward(); err != nil {
				return nil, err
			}
			norm, err := optim.ClipGradNorm(nn.Parameters(net), 0.5, optim.ClipOptions{})
			if err != nil {
				return nil, err
			}
			norm.Close()
			return []*torch.Tensor{loss}, opt.Step()
		}
		g := torch.NewGraphed(step, torch.GraphedOptions{})
		defer g.Close()
		x, err := torch.Zeros(gpu, torch.Float32, 16, 8)
		must(t, x, err)
		moved := ints(t, []int64{0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0}).To(gpu)
		y := moved.Keep() // for the scopes of all turns
		must(t, y, y.Err())
		moved.Close()
		for i := range 20 {
			if f := x.Normal_(0, 1); f.Err() != nil {
				t.Fatal(f.Err())
			}
			if err := opt.SetLR(0.1 / float64(1+i/5)); err != nil {
				t.Fatal(err)
			}
			turn := torch.NewScope("turn")
			var out []*torch.Tensor
			if graphed {
				out, err = g.Call(x.In(turn), y.In(turn))
			} else {
				out, err = step([]*torch.Tensor{x.In(turn), y.In(turn)})
			}
			if err != nil {
				t.Fatal(err)
			}
			v, err := out[0].Float64()
			if err != nil {
				t.Fatal(err)
			}
			losses = append(losses, v)
			turn.Close()
		}
		for _, p := range nn.Parameters(net) {
			params = append(params, read(t, p))
			if g := p.Grad(); g != nil {
				t.Errorf("Grad() of a parameter = %v, want nil", g)
			}
		}
		return losses, params, g.Stats()
	}
	eager, want, _ := train(false)
	graph, got, stats := train(true)
	for i := range eager {
		if math.Abs(eager[i]-graph[i]) > 1e-5 {
			t.Errorf("step %d: loss %v, without a graph %v", i, graph[i], eager[i])
		}
	}
	for i := range want {
		for j := range want[i] {
			if math.Abs(float64(want[i][j]-got[i][j])) > 1e-5 {
				t.Fatalf("parameter %d: %v, without a graph %v", i, got[i], want[i])
			}
		}
	}
	if stats.Hits != 19 || stats.Captures != 1 {
		t.Errorf("got %+v, want Hits 19, Captures 1", stats)
	}
}

// Dropout in a graph draws new numbers at each replay: the numbers that it would draw without a
// graph.
func TestGraphsDrawNewRandomNumbers(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	x, err := torch.Ones(gpu, torch.Float32, 4096)
	must(t, x, err)
	fn := func(in []*torch.Tensor) ([]*torch.Tensor, error) {
		return []*torch.Tensor{in[0].Dropout(0.5, true).Dropout(0.25, true)}, nil
	}
	masks := func(call func(...*torch.Tensor) ([]*torch.Tensor, error)) (all [][]float32) {
		if err := torch.ManualSeed(11); err != nil {
			t.Fatal(err)
		}
		for range 6 {
			turn := torch.NewScope("turn")
			out, err := call(x.In(turn))
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, read(t, out[0]))
			turn.Close()
		}
		return all
	}
	want := masks(func(in ...*torch.Tensor) ([]*torch.Tensor, error) { return fn(in) })
	g := torch.NewGraphed(fn, torch.GraphedOptions{})
	defer g.Close()
	for range 2 {
		got := masks(g.Call)
		for i := range want {
			if !reflect.DeepEqual(got[i], want[i]) {
				t.Errorf("call %d draws other numbers", i)
			}
			if i > 0 && reflect.DeepEqual(got[i], got[i-1]) {
				t.Errorf("call %d draws the same numbers as the one before", i)
			}
		}
	}
	// Two such graphs on two streams, and draws without a graph at the same time, run without an
	// error.
	var all sync.WaitGroup
	for i := range 3 {
		stream, err := cuda.NewStream(gpu, cuda.StreamOptions{})
		if err != nil {
			t.Fatal(err)
		}
		y, err := torch.Ones(gpu, torch.Float32, 512)
		must(t, y, err)
		if err := stream.Wait(cuda.DefaultStream(gpu)); err != nil {
			t.Fatal(err)
		}
		all.Go(func() {
			other := torch.NewGraphed(fn, torch.GraphedOptions{})
			defer other.Close()
			for range 100 {
				turn := torch.NewScope("turn")
				err := cuda.WithStream(stream, func() error {
					if i == 0 {
						return y.In(turn).Dropout(0.5, true).Err()
					}
					_, err := other.Call(y.In(turn))
					return err
				})
				turn.Close()
				if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	all.Wait()
	if err := gpu.Synchronize(); err != nil { // before y is freed
		t.Error(err)
	}
}

// Graphed detects a parameter that received other memory, and a dropped gradient.
func TestGraphedDetectsMovedTensors(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	w := onDevice(t, []float32{1, 2})
	if err := w.SetRequiresGrad(true); err != nil {
		t.Fatal(err)
	}
	x := onDevice(t, []float32{10, 100})
	fn := func(in []*torch.Tensor) ([]*torch.Tensor, error) {
		loss := in[0].Mul(w).Sum()
		return []*torch.Tensor{loss}, loss.Backward()
	}
	fixed := torch.NewGraphed(fn, torch.GraphedOptions{FixedArguments: true})
	defer fixed.Close()
	again := torch.NewGraphed(fn, torch.GraphedOptions{})
	defer again.Close()
	call := func(g *torch.Graphed) (float64, error) {
		out, err := g.Call(x)
		if err != nil {
			return 0, err
		}
		return out[0].Float64()
	}
	for _, g := range []*torch.Graphed{fixed, again, fixed, again} {
		if v, err := call(g); err != nil || v != 210 {
			t.Fatalf("got %v, %v, want 210, nil", v, err)
		}
	}
	wantValues(t, must(t, w.Grad(), nil), 40, 400) // one eager call and one replay of each
	other := onDevice(t, []float32{3, 4})
	if err := w.SetData(other); err != nil {
		t.Fatal(err)
	}
	if _, err := call(fixed); !errors.Is(err, cuda.ErrStale) || !strings.Contains(err.Error(), "other memory") {
		t.Errorf("a parameter that moved: got %v, want ErrStale", err)
	}
	if v, err := call(again); err != nil || v != 430 {
		t.Errorf("got %v, %v, want 430, nil", v, err)
	}
	if err := torch.ClearGrads(w); err != nil {
		t.Fatal(err)
	}
	if v, err := call(again); err != nil || v != 430 {
		t.Errorf("after the gradients were dropped: got %v, %v, want 430", v, err)
	}
	wantValues(t, must(t, w.Grad(), nil), 10, 100)
	if s := again.Stats(); s.Stale != 2 || s.Captures != 3 {
		t.Errorf("got %+v, want Stale 2, Captures 3", s)
	}
}

// A graph's operands stay until the graph is closed, even if the graph holds their only references,
// and results outlive the graph.
func TestGraphKeepsItsOperands(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	x, err := torch.Full(gpu, torch.Float32, 3, 1024)
	if err != nil {
		t.Fatal(err)
	}
	var out *torch.Tensor
	g, err := cuda.Capture(cuda.CaptureOptions{}, func() error {
		out = x.Square()
		return out.Err()
	})
	if err != nil {
		t.Fatal(err)
	}
	must(t, out, nil)
	x.Close()
	for range 50 { // these would reuse the memory
		y, err := torch.Full(gpu, torch.Float32, 5, 1024)
		must(t, y, err)
	}
	stream, err := cuda.NewStream(gpu, cuda.StreamOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if err := gpu.Synchronize(); err != nil {
		t.Fatal(err)
	}
	if err := g.Replay(stream); err != nil {
		t.Fatal(err)
	}
	g.Close() // with the replay in flight
	for range 50 {
		y, err := torch.Full(gpu, torch.Float32, 7, 1024)
		must(t, y, err)
	}
	if err := gpu.Synchronize(); err != nil {
		t.Fatal(err)
	}
	if v := read(t, out); v[0] != 9 || v[1023] != 9 {
		t.Errorf("got %v and at the end %v, want 9", v[:4], v[1023])
	}
}

// The error of a capture names the operator and the line. The failed capture is discarded, and the
// next capture works.
func TestFailedCaptureNamesTheOperator(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	x := onDevice(t, []float32{1, 2})
	host := floats(t, []float32{1, 2})
	for name, c := range map[string]struct {
		fn   func() error
		text string
	}{
		"Float64": {func() error { _, err := x.Sum().Float64(); return err },
			"Float64(float32[] cuda:0)"},
		"String":               {func() error { _, err := x.Float32s(); return err }, "Float32s("},
		"a copy from the host": {func() error { return x.CopyFrom(host, torch.CopyOptions{}) }, "NonBlocking"},
		"To the host":          {func() error { return x.To(cuda.CPU).Err() }, "NonBlocking"},
		"a pageable copy": {func() error {
			return x.CopyFrom(host,
				torch.CopyOptions{NonBlocking: true})
		}, "Copy_("},
		"ManualSeed": {func() error { return torch.ManualSeed(1) }, ""},
		"an error that is ignored": {func() error {
			x.CopyFrom(host,
				torch.CopyOptions{NonBlocking: true})
			return nil
		}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := cuda.Capture(cuda.CaptureOptions{}, func() error {
				if err := x.Square().Err(); err != nil {
					return err
				}
				return c.fn()
			})
			if name != "an error that is ignored" && (err == nil || !strings.Contains(err.Error(), c.text)) {
				t.Errorf("got %v, want an error with %q", err, c.text)
			}
			t.Log(err)
		})
	}
	g := torch.NewGraphed(func(in []*torch.Tensor) ([]*torch.Tensor,
		error) {
		return []*torch.Tensor{in[0].Square()}, nil
	}, torch.GraphedOptions{})
	defer g.Close()
	for range 3 {
		out, err := g.Call(x)
		if err != nil {
			t.Fatal(err)
		}
		wantValues(t, out[0], 1, 4)
	}
}

type counting struct{ batches int }

func (counting) BatchSize() int { return 64 }

func (counting) Fields() []torch.Spec {
	return []torch.Spec{{Name: "images", DType: torch.Uint8, Shape: []int64{1024}}}
}

func (c counting) Fill(ctx context.Context, _ int, lend func(context.Context) ([][]byte, error),
	deliver func(int, any) error) error {
	for b := range c.batches {
		slot, err := lend(ctx)
		if err != nil {
			return err
		}
		for i := range slot[0] {
			slot[0][i] = byte(b)
		}
		if err := deliver(64, nil); err != nil {
			return err
		}
	}
	return nil
}

// A prefetcher's slots have fixed addresses, so one graph per slot serves an epoch. Captures
// continue while the prefetcher runs.
func TestGraphedBesideAPrefetcher(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	feed, err := prefetcher.New(counting{200}, prefetcher.Options{Device: gpu, Depth: 3})
	if err != nil {
		t.Fatal(err)
	}
	defer feed.Close()
	g := torch.NewGraphed(func(in []*torch.Tensor) ([]*torch.Tensor, error) {
		return []*torch.Tensor{in[0].ToDType(torch.Float32).Sum()}, nil
	}, torch.GraphedOptions{})
	defer g.Close()
	small := onDevice(t, []float32{1})
	n := 0
	for batch, err := range feed.Epoch(context.Background(), 0) {
		if err != nil {
			t.Fatal(err)
		}
		out, err := g.Call(batch.Images)
		if err != nil {
			t.Fatal(err)
		}
		v, err := out[0].Float64()
		if err != nil {
			t.Fatal(err)
		}
		if want := float64(n % 256 * 64 * 1024); v != want {
			t.Fatalf("batch %d: %v, want %v", n, v, want)
		}
		if n%10 == 0 { // capture other graphs all the time
			other, err := cuda.Capture(cuda.CaptureOptions{},
				func() error { return small.NoGrad().AddScalar_(1).Err() })
			if err != nil {
				t.Fatal(err)
			}
			if err := other.Replay(cuda.DefaultStream(gpu)); err != nil {
				t.Fatal(err)
			}
			other.Close()
		}
		n++
	}
	if s := g.Stats(); n != 200 || s.Captures != 3 || s.Hits != 197 {
		t.Errorf("%d batches, %+v, want 200, Captures 3, Hits 197", n, s)
	}
	wantValues(t, small, 21)
}

// Matrix products in concurrent graphs share cuBLAS' workspace neither with each other nor with
// products outside.
func TestProductsInConcurrentGraphs(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	a, err := torch.Randn(gpu, torch.Float32, 64, 16384)
	must(t, a, err)
	// The sum is long: cuBLAS splits it and adds the parts in its workspace.
	b, err := torch.Randn(gpu, torch.Float32, 16384, 64)
	must(t, b, err)
	once := a.MatMul(b)
	must(t, once, once.Err())
	want := read(t, once)
	var all sync.WaitGroup
	for i := range 4 {
		stream, err := cuda.NewStream(gpu, cuda.StreamOptions{})
		if err != nil {
			t.Fatal(err)
		}
		all.Go(func() {
			g := torch.NewGraphed(func(in []*torch.Tensor) ([]*torch.Tensor, error) {
				return []*torch.Tensor{in[0].MatMul(b)}, nil
			}, torch.GraphedOptions{})
			defer g.Close()
			err := cuda.WithStream(stream, func() error {
				for range 30 {
					turn := torch.NewScope("turn")
					out, err := g.Call(a.In(turn))
					if i == 3 && err == nil {
						out[0] = a.In(turn).MatMul(b)
					}
					for range 5 {
						if err == nil && i < 3 {
							_, err = g.Call(a.In(turn))
						}
					}
					if err != nil {
						return err
					}
					got, err := out[0].Float32s()
					if err != nil {
						return err
					}
					for j := range want {
						if math.Abs(float64(got[j]-want[j])) > 1e-2 {
							return fmt.Errorf("element %d is %v, want %v", j, got[j], want[j])
						}
					}
					turn.Close()
				}
				return nil
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
}
