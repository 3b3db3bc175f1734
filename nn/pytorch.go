package nn

import (
	"cmp"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/torchstream/torchstream/internal/ptfile"
	"github.com/torchstream/torchstream/torch"
)

const (
	stateDictKey = "state_dict"
	metadataPT   = "metadata"
)

// IsPyTorchPath reports whether a path ends in .pt or .pth, so that [Save] writes a PyTorch file.
func IsPyTorchPath(path string) bool {
	ext := strings.ToLower(filepath.Ext(path))
	return ext == ".pt" || ext == ".pth"
}

// readPyTorch fills the checkpoint from a file written by torch.save.
func (c *Checkpoint) readPyTorch(size int64) error {
	file, err := ptfile.Open(c.file, size)
	if err != nil {
		return err
	}
	c.root, c.pytorch = file.Root, true
	c.entries, c.metadata, c.unread = map[string]entry{}, map[string]string{}, map[string]*ptfile.Opaque{}
	root, ok := file.Root.(*ptfile.Dict)
	if !ok {
		return nil
	}
	if err := c.readDivided(root); err != nil {
		return err
	}
	var chosen *ptfile.Dict
	c.dict, chosen = stateDict(root)
	c.names, c.entries, c.unread = dictEntries(chosen)
	if v, _ := root.Get(metadataPT); v != nil {
		if d, ok := v.(*ptfile.Dict); ok {
			for key, value := range d.All() {
				k, ok1 := key.(string)
				v, ok2 := value.(string)
				if ok1 && ok2 {
					c.metadata[k] = v
				}
			}
		}
	}
	return nil
}

// StoredTensor is a tensor in an open file. It can be read until the Checkpoint is closed.
type StoredTensor struct {
	from  *Checkpoint
	entry entry
	name  string // in the file; "" for the whole file
}

// Spec returns the tensor's dtype and shape.
func (s *StoredTensor) Spec() torch.Spec {
	return torch.Spec{DType: s.entry.dtype, Shape: slices.Clone(s.entry.shape)}
}

// Read returns the tensor, on the CPU. It belongs to the caller.
func (s *StoredTensor) Read() (*torch.Tensor, error) {
	t, err := s.from.read(s.entry)
	if err != nil {
		return nil, s.failed(err)
	}
	return t, nil
}

// failed adds the names of the file and the tensor to a read error.
func (s *StoredTensor) failed(err error) error {
	if s.name == "" {
		return fmt.Errorf("nn: %s: %w", s.from.path, err)
	}
	return fmt.Errorf("nn: %s: tensor %s: %w", s.from.path, s.name, err)
}

// Tensor returns the file's tensor with this name, without reading it.
func (c *Checkpoint) Tensor(name string) (*StoredTensor, error) {
	e, err := c.find(name)
	if err != nil {
		return nil, err
	}
	return &StoredTensor{c, e, name}, nil
}

// find returns the entry of a tensor.
func (c *Checkpoint) find(name string) (entry, error) {
	e, ok := c.entries[name]
	if ok {
		return e, nil
	}
	if o := c.unread[name]; o != nil {
		return e, fmt.Errorf("nn: %s: %w", c.path, &UnreadError{name, o})
	}
	return e, fmt.Errorf("nn: %s: there is no tensor %q", c.path, name)
}

// UnreadError reports a value of a PyTorch file that this package does not read: an object of a
// Python class, a set, an integer over 64 bits, or a sparse or quantized tensor. Requesting the
// value returns it.
type UnreadError struct {
	Path   string // the keys of the value in the file, joined by dots: "optimizer.args"
	opaque *ptfile.Opaque
}

// Error returns the path, a description of the value, and what to save instead.
func (e *UnreadError) Error() string {
	if e.Path == "" {
		return e.opaque.Error()
	}
	return e.Path + ": " + e.opaque.Error()
}

// IsPyTorch reports whether the file is a PyTorch file, which has values, rather than a safetensors
// file.
func (c *Checkpoint) IsPyTorch() bool { return c.pytorch }

