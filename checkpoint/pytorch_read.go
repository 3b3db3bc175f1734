package checkpoint

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/torchstream/torchstream/checkpoint/internal/ptfile"
)

const (
	stateDictKey = "state_dict"
	metadataPT   = "metadata"
)

// pytorchFile holds the values of a PyTorch file.
type pytorchFile struct {
	root  any
	dict  string     // the path of the dict that Open chose; "" for root
	ranks *rankFiles // nil unless ranks wrote the checkpoint
}

// readPyTorch fills the File from a file written by torch.save.
func (f *File) readPyTorch(size int64) error {
	file, err := ptfile.Open(f.file, size)
	if err != nil {
		return err
	}
	f.pytorch, f.metadata = &pytorchFile{root: file.Root}, map[string]string{}
	root, ok := file.Root.(*ptfile.Dict)
	if !ok {
		return nil
	}
	if err := f.readDivided(root); err != nil {
		return err
	}
	chosen := stateDict(root)
	f.pytorch.dict, f.tensors = chosen.path, chosen.tensors()
	if v, _ := root.Get(metadataPT); v != nil {
		if d, ok := v.(*ptfile.Dict); ok {
			for key, value := range d.All() {
				k, ok1 := key.(string)
				v, ok2 := value.(string)
				if ok1 && ok2 {
					f.metadata[k] = v
				}
			}
		}
	}
	return nil
}

// UnreadError reports a value of a PyTorch file that this package does not read: an object of a
// Python class, a set, an integer over 64 bits, or a sparse or quantized tensor. A request for the
// value returns this error.
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

// Value returns the value at a path of keys in a PyTorch file: Value("epoch"), or
// Value("optimizer", "param_groups", 0, "lr"). The key of a list element is its index. Without keys
// it returns everything. A safetensors file has no values: see Metadata. The value is one of these
// types:
//   - nil, bool, int64, float64, string or []byte
//   - []any, for a list or a tuple
//   - map[any]any, for a dict; integer keys are int64
//   - *[StoredTensor]
//   - string, for the name of a dtype or a device
//
// A container that the file references several times becomes a single []any or map, and errors name
// the first place of the container.
//
// Other values are not read. Requesting one returns an *[UnreadError]. Within a requested list or
// dict, an *UnreadError replaces such a value, or a key of another type.
func (f *File) Value(path ...any) (any, error) {
	if f.pytorch == nil {
		return nil, fmt.Errorf("checkpoint: %s: a safetensors file has Metadata and no values", f.path)
	}
	v := f.pytorch.root
	r := reader{from: f, seen: map[any]any{}}
	for i, key := range path {
		if o, ok := v.(*ptfile.Opaque); ok {
			return nil, fmt.Errorf("checkpoint: %s: %w", f.path, r.unread(o))
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
			return nil, fmt.Errorf("checkpoint: %s: there is no value at %v", f.path, path[:i+1])
		}
		r.path = append(r.path, key)
	}
	if o, ok := v.(*ptfile.Opaque); ok {
		return nil, fmt.Errorf("checkpoint: %s: %w", f.path, r.unread(o))
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
	from *File
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
		return &StoredTensor{r.from, storedEntry(v), r.name()}
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
