package torch_test

import (
	"errors"
	"math"
	"reflect"
	"runtime"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

var allDTypes = []torch.DType{
	torch.Uint8, torch.Int8, torch.Int16, torch.Int32, torch.Int64, torch.Float16, torch.BFloat16,
	torch.Float32, torch.Float64,
	torch.Bool, torch.Complex64, torch.Complex128, torch.Float8E4M3FN, torch.Float8E5M2,
}

// Every dtype can be created, written, read, converted and printed.
func TestEveryDType(t *testing.T) {
	for _, d := range allDTypes {
		t.Run(d.String(), func(t *testing.T) {
			testDType(t, cuda.CPU, d)
			if cuda.DeviceCount() > 0 {
				testDType(t, gpu, d)
			}
		})
	}
}

func testDType(t *testing.T, device cuda.Device, d torch.DType) {
	for _, c := range []struct {
		name string
		x    func() (*torch.Tensor, error)
		want float64
	}{
		{"Zeros", func() (*torch.Tensor, error) { return torch.Zeros(device, d, 2, 3) }, 0},
		{"Ones", func() (*torch.Tensor, error) { return torch.Ones(device, d, 2, 3) }, 1},
		{"Full", func() (*torch.Tensor, error) { return torch.Full(device, d, 1, 2, 3) }, 1},
	} {
		x := must2(c.x())(t)
		if x.DType() != d || x.Device() != device {
			t.Errorf("%s made %v on %v, want %v, %v", c.name, x.DType(), x.Device(), d, device)
		}
		values, err := x.Complex128s()
		if err != nil {
			t.Fatal(err)
		}
		for _, v := range values {
			if v != complex(c.want, 0) {
				t.Errorf("%s: %v, want %v", c.name, values, c.want)
			}
		}
		if text := x.String(); !strings.HasPrefix(text, d.String()+"[2 3] "+device.String()) ||
			strings.Contains(text, "printed") {
			t.Errorf("%s prints %q", c.name, text)
		}
		y := x.To(cuda.CPU).ToDType(torch.Complex128).ToDType(torch.Complex64)
		if err := y.Err(); err != nil {
			t.Errorf("%s: conversion: %v, want no error", c.name, err)
		}
		if one, err := x.At(1, 2).Float64(); err != nil || one != c.want {
			t.Errorf("%s: an element is %v, %v, want %v, nil", c.name, one, err, c.want)
		}
		if got := x.At(0).SetIndex_(1, 2); got.Err() != nil {
			t.Errorf("%s: SetIndex_: %v, want no error", c.name, got.Err())
		}
	}
}

func TestFromSliceKeepsTheElements(t *testing.T) {
	slice := func(x *torch.Tensor, err error) string { return must2(x, err)(t).String() }
	for got, want := range map[string]string{
		slice(torch.FromSlice([]bool{true, false})): "bool[2] cpu: [ true, false]",
		slice(torch.FromSlice([]uint8{255})):        "uint8[1] cpu: [255]",
		slice(torch.FromSlice([]int8{-128, 127})):   "int8[2] cpu: [-128,  127]",
		slice(torch.FromSlice([]int16{-3})):         "int16[1] cpu: [-3]",
		slice(torch.FromSlice([]int32{1, 2, 3, 4}, 2,
			2)): "int32[2 2] cpu:\n[[1, 2],\n [3, 4]]",
		slice(torch.FromSlice([]int64{math.MinInt64})): "int64[1] cpu: " +
			"[-9223372036854775808]",
		slice(torch.FromSlice([]float32{0.5})):        "float32[1] cpu: [0.5000]",
		slice(torch.FromSlice([]float64{math.Pi}, 1)): "float64[1] cpu: [3.1416]",
		slice(torch.FromSlice([]complex64{1 - 2i})):   "complex64[1] cpu: [1.-2.i]",
		slice(torch.FromSlice([]complex128{0.5i}, 1,
			1)): "complex128[1 1] cpu: [[0.+0.5000i]]",
		slice(torch.FromSlice([]float32(nil), 0, 3)): "float32[0 3] cpu: []",
		slice(torch.FromMatrix(matrix{{1, 2, 3},
			{4, 5, 6}})): "float64[2 3] cpu:\n[[1., 2., 3.],\n [4., 5., 6.]]",
		slice(torch.Borrow([]float32{1, 2, 3, 4}, 2,
			2)): "float32[2 2] cpu:\n[[1., 2.],\n [3., 4.]]",
		slice(torch.Borrow([]int64(nil))): "int64[0] cpu: []",
		slice(torch.BorrowStrided([]int32{1, 2, 9, 3, 4}, []int64{2, 2},
			[]int64{3, 1})): "int32[2 2] cpu:\n[[1, 2],\n [3, 4]]",
	} {
		if got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	if _, err := torch.FromMatrix(nil); err == nil {
		t.Error("FromMatrix(nil): got no error, want one")
	}
	if _, err := torch.FromSlice([]int32{1, 2}, 3); err == nil {
		t.Error("FromSlice of two elements with the shape [3]: got no error, want one")
	}
}

// matrix has the methods of gonum's matrices: Dims and At.
type matrix [][]float64

func (m matrix) Dims() (int, int)    { return len(m), len(m[0]) }
func (m matrix) At(i, j int) float64 { return m[i][j] }

func TestReadersRefuseOtherDTypes(t *testing.T) {
	c := must2(torch.FromSlice([]complex64{1 + 2i, 3}))(t)
	for name, err := range map[string]error{
		"Complex128s": second(c.Float64s()),
		"compare":     second(floats(t, []float32{1}).Bools()),
		"ToDType":     second(c.Int64s()),
		"int64, not":  second(torch.Memory[float32](ints(t, []int64{1}))),
		"contiguous":  second(torch.Memory[int64](ints(t, []int64{1, 2, 3, 4}, 2, 2).T())),
	} {
		if err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("got %v, want an error with %q", err, name)
		}
	}
	if got, err := c.Complex128s(); err != nil || !reflect.DeepEqual(got, []complex128{1 + 2i, 3}) {
		t.Errorf("got %v, %v, want %v, nil", got, err, []complex128{1 + 2i, 3})
	}
	if got, err := c.Mul(c).Abs().Float64s(); err != nil || math.Abs(got[0]-5) > 1e-6 {
		t.Errorf("got %v, %v, want 5, nil", got, err)
	}
}

func second[T any](_ T, err error) error { return err }

func TestMemoryIsTheTensor(t *testing.T) {
	x := floats(t, []float32{1, 2, 3, 4}, 2, 2)
	values, err := torch.Memory[float32](x)
	if err != nil || len(values) != 4 {
		t.Fatal(values, err)
	}
	values[3] = 40
	wantValues(t, x.At(1), 3, 40)
	runtime.KeepAlive(x)
}

// A borrowed slice is not freed while a tensor uses it, including views and the tensors that
// autograd saves.
func TestBorrowedMemoryStaysUntilTheLastTensor(t *testing.T) {
	freed := make(chan struct{})
	s := torch.NewScope("borrowed")
	var row *torch.Tensor
	func() {
		data := make([]float64, 1000)
		data[999] = 7
		runtime.AddCleanup(&data[0], func(c chan struct{}) { close(c) }, freed)
		x, err := torch.Borrow(data, 10, 100)
		if err != nil {
			t.Fatal(err)
		}
		row = x.In(s).At(9).Keep()
		data[998] = 6
		x.Close()
	}()
	s.Close()
	for range 3 {
		runtime.GC()
	}
	select {
	case <-freed:
		t.Fatal("the slice was freed under a view, want it to live as long as the view")
	default:
	}
	wantValues(t, row.Index(torch.From(98)), 6, 7)
	row.SetIndex_(1, 0)
	row.Close()
	if !collect(func() bool {
		select {
		case <-freed:
			return true
		default:
			return false
		}
	}) {
		t.Error("the slice was not freed after its last view, want it to be freed")
	}
}

func TestBorrowRefusesUnusableSlices(t *testing.T) {
	data := []float32{1, 2, 3, 4}
	for want, err := range map[string]error{
		"has 6 elements":               second(torch.Borrow(data, 2, 3)),
		"2 sizes and 1 strides":        second(torch.BorrowStrided(data, []int64{2, 2}, []int64{2})),
		"reach over 20 bytes":          second(torch.BorrowStrided(data, []int64{2, 2}, []int64{3, 1})),
		"must not be negative":         second(torch.BorrowStrided(data, []int64{2, 2}, []int64{2, -1})),
		"negative size":                second(torch.BorrowStrided(data, []int64{-2}, []int64{1})),
		"more than memory can address": second(torch.BorrowStrided(data, []int64{2, 2}, []int64{math.MaxInt64, 2})),
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want an error with %q", err, want)
		}
	}
}