// Value returns the value at a path of keys in a PyTorch file: Value("epoch"), or
// Value("optimizer", "param_groups", 0, "lr"). The key of a list element is its index. Without keys
// it returns everything. The value is nil, a bool, int64, float64, string or []byte; a []any for a
// list or a tuple; a map[any]any for a dict, whose integer keys are int64; a *[StoredTensor]; or,
// for a dtype or a device, its name as a string. A container that the file references several times
// becomes a single []any or map, and errors name its first place. A safetensors file has no values:
// see Metadata.
//
// Other values are not read. Requesting one returns an *[UnreadError]. Within a requested list or
// dict, an *UnreadError replaces such a value, or a key of another type.
func (c *Checkpoint) Value(path ...any) (any, error) {
	if !c.pytorch {
		return nil, fmt.Errorf("nn: %s: a safetensors file has Metadata and no values", c.path)
	}
	v := c.root
	r := reader{from: c, seen: map[any]any{}}
	for i, key := range path {
		if o, ok := v.(*ptfile.Opaque); ok {
			return nil, fmt.Errorf("nn: %s: %w", c.path, r.unread(o))
		}
		if n, ok := key.(int); ok {
			key = int64(n)
		}
		var ok bool
		switch parent := v.(type) {
		case *ptfile.Dict:
			v, ok = parent.Get(key)
		case *ptfile.List:
			v, ok = item(parent.Items, key)
		case *ptfile.Tuple:
			v, ok = item(parent.Items, key)
		}
		if !ok {
			return nil, fmt.Errorf("nn: %s: there is no value at %v", c.path, path[:i+1])
		}
		r.path = append(r.path, key)
	}
	if o, ok := v.(*ptfile.Opaque); ok {
		return nil, fmt.Errorf("nn: %s: %w", c.path, r.unread(o))
	}
	return r.value(v), nil
}

func item(items []any, key any) (any, bool) {
	i, ok := key.(int64)
	if !ok || i < 0 || i >= int64(len(items)) {
		return nil, false
	}
	return items[i], true
}

// reader converts a file's values to the types that Value documents. A container that the file
// references several times becomes one Go value: otherwise a small file could become a large tree.
// Package ptfile bounds the depth.
type reader struct {
	from *Checkpoint
	seen map[any]any // converted containers by pointer to the file's container
	path []any       // the keys of the value being converted
}

// unread returns the error that replaces a value.
func (r *reader) unread(o *ptfile.Opaque) *UnreadError { return &UnreadError{r.name(), o} }

// name formats the path and shortens long keys.
func (r *reader) name() string {
	var s strings.Builder
	for i, key := range r.path {
		text := fmt.Sprint(key)
		if o, ok := key.(*ptfile.Opaque); ok {
			text = "<" + o.What + ">"
		}
		if i > 0 {
			s.WriteByte('.')
		}
		s.WriteString(shortKey(text))
	}
	return s.String()
}

// shortKey prepares a name of an untrusted file for an error: it cuts long names and escapes
// unprintable characters.
func shortKey(text string) string {
	const maxKey = 100
	if len(text) > maxKey {
		text = strings.ToValidUTF8(text[:maxKey], "") + "..."
	}
	if quoted := strconv.Quote(text); quoted != `"`+text+`"` {
		return quoted
	}
	return text
}

// below converts the value under a key.
func (r *reader) below(key, v any) any {
	r.path = append(r.path, key)
	converted := r.value(v)
	r.path = r.path[:len(r.path)-1]
	return converted
}

func (r *reader) value(v any) any {
	switch v := v.(type) {
	case *ptfile.Tensor:
		return &StoredTensor{r.from, entry{dtype: v.DType(), shape: v.Shape, stored: v}, r.name()}
	case *ptfile.Opaque:
		return r.unread(v)
	case ptfile.Name:
		return string(v)
	case *ptfile.Dict, *ptfile.List, *ptfile.Tuple:
		converted, ok := r.seen[v]
		if !ok {
			converted = r.container(v)
			r.seen[v] = converted
		}
		return converted
	}
	return v
}

func (r *reader) container(v any) any {
	switch v := v.(type) {
	case *ptfile.Dict:
		m := make(map[any]any, v.Len())
		for key, value := range v.All() {
			converted := r.below(key, value)
			if o, ok := key.(*ptfile.Opaque); ok {
				key = r.unread(o)
			}
			m[key] = converted
		}
		return m
	case *ptfile.List:
		return r.items(v.Items)
	case *ptfile.Tuple:
		return r.items(v.Items)
	}
	return nil
}

func (r *reader) items(items []any) []any {
	values := make([]any, len(items))
	for i, v := range items {
		values[i] = r.below(i, v)
	}
	return values
}

// SavePyTorch writes a value to a file that torch.load(path, weights_only=True) reads, with the
// guarantees of [Save]: it replaces only a PyTorch file. The value is nil, a bool, int, int64,
// float64, string or []byte; a []any, which becomes a list; a map[string]any or a map[any]any with
// keys of type int64 and string, which becomes a dict, ascending integers first and then strings; a
// [][torch.Named], which becomes an OrderedDict; or a *[torch.Tensor] or *[StoredTensor]. A tensor
// that appears twice, for example under two names, is stored once. If the file replaces a checkpoint of
// [Shards], SavePyTorch then removes the ranks' files. Everything except the tensors' elements
// takes at most 64 MiB, the limit of OpenCheckpoint.
//
//	err := nn.SavePyTorch("checkpoint.pt", map[string]any{"state_dict": nn.State(net), "epoch": epoch})
func SavePyTorch(path string, value any) error {
	converter := pytorchConverter{map[*torch.Tensor]any{}}
	root, err := converter.value(value, 0)
	if err == nil {
		err = writePyTorch(path, root)
	}
	if err != nil {
		return fmt.Errorf("nn: save %s: %w", path, err)
	}
	return nil
}

