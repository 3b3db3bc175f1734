package nn

import (
	"fmt"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

// Save writes the module's parameters and buffers, by their state_dict names, to a safetensors
// file, which PyTorch reads with safetensors.torch.load_file. The metadata (may be nil) goes into
// the file's header. The file appears under its name only when it is complete. It replaces an
// existing safetensors file; on failure the existing file stays unchanged. If path names a file of
// another kind, Save returns an error. Save blocks until the file is on the disk.
//
// If path ends in .pt or .pth, Save writes a file of torch.save instead, and replaces only such a
// file. torch.load(path, weights_only=True) returns the state_dict, or, with metadata, a dict of
// "state_dict" and "metadata".
func Save(path string, m Module, metadata map[string]string) error {
	return SaveTensors(path, State(m), metadata)
}

// Read returns the file's tensor with this name, on the CPU. The tensor belongs to the caller.
func (c *Checkpoint) Read(name string) (*torch.Tensor, error) {
	s, err := c.Tensor(name)
	if err != nil {
		return nil, err
	}
	return s.Read()
}

// Map returns the file's tensor with this name, on the CPU, without reading it. The tensor's memory
// is the mapped file: the system reads a page on first use. Writing to the tensor does not change
// the file. The tensor belongs to the caller, and may outlive the Checkpoint. Do not shorten the
// file while the tensor lives: the system kills a process that reads a missing page. (The functions
// that save checkpoints replace files and never modify one.)
//
// Unlike Read, Map does not verify the checksums of files that this package wrote.
//
// Only a safetensors file can be mapped. Map falls back to Read for bool tensors, whose bytes must
// be checked, and for tensors whose bytes are not aligned in the file.
func (c *Checkpoint) Map(name string) (*torch.Tensor, error) {
	e, err := c.find(name)
	switch {
	case err != nil:
		return nil, err
	case e.shard != nil:
		return e.shard.Map(name)
	case c.pytorch:
		return nil, fmt.Errorf("nn: %s: a PyTorch file cannot be mapped: Read the tensor", c.path)
	}
	begin := c.data + e.begin
	if e.unread != nil || e.dtype == torch.Bool || e.begin == e.end || begin%int64(e.dtype.Size()) != 0 {
		return c.Read(name)
	}
	file, err := c.mapFile()
	if err != nil {
		return nil, fmt.Errorf("nn: %s: %w", c.path, err)
	}
	bytes := file.Narrow(0, begin, e.end-e.begin)
	defer bytes.Close()
	flat := torch.Call1("view.dtype", bytes, e.dtype)
	defer flat.Close()
	shaped := flat.View(e.shape...)
	defer shaped.Close()
	t := shaped.Keep() // not closed by a scope, unlike an operator's result
	if err := t.Err(); err != nil {
		return nil, fmt.Errorf("nn: %s: tensor %s: %w", c.path, name, err)
	}
	return t, nil
}

// mapFile returns the whole file in memory, as bytes.
func (c *Checkpoint) mapFile() (*torch.Tensor, error) {
	c.mapping.Lock()
	defer c.mapping.Unlock()
	if c.mapped != nil {
		return c.mapped, nil
	}
	info, err := c.file.Stat()
	if err != nil {
		return nil, err
	}
	// The descriptor refers to the file that was checked, even if another file is at the path now.
	path := fmt.Sprintf("/proc/self/fd/%d", c.file.Fd())
	t := torch.Call1("from_file", path, torch.Keywords{"shared": false, "size": info.Size(), "dtype": torch.Uint8})
	if err := t.Err(); err != nil {
		return nil, err
	}
	c.mapped = t
	return t, nil
}

func (c *Checkpoint) read(e entry) (*torch.Tensor, error) {
	if e.shard != nil {
		c = e.shard
	}
	if err := e.check(); err != nil { // before it allocates
		return nil, err
	}
	t, err := torch.Empty(cuda.CPU, e.dtype, e.shape...)
	if err == nil {
		err = c.fill(t, e)
	}
	if err != nil {
		t.Close()
		return nil, err
	}
	return t, nil
}

func (c *Checkpoint) fill(t *torch.Tensor, e entry) error {
	if t.Elements() == 0 {
		return nil
	}
	b, err := t.Bytes()
	if err != nil {
		return err
	}
	if e.stored != nil {
		if err := e.stored.ReadBytes(b); err != nil {
			return err
		}
		return checkBools(b, e.dtype)
	}
	return c.readBytes(b, e, 0)
}

// readBytes reads elements in file order, which is the order of a dense tensor.
func (c *Checkpoint) readBytes(b []byte, e entry, first int64) error {
	if e.shard != nil {
		c = e.shard
	}
	if e.unread != nil {
		return e.unread
	}
	if e.stored != nil {
		if err := e.stored.ReadElements(b, first); err != nil {
			return err
		}
	} else if err := c.readPlain(b, e, first*int64(e.dtype.Size())); err != nil {
		return err
	}
	return checkBools(b, e.dtype)
}

// readPlain reads bytes at an offset of a tensor in a safetensors file, and verifies the checksums
// if the file has any.
func (c *Checkpoint) readPlain(b []byte, e entry, offset int64) error {
	if e.sums != nil {
		return c.readChecked(b, e, offset, e.sums)
	}
	return c.readFull(b, c.data+e.begin+offset)
}

// checkBools returns an error if elements of a file are not bools.
func checkBools(b []byte, dtype torch.DType) error {
	if dtype != torch.Bool {
		return nil
	}
	for i, v := range b {
		if v > 1 {
			return fmt.Errorf("element %d is the byte %d: a BOOL is 0 or 1", i, v)
		}
	}
	return nil
}
