package torch_test

import (
	"errors"
	"math"
	"reflect"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/torch"
)

func TestSetDataMovesALeaf(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	w := leaf(t, []float32{1, 2})
	moved := w.NoGrad().Detach().To(gpu)
	defer moved.Close()
	if err := w.SetData(moved); err != nil {
		t.Fatal(err)
	}
	if w.Device() != gpu || !w.RequiresGrad() {
		t.Fatalf("got %v", w)
	}
	if err := w.Square().Sum().Backward(); err != nil {
		t.Fatal(err)
	}
	g := w.Grad()
	defer g.Close()
	wantValues(t, g, 2, 4)
}

func TestSetDataKeepsTheLeaf(t *testing.T) {
	w := leaf(t, []float32{1, 2})
	if err := w.SetData(floats(t, []float32{3, 4, 5})); err != nil {
		t.Fatal(err)
	}
	if err := w.Square().Sum().Backward(); err != nil {
		t.Fatal(err)
	}
	g := w.Grad()
	defer g.Close()
	wantValues(t, g, 6, 8, 10)
}

func TestOperatorsReturnLists(t *testing.T) {
	s := torch.NewScope("lists")
	defer s.Close()
	x := floats(t, []float32{1, 2, 3, 4, 5}).In(s)
	split, err := x.Split(2, 0)
	if err != nil || len(split) != 3 || split[0].Scope() != s {
		t.Fatalf("Split: %v, %v, want 3 in the scope %v, nil", split, err, s)
	}
	wantValues(t, split[1], 3, 4)
	wantValues(t, split[2], 5)
	chunks, err := x.Chunk(2, 0)
	if err != nil || len(chunks) != 2 {
		t.Fatalf("Chunk: %v, %v, want length 2, nil", chunks, err)
	}
	wantValues(t, chunks[0], 1, 2, 3)
	rows, err := x.Unbind(0)
	if err != nil || len(rows) != 5 {
		t.Fatalf("Unbind: %v, %v, want length 5, nil", rows, err)
	}
	rows[3].MulScalar_(10) // a view
	wantValues(t, x, 1, 2, 3, 40, 5)
	norms, err := torch.ForeachNorm([]*torch.Tensor{x, split[0]}, 1)
	if err != nil || len(norms) != 2 {
		t.Fatalf("ForeachNorm: %v, %v, want length 2, nil", norms, err)
	}
	wantValues(t, norms[0], 51)
	wantValues(t, norms[1], 3)
	more, err := torch.ForeachMulTensor(split[:2], norms[1])
	if err != nil || len(more) != 2 {
		t.Fatalf("ForeachMulTensor: %v, %v, want length 2, nil", more, err)
	}
	wantValues(t, more[0], 3, 6)
	if none, err := torch.ForeachNorm(nil, 2); err == nil && len(none) != 0 {
		t.Errorf("the norms of no tensors: %v", none)
	}
	var e *torch.Error
	if parts, err := x.Split(0, 7); !errors.As(err, &e) || e.Op != "Split" || parts != nil {
		t.Errorf("Split of dimension 7: %v, %v", parts, err)
	}
	if _, err := torch.Fail("before", cuda.ErrInvalidArgument).Unbind(0); !errors.Is(err, cuda.ErrInvalidArgument) {
		t.Errorf("Unbind of a failed tensor: got %v, want ErrInvalidArgument", err)
	}
}

