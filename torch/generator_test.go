package torch_test

import (
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/torch"
)

func newGenerator(t *testing.T, device cuda.Device, seed uint64) *torch.Generator {
	t.Helper()
	g, err := torch.NewGenerator(device, seed)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { g.Close() })
	return g
}

// drawn returns numbers that an operator draws from g.
func drawn(t *testing.T, g *torch.Generator) []float32 {
	t.Helper()
	x, err := torch.Empty(g.Device(), torch.Float32, 8)
	must(t, x, err)
	y := torch.Call1("uniform_", x, 0.0, 1.0, torch.Keywords{"generator": g})
	if err := y.Err(); err != nil {
		t.Fatal(err)
	}
	return read(t, x)
}

func TestGenerators(t *testing.T) {
	devices := []cuda.Device{cuda.CPU}
	if cuda.DeviceCount() > 0 {
		devices = append(devices, gpu)
	}
	for _, d := range devices {
		t.Run(d.String(), func(t *testing.T) {
			a, b := newGenerator(t, d, 5), newGenerator(t, d, 5)
			first := drawn(t, a)
			if got := drawn(t, b); !slices.Equal(got, first) {
				t.Errorf("two generators with seed 5 draw %v and %v, want equal numbers", first, got)
			}
			state, err := a.State()
			must(t, state, err)
			second := drawn(t, a)
			if slices.Equal(first, second) {
				t.Errorf("the second numbers %v are the first, want others", second)
			}
			if err := b.SetState(state); err != nil {
				t.Fatal(err)
			}
			if got := drawn(t, b); !slices.Equal(got, second) {
				t.Errorf("after SetState the next numbers are %v, want %v", got, second)
			}
			if seed, err := a.InitialSeed(); err != nil || seed != 5 {
				t.Errorf("seed %d, %v, want 5, nil", seed, err)
			}
			if err := a.Seed(5); err != nil {
				t.Fatal(err)
			}
			if got := drawn(t, a); !slices.Equal(got, first) {
				t.Errorf("after Seed(5) the next numbers are %v, want %v", got, first)
			}
			if d == cuda.CPU {
				return
			}
			offset, err := a.Offset()
			if err != nil || offset == 0 || offset%4 != 0 {
				t.Errorf("offset %d, %v", offset, err)
			}
			if err := errors.Join(a.SetOffset(0), b.SetOffset(offset)); err != nil {
				t.Fatal(err)
			}
			if gotA, gotB := drawn(t, a), drawn(t, b); !slices.Equal(gotA, first) || !slices.Equal(gotB, second) {
				t.Errorf("at the offsets 0 and %d the next numbers are %v and %v, want %v and %v",
					offset, gotA, gotB, first, second)
			}
			if err := a.SetOffset(3); !errors.Is(err, cuda.ErrInvalidArgument) {
				t.Errorf("offset 3: %v, want cuda.ErrInvalidArgument", err)
			}
		})
	}
}

func TestOperatorsUseTheDefaultGenerator(t *testing.T) {
	g, err := torch.DefaultGenerator(cuda.CPU)
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	if err := g.Seed(9); err != nil {
		t.Fatal(err)
	}
	x, err := torch.Rand(cuda.CPU, torch.Float32, 8)
	must(t, x, err)
	if got, want := read(t, x), drawn(t, newGenerator(t, cuda.CPU, 9)); !slices.Equal(got, want) {
		t.Errorf("Rand after the default generator's Seed(9) = %v, want %v", got, want)
	}
}

func TestWrongGeneratorsAreRefused(t *testing.T) {
	g := newGenerator(t, cuda.CPU, 1)
	g.Close()
	x := floats(t, []float32{1})
	with := func(g any) error { return torch.Call1("normal_", x, 0.0, 1.0, torch.Keywords{"generator": g}).Err() }
	if err := with(g); !errors.Is(err, torch.ErrClosed) {
		t.Errorf("closed: %v, want torch.ErrClosed", err)
	}
	if err := with(&torch.Generator{}); !errors.Is(err, torch.ErrClosed) {
		t.Errorf("zero: %v, want torch.ErrClosed", err)
	}
	if err := with(7); !errors.Is(err, cuda.ErrInvalidArgument) {
		t.Errorf("a number: %v, want cuda.ErrInvalidArgument", err)
	}
	if _, err := g.InitialSeed(); !errors.Is(err, torch.ErrClosed) {
		t.Errorf("Seed: %v, want torch.ErrClosed", err)
	}
	if _, err := newGenerator(t, cuda.CPU, 1).Offset(); err == nil {
		t.Error("Offset() of a CPU generator: got no error, want one")
	}
	if _, err := torch.NewGenerator(cuda.Device(cuda.DeviceCount()), 1); !errors.Is(err, cuda.ErrNoDevice) {
		t.Errorf("no device: %v, want cuda.ErrNoDevice", err)
	}
}