func TestGeneratorsDrawTheirOwnNumbers(t *testing.T) {
	g, err := torch.NewGenerator(cuda.CPU, 5)
	if err != nil {
		t.Fatal(err)
	}
	draw := func() []float64 {
		out, err := torch.Call("rand.generator", []int64{3}, g)
		if err != nil {
			t.Fatal(err)
		}
		defer out[0].Close()
		values, err := out[0].Float64s()
		if err != nil {
			t.Fatal(err)
		}
		return values
	}
	first, next := draw(), draw()
	// torch.rand(3, generator=torch.Generator().manual_seed(5))
	for i, want := range []float64{0.8303, 0.1261, 0.9075} {
		if math.Abs(first[i]-want) > 5e-5 {
			t.Errorf("got %v, and PyTorch draws %v at %d", first, want, i)
		}
	}
	if err := g.Seed(5); err != nil {
		t.Fatal(err)
	}
	if again := draw(); !reflect.DeepEqual(again, first) || reflect.DeepEqual(next, first) {
		t.Errorf("got %v, then %v, then %v", first, next, again)
	}
	x := floats(t, []float32{1, 1})
	if _, err := torch.Call("bernoulli", x, torch.Keywords{"generator": (*torch.Generator)(nil)}); err != nil {
		t.Errorf("nil, the default generator: %v, want no error", err)
	}
	g.Close()
	g.Close()
	if _, err := torch.Call("bernoulli", x, torch.Keywords{"generator": g}); !errors.Is(err,
		torch.ErrClosed) || !strings.Contains(err.Error(), "argument generator") {
		t.Errorf("a closed generator: %v, want torch.ErrClosed with \"argument generator\"", err)
	}
	if err := g.Seed(1); !errors.Is(err, torch.ErrClosed) {
		t.Errorf("Seed of a closed generator: %v, want torch.ErrClosed", err)
	}
	if _, err := torch.NewGenerator(cuda.Device(99), 1); !errors.Is(err, cuda.ErrNoDevice) {
		t.Errorf("a generator of GPU 99: %v, want cuda.ErrNoDevice", err)
	}
	if cuda.DeviceCount() > 0 {
		on, err := torch.NewGenerator(gpu, 5)
		if err != nil {
			t.Fatal(err)
		}
		defer on.Close()
		y := onDevice(t, []float32{0.5, 0.5, 0.5, 0.5})
		if _, err := torch.Call("bernoulli", y, torch.Keywords{"generator": on}); err != nil {
			t.Error(err)
		}
	}
}

