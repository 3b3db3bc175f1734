package torch

import (
	"reflect"
	"strconv"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/torch/internal/schema"
)

// The table of operators is generated from a file, and the library executes them. Both must agree
// on the arguments, types, defaults and results of each operator.
func TestSchemasMatchTheLibrary(t *testing.T) {
	for i, o := range operators {
		t.Run(o.method, func(t *testing.T) {
			e := operator(i).entry()
			if e.unknown != nil {
				t.Fatal(e.unknown)
			}
			want, err := schema.Parse(o.schema)
			if err != nil {
				t.Fatal(err)
			}
			text := capi.OperatorSchema(e.op)
			got, err := schema.Parse(text)
			if err != nil {
				t.Fatal(err)
			}
			for _, args := range [][]schema.Arg{got.Args, want.Args} {
				for i := range args {
					args[i].Default = normal(args[i])
				}
			}
			if !reflect.DeepEqual(got, want) {
				t.Errorf("the library has\n%s\nand the table was generated from\n%s", text, o.schema)
			}
		})
	}
}

// If a call has more operands or integers than the short C call can count, it takes the general C
// call.
func TestOperatorsTakeAnyNumberOfOperands(t *testing.T) {
	scope := NewScope("test")
	defer scope.Close()
	one, err := Ones(cuda.CPU, Float32, 1)
	if err != nil {
		t.Fatal(err)
	}
	one = scope.Own(one)
	for _, count := range []int{1, 8, 9, 255, 256, 65535, 65536, 70000} {
		in := make([]*Tensor, count)
		for i := range in {
			in[i] = one
		}
		sum, err := Cat(in, 0).Sum().Float64()
		if err != nil || sum != float64(count) {
			t.Errorf("the sum of %d ones is %g, %v, want %v, nil", count, sum, err, float64(count))
		}
		// The named call's lists grow differently.
		if sum, err = Call1("cat", in).Sum().Float64(); err != nil || sum != float64(count) {
			t.Errorf("the sum of %d ones by Call1 is %g, %v, want %v, nil", count, sum, err, float64(count))
		}
	}
}

// normal returns a default in a notation that is common to the file and the library.
func normal(a schema.Arg) string {
	d := a.Default
	switch d {
	case "Mean":
		return "1"
	case "contiguous_format":
		return "0"
	}
	if strings.HasPrefix(a.Type, "int[") { // [1, 1] means 1 for each
		d, _, _ = strings.Cut(strings.Trim(d, "[]"), ",")
	}
	if v, err := strconv.ParseFloat(d, 64); err == nil {
		return strconv.FormatFloat(v, 'g', 10, 64)
	}
	return strings.ReplaceAll(d, "'", "\"")
}

func TestParseReadsSchemas(t *testing.T) {
	got, err := schema.Parse("aten::x.y(Tensor(a!)[] self, SymInt[2] stride=[1, 1], *, str? " +
		"mode=\"a,b\", Scalar v=1) -> (Tensor(a!) values, Tensor[] rest)")
	if err != nil {
		t.Fatal(err)
	}
	want := schema.Schema{Name: "x", Overload: "y", Args: []schema.Arg{
		{Name: "self", Type: "Tensor[]", Written: true, Alias: "a"},
		{Name: "stride", Type: "int[2]", Default: "[1, 1]", HasDefault: true},
		{Name: "mode", Type: "str?", Default: `"a,b"`, HasDefault: true},
		{Name: "v", Type: "Scalar", Default: "1", HasDefault: true},
	}, Returns: []schema.Return{{Type: "Tensor", Written: true, Alias: "a"}, {Type: "Tensor[]"}}}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, want %v", got, want)
	}
	for _, bad := range []string{"", "x", "x(", "x(Tensor) -> Tensor", "x(Tensor a)"} {
		if _, err := schema.Parse(bad); err == nil {
			t.Errorf("Parse(%q): got no error, want one", bad)
		}
	}
}
