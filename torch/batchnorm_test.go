package torch_test

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/torch"
)

// batchNorm is a case of BatchNormReLU.
type batchNorm struct {
	shape    [4]int64
	dtype    torch.DType
	format   torch.MemoryFormat
	residual bool
	bare     bool // no weight, bias and running statistics
}

func (b batchNorm) String() string {
	return fmt.Sprintf("%v/%v/format=%v/residual=%v/bare=%v", b.shape, b.dtype, b.format, b.residual, b.bare)
}

// operands are the operands of a case. Each call makes the same values.
type operands struct{ x, weight, bias, mean, variance, residual, gradient *torch.Tensor }

func (b batchNorm) operands(t testing.TB, device cuda.Device) operands {
	t.Helper()
	random := rand.New(rand.NewPCG(1, 2))
	return b.place(t, device, func(scale, shift float64, shape ...int64) *torch.Tensor {
		n := int64(1)
		for _, size := range shape {
			n *= size
		}
		values := make([]float32, n)
		for i := range values {
			values[i] = float32(random.NormFloat64()*scale + shift)
		}
		return floats(t, values, shape...)
	})
}

// place makes operands of noise, which is given by its standard deviation, mean and shape.
func (b batchNorm) place(t testing.TB, device cuda.Device,
	noise func(scale, shift float64, shape ...int64) *torch.Tensor) operands {
	t.Helper()
	placed := func(x *torch.Tensor, requires bool) *torch.Tensor {
		moved := x.To(device)
		if len(x.Shape()) == 4 {
			moved = moved.ToDType(b.dtype).Contiguous(b.format)
		}
		moved = moved.Clone()
		if err := moved.SetRequiresGrad(requires); err != nil {
			t.Fatal(err)
		}
		return must(t, moved, nil)
	}
	var o operands
	c := b.shape[1]
	o.x = placed(noise(2, 0.5, b.shape[:]...), true)
	o.gradient = placed(noise(1, 0.1, b.shape[:]...), false)
	residual := noise(1, 0, b.shape[:]...)
	if b.residual {
		o.residual = placed(residual, true)
	}
	if !b.bare {
		o.weight, o.bias = placed(noise(1, 0, c), true), placed(noise(1, 0, c), true)
		o.mean, o.variance = placed(noise(1, 0, c), false), placed(noise(0.1, 2, c), false)
	}
	return o
}

const batchNormMomentum, batchNormEps = 0.3, 1e-5

func (o operands) fused() *torch.Tensor {
	return o.x.BatchNormReLU(o.weight, o.bias, o.mean, o.variance, o.residual, batchNormMomentum, batchNormEps)
}

func (o operands) composed() *torch.Tensor {
	y := o.x.BatchNorm(o.weight, o.bias, o.mean, o.variance, true, batchNormMomentum, batchNormEps)
	if o.residual != nil {
		y = y.Add(o.residual)
	}
	return y.ReLU()
}

// results are the values after a pass forward and backward, by name.
func (b batchNorm) results(t testing.TB, device cuda.Device,
	forward func(operands) *torch.Tensor) map[string][]float64 {
	t.Helper()
	o := b.operands(t, device)
	y := forward(o)
	if err := y.Err(); err != nil {
		t.Fatal(err)
	}
	defer y.Close()
	if err := y.BackwardWith(torch.BackwardOptions{Gradient: o.gradient}); err != nil {
		t.Fatal(err)
	}
	values := map[string][]float64{}
	add := func(name string, x *torch.Tensor) {
		if x == nil {
			return
		}
		v, err := x.Float64s()
		if err != nil {
			t.Fatalf("%s: %v, want no error", name, err)
		}
		values[name] = v
	}
	add("y", y)
	add("running mean", o.mean)
	add("running variance", o.variance)
	add("gradient of y", o.gradient)
	for name, x := range map[string]*torch.Tensor{"x": o.x, "weight": o.weight, "bias": o.bias,
		"residual": o.residual} {
		if x != nil {
			g := x.Grad()
			add("gradient of "+name, g)
			g.Close()
		}
	}
	return values
}

// wantEqual requires the same bits.
func wantEqual(t *testing.T, got, want map[string][]float64) {
	t.Helper()
	if len(got) != len(want) {
		t.Errorf("%d results, want %d", len(got), len(want))
	}
	for name, w := range want {
		for i := range w {
			if got[name][i] != w[i] {
				t.Errorf("%s[%d] is %v, want %v", name, i, got[name][i], w[i])
				break
			}
		}
	}
}

