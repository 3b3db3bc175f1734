package models_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/models"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/torch"
)

func TestMain(m *testing.M) {
	if err := torch.SetNumThreads(1); err != nil { // as in make_reference.py
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(cudatest.Main(m))
}

// reference is testdata/reference.json, which make_reference.py describes.
type reference struct {
	Made struct {
		Processor []string
	}
	Models []record
}

type record struct {
	Name       string
	Options    json.RawMessage
	Input      []int64
	Variance   float32
	Exact      bool
	Parameters int64
	Keys       string
	Logits     [][]float64
	SHA256     string
	Loss       float64
	Gradients  []float64
	Initial    [][2]float64
}

func readReference(t *testing.T) reference {
	t.Helper()
	text, err := os.ReadFile("testdata/reference.json")
	if err != nil {
		t.Fatal(err)
	}
	var r reference
	if err := json.Unmarshal(text, &r); err != nil {
		t.Fatal(err)
	}
	return r
}

// sameProcessor reports whether this machine has the processor on which the reference was made. On
// that processor, kernels compute the same bits with one thread.
func (r reference) sameProcessor() bool {
	text, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return false
	}
	first, _, _ := strings.Cut(string(text), "\n\n")
	var found []string
	for line := range strings.Lines(first) {
		key, value, _ := strings.Cut(line, ":")
		if key = strings.TrimSpace(key); slices.Contains([]string{"model name", "cpu family", "model",
			"stepping"}, key) {
			found = append(found, key+": "+strings.TrimSpace(value))
		}
	}
	return len(found) > 0 && slices.Equal(found, r.Made.Processor)
}

func (r record) title() string {
	if string(r.Options) == "{}" {
		return r.Name
	}
	return r.Name + string(r.Options)
}

// make returns the model of the record.
func (r record) make(t *testing.T) nn.Module {
	t.Helper()
	var net nn.Module
	var err error
	switch {
	case string(r.Options) == "{}":
		net, err = models.ByName(r.Name, models.Options{})
	case r.Name == "resnet18":
		net, err = models.NewResNet18(options[models.ResNetOptions](t, r))
	case r.Name == "vit_b_16":
		net, err = models.NewViTB16(options[models.ViTOptions](t, r))
	case r.Name == "gpt2":
		net, err = models.NewGPT2(options[models.GPT2Options](t, r))
	default:
		t.Fatalf("no constructor for %s", r.title())
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { nn.Close(net) })
	return net
}

func options[O any](t *testing.T, r record) (o O) {
	t.Helper()
	d := json.NewDecoder(bytes.NewReader(r.Options))
	d.DisallowUnknownFields()
	if err := d.Decode(&o); err != nil {
		t.Fatal(err)
	}
	return o
}

// u returns the numbers of make_reference.py's function u.
func u(position, count int) []float32 {
	numbers := make([]float32, count)
	offset := uint32(uint64(position)*0x9E3779B9 + 0x7F4A7C15)
	for i := range numbers {
		h := uint32(i)*2654435761 + offset
		h ^= h >> 16
		h *= 0x85EBCA6B
		h ^= h >> 13
		h *= 0xC2B2AE35
		h ^= h >> 16
		numbers[i] = float32(int32(h)>>16) / 32768
	}
	return numbers
}

// fill fills the model as make_reference.py does.
func (r record) fill(t *testing.T, net nn.Module) {
	t.Helper()
	for position, n := range nn.State(net) {
		if n.Tensor.DType() == torch.Int64 {
			continue
		}
		shape := n.Tensor.Shape()
		values := u(position, int(n.Tensor.Elements()))
		add, scale := float32(0), float32(2)
		switch {
		case strings.HasSuffix(n.Name, "running_var"):
			add, scale = r.Variance, r.Variance/2
		case len(shape) == 1 && strings.HasSuffix(n.Name, "weight"):
			add, scale = 1, 0.25
		case len(shape) == 1:
			scale = 0.25
		default:
			fan := float32(n.Tensor.Elements() / shape[0])
			for scale*scale*fan > 4 {
				scale /= 2
			}
		}
		for i := range values {
			values[i] = add + values[i]*scale
		}
		from, err := torch.FromFloat32s(values, shape...)
		if err != nil {
			t.Fatal(err)
		}
		if err := n.Tensor.NoGrad().Copy_(from).Err(); err != nil {
			t.Fatalf("%s: %v, want no error", n.Name, err)
		}
		from.Close()
	}
}

