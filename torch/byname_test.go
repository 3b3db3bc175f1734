package torch_test

import (
	"errors"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

func call(t *testing.T, name string, args ...any) []*torch.Tensor {
	t.Helper()
	out, err := torch.Call(name, args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestCallRunsAnyOperator(t *testing.T) {
	s := torch.NewScope("call")
	defer s.Close()
	x := floats(t, []float32{1, 2, 3, 4}, 2, 2).In(s)
	image := floats(t, []float32{1, 2, 3, 4}, 1, 1, 2, 2).In(s)
	index := ints(t, []int64{1}).In(s)
	cases := []struct {
		name string
		got  []*torch.Tensor
		want [][]float64
	}{
		{"without an overload", call(t, "erf", x), [][]float64{{math.Erf(1), math.Erf(2), math.Erf(3), math.Erf(4)}}},
		{"with a namespace", call(t, "aten::neg", x), [][]float64{{-1, -2, -3, -4}}},
		{"default overload", call(t, "aten::neg.default", x), [][]float64{{-1, -2, -3, -4}}},
		{"overload", call(t, "add.Tensor", x, x), [][]float64{{2, 4, 6, 8}}},
		{"keyword", call(t, "add.Tensor", x, x, torch.Keywords{"alpha": 3}), [][]float64{{4, 8, 12, 16}}},
		{"scalar as float", call(t, "add.Scalar", x, 0.5), [][]float64{{1.5, 2.5, 3.5, 4.5}}},
		{"scalar as int", call(t, "add.Scalar", index, 2), [][]float64{{3}}},
		{"int for a float", call(t, "leaky_relu", call(t, "neg", x)[0], 2), [][]float64{{-2, -4, -6, -8}}},
		{"int list", call(t, "sum.dim_IntList", x, []int{0}), [][]float64{{4, 6}}},
		{"absent int list", call(t, "sum.dim_IntList", x, nil), [][]float64{{10}}},
		{"number for a list", call(t, "avg_pool2d", image, 2), [][]float64{{2.5}}},
		{"float list", call(t, "upsample_nearest2d.vec", image, nil, []float64{1, 2}),
			[][]float64{{1, 1, 2, 2, 3, 3, 4, 4}}},
		{"string", call(t, "div.Tensor_mode", x, floats(t, []float32{2}),
			torch.Keywords{"rounding_mode": "floor"}), [][]float64{{0, 1, 1, 2}}},
		{"dtype", call(t, "sum", x, torch.Keywords{"dtype": torch.Float64}), [][]float64{{10}}},
		{"device", call(t, "arange", 3, torch.Keywords{"device": cuda.CPU, "dtype": torch.Int64}),
			[][]float64{{0, 1, 2}}},
		{"two results", call(t, "max.dim", x, 1), [][]float64{{2, 4}, {1, 1}}},
		{"list of results", call(t, "unbind.int", x), [][]float64{{1, 2}, {3, 4}}},
		{"list of operands", call(t, "cat", []*torch.Tensor{x, x}, 1), [][]float64{{1, 2, 1, 2, 3, 4, 3, 4}}},
		{"list with gaps", call(t, "index.Tensor", x, []*torch.Tensor{nil, index}), [][]float64{{2, 4}}},
		{"absent tensor", call(t, "linear", x, x, nil), [][]float64{{5, 11, 11, 25}}},
		{"many operands", call(t, "cat", slices.Repeat([]*torch.Tensor{index}, 23)),
			[][]float64{slices.Repeat([]float64{1}, 23)}},
		{"many ints", call(t, "view", x, []int{1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 4}), [][]float64{{1, 2, 3, 4}}},
		{"lists that have no room together",
			call(t, "as_strided", x, []int64{1, 1, 1, 1, 4}, []int64{4, 4, 4, 4, 1}), [][]float64{{1, 2, 3, 4}}},
		{"nine arguments", call(t, "convolution", image, floats(t, []float32{2}, 1, 1, 1, 1), nil,
			[]int64{1, 1}, []int64{0, 0}, []int64{1, 1}, false, []int64{0, 0}, 1),
			[][]float64{{2, 4, 6, 8}}},
		{"an operand after many", call(t, "index_put", call(t, "view", x, []int64{1, 1, 1, 1, 1, 1, 1, 1, 4})[0],
			append(slices.Repeat([]*torch.Tensor{ints(t, []int64{0})}, 8), index), floats(t, []float32{7})),
			[][]float64{{1, 7, 3, 4}}},
		{"integers of several types", call(t, "transpose.int", x, int32(0), int64(1)), [][]float64{{1, 3, 2, 4}}},
		{"in place", call(t, "add_.Tensor", call(t, "clone", x)[0], x), [][]float64{{2, 4, 6, 8}}},
		{"bools", call(t, "native_layer_norm_backward", x, x, []int{2}, floats(t, []float32{0, 0}, 2, 1),
			floats(t, []float32{1, 1}, 2, 1), nil, nil,
			[]bool{false, false, false}), [][]float64{nil, nil, nil}},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			if len(c.got) != len(c.want) {
				t.Fatalf("got %d results, want %d", len(c.got), len(c.want))
			}
			for i, r := range c.got {
				if r == nil || c.want[i] == nil {
					if r != nil || c.want[i] != nil {
						t.Errorf("result %d: got %v, want %v", i, r, c.want[i])
					}
					continue
				}
				wantValues(t, r, c.want[i]...)
				if c.name != "device" && r.Scope() != s {
					t.Errorf("result %d is not in the operands' scope", i)
				}
			}
		})
	}
}

func TestCallTakesPartInBackwardAndNoGrad(t *testing.T) {
	s := torch.NewScope("call")
	defer s.Close()
	w := leaf(t, []float32{1, 2})
	y := torch.Call1("square", w.In(s))
	if err := y.Sum().Backward(); err != nil {
		t.Fatal(err)
	}
	wantValues(t, w.In(s).Grad(), 2, 4)
	if torch.Call1("square", w.In(s).NoGrad()).RequiresGrad() {
		t.Error("RequiresGrad() of a call under NoGrad = true, want false")
	}
	x := floats(t, []float32{1, 2})
	out := call(t, "add_.Tensor", x, x)
	if len(out) != 1 || out[0] != x {
		t.Errorf("an operator in place returned %v, want its operand", out)
	}
	wantValues(t, x, 2, 4)
	dst := floats(t, []float32{0, 0})
	if out := call(t, "exp.out", floats(t, []float32{0, 0}), torch.Keywords{"out": dst}); out[0] != dst {
		t.Errorf("the result = %v, want the argument out, %v", out[0], dst)
	}
	wantValues(t, dst, 1, 1)
	noise := floats(t, []float32{1, 1}) // an argument that is written to and not returned
	if out := call(t, "rrelu_with_noise.out", floats(t, []float32{-1, 2}), noise,
		torch.Keywords{"out": dst}); out[0] != dst {
		t.Errorf("the result = %v, want the argument out, %v, not noise", out[0], dst)
	}
	before := settled(t)
	call(t, "add_.Tensor", x, x)
	if n := torch.LiveTensors(); n != before {
		t.Errorf("an operator in place left %d references, want 0", n-before)
	}
}

func TestCallRefusesArgumentsOutsideTheSchema(t *testing.T) {
	x := floats(t, []float32{1, 2, 3, 4}, 2, 2)
	bad := x.MatMul(floats(t, []float32{1, 2, 3}))
	cases := []struct {
		name string
		op   string
		args []any
		text []string
	}{
		{"unknown operator", "no_such", []any{x},
			[]string{"torch: no_such(float32[2 2] cpu) at byname_test.go:", " has no operator aten::no_such"}},
		{"no default overload", "add", []any{x, x}, []string{"overloads of aten::add", `"Tensor"`}},
		{"zero byte", "add\x00", nil, []string{"zero byte"}},
		{"type", "add.Tensor", []any{x, "y"},
			[]string{"aten::add.Tensor(", "argument other is Tensor, and got string"}},
		{"float for an int", "sum.dim_IntList", []any{x, []float64{1}},
			[]string{"argument dim is int[1]?, and got []float64"}},
		{"bool for an int", "transpose.int", []any{x, true, 1}, []string{"argument dim0 is int, and got bool"}},
		{"number for an unsized list", "permute", []any{x, 1}, []string{"argument dims is int[], and got int"}},
		{"dtype for an int", "transpose.int", []any{x, torch.Float32, 1},
			[]string{"argument dim0 is int, and got tensor.DType"}},
		{"nil tensor", "add.Tensor", []any{x, nil}, []string{"argument other is Tensor, and got nil"}},
		{"typed nil tensor", "add.Tensor", []any{x, (*torch.Tensor)(nil)},
			[]string{"argument other is Tensor, and got a nil *Tensor"}},
		{"nil in a list", "cat", []any{[]*torch.Tensor{x, nil}},
			[]string{"argument tensors is Tensor[], and got a []*Tensor with a nil element"}},
		{"missing", "add.Tensor", []any{x},
			[]string{"argument other, a Tensor, is missing", "aten::add.Tensor(Tensor self"}},
		{"too many", "neg", []any{x, 1, 2}, []string{"3 arguments, and it takes at most 1"}},
		{"unknown keyword", "neg", []any{x, torch.Keywords{"beta": 1}}, []string{"it has no argument beta"}},
		{"twice", "add.Tensor", []any{x, x, torch.Keywords{"other": x}},
			[]string{"argument other is given by position and by name"}},
		{"keywords first", "add.Tensor", []any{torch.Keywords{}, x},
			[]string{"argument self is Tensor, and got Keywords, which must be the last argument"}},
		{"generator", "bernoulli", []any{x, torch.Keywords{"generator": 1}},
			[]string{"argument generator is Generator?, and got int"}},
		{"not a tensor's result", "item", []any{x}, []string{"it returns Scalar, and Call returns only tensors"}},
		{"LibTorch's own check", "mm", []any{x, floats(t, []float32{1}, 1, 1)},
			[]string{"aten::mm(float32[2 2] cpu, float32[1 1] cpu)", "cannot be multiplied"}},
		{"failed operand", "neg", []any{bad}, []string{"torch: MatMul("}},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			out, err := torch.Call(c.op, c.args...)
			if err == nil {
				t.Fatalf("Call(%q) = %v and no error, want an error with %q", c.op, out, c.text)
			}
			for _, text := range c.text {
				if !strings.Contains(err.Error(), text) {
					t.Errorf("got %v, want an error with %q", err, text)
				}
			}
			for _, r := range out {
				if !errors.Is(r.Err(), err) {
					t.Errorf("a result carries %v, want %v", r.Err(), err)
				}
			}
			if one := torch.Call1(c.op, c.args...); one.Err() == nil {
				t.Errorf("Call1(%q) = %v, want a failed tensor", c.op, one)
			}
		})
	}
	if err := torch.Call1("max.dim", x, 1).Err(); !errors.Is(err, cuda.ErrInvalidArgument) ||
		!strings.Contains(err.Error(), "not one tensor") {
		t.Errorf("Call1 of an operator with two results: %v,"+
			" want cuda.ErrInvalidArgument with \"not one tensor\"", err)
	}
	if out, err := torch.Call("max.dim", x, 7); err == nil || len(out) != 2 || out[1].Err() == nil {
		t.Errorf("got %v, %v, want two failed tensors", out, err)
	}
}

