package nn_test

import (
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/checkpoint"
	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/torch"
)

func line(t *testing.T) int {
	t.Helper()
	_, _, n, _ := runtime.Caller(1)
	return n
}

// stack is a custom model: two residual blocks in a Sequential, and a head.
type stack struct {
	layer1 *nn.Sequential
	head   *nn.Linear
}

// stackCalls is the line where stack calls its layers.
const stackCalls = 37

func (s *stack) Forward(x *torch.Tensor) *torch.Tensor {
	return s.head.Forward(s.layer1.Forward(x).MeanDim([]int64{2, 3}, false))
}

func (s *stack) Parts() nn.Parts {
	return nn.Parts{Modules: []nn.Child{{Name: "layer1", Module: s.layer1}, {Name: "head", Module: s.head}}}
}

func newResidual(channels int) *residual {
	return &residual{nn.NewConv2d(channels, channels, 3, nn.Conv2dOptions{Padding: 1}),
		nn.NewBatchNorm2d(channels, nn.BatchNorm2dOptions{})}
}

func images(t *testing.T, shape ...int64) *torch.Tensor {
	t.Helper()
	x, err := torch.Ones(cuda.CPU, torch.Float32, shape...)
	if err != nil {
		t.Fatal(err)
	}
	s := torch.NewScope("images")
	t.Cleanup(func() { s.Close() })
	return s.Own(x)
}

func TestErrorNamesTheLayersPathAndLine(t *testing.T) {
	x := images(t, 2, 3, 4, 4)
	made := line(t) + 1
	bad := nn.NewConv2d(4, 3, 1, nn.Conv2dOptions{})
	net := &stack{nn.NewSequential(newResidual(3), nn.NewSequential(nn.NewReLU(), bad), newResidual(3)),
		nn.NewLinear(3, 2, nn.LinearOptions{})}
	defer nn.Close(net)

	// The Sequentials around a layer give its path even before the program has listed the model.
	var e *nn.LayerError
	err := net.Forward(x).Err()
	if !errors.As(err, &e) || e.Path() != "1.1" || e.Kind != "Conv2d" || e.Line != made ||
		filepath.Base(e.File) != "layer_test.go" {
		t.Errorf("got %v", err)
	}
	nn.Parameters(net)
	nn.Parameters(net.layer1) // a part of the model: the longer path stays
	err = net.Forward(x).ReLU().Sum().Backward()
	if !errors.As(err, &e) || e.Path() != "layer1.1.1" {
		t.Errorf("got %v", err)
	}
	want := fmt.Sprintf("layer1.1.1: Conv2d made at layer_test.go:%d: torch: Conv2d(float32[2 3 4 4] "+
		"cpu, float32[3 4 1 1] cpu, float32[3] cpu) at layer_test.go:%d: ", made, stackCalls)
	if !strings.HasPrefix(err.Error(), want) || strings.Count(err.Error(), "layer1.1.1") != 1 {
		t.Errorf("got  %v\nwant %s...", err, want)
	}
	var op *torch.Error
	if !errors.As(err, &op) || op.Op != "Conv2d" || op.Line != stackCalls {
		t.Errorf("got %v, want the operator's error inside", err)
	}

	// A failed input is no error of the layer.
	before := x.MatMul(images(t, 7))
	if err := net.Forward(before).Err(); err != before.Err() {
		t.Errorf("got %v, want the input's error", err)
	}
}

// The error of a module names the line of the program's call. The compiler inlines these
// constructors, which gives their closures names in the package that calls them.
func TestErrorNamesTheLineOfTheCall(t *testing.T) {
	for _, m := range []nn.Module{nn.NewUpsample(nn.UpsampleOptions{Scale: 2}),
		nn.NewLeakyReLU(nn.LeakyReLUOptions{}), nn.NewSoftmax(1)} {
		var e *torch.Error
		if err := m.Forward(nil).Err(); !errors.As(err, &e) || filepath.Base(e.File) != "layer_test.go" {
			t.Errorf("the error names another file: %v", err)
		}
	}
}