// language reports whether the input is of tokens, rather than images.
func (r record) language() bool { return len(r.Input) == 2 }

// input returns the input of the reference, in a scope of the test, and the labels of its loss.
func (r record) input(t *testing.T) (x, labels *torch.Tensor) {
	t.Helper()
	scope := torch.NewScope(r.Name)
	t.Cleanup(func() { scope.Close() })
	count := 1
	for _, n := range r.Input {
		count *= int(n)
	}
	values := u(1<<16, count)
	var numbers []int64
	var err error
	if r.language() {
		tokens := make([]int64, count)
		vocabulary := options[models.GPT2Options](t, r).VocabSize
		if vocabulary == 0 {
			vocabulary = 50257
		}
		for i, v := range values {
			tokens[i] = int64((v+1)*32768) % int64(vocabulary)
			if i%int(r.Input[1]) > 0 {
				numbers = append(numbers, tokens[i])
			}
		}
		x, err = torch.FromInt64s(tokens, r.Input...)
	} else {
		for i := range r.Input[0] {
			numbers = append(numbers, 7*i)
		}
		x, err = torch.FromFloat32s(values, r.Input...)
	}
	if err != nil {
		t.Fatal(err)
	}
	if labels, err = torch.FromInt64s(numbers); err != nil {
		t.Fatal(err)
	}
	return scope.Own(x), scope.Own(labels)
}

// near fails unless got is within the relative tolerance of want.
func near(t *testing.T, what string, got, want, tolerance float64) {
	t.Helper()
	if d := math.Abs(got - want); !(d <= tolerance*math.Abs(want)) {
		t.Errorf("%s: %v, and the reference has %v", what, got, want)
	}
}

// TestModelsMatchReference compares each model with its reference: the state that a seed gives, the
// logits in evaluation, and the loss and the gradients in training.
func TestModelsMatchReference(t *testing.T) {
	all := readReference(t)
	same := all.sameProcessor()
	for _, r := range all.Models {
		t.Run(r.title(), func(t *testing.T) {
			if testing.Short() && r.Parameters > 30e6 {
				t.Skip("a large model")
			}
			if err := torch.ManualSeed(1); err != nil {
				t.Fatal(err)
			}
			net := r.make(t)
			r.checkState(t, net)
			if r.Input == nil {
				return
			}
			r.fill(t, net)
			x, labels := r.input(t)
			nn.Train(net, false)
			r.checkLogits(t, net.Forward(x.NoGrad()), same && r.Exact)
			nn.Train(net, true)
			if err := torch.ManualSeed(2); err != nil { // for dropout and stochastic depth
				t.Fatal(err)
			}
			logits := net.Forward(x)
			if r.language() { // the logits of the last token have no label
				logits = logits.Narrow(1, 0, r.Input[1]-1).Flatten(0, 1)
			}
			r.checkTraining(t, net, x, logits.CrossEntropy(labels), same)
		})
	}
}

// checkState compares names, shapes and initial values.
func (r record) checkState(t *testing.T, net nn.Module) {
	t.Helper()
	state := nn.State(net)
	var keys strings.Builder
	for _, n := range state {
		fmt.Fprintf(&keys, "%s [%s]\n", n.Name,
			strings.Trim(strings.ReplaceAll(fmt.Sprint(n.Tensor.Shape()), " ", ", "), "[]"))
	}
	if sum := sha256.Sum256([]byte(keys.String())); hex.EncodeToString(sum[:]) != r.Keys {
		t.Fatalf("the keys differ from the reference's:\n%s", keys.String())
	}
	parameters := int64(0)
	for _, p := range nn.NamedParameters(net) {
		if !p.Tensor.RequiresGrad() {
			t.Errorf("%s does not require a gradient", p.Name)
		}
		parameters += p.Tensor.Elements()
	}
	if parameters != r.Parameters {
		t.Errorf("%d parameters, and the reference has %d", parameters, r.Parameters)
	}
	for i, n := range state {
		if n.Tensor.DType() == torch.Int64 || r.Initial == nil {
			continue
		}
		values, err := n.Tensor.Float32s()
		if err != nil {
			t.Fatal(err)
		}
		squares := 0.0
		for _, v := range values {
			squares += float64(v) * float64(v)
		}
		first, sum := r.Initial[i][0], r.Initial[i][1]
		if rms := math.Sqrt(sum / float64(len(values))); !(math.Abs(float64(values[0])-first) <= 1e-5*rms) {
			t.Errorf("%s[0]: %v, and the reference has %v", n.Name, values[0], first)
		}
		near(t, "the squares of "+n.Name, squares, sum, 1e-5)
	}
}