// Replays of a graph that draws from several generators draw the same numbers as operators would.
func TestSeveralGeneratorsInAGraph(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	const seeds, replays = 3, 4
	var graphed, eager [seeds]*torch.Generator
	var x [seeds]*torch.Tensor
	for i := range seeds {
		graphed[i], eager[i] = newGenerator(t, gpu, uint64(i)), newGenerator(t, gpu, uint64(i))
		var err error
		x[i], err = torch.Zeros(gpu, torch.Float32, 8)
		must(t, x[i], err)
	}
	if err := gpu.Synchronize(); err != nil {
		t.Fatal(err)
	}
	g, err := cuda.Capture(cuda.CaptureOptions{}, func() error {
		for i := range seeds {
			if err := torch.Call1("uniform_", x[i], 0.0, 1.0,
				torch.Keywords{"generator": graphed[i]}).Err(); err != nil {
				return err
			}
		}
		if err := graphed[0].Seed(1); !errors.Is(err, cuda.ErrCapture) {
			t.Errorf("Seed in the captured function: %v, want cuda.ErrCapture", err)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	graphed[2].Close() // the graph keeps its numbers
	for replay := range replays {
		if err := g.Replay(cuda.DefaultStream(gpu)); err != nil {
			t.Fatal(err)
		}
		for i := range seeds {
			if got, want := read(t, x[i]), drawn(t, eager[i]); !slices.Equal(got, want) {
				t.Errorf("replay %d, generator %d: %v instead of %v", replay, i, got, want)
			}
		}
	}
}

// Setting a seed waits for the capture of another goroutine, and is refused in a captured function.
func TestManualSeedBesideACapture(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	x := onDevice(t, []float32{1, 2})
	var other sync.WaitGroup
	var seeded error
	begun := make(chan struct{})
	g, err := cuda.Capture(cuda.CaptureOptions{}, func() error {
		if err := torch.ManualSeed(3); !errors.Is(err, cuda.ErrCapture) ||
			!strings.Contains(err.Error(), "random generator") {
			t.Errorf("in the captured function: %v, want cuda.ErrCapture with \"random generator\"", err)
		}
		other.Go(func() {
			close(begun)
			seeded = torch.ManualSeed(4)
		})
		<-begun
		return x.Uniform_(0, 1).Err()
	})
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	other.Wait()
	if seeded != nil {
		t.Errorf("beside the capture: %v, want nil", seeded)
	}
	if err := g.Replay(cuda.DefaultStream(gpu)); err != nil {
		t.Fatal(err)
	}
	got := read(t, x)
	if err := torch.ManualSeed(4); err != nil {
		t.Fatal(err)
	}
	if want := read(t, x.Uniform_(0, 1)); !slices.Equal(got, want) {
		t.Errorf("the replay drew %v, want %v of the seed", got, want)
	}
}

func TestGrad(t *testing.T) {
	x := floats(t, []float32{1, 2, 3})
	unused := floats(t, []float32{1})
	if err := errors.Join(x.SetRequiresGrad(true), unused.SetRequiresGrad(true)); err != nil {
		t.Fatal(err)
	}
	middle := x.Square()
	y := middle.MulScalar(2).Sum()
	grads, err := torch.Grad([]*torch.Tensor{y}, []*torch.Tensor{x, middle}, torch.GradOptions{CreateGraph: true})
	if err != nil {
		t.Fatal(err)
	}
	wantValues(t, grads[0], 4, 8, 12)
	wantValues(t, grads[1], 2, 2, 2)
	if g := x.Grad(); g != nil {
		t.Errorf("the leaf has accumulated %v, want nil", g)
	}
	second, err := torch.Grad(grads[:1], []*torch.Tensor{x},
		torch.GradOptions{Gradients: []*torch.Tensor{floats(t, []float32{1, 1, 1})}})
	if err != nil {
		t.Fatal(err)
	}
	wantValues(t, second[0], 4, 4, 4)
	if _, err := torch.Grad([]*torch.Tensor{x.Sum()}, []*torch.Tensor{unused}, torch.GradOptions{}); err == nil {
		t.Error("Grad for an unused input: got no error, want one")
	}
	none, err := torch.Grad([]*torch.Tensor{x.Sum()}, []*torch.Tensor{unused}, torch.GradOptions{AllowUnused: true})
	if err != nil || len(none) != 1 || none[0] != nil {
		t.Errorf("an unused input: %v, %v, want length 1, nil, nil", none, err)
	}
	for name, call := range map[string]func() ([]*torch.Tensor, error){
		"no outputs": func() ([]*torch.Tensor,
			error) {
			return torch.Grad(nil, []*torch.Tensor{x}, torch.GradOptions{})
		},
		"not a scalar": func() ([]*torch.Tensor, error) {
			return torch.Grad([]*torch.Tensor{x.Square()}, []*torch.Tensor{x}, torch.GradOptions{})
		},
		"a constant": func() ([]*torch.Tensor, error) {
			return torch.Grad([]*torch.Tensor{x.Sum()}, []*torch.Tensor{floats(t, []float32{1})}, torch.GradOptions{})
		},
		"other gradients": func() ([]*torch.Tensor, error) {
			return torch.Grad([]*torch.Tensor{x.Sum()}, []*torch.Tensor{x},
				torch.GradOptions{Gradients: []*torch.Tensor{x, x}})
		},
	} {
		if _, err := call(); !errors.Is(err, cuda.ErrInvalidArgument) {
			t.Errorf("%s: %v, want cuda.ErrInvalidArgument", name, err)
		}
	}
}