func TestErrorNamesOtherModules(t *testing.T) {
	x := images(t, 2, 3)
	square := images(t, 2, 3, 4, 4)
	own := nn.Func(func(x *torch.Tensor) *torch.Tensor { return x.View(7) })
	cases := []struct {
		name string
		m    nn.Module
		x    *torch.Tensor
		want string
	}{
		{"function", nn.NewSequential(nn.NewIdentity(), nn.NewMaxPool2d(0, nn.MaxPool2dOptions{})), square,
			"1: MaxPool2d made at layer_test.go:"},
		{"program's own", nn.NewSequential(nn.NewIdentity(), own), x, "1: Func made at layer_test.go:"},
		{"alone", nn.NewGroupNorm(2, 4, nn.GroupNormOptions{}), square, "nn: GroupNorm made at layer_test.go:"},
		{"in an attention", nn.NewSequential(&nn.MultiheadAttention{OutProj: nn.NewLinear(1, 1,
			nn.LinearOptions{})}), x, "0"},
		{"inside a layer", nn.NewSequential(nn.NewTransformerEncoderLayer(4, 2,
			nn.TransformerEncoderLayerOptions{})), x, "0.self_attn: MultiheadAttention made at layer_test.go:"},
		{"inside an encoder", nn.NewSequential(nn.NewTransformerEncoder(nn.NewTransformerEncoderLayer(4, 2,
			nn.TransformerEncoderLayerOptions{}), 2, nn.TransformerEncoderOptions{})), x,
			"0.layers.0.self_attn: MultiheadAttention made at layer_test.go:"},
		{"inside a decoder", nn.NewTransformerDecoderLayer(4, 2, nn.TransformerDecoderLayerOptions{}), x,
			"MultiheadAttention made at layer_test.go:"},
		{"constructor", nn.NewSequential(nn.NewLinear(0, 1, nn.LinearOptions{})), x,
			"0: Linear made at layer_test.go:"},
		{"rank", nn.NewBatchNorm2d(3, nn.BatchNorm2dOptions{}), x, "nn: BatchNorm2d"},
		{"indices", nn.NewEmbedding(3, 2, nn.EmbeddingOptions{}), x, "nn: Embedding"},
		{"sequences", nn.NewLSTM(3, 2, nn.LSTMOptions{}), x, "nn: LSTM"},
		{"sequences of a GRU", nn.NewGRU(4, 2, nn.GRUOptions{}), images(t, 2, 2, 2), "nn: GRU"},
		{"sequences of an RNN", nn.NewRNN(4, 2, nn.RNNOptions{}), images(t, 2, 2, 2), "nn: RNN"},
		{"step of an LSTM", nn.NewLSTMCell(4, 2, nn.LSTMCellOptions{}), images(t, 2, 2, 4),
			"nn: LSTMCell made at layer_test.go:"},
		{"step of a GRU", nn.NewGRUCell(4, 2, nn.GRUCellOptions{}), x, "nn: GRUCell made at layer_test.go:"},
		{"step of an RNN", nn.NewRNNCell(4, 2, nn.RNNCellOptions{}), x, "nn: RNNCell made at layer_test.go:"},
		{"indices of bags", nn.NewEmbeddingBag(3, 2, nn.EmbeddingBagOptions{}), square,
			"nn: EmbeddingBag made at layer_test.go:"},
		{"sizes", nn.NewAdaptiveAvgPool3d(1, 2), x, "nn: AdaptiveAvgPool3d made at layer_test.go:"},
		{"no size", nn.NewAdaptiveMaxPool2d(), square, "the size is [], and it must have one value, or 2"},
		{"padding", nn.NewPad([]int{1}, nn.PadOptions{}), x, "two numbers for each direction"},
		{"limits", nn.NewHardtanh(nn.HardtanhOptions{Min: 2}), x, "Min 2 must be less than Max 0"},
		{"size and scale", nn.NewUpsample(nn.UpsampleOptions{Size: []int{2}, Scale: 2}), square,
			"set either Size or Scale"},
		{"mode", nn.NewUpsample(nn.UpsampleOptions{Scale: 2, Mode: "linear"}), square, `Mode "linear"`},
		{"corners", nn.NewUpsample(nn.UpsampleOptions{Scale: 2, AlignCorners: true}), square, "AlignCorners true"},
		{"size of another rank", nn.NewUpsample(nn.UpsampleOptions{Size: []int{2, 2, 2}}), square, "Size [2 2 2]"},
		{"too few dimensions", nn.NewUpsample(nn.UpsampleOptions{Scale: 2}), x, "3 to 5 dimensions"},
		{"nil output", nn.NewSequential(nn.Func(func(*torch.Tensor) *torch.Tensor { return nil })), x, "0: Func"},
		{"nil input", nn.NewUpsample(nn.UpsampleOptions{Scale: 2}), nil, "nil"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			defer nn.Close(c.m)
			err := c.m.Forward(c.x).Err()
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want an error with %q", err, c.want)
			}
		})
	}
}