func TestSchemaReturnsLibTorchsText(t *testing.T) {
	got, err := torch.Schema("relu")
	if err != nil || got != "aten::relu(Tensor self) -> Tensor" {
		t.Errorf("got %q, %v, want \"aten::relu(Tensor self) -> Tensor\", nil", got, err)
	}
	if _, err := torch.Schema("no_such"); err == nil {
		t.Error("Schema of an unknown operator: got no error, want one")
	}
}

func TestCallReturnsTheShapesOfRecurrentLayers(t *testing.T) {
	s := torch.NewScope("call")
	defer s.Close()
	zeros := func(shape ...int64) *torch.Tensor {
		x, err := torch.Zeros(cuda.CPU, torch.Float32, shape...)
		return must(t, x, err).In(s)
	}
	out := call(t, "lstm.input", zeros(5, 2, 3), []*torch.Tensor{zeros(1, 2, 4), zeros(1, 2, 4)},
		[]*torch.Tensor{zeros(16, 3), zeros(16, 4), zeros(16), zeros(16)}, true, 1, 0.0, false, false, false)
	var shapes [][]int64
	for _, r := range out {
		shapes = append(shapes, r.Shape())
	}
	if want := [][]int64{{5, 2, 4}, {1, 2, 4}, {1, 2, 4}}; !reflect.DeepEqual(shapes, want) {
		t.Errorf("got %v, want %v", shapes, want)
	}
}

// A name differs from its own prefix, which has the same address. It equals its copy, which has
// another address.
func TestCallTellsNamesApart(t *testing.T) {
	s := torch.NewScope("call")
	defer s.Close()
	x := floats(t, []float32{-2}, 1).In(s)
	const both = "neg_"
	for range 2 {
		for _, name := range []string{both[:3], strings.Clone(both[:3])} {
			if y := torch.Call1(name, x); y == x || read(t, y)[0] != 2 {
				t.Fatalf("%s changed its operand, or computed %v", name, y)
			}
		}
		y := x.ToDType(torch.Float64)
		if z := torch.Call1(both, y); z != y || z.Err() != nil {
			t.Fatalf("%s returned %v: %v, want its operand", both, z, z.Err())
		}
	}
}
