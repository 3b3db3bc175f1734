package nn_test

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/checkpoint"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/torch"
)

func TestMain(m *testing.M) {
	if err := torch.SetNumThreads(1); err != nil { // the tensors here are tiny
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(cudatest.Main(m))
}

// parityNet returns the network of testdata/make_parity.py. testdata/parity.safetensors holds
// PyTorch's results for it.
func parityNet(t *testing.T) *nn.Sequential {
	t.Helper()
	if err := torch.ManualSeed(1); err != nil {
		t.Fatal(err)
	}
	net := nn.NewSequential(
		nn.NewConv2d(3, 4, 3, nn.Conv2dOptions{Padding: 1, NoBias: true}),
		nn.NewBatchNorm2d(4, nn.BatchNorm2dOptions{}),
		nn.NewReLU(),
		nn.NewMaxPool2d(2, nn.MaxPool2dOptions{}),
		nn.NewConv2d(4, 6, 3, nn.Conv2dOptions{Stride: 2, Padding: 1}),
		nn.NewReLU(),
		nn.NewAvgPool2d(2, nn.AvgPool2dOptions{Stride: 1}),
		nn.NewAdaptiveAvgPool2d(1),
		nn.NewFlatten(),
		nn.NewLinear(6, 5, nn.LinearOptions{}),
	)
	if err := nn.Err(net); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { nn.Close(net) })
	return net
}

type peer struct {
	t *testing.T
	c *checkpoint.File
}

func openPeer(t *testing.T) peer {
	t.Helper()
	c, err := checkpoint.Open(filepath.Join("testdata", "parity.safetensors"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return peer{t, c}
}

func (p peer) tensor(name string) *torch.Tensor {
	p.t.Helper()
	x, err := p.c.Read(name)
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() { x.Close() })
	return x
}

// near fails if got differs from PyTorch's result by more than the tolerance; tolerance 0 requires
// bit equality.
func (p peer) near(name string, got *torch.Tensor, tolerance float64) {
	p.t.Helper()
	g, err := got.Float64s()
	if err != nil {
		p.t.Fatalf("%s: %v", name, err)
	}
	w, err := p.tensor(name).Float64s()
	if err != nil || len(g) != len(w) {
		p.t.Fatalf("%s: %d values, PyTorch has %d, %v", name, len(g), len(w), err)
	}
	for i := range g {
		if d := math.Abs(g[i] - w[i]); !(d <= tolerance*(1+math.Abs(w[i]))) {
			p.t.Errorf("%s[%d]: %v, PyTorch has %v", name, i, g[i], w[i])
			return
		}
	}
}

func TestInitialisationMatchesPyTorch(t *testing.T) {
	p, net := openPeer(t), parityNet(t)
	state := nn.State(net)
	for _, n := range state {
		p.near("init/"+n.Name, n.Tensor, 0)
	}
	want := 0
	for _, s := range p.c.Tensors() {
		if strings.HasPrefix(s.Name, "init/") {
			want++
		}
	}
	if len(state) != want {
		t.Errorf("%d tensors in the state, PyTorch has %d", len(state), want)
	}
}

func TestForwardAndBackwardMatchPyTorch(t *testing.T) {
	p, net := openPeer(t), parityNet(t)
	scope := torch.NewScope("batch")
	defer scope.Close()
	output := net.Forward(p.tensor("input").In(scope))
	p.near("output", output, 1e-5)
	loss := output.CrossEntropy(p.tensor("labels"))
	p.near("loss", loss, 1e-5)
	if err := loss.Backward(); err != nil {
		t.Fatal(err)
	}
	for _, n := range nn.NamedParameters(net) {
		p.near("grad/"+n.Name, n.Tensor.In(scope).Grad(), 1e-5)
	}
}

func TestFiveStepsOfSGDMatchPyTorch(t *testing.T) {
	p := openPeer(t)
	for name, o := range map[string]optim.SGDOptions{
		"plain":    {LR: 0.1},
		"decay":    {LR: 0.1, WeightDecay: 0.05},
		"momentum": {LR: 0.05, Momentum: 0.9, WeightDecay: 5e-4},
		"dampened": {LR: 0.05, Momentum: 0.9, Dampening: 0.5},
		"nesterov": {LR: 0.05, Momentum: 0.9, WeightDecay: 5e-4, Nesterov: true},
	} {
		for _, keep := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/keep=%v", name, keep), func(t *testing.T) {
				p := peer{t, p.c}
				net := parityNet(t)
				o := o
				o.KeepGradients = keep
				opt, err := optim.NewSGD(nn.Parameters(net), o)
				if err != nil {
					t.Fatal(err)
				}
				defer opt.Close()
				x, y := p.tensor("input"), p.tensor("labels")
				losses := make([]float32, 5)
				for i := range losses {
					scope := torch.NewScope("batch")
					loss := net.Forward(x.In(scope)).CrossEntropy(y)
					if err := loss.Backward(); err != nil {
						t.Fatal(err)
					}
					if err := opt.Step(); err != nil {
						t.Fatal(err)
					}
					if has := nn.Parameters(net)[0].In(scope).Grad() != nil; has != keep {
						t.Fatalf("there is a gradient after Step: %v, want %v", has, keep)
					}
					if keep {
						if err := opt.ZeroGrad(); err != nil {
							t.Fatal(err)
						}
					}
					v, err := loss.Float64()
					if err != nil {
						t.Fatal(err)
					}
					losses[i] = float32(v)
					scope.Close()
				}
				l, err := torch.FromFloat32s(losses)
				if err != nil {
					t.Fatal(err)
				}
				defer l.Close()
				p.near(name+"/losses", l, 1e-5)
				for _, n := range nn.State(net) {
					p.near(name+"/"+n.Name, n.Tensor, 1e-5)
				}
				nn.Train(net, false)
				scope := torch.NewScope("evaluation")
				defer scope.Close()
				out := net.Forward(x.In(scope).NoGrad())
				if out.RequiresGrad() {
					t.Error("RequiresGrad() of the evaluation's output under NoGrad = true, want false")
				}
				p.near(name+"/evaluated", out, 1e-5)
			})
		}
	}
}
