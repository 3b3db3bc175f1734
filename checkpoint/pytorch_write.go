package checkpoint

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/torchstream/torchstream/checkpoint/internal/ptfile"
	"github.com/torchstream/torchstream/internal/safefile"
	"github.com/torchstream/torchstream/torch"
)

// SavePyTorch writes a value to a file that torch.load(path, weights_only=True) reads, with the
// guarantees of [Save]: it replaces only a PyTorch file. The value is one of these types:
//   - nil, bool, int, int64, float64, string or []byte
//   - []any, which becomes a list
//   - map[string]any, or map[any]any with keys of type int64 and string, which becomes a dict:
//     integer keys first, then strings, both ascending
//   - [][torch.Named], which becomes an OrderedDict
//   - *[torch.Tensor] or *[StoredTensor]
//
// A tensor that appears twice, for example under two names, is stored once. If the file replaces a
// checkpoint of a [RankWriter], SavePyTorch then removes the ranks' files. Everything except the
// tensors' elements must fit into 64 MiB, the limit of Open.
//
//	err := checkpoint.SavePyTorch("checkpoint.pt", map[string]any{"state_dict": nn.State(net), "epoch": epoch})
func SavePyTorch(path string, value any) error {
	converter := pytorchConverter{map[*torch.Tensor]any{}}
	root, err := converter.value(value, 0)
	if err == nil {
		err = writePyTorch(path, root)
	}
	if err != nil {
		return fmt.Errorf("checkpoint: save %s: %w", path, err)
	}
	return nil
}

func writePyTorch(path string, root any) error {
	f, err := newMain(path, safefile.PyTorch, false)
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
			return ptfile.NewTensor(v.entry.dtype, v.entry.shape,
				func(b []byte) error { return v.from.readBytes(b, v.entry, 0) })
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

// replacesComment starts the zip comment of a PyTorch file that replaced a checkpoint of ranks. The
// ids of such checkpoints follow, with spaces between.
const replacesComment = "replaces "

// finishPyTorch writes the value, and finishes the main file.
func (f *unfinished) finishPyTorch(root any) error {
	replaced, err := f.replacedIDs()
	if err != nil {
		return err
	}
	comment := ""
	if len(replaced) > 0 {
		comment = replacesComment + strings.Join(replaced, " ")
	}
	if err := f.write(func(w io.Writer) error { return ptfile.Write(w, root, comment) }); err != nil {
		return err
	}
	return f.finishMain(replaced)
}
