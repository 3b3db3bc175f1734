package serve_test

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/models"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/serve"
	"github.com/torchstream/torchstream/tensor"
	"github.com/torchstream/torchstream/torch"
)

// fullLoad is a network with the sizes at which BenchmarkBatcherAtFullLoad measures it.
type fullLoad struct {
	device        cuda.Device
	run           serve.Run
	batch, rounds int   // rows of a batch, batches of a measurement
	side          int64 // of an image
}

// BenchmarkBatcherAtFullLoad compares a Batcher under full load with a closed loop of full batches
// of the same network: a small one on the CPU, and a ResNet-50 with bfloat16 on a GPU, as a graph
// in both. It alternates the two, and reports the median time of a batch of each, and how much
// longer the Batcher's is: for the medians, and for the fastest measurements, which other load on
// the machine disturbs least.
func BenchmarkBatcherAtFullLoad(b *testing.B) {
	b.Run("cpu", func(b *testing.B) {
		net := nn.NewSequential(nn.NewConv2d(3, 32, 3, nn.Conv2dOptions{Padding: 1}), nn.NewReLU(),
			nn.NewConv2d(32, 32, 3, nn.Conv2dOptions{Stride: 2}), nn.NewReLU(), nn.NewAdaptiveAvgPool2d(1),
			nn.NewFlatten(), nn.NewLinear(32, 100, nn.LinearOptions{}))
		defer nn.Close(net)
		measure(b, fullLoad{cuda.CPU, func(_ context.Context, x *torch.Tensor) ([]*torch.Tensor, error) {
			return []*torch.Tensor{net.Forward(x)}, nil
		}, 16, 8, 64})
	})
	if cuda.DeviceCount() == 0 {
		return
	}
	b.Run("gpu", func(b *testing.B) {
		net, err := models.NewResNet50(models.ResNetOptions{})
		if err == nil {
			err = nn.To(net, 0)
		}
		if err != nil {
			b.Fatal(err)
		}
		defer nn.Close(net)
		nn.Eval(net)
		measure(b, fullLoad{0, func(_ context.Context, x *torch.Tensor) ([]*torch.Tensor, error) {
			return []*torch.Tensor{net.Forward(x.Autocast(torch.BFloat16))}, nil
		}, 32, 32, 224})
	})
}

func measure(b *testing.B, l fullLoad) {
	input := tensor.Spec{DType: torch.Float32, Shape: []int64{3, l.side, l.side}, MemoryFormat: torch.ChannelsLast}
	row := make([]float32, input.Elements())
	for i := range row {
		row[i] = float32(i%97) / 97
	}
	// With a delay all batches are full, as in a load that never stops.
	batcher := newBatcher(b, serve.BatcherOptions{Model: always(l.run), Devices: []cuda.Device{l.device},
		MaxBatch: l.batch, Buckets: []int{l.batch}, Queue: 4 * l.batch, Input: input, MaxDelay: 100 * time.Millisecond})
	loop := closedLoop(b, l, input, row)
	// Three batches' requests wait or run at any time, so that two workers of a GPU have full
	// batches.
	load := func() {
		var clients sync.WaitGroup
		for range 3 * l.batch {
			clients.Go(func() {
				for range l.rounds {
					if _, err := batcher.Do(b.Context(), serve.Request{Row: serve.RowOf(row)}); err != nil {
						b.Error(err)
					}
				}
			})
		}
		clients.Wait()
	}
	var loops, loads []time.Duration
	timed := func(fn func(), batches int) time.Duration {
		began := time.Now()
		fn()
		return time.Since(began) / time.Duration(batches)
	}
	loop()
	load()
	for b.Loop() {
		loops, loads = append(loops, timed(loop, l.rounds)), append(loads, timed(load, 3*l.rounds))
	}
	slices.Sort(loops)
	slices.Sort(loads)
	one, other := loops[len(loops)/2].Seconds(), loads[len(loads)/2].Seconds()
	b.ReportMetric(one*1e3, "loop-ms/batch")
	b.ReportMetric(other*1e3, "batcher-ms/batch")
	b.ReportMetric(100*(other/one-1), "cost-%")
	b.ReportMetric(100*(loads[0].Seconds()/loops[0].Seconds()-1), "fastest-cost-%")
	st := batcher.Stats()
	b.ReportMetric(float64(st.Rows)/float64(st.Ran.Count), "rows/batch")
}

// closedLoop returns a function that fills and runs l.rounds full batches one after the other.
func closedLoop(b *testing.B, l fullLoad, input tensor.Spec, row []float32) func() {
	o := torch.TensorOptions{Device: cuda.CPU, DType: input.DType, MemoryFormat: input.MemoryFormat,
		Pinned: l.device != cuda.CPU}
	host, err := o.Empty(append([]int64{int64(l.batch)}, input.Shape...)...)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { host.Close() })
	memory, err := torch.Memory[float32](host)
	if err != nil {
		b.Fatal(err)
	}
	x := host
	if l.device != cuda.CPU {
		if x, err = torch.EmptySpec(l.device, input, int64(l.batch)); err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { x.Close() })
	}
	graphed := torch.NewGraphed(func(x []*torch.Tensor) ([]*torch.Tensor, error) { return l.run(b.Context(), x[0]) },
		torch.GraphedOptions{Device: l.device, ReplayFirst: true})
	b.Cleanup(func() { graphed.Close() })
	one := func() error {
		for i := range l.batch {
			copy(memory[i*len(row):], row)
		}
		if x != host {
			if err := x.CopyFrom(host, torch.CopyOptions{NonBlocking: true}); err != nil {
				return err
			}
		}
		scope := torch.NewScope("batch")
		defer scope.Close()
		outputs, err := graphed.Call(x.In(scope).NoGrad())
		if err == nil {
			_, err = outputs[0].Float32s()
		}
		return err
	}
	return func() {
		for range l.rounds {
			if err := one(); err != nil {
				b.Fatal(err)
			}
		}
	}
}
