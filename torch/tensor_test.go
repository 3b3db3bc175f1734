package torch_test

import (
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/torch"
)

func TestOperatorsOnTheGPU(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	s := torch.NewScope("gpu")
	defer s.Close()
	x := floats(t, []float32{1, -2, 3, -4}, 2, 2).In(s).To(gpu)
	if x.Device() != gpu || x.To(cuda.CPU).Device() != cuda.CPU {
		t.Fatalf("got %v", x)
	}
	wantValues(t, x.MatMul(x).ReLU().Add(x), 1, 4, 3, 6)
	if got := x.String(); got != "float32[2 2] cuda:0:\n[[ 1., -2.],\n [ 3., -4.]]" {
		t.Errorf("got %q", got)
	}
	err := x.Add(floats(t, []float32{1, 2, 3, 4}, 2, 2)).Err()
	if err == nil {
		t.Error("Add of operands on two devices: got no error, want one")
	}
	w := leaf(t, []float32{2, 3})
	if err := w.In(s).To(gpu).Square().Sum().Backward(); err != nil { // gradients flow through To
		t.Fatal(err)
	}
	wantValues(t, w.In(s).Grad(), 4, 6)
}

func TestOutOfMemoryIsAnError(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	x, err := torch.Ones(gpu, torch.Float32, 2)
	must(t, x, err)
	_, err = torch.Empty(gpu, torch.Float32, 1<<42)
	if !errors.Is(err, cuda.ErrOutOfMemory) {
		t.Errorf("a constructor: got %v, want ErrOutOfMemory", err)
	}
	huge := x.Reshape(2, 1).Expand(2, 1<<40).Clone().Sum()
	if err := huge.Backward(); !errors.Is(err, cuda.ErrOutOfMemory) {
		t.Errorf("the end of a chain: got %v, want ErrOutOfMemory", err)
	}
	wantValues(t, x.Add(x), 2, 2) // later work succeeds
}

// Every method is called on a nil, a zero, a failed, a closed and an ended tensor, with zero
// arguments. None may panic, and methods that return an error or a tensor must report the error.
func TestNoMethodPanics(t *testing.T) {
	closed, err := torch.Ones(cuda.CPU, torch.Float32, 2)
	if err != nil {
		t.Fatal(err)
	}
	closed.Close()
	scope := torch.NewScope("x")
	ended := floats(t, []float32{1}).In(scope)
	scope.Close()
	live := floats(t, []float32{1, 2})
	// These methods need not fail on a closed tensor.
	harmless := map[string]bool{"Close": true, "Scope": true, "RequiresGrad": true, "Err": true}
	// These methods only mark the handle: the next operator fails.
	marks := map[string]bool{"NoGrad": true, "EnableGrad": true, "NoAutocast": true, "Numerics": true,
		"NoNumerics": true}
	tensor, failure := reflect.TypeFor[*torch.Tensor](), reflect.TypeFor[error]()
	for name, x := range map[string]*torch.Tensor{"nil": nil, "zero": {},
		"failed": torch.Fail("x", errors.ErrUnsupported), "closed": closed, "ended": ended, "live": live} {
		v := reflect.ValueOf(x)
		for i := range v.NumMethod() {
			method := tensor.Method(i).Name
			t.Run(name+"/"+method, func(t *testing.T) {
				m := v.Method(i)
				var args []reflect.Value
				for j := range m.Type().NumIn() {
					if m.Type().IsVariadic() && j == m.Type().NumIn()-1 {
						break
					}
					args = append(args, reflect.Zero(m.Type().In(j)))
				}
				results := m.Call(args)
				if name == "live" || harmless[method] || (marks[method] && (name == "closed" || name == "ended")) {
					return
				}
				for _, r := range results {
					switch r.Type() {
					case tensor:
						if r.IsNil() || r.Interface().(*torch.Tensor).Err() == nil {
							t.Errorf("the result = %v, want a failed tensor", r)
						}
					case failure:
						if r.IsNil() {
							t.Error("the error = nil, want one")
						}
					}
				}
			})
		}
	}
}

func TestInPlaceFailureLeavesTheTarget(t *testing.T) {
	x := floats(t, []float32{1, 2, 3})
	if x.Add_(floats(t, []float32{1, 2})).Err() == nil {
		t.Fatal("Add_ of another shape: got no error, want one")
	}
	if x.Add_(x.MatMul(nil)).Err() == nil {
		t.Fatal("Add_ of a failed tensor: got no error, want one")
	}
	if err := x.Err(); err != nil {
		t.Fatal(err)
	}
	if got := x.Add_(x); got != x {
		t.Fatalf("an in-place operator returned %v, want %v", got, x)
	}
	wantValues(t, x, 2, 4, 6)
}

