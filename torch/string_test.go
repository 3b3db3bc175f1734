package torch_test

import (
	"fmt"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

func TestStringsOfHandles(t *testing.T) {
	s := torch.NewScope("step")
	x, err := torch.Zeros(cuda.CPU, torch.Float32, 2)
	if err != nil {
		t.Fatal(err)
	}
	s.Own(x)
	g, err := torch.NewGenerator(cuda.CPU, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	want := func(value fmt.Stringer, want string) {
		t.Helper()
		if got := fmt.Sprint(value); got != want {
			t.Errorf("%T: got %q, want %q", value, got, want)
		}
	}
	want(s, `scope "step" of 1 tensors`)
	s.Close()
	want(s, `closed scope "step"`)
	want((*torch.Scope)(nil), "no scope")
	want(&torch.Scope{}, "no scope")
	want(g, "generator on cpu")
	want((*torch.Generator)(nil), "no generator")
	want((*torch.Graphed)(nil), "closed graphed function")

	var inside string
	var step *torch.Graphed
	step = torch.NewGraphed(func([]*torch.Tensor) ([]*torch.Tensor, error) {
		inside = fmt.Sprint(step) // must not wait for the call that it is in
		return nil, nil
	}, torch.GraphedOptions{Device: cuda.CPU})
	if _, err := step.Call(); err != nil {
		t.Fatal(err)
	}
	if want := "graphed function in a call"; inside != want {
		t.Errorf("got %q, want %q", inside, want)
	}
	want(step, "graphed function with 0 graphs")
	step.Close()
	want(step, "closed graphed function")
}
