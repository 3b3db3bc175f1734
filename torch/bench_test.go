package torch_test

import (
	"slices"
	"testing"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

// BenchmarkOperator measures an operator on one element from Go. `torchstream-lab streams` compares
// it with the same at:: call in C++.
func BenchmarkOperator(b *testing.B) {
	one := func(b *testing.B) *torch.Tensor {
		x, err := torch.Ones(cuda.CPU, torch.Float32, 1)
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { x.Close() })
		return x
	}
	b.Run("Add_", func(b *testing.B) {
		x, y := one(b), one(b)
		b.ReportAllocs()
		for b.Loop() {
			x.Add_(y)
		}
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
	})
	b.Run("Call add_", func(b *testing.B) {
		x, y := one(b), one(b)
		b.ReportAllocs()
		for b.Loop() {
			if _, err := torch.Call("add_.Tensor", x, y); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("Add/close", func(b *testing.B) {
		x, y := one(b), one(b)
		b.ReportAllocs()
		for b.Loop() {
			x.Add(y).Close()
		}
	})
}

// BenchmarkCallBesideMethod measures how much longer torch.Call1 takes than the method of the same
// operator. Rounds of both alternate. The figures are their 5th percentiles, which other jobs of
// the machine change least.
func BenchmarkCallBesideMethod(b *testing.B) {
	ones := func(shape ...int64) *torch.Tensor {
		x, err := torch.Ones(cuda.CPU, torch.Float32, shape...)
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { x.Close() })
		return x
	}
	m, v, w := ones(4, 4), ones(4), ones(4)
	dims := []int64{1}
	var shape any = []int64{4}
	type T = *torch.Tensor
	for _, of := range []struct {
		name         string
		operand      T
		method, call func(x T) T
	}{
		{"Add", v, func(x T) T { return x.Add(w) }, func(x T) T { return torch.Call1("add.Tensor", x, w) }},
		{"Transpose", m, func(x T) T { return x.Transpose(0, 1) },
			func(x T) T { return torch.Call1("transpose.int", x, 0, 1) }},
		{"SumDim", m, func(x T) T { return x.SumDim(dims, false) },
			func(x T) T { return torch.Call1("sum.dim_IntList", x, dims, false) }},
		{"LayerNorm", m, func(x T) T { return x.LayerNorm([]int64{4}, v, w, 1e-5) },
			func(x T) T { return torch.Call1("layer_norm", x, []int64{4}, v, w, 1e-5) }},
		{"LayerNorm with a list made before", m, func(x T) T { return x.LayerNorm([]int64{4}, v, w, 1e-5) },
			func(x T) T { return torch.Call1("layer_norm", x, shape, v, w, 1e-5) }},
	} {
		b.Run(of.name, func(b *testing.B) {
			const calls = 100
			round := func(run func(x T) T) float64 {
				s := torch.NewScope("round")
				defer s.Close()
				x := of.operand.In(s)
				begun := time.Now()
				for range calls {
					run(x)
				}
				return float64(time.Since(begun).Nanoseconds()) / calls
			}
			var methods, named []float64
			for b.Loop() {
				methods, named = append(methods, round(of.method)), append(named, round(of.call))
			}
			slices.Sort(methods)
			slices.Sort(named)
			low := len(methods) / 20
			b.ReportMetric(methods[low], "method-ns")
			b.ReportMetric(named[low]-methods[low], "more-ns")
			b.ReportMetric(0, "ns/op") // of a pair of rounds
		})
	}
}
