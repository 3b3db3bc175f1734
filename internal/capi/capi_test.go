package capi

import (
	"errors"
	"fmt"
	"testing"
)

func TestShimHasTheExpectedABIVersion(t *testing.T) {
	if err := Check(); err != nil {
		t.Fatal(err)
	}
}

func TestErrorMatchesItsCode(t *testing.T) {
	err := fmt.Errorf("batch 3: %w", &Error{Code: CodeOutOfMemory, Origin: "torch.Empty", Message: "2 GiB wanted"})
	if !errors.Is(err, CodeOutOfMemory) {
		t.Errorf("errors.Is(%v, CodeOutOfMemory) = false, want true", err)
	}
	if errors.Is(err, CodeCUDA) {
		t.Errorf("errors.Is(%v, CodeCUDA) is true", err)
	}
	const want = "batch 3: torch.Empty: out of memory: 2 GiB wanted"
	if err.Error() != want {
		t.Errorf("got %q, want %q", err, want)
	}
}

// The code and the message of a C error survive the conversion. The origin becomes the Go function.
func TestErrorFromCIsWhole(t *testing.T) {
	_, err := FindOperator("aten::no_such_operator", "")
	var e *Error
	if !errors.As(err, &e) || e.Code != CodeNotFound || e.Origin != "FindOperator" || e.Message == "" {
		t.Errorf("got %#v, want a CodeNotFound of FindOperator with a message", err)
	}
}

func TestLengthsAreCheckedBeforeC(t *testing.T) {
	for name, err := range map[string]error{
		"CopyBatch":       CopyBatch(Stream{}, nil, make([]*Tensor, 2), make([]*Tensor, 1), nil),
		"NormalizeImages": NormalizeImages(nil, nil, make([]float32, 3), make([]float32, 1)),
	} {
		t.Run(name, func(t *testing.T) {
			if !errors.Is(err, CodeInvalidArgument) {
				t.Errorf("got %v, want an invalid argument", err)
			}
		})
	}
}

func operator(t testing.TB, name, overload string) *Operator {
	t.Helper()
	op, err := FindOperator(name, overload)
	if err != nil {
		t.Fatal(err)
	}
	return op
}

func scalarTensor(t testing.TB, device int32) *Tensor {
	t.Helper()
	x, err := TensorFromData(make([]byte, 4), []int64{1}, Float32)
	if err != nil {
		t.Fatal(err)
	}
	if device == DeviceCPU {
		return x
	}
	defer FreeTensor(x)
	y, err := TensorTo(x, device, -1, false)
	if err != nil {
		t.Fatal(err)
	}
	return y
}

// The calls of a training step allocate nothing on the heap: out parameters and argument slices
// stay on the stack.
func TestCallsDoNotAllocate(t *testing.T) {
	x := scalarTensor(t, DeviceCPU)
	defer FreeTensor(x)
	add := operator(t, "aten::add", "Tensor")
	addInPlace := operator(t, "aten::add_", "Tensor")
	for name, call := range map[string]func() error{
		"CallOperator add_": func() error {
			args := [...]Arg{{Kind: ArgTensor}, {Kind: ArgTensor}}
			tensors := [...]*Tensor{x}
			err := CallOperator(addInPlace, args[:], tensors[:], nil, 0, nil)
			return err
		},
		"CallOperator add, FreeTensor": func() error {
			args := [...]Arg{{Kind: ArgTensor}, {Kind: ArgTensor}}
			tensors := [...]*Tensor{x}
			var out [1]*Tensor
			err := CallOperator(add, args[:], tensors[:], nil, 0, out[:])
			FreeTensors(out[:])
			return err
		},
		"DescribeTensor": func() error { _, err := DescribeTensor(x); return err },
		"TensorShape": func() error {
			var size, stride [4]int64
			return TensorShape(x, size[:], stride[:])
		},
		"RetainTensor": func() error {
			y, err := RetainTensor(x)
			FreeTensor(y)
			return err
		},
		"TensorItem":           func() error { _, err := TensorItem(x); return err },
		"NewEvent":             allocationsOnGPU(func() error { e, err := NewEvent(0); FreeEvent(e); return err }),
		"GetCurrentCUDAStream": allocationsOnGPU(func() error { _, err := GetCurrentCUDAStream(0); return err }),
		"StreamGuard": allocationsOnGPU(func() error {
			g, err := StreamGuardEnter(Stream{})
			if err != nil {
				return err
			}
			return g.Exit()
		}),
	} {
		t.Run(name, func(t *testing.T) {
			if call == nil {
				t.Skip("needs a GPU")
			}
			if err := call(); err != nil {
				t.Error(err)
			} else if n := testing.AllocsPerRun(100, func() { call() }); n != 0 {
				t.Errorf("%v allocations a call, want 0", n)
			}
		})
	}
}

// allocationsOnGPU returns the call on a machine with a GPU, and nil elsewhere: the error that the
// call returns without a GPU allocates.
func allocationsOnGPU(call func() error) func() error {
	if DeviceCount() == 0 {
		return nil
	}
	return call
}

func BenchmarkGetCurrentCUDAStream(b *testing.B) {
	if DeviceCount() == 0 {
		b.Skip("needs a GPU")
	}
	for b.Loop() {
		GetCurrentCUDAStream(0)
	}
}

func BenchmarkCallOperator(b *testing.B) {
	device := int32(DeviceCPU)
	if DeviceCount() > 0 {
		device = 0
	}
	x := scalarTensor(b, device)
	defer FreeTensor(x)
	op := operator(b, "aten::add_", "Tensor")
	args := []Arg{{Kind: ArgTensor}, {Kind: ArgTensor}}
	b.ReportAllocs()
	for b.Loop() {
		if err := CallOperator(op, args, []*Tensor{x}, nil, CallNoGrad, nil); err != nil {
			b.Fatal(err)
		}
	}
}