func TestBatchNormReLUIsItsOperatorsOnTheCPU(t *testing.T) {
	for _, dtype := range []torch.DType{torch.Float32, torch.BFloat16} {
		for _, format := range []torch.MemoryFormat{torch.Contiguous, torch.ChannelsLast} {
			for _, residual := range []bool{false, true} {
				for _, bare := range []bool{false, true} {
					b := batchNorm{[4]int64{3, 8, 4, 5}, dtype, format, residual, bare}
					t.Run(b.String(), func(t *testing.T) {
						wantEqual(t, b.results(t, cuda.CPU, operands.fused), b.results(t, cuda.CPU, operands.composed))
					})
				}
			}
		}
	}
}

func TestBatchNormReLUErrors(t *testing.T) {
	o := batchNorm{shape: [4]int64{3, 8, 4, 5}, dtype: torch.Float32, residual: true}.operands(t, cuda.CPU)
	bad := floats(t, make([]float32, 6), 6)
	o.residual = bad
	if y := o.fused(); y.Err() == nil {
		t.Error("fused() with a residual of another shape: got no error, want one")
	}
	o.residual.Close()
	if y := o.fused(); y.Err() == nil {
		t.Error("fused() with a closed residual: got no error, want one")
	}
	o.x = torch.Fail("x", cuda.ErrInvalidArgument)
	if y := o.fused(); y.Err() != o.x.Err() {
		t.Errorf("the error is %v, want that of x", y.Err())
	}
}

// fusedCases are cases for the kernels, and otherCases are cases for the operators.
var fusedCases = []batchNorm{
	{shape: [4]int64{6, 8, 1, 1}, dtype: torch.Float32},
	{shape: [4]int64{3, 24, 5, 7}, dtype: torch.Float32, residual: true},
	{shape: [4]int64{3, 24, 5, 7}, dtype: torch.BFloat16, bare: true},
	{shape: [4]int64{3, 24, 5, 7}, dtype: torch.BFloat16, residual: true, bare: true},
	{shape: [4]int64{8, 64, 28, 28}, dtype: torch.BFloat16},
	{shape: [4]int64{8, 64, 28, 28}, dtype: torch.BFloat16, residual: true},
	{shape: [4]int64{8, 64, 28, 28}, dtype: torch.Float16},
	{shape: [4]int64{8, 64, 28, 28}, dtype: torch.Float16, residual: true},
	{shape: [4]int64{8, 72, 14, 14}, dtype: torch.Float32},
	{shape: [4]int64{4, 2048, 7, 7}, dtype: torch.BFloat16, residual: true},
	{shape: [4]int64{16, 8, 56, 56}, dtype: torch.BFloat16},
}

var otherCases = []batchNorm{
	{shape: [4]int64{3, 8, 4, 5}, dtype: torch.BFloat16, format: torch.Contiguous, residual: true},
	{shape: [4]int64{3, 8, 4, 5}, dtype: torch.Float64, format: torch.ChannelsLast, bare: true},
	{shape: [4]int64{3, 6, 4, 5}, dtype: torch.BFloat16, format: torch.ChannelsLast},
	{shape: [4]int64{3, 6, 4, 5}, dtype: torch.Float32, format: torch.ChannelsLast, residual: true, bare: true},
}

// near checks that got and want differ by no more than rounding in another order of summation
// causes. It checks only the elements for which where returns true.
func near(t *testing.T, name string, got, want []float64, relative float64, where func(i int) bool) {
	t.Helper()
	size := 0.0
	for _, w := range want {
		size = max(size, math.Abs(w))
	}
	for i, w := range want {
		if where(i) && !(math.Abs(got[i]-w) <= relative*(math.Abs(w)+size/16)) {
			t.Errorf("%s[%d] is %v, want %v: relative %v of them, the largest is %v", name, i, got[i], w,
				relative, size)
			return
		}
	}
}

