package nn_test

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/torch"
)

// branches is a network with Parallels inside Parallels and inside Sequentials, and a second
// network with the same parameters that runs the branches in turn.
type branches struct {
	parallel nn.Module
	inTurn   func(x *torch.Tensor) *torch.Tensor
}

func newBranches(t *testing.T) branches {
	t.Helper()
	if err := torch.ManualSeed(7); err != nil {
		t.Fatal(err)
	}
	linear := func(in, out int) nn.Module {
		return nn.NewSequential(nn.NewLinear(in, out, nn.LinearOptions{}), nn.Func((*torch.Tensor).Tanh))
	}
	a, b, c, d, e := linear(8, 6), linear(8, 5), linear(5, 4), linear(5, 4), linear(10, 3)
	net := nn.NewSequential(
		nn.NewParallel(nn.Concat(1), a,
			nn.NewSequential(b, nn.NewParallel(nn.Sum(), c, d, nn.NewSequential(c, nn.NewReLU())))),
		e,
		nn.NewParallel(nn.Product(), nn.NewReLU(), nn.Func((*torch.Tensor).Sigmoid), nn.Func((*torch.Tensor).Tanh)),
	)
	if err := nn.Err(net); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { nn.Close(net) })
	return branches{net, func(x *torch.Tensor) *torch.Tensor {
		h := b.Forward(x)
		h = c.Forward(h).Add(d.Forward(h)).Add(c.Forward(h).ReLU())
		h = e.Forward(torch.Cat([]*torch.Tensor{a.Forward(x), h}, 1))
		return h.ReLU().Mul(h.Sigmoid()).Mul(h.Tanh())
	}}
}

// results returns the output and all gradients of one forward and backward pass.
func (b branches) results(t *testing.T, forward func(x *torch.Tensor) *torch.Tensor,
	x *torch.Tensor) map[string][]float32 {
	t.Helper()
	s := torch.NewScope("results")
	defer s.Close()
	got := map[string][]float32{}
	read := func(name string, v *torch.Tensor) {
		f, err := v.Float32s()
		if err != nil {
			t.Fatalf("%s: %v, want no error", name, err)
		}
		got[name] = f
	}
	parameters := nn.NamedParameters(b.parallel)
	if err := torch.ClearGrads(nn.Parameters(b.parallel)...); err != nil {
		t.Fatal(err)
	}
	y := forward(x.In(s))
	if err := y.Square().Sum().Backward(); err != nil {
		t.Fatal(err)
	}
	read("output", y)
	for _, p := range parameters {
		read(p.Name, p.Tensor.In(s).Grad())
	}
	return got
}

func (b branches) compare(t *testing.T, x *torch.Tensor) {
	t.Helper()
	want := b.results(t, b.inTurn, x)
	got := b.results(t, b.parallel.Forward, x)
	if len(got) < 11 || len(got["output"]) == 0 {
		t.Fatalf("compared %d tensors", len(got))
	}
	for name := range want {
		if !reflect.DeepEqual(got[name], want[name]) {
			t.Errorf("%s: %v, in turn %v", name, got[name], want[name])
		}
	}
}

func TestParallelEqualsInTurn(t *testing.T) {
	b := newBranches(t)
	x, err := torch.Randn(cuda.CPU, torch.Float32, 3, 8)
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	b.compare(t, x)
}

func TestParallelNames(t *testing.T) {
	b := newBranches(t)
	got := names(nn.State(b.parallel))
	want := []string{"0.0.0.weight", "0.0.0.bias", "0.1.0.0.weight", "0.1.0.0.bias", "0.1.1.0.0.weight",
		"0.1.1.0.0.bias", "0.1.1.1.0.weight", "0.1.1.1.0.bias",
		"0.1.1.2.0.0.weight", "0.1.1.2.0.0.bias", "1.0.weight", "1.0.bias"}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	d := nn.NewDropout(0.5)
	nn.Train(nn.NewParallel(nn.Sum(), d), false)
	x, err := torch.Ones(cuda.CPU, torch.Float32, 100)
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	if sum, err := d.Forward(x).Sum().Float64(); sum != 100 || err != nil {
		t.Errorf("evaluation mode does not reach the branches: %v, %v, want 100, nil", sum, err)
	}
}

