package torch_test

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"reflect"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/torch"
)

// functions are the operators that are no methods.
var functions = map[string]any{
	"PowOf": torch.PowOf, "IsIn": torch.IsIn, "Where": torch.Where, "WhereScalar": torch.WhereScalar,
	"WhereScalars": torch.WhereScalars, "Complex": torch.Complex, "Polar": torch.Polar,
	"Einsum": torch.Einsum, "Bilinear": torch.Bilinear, "MultiDot": torch.MultiDot,
	"EmbeddingBag": torch.EmbeddingBag, "BroadcastTensors": torch.BroadcastTensors, "HStack": torch.HStack,
	"VStack": torch.VStack, "DStack": torch.DStack, "ColumnStack": torch.ColumnStack,
	"BlockDiag": torch.BlockDiag, "MeshGrid": torch.MeshGrid, "CartesianProd": torch.CartesianProd,
	"PadSequence": torch.PadSequence, "Binomial": torch.Binomial, "NormalOf": torch.NormalOf,
}

// stored is a tensor of make_operators.py.
type stored struct {
	DType  string
	Shape  []int64
	Values []any
}

type operatorCase struct {
	Method  string
	Self    string
	Args    []any
	Options map[string]any
	Results []json.RawMessage
}

// operatorTest makes Go values of the arguments of a case.
type operatorTest struct {
	*testing.T
	tensors map[string]stored
	scope   *torch.Scope
}

func (t *operatorTest) tensor(name string) *torch.Tensor {
	t.Helper()
	s, ok := t.tensors[strings.TrimPrefix(name, "@")]
	if !ok {
		t.Fatalf("no tensor %s", name)
	}
	return build(t.T, dtypeNamed(t.T, s.DType), s.Shape, s.Values).In(t.scope).Clone()
}

// value converts an argument to a Go type.
func (t *operatorTest) value(v any, as reflect.Type) reflect.Value {
	t.Helper()
	out := reflect.New(as).Elem()
	if v == nil {
		return out
	}
	switch as {
	case reflect.TypeFor[*torch.Tensor]():
		return reflect.ValueOf(t.tensor(v.(string)))
	case reflect.TypeFor[torch.DType]():
		return reflect.ValueOf(dtypeNamed(t.T, v.(string)))
	case reflect.TypeFor[torch.Reduction]():
		return reflect.ValueOf([]torch.Reduction{torch.ReduceNone, torch.ReduceMean, torch.ReduceSum}[int(v.(float64))])
	}
	switch as.Kind() {
	case reflect.Pointer:
		out.Set(reflect.New(as.Elem()))
		out.Elem().Set(t.value(v, as.Elem()))
	case reflect.Slice:
		list := v.([]any)
		out.Set(reflect.MakeSlice(as, len(list), len(list)))
		for i, e := range list {
			out.Index(i).Set(t.value(e, as.Elem()))
		}
	case reflect.Int64, reflect.Float64, reflect.String, reflect.Bool:
		out.Set(reflect.ValueOf(v).Convert(as))
	default:
		t.Fatalf("an argument of type %v", as)
	}
	return out
}

func (t *operatorTest) options(given map[string]any, as reflect.Type) reflect.Value {
	t.Helper()
	out := reflect.New(as).Elem()
	for name, v := range given {
		field := out.FieldByNameFunc(func(f string) bool {
			return strings.EqualFold(f, strings.ReplaceAll(name, "_", ""))
		})
		if !field.IsValid() {
			t.Fatalf("%v has no field for %s", as, name)
		}
		field.Set(t.value(v, field.Type()))
	}
	return out
}

// call calls the operator and returns its results.
func (t *operatorTest) call(c operatorCase) []reflect.Value {
	t.Helper()
	var fn reflect.Value
	if c.Self != "" {
		if fn = reflect.ValueOf(t.tensor(c.Self)).MethodByName(c.Method); !fn.IsValid() {
			t.Fatalf("Tensor has no method %s, want the operator's", c.Method)
		}
	} else if fn = reflect.ValueOf(functions[c.Method]); !fn.IsValid() {
		t.Fatalf("the test's table has no function %s, want the operator's", c.Method)
	}
	var in []reflect.Value
	for i := range fn.Type().NumIn() {
		as := fn.Type().In(i)
		if i < len(c.Args) {
			in = append(in, t.value(c.Args[i], as))
		} else {
			in = append(in, t.options(c.Options, as))
		}
	}
	if err := torch.ManualSeed(3); err != nil {
		t.Fatal(err)
	}
	if fn.Type().IsVariadic() {
		return fn.CallSlice(in)
	}
	return fn.Call(in)
}

// results returns the tensors and plain values among the results of an operator.
func (t *operatorTest) results(values []reflect.Value) []any {
	t.Helper()
	var out []any
	for _, v := range values {
		switch v := v.Interface().(type) {
		case []*torch.Tensor:
			for _, x := range v {
				out = append(out, x)
			}
		case error:
			t.Fatal(v)
		case nil:
		default:
			out = append(out, v)
		}
	}
	return out
}

// TestOperatorsEqualPyTorch compares every operator that TestOperatorValues does not call with
// PyTorch's results.
func TestOperatorsEqualPyTorch(t *testing.T) {
	text, err := os.ReadFile("testdata/operators.json")
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Tensors map[string]stored
		Cases   []operatorCase
	}
	if err := json.Unmarshal(text, &file); err != nil {
		t.Fatal(err)
	}
	for i, c := range file.Cases {
		t.Run(fmt.Sprint(c.Method, " ", i), func(t *testing.T) {
			scope := torch.NewScope(c.Method)
			defer scope.Close()
			o := &operatorTest{t, file.Tensors, scope}
			got := o.results(o.call(c))
			if len(got) != len(c.Results) {
				t.Fatalf("%d results, want %d", len(got), len(c.Results))
			}
			for i, r := range got {
				x, ok := r.(*torch.Tensor)
				if !ok {
					if text, err := json.Marshal(r); err != nil || string(text) != string(c.Results[i]) {
						t.Errorf("result %d: got %s (%v), want %s", i, text, err, c.Results[i])
					}
					continue
				}
				var want stored
				if err := json.Unmarshal(c.Results[i], &want); err != nil {
					t.Fatal(err)
				}
				compare(t, i, x, want)
			}
		})
	}
}

func compare(t *testing.T, i int, x *torch.Tensor, want stored) {
	t.Helper()
	if err := x.Err(); err != nil {
		t.Fatal(err)
	}
	if x.DType().String() != want.DType || !reflect.DeepEqual(x.Shape(), want.Shape) {
		t.Errorf("result %d: %v%v, want %s%v", i, x.DType(), x.Shape(), want.DType, want.Shape)
	}
	got, err := x.Complex128s()
	if err != nil {
		t.Fatal(err)
	}
	expected, err := build(t, torch.Complex128, want.Shape, pairs(want)).Complex128s()
	if err != nil {
		t.Fatal(err)
	}
	near := func(a, b float64) bool {
		return a == b || math.IsNaN(a) && math.IsNaN(b) || math.Abs(a-b) <= 2e-5*(1+math.Abs(b))
	}
	for j := range expected {
		if !near(real(got[j]), real(expected[j])) || !near(imag(got[j]), imag(expected[j])) {
			t.Fatalf("result %d: got %v\nwant %v", i, got, expected)
		}
	}
}

// pairs returns the values as real and imaginary parts in turn.
func pairs(s stored) []any {
	if strings.HasPrefix(s.DType, "complex") {
		return s.Values
	}
	var out []any
	for _, v := range s.Values {
		out = append(out, v, 0.0)
	}
	return out
}
