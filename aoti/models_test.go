package aoti

import (
	"context"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/checkpoint"
	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/torch"
)

// packagesFolder names a folder that testdata/make_models.py wrote on this machine: packages, each
// with a .safetensors file of inputs and outputs.
const packagesFolder = "TORCHSTREAM_AOTI_PACKAGES"

// example is a package with its inputs and PyTorch's outputs, for each size of the inputs.
type example struct {
	path  string
	model *Model
	sizes []exampleSize
}

// exampleSize has inputs, and the outputs of PyTorch's loader, of eager mode, and of eager mode in
// float64.
type exampleSize struct {
	inputs, loaded, eager, exact []*torch.Tensor
}

// examples loads the packages that are for a GPU, or for the CPU, by name.
func examples(t testing.TB, gpu bool) map[string]example {
	t.Helper()
	folder := os.Getenv(packagesFolder)
	if folder == "" {
		t.Skipf("%s is not set: it names a folder that testdata/make_models.py wrote", packagesFolder)
	}
	paths, err := filepath.Glob(filepath.Join(folder, "*.pt2"))
	if err != nil || len(paths) == 0 {
		t.Fatalf("%s has no packages: %v", folder, err)
	}
	all := map[string]example{}
	for _, path := range paths {
		p, err := Open(path)
		if err != nil {
			t.Fatal(err)
		}
		if p.Models[0].CUDA == gpu {
			all[strings.TrimSuffix(filepath.Base(path), ".pt2")] = loadExample(t, path)
		}
	}
	if len(all) == 0 {
		t.Skipf("no package in %s is for this kind of device", folder)
	}
	return all
}

func loadExample(t testing.TB, path string) example {
	t.Helper()
	m, err := Load(path, Options{Instances: 4})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	f, err := checkpoint.Open(strings.TrimSuffix(path, ".pt2") + ".safetensors")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	about := f.Metadata()
	if about["torch"] != capi.LibTorchVersion() {
		t.Fatalf("%s: PyTorch %s computed the outputs, and this is LibTorch %s: run make_models.py --keep with it", path,
			about["torch"], capi.LibTorchVersion())
	}
	sizes, err := strconv.Atoi(about["sizes"])
	if err != nil || sizes < 1 {
		t.Fatalf("%s: got %q sizes (%v), want at least one", f.Path(), about["sizes"], err)
	}
	e := example{path: path, model: m}
	for i := range sizes {
		e.sizes = append(e.sizes, exampleSize{
			inputs: readAll(t, f, m, fmt.Sprintf("%d.input.", i), m.Inputs),
			loaded: readAll(t, f, m, fmt.Sprintf("%d.package.", i), m.Outputs),
			eager:  readAll(t, f, m, fmt.Sprintf("%d.eager.", i), m.Outputs),
			exact:  readAll(t, f, m, fmt.Sprintf("%d.exact.", i), m.Outputs),
		})
	}
	return e
}

// readAll reads the tensors of values to the model's device.
func readAll(t testing.TB, f *checkpoint.File, m *Model, prefix string, values []Value) []*torch.Tensor {
	t.Helper()
	scope := torch.NewScope(prefix)
	t.Cleanup(func() { scope.Close() })
	all := make([]*torch.Tensor, len(values))
	for i, v := range values {
		read, err := f.Read(prefix + v.Name)
		if err != nil {
			t.Fatal(err)
		}
		x := scope.Own(read).To(m.Device())
		if v.MemoryFormat == channelsLast { // safetensors files do not keep this format
			x = x.Contiguous(torch.ChannelsLast)
		}
		if all[i] = x; x.Err() != nil {
			t.Fatal(x.Err())
		}
	}
	return all
}

// run runs the model on the current stream. The outputs belong to scope. After an error there are
// none.
func (e example) run(t testing.TB, scope *torch.Scope, size exampleSize) []*torch.Tensor {
	t.Helper()
	inputs := make([]*torch.Tensor, len(size.inputs))
	for i, x := range size.inputs {
		inputs[i] = x.In(scope)
	}
	outputs, err := e.model.Run(context.Background(), inputs...)
	if err != nil {
		t.Error(err)
	}
	return outputs
}

