package nn

import (
	"fmt"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/torch"
)

// graphedNet returns a small network with modes and buffers.
func graphedNet(t *testing.T, d cuda.Device) *Sequential {
	t.Helper()
	if err := torch.ManualSeed(3); err != nil {
		t.Fatal(err)
	}
	net := NewSequential(NewConv2d(3, 8, 3, Conv2dOptions{Padding: 1}),
		NewBatchNorm2d(8, BatchNorm2dOptions{}), NewDropout(0.25))
	t.Cleanup(func() { closeState(net) })
	if err := To(net, d); err != nil {
		t.Fatal(err)
	}
	return net
}

func closeState(m Module) {
	for _, n := range State(m) {
		n.Tensor.Close()
	}
}

// trainGraphed runs some training steps, and returns the losses of training and evaluation.
func trainGraphed(t *testing.T, m Module, d cuda.Device) (losses []float64) {
	t.Helper()
	if err := torch.ManualSeed(5); err != nil { // the masks of Dropout
		t.Fatal(err)
	}
	for n := range 12 {
		scope := torch.NewScope("step")
		x, err := torch.TensorOptions{Device: d, DType: torch.Float32, Scope: scope}.Full(0.1*float64(n+1), 2, 3, 8, 8)
		if err != nil {
			t.Fatal(err)
		}
		loss := m.Forward(x).Square().Mean()
		if err := loss.Backward(); err != nil {
			t.Fatal(err)
		}
		for _, p := range Parameters(m) {
			if err := p.NoGrad().Sub_(p.In(scope).Grad().MulScalar(0.01)).Err(); err != nil {
				t.Fatal(err)
			}
		}
		if err := torch.ClearGrads(Parameters(m)...); err != nil {
			t.Fatal(err)
		}
		Train(m, false)
		evaluated := m.Forward(x.NoGrad()).Square().Mean()
		Train(m, true)
		for _, y := range []*torch.Tensor{loss, evaluated} {
			v, err := y.Float64()
			if err != nil {
				t.Fatal(err)
			}
			losses = append(losses, v)
		}
		scope.Close()
	}
	return losses
}

func TestGraphedReplacesItsModule(t *testing.T) {
	net := graphedNet(t, cuda.CPU)
	g := NewGraphed(net, torch.GraphedModuleOptions{})
	defer g.Close()
	names := func(m Module) (all []string) {
		for _, n := range State(m) {
			all = append(all, n.Name)
		}
		return all
	}
	if got, want := fmt.Sprint(names(g)), fmt.Sprint(names(net)); got != want {
		t.Errorf("names %v, want %v", got, want)
	}
	want := trainGraphed(t, graphedNet(t, cuda.CPU), cuda.CPU)
	if got := trainGraphed(t, g, cuda.CPU); fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("losses %v, want %v", got, want)
	}
	if s := g.Stats(); s.Calls != 12 || s.Eager != 12 || s.Fallback == nil {
		t.Errorf("%+v, want 12 calls in training, on the CPU", s)
	}
	Train(net.Parts().Modules[1].Module, false) // changes the mode of one part only
	scope := torch.NewScope("one more")
	defer scope.Close()
	x, err := torch.TensorOptions{Device: cuda.CPU, DType: torch.Float32, Scope: scope}.Full(1, 2, 3, 8, 8)
	if err != nil {
		t.Fatal(err)
	}
	if err := g.Forward(x).Err(); err != nil || g.Stats().Calls != 12 {
		t.Errorf("with a part in evaluation mode: %v, %d calls, want nil, 12", err, g.Stats().Calls)
	}
	Train(net, false) // the Graphed itself keeps its mode, and its parts do not
	if training, same := g.training(), g.sameModes(); !training || same {
		t.Errorf("training(), sameModes() = %v, %v, want true, false", training, same)
	}
}

func TestGraphedTrainsAsItsModuleOnTheGPU(t *testing.T) {
	d := cudatest.RequireGPUs(t, 1)[0]
	want := trainGraphed(t, graphedNet(t, d), d)
	net := graphedNet(t, d)
	g := NewGraphed(net, torch.GraphedModuleOptions{})
	defer g.Close()
	got := trainGraphed(t, g, d)
	for i := range want {
		if diff := got[i] - want[i]; diff > 1e-2*want[i]+1e-6 || diff < -1e-2*want[i]-1e-6 {
			t.Errorf("loss %d: %v, want %v", i, got[i], want[i])
		}
	}
	if s := g.Stats(); s.Captures != 1 || s.Replays != 9 || s.Eager != 3 || s.Refused != nil {
		t.Errorf("%+v, want Captures 1, Replays 9, Eager 3, Refused nil", s)
	}
}