func TestGPUBatchNormReLUEqualsOperators(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	for _, b := range fusedCases {
		b.format = torch.ChannelsLast
		t.Run(b.String(), func(t *testing.T) {
			got, want := b.results(t, gpu, operands.fused), b.results(t, gpu, operands.composed)
			relative := map[torch.DType]float64{torch.Float32: 1e-4, torch.Float16: 1.0 / 256,
				torch.BFloat16: 1.0 / 64}[b.dtype]
			everywhere := func(int) bool { return true }
			near(t, "y", got["y"], want["y"], relative, everywhere)
			different := 0
			for i, w := range want["y"] {
				if got["y"][i] != w {
					different++
				}
			}
			if b.dtype != torch.Float32 && different*50 > len(want["y"]) {
				t.Errorf("%d of %d values of y differ, want 2 %% at most: only the statistics may",
					different, len(want["y"]))
			}
			for _, name := range []string{"running mean", "running variance", "gradient of y"} {
				near(t, name, got[name], want[name], 1e-5, everywhere)
			}
			for _, name := range []string{"gradient of weight", "gradient of bias"} {
				near(t, name, got[name], want[name], 1e-3, everywhere)
			}
			// Where y is next to 0, the order of the sums can decide whether ReLU cuts it.
			clear := func(i int) bool { return (got["y"][i] > 0) == (want["y"][i] > 0) }
			for _, name := range []string{"gradient of x", "gradient of residual"} {
				near(t, name, got[name], want[name], relative, clear)
			}
			again := b.results(t, gpu, operands.fused)
			wantEqual(t, again, got)
			// A gradient that nothing else refers to is overwritten.
			own := b.results(t, gpu, func(o operands) *torch.Tensor { return o.fused().Neg().Neg() })
			wantEqual(t, own, got)
		})
	}
	for _, b := range otherCases {
		t.Run(b.String(), func(t *testing.T) {
			got, want := b.results(t, gpu, operands.fused), b.results(t, gpu, operands.composed)
			relative := map[torch.DType]float64{torch.Float64: 1e-9, torch.Float32: 1e-5,
				torch.BFloat16: 1.0 / 64}[b.dtype]
			for name, w := range want {
				near(t, name, got[name], w, relative, func(int) bool { return true })
			}
		})
	}
}

// all returns the operands that are not nil.
func (o operands) all() []*torch.Tensor {
	return slices.DeleteFunc([]*torch.Tensor{o.x, o.weight, o.bias, o.mean, o.variance, o.residual},
		func(t *torch.Tensor) bool { return t == nil })
}

// captured returns a graph of passes with the same operands.
func (o operands) captured(t testing.TB, forward func(operands) *torch.Tensor, backward bool, passes int) *cuda.Graph {
	t.Helper()
	run := func() error {
		for range passes {
			y := forward(o)
			err := y.Err()
			if backward && err == nil {
				err = y.BackwardWith(torch.BackwardOptions{Gradient: o.gradient})
			}
			y.Close()
			if err == nil {
				err = torch.ClearGrads(o.all()...)
			}
			if err != nil {
				return err
			}
		}
		return nil
	}
	if err := run(); err != nil { // loads the kernels
		t.Fatal(err)
	}
	g, err := cuda.Capture(cuda.CaptureOptions{}, run)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { g.Close() })
	return g
}

// kernelsOf returns the node kinds of a captured forward and backward pass.
func (b batchNorm) kernelsOf(t *testing.T) cuda.NodeKinds {
	t.Helper()
	kinds, err := b.operands(t, gpu).captured(t, operands.fused, true, 1).NodeKinds()
	if err != nil {
		t.Fatal(err)
	}
	return kinds
}

// The operators are captured with forward and backward pass. If the fused kernels accept the
// tensors, the graph has two kernels forward, two backward, and no other node. Otherwise it has
// more kernels.
func TestBatchNormReLUKernels(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	for _, b := range fusedCases {
		b.format = torch.ChannelsLast
		t.Run(b.String(), func(t *testing.T) {
			if kinds := b.kernelsOf(t); kinds != (cuda.NodeKinds{Kernels: 4}) {
				t.Errorf("the graph of a pass has %+v, want 4 kernels", kinds)
			}
		})
	}
	for _, b := range otherCases {
		t.Run(b.String(), func(t *testing.T) {
			if kinds := b.kernelsOf(t); kinds.Kernels <= 4 {
				t.Errorf("the graph of a pass has %+v, want more than 4 kernels", kinds)
			}
		})
	}
}

// The kernels load 16 bytes at a time, so the operators handle memory that is not aligned to that.
func TestBatchNormReLUOfUnalignedMemory(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	const elements = 2 * 4 * 4 * 8
	flat, err := torch.Zeros(gpu, torch.BFloat16, elements+8)
	must(t, flat, err)
	for _, first := range []int64{0, 1, 8} {
		x := must(t, flat.Narrow(0, first, elements).Reshape(2, 4, 4, 8).Permute(0, 3, 1, 2), nil)
		for name, o := range map[string]operands{"x": {x: x}, "residual": {x: must(t, x.Clone(), nil), residual: x}} {
			kinds, err := o.captured(t, operands.fused, false, 1).NodeKinds()
			if err != nil {
				t.Fatal(err)
			}
			if fused := kinds.Kernels == 2; fused != (first%8 == 0) {
				t.Errorf("%s from element %d on: the graph of a pass has %+v", name, first, kinds)
			}
		}
	}
}