// Each operator runs once with small operands, which proves that its arguments arrive at the right
// places of the schema.
func TestOperatorValues(t *testing.T) {
	x := floats(t, []float32{1, -2, 3, -4}, 2, 2)
	y := floats(t, []float32{2, 4, 0.5, 1}, 2, 2)
	n := ints(t, []int64{7, 2, 9, 4})
	m := ints(t, []int64{3, 0}, 2)
	img := floats(t, []float32{1, 2, 3, 4, 5, 6, 7, 8, 9}, 1, 1, 3, 3)
	logits := floats(t, []float32{1, 2, 3, 1, 1, 1}, 2, 3)
	classes := ints(t, []int64{2, 0})
	nan := floats(t, []float32{float32(math.NaN()), float32(math.Inf(1)), 0})
	lse := math.Log(math.Exp(1) + math.Exp(2) + math.Exp(3))
	zero := int64(0)
	none := 0.0
	fresh := func(data ...float32) *torch.Tensor { return floats(t, data) }
	first := func(a, _ *torch.Tensor) *torch.Tensor { return a }
	second := func(_, b *torch.Tensor) *torch.Tensor { return b }

	cases := []struct {
		name  string
		x     *torch.Tensor
		shape []int64
		want  []float64
	}{
		{"Add", x.Add(y), []int64{2, 2}, []float64{3, 2, 3.5, -3}},
		{"AddScalar", n.AddScalar(0.5), []int64{4}, []float64{7.5, 2.5, 9.5, 4.5}},
		{"AddInt", n.AddInt(1 << 40), []int64{4}, []float64{7 + 1<<40, 2 + 1<<40, 9 + 1<<40, 4 + 1<<40}},
		{"Sub", x.Sub(y), []int64{2, 2}, []float64{-1, -6, 2.5, -5}},
		{"SubScalar", x.SubScalar(1), []int64{2, 2}, []float64{0, -3, 2, -5}},
		{"Mul", x.Mul(y), []int64{2, 2}, []float64{2, -8, 1.5, -4}},
		{"Mul broadcast", x.Mul(fresh(10, 100)), []int64{2, 2}, []float64{10, -200, 30, -400}},
		{"MulScalar", x.MulScalar(0.5), []int64{2, 2}, []float64{0.5, -1, 1.5, -2}},
		{"MulInt", n.MulInt(3), []int64{4}, []float64{21, 6, 27, 12}},
		{"Div", x.Div(y), []int64{2, 2}, []float64{0.5, -0.5, 6, -4}},
		{"DivScalar", x.DivScalar(2), []int64{2, 2}, []float64{0.5, -1, 1.5, -2}},
		{"DivMode floor", x.DivMode(floats(t, []float32{2}), "floor"), []int64{2, 2}, []float64{0, -1, 1, -2}},
		{"DivMode trunc", x.SubScalar(0.5).DivMode(floats(t, []float32{2}), "trunc"), []int64{2, 2},
			[]float64{0, -1, 1, -2}},
		{"Neg", x.Neg(), []int64{2, 2}, []float64{-1, 2, -3, 4}},
		{"Abs", x.Abs(), []int64{2, 2}, []float64{1, 2, 3, 4}},
		{"Sign", x.Sign(), []int64{2, 2}, []float64{1, -1, 1, -1}},
		{"Square", x.Square(), []int64{2, 2}, []float64{1, 4, 9, 16}},
		{"Sqrt", y.Sqrt(), []int64{2, 2}, []float64{math.Sqrt2, 2, math.Sqrt(0.5), 1}},
		{"Rsqrt", y.Rsqrt(), []int64{2, 2}, []float64{math.Sqrt(0.5), 0.5, math.Sqrt2, 1}},
		{"Exp", x.Exp(), []int64{2, 2}, []float64{math.E, math.Exp(-2), math.Exp(3), math.Exp(-4)}},
		{"Log", y.Log(), []int64{2, 2}, []float64{math.Ln2, 2 * math.Ln2, -math.Ln2, 0}},
		{"Sin", y.Sin(), []int64{2, 2}, []float64{math.Sin(2), math.Sin(4), math.Sin(0.5), math.Sin(1)}},
		{"Cos", y.Cos(), []int64{2, 2}, []float64{math.Cos(2), math.Cos(4), math.Cos(0.5), math.Cos(1)}},
		{"PowScalar", x.PowScalar(3), []int64{2, 2}, []float64{1, -8, 27, -64}},
		{"Pow", y.Pow(fresh(2, 3)), []int64{2, 2}, []float64{4, 64, 0.25, 1}},
		{"Maximum", x.Maximum(y), []int64{2, 2}, []float64{2, 4, 3, 1}},
		{"Minimum", x.Minimum(y), []int64{2, 2}, []float64{1, -2, 0.5, -4}},
		{"Clamp", x.Clamp(-2.5, 2), []int64{2, 2}, []float64{1, -2, 2, -2.5}},
		{"ClampMin", x.ClampMin(0), []int64{2, 2}, []float64{1, 0, 3, 0}},
		{"ClampMax", x.ClampMax(0), []int64{2, 2}, []float64{0, -2, 0, -4}},

		{"Add_", fresh(1, 2).Add_(fresh(10, 20)), []int64{2}, []float64{11, 22}},
		{"AddScaled_", fresh(1, 2).AddScaled_(fresh(10, 20), 0.5), []int64{2}, []float64{6, 12}},
		{"AddScalar_", fresh(1, 2).AddScalar_(0.5), []int64{2}, []float64{1.5, 2.5}},
		{"AddInt_", ints(t, []int64{1, 2}).AddInt_(5), []int64{2}, []float64{6, 7}},
		{"Sub_", fresh(1, 2).Sub_(fresh(10, 20)), []int64{2}, []float64{-9, -18}},
		{"Mul_", fresh(1, 2).Mul_(fresh(10, 20)), []int64{2}, []float64{10, 40}},
		{"MulScalar_", fresh(1, 2).MulScalar_(3), []int64{2}, []float64{3, 6}},
		{"Div_", fresh(1, 2).Div_(fresh(10, 20)), []int64{2}, []float64{0.1, 0.1}},
		{"DivScalar_", fresh(1, 2).DivScalar_(4), []int64{2}, []float64{0.25, 0.5}},
		{"Addcmul_", fresh(1, 2).Addcmul_(fresh(2, 3), fresh(4, 5), 10), []int64{2}, []float64{81, 152}},
		{"Addcdiv_", fresh(1, 2).Addcdiv_(fresh(2, 3), fresh(4, 6), 10), []int64{2}, []float64{6, 7}},
		{"Sqrt_", fresh(4, 9).Sqrt_(), []int64{2}, []float64{2, 3}},
		{"ReLU_", fresh(-4, 9).ReLU_(), []int64{2}, []float64{0, 9}},
		{"Zero_", fresh(4, 9).Zero_(), []int64{2}, []float64{0, 0}},
		{"Fill_", fresh(4, 9).Fill_(2.5), []int64{2}, []float64{2.5, 2.5}},
		{"Copy_", fresh(4, 9).Copy_(ints(t, []int64{3})), []int64{2}, []float64{3, 3}},
		{"Uniform_", fresh(4, 9).Uniform_(2, 2), []int64{2}, []float64{2, 2}},
		{"Normal_", fresh(4, 9).Normal_(3, 0), []int64{2}, []float64{3, 3}},
		{"Bernoulli_", fresh(4, 9).Bernoulli_(1), []int64{2}, []float64{1, 1}},

		{"Eq", x.Eq(x.Abs()), []int64{2, 2}, []float64{1, 0, 1, 0}},
		{"EqScalar", x.EqScalar(3), []int64{2, 2}, []float64{0, 0, 1, 0}},
		{"Ne", x.Ne(x.Abs()), []int64{2, 2}, []float64{0, 1, 0, 1}},
		{"NeScalar", x.NeScalar(3), []int64{2, 2}, []float64{1, 1, 0, 1}},
		{"Lt", x.Lt(y), []int64{2, 2}, []float64{1, 1, 0, 1}},
		{"LtScalar", x.LtScalar(1), []int64{2, 2}, []float64{0, 1, 0, 1}},
		{"Le", x.Le(x), []int64{2, 2}, []float64{1, 1, 1, 1}},
		{"LeScalar", x.LeScalar(1), []int64{2, 2}, []float64{1, 1, 0, 1}},
		{"Gt", x.Gt(y), []int64{2, 2}, []float64{0, 0, 1, 0}},
		{"GtScalar", x.GtScalar(1), []int64{2, 2}, []float64{0, 0, 1, 0}},
		{"Ge", x.Ge(x), []int64{2, 2}, []float64{1, 1, 1, 1}},
		{"GeScalar", x.GeScalar(1), []int64{2, 2}, []float64{1, 0, 1, 0}},
		{"LogicalNot", x.GtScalar(0).LogicalNot(), []int64{2, 2}, []float64{0, 1, 0, 1}},
		{"IsNaN", nan.IsNaN(), []int64{3}, []float64{1, 0, 0}},
		{"IsFinite", nan.IsFinite(), []int64{3}, []float64{0, 0, 1}},
		{"Where", torch.Where(x.GtScalar(0), x, y), []int64{2, 2}, []float64{1, 4, 3, 1}},
		{"MaskedFill", x.MaskedFill(x.LtScalar(0), 9), []int64{2, 2}, []float64{1, 9, 3, 9}},

		{"MatMul", x.MatMul(fresh(1, 10)), []int64{2}, []float64{-19, -37}},
		{"MM", x.MM(y), []int64{2, 2}, []float64{1, 2, 4, 8}},
		{"BMM", x.Unsqueeze(0).BMM(y.Unsqueeze(0)), []int64{1, 2, 2}, []float64{1, 2, 4, 8}},
		{"Linear", x.Linear(y, fresh(10, 20)), []int64{2, 2},
			[]float64{10 + 2 - 8, 20 + 0.5 - 2, 10 + 6 - 16, 20 + 1.5 - 4}},
		{"Linear without bias", x.Linear(y, nil), []int64{2, 2}, []float64{-6, -1.5, -10, -2.5}},
		{"T", x.T(), []int64{2, 2}, []float64{1, 3, -2, -4}},

		{"Conv2d", img.Conv2d(floats(t, []float32{1, 0, 0, 1}, 1, 1, 2, 2), fresh(100),
			torch.Conv2dOptions{}), []int64{1, 1, 2, 2}, []float64{106, 108, 112, 114}},
		{"Conv2d stride padding", img.Conv2d(floats(t, []float32{1, 0, 0, 1}, 1, 1, 2, 2), nil,
			torch.Conv2dOptions{Stride: []int64{2}, Padding: []int64{1, 0}}),
			[]int64{1, 1, 2, 1}, []float64{2, 4 + 8}},
		{"Conv2d dilation", img.Conv2d(floats(t, []float32{1, 0, 0, 1}, 1, 1, 2, 2), nil,
			torch.Conv2dOptions{Dilation: []int64{2, 2}}), []int64{1, 1, 1, 1}, []float64{10}},
		{"Conv2d groups", torch.Cat([]*torch.Tensor{img, img},
			1).Conv2d(floats(t, []float32{1, 2}, 2, 1, 1, 1), nil,
			torch.Conv2dOptions{Groups: 2}).SumDim([]int64{2, 3}, false),
			[]int64{1, 2}, []float64{45, 90}},
		{"BatchNorm evaluation", x.BatchNorm(fresh(2, 3), fresh(0, 1), fresh(1, 2), fresh(4, 1), false, 0.1,
			0), []int64{2, 2}, []float64{0, -11, 2, -17}},
		{"BatchNorm training", x.BatchNorm(nil, nil, nil, nil, true, 0.1, 0), []int64{2, 2}, []float64{-1, 1, 1, -1}},
		{"LayerNorm", x.LayerNorm([]int64{2}, nil, fresh(0, 10), 0), []int64{2, 2}, []float64{1, 9, 1, 9}},
		{"ReLU", x.ReLU(), []int64{2, 2}, []float64{1, 0, 3, 0}},
		{"LeakyReLU", x.LeakyReLU(0.5), []int64{2, 2}, []float64{1, -1, 3, -2}},
		{"GELU", x.GELU(), []int64{2, 2}, []float64{0.841345, -0.0455003, 2.99595, -0.000126688}},
		{"SiLU", x.SiLU(), []int64{2, 2}, []float64{0.731059, -0.238406, 2.85772, -0.0719448}},
		{"Sigmoid", x.Sigmoid(), []int64{2, 2}, []float64{0.731059, 0.119203, 0.952574, 0.0179862}},
		{"Tanh", x.Tanh(), []int64{2, 2}, []float64{math.Tanh(1), math.Tanh(-2), math.Tanh(3), math.Tanh(-4)}},
		{"Softmax", logits.Softmax(1), []int64{2, 3},
			[]float64{math.Exp(1 - lse), math.Exp(2 - lse), math.Exp(3 - lse), 1. / 3, 1. / 3, 1. / 3}},
		{"LogSoftmax", logits.LogSoftmax(-1), []int64{2, 3},
			[]float64{1 - lse, 2 - lse, 3 - lse, -math.Log(3), -math.Log(3), -math.Log(3)}},
		{"MaxPool2d", img.MaxPool2d([]int64{2}, torch.MaxPool2dOptions{Stride: []int64{1}}),
			[]int64{1, 1, 2, 2}, []float64{5, 6, 8, 9}},
		{"MaxPool2d ceil", img.MaxPool2d([]int64{2, 2}, torch.MaxPool2dOptions{CeilMode: true}),
			[]int64{1, 1, 2, 2}, []float64{5, 6, 8, 9}},
		{"MaxPool2d padding", img.MaxPool2d([]int64{2}, torch.MaxPool2dOptions{Padding: []int64{1}}),
			[]int64{1, 1, 2, 2}, []float64{1, 3, 7, 9}},
		{"AvgPool2d", img.AvgPool2d([]int64{2}, torch.AvgPool2dOptions{Stride: []int64{1}}),
			[]int64{1, 1, 2, 2}, []float64{3, 4, 6, 7}},
		{"AdaptiveAvgPool2d", img.AdaptiveAvgPool2d(1, 3), []int64{1, 1, 1, 3}, []float64{4, 5, 6}},
		{"Dropout off", x.Dropout(0.5, false), []int64{2, 2}, []float64{1, -2, 3, -4}},
		{"Dropout all", x.Dropout(1, true), []int64{2, 2}, []float64{0, 0, 0, 0}},
		{"Embedding", torch.Embedding(x, ints(t, []int64{1, 0, 1})), []int64{3, 2}, []float64{3, -4, 1, -2, 3, -4}},

		{"CrossEntropy", logits.CrossEntropy(classes), []int64{}, []float64{(lse - 3 + math.Log(3)) / 2}},
		{"CrossEntropyWith", logits.CrossEntropyWith(classes, torch.CrossEntropyOptions{}), []int64{},
			[]float64{(lse - 3 + math.Log(3)) / 2}},
		{"CrossEntropyWith sum",
			logits.CrossEntropyWith(classes, torch.CrossEntropyOptions{Reduction: torch.ReduceSum}),
			[]int64{}, []float64{lse - 3 + math.Log(3)}},
		{"CrossEntropyWith none",
			logits.CrossEntropyWith(classes, torch.CrossEntropyOptions{Reduction: torch.ReduceNone}),
			[]int64{2}, []float64{lse - 3, math.Log(3)}},
		{"CrossEntropyWith weight",
			logits.CrossEntropyWith(classes, torch.CrossEntropyOptions{Weight: fresh(3, 0, 1)}), []int64{},
			[]float64{(lse - 3 + 3*math.Log(3)) / 4}},
		{"CrossEntropyWith ignore",
			logits.CrossEntropyWith(classes, torch.CrossEntropyOptions{IgnoreIndex: &zero}), []int64{},
			[]float64{lse - 3}},
		{"CrossEntropyWith smoothing",
			logits.CrossEntropyWith(classes,
				torch.CrossEntropyOptions{LabelSmoothing: 1, Reduction: torch.ReduceNone}), []int64{2},
			[]float64{lse - 2, math.Log(3)}},
		{"NLLLoss", logits.NLLLoss(classes), []int64{}, []float64{-2}},
		{"NLLLossWith", logits.NLLLossWith(classes, torch.NLLLossOptions{IgnoreIndex: &zero}), []int64{},
			[]float64{-3}},
		{"HardTanh", x.HardTanh(-1, 2), []int64{2, 2}, []float64{1, -1, 2, -1}},
		{"CELU", x.CELU(2), []int64{2, 2}, []float64{1, 2 * (math.Exp(-1) - 1), 3, 2 * (math.Exp(-2) - 1)}},
		{"PReLU", x.PReLU(fresh(0.25)), []int64{2, 2}, []float64{1, -0.5, 3, -1}},
		{"GLU", x.GLU(1), []int64{2, 1}, []float64{1 / (1 + math.Exp(2)), 3 / (1 + math.Exp(4))}},
		{"LogSigmoid", x.LogSigmoid(), []int64{2, 2},
			[]float64{-math.Log1p(math.Exp(-1)), -math.Log1p(math.Exp(2)), -math.Log1p(math.Exp(-3)),
				-math.Log1p(math.Exp(4))}},
		{"Tril", x.Tril(0), []int64{2, 2}, []float64{1, 0, 3, -4}},
		{"Tril below", x.Tril(-1), []int64{2, 2}, []float64{0, 0, 3, 0}},
		{"Triu", x.Triu(0), []int64{2, 2}, []float64{1, -2, 0, -4}},
		{"BCELossWith", fresh(0.5).BCELossWith(fresh(1), torch.BCELossOptions{Weight: fresh(2)}), []int64{},
			[]float64{2 * math.Ln2}},
		{"KLDivLossWith", fresh(0, -1).KLDivLossWith(fresh(1, 0),
			torch.KLDivLossOptions{Reduction: torch.ReduceNone}), []int64{2}, []float64{0, 0}},
		{"HuberLossWith", x.HuberLossWith(y, torch.HuberLossOptions{Delta: 2, Reduction: torch.ReduceNone}),
			[]int64{2, 2}, []float64{0.5, 10, 3, 8}},
		{"AvgPool2d without padding",
			img.AvgPool2d([]int64{3},
				torch.AvgPool2dOptions{Padding: []int64{1}, CountIncludePad: new(bool)}),
			[]int64{1, 1, 1, 1}, []float64{3}},
		{"MSELoss", x.MSELoss(y), []int64{}, []float64{(1 + 36 + 6.25 + 25) / 4}},
		{"MSELossWith", x.MSELossWith(y, torch.MSELossOptions{Reduction: torch.ReduceSum}), []int64{},
			[]float64{1 + 36 + 6.25 + 25}},

		{"Reshape", x.Reshape(4, -1), []int64{4, 1}, []float64{1, -2, 3, -4}},
		{"Reshape to a scalar", x.Sum().Reshape(), []int64{}, []float64{-2}},
		{"View", x.View(4), []int64{4}, []float64{1, -2, 3, -4}},
		{"Flatten", img.Flatten(1, -1), []int64{1, 9}, []float64{1, 2, 3, 4, 5, 6, 7, 8, 9}},
		{"Permute", x.Unsqueeze(0).Permute(2, 0, 1), []int64{2, 1, 2}, []float64{1, 3, -2, -4}},
		{"Transpose", x.Transpose(0, 1), []int64{2, 2}, []float64{1, 3, -2, -4}},
		{"Squeeze", img.Squeeze(), []int64{3, 3}, []float64{1, 2, 3, 4, 5, 6, 7, 8, 9}},
		{"SqueezeDim", img.SqueezeDim(1), []int64{1, 3, 3}, []float64{1, 2, 3, 4, 5, 6, 7, 8, 9}},
		{"Unsqueeze", x.Unsqueeze(1), []int64{2, 1, 2}, []float64{1, -2, 3, -4}},
		{"Expand", fresh(1, 2).Expand(2, 2), []int64{2, 2}, []float64{1, 2, 1, 2}},
		{"Narrow", img.Squeeze().Narrow(1, 1, 2), []int64{3, 2}, []float64{2, 3, 5, 6, 8, 9}},
		{"Select", x.Select(1, -1), []int64{2}, []float64{-2, -4}},
		{"IndexSelect", n.IndexSelect(0, m), []int64{2}, []float64{4, 7}},
		{"Gather", x.Gather(1, ints(t, []int64{1, 0}, 2, 1)), []int64{2, 1}, []float64{-2, 3}},
		{"Cat", torch.Cat([]*torch.Tensor{x, y}, 1), []int64{2, 4}, []float64{1, -2, 2, 4, 3, -4, 0.5, 1}},
		{"Stack", torch.Stack([]*torch.Tensor{fresh(1, 2), fresh(3, 4)}, 1), []int64{2, 2}, []float64{1, 3, 2, 4}},
		{"Contiguous", x.T().Contiguous(torch.Contiguous), []int64{2, 2}, []float64{1, 3, -2, -4}},
		{"Clone", x.Clone(), []int64{2, 2}, []float64{1, -2, 3, -4}},
		{"Detach", x.Detach(), []int64{2, 2}, []float64{1, -2, 3, -4}},

		{"Sum", x.Sum(), []int64{}, []float64{-2}},
		{"SumDim", x.SumDim([]int64{0}, true), []int64{1, 2}, []float64{4, -6}},
		{"Mean", x.Mean(), []int64{}, []float64{-0.5}},
		{"MeanDim", x.MeanDim([]int64{0, 1}, false), []int64{}, []float64{-0.5}},
		{"Var", x.Var(torch.VarOptions{}), []int64{}, []float64{29.0 / 3}},
		{"Var of dimensions", x.Var(torch.VarOptions{Dim: []int64{1}, Correction: &none, KeepDim: true}),
			[]int64{2, 1}, []float64{2.25, 12.25}},
		{"Std", x.Std(torch.StdOptions{Dim: []int64{1}, Correction: &none}), []int64{2}, []float64{1.5, 3.5}},
		{"Max", x.Max(), []int64{}, []float64{3}},
		{"MaxDim values", first(x.MaxDim(1, true)), []int64{2, 1}, []float64{1, 3}},
		{"MaxDim indices", second(x.MaxDim(0, false)), []int64{2}, []float64{1, 0}},
		{"Min", x.Min(), []int64{}, []float64{-4}},
		{"MinDim values", first(x.MinDim(1, false)), []int64{2}, []float64{-2, -4}},
		{"MinDim indices", second(x.MinDim(0, false)), []int64{2}, []float64{0, 1}},
		{"ArgMax", logits.ArgMax(1, false), []int64{2}, []float64{2, 0}},
		{"ArgMin", logits.ArgMin(1, true), []int64{2, 1}, []float64{0, 0}},
		{"TopK values", first(logits.TopK(2, 1)), []int64{2, 2}, []float64{3, 2, 1, 1}},
		{"TopK indices", second(logits.Select(0, 0).TopK(2, 0)), []int64{2}, []float64{2, 1}},
		{"All", x.GtScalar(0).All(), []int64{}, []float64{0}},
		{"Any", x.GtScalar(0).Any(), []int64{}, []float64{1}},
		{"CumSum", x.CumSum(0), []int64{2, 2}, []float64{1, -2, 4, -6}},
		{"Norm", x.Norm(), []int64{}, []float64{math.Sqrt(30)}},
		{"ToDType", x.ToDType(torch.Int32), []int64{2, 2}, []float64{1, -2, 3, -4}},
		{"To", x.To(cuda.CPU), []int64{2, 2}, []float64{1, -2, 3, -4}},
		{"ToWith", x.ToWith(cuda.CPU, torch.ToOptions{NonBlocking: true}), []int64{2, 2}, []float64{1, -2, 3, -4}},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			if err := c.x.Err(); err != nil {
				t.Fatal(err)
			}
			if got := c.x.Shape(); !reflect.DeepEqual(got, c.shape) {
				t.Errorf("shape %v, want %v", got, c.shape)
			}
			wantValues(t, c.x, c.want...)
		})
	}
	for name, c := range map[string]struct {
		x    *torch.Tensor
		want torch.DType
	}{
		"AddInt of integers":    {n.AddInt(1), torch.Int64},
		"AddScalar of integers": {n.AddScalar(1), torch.Float32},
		"MulScalar of integers": {n.MulScalar(2), torch.Float32},
		"MulInt of floats":      {x.MulInt(2), torch.Float32}, "comparison": {x.Gt(y), torch.Bool},
		"division of integers": {n.Div(n), torch.Float32}, "ArgMax": {x.ArgMax(0, false), torch.Int64},
		"ToDType": {x.ToDType(torch.BFloat16), torch.BFloat16},
	} {
		t.Run(name, func(t *testing.T) {
			if got := c.x.DType(); got != c.want {
				t.Errorf("got %v, want %v", got, c.want)
			}
		})
	}
}