// checkLogits requires the reference's bits on the same processor. On others the tolerance is 1e-5
// of the largest logit.
func (r record) checkLogits(t *testing.T, logits *torch.Tensor, same bool) {
	t.Helper()
	shape := logits.Shape()
	values, err := logits.Float32s()
	if err != nil {
		t.Fatal(err)
	}
	columns := int(shape[len(shape)-1])
	if len(values) != columns*len(r.Logits) {
		t.Fatalf("logits %v, want %d rows, as the reference has", shape, len(r.Logits))
	}
	largest := 0.0
	for _, v := range values {
		largest = max(largest, math.Abs(float64(v)))
	}
	furthest := 0.0
	for i, row := range r.Logits {
		for j, want := range row {
			got := float64(values[i*columns+j])
			if !(math.Abs(got-want) <= 1e-5*largest) {
				t.Fatalf("logit %d of row %d: %v, and the reference has %v", j, i, got, want)
			}
			furthest = max(furthest, math.Abs(got-want)/largest)
		}
	}
	sum := sha256.Sum256(littleEndian(values))
	equal := hex.EncodeToString(sum[:]) == r.SHA256
	t.Logf("the reference's logits begin with %.6g, and these with %.6g; all bits equal: %t; furthest "+
		"apart: %.1g of the largest", r.Logits[0][:3], values[:3], equal, furthest)
	if same && !equal {
		t.Errorf("the SHA-256 of the logits = %x, want %s", sum, r.SHA256)
	}
}

func littleEndian(values []float32) []byte {
	b := make([]byte, 0, 4*len(values))
	for _, v := range values {
		b = binary.LittleEndian.AppendUint32(b, math.Float32bits(v))
	}
	return b
}

// checkTraining compares the loss, and after backward the gradient of every parameter. On another
// processor, other kernels round differently. In the deep ResNets, the normalisation of a batch of
// two amplifies that difference. Between the kernels of SSE4.1 and AVX2, a loss differed by up to
// 1e-4, and a gradient's norm by up to 4 %.
func (r record) checkTraining(t *testing.T, net nn.Module, x, loss *torch.Tensor, same bool) {
	t.Helper()
	forLoss, forGradient := 1e-3, 0.1
	if same {
		forLoss, forGradient = 1e-5, 1e-5
	}
	if err := loss.Backward(); err != nil {
		t.Fatal(err)
	}
	value, err := loss.Float64()
	if err != nil {
		t.Fatal(err)
	}
	near(t, "the loss", value, r.Loss, forLoss)
	parameters := nn.NamedParameters(net)
	if len(parameters) != len(r.Gradients) {
		t.Fatalf("%d parameters, and the reference has %d", len(parameters), len(r.Gradients))
	}
	largest := slices.Max(r.Gradients)
	for i, p := range parameters {
		g := p.Tensor.In(x.Scope()).Grad()
		if g == nil {
			t.Fatalf("%s has no gradient", p.Name)
		}
		norm, err := g.ToDType(torch.Float64).Norm().Float64()
		if err != nil {
			t.Fatalf("%s: %v, want no error", p.Name, err)
		}
		// A gradient that is zero up to rounding is compared with the largest one.
		if want := r.Gradients[i]; !(math.Abs(norm-want) <= forGradient*(want+0.01*largest)) {
			t.Errorf("the gradient of %s has the norm %v, and the reference's has %v", p.Name, norm, want)
		}
	}
}

