package cudatest

import (
	"errors"
	"math"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

func TestEqualNamesTheWorstElement(t *testing.T) {
	nan, inf := math.NaN(), math.Inf(1)
	tensor := func(t testing.TB, d torch.DType, values []float64, shape ...int64) *torch.Tensor {
		t.Helper()
		f := make([]float32, len(values))
		for i, v := range values {
			f[i] = float32(v)
		}
		x, err := torch.FromFloat32s(f, shape...)
		if err != nil {
			t.Fatal(err)
		}
		y := x.ToDType(d)
		if err := errors.Join(y.Err(), x.Close()); err != nil {
			t.Fatal(err)
		}
		return y
	}
	for _, c := range []struct {
		name      string
		dtype     torch.DType
		got, want []float64
		o         Tolerance
		fails     string // part of the message; empty: equal
	}{
		{"the same", torch.Float32, []float64{1, 2, 3, 4, 5, 6}, []float64{1, 2, 3, 4, 5, 6},
			Tolerance{Exact: true}, ""},
		{"within rounding", torch.Float32, []float64{1, 2, 3, 4, 5, 6.000001}, []float64{1, 2, 3, 4, 5, 6},
			Tolerance{}, ""},
		{"beyond rounding", torch.Float32, []float64{1, 2, 3, 4, 5, 6.1}, []float64{1, 2, 3, 4, 5, 6},
			Tolerance{}, "worst is element [1 2]: got 6.0"},
		{"two differ", torch.Float64, []float64{1, 2.5, 3, 5, 5, 6}, []float64{1, 2, 3, 4, 5, 6},
			Tolerance{}, "2 of 6 elements differ by more than 1e-07 + 1e-07*|want|; worst is element [1 " +
				"0]: got 5, want 4, difference 1 (relative 0.25)"},
		{"bfloat16 is coarse", torch.BFloat16, []float64{1, 2, 3, 4, 5, 6.03}, []float64{1, 2, 3, 4, 5, 6},
			Tolerance{}, ""},
		{"exact is exact", torch.BFloat16, []float64{1, 2, 3, 4, 5, 6.03}, []float64{1, 2, 3, 4, 5, 6},
			Tolerance{Exact: true}, "1 of 6"},
		{"absolute", torch.Float32, []float64{0, 0, 0, 0, 0, 0.5}, []float64{0, 0, 0, 0, 0, 0},
			Tolerance{Absolute: 0.5}, ""},
		{"absolute alone has no relative part", torch.Float32, []float64{0, 0, 0, 0, 0, 1e6 + 2},
			[]float64{0, 0, 0, 0, 0, 1e6}, Tolerance{Absolute: 1}, "difference 2"},
		{"relative", torch.Float32, []float64{0, 0, 0, 0, 0, 110}, []float64{0, 0, 0, 0, 0, 100},
			Tolerance{Relative: 0.11}, ""},
		{"NaN differs", torch.Float32, []float64{nan, 2, 3, 4, 5, 6}, []float64{nan, 2, 3, 4, 5, 6},
			Tolerance{}, "[0 0]: got NaN, want NaN"},
		{"NaN equals", torch.Float32, []float64{nan, 2, 3, 4, 5, 6}, []float64{nan, 2, 3, 4, 5, 6},
			Tolerance{EqualNaN: true}, ""},
		{"NaN for a number", torch.Float32, []float64{1, 2, nan, 4, 5, 7}, []float64{1, 2, 3, 4, 5, 6},
			Tolerance{EqualNaN: true}, "2 of 6 elements"},
		{"infinities equal", torch.Float32, []float64{inf, -inf, 3, 4, 5, 6},
			[]float64{inf, -inf, 3, 4, 5, 6}, Tolerance{}, ""},
		{"infinities of two signs", torch.Float32, []float64{inf, 2, 3, 4, 5, 6},
			[]float64{-inf, 2, 3, 4, 5, 6}, Tolerance{Relative: 1}, "[0 0]: got +Inf"},
		{"a number for an infinity", torch.Float32, []float64{7, 2, 3, 4, 5, 6},
			[]float64{inf, 2, 3, 4, 5, 6}, Tolerance{Relative: 1}, "[0 0]: got 7"},
		{"integers", torch.Int64, []float64{1, 2, 3, 4, 5, 7}, []float64{1, 2, 3, 4, 5, 6}, Tolerance{},
			"[1 2]: got 7, want 6"},
		{"integers within", torch.Uint8, []float64{1, 2, 3, 4, 5, 7}, []float64{1, 2, 3, 4, 5, 6},
			Tolerance{Absolute: 1}, ""},
		{"two rules", torch.Float32, []float64{1, 2, 3, 4, 5, 6}, []float64{1, 2, 3, 4, 5, 6},
			Tolerance{Exact: true, Absolute: 1}, "excludes"},
		{"a bound that is no number", torch.Float32, []float64{1, 2, 3, 4, 5, 6},
			[]float64{1, 2, 3, 4, 5, 6}, Tolerance{Absolute: nan}, "0 or more"},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, want := tensor(t, c.dtype, c.got, 2, 3), tensor(t, c.dtype, c.want, 2, 3)
			defer got.Close()
			defer want.Close()
			var equal bool
			r := inner(t, func(t testing.TB) { equal = Equal(t, got, want, c.o) })
			if equal == r.failed || !r.finished {
				t.Errorf("Equal returns %t, the test failed: %t, it went on: %t", equal, r.failed, r.finished)
			}
			if c.fails == "" {
				r.mustPass(t)
			} else {
				r.mustFail(t, c.fails)
			}
		})
	}
}

func TestEqualRefusesOtherShapesTypesAndFailedTensors(t *testing.T) {
	make1 := func(d torch.DType, shape ...int64) *torch.Tensor {
		x, err := torch.Ones(cuda.CPU, d, shape...)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { x.Close() })
		return x
	}
	x := make1(torch.Float32, 2, 3)
	inner(t, func(t testing.TB) { Equal(t, make1(torch.Float32, 3, 2), x, Tolerance{}) }).mustFail(t,
		"shape [3 2], want [2 3]")
	inner(t, func(t testing.TB) { Equal(t, make1(torch.Float64, 2, 3), x, Tolerance{}) }).mustFail(t,
		"dtype float64, want float32")
	inner(t, func(t testing.TB) {
		Equal(t, torch.Fail("step", errors.New("broken")), x,
			Tolerance{})
	}).mustFail(t, "got:", "broken")
	inner(t, func(t testing.TB) {
		Equal(t, x, torch.Fail("step", errors.New("broken")),
			Tolerance{})
	}).mustFail(t, "want:", "broken")
	empty := make1(torch.Float32, 0, 3)
	inner(t, func(t testing.TB) { Equal(t, empty, empty, Tolerance{}) }).mustPass(t)
	scalar := make1(torch.Float32)
	inner(t, func(t testing.TB) { Equal(t, scalar, scalar, Tolerance{}) }).mustPass(t)
}
