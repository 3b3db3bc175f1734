package serve_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/imageloader/decode"
	"github.com/torchstream/torchstream/imageloader/transform"
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
	batch, rounds int // rows of a batch, batches of a measurement
	input         tensor.Spec
	rows          [][]float32 // of three batches, each with memory to itself
	images        [][]byte    // instead of rows: photographs that the GPU decodes
	decode        serve.Options
}

// BenchmarkBatcherAtFullLoad compares a Batcher under full load with a closed loop of full batches
// of the same network: a small one on the CPU, and a ResNet-50 with bfloat16 on a GPU, as a graph
// in both. It alternates them, and reports the median time of a batch of each, and how much longer
// the Batcher's is: for the medians, and for the fastest measurements, which other load on the
// machine disturbs least. On a GPU it also measures two closed loops at a time, each with a stream,
// and the parts of a closed loop; and all of it for photographs that the GPU decodes.
func BenchmarkBatcherAtFullLoad(b *testing.B) {
	b.Run("cpu", func(b *testing.B) {
		net := nn.NewSequential(nn.NewConv2d(3, 32, 3, nn.Conv2dOptions{Padding: 1}), nn.NewReLU(),
			nn.NewConv2d(32, 32, 3, nn.Conv2dOptions{Stride: 2}), nn.NewReLU(), nn.NewAdaptiveAvgPool2d(1),
			nn.NewFlatten(), nn.NewLinear(32, 100, nn.LinearOptions{}))
		defer nn.Close(net)
		l := newFullLoad(cuda.CPU, 16, 24, 64)
		l.run = func(_ context.Context, x *torch.Tensor) ([]*torch.Tensor, error) {
			return []*torch.Tensor{net.Forward(x)}, nil
		}
		l.measure(b)
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
		l := newFullLoad(0, 32, 96, 224)
		l.run = func(_ context.Context, x *torch.Tensor) ([]*torch.Tensor, error) {
			return []*torch.Tensor{net.Forward(x.Autocast(torch.BFloat16))}, nil
		}
		b.Run("rows", l.measure)
		for i := range l.batch {
			l.images = append(l.images, synthetic(b, uint64(i)))
		}
		l.decode = serve.Options{OnDevice: true, Decode: decode.Options{Transform: transform.Eval(256, 224)}}
		b.Run("images", l.measure)
	})
}

func newFullLoad(device cuda.Device, batch, rounds int, side int64) *fullLoad {
	l := &fullLoad{device: device, batch: batch, rounds: rounds,
		input: tensor.Spec{DType: torch.Float32, Shape: []int64{3, side, side}, MemoryFormat: torch.ChannelsLast}}
	for range 3 * batch {
		row := make([]float32, l.input.Elements())
		for i := range row {
			row[i] = float32(i%97) / 97
		}
		l.rows = append(l.rows, row)
	}
	return l
}

// measure measures all ways in turn, and reports the medians.
func (l *fullLoad) measure(b *testing.B) {
	// With a delay all batches are full, as in a load that never stops.
	o := serve.BatcherOptions{Model: always(l.run), Devices: []cuda.Device{l.device}, MaxBatch: l.batch,
		Buckets: []int{l.batch}, Queue: 4 * l.batch, Images: l.decode, MaxDelay: time.Second}
	if l.images == nil {
		o.Input = l.input
	}
	batcher, loop := newBatcher(b, o), newClosedLoop(b, l)
	ways := map[string]func() time.Duration{
		"loop":    func() time.Duration { return loop.timed(b, l.rounds, (*closedLoop).batch) },
		"batcher": func() time.Duration { return l.underLoad(b, batcher) },
	}
	if l.device != cuda.CPU {
		second := newClosedLoop(b, l)
		ways["two-loops"] = func() time.Duration { return l.twoLoops(b, loop, second) }
		for name, part := range l.parts() {
			ways[name] = func() time.Duration { return loop.timed(b, l.rounds, part) }
		}
	}
	took := map[string][]time.Duration{}
	for _, way := range ways {
		way() // captures the graphs
	}
	before := batcher.Stats()
	for b.Loop() {
		for name, way := range ways {
			took[name] = append(took[name], way())
		}
	}
	median := map[string]float64{} // in milliseconds
	for name, list := range took {
		slices.Sort(list)
		median[name] = list[len(list)/2].Seconds() * 1e3
		b.ReportMetric(median[name], name+"-ms/batch")
	}
	b.ReportMetric(100*(median["batcher"]/median["loop"]-1), "cost-%")
	b.ReportMetric(100*(took["batcher"][0].Seconds()/took["loop"][0].Seconds()-1), "fastest-cost-%")
	if l.device != cuda.CPU {
		b.ReportMetric(100*(median["batcher"]/median["two-loops"]-1), "cost-over-two-%")
	}
	// The batches after the end of a measurement are included: up to three of each.
	after := batcher.Stats()
	batches := after.Ran.Count - before.Ran.Count
	b.ReportMetric(float64(after.Rows-before.Rows)/float64(batches), "rows/batch")
	b.ReportMetric((after.Ran.Sum-before.Ran.Sum).Seconds()*1e3/float64(batches), "ran-ms/batch")
}

// parts returns the parts of a closed loop on a GPU.
func (l *fullLoad) parts() map[string]func(*closedLoop) error {
	if l.images != nil {
		return map[string]func(*closedLoop) error{"decode": (*closedLoop).uploaded, "run-and-read": (*closedLoop).answer}
	}
	return map[string]func(*closedLoop) error{"fill": (*closedLoop).fill, "fill-by-rows": (*closedLoop).fillByRows,
		"upload": (*closedLoop).uploaded, "run-and-read": (*closedLoop).answer}
}