func TestNames(t *testing.T) {
	names := models.Names()
	known := map[string]bool{}
	for _, r := range readReference(t).Models {
		known[r.Name] = true
	}
	for _, name := range names {
		if !known[name] && name != "gpt2-large" && name != "gpt2-xl" { // they take 3 GB and 6 GB
			t.Errorf("%s has no reference", name)
		}
	}
	if sorted := slices.Compact(slices.Sorted(slices.Values(names))); len(sorted) != len(names) {
		t.Errorf("the names are %v, want each once", names)
	}
	_, err := models.ByName("resnet19", models.Options{})
	if !errors.Is(err, cuda.ErrInvalidArgument) || !strings.Contains(err.Error(), "resnet18, resnet34") {
		t.Errorf("an unknown name: %v, want cuda.ErrInvalidArgument with \"resnet18, resnet34\"", err)
	}
	net, err := models.ByName("resnet18", models.Options{NumClasses: -1})
	if net != nil || !errors.Is(err, cuda.ErrInvalidArgument) {
		t.Errorf("-1 classes: %v, %v, want nil, cuda.ErrInvalidArgument", net, err)
	}
	net, err = models.ByName("gpt2", models.Options{NumClasses: 2})
	if net != nil || !errors.Is(err, cuda.ErrInvalidArgument) {
		t.Errorf("a GPT-2 of 2 classes: %v, %v, want nil, cuda.ErrInvalidArgument", net, err)
	}
}

// ByName sets the number of classes of every model except GPT-2.
func TestByNameSetsClasses(t *testing.T) {
	for _, name := range []string{"resnet18", "mobilenet_v3_small", "mobilenet_v3_large", "efficientnet_b0",
		"convnext_tiny", "vit_b_16"} {
		net, err := models.ByName(name, models.Options{NumClasses: 7, ImageSize: 32})
		if err != nil {
			t.Fatalf("%s: %v, want no error", name, err)
		}
		nn.Train(net, false)
		scope := torch.NewScope(name)
		x, err := torch.Zeros(cuda.CPU, torch.Float32, 1, 3, 32, 32)
		if err != nil {
			t.Fatal(err)
		}
		y := net.Forward(scope.Own(x).NoGrad())
		if err := y.Err(); err != nil || !reflect.DeepEqual(y.Shape(), []int64{1, 7}) {
			t.Errorf("%s: logits %v, %v, want [1 7], nil", name, y, err)
		}
		scope.Close()
		nn.Close(net)
	}
}

// The memory format of the images does not matter. A model also trains in bfloat16, with no tensor
// of another dtype.
func TestChannelsLastAndBFloat16(t *testing.T) {
	if err := torch.ManualSeed(3); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"resnet18", "resnet50", "mobilenet_v3_small", "efficientnet_b0",
		"convnext_tiny", "vit_b_16"} {
		net, err := models.ByName(name, models.Options{NumClasses: 7, ImageSize: 32})
		if err != nil {
			t.Fatalf("%s: %v, want no error", name, err)
		}
		defer nn.Close(net)
		if vit, ok := net.(*models.ViT); ok { // its head starts with zeros, which hide all else
			if err := nn.Initialise(nn.Parameters(vit.Head)[0], nn.Normal(0, 1)); err != nil {
				t.Fatal(err)
			}
		}
		scope := torch.NewScope(name)
		defer scope.Close()
		images, err := torch.FromFloat32s(u(1, 4*3*32*32), 4, 3, 32, 32)
		if err != nil {
			t.Fatal(err)
		}
		images = scope.Own(images)
		last := images.Contiguous(torch.ChannelsLast)
		nn.Train(net, false)
		want, err := net.Forward(images.NoGrad()).Float64s()
		if err != nil {
			t.Fatalf("%s: %v, want no error", name, err)
		}
		got, err := net.Forward(last.NoGrad()).Float64s()
		if err != nil || len(got) != len(want) {
			t.Fatalf("%s, channels last: %v", name, err)
		}
		largest := max(slices.Max(want), -slices.Min(want))
		for i := range got {
			if !(math.Abs(got[i]-want[i]) <= 1e-4*largest) {
				t.Errorf("%s: logit %d is %v with channels last, %v without", name, i, got[i], want[i])
				break
			}
		}
		if err := nn.ToDType(net, torch.BFloat16); err != nil {
			t.Fatal(err)
		}
		nn.Train(net, true)
		loss := net.Forward(last.ToDType(torch.BFloat16)).Sum()
		if err := loss.Backward(); err != nil || loss.DType() != torch.BFloat16 {
			t.Errorf("%s in bfloat16: %v, %v, want bfloat16, nil", name, loss.DType(), err)
		}
	}
}

