package torch_test

import (
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/leaks"
	"github.com/torchstream/torchstream/torch"
)

// countOf returns the count of the kind's sites whose stack starts with a function with the suffix
// first and contains a function with the suffix through.
func countOf(sites leaks.Sites, kind, first, through string) (n int64) {
	for _, s := range sites {
		for _, f := range s.Stack {
			if s.Kind == kind && strings.HasSuffix(s.Stack[0].Function, first) &&
				strings.HasSuffix(f.Function, through) {
				n += s.Count
				break
			}
		}
	}
	return n
}

//go:noinline
func forgetTensors(t *testing.T) {
	x := torch.NewScope("forgotten").Own(floats(t, []float32{1, 2}))
	for range 3 {
		x.Add(x)
	}
	if _, err := torch.Ones(cuda.CPU, torch.Float32, 2); err != nil {
		t.Fatal(err)
	}
}

// Leaks names the lines that made unclosed tensors after the garbage collector has found them.
func TestLeaksNameTheirMaker(t *testing.T) {
	if !leaks.Enabled {
		forgetTensors(t)
		if n := len(leaks.Open()) + len(leaks.Caught()); n != 0 {
			t.Errorf("%d sites without the tag debug, want 0", n)
		}
		return
	}
	settled(t) // the tensors of earlier tests are not counted
	before := torch.Caught()
	forgetTensors(t)
	if !collect(func() bool { return torch.Caught() >= before+5 }) {
		t.Fatalf("caught %d of 5", torch.Caught()-before)
	}
	caught := leaks.Caught()
	for _, c := range []struct {
		kind, first string
		want        int64
	}{
		{"tensor", "torch.(*Tensor).Add", 3},
		{"tensor", "torch.(*Scope).Own", 1},
		{"tensor", "torch.TensorOptions.Ones", 1},
		{"scope", "torch.NewScope", 1},
	} {
		if got := countOf(caught, c.kind, c.first, "forgetTensors"); got != c.want {
			t.Errorf("%s by %s: caught %d, want %d\n%s", c.kind, c.first, got, c.want, caught)
		}
	}
	if open := countOf(leaks.Open(), "tensor", "", "forgetTensors"); open != 0 {
		t.Errorf("%d caught tensors are still open, want 0", open)
	}
}

//go:noinline
func addFour(x *torch.Tensor) {
	for range 4 {
		x.Add(x)
	}
}

// Open names a tensor's line until the tensor or its scope is closed; closing again changes
// nothing.
func TestOpenTensorsNameTheirMaker(t *testing.T) {
	if !leaks.Enabled {
		t.Skip("needs the tag debug")
	}
	open := func() int64 { return countOf(leaks.Open(), "tensor", "torch.(*Tensor).Add", "addFour") }
	scope := torch.NewScope("open")
	addFour(floats(t, []float32{1, 2}).In(scope))
	if got := open(); got != 4 {
		t.Errorf("%d open, want 4", got)
	}
	scope.Close()
	scope.Close()
	if got := open(); got != 0 {
		t.Errorf("%d open after the scope, want 0", got)
	}
	x := floats(t, []float32{1, 2})
	y := x.Add(x)
	y.Close()
	y.Close()
	if got := countOf(leaks.Open(), "tensor", "torch.(*Tensor).Add", t.Name()); got != 0 {
		t.Errorf("%d open after Close, want 0", got)
	}
}
