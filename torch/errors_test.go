package torch_test

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

func TestErrorNamesOperatorOperandsAndCaller(t *testing.T) {
	x, y := floats(t, make([]float32, 6), 2, 3), floats(t, make([]float32, 20), 4, 5)
	// The error must name the line of MatMul, which follows.
	file, line := here(t)
	bad := x.MatMul(y)
	err := bad.ReLU().Add(x).Sum().Backward()
	var e *torch.Error
	if !errors.As(err, &e) {
		t.Fatalf("got %v", err)
	}
	if e.Op != "MatMul" || filepath.Base(e.File) != file || e.Line != line+1 {
		t.Errorf("got %s at %s:%d, want MatMul at %s:%d", e.Op, e.File, e.Line, file, line+1)
	}
	want := fmt.Sprintf("torch: MatMul(float32[2 3] cpu, float32[4 5] cpu) at %s:%d: mat1 and mat2 "+
		"shapes cannot be multiplied (2x3 and 4x5)", file, line+1)
	got := strings.Replace(err.Error(), ": mm: ", ": ", 1) // newer versions of LibTorch name their kernel
	if got != want {
		t.Errorf("got  %s\nwant %s", err, want)
	}
}

func TestErrorsNameTheirKindAndCause(t *testing.T) {
	x := floats(t, []float32{1, 2}, 2)
	closed, err := torch.Ones(cuda.CPU, torch.Float32, 2)
	if err != nil {
		t.Fatal(err)
	}
	closed.Close()
	scope := torch.NewScope("batch 7")
	scoped := x.In(scope)
	scope.Close()
	var none *torch.Tensor
	var zero torch.Tensor
	cases := []struct {
		name string
		do   func() error
		is   error
		text string
	}{
		{"nil operand", func() error { return x.Add(nil).Err() }, cuda.ErrInvalidArgument, "Add(float32[2] cpu, nil)"},
		{"nil receiver", func() error { return none.Add(x).Err() }, cuda.ErrInvalidArgument,
			"Add(nil, float32[2] cpu)"},
		{"nil receiver of a sink", func() error { return none.Backward() }, cuda.ErrInvalidArgument, "Backward(nil)"},
		{"zero tensor", func() error { return zero.Add(x).Err() }, torch.ErrClosed, "Tensor is zero"},
		{"closed operand", func() error { return x.Add(closed).Err() }, torch.ErrClosed, "Add(float32[2] cpu, closed)"},
		{"closed in a sink", func() error { _, err := closed.Float32s(); return err }, torch.ErrClosed,
			"Float32s(closed)"},
		{"ended scope", func() error { return scoped.ReLU().Err() }, torch.ErrClosed, `scope "batch 7" has ended`},
		{"ended scope in a sink", func() error { return scoped.Backward() }, torch.ErrClosed,
			`scope "batch 7" has ended`},
		{"closed scope", func() error { return x.In(scope).Err() }, torch.ErrClosed, `scope "batch 7" has ended`},
		{"nil scope", func() error { return x.In(nil).Err() }, cuda.ErrInvalidArgument, "scope"},
		{"zero scope", func() error { return x.In(new(torch.Scope)).Err() }, cuda.ErrInvalidArgument, "scope"},
		{"own on a nil scope", func() error { return (*torch.Scope)(nil).Own(x).Err() },
			cuda.ErrInvalidArgument, "scope"},
		{"no such device", func() error { _, err := torch.Zeros(99, torch.Float32, 2); return err },
			cuda.ErrNoDevice, "cuda:99"},
		{"no such device in To", func() error { return x.To(99).Err() }, cuda.ErrNoDevice, "99"},
		{"a device that is none", func() error { return x.To(-7).Err() }, nil, "To"},
		{"no such dtype", func() error { _, err := torch.Zeros(cuda.CPU, 99, 2); return err }, nil, "Zeros"},
		{"no such dtype in ToDType", func() error { return x.ToDType(99).Err() }, nil, "ToDType"},
		{"negative size", func() error { _, err := torch.Zeros(cuda.CPU, torch.Float32, -2); return err },
			nil, "Zeros"},
		{"size overflow", func() error {
			_,
				err := torch.Zeros(cuda.CPU, torch.Float32, 1<<62, 1<<62)
			return err
		}, nil, "Zeros"},
		{"too large", func() error { _, err := torch.Zeros(cuda.CPU, torch.Float32, 1<<50); return err },
			cuda.ErrOutOfMemory, "Zeros"},
		{"data and shape differ",
			func() error {
				_, err := torch.FromFloat32s([]float32{1, 2, 3},
					2)
				return err
			}, cuda.ErrInvalidArgument, "FromFloat32s"},
		{"nil in a list", func() error { return torch.Cat([]*torch.Tensor{x, nil}, 0).Err() },
			cuda.ErrInvalidArgument, "operand 2 is nil"},
		{"empty list", func() error { return torch.Cat(nil, 0).Err() }, nil, "Cat"},
		{"many operands", func() error { return torch.Cat(append(make([]*torch.Tensor, 20), x), 0).Err() },
			cuda.ErrInvalidArgument, "13 more"},
		{"first of two errors", func() error { return x.Add(nil).Add(x.MatMul(nil)).Err() },
			cuda.ErrInvalidArgument, "Add("},
		{"several elements", func() error { _, err := x.Float64(); return err }, cuda.ErrInvalidArgument,
			"Float64(float32[2] cpu)"},
		{"more elements than memory",
			func() error {
				_, err := x.Narrow(0, 0,
					1).Expand(1 << 60).Float32s()
				return err
			}, cuda.ErrOutOfMemory, "Float32s"},
		{"floats as ints", func() error { _, err := x.Int64s(); return err }, cuda.ErrInvalidArgument, "ToDType"},
		{"nothing to differentiate", func() error { return x.Sum().Backward() }, nil, "Backward"},
		{"backward of a vector", func() error { return leaf(t, []float32{1, 2}).MulScalar(2).Backward() },
			nil, "Backward"},
		{"gradient of another shape", func() error {
			return leaf(t, []float32{1,
				2}).MulScalar(2).BackwardWith(torch.BackwardOptions{Gradient: floats(t, []float32{1})})
		}, cuda.ErrInvalidArgument, "Backward"},
		{"integer parameter", func() error { return ints(t, []int64{1}).SetRequiresGrad(true) },
			cuda.ErrInvalidArgument, "SetRequiresGrad"},
		{"in place on a leaf", func() error { return leaf(t, []float32{1}).Add_(x).Err() }, nil, "leaf Variable"},
		{"empty pool window", func() error { return x.MaxPool2d(nil, torch.MaxPool2dOptions{}).Err() }, nil,
			"MaxPool2d"},
		{"class out of range", func() error {
			return floats(t, []float32{1, 2}, 1, 2).CrossEntropy(ints(t, []int64{5})).Err()
		}, nil, "CrossEntropy"},
		{"copy batch", func() error {
			return torch.CopyBatch(cuda.Stream{}, nil, []*torch.Tensor{x}, nil, nil)
		}, cuda.ErrInvalidArgument, "1 destinations and 0 sources"},
		{"Fail", func() error { return torch.Fail("mine", errors.ErrUnsupported).Add(x).Err() },
			errors.ErrUnsupported, "torch: mine() at errors_test.go:"},
		{"Fail without an error", func() error { return torch.Fail("mine", nil).Err() },
			cuda.ErrInvalidArgument, "mine"},
		{"no threads", func() error { return torch.SetNumThreads(0) }, cuda.ErrInvalidArgument, "0 threads"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			err := c.do()
			if err == nil {
				t.Fatalf("got no error, want %v with %q", c.is, c.text)
			}
			if c.is != nil && !errors.Is(err, c.is) {
				t.Errorf("got %v, want %v", err, c.is)
			}
			if !strings.Contains(err.Error(), c.text) {
				t.Errorf("got %v, want an error with %q", err, c.text)
			}
		})
	}
	wantValues(t, x, 1, 2)
}
