package torch_test

import (
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/torch"
)

// BenchmarkOperator measures an operator on one element from Go. The metric cpp-ns/op is the same
// at:: call in C++.
func BenchmarkOperator(b *testing.B) {
	one := func(b *testing.B) *torch.Tensor {
		x, err := torch.Ones(cuda.CPU, torch.Float32, 1)
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { x.Close() })
		return x
	}
	peer := func(b *testing.B) (inPlace, outOfPlace, held float64) {
		b.StopTimer()
		inPlace, outOfPlace, held, err := capi.BenchAdd(capi.DeviceCPU, 200_000)
		if err != nil {
			b.Fatal(err)
		}
		return inPlace, outOfPlace, held
	}
	b.Run("Add_", func(b *testing.B) {
		x, y := one(b), one(b)
		b.ReportAllocs()
		for b.Loop() {
			x.Add_(y)
		}
		cpp, _, _ := peer(b)
		b.ReportMetric(cpp, "cpp-ns/op")
		if err := x.Add_(y).Err(); err != nil {
			b.Fatal(err)
		}
	})
	b.Run("Add/scope", func(b *testing.B) {
		x, y := one(b), one(b)
		b.ReportAllocs()
		n := 0
		s := torch.NewScope("bench")
		xs := x.In(s)
		for b.Loop() {
			xs.Add(y)
			if n++; n == 400 {
				s.Close()
				s = torch.NewScope("bench")
				xs, n = x.In(s), 0
			}
		}
		s.Close()
		_, _, cpp := peer(b)
		b.ReportMetric(cpp, "cpp-ns/op")
	})
	b.Run("Call add_", func(b *testing.B) {
		x, y := one(b), one(b)
		b.ReportAllocs()
		for b.Loop() {
			if _, err := torch.Call("add_.Tensor", x, y); err != nil {
				b.Fatal(err)
			}
		}
		cpp, _, _ := peer(b)
		b.ReportMetric(cpp, "cpp-ns/op")
	})
	b.Run("Add/close", func(b *testing.B) {
		x, y := one(b), one(b)
		b.ReportAllocs()
		for b.Loop() {
			x.Add(y).Close()
		}
		_, cpp, _ := peer(b)
		b.ReportMetric(cpp, "cpp-ns/op")
	})
}