func TestConstructorsRefuseBadOptions(t *testing.T) {
	seven := 7
	for name, m := range map[string]nn.Module{
		"kernel size":        nn.NewConv2d(1, 1, 1, nn.Conv2dOptions{KernelSize: []int{3}}),
		"padding size":       nn.NewConv3d(1, 1, 1, nn.Conv3dOptions{PaddingSize: []int{1, 1}}),
		"no padding sizes":   nn.NewConv2d(1, 1, 1, nn.Conv2dOptions{PaddingSize: []int{}}),
		"no kernel sizes":    nn.NewConv1d(1, 1, 1, nn.Conv1dOptions{KernelSize: []int{}}),
		"negative padding":   nn.NewConv2d(1, 1, 1, nn.Conv2dOptions{PaddingSize: []int{1, -1}}),
		"transposed stride":  nn.NewConvTranspose2d(1, 1, 1, nn.ConvTranspose2dOptions{Stride: -1}),
		"transposed groups":  nn.NewConvTranspose1d(4, 3, 1, nn.ConvTranspose1dOptions{Groups: 2}),
		"kernel of 0":        nn.NewConv2d(1, 1, 0, nn.Conv2dOptions{}),
		"stride size":        nn.NewConv2d(1, 1, 1, nn.Conv2dOptions{StrideSize: []int{0, 1}}),
		"dilation size":      nn.NewConv2d(1, 1, 1, nn.Conv2dOptions{DilationSize: []int{1}}),
		"negative groups":    nn.NewConv2d(1, 1, 1, nn.Conv2dOptions{Groups: -1}),
		"padding mode":       nn.NewConv2d(1, 1, 1, nn.Conv2dOptions{PaddingMode: "mirror"}),
		"same and a stride":  nn.NewConv2d(1, 1, 1, nn.Conv2dOptions{Same: true, StrideSize: []int{1, 2}}),
		"same and a padding": nn.NewConv2d(1, 1, 1, nn.Conv2dOptions{Same: true, Padding: 1}),
		"transposed kernel":  nn.NewConvTranspose1d(1, 1, 1, nn.ConvTranspose1dOptions{KernelSize: []int{1, 1}}),
		"output padding":     nn.NewConvTranspose1d(1, 1, 1, nn.ConvTranspose1dOptions{OutputPadding: -1}),
		"no kernel":          nn.NewConvTranspose3d(4, 3, 0, nn.ConvTranspose3dOptions{}),
		"no channels":        nn.NewInstanceNorm2d(0, nn.InstanceNorm2dOptions{}),
		"no shape":           nn.NewLayerNorm(nil, nn.LayerNormOptions{}),
		"empty size":         nn.NewRMSNorm([]int{3, 0}, nn.RMSNormOptions{}),
		"groups":             nn.NewGroupNorm(3, 4, nn.GroupNormOptions{}),
		"heads":              nn.NewMultiheadAttention(8, 3, nn.MultiheadAttentionOptions{}),
		"no heads":           nn.NewMultiheadAttention(8, 0, nn.MultiheadAttentionOptions{}),
		"padding row":        nn.NewEmbedding(3, 2, nn.EmbeddingOptions{PaddingIdx: &seven}),
		"no rows":            nn.NewEmbedding(0, 2, nn.EmbeddingOptions{}),
		"bag's mode":         nn.NewEmbeddingBag(3, 2, nn.EmbeddingBagOptions{Mode: "median"}),
		"bag's padding row":  nn.NewEmbeddingBag(3, 2, nn.EmbeddingBagOptions{PaddingIdx: &seven}),
		"layers":             nn.NewLSTM(2, 2, nn.LSTMOptions{Layers: -1}),
		"no hidden":          nn.NewGRU(2, 0, nn.GRUOptions{}),
		"dropout":            nn.NewRNN(2, 2, nn.RNNOptions{Dropout: 2}),
		"no LSTM inputs":     nn.NewLSTMCell(0, 2, nn.LSTMCellOptions{}),
		"no GRU state":       nn.NewGRUCell(2, 0, nn.GRUCellOptions{}),
		"no RNN state":       nn.NewRNNCell(2, 0, nn.RNNCellOptions{}),
		"no encoder layers": nn.NewTransformerEncoder(nn.NewTransformerEncoderLayer(8, 2,
			nn.TransformerEncoderLayerOptions{}), 0, nn.TransformerEncoderOptions{}),
		"bad encoder layer": nn.NewTransformerEncoder(nn.NewTransformerEncoderLayer(8, 3,
			nn.TransformerEncoderLayerOptions{}), 2, nn.TransformerEncoderOptions{}),
		"no decoder layers": nn.NewTransformerDecoder(nil, 2, nn.TransformerDecoderOptions{}),
		"no slopes":         nn.NewPReLU(0),
	} {
		t.Run(name, func(t *testing.T) {
			defer nn.Close(m)
			if err := nn.Err(m); !errors.Is(err, cuda.ErrInvalidArgument) {
				t.Errorf("Err: %v, want cuda.ErrInvalidArgument", err)
			}
			if err := m.Forward(images(t, 2, 4, 8)).Err(); !errors.Is(err, cuda.ErrInvalidArgument) {
				t.Errorf("Forward: %v, want cuda.ErrInvalidArgument", err)
			}
		})
	}
}

