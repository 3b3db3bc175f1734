package hostblock

import (
	"runtime"
	"slices"
	"testing"

	"github.com/torchstream/torchstream/internal/resident"
	"github.com/torchstream/torchstream/torch"
)

func TestTensorsHaveTheirSpecsAndSeparateMemory(t *testing.T) {
	specs := []torch.Spec{
		{Name: "a", DType: torch.Float32, Shape: []int64{3, 5}},
		{Name: "scalar", DType: torch.Int64, Shape: nil},
		{Name: "empty", DType: torch.Float64, Shape: []int64{0, 4}},
		{Name: "bool", DType: torch.Bool, Shape: []int64{7}},
		{Name: "half", DType: torch.BFloat16, Shape: []int64{1, 1, 9}},
	}
	if got := Bytes(specs); got != 64+64+0+64+64 {
		t.Errorf("got %d bytes, want 256", got)
	}
	scope := torch.NewScope("block")
	defer scope.Close()
	all, err := New(scope, specs)
	if err != nil {
		t.Fatal(err)
	}
	for i, x := range all {
		if x.DType() != specs[i].DType || !slices.Equal(x.Shape(), specs[i].Shape) || !x.IsContiguous(torch.Contiguous) {
			t.Errorf("%s: got %v%v, want %v%v", specs[i].Name, x.DType(), x.Shape(), specs[i].DType, specs[i].Shape)
		}
		if err := x.Fill_(float64(i % 2)).Err(); err != nil {
			t.Fatal(err)
		}
	}
	for i, x := range all {
		values, err := x.ToDType(torch.Float64).Float64s()
		if err != nil {
			t.Fatal(err)
		}
		if slices.ContainsFunc(values, func(v float64) bool { return v != float64(i%2) }) {
			t.Errorf("%s has %v, want only %d: another tensor has overwritten it", specs[i].Name, values, i%2)
		}
	}
	if none, err := New(scope, nil); err != nil || len(none) != 0 {
		t.Errorf("no tensors: got %v, %v, want none", none, err)
	}
}

// malloc has a heap for each of several threads, and each would keep what its thread has freed.
func TestThreadsKeepNoCopies(t *testing.T) {
	const size, threads = 8 << 20, 6
	spec := torch.Spec{DType: torch.Float32, Shape: []int64{size / 4}}
	use := func() int64 {
		done := make(chan error)
		go func() {
			runtime.LockOSThread() // the thread ends with the goroutine
			scope := torch.NewScope("block")
			all, err := New(scope, []torch.Spec{spec, spec, spec})
			for _, x := range all {
				if err == nil {
					err = x.Fill_(1).Err()
				}
			}
			scope.Close()
			done <- err
		}()
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		bytes, err := resident.Bytes()
		if err != nil {
			t.Skip("the system does not tell the process's memory: ", err)
		}
		return bytes
	}
	first, last := use(), int64(0)
	for range threads {
		last = use()
	}
	if grown := last - first; grown > 2*size {
		t.Errorf("%d threads took %d bytes more than one, want at most %d", threads+1, grown, 2*size)
	}
}