func TestParallelOutputs(t *testing.T) {
	s := torch.NewScope("test")
	defer s.Close()
	one := func(value float64) *torch.Tensor {
		x, err := torch.Full(cuda.CPU, torch.Float32, value, 1)
		if err != nil {
			t.Fatal(err)
		}
		return s.Own(x)
	}
	times := func(factor float64) nn.Module {
		return nn.Func(func(x *torch.Tensor) *torch.Tensor { return x.MulScalar(factor) })
	}
	three := []nn.Module{times(2), times(3), times(5)}
	text := func(ys []*torch.Tensor) string {
		var values []string
		for _, y := range ys {
			v, err := y.Float64()
			if err != nil {
				return err.Error()
			}
			values = append(values, fmt.Sprint(v))
		}
		return strings.Join(values, " ")
	}
	p := nn.NewParallel(nil, three...)
	if got := text(p.Outputs(one(7))); got != "14 21 35" {
		t.Errorf("one input: %s, want \"14 21 35\"", got)
	}
	if got := text(p.Outputs(one(1), one(10), one(100))); got != "2 30 500" {
		t.Errorf("one input per branch: %s, want \"2 30 500\"", got)
	}
	for name, c := range map[string]struct {
		join nn.Join
		want string
	}{"sum": {nn.Sum(), "10"}, "product": {nn.Product(), "30"}} {
		t.Run(name, func(t *testing.T) {
			if got := text([]*torch.Tensor{nn.NewParallel(c.join, three...).Forward(one(1))}); got != c.want {
				t.Error(got)
			}
		})
	}
	if got := nn.NewParallel(nn.Concat(0), three...).Forward(one(1)); !reflect.DeepEqual(got.Shape(), []int64{3}) {
		t.Errorf("concat: %v, want [3]", got)
	}
	if got := nn.NewParallel(nn.Sum(), times(2)).Forward(one(4)); text([]*torch.Tensor{got}) != "8" {
		t.Errorf("a single branch: %v, want \"8\"", got)
	}
}

func TestParallelErrors(t *testing.T) {
	x, err := torch.Ones(cuda.CPU, torch.Float32, 2)
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	ran := 0
	count := nn.Func(func(x *torch.Tensor) *torch.Tensor { ran++; return x })
	for name, c := range map[string]struct {
		y    *torch.Tensor
		want string
	}{
		"no join":      {nn.NewParallel(nil, count).Forward(x), "call Outputs"},
		"no branches":  {nn.NewParallel(nn.Sum()).Forward(x), "no branches"},
		"a nil branch": {nn.NewParallel(nn.Sum(), count, nil).Forward(x), "1: nil made at parallel_test.go"},
		"a nil output": {nn.NewParallel(nn.Sum(),
			nn.Func(func(*torch.Tensor) *torch.Tensor { return nil })).Forward(x), "0: Func made at parallel_test.go"},
		"a nil result": {nn.NewParallel(func([]*torch.Tensor) *torch.Tensor { return nil },
			count).Forward(x), "Join returned nil"},
		"two inputs of 3": {nn.NewParallel(nil, count, count, count).Outputs(x, x)[2], "2 inputs for 3 branches"},
		"a nil input":     {nn.NewParallel(nn.Sum(), nn.NewReLU()).Forward(nil), "nil"},
	} {
		t.Run(name, func(t *testing.T) {
			if err := c.y.Err(); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Error(err)
			}
		})
	}
	// The error of a failing branch has the branch's number as its path. The other branches run.
	ran = 0
	bad := nn.NewLinear(5, 1, nn.LinearOptions{})
	defer nn.Close(bad)
	ys := nn.NewParallel(nil, count, bad, count).Outputs(x)
	var e *torch.Error
	if err := ys[1].Err(); !errors.As(err, &e) ||
		!strings.HasPrefix(err.Error(), "1: Linear made at parallel_test.go") || ys[0].Err() != nil ||
		ys[2].Err() != nil || ran != 2 {
		t.Errorf("%v, %v, %v; %d ran", ys[0].Err(), ys[1].Err(), ys[2].Err(), ran)
	}
	if ys := nn.NewParallel(nn.Sum()).Outputs(x); len(ys) != 0 {
		t.Errorf("%d outputs of no branches, want 0", len(ys))
	}
}

// Without a GPU there are no streams to return.
func TestParallelClose(t *testing.T) {
	x, err := torch.Ones(cuda.CPU, torch.Float32, 2)
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	p := nn.NewParallel(nn.Sum(), nn.NewReLU(), nn.NewReLU())
	for range 2 {
		if got, err := p.Forward(x).Float32s(); err != nil || got[0] != 2 {
			t.Errorf("got %v, %v, want 2, nil", got, err)
		}
		if err := errors.Join(p.Close(), nn.Close(p)); err != nil {
			t.Error(err)
		}
	}
}