func writePyTorch(path string, root any) error {
	f, err := newPyTorch(path)
	if err != nil {
		return err
	}
	if err := f.finishPyTorch(root); err != nil {
		f.abandon()
		return err
	}
	return nil
}

// pytorchState returns the root value of a file of tensors and metadata.
func pytorchState(tensors []torch.Named, metadata map[string]string) any {
	if len(metadata) == 0 {
		return tensors
	}
	m := make(map[string]any, len(metadata))
	for k, v := range metadata {
		m[k] = v
	}
	return map[string]any{stateDictKey: tensors, metadataPT: m}
}

const maxDepth = 64 // the limit of ptfile on nested values

// pytorchConverter converts Go values to ptfile's types.
type pytorchConverter struct {
	seen map[*torch.Tensor]any // the file's values by tensor
}

func (p *pytorchConverter) value(v any, depth int) (any, error) {
	if depth > maxDepth {
		return nil, errors.New("values are nested too deeply, or one contains itself")
	}
	switch v := v.(type) {
	case []any:
		items := make([]any, len(v))
		for i, x := range v {
			var err error
			if items[i], err = p.value(x, depth+1); err != nil {
				return nil, fmt.Errorf("item %d: %w", i, err)
			}
		}
		return &ptfile.List{Items: items}, nil
	case map[string]any:
		m := make(map[any]any, len(v))
		for key, x := range v {
			m[key] = x
		}
		return p.dict(m, depth)
	case map[any]any:
		return p.dict(v, depth)
	case []torch.Named:
		return p.named(v)
	case *torch.Tensor:
		return p.tensor(v)
	case *StoredTensor:
		if v != nil && v.entry.unread != nil {
			return nil, v.failed(v.entry.unread)
		}
		if v != nil && v.entry.stored != nil {
			return v.entry.stored, nil
		}
		if v != nil { // nil in a PyTorch file
			return ptfile.NewTensor(v.entry.dtype, v.entry.shape, func(b []byte) error { return v.from.readBytes(b, v.entry, 0) })
		}
	case *UnreadError:
		return nil, v
	}
	return v, nil // ptfile.Write refuses other types
}

func (p *pytorchConverter) dict(m map[any]any, depth int) (any, error) {
	var integers []int64
	var names []string
	for key := range m {
		switch key := key.(type) {
		case int64:
			integers = append(integers, key)
		case string:
			names = append(names, key)
		default:
			return nil, fmt.Errorf("a key of type %T: keys are int64 and string", key)
		}
	}
	slices.SortFunc(integers, cmp.Compare[int64])
	slices.Sort(names)
	d := &ptfile.Dict{}
	add := func(key any) error {
		v, err := p.value(m[key], depth+1)
		if err != nil {
			return fmt.Errorf("key %v: %w", key, err)
		}
		d.Set(key, v)
		return nil
	}
	for _, key := range integers {
		if err := add(key); err != nil {
			return nil, err
		}
	}
	for _, key := range names {
		if err := add(key); err != nil {
			return nil, err
		}
	}
	return d, nil
}

func (p *pytorchConverter) named(tensors []torch.Named) (any, error) {
	d := &ptfile.Dict{Ordered: true}
	for _, n := range tensors {
		if _, twice := d.Get(n.Name); twice {
			return nil, fmt.Errorf("tensor %q: a name that comes twice", n.Name)
		}
		t, err := p.tensor(n.Tensor)
		if err != nil {
			return nil, fmt.Errorf("tensor %s: %w", n.Name, err)
		}
		d.Set(n.Name, t)
	}
	return d, nil
}

func (p *pytorchConverter) tensor(t *torch.Tensor) (any, error) {
	if stored := p.seen[t]; stored != nil {
		return stored, nil
	}
	if err := t.Err(); err != nil {
		return nil, err
	}
	shape, dtype := t.Shape(), t.DType()
	if shape == nil {
		return nil, torch.ErrClosed
	}
	stored, err := ptfile.NewTensor(dtype, shape, t.ReadBytes)
	if err != nil {
		return nil, err
	}
	p.seen[t] = stored
	return stored, nil
}
