package aoti

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/torchstream/torchstream/checkpoint"
	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/torch"
)

// gpuPackages is a folder that testdata/make_gpu_packages.py wrote on this machine: packages, each
// with a .pt file of its inputs and outputs.
const gpuPackages = "TORCHSTREAM_AOTI_PACKAGES"

// example is a package with the tensors of its .pt file: inputs, and the outputs that PyTorch
// computed with the same package.
type example struct {
	model           *Model
	inputs, outputs []*torch.Tensor
	scope           *torch.Scope
}

func examples(t testing.TB) map[string]example {
	t.Helper()
	cudatest.RequireGPUs(t, 1)
	folder := os.Getenv(gpuPackages)
	if folder == "" {
		t.Skipf("%s is not set: it names a folder that testdata/make_gpu_packages.py wrote", gpuPackages)
	}
	paths, err := filepath.Glob(filepath.Join(folder, "*.pt2"))
	if err != nil || len(paths) == 0 {
		t.Fatalf("%s has no packages: %v", folder, err)
	}
	all := map[string]example{}
	for _, path := range paths {
		name := strings.TrimSuffix(filepath.Base(path), ".pt2")
		m, err := Load(path, Options{Instances: 4})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := m.Close(); err != nil {
				t.Error(err)
			}
		})
		e := example{model: m, scope: torch.NewScope(name)}
		t.Cleanup(func() { e.scope.Close() })
		f, err := checkpoint.Open(filepath.Join(folder, name+".pt"))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		read := func(name string) *torch.Tensor {
			x, err := f.Read(name)
			if err != nil {
				t.Fatal(err)
			}
			return e.scope.Own(x.To(m.Device()).Keep())
		}
		for _, v := range m.Inputs {
			x := read("input." + v.Name)
			if v.MemoryFormat == channelsLast { // the .pt file does not keep this format
				x = e.scope.Own(x.Contiguous(torch.ChannelsLast).Keep())
			}
			e.inputs = append(e.inputs, x)
		}
		for _, v := range m.Outputs {
			e.outputs = append(e.outputs, read("output."+v.Name))
		}
		all[name] = e
	}
	return all
}

// check runs a model once on the current stream, and compares its outputs with PyTorch's bit by
// bit.
func (e example) check(t testing.TB) {
	scope := torch.NewScope("run")
	defer scope.Close()
	inputs := make([]*torch.Tensor, len(e.inputs))
	for i, x := range e.inputs {
		inputs[i] = x.In(scope)
	}
	outputs, err := e.model.Run(context.Background(), inputs...)
	if err != nil {
		t.Error(err)
		return
	}
	for i, got := range outputs {
		same, err := torch.CallValues("equal", got, e.outputs[i])
		if err != nil || !same[0].(bool) {
			t.Errorf("output %s differs from PyTorch's (%v), want the same bits", e.model.Outputs[i].Name, err)
		}
	}
}

func TestGPUModelsEqualPyTorch(t *testing.T) {
	for name, e := range examples(t) {
		t.Run(name, func(t *testing.T) { e.check(t) })
	}
}

// 64 goroutines on 4 streams share the instances.
func TestGPUModelsOnStreams(t *testing.T) {
	for name, e := range examples(t) {
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
	for name, e := range examples(t) {
		t.Run(name, func(t *testing.T) {
			e.check(t) // the first run loads kernels, which is not allowed in a capture
			graphed := torch.NewGraphed(func(x []*torch.Tensor) ([]*torch.Tensor, error) {
				return e.model.Run(context.Background(), x...)
			}, torch.GraphedOptions{})
			defer graphed.Close()
			for range 3 { // capture, and two replays
				if _, err := graphed.Call(e.inputs...); err != nil {
					t.Fatal(err)
				}
			}
			if err := e.model.Close(); err != nil { // the graph must keep the weights
				t.Fatal(err)
			}
			outputs, err := graphed.Call(e.inputs...)
			if err != nil {
				t.Fatal(err)
			}
			for i, got := range outputs {
				same, err := torch.CallValues("equal", got, e.outputs[i])
				if err != nil || !same[0].(bool) {
					t.Errorf("output %d differs from PyTorch's (%v), want the same bits", i, err)
				}
			}
		})
	}
}

func BenchmarkGPUGraph(b *testing.B) {
	for name, e := range examples(b) {
		b.Run(name, func(b *testing.B) {
			e.check(b)
			graphed := torch.NewGraphed(func(x []*torch.Tensor) ([]*torch.Tensor, error) {
				return e.model.Run(context.Background(), x...)
			}, torch.GraphedOptions{})
			defer graphed.Close()
			for range b.N + 1 {
				if _, err := graphed.Call(e.inputs...); err != nil {
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
	for name, e := range examples(b) {
		b.Run(name, func(b *testing.B) {
			e.check(b)
			b.ResetTimer()
			for range b.N {
				scope := torch.NewScope("run")
				if _, err := e.model.Run(context.Background(), e.inputs[0].In(scope)); err != nil {
					b.Fatal(err)
				}
				scope.Close()
			}
			if err := e.model.Device().Synchronize(); err != nil {
				b.Fatal(err)
			}
		})
	}
}