// sameBits compares outputs with the outputs of PyTorch's loader.
func (e example) sameBits(t testing.TB, got []*torch.Tensor, size exampleSize) {
	t.Helper()
	if len(got) != len(size.loaded) {
		t.Errorf("got %d outputs, want %d", len(got), len(size.loaded))
		return
	}
	for i, y := range got {
		name, want := e.model.Outputs[i].Name, size.loaded[i]
		if y.DType() != want.DType() {
			t.Errorf("output %s has dtype %v, want %v", name, y.DType(), want.DType())
			continue
		}
		same, err := y.Equal(want)
		if err != nil {
			t.Error(err)
		} else if !same {
			t.Errorf("output %s %v differs from the output of PyTorch's loader %v by up to %g, want the same bits",
				name, y.Shape(), want.Shape(), largest(t, y.Sub(want)))
		}
	}
}

// check runs the model once for each size, and compares the outputs with PyTorch's loader.
func (e example) check(t testing.TB) {
	t.Helper()
	for _, size := range e.sizes {
		scope := torch.NewScope("run")
		e.sameBits(t, e.run(t, scope, size), size)
		scope.Close()
	}
}

// largest returns the largest absolute value of a tensor's elements.
func largest(t testing.TB, x *torch.Tensor) float64 {
	t.Helper()
	y := x.ToDType(torch.Float64).Abs().Max()
	value, err := y.Float64()
	if err != nil {
		t.Error(err)
	}
	return value
}

// fractionBits is the number of bits of each dtype after the leading one.
func fractionBits(d torch.DType) int {
	switch d {
	case torch.BFloat16:
		return 7
	case torch.Float16:
		return 10
	case torch.Float32:
		return 23
	}
	return 0 // no floating-point number
}

// eagerError returns the largest rounding error of an output in eager mode, over all sizes.
func (e example) eagerError(t testing.TB, output int) float64 {
	t.Helper()
	scope := torch.NewScope("eager")
	defer scope.Close()
	worst := 0.0
	for _, size := range e.sizes {
		eager, exact := size.eager[output].In(scope), size.exact[output].In(scope)
		worst = max(worst, largest(t, eager.ToDType(torch.Float64).Sub(exact)))
	}
	return worst
}

// nearEager compares outputs with eager mode. Eager mode and the package round differently. So
// their difference may be three times the largest rounding error of eager mode, and one unit in the
// last place of the largest element.
func (e example) nearEager(t testing.TB, scope *torch.Scope, got []*torch.Tensor, size exampleSize) {
	t.Helper()
	for i, y := range got {
		name, eager := e.model.Outputs[i].Name, size.eager[i].In(scope)
		bits := fractionBits(y.DType())
		if bits == 0 {
			if same, err := y.Equal(eager); err != nil || !same {
				t.Errorf("output %s differs from eager mode (error %v), want equal integers", name, err)
			}
			continue
		}
		top := largest(t, size.exact[i].In(scope))
		bound := 3*e.eagerError(t, i) + math.Ldexp(top, -bits)
		difference := largest(t, y.ToDType(torch.Float64).Sub(eager.ToDType(torch.Float64)))
		t.Logf("%s %v differs from eager mode by %.3g, at most %.3g is rounding; largest element %.3g", name, y.Shape(),
			difference, bound, top)
		if !(difference <= bound) {
			t.Errorf("output %s differs from eager mode by %g, want at most %g", name, difference, bound)
		}
		if !(top > 3*bound) {
			t.Errorf("output %s has no element above %g, want 3 times the bound %g or more", name, top, bound)
		}
	}
}

func TestModelsEqualPyTorch(t *testing.T) { testModels(t, examples(t, false)) }

// testModels runs each model once for each size.
func testModels(t *testing.T, all map[string]example) {
	for name, e := range all {
		t.Run(name, func(t *testing.T) {
			for _, size := range e.sizes {
				scope := torch.NewScope("run")
				got := e.run(t, scope, size)
				e.sameBits(t, got, size)
				e.nearEager(t, scope, got, size)
				scope.Close()
			}
		})
	}
}