func TestCallValuesReturnsEveryType(t *testing.T) {
	s := torch.NewScope("values")
	defer s.Close()
	x := floats(t, []float32{1, 2}).In(s)
	z := must2(torch.FromSlice([]complex64{1 + 2i}))(t)
	for _, c := range []struct {
		name string
		args []any
		want any
	}{
		{"equal", []any{x, x}, true},
		{"item", []any{x.At(1)}, 2.0},
		{"item", []any{x.At(1).ToDType(torch.Int8)}, int64(2)},
		{"item", []any{x.At(1).ToDType(torch.Bool)}, true},
		{"item", []any{z}, 1 + 2i},
		{"size.int", []any{x, 0}, int64(2)},
		{"result_type.Scalar", []any{x.ToDType(torch.Int8), 0.5}, int64(torch.Float32)},
		{"qscheme", []any{x}, nil},
	} {
		out, err := torch.CallValues(c.name, c.args...)
		if c.want == nil {
			if err == nil {
				t.Errorf("%s: got %v and no error, want an error", c.name, out)
			}
			continue
		}
		if err != nil || len(out) != 1 || !reflect.DeepEqual(out[0], c.want) {
			t.Errorf("%s: got %v (%v), want %v", c.name, out, err, c.want)
		}
	}
	out, err := torch.CallValues("add_.Tensor", x, x)
	if err != nil || out[0] != x {
		t.Errorf("in place: %v, %v, want the operand %v, nil", out, err, x)
	}
	out, err = torch.CallValues("unbind.int", x)
	if list, ok := out[0].([]*torch.Tensor); err != nil || !ok || len(list) != 2 || list[1].Scope() != s {
		t.Errorf("a list: %v, %v", out, err)
	}
	out, err = torch.CallValues("_linalg_check_errors", ints(t, []int64{0}).ToDType(torch.Int32), "x",
		torch.Keywords{"is_matrix": true})
	if err != nil || len(out) != 0 {
		t.Errorf("no results: %v, %v, want length 0, nil", out, err)
	}
	if got, err := call(t, "add.Scalar", z, 1i)[0].Complex128s(); err != nil || got[0] != 1+3i {
		t.Errorf("a complex argument: %v, %v, want %v, nil", got, err, 1+3i)
	}
}
