package models_test

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"math"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/models"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/torch"
)

// autocastRecord is a record of testdata/autocast.json. make_autocast.py describes the format.
type autocastRecord struct {
	Name        string
	DType       string
	Exact       bool
	Output      [][]float64
	OutputDType string `json:"output_dtype"`
	Loss        float64
	Gradients   []float64
	Bits        string
	Running     []float64
}

// encoder is the network "block" of make_autocast.py.
type encoder struct {
	layers *nn.Sequential
	head   *nn.Linear
}

func (e *encoder) Forward(x *torch.Tensor) *torch.Tensor {
	return e.head.Forward(e.layers.Forward(x).MeanDim([]int64{1}, false))
}

func (e *encoder) Parts() nn.Parts {
	return nn.Parts{Modules: []nn.Child{{Name: "encoder", Module: e.layers}, {Name: "head", Module: e.head}}}
}

// make returns the network with the numbers of the reference, and the shape of its input.
func (r autocastRecord) make(t *testing.T) (net nn.Module, shape []int64) {
	t.Helper()
	switch r.Name {
	case "resnet18":
		resnet, err := models.NewResNet18(models.ResNetOptions{NumClasses: 10})
		if err != nil {
			t.Fatal(err)
		}
		net, shape = resnet, []int64{2, 3, 64, 64}
	case "block":
		layer := func() nn.Module {
			return nn.NewTransformerEncoderLayer(32, 4, nn.TransformerEncoderLayerOptions{
				Feedforward: 64, NoDropout: true, BatchFirst: true, Activation: nn.NewGELU(nn.GELUOptions{}),
			})
		}
		net, shape = &encoder{nn.NewSequential(layer(), layer()),
			nn.NewLinear(32, 10, nn.LinearOptions{})}, []int64{2, 6, 32}
	default:
		t.Fatalf("no network %s", r.Name)
	}
	t.Cleanup(func() { nn.Close(net) })
	record{Variance: 1}.fill(t, net)
	return net, shape
}

// TestAutocastMatchesPyTorch compares a forward and a backward pass under autocast with PyTorch's:
// the bits if the same operators ran on the same processor, else the values within the rounding of
// 16 bits.
func TestAutocastMatchesPyTorch(t *testing.T) {
	text, err := os.ReadFile("testdata/autocast.json")
	if err != nil {
		t.Fatal(err)
	}
	var all struct {
		Made   struct{ Processor []string }
		Models []autocastRecord
	}
	if err := json.Unmarshal(text, &all); err != nil {
		t.Fatal(err)
	}
	var processor reference
	processor.Made.Processor = all.Made.Processor
	same := processor.sameProcessor()
	dtypes := map[string]torch.DType{"bfloat16": torch.BFloat16, "float16": torch.Float16, "float32": torch.Float32}
	for _, r := range all.Models {
		t.Run(r.Name+" "+r.DType, func(t *testing.T) {
			net, shape := r.make(t)
			x, labels := record{Name: r.Name, Input: shape}.input(t)
			output := net.Forward(x.Autocast(dtypes[r.DType]))
			if d := output.DType(); d != dtypes[r.OutputDType] {
				t.Fatalf("the output is %v: %v, want PyTorch's dtype, %s", d, output.Err(), r.OutputDType)
			}
			loss := output.CrossEntropy(labels)
			if err := loss.Backward(); err != nil {
				t.Fatal(err)
			}
			r.check(t, net, output, loss, same)
		})
	}
}

