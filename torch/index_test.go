package torch_test

import (
	"encoding/json"
	"errors"
	"os"
	"reflect"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

// indexed is a case of make_indexed.py.
type indexed struct {
	Index    string
	Error    string
	Shape    []int64
	Values   []int64
	View     bool
	Assigned map[string][]int64
}

func TestIndexAsInPyTorch(t *testing.T) {
	text, err := os.ReadFile("testdata/indexed.json")
	if err != nil {
		t.Fatal(err)
	}
	var cases []indexed
	if err := json.Unmarshal(text, &cases); err != nil {
		t.Fatal(err)
	}
	i := func(shape []int64, v ...int64) *torch.Tensor { return ints(t, v, shape...) }
	v := func(v ...int64) *torch.Tensor { return ints(t, v) }
	truth := func(v []bool, shape ...int64) *torch.Tensor { return must2(torch.FromSlice(v, shape...))(t) }
	number := func(v float64, d torch.DType) *torch.Tensor { return must2(torch.Full(cuda.CPU, d, v))(t) }
	mask := truth([]bool{false, true, false, false, false, true}, 2, 3)
	rows := truth([]bool{true, false})
	yes, no := number(1, torch.Bool), number(0, torch.Bool)
	const all, dots, axis = torch.All, torch.Ellipsis, torch.NewAxis
	from, until, span := torch.From, torch.Until, torch.Range
	indices := map[string][]any{
		"0": {0}, "-1": {int32(-1)}, "1, 2": {uint8(1), int64(2)}, "1, -1, 3": {1, -1, 3},
		"1:2": {span(1, 2)}, "-1:": {from(-1)}, "5:": {from(5)}, "1:1": {span(1, 1)},
		"2:1": {span(2, 1)}, ":": {all}, ":, 1:": {all, from(1)}, ":, :-1": {all, until(-1)},
		":, -2:-1": {all, span(-2, -1)}, ":, 0:3:2": {all, span(0, 3).Step(2)},
		":, ::2": {all, from(0).Step(2)}, ":, 1::5": {all, from(1).Step(5)}, "0, 1:": {0, from(1)},
		"...": {dots}, "..., 0": {dots, 0}, "0, ..., 1": {0, dots, 1}, "..., 1:3": {dots, span(1, 3)},
		"None": {axis}, ":, None": {all, axis}, "..., None": {dots, axis}, "..., None, 0": {dots, axis, 0},
		"None, 0, None": {axis, 0, axis},
		"mask":          {mask}, "mask, 1:3": {mask, span(1, 3)}, "mask, 1": {mask, 1}, "mask, ...": {mask, dots},
		"mask, None": {mask, axis}, "None, mask": {axis, mask},
		"mask, i([0, 1])": {mask, v(0, 1)}, "rows": {rows}, "rows, 1:": {rows, from(1)},
		":, [True, False, True], ::2": {all, []bool{true, false, true}, from(0).Step(2)},
		"yes":                         {yes}, "no": {no}, "0, yes": {0, yes}, "i(1)": {number(1, torch.Int64)},
		"1, i(2)": {1, number(2, torch.Int16)}, "i([1, 0])": {v(1, 0)},
		"i([[0, 1], [1, 0]])": {i([]int64{2, 2}, 0, 1, 1, 0)},
		"[0, 1], [1, 2]":      {[]int{0, 1}, []int64{1, 2}}, "i([0, 1]), :, i([0, 3])": {v(0, 1), all, v(0, 3)},
		":, i([0, 2]), 1": {all, v(0, 2), 1}, "1, :, i([0, 3])": {1, all, v(0, 3)},
		"i([0]), 1, :": {v(0), 1, all}, "i([0, 1]), i([[0], [2]])": {v(0, 1), i([]int64{2, 1}, 0, 2)},
		":, none": {all, []int64{}}, "i([-1, 0])": {v(-1, 0)}, "..., i([0, 0, 3])": {dots, v(0, 0, 3)},
		"i([1]), 0:2, 3": {v(1), span(0, 2), 3}, ":, [0, 1], [1, 2]": {all, []int{0, 1}, []int{1, 2}},
		":, [0, 1], None, [1, 2]":  {all, []int{0, 1}, axis, []int{1, 2}},
		"i([1, 0], dtype=t.int32)": {v(1, 0).ToDType(torch.Int32)},
		"scalar ...":               {dots}, "scalar None": {axis}, "scalar yes": {yes},
		"5": {5}, "0, 0, 0, 0": {0, 0, 0, 0}, ":, 3": {all, 3}, "i([5])": {v(5)}, ":, mask": {all, mask},
		"mask, 0, 0": {mask, 0, 0}, "i([0.5])": {floats(t, []float32{0.5})},
		":, ::-1": {all, from(0).Step(-1)}, "scalar 0": {0}, "i([0, 1]), i([0, 1, 2])": {v(0, 1), v(0, 1, 2)},
	}
	row := i([]int64{1, 4}, 10, 20, 30, 40)
	values := map[string]any{"7": 7, "row": row, "1.5": 1.5}
	for _, c := range cases {
		t.Run(c.Index, func(t *testing.T) {
			at, ok := indices[c.Index]
			if !ok {
				t.Fatalf("the test has no indices for the case %q, want some for every case", c.Index)
			}
			start := func() *torch.Tensor {
				if strings.HasPrefix(c.Index, "scalar ") {
					return number(5, torch.Int64)
				}
				return must2(torch.Arange(24))(t).View(2, 3, 4)
			}
			x := start()
			before := torch.LiveTensors()
			got := x.Index(at...)
			if (got.Err() != nil) != (c.Error != "") {
				t.Fatalf("got %v, want the error %q", got, c.Error)
			}
			if c.Error != "" {
				return
			}
			if n := torch.LiveTensors(); n > before+1 { // the collector may have freed others
				t.Errorf("Index left %d tensors, want none", n-before-1)
			}
			elements, err := got.Int64s()
			if err != nil || !reflect.DeepEqual(got.Shape(), c.Shape) ||
				!reflect.DeepEqual(elements, c.Values) && len(elements)+len(c.Values) > 0 {
				t.Errorf("got %v %v (%v), want %v %v", got.Shape(), elements, err, c.Shape, c.Values)
			}
			if got.Elements() > 0 && got.Fill_(-9).Err() != nil {
				t.Error(got.Err())
			}
			if changed, err := x.EqScalar(-9).Any().Float64(); err != nil || got.Elements() > 0 &&
				(changed == 1) != c.View {
				t.Errorf("a view: %v (%v), want %v", changed == 1, err, c.View)
			}
			for name, value := range values {
				into := start()
				want, ok := c.Assigned[name]
				set := into.SetIndex_(value, at...)
				if (set.Err() == nil) != ok {
					t.Errorf("SetIndex_ of %s: %v", name, set.Err())
				} else if got, err := set.Int64s(); ok && (set != into || err != nil || !reflect.DeepEqual(got, want)) {
					t.Errorf("SetIndex_ of %s: got %v (%v), want %v", name, got, err, want)
				}
			}
		})
	}
}

func TestIndexInScopesAndBackward(t *testing.T) {
	s := torch.NewScope("index")
	defer s.Close()
	w := leaf(t, []float32{1, 2, 3, 4}, 2, 2)
	x := w.In(s)
	before := s.Len()
	if got := x.Index(1, torch.From(0).Step(1)); got.Scope() != s || s.Len() != before+1 {
		t.Errorf("%v: %d tensors in the scope, want %d", got, s.Len(), before+1)
	}
	wantValues(t, x.At(1), 3, 4)
	wantValues(t, x.At(-1, 0), 3)
	wantValues(t, x.At(), 1, 2, 3, 4)
	if err := x.Index(torch.All, []int{1, 1}).Sum().Add(x.At(0, 0)).Backward(); err != nil {
		t.Fatal(err)
	}
	wantValues(t, w.In(s).Grad(), 1, 2, 0, 2)
	if got := x.NoGrad().Index(x.GtScalar(2)); got.RequiresGrad() {
		t.Error("RequiresGrad() of Index under NoGrad = true, want false")
	} else {
		wantValues(t, got, 3, 4)
	}
	if err := x.SetIndex_(0, 0).Err(); err == nil {
		t.Error("SetIndex_ on a leaf that requires gradients: got no error, want one")
	}
	wantValues(t, x.NoGrad().SetIndex_(9.5, 0, torch.From(1)), 1, 9.5, 3, 4)
	wantValues(t, x.NoGrad().SetIndex_(floats(t, []float32{5, 6}),
		x.LtScalar(3).LogicalNot().Index(torch.All, 1), 0), 5, 9.5, 6, 4)
}

func TestIndexRefusesOtherTypes(t *testing.T) {
	x := floats(t, []float32{1, 2})
	closed := ints(t, []int64{0})
	closed.Close()
	bad := x.MatMul(floats(t, []float32{1, 2, 3}))
	small := ints(t, []int64{1}).ToDType(torch.Uint8)
	defer small.Close()
	for _, c := range []struct {
		name string
		x    *torch.Tensor
		want string
	}{
		{"string", x.Index("a"), "torch: Index(float32[2] cpu) at index_test.go:"},
		{"string", x.Index("a"), "index 0 is string: want an integer"},
		{"nil", x.Index(nil), "index 0 is nil"},
		{"nil tensor", x.Index((*torch.Tensor)(nil)), "the tensor is nil"},
		{"Position", x.Index(torch.Position(9)), "index 0 is torch.Position"},
		{"two ellipses", x.Index(torch.Ellipsis, torch.Ellipsis), "index 1 is a second Ellipsis"},
		{"uint8", x.Index(small), "index 0 is uint8: convert"},
		{"large", x.Index(uint64(1 << 63)), "index 0 is uint64"},
		{"step", x.Index(torch.Range(0, 1).Step(0)), "a step must be positive"},
		{"failed index", x.Index(bad), "torch: MatMul("},
		{"failed tensor", bad.Index(0), "torch: MatMul("},
		{"closed index", x.Index(closed), "closed"},
		{"closed tensor", closed.At(0), "closed"},
		{"value", x.SetIndex_("a", 0), "the value is string"},
		{"nil value", x.SetIndex_(nil, 0), "the value is nil"},
		{"failed value", x.SetIndex_(bad, 0), "torch: MatMul("},
		{"value of another shape", x.SetIndex_(floats(t, []float32{1, 2, 3}), torch.All), "Copy_"},
		{"too many", x.SetIndex_(1, 0, 0), "take 2 dimensions, and the tensor has 1"},
	} {
		if err := c.x.Err(); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v, want an error with %q", c.name, err, c.want)
		}
	}
	if err := closed.Index(0).Err(); !errors.Is(err, torch.ErrClosed) {
		t.Errorf("a closed tensor: %v, want torch.ErrClosed", err)
	}
}
