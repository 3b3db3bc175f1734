package train_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"github.com/torchstream/torchstream/checkpoint"
	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
	"github.com/torchstream/torchstream/train"
)

// draw returns the next n normally distributed numbers of the device's generator.
func draw(t *testing.T, device cuda.Device, n int64) []float32 {
	t.Helper()
	x, err := torch.Randn(device, torch.Float32, n)
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	values, err := x.Float32s()
	if err != nil {
		t.Fatal(err)
	}
	return values
}

// stored reads a tensor of a file.
func stored(t *testing.T, path string, keys ...any) *torch.Tensor {
	t.Helper()
	file, err := checkpoint.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	value, err := file.Value(keys...)
	if err != nil {
		t.Fatal(err)
	}
	x, err := value.(*checkpoint.StoredTensor).Read()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { x.Close() })
	return x
}

// numbers reads the numbers of a file.
func numbers(t *testing.T, path, key string) []float32 {
	t.Helper()
	values, err := stored(t, path, key).Float32s()
	if err != nil {
		t.Fatal(err)
	}
	return values
}

// After the same seed and the same draws, the generator's state has the same bytes as in PyTorch. A
// Checkpoint that loads PyTorch's state draws PyTorch's next numbers.
func TestGenerators(t *testing.T) {
	path := filepath.Join("testdata", "generators.pt")
	if err := torch.ManualSeed(11); err != nil {
		t.Fatal(err)
	}
	if got, want := draw(t, cuda.CPU, 5), numbers(t, path, "first"); !slices.Equal(got, want) {
		t.Errorf("the numbers after the seed are %v, PyTorch's %v", got, want)
	}
	state, err := torch.GeneratorState(cuda.CPU)
	if err != nil {
		t.Fatal(err)
	}
	defer state.Close()
	got, err := state.Bytes()
	if err != nil {
		t.Fatal(err)
	}
	want, err := stored(t, path, "generators", "cpu").Bytes()
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(got, want) {
		t.Errorf("the state's %d bytes differ from PyTorch's %d, want the same", len(got), len(want))
	}
	draw(t, cuda.CPU, 3)
	c := train.Checkpoint{Device: cuda.CPU}
	if err := c.Load(path); err != nil {
		t.Fatal(err)
	}
	if got, want := draw(t, cuda.CPU, 7), numbers(t, path, "next"); !slices.Equal(got, want) {
		t.Errorf("the numbers after the state are %v, PyTorch's %v", got, want)
	}
}

// PyTorch loads the generator states of a Checkpoint, and a Checkpoint loads PyTorch's, on the same
// device. Both then draw the same numbers.
func TestGeneratorsInPyTorch(t *testing.T) {
	program := os.Getenv("TORCHSTREAM_PYTHON")
	if program == "" {
		program = "python3"
	}
	if out, err := exec.Command(program, "-c", "import torch").CombinedOutput(); err != nil {
		t.Skipf("%s cannot import torch: set TORCHSTREAM_PYTHON to a Python that can: %v %.200s", program, err, out)
	}
	devices := []cuda.Device{cuda.CPU}
	if cuda.DeviceCount() > 0 {
		devices = append(devices, cuda.Device(0))
	}
	for _, device := range devices {
		t.Run(device.String(), func(t *testing.T) {
			if err := torch.ManualSeed(12); err != nil {
				t.Fatal(err)
			}
			draw(t, device, 5)
			dir := t.TempDir()
			ours, theirs := filepath.Join(dir, "ours.pt"), filepath.Join(dir, "theirs.pt")
			c := train.Checkpoint{Device: device}
			if err := c.Save(ours); err != nil {
				t.Fatal(err)
			}
			want := draw(t, device, 5)
			if out, err := exec.Command(program, filepath.Join("testdata", "make_generators.py"), theirs,
				ours, device.String()).CombinedOutput(); err != nil {
				t.Fatalf("%v\n%s\nwant no error", err, out)
			}
			if got := numbers(t, theirs, "first"); !slices.Equal(got, want) {
				t.Errorf("PyTorch draws %v after our state, and we %v", got, want)
			}
			if err := c.Load(theirs); err != nil {
				t.Fatal(err)
			}
			if got, want := draw(t, device, 7), numbers(t, theirs, "next"); !slices.Equal(got, want) {
				t.Errorf("we draw %v after PyTorch's state, and PyTorch %v", got, want)
			}
		})
	}
}