// Backward refuses an input that was changed since the forward pass, as LibTorch's operators do.
// Another forward pass, which changes the running statistics, is no such change.
func TestBatchNormReLUChecksItsInput(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	b := batchNorm{shape: [4]int64{2, 8, 4, 4}, dtype: torch.BFloat16, format: torch.ChannelsLast, residual: true}
	o := b.operands(t, gpu)
	first, composed, second := must(t, o.fused(), nil), must(t, o.composed(), nil), must(t, o.fused(), nil)
	for i, y := range []*torch.Tensor{first, composed, second} {
		if err := y.BackwardWith(torch.BackwardOptions{Gradient: o.gradient}); err != nil {
			t.Errorf("backward %d: %v, want no error", i, err)
		}
	}
	if err := first.BackwardWith(torch.BackwardOptions{Gradient: o.gradient}); err == nil {
		t.Error("a second backward pass, whose data the first has freed: got no error, want one")
	}
	third := must(t, o.fused(), nil)
	if x := o.x.NoGrad().MulScalar_(2); x.Err() != nil {
		t.Fatal(x.Err())
	}
	if err := third.BackwardWith(torch.BackwardOptions{Gradient: o.gradient}); err == nil {
		t.Error("backward of an input that was changed in place: got no error, want one")
	}
}

// Backward writes its result over a gradient that nothing else refers to. It therefore allocates
// memory only with a residual, for one gradient.
func TestBatchNormReLUOverwritesItsGradient(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	const size = 4 << 20 // bytes of x
	for _, residual := range []bool{false, true} {
		b := batchNorm{shape: [4]int64{8, 64, 64, 64}, dtype: torch.BFloat16, format: torch.ChannelsLast,
			residual: residual, bare: true}
		t.Run(b.String(), func(t *testing.T) {
			o := b.operands(t, gpu)
			y := must(t, o.fused(), nil)
			before, err := gpu.Memory()
			if err := errors.Join(err, gpu.ResetPeak()); err != nil {
				t.Fatal(err)
			}
			z := must(t, y.Neg(), nil)
			if err := z.BackwardWith(torch.BackwardOptions{Gradient: o.gradient}); err != nil {
				t.Fatal(err)
			}
			after, err := gpu.Memory()
			if err != nil {
				t.Fatal(err)
			}
			want := int64(2 * size) // of z, and of y's gradient
			if residual {
				want += size
			}
			if peak := after.PeakAllocated - before.Allocated; peak > want+size/2 {
				t.Errorf("backward takes %d bytes, want about %d", peak, want)
			}
		})
	}
}

// Gradients of gradients equal the operators'.
func TestGPUBatchNormReLUGradientsOfGradients(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	for _, residual := range []bool{false, true} {
		b := batchNorm{shape: [4]int64{4, 8, 5, 5}, dtype: torch.Float32, format: torch.ChannelsLast,
			residual: residual}
		t.Run(b.String(), func(t *testing.T) {
			of := func(forward func(operands) *torch.Tensor) []float64 {
				o := b.operands(t, gpu)
				y := must(t, forward(o), nil)
				grads, err := torch.Grad([]*torch.Tensor{y.Square().Sum()}, []*torch.Tensor{o.x},
					torch.GradOptions{CreateGraph: true})
				if err != nil {
					t.Fatal(err)
				}
				penalty := must(t, grads[0].Square().Sum(), nil)
				if err := penalty.Backward(); err != nil {
					t.Fatal(err)
				}
				g := must(t, o.x.Grad(), nil)
				values, err := g.Float64s()
				if err != nil {
					t.Fatal(err)
				}
				return values
			}
			near(t, "gradient", of(operands.fused), of(operands.composed), 1e-3, func(int) bool { return true })
		})
	}
}

// After a change of the weight, the gradient can still be computed, because the forward pass has
// kept the weight's values. A gradient of a gradient needs the weight itself, so it is an error.
// Without a weight, the bias has both kinds of gradients.
func TestBatchNormReLUChecksItsWeight(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	b := batchNorm{shape: [4]int64{2, 8, 4, 4}, dtype: torch.Float32, format: torch.ChannelsLast}
	for _, createGraph := range []bool{false, true} {
		o := b.operands(t, gpu)
		y := must(t, o.fused(), nil)
		if w := o.weight.NoGrad().MulScalar_(2); w.Err() != nil {
			t.Fatal(w.Err())
		}
		_, err := torch.Grad([]*torch.Tensor{y.Sum()}, []*torch.Tensor{o.x},
			torch.GradOptions{CreateGraph: createGraph})
		if (err != nil) != createGraph {
			t.Errorf("after a change of the weight, CreateGraph %v: %v", createGraph, err)
		}
		o.weight = nil
		y = must(t, o.fused(), nil)
		grads, err := torch.Grad([]*torch.Tensor{y.Sum()}, []*torch.Tensor{o.bias},
			torch.GradOptions{CreateGraph: createGraph})
		if err != nil {
			t.Fatalf("a bias without a weight, CreateGraph %v: %v, want no error", createGraph, err)
		}
		if got := must(t, grads[0], nil); got.DType() != torch.Float32 || !slices.Equal(got.Shape(), []int64{8}) {
			t.Errorf("the gradient of a bias without a weight is %v %v, want float32, [8]",
				got.DType(), got.Shape())
		}
	}
}

