package torch_test

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"math"
	"os"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

func dtypeNamed(t *testing.T, name string) torch.DType {
	t.Helper()
	for d := range torch.DType(64) {
		if d.Known() && d.String() == name {
			return d
		}
	}
	t.Fatalf("no dtype %s", name)
	return 0
}

// build returns a tensor with the values of make_printed.py and make_indexed.py.
func build(t *testing.T, dtype torch.DType, shape []int64, values []any) *torch.Tensor {
	t.Helper()
	numbers := make([]float64, len(values))
	for i, v := range values {
		switch v := v.(type) {
		case float64:
			numbers[i] = v
		case bool:
			if v {
				numbers[i] = 1
			}
		case string:
			numbers[i] = map[string]float64{"nan": math.NaN(), "inf": math.Inf(1), "-inf": math.Inf(-1)}[v]
		}
	}
	var x *torch.Tensor
	var err error
	if dtype == torch.Complex64 || dtype == torch.Complex128 {
		pairs := make([]complex128, len(numbers)/2)
		for i := range pairs {
			pairs[i] = complex(numbers[2*i], numbers[2*i+1])
		}
		x, err = torch.FromSlice(pairs, int64(len(pairs)))
	} else {
		x, err = torch.FromSlice(numbers, int64(len(numbers)))
	}
	x = must(t, x, err)
	y := x.Reshape(shape...).ToDType(dtype)
	return must(t, y, y.Err())
}

func TestTensorsPrintAsInPyTorch(t *testing.T) {
	text, err := os.ReadFile("testdata/printed.json")
	if err != nil {
		t.Fatal(err)
	}
	var cases []struct {
		DType, Text string
		Shape       []int64
		Values      []any
	}
	if err := json.Unmarshal(text, &cases); err != nil {
		t.Fatal(err)
	}
	for _, c := range cases {
		dtype := dtypeNamed(t, c.DType)
		t.Run(fmt.Sprint(dtype, c.Shape), func(t *testing.T) {
			// Go's words for bool, and its i.
			want := strings.NewReplacer("True", "true", "False", "false", "j", "i").Replace(c.Text)
			space := " "
			if strings.Contains(want, "\n") {
				space = "\n"
			}
			want = fmt.Sprintf("%v%v cpu:%s%s", dtype, c.Shape, space, want)
			if got := fmt.Sprint(build(t, dtype, c.Shape, c.Values)); got != want {
				t.Errorf("got\n%s\nwant\n%s", got, want)
			}
		})
	}
}

func TestFormatVerbs(t *testing.T) {
	x := floats(t, []float32{1.25, -20.5, 1e-6})
	many := must2(torch.Arange(1002))(t)
	for _, c := range []struct{ format, want string }{
		{"%v", "float32[3] cpu: [ 1.2500e+00, -2.0500e+01,  1.0000e-06]"},
		{"%s", "float32[3] cpu: [ 1.2500e+00, -2.0500e+01,  1.0000e-06]"},
		{"%.1v", "float32[3] cpu: [ 1.2e+00, -2.0e+01,  1.0e-06]"},
		{"%.2f", "float32[3] cpu: [  1.25, -20.50,   0.00]"},
		{"%g", "float32[3] cpu: [                 1.25,                 -20.5, 9.999999974752427e-07]"},
		{"%.3g", "float32[3] cpu: [ 1.25, -20.5, 1e-06]"},
		{"%d", "%!d(torch.Tensor=float32[3] cpu)"},
	} {
		if got := fmt.Sprintf(c.format, x); got != c.want {
			t.Errorf("%s: got %q, want %q", c.format, got, c.want)
		}
	}
	if got := fmt.Sprintf("%+v", many); !strings.Contains(got, " 500, ") || strings.Contains(got, "...") {
		t.Errorf("%%+v leaves elements out: %.200s", got)
	}
	bad := x.MatMul(floats(t, []float32{1, 2}))
	if got := fmt.Sprint(bad); !strings.Contains(got,
		"torch.Tensor: torch: MatMul(float32[3] cpu, float32[2] cpu) at print_test.go:") {
		t.Errorf("a failed tensor prints %q, want its error with the operator, operands and line", got)
	}
	if got := fmt.Sprint((*torch.Tensor)(nil)); !strings.Contains(got, "nil") {
		t.Errorf("nil prints %q, want it to contain \"nil\"", got)
	}
	closed := floats(t, []float32{1})
	closed.Close()
	if got := fmt.Sprint(closed); !strings.Contains(got, "closed") {
		t.Errorf("a closed tensor prints %q, want it to contain \"closed\"", got)
	}
	if got := x.LogValue(); got.Kind() != slog.KindString || got.String() != "float32[3] cpu" {
		t.Errorf("LogValue: %v of the kind %v, want the String \"float32[3] cpu\"", got, got.Kind())
	}
}

// Printing leaves no tensor open, and a tensor with many dimensions is not read as a whole.
func TestPrintingIsBounded(t *testing.T) {
	s := torch.NewScope("print")
	defer s.Close()
	x, err := torch.Ones(cuda.CPU, torch.Int8, 1)
	x = must(t, x, err)
	shape := make([]int64, 16)
	for i := range shape {
		shape[i] = 6
	}
	before := settled(t)
	if got := fmt.Sprint(x.In(s).Expand(shape...)); !strings.HasSuffix(got, "cpu: [...]") {
		t.Errorf("got %.100q", got)
	}
	huge := fmt.Sprint(x.In(s).Expand(1<<40, 1<<20))
	if strings.Count(huge, "1") < 36 || strings.Count(huge, "...") != 7 {
		t.Errorf("got %q, want at least 36 ones and 7 ellipses", huge)
	}
	s.Close()
	if n := torch.LiveTensors(); n != before {
		t.Errorf("%d tensors are left, want 0", n-before)
	}
}

// must2 takes the results of a constructor.
func must2(x *torch.Tensor, err error) func(testing.TB) *torch.Tensor {
	return func(t testing.TB) *torch.Tensor { return must(t, x, err) }
}
