package nn

import (
	"errors"
	"fmt"
	"slices"
	"strings"

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

// Load reads a file that [Save] or PyTorch wrote into the module's parameters and buffers, on
// whichever device they are, and returns the file's metadata. The file must have exactly the
// module's names, shapes and dtypes; otherwise the error lists the differences. Load changes the
// module only after it has read the whole file, which it holds in host memory until then. Only a
// failure of the device can leave some tensors loaded and others not.
//
// As in PyTorch, a file may lack the counts of batches of the normalisations (num_batches_tracked),
// which PyTorch before 0.4.1 did not write. The module keeps its own.
func Load(path string, m Module) (map[string]string, error) {
	r, err := LoadWith(path, m, LoadOptions{})
	if err != nil {
		return nil, err
	}
	return r.Metadata, nil
}

// LoadOptions are the options of [LoadWith].
type LoadOptions struct {
	// Partial loads the tensors that file and module have in common, and leaves the module's other
	// tensors as they are: for fine-tuning with another head, or from a part of a model. A file
	// that has no tensor in common with the module is an error still.
	Partial bool
}

// LoadReport says how a file and a module compare.
type LoadReport struct {
	Metadata   map[string]string
	Loaded     []string // the tensors that now have the file's values, in the module's order
	Missing    []string // tensors of the module that are not in the file
	Unexpected []string // tensors of the file that are not in the module
	Mismatched []Mismatch
}

// Mismatch is a tensor with one name but another shape or dtype in file and module.
type Mismatch struct {
	Name         string
	File, Module torch.Spec
}

func (m Mismatch) String() string {
	return fmt.Sprintf("%s is %v%v in the file and %v%v in the module", m.Name, m.File.DType, m.File.Shape, m.Module.DType, m.Module.Shape)
}

// String lists the differences, one a line, after the number of tensors that were loaded.
func (r *LoadReport) String() string {
	text := fmt.Sprintf("%d tensors loaded", len(r.Loaded))
	for _, d := range r.differences() {
		text += "\n" + d.Error()
	}
	return text
}

func (r *LoadReport) differences() []error {
	return r.differencesBut(func(string) bool { return false })
}

// differencesBut leaves out missing tensors by their names.
func (r *LoadReport) differencesBut(optional func(name string) bool) []error {
	var errs []error
	for _, name := range r.Missing {
		if optional(name) {
			continue
		}
		errs = append(errs, fmt.Errorf("tensor %s is not in the file", name))
	}
	for _, m := range r.Mismatched {
		errs = append(errs, fmt.Errorf("tensor %v", m))
	}
	for _, name := range r.Unexpected {
		errs = append(errs, fmt.Errorf("tensor %s is not in the module", name))
	}
	return errs
}

// LoadWith is [Load] with options, and returns a report of what it loaded. With an error it changes
// nothing, as Load.
func LoadWith(path string, m Module, o LoadOptions) (*LoadReport, error) {
	c, err := OpenCheckpoint(path)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	return c.LoadInto(m, o)
}

// LoadInto is [LoadWith] of the open file.
func (c *Checkpoint) LoadInto(m Module, o LoadOptions) (*LoadReport, error) {
	report, common, err := c.compare(State(m))
	if err == nil {
		err = c.accept(report, o)
	}
	if err != nil {
		return nil, err
	}
	read := torch.NewScope("nn.Load")
	defer read.Close()
	loaded := make([]*torch.Tensor, len(common))
	for i, n := range common {
		t, err := c.Read(n.Name)
		if err != nil {
			return nil, err
		}
		loaded[i] = read.Own(t)
	}
	for i, n := range common {
		if err := n.Tensor.CopyFrom(loaded[i], torch.CopyOptions{}); err != nil {
			return nil, fmt.Errorf("nn: %s: tensor %s: %w", c.path, n.Name, err)
		}
	}
	return report, nil
}

// compare finds all differences between the file and the module before Load changes anything, and
// the tensors that they have in common.
func (c *Checkpoint) compare(state []Named) (*LoadReport, []Named, error) {
	r := &LoadReport{Metadata: c.Metadata()}
	var common []Named
	var errs []error
	wanted := make(map[string]bool, len(state))
	for _, n := range state {
		wanted[n.Name] = true
		if err := n.Tensor.Err(); err != nil {
			errs = append(errs, fmt.Errorf("the module's tensor %s: %w", n.Name, err))
			continue
		}
		e, ok := c.entries[n.Name]
		shape := n.Tensor.Shape()
		switch {
		case !ok:
			r.Missing = append(r.Missing, n.Name)
		case e.dtype != n.Tensor.DType() || !equal(e.shape, shape):
			r.Mismatched = append(r.Mismatched, Mismatch{n.Name,
				torch.Spec{Name: n.Name, DType: e.dtype, Shape: e.shape}, torch.Spec{Name: n.Name, DType: n.Tensor.DType(), Shape: shape}})
		default:
			r.Loaded = append(r.Loaded, n.Name)
			common = append(common, n)
		}
	}
	for _, name := range c.names {
		if !wanted[name] {
			r.Unexpected = append(r.Unexpected, name)
		}
	}
	return r, common, c.unfit(errs)
}

// accept returns an error if the options do not allow the differences.
func (c *Checkpoint) accept(r *LoadReport, o LoadOptions) error {
	if o.Partial && len(r.Loaded) > 0 {
		return nil
	}
	strict := *r
	if len(r.Loaded) > 0 {
		strict.Missing = slices.DeleteFunc(slices.Clone(r.Missing), isBatchCount)
	}
	return c.unfit(strict.differences())
}

// isBatchCount reports whether a name is that of a normalisation's count of batches.
func isBatchCount(name string) bool {
	return name == batchCount || strings.HasSuffix(name, "."+batchCount)
}

// unfit returns an error that lists the differences, or nil if there are none.
func (c *Checkpoint) unfit(errs []error) error {
	const maxListed = 10
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
	s, err := c.Tensor(name)
	if err != nil {
		return nil, err
	}
	return s.Read()
}

// Map returns the file's tensor of that name, on the CPU, without reading it: its memory is the
// file's, mapped, and the system reads a page when the program uses it. Writing to the tensor does
// not change the file. It belongs to the caller, and may outlive the Checkpoint. While it lives,
// nobody may shorten the file: the system ends a process that reads what is gone. (The functions
// that save checkpoints replace files, and change none.)
//
// Only a safetensors file can be mapped. A tensor of bools, whose bytes must be checked, or one
// whose bytes are not aligned in the file, is read as by Read.
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
	t := shaped.Keep() // stays as it is in a scope, unlike the result of an operator
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
	// The descriptor names the file that was checked, whatever is at the path now.
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

// readBytes reads elements in the order in which the file has them, which is that of a dense
// tensor.
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
	} else if n, err := c.file.ReadAt(b, c.data+e.begin+first*int64(e.dtype.Size())); n < len(b) {
		return err
	}
	return checkBools(b, e.dtype)
}

// checkBools returns an error if elements of a file are no bools.
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
