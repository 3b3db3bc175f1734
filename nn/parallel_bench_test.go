package nn_test

import (
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/torch"
)

// BenchmarkParallel measures the host time of a forward pass of four branches with one small
// operator each, concurrently and in turn. The difference is the cost of Parallel.
func BenchmarkParallel(b *testing.B) {
	cudatest.RequireGPUs(b, 1)
	var branches []nn.Module
	for range 4 {
		branches = append(branches, quick(2))
	}
	inTurn := nn.Func(func(x *torch.Tensor) *torch.Tensor {
		y := branches[0].Forward(x)
		for _, m := range branches[1:] {
			y = y.Add(m.Forward(x))
		}
		return y
	})
	parallel := nn.NewParallel(nn.Sum(), branches...)
	defer parallel.Close()
	stream, err := cuda.NewStream(gpu, cuda.StreamOptions{})
	if err != nil {
		b.Fatal(err)
	}
	for _, c := range []struct {
		name string
		m    nn.Module
	}{{"in turn", inTurn}, {"Parallel", parallel}} {
		b.Run(c.name, func(b *testing.B) {
			err := cuda.WithStream(stream, func() error {
				x, err := torch.Ones(gpu, torch.Float32, 1024)
				if err != nil {
					return err
				}
				defer x.Close()
				n := 0
				for b.Loop() {
					turn := torch.NewScope("turn")
					if err := c.m.Forward(x.NoGrad().In(turn)).Err(); err != nil {
						return err
					}
					turn.Close()
					if n++; n%64 == 0 { // drain the queue, which is not measured
						b.StopTimer()
						if err := stream.Synchronize(); err != nil {
							return err
						}
						b.StartTimer()
					}
				}
				return nil
			})
			if err != nil {
				b.Fatal(err)
			}
		})
	}
}