func TestCopiesOfTransformerLayersKeepTheMode(t *testing.T) {
	layer := nn.NewTransformerDecoderLayer(8, 2, nn.TransformerDecoderLayerOptions{Dropout: 0.5})
	nn.Train(layer, false)
	d := nn.NewTransformerDecoder(layer, 2, nn.TransformerDecoderOptions{})
	defer nn.Close(d)
	x := images(t, 3, 2, 8)
	requireEqual(t, "output of a second pass", d.Forward(x), d.Forward(x))
	nn.Train(d.Layers[1], true)
	before, err := d.Forward(x).Float32s()
	if err != nil {
		t.Fatal(err)
	}
	after, err := d.Forward(x).Float32s()
	if err != nil {
		t.Fatal(err)
	}
	if slices.Equal(before, after) {
		t.Errorf("two outputs of the copy in training are both %v, want dropout to make them differ", before)
	}
}

func TestDropoutDropsInTraining(t *testing.T) {
	for name, d := range map[string]*nn.Dropout{"elements": nn.NewDropout(0.5),
		"channels": nn.NewDropout2d(0.5), "samples": nn.NewStochasticDepth(0.5)} {
		t.Run(name, func(t *testing.T) {
			x := images(t, 64, 4, 3, 3)
			values, err := d.Forward(x).Float32s()
			if err != nil {
				t.Fatal(err)
			}
			mixed, zeros, part := 0, 0, 9
			if name == "samples" {
				part = 4 * 9
			}
			for i := 0; i < len(values); i += part {
				n := 0
				for _, v := range values[i : i+part] {
					if v != 0 && v != 2 {
						t.Fatalf("got %v, want 0 or 2", v)
					}
					if v == 0 {
						n++
					}
				}
				zeros += n
				if n > 0 && n < part {
					mixed++
				}
			}
			if zeros == 0 || zeros == len(values) || (mixed == 0) == (name == "elements") {
				t.Errorf("%d of %d are zero, %d parts in part", zeros, len(values), mixed)
			}
			d.SetTraining(false)
			if y, err := d.Forward(x).Sum().Float64(); y != 64*4*9 || err != nil {
				t.Errorf("in evaluation the sum is %v, %v, want %v, nil", y, err, 64*4*9)
			}
		})
	}
}

func TestCacheEqualsTheWholeSequence(t *testing.T) {
	if err := torch.ManualSeed(5); err != nil {
		t.Fatal(err)
	}
	g := newGPTBlock()
	defer nn.Close(g)
	nn.Train(g, false)
	s := torch.NewScope("generate")
	defer s.Close()
	indices, err := torch.FromInt64s([]int64{1, 2, 6, 10, 0, 3, 2, 0, 1, 1, 9, 4}, 2, 6)
	if err != nil {
		t.Fatal(err)
	}
	tokens := s.Own(indices).NoGrad()
	whole, err := g.Forward(tokens).Float32s()
	if err != nil {
		t.Fatal(err)
	}
	cache := nn.NewKVCache(6)
	defer cache.Close()
	for _, parts := range [][]int64{{1, 1, 1, 1, 1, 1}, {3, 1, 2}, {6}} {
		cache.Reset()
		var logits []*torch.Tensor
		at := int64(0)
		for _, n := range parts {
			logits = append(logits, g.generate(tokens.Narrow(1, at, n), cache))
			at += n
		}
		got, err := torch.Cat(logits, 1).Float32s()
		if err != nil {
			t.Fatal(err)
		}
		for i := range got {
			if d := got[i] - whole[i]; d > 1e-5 || d < -1e-5 {
				t.Fatalf("%v: logit %d is %v, want %v, as without a cache", parts, i, got[i], whole[i])
			}
		}
	}
	if cache.Len() != 6 {
		t.Errorf("the cache has %d positions, want 6", cache.Len())
	}
	x := images(t, 2, 1, 8)
	attend := func(x *torch.Tensor) error {
		return g.attn.Attend(x, x, x, nn.AttentionOptions{Cache: cache}).Err()
	}
	if err := attend(x.NoGrad()); err == nil || !strings.Contains(err.Error(), "6 of 6 positions") {
		t.Errorf("a full cache: %v, want an error with \"6 of 6 positions\"", err)
	}
	if err := attend(x); err == nil || !strings.Contains(err.Error(), "NoGrad") {
		t.Errorf("with gradients: %v, want an error with \"NoGrad\"", err)
	}
	cache.Reset()
	if err := g.attn.Attend(images(t, 1, 1, 8).NoGrad(), x.NoGrad(), x.NoGrad(),
		nn.AttentionOptions{Cache: cache, Mask: images(t, 3, 7)}).Err(); err == nil || cache.Len() != 0 {
		t.Errorf("a mask of another shape: %v, and the cache has %d positions, want an error, 0",
			err, cache.Len())
	}
	if err := attend(images(t, 1, 1, 8).NoGrad()); err == nil ||
		!strings.Contains(err.Error(), "the KVCache is for 2 sequences of float32") {
		t.Errorf("another number of sequences: %v,"+
			" want an error with \"the KVCache is for 2 sequences of float32\"", err)
	}
	if err := g.attn.Attend(x, x, x, nn.AttentionOptions{Causal: true, Mask: x}).Err(); err == nil ||
		!strings.Contains(err.Error(), "excludes Mask") {
		t.Errorf("a mask and causal: %v, want an error with \"excludes Mask\"", err)
	}
}