func TestOptionsAreChecked(t *testing.T) {
	for name, make := range map[string]func() (nn.Module, error){
		"groups of a basic block": func() (nn.Module,
			error) {
			return models.NewResNet18(models.ResNetOptions{Groups: 2})
		},
		"width of a basic block": func() (nn.Module,
			error) {
			return models.NewResNet34(models.ResNetOptions{WidthPerGroup: 128})
		},
		"negative groups": func() (nn.Module,
			error) {
			return models.NewResNet50(models.ResNetOptions{Groups: -1})
		},
		"-1 classes of MobileNet": func() (nn.Module, error) {
			return models.NewMobileNetV3Large(models.MobileNetV3Options{NumClasses: -1})
		},
		"-1 classes of EfficientNet": func() (nn.Module, error) {
			return models.NewEfficientNetB0(models.EfficientNetOptions{NumClasses: -1})
		},
		"-1 classes of ConvNeXt": func() (nn.Module,
			error) {
			return models.NewConvNeXtT(models.ConvNeXtOptions{NumClasses: -1})
		},
		"-1 classes of ViT": func() (nn.Module,
			error) {
			return models.NewViTB16(models.ViTOptions{NumClasses: -1})
		},
		"an image of 100 pixels": func() (nn.Module,
			error) {
			return models.NewViTB16(models.ViTOptions{ImageSize: 100})
		},
		"a negative vocabulary": func() (nn.Module,
			error) {
			return models.NewGPT2(models.GPT2Options{VocabSize: -1})
		},
		"5 heads of 768": func() (nn.Module, error) { return models.NewGPT2(models.GPT2Options{Heads: 5}) },
	} {
		if net, err := make(); !errors.Is(err, cuda.ErrInvalidArgument) || !reflect.ValueOf(net).IsNil() {
			t.Errorf("%s: %v, %v", name, net, err)
		}
	}
}

// A forward pass keeps its result and the data for backward. It keeps no handle of a layer's
// output, which would hold memory that backward does not need.
func TestNetworksKeepNoOutputsOfLayers(t *testing.T) {
	gpt, err := models.NewGPT2(models.GPT2Options{VocabSize: 10, Positions: 8, Layers: 2, Heads: 2, Width: 8})
	if err != nil {
		t.Fatal(err)
	}
	vit, err := models.NewViTB16(models.ViTOptions{ImageSize: 32, NumClasses: 2})
	if err != nil {
		t.Fatal(err)
	}
	resnet, err := models.NewResNet18(models.ResNetOptions{NumClasses: 2})
	if err != nil {
		t.Fatal(err)
	}
	tokens, err := torch.FromInt64s([]int64{1, 2, 3}, 1, 3)
	if err != nil {
		t.Fatal(err)
	}
	images, err := torch.Zeros(cuda.CPU, torch.Float32, 2, 3, 32, 32)
	if err != nil {
		t.Fatal(err)
	}
	vectors, err := torch.Zeros(cuda.CPU, torch.Float32, 3, 1, 8)
	if err != nil {
		t.Fatal(err)
	}
	layer := func(first bool) nn.Module {
		return nn.NewTransformerEncoderLayer(8, 2, nn.TransformerEncoderLayerOptions{Feedforward: 8, NormFirst: first})
	}
	for _, c := range []struct {
		name string
		net  nn.Module
		x    *torch.Tensor
		made int
	}{
		{"GPT-2", gpt, tokens, 1},
		{"a block", gpt.Blocks()[0], vectors, 1},
		{"ViT", vit, images, 2}, // the head's input, and the logits
		{"ResNet-18", resnet, images, 2},
		{"a layer", layer(false), vectors, 1},
		{"a layer, normalised first", layer(true), vectors, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, training := range []bool{true, false} {
				nn.Train(c.net, training)
				scope := torch.NewScope("pass")
				x := c.x.In(scope)
				before := scope.Len()
				y := c.net.Forward(x)
				if made := scope.Len() - before; y.Err() != nil || made != c.made || y.Scope() != scope {
					t.Errorf("training: %v: %d tensors are left, in %v: %v, want %v, %v, nil",
						training, made, y.Scope(), y.Err(), c.made, scope)
				}
				scope.Close()
			}
		})
	}
}

