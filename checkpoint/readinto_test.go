package checkpoint_test

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/checkpoint"
	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

func TestReadIntoNeedsATensorLikeTheStoredOne(t *testing.T) {
	scope := torch.NewScope("read into")
	defer scope.Close()
	empty := func(d torch.DType, shape ...int64) *torch.Tensor {
		x, err := torch.Zeros(cuda.CPU, d, shape...)
		if err != nil {
			t.Fatal(err)
		}
		return scope.Own(x)
	}
	x := empty(torch.Int64, 2, 3)
	if err := x.Fill_(7).Err(); err != nil {
		t.Fatal(err)
	}
	value := map[string]any{"x": x}
	safetensors, pt := filepath.Join(t.TempDir(), "x.safetensors"), filepath.Join(t.TempDir(), "x.pt")
	if err := checkpoint.Save(safetensors, []torch.Named{{Name: "x", Tensor: x}}, nil); err != nil {
		t.Fatal(err)
	}
	if err := checkpoint.SavePyTorch(pt, value); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{safetensors, pt} {
		f, err := checkpoint.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		stored, err := f.Tensor("x")
		if err != nil {
			t.Fatal(err)
		}
		whole := empty(torch.Int64, 2, 3)
		if err := stored.ReadInto(whole); err != nil {
			t.Fatal(err)
		}
		if same, err := whole.Equal(x); err != nil || !same {
			t.Errorf("%s: the tensor differs (error %v), want equal ones", path, err)
		}
		for want, wrong := range map[string]*torch.Tensor{
			"int32[2 3]":     empty(torch.Int32, 2, 3),
			"int64[3 2]":     empty(torch.Int64, 3, 2),
			"not contiguous": empty(torch.Int64, 3, 2).T(),
		} {
			err := stored.ReadInto(wrong)
			if !errors.Is(err, cuda.ErrInvalidArgument) || !strings.Contains(err.Error(), want) ||
				!strings.Contains(err.Error(), path+": tensor x: ") {
				t.Errorf("got the error %v, want ErrInvalidArgument with %q and the tensor's name", err, want)
			}
		}
	}
}
