package serve_test

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/serve"
	"github.com/torchstream/torchstream/tensor"
	"github.com/torchstream/torchstream/torch"
)

// BenchmarkBatcherAtFullLoad compares a Batcher under full load with a closed loop of full batches
// of the same network, on the CPU. It alternates the two, and reports the median time of a batch of
// each, and how much longer the Batcher's is.
func BenchmarkBatcherAtFullLoad(b *testing.B) {
	const batch, batches, side = 16, 8, 64
	net := nn.NewSequential(nn.NewConv2d(3, 32, 3, nn.Conv2dOptions{Padding: 1}), nn.NewReLU(),
		nn.NewConv2d(32, 32, 3, nn.Conv2dOptions{Stride: 2}), nn.NewReLU(), nn.NewAdaptiveAvgPool2d(1), nn.NewFlatten(),
		nn.NewLinear(32, 100, nn.LinearOptions{}))
	defer nn.Close(net)
	run := func(_ context.Context, x *torch.Tensor) ([]*torch.Tensor, error) {
		return []*torch.Tensor{net.Forward(x)}, nil
	}
	input := tensor.Spec{DType: torch.Float32, Shape: []int64{3, side, side}}
	batcher := newBatcher(b, serve.BatcherOptions{Model: always(run), Devices: []cuda.Device{cuda.CPU}, MaxBatch: batch,
		Queue: 4 * batch, Input: input})
	row := make([]float32, 3*side*side)
	for i := range row {
		row[i] = float32(i%97) / 97
	}
	x, err := torch.EmptySpec(cuda.CPU, input, batch)
	if err != nil {
		b.Fatal(err)
	}
	defer x.Close()
	memory, err := torch.Memory[float32](x)
	if err != nil {
		b.Fatal(err)
	}
	closedLoop := func() {
		for range batches {
			for i := range batch {
				copy(memory[i*len(row):], row)
			}
			scope := torch.NewScope("batch")
			if _, err := net.Forward(x.In(scope).NoGrad()).Float32s(); err != nil {
				b.Fatal(err)
			}
			scope.Close()
		}
	}
	// Twice the requests of a batch wait or run at any time.
	fullLoad := func() {
		var clients sync.WaitGroup
		for range 2 * batch {
			clients.Go(func() {
				for range batches / 2 {
					if _, err := batcher.Do(b.Context(), serve.Request{Row: serve.RowOf(row)}); err != nil {
						b.Error(err)
					}
				}
			})
		}
		clients.Wait()
	}
	var loops, loads []time.Duration
	timed := func(fn func()) time.Duration {
		began := time.Now()
		fn()
		return time.Since(began) / batches
	}
	closedLoop()
	fullLoad()
	for b.Loop() {
		loops, loads = append(loops, timed(closedLoop)), append(loads, timed(fullLoad))
	}
	slices.Sort(loops)
	slices.Sort(loads)
	loop, load := loops[len(loops)/2], loads[len(loads)/2]
	b.ReportMetric(loop.Seconds()*1e3, "loop-ms/batch")
	b.ReportMetric(load.Seconds()*1e3, "batcher-ms/batch")
	b.ReportMetric(100*(load.Seconds()/loop.Seconds()-1), "cost-%")
	st := batcher.Stats()
	b.ReportMetric(float64(st.Rows)/float64(st.Ran.Count), "rows/batch")
}