// The sanitizer knows that the running statistics are written, and which tensors are read.
func TestSanitizerOfBatchNormReLU(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	b := batchNorm{shape: [4]int64{2, 8, 4, 4}, dtype: torch.BFloat16, format: torch.ChannelsLast, residual: true}
	for name, conflict := range map[string]func(o operands) *torch.Tensor{
		"read statistics":  func(o operands) *torch.Tensor { return o.mean.Neg() },
		"written residual": func(o operands) *torch.Tensor { return o.residual.NoGrad().Zero_() },
		"written weight":   func(o operands) *torch.Tensor { return o.weight.NoGrad().Zero_() },
		"":                 func(o operands) *torch.Tensor { return o.residual.NoGrad().Neg() },
	} {
		t.Run(name, func(t *testing.T) {
			o := b.operands(t, gpu)
			side, err := cuda.NewStream(gpu, cuda.StreamOptions{})
			if err != nil {
				t.Fatal(err)
			}
			findings := sanitized(t, func() error {
				must(t, o.fused(), nil)
				return cuda.WithStream(side, func() error { return must(t, conflict(o), nil).Err() })
			})
			races := 0
			for _, f := range findings {
				if !f.Kind.Note() {
					races++
				}
			}
			if (races > 0) != (name != "") {
				t.Errorf("%d races: %v, want some: %v", races, findings, name != "")
			}
		})
	}
}

// BenchmarkBatchNormReLU measures the normalisations of a ResNet-50 on a GPU, in bfloat16. It
// compares BatchNormReLU with LibTorch's operators, forward, and forward and backward. The metric
// is the device's time for one pass: a replayed graph has several passes.
func BenchmarkBatchNormReLU(b *testing.B) {
	cudatest.RequireGPUs(b, 1)
	const passes = 10
	for _, images := range []int64{32, 256} {
		for _, layer := range []struct {
			size, channels int64
			residual       bool
		}{
			{112, 64, false}, {56, 64, false}, {56, 256, true}, {28, 128, false}, {28, 512, true},
			{14, 256, false}, {14, 1024, true}, {7, 512, false}, {7, 2048, true},
		} {
			c := batchNorm{[4]int64{images, layer.channels, layer.size, layer.size}, torch.BFloat16,
				torch.ChannelsLast, layer.residual, false}
			for _, kind := range []struct {
				name     string
				forward  func(operands) *torch.Tensor
				backward bool
			}{
				{"fused/forward", operands.fused, false}, {"operators/forward", operands.composedInPlace, false},
				{"fused/both", operands.fused, true}, {"operators/both", operands.composedInPlace, true},
			} {
				b.Run(fmt.Sprintf("%dx%dx%dx%d/%s", images, layer.size, layer.size, layer.channels,
					kind.name), func(b *testing.B) {
					o := c.place(b, gpu, func(scale, shift float64, shape ...int64) *torch.Tensor {
						x, err := torch.Randn(gpu, torch.Float32, shape...)
						return must(b, x, err).MulScalar(scale).AddScalar(shift)
					})
					g := o.captured(b, kind.forward, kind.backward, passes)
					for b.Loop() {
						if err := g.Replay(cuda.DefaultStream(gpu)); err != nil {
							b.Fatal(err)
						}
						if err := gpu.Synchronize(); err != nil {
							b.Fatal(err)
						}
					}
					b.ReportMetric(float64(b.Elapsed().Microseconds())/float64(b.N*passes), "us/pass")
				})
			}
		}
	}
}

// composedInPlace is composed, but as in models the operators after BatchNorm write into its
// result.
func (o operands) composedInPlace() *torch.Tensor {
	y := o.x.BatchNorm(o.weight, o.bias, o.mean, o.variance, true, batchNormMomentum, batchNormEps)
	if o.residual != nil {
		y = y.Add_(o.residual)
	}
	return y.ReLU_()
}