func (r autocastRecord) check(t *testing.T, net nn.Module, output, loss *torch.Tensor, same bool) {
	t.Helper()
	// Roundings of 2^-8 add up over the layers, and a batch normalisation of two images amplifies
	// them.
	tolerance := 0.1
	switch same = same && r.Exact; {
	case same:
		tolerance = 1e-5
	case !r.Exact:
		tolerance = 0.01
	}
	bits := sha256.New()
	values := func(x *torch.Tensor) []float32 {
		t.Helper()
		x = x.ToDType(torch.Float32)
		v, err := x.Float32s()
		if err != nil {
			t.Fatal(err)
		}
		if x.Scope() == nil {
			x.Close()
		}
		bits.Write(littleEndian(v))
		return v
	}
	largest, outputs := 0.0, slices.Concat(r.Output...)
	for _, v := range outputs {
		largest = max(largest, math.Abs(v))
	}
	for i, got := range values(output) {
		if want := outputs[i]; !(math.Abs(float64(got)-want) <= tolerance*largest) {
			t.Errorf("output %d: %v, and PyTorch has %v", i, got, want)
		}
	}
	near(t, "the loss", float64(values(loss)[0]), r.Loss, tolerance)
	norm := func(v []float32) (n float64) {
		for _, v := range v {
			n += float64(v) * float64(v)
		}
		return math.Sqrt(n)
	}
	parameters := nn.NamedParameters(net)
	if len(parameters) != len(r.Gradients) {
		t.Fatalf("%d parameters, and PyTorch has %d", len(parameters), len(r.Gradients))
	}
	largest = slices.Max(r.Gradients)
	for i, p := range parameters {
		g := p.Tensor.In(output.Scope()).Grad()
		if g == nil || g.DType() != torch.Float32 {
			t.Fatalf("the gradient of %s: %v", p.Name, g)
		}
		if got, want := norm(values(g)), r.Gradients[i]; !(math.Abs(got-want) <= 2*tolerance*(want+0.01*largest)) {
			t.Errorf("the gradient of %s has the norm %v, and PyTorch's has %v", p.Name, got, want)
		}
	}
	if sum := hex.EncodeToString(bits.Sum(nil)); same && sum != r.Bits {
		t.Errorf("the SHA-256 of output, loss and gradients = %s, want PyTorch's, %s", sum, r.Bits)
	}
	k := 0
	for _, b := range nn.NamedBuffers(net) {
		if strings.Contains(b.Name, "running") {
			v, err := b.Tensor.Float32s()
			if err != nil {
				t.Fatal(err)
			}
			near(t, b.Name, norm(v), r.Running[k], tolerance)
			k++
		}
	}
	if k != len(r.Running) {
		t.Errorf("%d running statistics, and PyTorch has %d", k, len(r.Running))
	}
}

// Autocast does not cast integer tokens, as in PyTorch. A GPT-2 step under autocast has bfloat16
// logits and float32 gradients.
func TestAutocastOfTokens(t *testing.T) {
	net, err := models.NewGPT2(models.GPT2Options{VocabSize: 32, Positions: 8, Layers: 1, Heads: 2, Width: 16})
	if err != nil {
		t.Fatal(err)
	}
	defer nn.Close(net)
	scope := torch.NewScope("test")
	defer scope.Close()
	tokens, err := torch.FromInt64s([]int64{3, 1, 4, 1, 5, 9, 2, 6})
	if err != nil {
		t.Fatal(err)
	}
	tokens = scope.Own(tokens)
	logits := net.Forward(tokens.View(2, 4).Autocast(torch.BFloat16))
	if logits.DType() != torch.BFloat16 {
		t.Errorf("the logits are %v: %v, want bfloat16", logits.DType(), logits.Err())
	}
	if err := logits.Flatten(0, 1).CrossEntropy(tokens).Backward(); err != nil {
		t.Fatal(err)
	}
	for _, p := range nn.NamedParameters(net) {
		if g := p.Tensor.In(scope).Grad(); g.DType() != torch.Float32 {
			t.Errorf("%s has a gradient of %v: %v, want float32", p.Name, g.DType(), g.Err())
		}
	}
}

// GPT-2's weights and biases of linear layers are cast together: no pass casts one separately.
func TestWeightsOfGPT2AreCastTogether(t *testing.T) {
	const layers = 2
	net, err := models.NewGPT2(models.GPT2Options{VocabSize: 32, Positions: 8, Layers: layers, Heads: 2, Width: 16})
	if err != nil {
		t.Fatal(err)
	}
	defer nn.Close(net)
	casts, err := torch.NewParameterCasts(torch.BFloat16, nn.Parameters(net))
	if err != nil {
		t.Fatal(err)
	}
	for pass, want := range []int{0, layers*8 + 1} { // the first pass learns what is cast
		scope := torch.NewScope("pass")
		tokens, err := torch.FromInt64s([]int64{3, 1, 4, 1})
		if err != nil {
			t.Fatal(err)
		}
		tokens = scope.Own(tokens)
		before := scope.Len()
		if err := casts.Begin(scope); err != nil {
			t.Fatal(err)
		}
		if made := scope.Len() - before; made != want {
			t.Errorf("pass %d: %d casts, want %d", pass, made, want)
		}
		if err := net.Forward(tokens.View(1, 4).Autocast(torch.BFloat16)).Err(); err != nil {
			t.Fatal(err)
		}
		scope.Close()
	}
}