func TestInputsAreChecked(t *testing.T) {
	resnet, err := models.NewResNet18(models.ResNetOptions{NumClasses: 2})
	if err != nil {
		t.Fatal(err)
	}
	defer nn.Close(resnet)
	vit, err := models.NewViTB16(models.ViTOptions{NumClasses: 2, ImageSize: 16})
	if err != nil {
		t.Fatal(err)
	}
	defer nn.Close(vit)
	gpt2, err := models.NewGPT2(models.GPT2Options{VocabSize: 5, Positions: 3, Layers: 1, Heads: 1, Width: 8})
	if err != nil {
		t.Fatal(err)
	}
	defer nn.Close(gpt2)
	scope := torch.NewScope("test")
	defer scope.Close()
	zeros := func(dtype torch.DType, shape ...int64) *torch.Tensor {
		x, err := torch.Zeros(cuda.CPU, dtype, shape...)
		if err != nil {
			t.Fatal(err)
		}
		return scope.Own(x)
	}
	if n := nn.State(gpt2.Transformer())[2].Name; n != "h.0.ln_1.weight" {
		t.Errorf("the third tensor of the transformer is %s, want \"h.0.ln_1.weight\"", n)
	}
	closed := zeros(torch.Int64, 1, 2)
	closed.Close()
	for _, c := range []struct {
		net  nn.Module
		x    *torch.Tensor
		want string
	}{
		{resnet, zeros(torch.Float32, 1, 4, 32, 32), "conv1: Conv2d"},
		{vit, zeros(torch.Float32, 1, 3, 32, 32), "16 x 16 pixels"},
		{vit, zeros(torch.Float32, 3, 16, 16), "16 x 16 pixels"},
		{gpt2, zeros(torch.Int64, 2), "[N T]"},
		{gpt2, zeros(torch.Int64, 1, 4), "3 positions"},
		{gpt2, zeros(torch.Float32, 1, 2), "transformer.wte: Embedding"},
		{gpt2, closed, "closed"},
		{vit, closed, "closed"},
	} {
		if err := c.net.Forward(c.x).Err(); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%T: %v, want %q", c.net, err, c.want)
		}
	}
}

// A batch leaves no tensor open when its scope ends.
func TestScopesOwnEverything(t *testing.T) {
	gpt2, err := models.NewGPT2(models.GPT2Options{VocabSize: 5, Positions: 3, Layers: 2, Heads: 2, Width: 8})
	if err != nil {
		t.Fatal(err)
	}
	defer nn.Close(gpt2)
	vit, err := models.NewViTB16(models.ViTOptions{NumClasses: 2, ImageSize: 16})
	if err != nil {
		t.Fatal(err)
	}
	defer nn.Close(vit)
	tokens, err := torch.Zeros(cuda.CPU, torch.Int64, 2, 3)
	if err != nil {
		t.Fatal(err)
	}
	defer tokens.Close()
	images, err := torch.Zeros(cuda.CPU, torch.Float32, 2, 3, 16, 16)
	if err != nil {
		t.Fatal(err)
	}
	defer images.Close()
	for _, c := range []struct {
		net nn.Module
		x   *torch.Tensor
	}{{gpt2, tokens}, {vit, images}} {
		before := torch.LiveTensors()
		scope := torch.NewScope("batch")
		loss := c.net.Forward(c.x.In(scope)).Sum()
		if err := loss.Err(); err != nil {
			t.Fatal(err)
		}
		scope.Close()
		if after := torch.LiveTensors(); after != before {
			t.Errorf("%T: %d tensors before a batch, %d after it", c.net, before, after)
		}
	}
}

