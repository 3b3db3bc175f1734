package torch_test

import (
	"errors"
	"reflect"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

func TestCreateAndRead(t *testing.T) {
	for _, d := range []torch.DType{torch.Uint8, torch.Int8, torch.Int16, torch.Int32, torch.Int64,
		torch.Float16, torch.Float32, torch.Float64, torch.Bool, torch.BFloat16} {
		t.Run(d.String(), func(t *testing.T) {
			x, err := torch.Ones(cuda.CPU, d, 2, 3)
			must(t, x, err)
			if x.DType() != d || !reflect.DeepEqual(x.Shape(), []int64{2, 3}) || x.Device() != cuda.CPU ||
				x.Elements() != 6 {
				t.Errorf("got %v, want %v, [2 3], cpu, 6", x, d)
			}
			wantValues(t, x, 1, 1, 1, 1, 1, 1)
			b, err := x.Bytes()
			if err != nil || len(b) != 6*d.Size() {
				t.Errorf("%d bytes, %v, want %v, nil", len(b), err, 6*d.Size())
			}
			v, err := x.Sum().Float64()
			if err != nil || v != 6 {
				t.Errorf("sum %v, %v, want 6, nil", v, err)
			}
		})
	}
	spec := torch.Spec{Name: "images", DType: torch.Float32, Shape: []int64{3, 4, 5}, MemoryFormat: torch.ChannelsLast}
	x, err := torch.EmptySpec(cuda.CPU, spec, 2)
	must(t, x, err)
	if !reflect.DeepEqual(x.Shape(), []int64{2, 3, 4, 5}) || !x.IsContiguous(torch.ChannelsLast) ||
		x.IsContiguous(torch.Contiguous) || spec.Bytes() != 240 {
		t.Errorf("got %v %v", x.Shape(), x.Strides())
	}
	scalar, err := torch.Full(cuda.CPU, torch.Int64, 41)
	must(t, scalar, err)
	if v, err := scalar.AddInt(1).Int64(); v != 42 || err != nil ||
		scalar.AddInt(1).DType() != torch.Int64 || len(scalar.Shape()) != 0 {
		t.Errorf("AddInt(1) = %v, %v with %v, want 42, nil with int64 and no dimensions",
			v, err, scalar.AddInt(1))
	}
	r, err := torch.Arange(4)
	if got, err := must(t, r, err).Int64s(); err != nil || !reflect.DeepEqual(got, []int64{0, 1, 2, 3}) {
		t.Errorf("got %v, %v, want [0 1 2 3], nil", got, err)
	}
	u, err := torch.FromBytes([]byte{1, 2, 255})
	if got, err := must(t, u, err).Int64s(); err != nil || !reflect.DeepEqual(got, []int64{1, 2, 255}) {
		t.Errorf("got %v, %v, want [1 2 255], nil", got, err)
	}
	empty := floats(t, nil, 0, 3)
	if got, err := empty.Float32s(); err != nil || len(got) != 0 {
		t.Errorf("got %v, %v, want length 0, nil", got, err)
	}
	transposed := floats(t, []float32{1, 2, 3, 4, 5, 6}, 2, 3).T()
	wantValues(t, transposed, 1, 4, 2, 5, 3, 6)
	if _, err := transposed.Bytes(); err == nil {
		t.Error("Bytes() of a transposed tensor: got no error, want one")
	}
}

func TestFromMemorySharesTheMemory(t *testing.T) {
	p, err := cuda.NewPinned(16)
	if errors.Is(err, cuda.ErrNoDevice) {
		t.Skip("no pinned memory without a GPU")
	}
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	x, err := torch.FromMemory(p.Bytes(), torch.Int32, 4)
	must(t, x, err)
	p.Bytes()[4] = 7
	if got, err := x.Int64s(); err != nil || !reflect.DeepEqual(got, []int64{0, 7, 0, 0}) {
		t.Errorf("got %v, %v, want [0 7 0 0], nil", got, err)
	}
	if _, err := torch.FromMemory(p.Bytes(), torch.Int32, 5); err == nil {
		t.Error("FromMemory of more elements than the memory holds: got no error, want one")
	}
}

func TestConstructorsCompute(t *testing.T) {
	o := torch.TensorOptions{Device: cuda.CPU, DType: torch.Float32}
	wantValues(t, must2(o.Linspace(1, 2, 5))(t), 1, 1.25, 1.5, 1.75, 2)
	wantValues(t, must2(o.Eye(2))(t), 1, 0, 0, 1)
	o.DType = torch.Int64
	if err := torch.ManualSeed(1); err != nil {
		t.Fatal(err)
	}
	// torch.manual_seed(1); torch.randint(3, 9, (2, 3)); torch.randperm(5)
	wantValues(t, must2(o.RandInt(3, 9, 2, 3))(t), 4, 8, 3, 5, 4, 4)
	wantValues(t, must2(o.RandPerm(5))(t), 1, 2, 4, 3, 0)
	before := settled(t)
	for i, c := range []func() (*torch.Tensor, error){
		func() (*torch.Tensor, error) { return o.RandInt(5, 5, 2) },
		func() (*torch.Tensor, error) { return o.Linspace(0, 1, -1) },
		func() (*torch.Tensor, error) { return o.Eye(-1) },
	} {
		if x, err := c(); err == nil || x.Err() == nil {
			t.Errorf("case %d: got the errors %v and %v, want both", i, err, x.Err())
		}
	}
	if n := torch.LiveTensors(); n > before {
		t.Errorf("refused calls left %d tensors, want none", n-before)
	}
}
