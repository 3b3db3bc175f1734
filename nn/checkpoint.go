package nn

import (
	"errors"
	"fmt"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

// Save writes the module's parameters and buffers, by their state_dict names, to a safetensors
// file, which PyTorch reads with safetensors.torch.load_file. The metadata (may be nil) goes into
// the file's header. The file appears under its name only when it is complete. It replaces an
// existing safetensors file; on failure the existing file stays unchanged. If path names a file of
// another kind, Save returns an error. Save blocks until the file is on the disk.
func Save(path string, m Module, metadata map[string]string) error {
	return SaveTensors(path, State(m), metadata)
}

// Load reads a file that [Save] or PyTorch wrote into the module's parameters and buffers, on
// whichever device they are, and returns the file's metadata. The file must have exactly the
// module's names, shapes and dtypes; otherwise the error lists the differences. Load changes the
// module only after it has read the whole file, which it holds in host memory until then. Only a
// failure of the device can leave some tensors loaded and others not.
func Load(path string, m Module) (map[string]string, error) {
	c, err := OpenCheckpoint(path)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	state := State(m)
	if err := c.compare(state); err != nil {
		return nil, err
	}
	read := torch.NewScope("nn.Load")
	defer read.Close()
	loaded := make([]*torch.Tensor, len(state))
	for i, n := range state {
		t, err := c.Read(n.Name)
		if err != nil {
			return nil, err
		}
		loaded[i] = read.Own(t)
	}
	for i, n := range state {
		if err := n.Tensor.CopyFrom(loaded[i], torch.CopyOptions{}); err != nil {
			return nil, fmt.Errorf("nn: %s: tensor %s: %w", path, n.Name, err)
		}
	}
	return c.Metadata(), nil
}

// compare finds all differences between the file and the module before Load changes anything.
func (c *Checkpoint) compare(state []Named) error {
	const maxListed = 10 // differences in the error
	var errs []error
	wanted := make(map[string]bool, len(state))
	for _, n := range state {
		wanted[n.Name] = true
		e, ok := c.entries[n.Name]
		switch {
		case n.Tensor.Err() != nil:
			errs = append(errs, fmt.Errorf("the module's tensor %s: %w", n.Name, n.Tensor.Err()))
		case !ok:
			errs = append(errs, fmt.Errorf("tensor %s is not in the file", n.Name))
		case e.dtype != n.Tensor.DType() || !equal(e.shape, n.Tensor.Shape()):
			errs = append(errs, fmt.Errorf("tensor %s is %v%v in the file and %v%v in the module", n.Name, e.dtype, e.shape, n.Tensor.DType(), n.Tensor.Shape()))
		}
	}
	for _, name := range c.names {
		if !wanted[name] {
			errs = append(errs, fmt.Errorf("tensor %s is not in the module", name))
		}
	}
	if len(errs) == 0 {
		return nil
	}
	if more := len(errs) - maxListed; more > 0 {
		errs = append(errs[:maxListed], fmt.Errorf("and %d more differences", more))
	}
	return fmt.Errorf("nn: %s does not fit the module: %w", c.path, errors.Join(errs...))
}

func equal(a, b []int64) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if a[i] != b[i] {
			return false
		}
	}
	return true
}

// Read returns the file's tensor of that name, on the CPU. The tensor belongs to the caller.
func (c *Checkpoint) Read(name string) (*torch.Tensor, error) {
	e, ok := c.entries[name]
	if !ok {
		return nil, fmt.Errorf("nn: %s: there is no tensor %q", c.path, name)
	}
	t, err := torch.Empty(cuda.CPU, e.dtype, e.shape...)
	if err == nil {
		err = c.fill(t, e)
	}
	if err != nil {
		t.Close()
		return nil, fmt.Errorf("nn: %s: tensor %s: %w", c.path, name, err)
	}
	return t, nil
}

func (c *Checkpoint) fill(t *torch.Tensor, e entry) error {
	if e.begin == e.end {
		return nil
	}
	b, err := t.Bytes()
	if err != nil {
		return err
	}
	if n, err := c.file.ReadAt(b, c.data+e.begin); n < len(b) {
		return err
	}
	if e.dtype == torch.Bool {
		for i, v := range b {
			if v > 1 {
				return fmt.Errorf("element %d is the byte %d: a BOOL is 0 or 1", i, v)
			}
		}
	}
	return nil
}