func TestOperatorsThatReport(t *testing.T) {
	x, y := floats(t, []float32{1, 2}), floats(t, []float32{1, 2.001})
	nan := floats(t, []float32{float32(math.NaN())})
	for name, c := range map[string]struct {
		got  func() (bool, error)
		want bool
	}{
		"equal":     {func() (bool, error) { return x.Equal(x) }, true},
		"different": {func() (bool, error) { return x.Equal(y) }, false},
		"close":     {func() (bool, error) { return x.AllClose(y, torch.AllCloseOptions{Rtol: 0.01}) }, true},
		"not close": {func() (bool, error) { return x.AllClose(y, torch.AllCloseOptions{}) }, false},
		"equal NaN": {func() (bool,
			error) {
			return nan.AllClose(nan, torch.AllCloseOptions{EqualNan: true})
		}, true},
		"different NaN": {func() (bool, error) { return nan.AllClose(nan, torch.AllCloseOptions{}) }, false},
	} {
		if got, err := c.got(); err != nil || got != c.want {
			t.Errorf("%s: got %v, %v, want %v", name, got, err, c.want)
		}
	}
	if _, err := x.Equal(x.MatMul(nan)); err == nil || !strings.Contains(err.Error(), "MatMul") {
		t.Errorf("a failed operand: %v, want an error with \"MatMul\"", err)
	}
}