// underLoad sends requests from three batches' clients, so that two workers of a GPU have full
// batches, and returns the time of a batch. It measures while all clients send: when some of them
// have left, the last requests would wait for the delay.
func (l *fullLoad) underLoad(b *testing.B, batcher *serve.Batcher) time.Duration {
	ctx, stop := context.WithCancel(b.Context())
	defer stop()
	warm, all := int64(8*l.batch), int64((8+l.rounds)*l.batch)
	var answers atomic.Int64
	var began, ended time.Time
	var clients sync.WaitGroup
	for i, row := range l.rows {
		r := serve.Request{Row: serve.RowOf(row)}
		if l.images != nil {
			r = serve.Request{Image: l.images[i%len(l.images)]}
		}
		clients.Go(func() {
			for {
				_, err := batcher.Do(ctx, r)
				if err != nil {
					if !errors.Is(err, context.Canceled) {
						b.Error(err)
						stop()
					}
					return
				}
				switch answers.Add(1) {
				case warm:
					began = time.Now()
				case all:
					ended = time.Now()
					stop()
				}
			}
		})
	}
	clients.Wait()
	return ended.Sub(began) / time.Duration(l.rounds)
}

// twoLoops runs two closed loops, each on a stream, and returns the time of a batch of both.
func (l *fullLoad) twoLoops(b *testing.B, loops ...*closedLoop) time.Duration {
	began := time.Now()
	var both sync.WaitGroup
	for _, c := range loops {
		both.Go(func() { c.timed(b, l.rounds/2, (*closedLoop).batch) })
	}
	both.Wait()
	return time.Since(began) / time.Duration(l.rounds/2*2)
}

// closedLoop has the memory of one loop of full batches.
type closedLoop struct {
	l       *fullLoad
	stream  cuda.Stream // on a GPU
	memory  []float32   // of host
	host, x *torch.Tensor
	graphed *torch.Graphed
	decoder *serve.Decoder // of l.images
	next    int            // of l.rows
}

func newClosedLoop(b *testing.B, l *fullLoad) *closedLoop {
	c := &closedLoop{l: l}
	o := torch.TensorOptions{Device: cuda.CPU, DType: l.input.DType, MemoryFormat: l.input.MemoryFormat,
		Pinned: l.device != cuda.CPU}
	var err error
	if c.host, err = o.Empty(append([]int64{int64(l.batch)}, l.input.Shape...)...); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { c.host.Close() })
	if c.memory, err = torch.Memory[float32](c.host); err != nil {
		b.Fatal(err)
	}
	c.x = c.host
	if l.device != cuda.CPU {
		c.stream = cudatest.Stream(b, l.device)
		if c.x, err = torch.EmptySpec(l.device, l.input, int64(l.batch)); err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { c.x.Close() })
	}
	if l.images != nil {
		c.decoder = newDecoder(b, l.decode)
	}
	c.graphed = torch.NewGraphed(func(x []*torch.Tensor) ([]*torch.Tensor, error) { return l.run(b.Context(), x[0]) },
		torch.GraphedOptions{Device: l.device, ReplayFirst: true})
	b.Cleanup(func() { c.graphed.Close() })
	return c
}

// timed calls step for each of n batches, on the loop's stream, and returns the time of a batch.
func (c *closedLoop) timed(b *testing.B, n int, step func(*closedLoop) error) time.Duration {
	began := time.Now()
	steps := func() error {
		for range n {
			if err := step(c); err != nil {
				return err
			}
		}
		return nil
	}
	var err error
	if c.l.device == cuda.CPU {
		err = steps()
	} else {
		err = cuda.WithStream(c.stream, steps)
	}
	if err != nil {
		b.Error(err)
	}
	return time.Since(began) / time.Duration(n)
}

func (c *closedLoop) batch() error {
	if c.decoder == nil {
		if err := c.fill(); err != nil {
			return err
		}
	}
	err := c.upload()
	if err == nil {
		err = c.answer()
	}
	return err
}

// fill copies a batch's rows to the host memory.
func (c *closedLoop) fill() error {
	for i := range c.l.batch {
		c.copyRow(i)
	}
	c.next += c.l.batch
	return nil
}

// fillByRows is fill with a goroutine for each row.
func (c *closedLoop) fillByRows() error {
	var rows sync.WaitGroup
	for i := range c.l.batch {
		rows.Go(func() { c.copyRow(i) })
	}
	rows.Wait()
	c.next += c.l.batch
	return nil
}

func (c *closedLoop) copyRow(i int) {
	row := c.l.rows[(c.next+i)%len(c.l.rows)]
	copy(c.memory[i*len(row):], row)
}

// upload makes the network's input.
func (c *closedLoop) upload() error {
	switch {
	case c.decoder != nil:
		scope := torch.NewScope("images")
		defer scope.Close()
		x, err := c.decoder.Batch(context.Background(), scope, c.l.images...)
		if err != nil {
			return err
		}
		return c.x.CopyFrom(x, torch.CopyOptions{NonBlocking: true})
	case c.x == c.host:
		return nil
	}
	return c.x.CopyFrom(c.host, torch.CopyOptions{NonBlocking: true})
}

func (c *closedLoop) uploaded() error {
	return errors.Join(c.upload(), c.stream.Synchronize())
}

// answer runs the network, and reads its output.
func (c *closedLoop) answer() error {
	scope := torch.NewScope("batch")
	defer scope.Close()
	outputs, err := c.graphed.Call(c.x.In(scope).NoGrad())
	if err == nil {
		_, err = outputs[0].Float32s()
	}
	return err
}