func TestLayersHoldNoMemoryOutsideOfScopes(t *testing.T) {
	p := openLayers(t)
	// A garbage collection during the passes would free tensors that other tests forgot to close.
	// That would hide leaks of this test.
	runtime.GC()
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	for name, build := range layerCases() {
		t.Run(name, func(t *testing.T) {
			m := build()
			defer nn.Close(m)
			x, err := p.c.Read(name + "/x")
			if err != nil {
				t.Fatal(err)
			}
			defer x.Close()
			forward := func() {
				s := torch.NewScope("forward")
				defer s.Close()
				in := x.In(s)
				if x.DType() == torch.Float64 {
					in = in.ToDType(torch.Float32)
				}
				if err := m.Forward(in).Sum().Backward(); err != nil && len(nn.Parameters(m)) > 0 {
					t.Fatal(err)
				}
			}
			forward()
			before := torch.LiveTensors()
			for range 3 {
				forward()
			}
			// There may be fewer tensors than before, because cleanups of the first collection were
			// still running.
			if n := torch.LiveTensors(); n > before {
				t.Errorf("%d references more after three passes, want none", n-before)
			}
		})
	}
}

func TestSummaryCountsAndMeasures(t *testing.T) {
	net := &stack{nn.NewSequential(newResidual(3), nn.NewReLU(), nn.Func((*torch.Tensor).Tanh)),
		nn.NewLinear(3, 2, nn.LinearOptions{})}
	defer nn.Close(net)
	nn.Train(net.head, false)
	if err := nn.Freeze(net.head); err != nil {
		t.Fatal(err)
	}
	x := images(t, 2, 3, 4, 4)
	table, err := nn.Summary(net, x)
	if err != nil {
		t.Fatal(err)
	}
	want := `layer          type         output     parameters
(model)        stack        [2 2]      -
layer1         Sequential   [2 3 4 4]  -
layer1.0       residual     [2 3 4 4]  -
layer1.0.conv  Conv2d       [2 3 4 4]  84
layer1.0.norm  BatchNorm2d  [2 3 4 4]  6
layer1.1       ReLU         [2 3 4 4]  -
layer1.2       Func         [2 3 4 4]  -
head           Linear       [2 2]      8
98 parameters, 90 of them trainable; 0.0 MiB with buffers`
	if table.String() != want {
		t.Errorf("got\n%s\nwant\n%s", table, want)
	}
	if table.Bytes != 98*4+6*4+8 {
		t.Errorf("%d bytes, want %v", table.Bytes, 98*4+6*4+8)
	}
	block := net.layer1.Parts().Modules[0].Module.(*residual)
	if n, err := block.norm.NumBatches.Int64(); n != 0 || err != nil {
		t.Errorf("Summary trained the running statistics: %d batches, %v, want 0, nil", n, err)
	}
	if err := net.Forward(x).Err(); err != nil {
		t.Fatal(err)
	}
	if n, err := block.norm.NumBatches.Int64(); n != 1 || err != nil {
		t.Errorf("Summary left the model in evaluation mode: %d batches, %v, want 1, nil", n, err)
	}

	// Next, a model that has one layer in two places, and a model that fails.
	shared := nn.NewLinear(3, 3, nn.LinearOptions{})
	twice := nn.NewSequential(shared, shared)
	defer nn.Close(shared)
	table, err = nn.Summary(twice, images(t, 5, 3))
	if err != nil || table.Parameters != 12 || table.Rows[1].Calls != 2 ||
		!strings.Contains(table.String(), "[5 3] x2") {
		t.Errorf("got %v\n%s\nwant 12 parameters, and row 1 called twice with [5 3]", err, table)
	}
	if _, err := nn.Summary(twice, images(t, 5, 4)); err == nil ||
		!strings.HasPrefix(err.Error(), "0: Linear") && !strings.HasPrefix(err.Error(), "1: Linear") {
		t.Errorf("got %v", err)
	}
	if _, err := nn.Summary(nil, x); err == nil {
		t.Error("Summary of a nil module: got no error, want one")
	}
}

