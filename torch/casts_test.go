package torch_test

import (
	"errors"
	"slices"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

// castNet has weights of 20 linear layers, so that they are cast in two calls. It also has a
// convolution, a weight that needs no grad, a weight that two layers use, a norm, whose weight
// stays float32, and the biases of products that AddMM and Call1 compute. The rows of some weights
// are not consecutive in memory: one is transposed, and one has gaps.
type castNet struct {
	linear             []*torch.Tensor
	kernel, shift      *torch.Tensor
	scale, fixed, tied *torch.Tensor
	added, named       *torch.Tensor
	turned, gaps       *torch.Tensor
}

func newCastNet(t *testing.T) *castNet {
	t.Helper()
	if err := torch.ManualSeed(5); err != nil {
		t.Fatal(err)
	}
	parameter := func(requires bool, shape ...int64) *torch.Tensor {
		p, err := torch.Randn(cuda.CPU, torch.Float32, shape...)
		if err == nil {
			err = p.SetRequiresGrad(requires)
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { p.Close() })
		return p
	}
	n := &castNet{}
	for range 20 {
		n.linear = append(n.linear, parameter(true, 8, 8))
	}
	n.kernel, n.shift = parameter(true, 2, 2, 3, 3), parameter(true, 2)
	n.scale, n.fixed, n.tied = parameter(true, 8), parameter(false, 8, 8), parameter(true, 8, 8)
	n.added, n.named = parameter(true, 8), parameter(true, 8)
	for _, view := range []struct {
		to   **torch.Tensor
		made *torch.Tensor
	}{{&n.turned, parameter(false, 8, 8).Transpose(0, 1)}, {&n.gaps, parameter(false, 8, 24).Narrow(1, 8, 8)}} {
		t.Cleanup(func() { view.made.Close() })
		if err := view.made.SetRequiresGrad(true); err != nil {
			t.Fatal(err)
		}
		*view.to = view.made
	}
	return n
}

func (n *castNet) parameters() []*torch.Tensor {
	return append(slices.Clone(n.linear), n.kernel, n.shift, n.scale, n.fixed, n.tied, n.added, n.named,
		n.turned, n.gaps)
}

// forward takes x [2 2 8 8].
func (n *castNet) forward(x *torch.Tensor) *torch.Tensor {
	x = x.Conv2d(n.kernel, n.shift, torch.Conv2dOptions{Padding: []int64{1}})
	for _, w := range n.linear {
		x = x.Linear(w, nil).Tanh()
	}
	x = x.LayerNorm([]int64{8}, n.scale, nil, 1e-5).MatMul(n.fixed)
	x = n.added.AddMM(x.Flatten(0, -2), n.fixed, torch.AddMMOptions{})
	x = torch.Call1("addmm", n.named, x, n.fixed).Linear(n.turned, nil).Linear(n.gaps, nil)
	return x.Linear(n.tied, nil).Sum()
}

// gradients returns the loss and the gradients of a pass. begin makes the pass's casts.
func (n *castNet) gradients(t *testing.T, begin func(*torch.Scope) error) (loss float64, grads [][]float32) {
	t.Helper()
	scope := torch.NewScope("pass")
	defer scope.Close()
	values := make([]float32, 2*2*8*8)
	for i := range values {
		values[i] = float32(i%13)/6 - 1
	}
	x, err := torch.FromFloat32s(values, 2, 2, 8, 8)
	if err != nil {
		t.Fatal(err)
	}
	x = scope.Own(x)
	if begin != nil {
		if err := begin(scope); err != nil {
			t.Fatal(err)
		}
	}
	value := n.forward(x.Autocast(torch.BFloat16))
	if err := value.Backward(); err != nil {
		t.Fatal(err)
	}
	if loss, err = value.Float64(); err != nil {
		t.Fatal(err)
	}
	for _, p := range n.parameters() {
		g := p.Grad()
		if g == nil {
			grads = append(grads, nil)
			continue
		}
		if g.DType() != torch.Float32 {
			t.Errorf("a gradient of %v, want float32", g.DType())
		}
		all, err := g.Float32s()
		if err != nil {
			t.Fatal(err)
		}
		grads = append(grads, all)
		g.Close()
	}
	if err := torch.ClearGrads(n.parameters()...); err != nil {
		t.Fatal(err)
	}
	return loss, grads
}

// Casts of all parameters together give the bits of a cast for each operator.
func TestParameterCastsKeepTheBits(t *testing.T) {
	n := newCastNet(t)
	want, grads := n.gradients(t, nil)
	casts, err := torch.NewParameterCasts(torch.BFloat16, n.parameters())
	if err != nil {
		t.Fatal(err)
	}
	live := settled(t)
	for pass := range 3 { // the first one learns which parameters are cast
		var made int
		got, gotGrads := n.gradients(t, func(s *torch.Scope) error {
			before := s.Len()
			err := casts.Begin(s)
			made = s.Len() - before
			return err
		})
		if pass > 0 && made != len(n.parameters())-1 || pass == 0 && made != 0 {
			t.Errorf("pass %d: %d casts: want one for each parameter but the norm's, from the second "+
				"pass on", pass, made)
		}
		if got != want {
			t.Errorf("pass %d: loss %v, want %v", pass, got, want)
		}
		for i, g := range gotGrads {
			if !slices.Equal(g, grads[i]) {
				t.Errorf("pass %d: another gradient of parameter %d", pass, i)
			}
		}
	}
	if now := torch.LiveTensors(); now != live {
		t.Errorf("%d tensors are left, want 0", now-live)
	}
}

// The casts belong to one pass: the next pass sees changed parameters, and so does other work in
// between.
func TestParameterCastsFollowTheParameters(t *testing.T) {
	n := newCastNet(t)
	casts, err := torch.NewParameterCasts(torch.BFloat16, n.parameters())
	if err != nil {
		t.Fatal(err)
	}
	n.gradients(t, casts.Begin)
	before, _ := n.gradients(t, casts.Begin)
	for _, p := range n.parameters() {
		if err := p.NoGrad().MulScalar_(0.5).Err(); err != nil {
			t.Fatal(err)
		}
	}
	want, grads := n.gradients(t, nil)
	got, gotGrads := n.gradients(t, casts.Begin)
	if got != want || got == before || !slices.EqualFunc(grads, gotGrads, slices.Equal[[]float32]) {
		t.Errorf("loss %v after the parameters changed: want %v, not %v", got, want, before)
	}
	// A pass with another dtype, or without autocast, uses the parameters themselves.
	scope := torch.NewScope("pass")
	defer scope.Close()
	if err := casts.Begin(scope); err != nil {
		t.Fatal(err)
	}
	ones, err := torch.Ones(cuda.CPU, torch.Float32, 8, 8)
	if err != nil {
		t.Fatal(err)
	}
	x := scope.Own(ones)
	if y := x.Linear(n.tied, nil); y.DType() != torch.Float32 {
		t.Errorf("without autocast the result is %v: %v, want float32", y.DType(), y.Err())
	}
	if y := x.Autocast(torch.Float16).Linear(n.tied, nil); y.DType() != torch.Float16 {
		t.Errorf("under autocast to float16 the result is %v: %v, want float16", y.DType(), y.Err())
	}
}

func TestParameterCastsRefuse(t *testing.T) {
	n := newCastNet(t)
	if _, err := torch.NewParameterCasts(torch.Float32, n.parameters()); !errors.Is(err, cuda.ErrInvalidArgument) {
		t.Errorf("to float32: %v, want cuda.ErrInvalidArgument", err)
	}
	if _, err := torch.NewParameterCasts(torch.BFloat16, []*torch.Tensor{nil}); err == nil {
		t.Error("NewParameterCasts with a nil parameter: got no error, want one")
	}
	casts, err := torch.NewParameterCasts(torch.BFloat16, n.parameters())
	if err != nil {
		t.Fatal(err)
	}
	n.gradients(t, casts.Begin)
	if err := casts.Begin(nil); !errors.Is(err, cuda.ErrInvalidArgument) {
		t.Errorf("no scope: %v, want cuda.ErrInvalidArgument", err)
	}
	n.tied.Close()
	scope := torch.NewScope("pass")
	defer scope.Close()
	if err := casts.Begin(scope); !errors.Is(err, torch.ErrClosed) {
		t.Errorf("a closed parameter: %v, want torch.ErrClosed", err)
	}
	if n := scope.Len(); n != 16 { // the casts of the first call
		t.Errorf("%d casts, want 16", n)
	}
}
