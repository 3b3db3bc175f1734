//go:build linux

package distributed

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/torch"
)

// scales is a module without matrix products, so it also works on null devices, which compute
// nothing.
type scales struct{ row, all *torch.Tensor }

func (s scales) Forward(x *torch.Tensor) *torch.Tensor {
	return x.Mul(s.row).Mul(s.all.View(10, 100))
}

func (s scales) Parts() nn.Parts {
	return nn.Parts{Parameters: []torch.Named{{Name: "row", Tensor: s.row}, {Name: "all", Tensor: s.all}}}
}

// aloneOnGPU returns a group of one rank on the first GPU, without NCCL.
func aloneOnGPU(t *testing.T) *Group {
	t.Helper()
	o := quick
	o.CPU = true
	o.Environment = &Environment{Launcher: "test", Size: 1, LocalSize: 1, Address: "127.0.0.1", Port: freePort(t)}
	g, err := Init(context.Background(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { g.Close() })
	g.job.device = 0
	return g
}

// The stream sanitizer finds no race in sharded training. It checks the order of gathers,
// computation, reductions, steps and reuse of memory. The job has only one rank, so NCCL does not
// run.
func TestSanitizerOfShardedBlocks(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	g := aloneOnGPU(t)
	for name, options := range map[string]FullyShardedOptions{
		"stage 3": {}, "stage 2": {KeepAfterForward: true},
		"stage 3, gathered in bfloat16": {GatherDType: torch.BFloat16},
	} {
		for _, graph := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, graph: %v", name, graph), func(t *testing.T) {
				on := cudatest.Stream(t, 0)
				cudatest.NoFindings(t)
				if err := cuda.WithStream(on, func() error { return trainScales(g, options, graph) }); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

// withBuffer is a module with a buffer.
type withBuffer struct {
	nn.Module
	buffer *torch.Tensor
}

func (m withBuffer) Parts() nn.Parts {
	p := m.Module.Parts()
	p.Buffers = append(p.Buffers, torch.Named{Name: "buffer", Tensor: m.buffer})
	return p
}

// The old memory of parameters and buffers returns to the stream that allocated it. That stream
// does not wait for the current stream. The memory may be reused only after its values have been
// copied.
func TestSanitizerOfShardedConstruction(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	g := aloneOnGPU(t)
	for name, device := range map[string]cuda.Device{"parameters": 0, "buffers of another GPU": 1} {
		t.Run(name, func(t *testing.T) {
			cudatest.RequireGPUs(t, int(device)+1)
			side, on := cudatest.Stream(t, device), cudatest.Stream(t, 0)
			cudatest.NoFindings(t)
			var s scales
			var buffer *torch.Tensor
			err := cuda.WithStream(side, func() error {
				s = scales{full(device, torch.Float32, 1, 100), full(device, torch.Float32, 1, 1000)}
				buffer = full(device, torch.Float32, 1, 50)
				return errors.Join(s.row.SetRequiresGrad(true), s.all.SetRequiresGrad(true), buffer.Err())
			})
			if err = errors.Join(err, on.Wait(side), cuda.DefaultStream(device).Wait(side)); err != nil {
				t.Fatal(err)
			}
			err = cuda.WithStream(on, func() error {
				if err := capi.DelayStream(on.CAPI(), delay); err != nil {
					return err
				}
				d, err := NewFullyShardedDataParallel(g, NewShardedBlock(withBuffer{s, buffer}), FullyShardedOptions{})
				if err != nil {
					return err
				}
				return errors.Join(d.Close(), buffer.Close())
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
}

// The memory of a rank's gradients is free between steps. The next pass may reuse the memory, but
// must first wait for all work that still reads it, even if the Forward of that pass ran earlier.
func TestSanitizerOfShardedGradients(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	g := aloneOnGPU(t)
	on := cudatest.Stream(t, 0)
	for name, wrap := range map[string]func(nn.Module) nn.Module{
		"of a block":        func(m nn.Module) nn.Module { return NewShardedBlock(m) },
		"outside of blocks": func(m nn.Module) nn.Module { return m },
	} {
		t.Run(name, func(t *testing.T) {
			cudatest.NoFindings(t)
			if err := cuda.WithStream(on, func() error { return readGradients(g, on, wrap) }); err != nil {
				t.Error(err)
			}
		})
	}
}

func readGradients(g *Group, on cuda.Stream, wrap func(nn.Module) nn.Module) error {
	const elements = 1 << 20
	weight := full(cuda.CPU, torch.Float32, 1, elements)
	if err := weight.SetRequiresGrad(true); err != nil {
		return err
	}
	d, err := NewFullyShardedDataParallel(g, wrap(scaled{weight}), FullyShardedOptions{})
	if err != nil {
		return err
	}
	opt, err := d.NewOptimizer(func(shard []*torch.Tensor) (optim.Optimizer, error) {
		return optim.NewSGD(shard, optim.SGDOptions{LR: 0.1})
	})
	if err != nil {
		return err
	}
	x := full(g.Device(), torch.Float32, 1, elements)
	scope := torch.NewScope("passes")
	first, second := d.Forward(x.In(scope)).Sum(), d.Forward(x.In(scope)).Sum()
	allocated := func() int64 {
		m, failed := g.Device().Memory()
		err = errors.Join(err, failed)
		return m.Allocated
	}
	err = errors.Join(err, d.Backward(first))
	grad := d.Parameters()[0].Grad()
	with := allocated()
	err = errors.Join(err, capi.DelayStream(on.CAPI(), delay), scope.Own(grad.Mul(grad)).Err(),
		grad.Close(), opt.ZeroGrad())
	// with also counts the product, which did not exist before.
	if freed := with - allocated() + 4*elements; err == nil && freed < 4*elements {
		err = fmt.Errorf("%d bytes of gradients are free after ZeroGrad, of %d", freed, 4*elements)
	}
	err = errors.Join(err, d.Backward(second), opt.Step(), scope.Close())
	return errors.Join(err, opt.Close(), d.Close(), x.Close())
}

// scaled is a module with one parameter.
type scaled struct{ weight *torch.Tensor }

func (s scaled) Forward(x *torch.Tensor) *torch.Tensor { return x.Mul(s.weight) }

func (s scaled) Parts() nn.Parts {
	return nn.Parts{Parameters: []torch.Named{{Name: "weight", Tensor: s.weight}}}
}

// trainScales trains with two passes in each step through five blocks, one of them used twice. A
// module outside of blocks is both the first and the last layer. With graph, all steps except the
// first are replays of a graph.
func trainScales(g *Group, o FullyShardedOptions, graph bool) error {
	var blocks []nn.Module
	for range 6 {
		s := scales{full(cuda.CPU, torch.Float32, 1, 100), full(cuda.CPU, torch.Float32, 1, 1000)}
		if err := errors.Join(s.row.SetRequiresGrad(true), s.all.SetRequiresGrad(true)); err != nil {
			return err
		}
		blocks = append(blocks, s)
	}
	for i := range 5 {
		blocks[i] = NewShardedBlock(blocks[i])
	}
	net := nn.NewSequential(blocks[5], blocks[0], blocks[1], blocks[2], blocks[3], blocks[2], blocks[4], blocks[5])
	d, err := NewFullyShardedDataParallel(g, net, o)
	if err != nil {
		return err
	}
	opt, err := d.NewOptimizer(func(shard []*torch.Tensor) (optim.Optimizer, error) {
		return optim.NewSGD(shard, optim.SGDOptions{LR: 0.1, Momentum: 0.9, Capturable: true})
	})
	if err != nil {
		return err
	}
	x := full(g.Device(), torch.Float32, 1, 10, 100)
	graphed := torch.NewGraphed(func(in []*torch.Tensor) ([]*torch.Tensor, error) {
		var err error
		var loss *torch.Tensor
		for range 2 {
			loss = d.Forward(in[0]).Sum()
			err = errors.Join(err, d.Backward(loss))
		}
		return []*torch.Tensor{loss}, errors.Join(err, opt.Step())
	}, torch.GraphedOptions{})
	call := graphed.CallEager
	if graph {
		call = graphed.Call
	}
	for range 4 {
		_, failed := call(x)
		err = errors.Join(err, failed)
	}
	if s := graphed.Stats(); err == nil && graph && (s.Captures != 1 || s.Hits != 3) {
		err = fmt.Errorf("the steps were no replays of one graph: %+v", s)
	}
	if s := d.Stats(); err == nil && s.GatheredBytes+s.GradientBytes != 0 {
		err = fmt.Errorf("blocks or gradients are there still: %+v", s)
	}
	for _, p := range d.Parameters() { // read them last, so that Close has to wait for the reads
		sum := p.NoGrad().Sum()
		err = errors.Join(err, sum.Err(), sum.Close())
	}
	return errors.Join(err, graphed.Close(), opt.Close(), d.Close(), x.Close())
}