func TestFreezeExcludesParameters(t *testing.T) {
	trunk, head := nn.NewLinear(3, 4, nn.LinearOptions{}), nn.NewLinear(4, 2, nn.LinearOptions{})
	net := nn.NewSequential(trunk, head)
	defer nn.Close(net)
	opt, err := optim.NewSGD(nn.Parameters(net), optim.SGDOptions{LR: 0.1})
	if err != nil {
		t.Fatal(err)
	}
	defer opt.Close()
	// changed runs a step and reports whether it changed trunk and head.
	changed := func() [2]bool {
		t.Helper()
		values := func(w *torch.Tensor) []float32 {
			v, err := w.Float32s()
			if err != nil {
				t.Fatal(err)
			}
			return v
		}
		before := [2][]float32{values(trunk.Weight), values(head.Weight)}
		if err := net.Forward(images(t, 2, 3)).Sum().Backward(); err != nil {
			t.Fatal(err)
		}
		if err := opt.Step(); err != nil {
			t.Fatal(err)
		}
		return [2]bool{!slices.Equal(before[0], values(trunk.Weight)), !slices.Equal(before[1], values(head.Weight))}
	}
	if got := changed(); got != [2]bool{true, true} {
		t.Errorf("trunk and head changed: %v, want [true true]", got)
	}
	if err := net.Forward(images(t, 2, 3)).Sum().Backward(); err != nil {
		t.Fatal(err)
	}
	if err := nn.Freeze(trunk); err != nil {
		t.Fatal(err)
	}
	if g := trunk.Weight.Grad(); g != nil {
		t.Errorf("a frozen parameter has the gradient %v, want nil", g)
	}
	if got := changed(); got != [2]bool{false, true} {
		t.Errorf("with a frozen trunk, trunk and head changed: %v, want [false true]", got)
	}
	if err := nn.Unfreeze(net); err != nil {
		t.Fatal(err)
	}
	if got := changed(); got != [2]bool{true, true} {
		t.Errorf("after Unfreeze, trunk and head changed: %v, want [true true]", got)
	}
	bad := nn.NewLinear(0, 1, nn.LinearOptions{})
	if err := nn.Freeze(bad); err == nil || !strings.HasPrefix(err.Error(), "nn: weight: ") {
		t.Errorf("got %v, want an error that begins with \"nn: weight: \"", err)
	}
}