func TestDevicesAndDTypes(t *testing.T) {
	scope := torch.NewScope("test")
	defer scope.Close()
	a := scope.Own(floats(t, []float32{1, 2}, 2))
	b := a.ToDType(torch.Float64)
	devices, dtypes, err := torch.DevicesAndDTypes(a, b, a)
	if err != nil || !slices.Equal(devices, []cuda.Device{cuda.CPU, cuda.CPU, cuda.CPU}) ||
		!slices.Equal(dtypes, []torch.DType{torch.Float32, torch.Float64, torch.Float32}) {
		t.Errorf("got %v %v, %v, want %v, %v, nil",
			devices, dtypes, err, []cuda.Device{cuda.CPU, cuda.CPU, cuda.CPU},
			[]torch.DType{torch.Float32, torch.Float64, torch.Float32})
	}
	if devices, dtypes, err := torch.DevicesAndDTypes(); err != nil || len(devices) != 0 || len(dtypes) != 0 {
		t.Errorf("of none: %v %v, %v, want length 0, length 0, nil", devices, dtypes, err)
	}
	bad := a.Add(floats(t, []float32{1, 2, 3}, 3))
	if _, _, err := torch.DevicesAndDTypes(a, bad); err == nil || err.Error() != bad.Err().Error() {
		t.Errorf("of a failed tensor: %v", err)
	}
	if _, _, err := torch.DevicesAndDTypes(a, nil); !errors.Is(err, cuda.ErrInvalidArgument) {
		t.Errorf("of nil: %v, want cuda.ErrInvalidArgument", err)
	}
	b.Close()
	if _, _, err := torch.DevicesAndDTypes(a, b); !errors.Is(err, torch.ErrClosed) {
		t.Errorf("of a closed tensor: %v, want torch.ErrClosed", err)
	}
}

func TestCloseIsIdempotent(t *testing.T) {
	before := settled(t)
	x, err := torch.Ones(cuda.CPU, torch.Float32, 2)
	if err != nil {
		t.Fatal(err)
	}
	marked := x.NoGrad()
	for range 3 {
		if err := x.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if err := marked.Add(marked).Err(); !errors.Is(err, torch.ErrClosed) {
		t.Errorf("the marked handle of a closed tensor: got %v, want ErrClosed", err)
	}
	if live := torch.LiveTensors(); live != before {
		t.Errorf("%d more references than before, want 0", live-before)
	}
	if x.Shape() != nil || x.DType() != -1 || x.Device() != cuda.CPU || x.Elements() != 0 {
		t.Errorf("a closed tensor has the shape %v, dtype %v, device %v and %d elements, want nil, -1, cpu, 0",
			x.Shape(), x.DType(), x.Device(), x.Elements())
	}
}

func TestString(t *testing.T) {
	big, err := torch.Ones(cuda.CPU, torch.Float32, 1000, 1000)
	must(t, big, err)
	none, err := torch.Ones(cuda.CPU, torch.Float32, 0)
	must(t, none, err)
	scalar, err := torch.Full(cuda.CPU, torch.Float32, 2.5)
	must(t, scalar, err)
	scope := torch.NewScope("s")
	scope.Close()
	before := settled(t)
	for _, c := range []struct {
		x    *torch.Tensor
		want string
	}{
		{floats(t, []float32{1, 2, 3, 4, 5, 6}, 2, 3), "float32[2 3] cpu:\n[[1., 2., 3.],\n [4., 5., 6.]]"},
		{floats(t, []float32{1, 2, 3}), "float32[3] cpu: [1., 2., 3.]"},
		{leaf(t, []float32{0.123456789}), "float32[1] cpu: [0.1235]"},
		{ints(t, []int64{7}), "int64[1] cpu: [7]"},
		{scalar, "float32[] cpu: 2.5000"},
		{none, "float32[0] cpu: []"},
		{big, "float32[1000 1000] cpu:\n[" + strings.Repeat("[1., 1., 1.,  ..., 1., 1., 1.],\n ", 3) + "...,\n " +
			strings.Repeat("[1., 1., 1.,  ..., 1., 1., 1.],\n ", 2) + "[1., 1., 1.,  ..., 1., 1., 1.]]"},
		{nil, "torch.Tensor: torch: invalid argument: the tensor is nil"},
	} {
		t.Run(c.want, func(t *testing.T) {
			if got := c.x.String(); got != c.want {
				t.Errorf("got %q, want %q", got, c.want)
			}
		})
	}
	// The cases hold four references.
	if live := torch.LiveTensors() - before; live != 4 {
		t.Errorf("String left %d references, want 0", live-4)
	}
	if got := floats(t, []float32{1}).In(scope).String(); !strings.Contains(got, "has ended") {
		t.Errorf("got %q, want it to contain \"has ended\"", got)
	}
}