func TestForeachChangesAllTensors(t *testing.T) {
	a, b := floats(t, []float32{1, 2}), floats(t, []float32{3})
	c, d := floats(t, []float32{10, 20}), floats(t, []float32{30})
	if err := torch.ForeachAdd_([]*torch.Tensor{a, b}, []*torch.Tensor{c, d}, 0.5); err != nil {
		t.Fatal(err)
	}
	wantValues(t, a, 6, 12)
	wantValues(t, b, 18)
	if err := torch.ForeachMul_([]*torch.Tensor{a, b}, 2); err != nil {
		t.Fatal(err)
	}
	wantValues(t, a, 12, 24)
	wantValues(t, b, 36)
	if err := torch.ForeachZero_([]*torch.Tensor{a, b}); err != nil {
		t.Fatal(err)
	}
	wantValues(t, b, 0)
	if torch.ForeachAdd_([]*torch.Tensor{a, b}, []*torch.Tensor{c}, 1) == nil {
		t.Error("ForeachAdd_ of lists of 2 and 1 tensors: got no error, want one")
	}
	if torch.ForeachAdd_([]*torch.Tensor{a, nil}, []*torch.Tensor{c, d}, 1) == nil {
		t.Error("ForeachAdd_ with a nil tensor: got no error, want one")
	}
}

func TestContiguousConvertsTheFormat(t *testing.T) {
	x := floats(t, make([]float32, 24), 1, 2, 3, 4).Contiguous(torch.ChannelsLast)
	if !x.IsContiguous(torch.ChannelsLast) || !reflect.DeepEqual(x.Strides(), []int64{24, 1, 8, 2}) {
		t.Errorf("strides %v, %v", x.Strides(), x.Err())
	}
}