// Generate returns the same tokens as forward passes over the whole sequences.
func TestGPT2GeneratesAsWholePasses(t *testing.T) {
	net, err := models.NewGPT2(models.GPT2Options{VocabSize: 13, Positions: 12, Layers: 2, Heads: 2, Width: 8})
	if err != nil {
		t.Fatal(err)
	}
	defer nn.Close(net)
	nn.Train(net, false)
	// The initial weights are so small that each token would predict itself, so use larger ones.
	for _, p := range nn.Parameters(net) {
		if len(p.Shape()) == 2 {
			p.NoGrad().MulScalar_(20)
		}
	}
	scope := torch.NewScope("test")
	defer scope.Close()
	prompt, err := torch.FromInt64s([]int64{3, 1, 4, 11, 5, 9}, 2, 3)
	if err != nil {
		t.Fatal(err)
	}
	prompt = scope.Own(prompt)
	live := torch.LiveTensors()
	got := net.Generate(prompt, models.GenerateOptions{Tokens: 9})
	if n := torch.LiveTensors(); n != live+1 || got.Scope() != scope {
		t.Errorf("Generate left %d tensors, its result in the scope %q, want 0, %q",
			n-live-1, got.Scope().Name(), scope.Name())
	}
	want := prompt
	for range 9 {
		want = torch.Cat([]*torch.Tensor{want, net.Forward(want.NoGrad()).Index(torch.All, -1).ArgMax(1, true)}, 1)
	}
	if same, err := got.Equal(want); err != nil || !same {
		t.Errorf("got %v, %v, want %v", got, err, want)
	}
	free := prompt.Keep()
	defer free.Close()
	live = torch.LiveTensors()
	if same, err := net.Generate(free, models.GenerateOptions{}).Equal(free); err != nil || !same ||
		torch.LiveTensors() > live+1 {
		t.Errorf("no new tokens: %v, and %d tensors more", err, torch.LiveTensors()-live)
	}
	g, err := torch.NewGenerator(cuda.CPU, 7)
	if err != nil {
		t.Fatal(err)
	}
	defer g.Close()
	draw := func(o models.GenerateOptions) *torch.Tensor {
		if err := g.Seed(7); err != nil {
			t.Fatal(err)
		}
		o.Tokens, o.Generator = 9, g
		return net.Generate(prompt, o)
	}
	if same, err := draw(models.GenerateOptions{Temperature: 1, TopK: 1}).Equal(want); err != nil || !same {
		t.Errorf("among the one most probable token: %v", err)
	}
	hot := models.GenerateOptions{Temperature: 9}
	first := draw(hot)
	if same, err := first.Equal(draw(hot)); err != nil || !same {
		t.Errorf("the same seed drew other tokens: %v", err)
	}
	if same, err := first.Equal(want); err != nil || same {
		t.Errorf("a high temperature drew the most probable tokens: %v", err)
	}
	for name, x := range map[string]*torch.Tensor{
		"Tokens":     net.Generate(prompt, models.GenerateOptions{Tokens: 10}),
		"dimensions": net.Generate(prompt.Index(0), models.GenerateOptions{Tokens: 1}),
		"range":      net.Generate(prompt.AddInt(9), models.GenerateOptions{Tokens: 1}),
		"negative":   net.Generate(prompt, models.GenerateOptions{Tokens: -1}),
	} {
		if x.Err() == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

// Embed, Blocks and Logits together compute the same bits as Forward.
func TestGPT2InParts(t *testing.T) {
	net, err := models.NewGPT2(models.GPT2Options{VocabSize: 13, Positions: 12, Layers: 3, Heads: 2, Width: 8})
	if err != nil {
		t.Fatal(err)
	}
	defer nn.Close(net)
	nn.Train(net, false)
	scope := torch.NewScope("test")
	defer scope.Close()
	tokens, err := torch.FromInt64s([]int64{3, 1, 4, 11, 5, 9}, 2, 3)
	if err != nil {
		t.Fatal(err)
	}
	tokens = scope.Own(tokens)
	if n := len(net.Blocks()); n != 3 {
		t.Fatalf("%d blocks, want 3", n)
	}
	x := net.Embed(tokens.NoGrad())
	for _, b := range net.Blocks() {
		x = b.Forward(x)
	}
	if same, err := net.Logits(x).Equal(net.Forward(tokens)); err != nil || !same {
		t.Errorf("the parts compute other logits than Forward: %v", err)
	}
	// The parts of a block accept sequences too, although the block itself passes them rows.
	x = net.Embed(tokens.NoGrad())
	for _, part := range net.Blocks()[0].Parts().Modules {
		want := []int64{2, 3, 8}
		switch part.Name {
		case "mlp.c_proj": // its input is mlp.c_fc's output
			continue
		case "mlp.c_fc":
			want[2] = 32
		}
		if y := part.Module.Forward(x); !slices.Equal(y.Shape(), want) {
			t.Errorf("%s gives %v: %v, want %v", part.Name, y.Shape(), y.Err(), want)
		}
	}
	if err := net.Blocks()[0].Forward(x.Unsqueeze(0)).Err(); !errors.Is(err, cuda.ErrInvalidArgument) ||
		!strings.Contains(err.Error(), "[1 2 3 8]") {
		t.Errorf("an input of four dimensions: %v, want cuda.ErrInvalidArgument with \"[1 2 3 8]\"", err)
	}
	if err := net.Embed(scope.Own(tokens.ToDType(torch.Float32))).Err(); err == nil ||
		!strings.Contains(err.Error(), "Embedding") {
		t.Errorf("tokens of float32: %v, want an error with \"Embedding\"", err)
	}
}
