package nn_test

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/checkpoint"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/torch"
)

const paritySteps = 20

// parityDTypes are the dtypes of testdata/steps.safetensors by their names there. The tolerance is
// relative to 1 and the value.
var parityDTypes = map[string]struct {
	dtype     torch.DType
	tolerance float64
}{
	"64": {torch.Float64, 1e-10},
	"32": {torch.Float32, 1e-5},
	"16": {torch.BFloat16, 0x1p-7}, // a rounding is 2^-9 of the value
}

func openSteps(t *testing.T) *checkpoint.File {
	t.Helper()
	c, err := checkpoint.Open(filepath.Join("testdata", "steps.safetensors"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func hasTensor(c *checkpoint.File, name string) bool {
	for _, s := range c.Tensors() {
		if s.Name == name {
			return true
		}
	}
	return false
}

// weights returns the numbers by which make_layers.py multiplies an output, in its scope.
func weights(t *testing.T, y *torch.Tensor) *torch.Tensor {
	t.Helper()
	values := make([]float32, y.Elements())
	for i := range values {
		values[i] = float32(i*7%11-5) / 4
	}
	w, err := torch.FromFloat32s(values, y.Shape()...)
	if err != nil {
		t.Fatal(err)
	}
	return y.Scope().Own(w).To(y.Device())
}

// trainAsInPyTorch takes 20 steps of SGD on the parameters and on x, if x has a gradient, and
// compares the losses and the final values.
func (p peer) trainAsInPyTorch(name, bits string, parameters []torch.Named, x *torch.Tensor,
	loss func(x *torch.Tensor, step int) *torch.Tensor) {
	p.t.Helper()
	tolerance := parityDTypes[bits].tolerance
	leaves := make([]*torch.Tensor, 0, len(parameters)+1)
	for _, n := range parameters {
		leaves = append(leaves, n.Tensor)
	}
	if x.RequiresGrad() {
		leaves = append(leaves, x)
	}
	opt, err := optim.NewSGD(leaves, optim.SGDOptions{LR: 0.05, Momentum: 0.9})
	if err != nil {
		p.t.Fatal(err)
	}
	defer opt.Close()
	if err := torch.ManualSeed(4); err != nil { // for dropout
		p.t.Fatal(err)
	}
	var losses []float64
	for step := range paritySteps {
		scope := torch.NewScope("step")
		value := loss(x.In(scope), step)
		if err := value.Backward(); err != nil {
			p.t.Fatal(err)
		}
		if bits == "16" && step == 0 {
			if x.RequiresGrad() {
				p.near(name+"/dx16", x.In(scope).Grad(), tolerance)
			}
			for _, n := range parameters {
				p.near(name+"/grad16/"+n.Name, n.Tensor.In(scope).Grad(), tolerance)
			}
		}
		v, err := value.Float64()
		if err != nil {
			p.t.Fatal(err)
		}
		losses = append(losses, v)
		if err := opt.Step(); err != nil {
			p.t.Fatal(err)
		}
		scope.Close()
	}
	l, err := torch.FromSlice(losses)
	if err != nil {
		p.t.Fatal(err)
	}
	defer l.Close()
	p.near(name+"/losses"+bits, l, tolerance)
	if x.RequiresGrad() {
		p.near(name+"/x"+bits, x, tolerance)
	}
	for _, n := range parameters {
		p.near(name+"/param"+bits+"/"+n.Name, n.Tensor, tolerance)
	}
}

// leaf returns the case's x as a leaf of the dtype. The leaf requires a gradient, unless it holds
// indices.
func (p peer) leaf(layers peer, name string, dtype torch.DType) *torch.Tensor {
	p.t.Helper()
	x := layers.tensor(name + "/x")
	if x.DType() == torch.Int64 {
		return x
	}
	scope := torch.NewScope("input")
	defer scope.Close()
	leaf := x.In(scope).ToDType(dtype).Detach().Clone().Keep()
	p.t.Cleanup(func() { leaf.Close() })
	if err := leaf.SetRequiresGrad(true); err != nil {
		p.t.Fatal(err)
	}
	return leaf
}

// Every module reaches PyTorch's values after 20 steps, in float64, float32 and bfloat16.
func TestLayersTrainAsInPyTorch(t *testing.T) {
	layers, steps := openLayers(t), openSteps(t)
	for name, build := range layerCases() {
		for bits, c := range parityDTypes {
			t.Run(fmt.Sprint(name, "/", c.dtype), func(t *testing.T) {
				p := peer{t, steps}
				if err := torch.ManualSeed(1); err != nil {
					t.Fatal(err)
				}
				m := build()
				defer nn.Close(m)
				nn.Train(m, !strings.HasSuffix(name, "_eval"))
				if err := nn.ToDType(m, c.dtype); err != nil {
					t.Fatal(err)
				}
				x := p.leaf(peer{t, layers.c}, name, c.dtype)
				if !hasTensor(steps, name+"/losses"+bits) {
					requireNoKernel(t, m.Forward(x))
					return
				}
				p.trainAsInPyTorch(name, bits, nn.NamedParameters(m), x, func(x *torch.Tensor, step int) *torch.Tensor {
					y := m.Forward(x)
					if bits == "16" && step == 0 {
						p.near(name+"/y16", y, c.tolerance)
					}
					return y.Mul(weights(t, y)).Mean()
				})
				for _, b := range nn.NamedBuffers(m) {
					p.near(name+"/buffer"+bits+"/"+b.Name, b.Tensor, c.tolerance)
				}
			})
		}
	}
}

// requireNoKernel requires the error of an operator that has no kernel for its dtype.
func requireNoKernel(t *testing.T, y *torch.Tensor) {
	t.Helper()
	if err := y.Err(); err == nil || !strings.Contains(err.Error(), "not implemented for") {
		t.Errorf("without a kernel in PyTorch: %v, want an error with \"not implemented for\"", err)
	}
}

// Every loss brings its input to PyTorch's values after 20 steps.
func TestLossesTrainAsInPyTorch(t *testing.T) {
	layers, steps := openLayers(t), openSteps(t)
	for name, f := range lossCases() {
		name := "loss_" + name
		for bits, c := range parityDTypes {
			t.Run(fmt.Sprint(name, "/", c.dtype), func(t *testing.T) {
				p := peer{t, steps}
				x := p.leaf(peer{t, layers.c}, name, c.dtype)
				target := peer{t, layers.c}.tensor(name + "/target")
				loss := func(x *torch.Tensor, _ int) *torch.Tensor {
					y := target.In(x.Scope())
					if y.DType() == torch.Float64 {
						y = y.ToDType(c.dtype)
					}
					return f(x, y)
				}
				if !hasTensor(steps, name+"/losses"+bits) {
					scope := torch.NewScope("refused")
					defer scope.Close()
					requireNoKernel(t, loss(x.In(scope), 0))
					return
				}
				p.trainAsInPyTorch(name, bits, nil, x, loss)
			})
		}
	}
}
