package aoti

import (
	"context"
	"sync"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/internal/hostblock"
	"github.com/torchstream/torchstream/torch"
)

func gpuExamples(t testing.TB) map[string]example {
	t.Helper()
	cudatest.RequireGPUs(t, 1)
	return examples(t, true)
}

func TestGPUModelsEqualPyTorch(t *testing.T) {
	testModels(t, gpuExamples(t))
}

// 64 goroutines on 4 streams share the instances.
func TestGPUModelsOnStreams(t *testing.T) {
	for name, e := range gpuExamples(t) {
		t.Run(name, func(t *testing.T) {
			streams := make([]cuda.Stream, 4)
			for i := range streams {
				s, err := cuda.NewStream(e.model.Device(), cuda.StreamOptions{})
				if err != nil {
					t.Fatal(err)
				}
				streams[i] = s
			}
			if err := e.model.Device().Synchronize(); err != nil { // afterwards the inputs are ready for all streams
				t.Fatal(err)
			}
			var running sync.WaitGroup
			for i := range 64 {
				running.Go(func() {
					for range 10 {
						if err := cuda.WithStream(streams[i%len(streams)], func() error { e.check(t); return nil }); err != nil {
							t.Error(err)
						}
					}
				})
			}
			running.Wait()
		})
	}
}

func TestGPUGraphOfARunReplays(t *testing.T) {
	for name, e := range gpuExamples(t) {
		t.Run(name, func(t *testing.T) {
			e.check(t) // the first run loads kernels, which is not allowed in a capture
			size := e.sizes[0]
			graphed := torch.NewGraphed(func(x []*torch.Tensor) ([]*torch.Tensor, error) {
				return e.model.Run(context.Background(), x...)
			}, torch.GraphedOptions{})
			defer graphed.Close()
			for range 3 { // capture, and two replays
				if _, err := graphed.Call(size.inputs...); err != nil {
					t.Fatal(err)
				}
			}
			bytes := hostblock.Bytes(e.model.Weights())
			if err := e.model.Close(); err != nil { // the graph must keep the weights
				t.Fatal(err)
			}
			filled, err := torch.Zeros(e.model.Device(), torch.Uint8, max(1, bytes)) // new memory of this size
			if err != nil {
				t.Fatal(err)
			}
			defer filled.Close()
			outputs, err := graphed.Call(size.inputs...)
			if err != nil {
				t.Fatal(err)
			}
			e.sameBits(t, outputs, size)
		})
	}
}

func BenchmarkGPUGraph(b *testing.B) {
	for name, e := range gpuExamples(b) {
		b.Run(name, func(b *testing.B) {
			e.check(b)
			size := e.sizes[0]
			graphed := torch.NewGraphed(func(x []*torch.Tensor) ([]*torch.Tensor, error) {
				return e.model.Run(context.Background(), x...)
			}, torch.GraphedOptions{})
			defer graphed.Close()
			for range b.N + 1 {
				if _, err := graphed.Call(size.inputs...); err != nil {
					b.Fatal(err)
				}
			}
			if err := e.model.Device().Synchronize(); err != nil {
				b.Fatal(err)
			}
		})
	}
}

func BenchmarkGPURun(b *testing.B) {
	for name, e := range gpuExamples(b) {
		b.Run(name, func(b *testing.B) {
			e.check(b)
			b.ResetTimer()
			for range b.N {
				scope := torch.NewScope("run")
				e.run(b, scope, e.sizes[0])
				scope.Close()
			}
			if err := e.model.Device().Synchronize(); err != nil {
				b.Fatal(err)
			}
		})
	}
}