// Kernels and images get the strides of the format, even with a kernel of one pixel. The output
// stays the same, and an optimizer steps.
func TestToMemoryFormat(t *testing.T) {
	net := nn.NewSequential(nn.NewConv2d(3, 4, 3, nn.Conv2dOptions{}),
		nn.NewBatchNorm2d(4, nn.BatchNorm2dOptions{}), nn.NewConv2d(4, 5, 1, nn.Conv2dOptions{}))
	defer nn.Close(net)
	x, err := torch.Randn(cuda.CPU, torch.Float32, 2, 3, 6, 6)
	if err != nil {
		t.Fatal(err)
	}
	scope := torch.NewScope("test")
	defer scope.Close()
	x = scope.Own(x)
	before, err := net.Forward(x).Float64s()
	if err != nil {
		t.Fatal(err)
	}
	opt, err := optim.NewAdamW(nn.Parameters(net), optim.AdamWOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer opt.Close()
	if err := nn.ToMemoryFormat(net, torch.ChannelsLast); err != nil {
		t.Fatal(err)
	}
	for i, want := range [][]int64{{27, 1, 9, 3}, {1}, {1}, {1}, {4, 1, 4, 4}, {1}} {
		if got := nn.Parameters(net)[i].Strides(); !slices.Equal(got, want) {
			t.Errorf("parameter %d has the strides %v, want %v", i, got, want)
		}
	}
	y := net.Forward(x.Contiguous(torch.ChannelsLast))
	after, err := y.Float64s()
	if err != nil {
		t.Fatal(err)
	}
	for i := range before {
		if math.Abs(after[i]-before[i]) > 1e-5 {
			t.Fatalf("output %d: %v, and %v before", i, after[i], before[i])
		}
	}
	if !y.IsContiguous(torch.ChannelsLast) {
		t.Errorf("the output has the strides %v", y.Strides())
	}
	if err := errors.Join(y.Sum().Backward(), opt.Step(), nn.ToMemoryFormat(net, torch.Contiguous)); err != nil {
		t.Fatal(err)
	}
	if got := nn.Parameters(net)[4].Strides(); !slices.Equal(got, []int64{4, 1, 1, 1}) {
		t.Errorf("back: %v, want [4 1 1 1]", got)
	}
}

func TestToDTypeConvertsInPlace(t *testing.T) {
	norm := nn.NewBatchNorm1d(3, nn.BatchNorm1dOptions{})
	defer nn.Close(norm)
	weight := norm.Weight
	if err := nn.ToDType(norm, torch.BFloat16); err != nil {
		t.Fatal(err)
	}
	if norm.Weight != weight || !weight.RequiresGrad() || weight.DType() != torch.BFloat16 ||
		norm.RunningVar.DType() != torch.BFloat16 {
		t.Errorf("got %v, %v", norm.Weight, norm.RunningVar)
	}
	if norm.NumBatches.DType() != torch.Int64 {
		t.Errorf("the count is %v, want int64", norm.NumBatches)
	}
	if err := nn.ToDType(norm, torch.Int64); !errors.Is(err, cuda.ErrInvalidArgument) {
		t.Errorf("got %v, want cuda.ErrInvalidArgument", err)
	}
}

// Load accepts a file without batch counts, as PyTorch's load_state_dict(strict=True) does.
func TestLoadTakesFilesWithoutCountsOfBatches(t *testing.T) {
	make := func() *nn.Sequential {
		net := nn.NewSequential(nn.NewBatchNorm2d(3, nn.BatchNorm2dOptions{}),
			nn.NewInstanceNorm2d(3, nn.InstanceNorm2dOptions{RunningStats: true}))
		t.Cleanup(func() { nn.Close(net) })
		return net
	}
	old, net := make(), make()
	for _, name := range []string{"old.safetensors", "old.pth"} {
		for _, n := range nn.State(net) { // make all values differ from the file's, where the count is 0
			if err := n.Tensor.NoGrad().Fill_(7).Err(); err != nil {
				t.Fatal(err)
			}
		}
		var kept []torch.Named
		for _, n := range nn.State(old) {
			if !strings.HasSuffix(n.Name, "num_batches_tracked") {
				kept = append(kept, n)
			}
		}
		path := filepath.Join(t.TempDir(), name)
		if err := checkpoint.Save(path, kept, nil); err != nil {
			t.Fatal(err)
		}
		r, err := nn.LoadWith(path, net, nn.LoadOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(r.Missing, []string{"0.num_batches_tracked", "1.num_batches_tracked"}) ||
			len(r.Loaded) != len(kept) {
			t.Errorf("%s: %v, want both counts missing and the other %d kept", name, r, len(kept))
		}
		for i, n := range nn.State(net) {
			want := nn.State(old)[i].Tensor.String()
			if strings.HasSuffix(n.Name, "num_batches_tracked") {
				want = "int64[] cpu: 7"
			}
			if got := n.Tensor.String(); got != want {
				t.Errorf("%s: %s is %s, want %s", name, n.Name, got, want)
			}
		}
		if err := checkpoint.Save(path, kept[1:], nil); err != nil {
			t.Fatal(err)
		}
		if _, err := nn.Load(path, net); err == nil ||
			!strings.Contains(err.Error(), "tensor 0.weight is not in the file") ||
			strings.Contains(err.Error(), "num_batches") {
			t.Errorf("%s without a weight: %v", name, err)
		}
	}
}

func TestInstanceNormRefusesInputs(t *testing.T) {
	evaluated := nn.NewInstanceNorm2d(2, nn.InstanceNorm2dOptions{RunningStats: true})
	nn.Train(evaluated, false)
	defer nn.Close(evaluated)
	for _, c := range []struct {
		name  string
		m     nn.Module
		shape []int64
		want  string
	}{
		{"one value per channel", nn.NewInstanceNorm2d(2, nn.InstanceNorm2dOptions{}), []int64{3, 2, 1, 1},
			"more than one value per channel"},
		{"too many dimensions", nn.NewInstanceNorm1d(2, nn.InstanceNorm1dOptions{}), []int64{3, 2, 4, 4},
			"it must have 3 dimensions"},
		{"too few dimensions", nn.NewInstanceNorm1d(2, nn.InstanceNorm1dOptions{}), []int64{2, 4},
			"it must have 3 dimensions"},
		{"running statistics", evaluated, []int64{3, 2, 1, 1}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			x, err := torch.Ones(cuda.CPU, torch.Float32, c.shape...)
			if err != nil {
				t.Fatal(err)
			}
			defer x.Close()
			y := c.m.Forward(x)
			defer y.Close()
			if err := y.Err(); c.want == "" && err != nil || c.want != "" &&
				(err == nil || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("got %v, want %q", err, c.want)
			}
		})
	}
}

func TestPartialLoadReportsTheDifferences(t *testing.T) {
	path := filepath.Join(t.TempDir(), "trunk.safetensors")
	old := nn.NewSequential(nn.NewLinear(3, 4, nn.LinearOptions{}), nn.NewLinear(4, 5, nn.LinearOptions{}),
		nn.NewLinear(5, 5, nn.LinearOptions{NoBias: true}))
	defer nn.Close(old)
	if err := nn.Save(path, old, map[string]string{"epoch": "3"}); err != nil {
		t.Fatal(err)
	}
	net := nn.NewSequential(nn.NewLinear(3, 4, nn.LinearOptions{}), nn.NewLinear(4, 2, nn.LinearOptions{}),
		nn.NewReLU(), nn.NewBatchNorm1d(2, nn.BatchNorm1dOptions{NoRunningStats: true}))
	defer nn.Close(net)
	values := func(i int) []float32 {
		t.Helper()
		v, err := nn.State(net)[i].Tensor.Float32s()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
	trunk, head := values(0), values(2)
	if _, err := nn.LoadWith(path, net, nn.LoadOptions{}); err == nil ||
		!strings.Contains(err.Error(), "tensor 1.weight is float32[5 4] in the file and float32[2 4] in the module") {
		t.Errorf("strict: %v", err)
	}
	if got := values(0); !slices.Equal(got, trunk) {
		t.Errorf("after a refused file the weight = %v, want %v as before", got, trunk)
	}
	r, err := nn.LoadWith(path, net, nn.LoadOptions{Partial: true})
	if err != nil {
		t.Fatal(err)
	}
	want := `2 tensors loaded: 2 of 6 parameters, 53.3 % of the numbers
is this the same network? The other numbers stay as they were before
tensor 3.weight is not in the file
tensor 3.bias is not in the file
tensor 1.weight is float32[5 4] in the file and float32[2 4] in the module
tensor 1.bias is float32[5] in the file and float32[2] in the module
tensor 2.weight is not in the module`
	if r.String() != want || r.Metadata["epoch"] != "3" || !slices.Equal(r.Loaded, []string{"0.weight", "0.bias"}) {
		t.Errorf("got\n%v\n%v, want epoch 3 and\n%s", r, r.Metadata, want)
	}
	loaded, err := nn.State(old)[0].Tensor.Float32s()
	if err != nil {
		t.Fatal(err)
	}
	if got := values(0); !slices.Equal(got, loaded) || slices.Equal(got, trunk) {
		t.Errorf("after Partial the common weight = %v, want the file's, %v", got, loaded)
	}
	if got := values(2); !slices.Equal(got, head) {
		t.Errorf("after Partial the head's weight = %v, want %v as before", got, head)
	}
	other := nn.NewSequential(nn.NewReLU(), nn.NewReLU(), nn.NewReLU(), nn.NewReLU(),
		nn.NewLinear(1, 1, nn.LinearOptions{}))
	defer nn.Close(other)
	if _, err := nn.LoadWith(path, other, nn.LoadOptions{Partial: true}); err == nil ||
		!strings.Contains(err.Error(), "tensor 4.weight is not in the file") {
		t.Errorf("a file without a common tensor: %v,"+
			" want an error with \"tensor 4.weight is not in the file\"", err)
	}
}

// A program may compute a mask once and use it in the scope of each batch: attention does not close
// the mask.
func TestAttentionLeavesTheMaskOpen(t *testing.T) {
	a := nn.NewMultiheadAttention(8, 2, nn.MultiheadAttentionOptions{BatchFirst: true})
	defer nn.Close(a)
	hidden := images(t, 3, 3).ZerosLike().AddScalar(1).Triu(1).ToDType(torch.Bool)
	defer hidden.Close()
	for range 3 {
		s := torch.NewScope("batch")
		x := images(t, 1, 3, 8).In(s)
		if err := a.Attend(x, x, x, nn.AttentionOptions{Mask: hidden}).Err(); err != nil {
			t.Fatal(err)
		}
		s.Close()
	}
}
