package checkpoint

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/torchstream/torchstream/checkpoint/internal/ptfile"
	"github.com/torchstream/torchstream/torch"
)

// Dict is a set of named tensors in a file: one dict of a PyTorch file, or all tensors of a file of
// another kind.
type Dict struct {
	// Path has the keys of the dict in the PyTorch file, joined by dots. "" is the file itself.
	Path    string
	Tensors []*StoredTensor // in the file's order
	Unread  []*UnreadError  // the values that cannot be read, by name
}

// Averages reports whether a word in the dict's path, such as "ema", says that the tensors are
// averages of weights.
func (d Dict) Averages() bool { return namesAverages(d.Path) }

// String returns the path and the number of tensors.
func (d Dict) String() string { return fmt.Sprintf("%q (%d tensors)", d.Path, len(d.Tensors)) }

// Dict returns the tensors of the dict at a path of keys in a PyTorch file, joined by dots. If the
// path is empty, it returns the tensors that [File.Tensors] lists: in a PyTorch file the tensors of
// the dict that Open chose, in other files all tensors.
func (f *File) Dict(path string) (Dict, error) {
	if path == "" {
		if f.pytorch != nil {
			path = f.pytorch.dict
		}
		return f.dictOf(path, f.tensors), nil
	}
	dicts := f.Dicts()
	i := slices.IndexFunc(dicts, func(d Dict) bool { return d.Path == path })
	if i < 0 {
		has := ""
		if len(dicts) > 0 {
			has = "; the file has " + list(dicts)
		}
		return Dict{}, fmt.Errorf("checkpoint: %s: there is no dict of tensors %q%s", f.path, path, has)
	}
	return dicts[i], nil
}

// list joins the first dicts, followed by dots if there are more.
func list(dicts []Dict) string {
	const most = 5
	var texts []string
	for _, d := range dicts[:min(len(dicts), most)] {
		texts = append(texts, d.String())
	}
	if len(dicts) > most {
		texts = append(texts, "...")
	}
	return strings.Join(texts, ", ")
}

// Dicts returns all dicts of a PyTorch file that have floating-point tensors, parents first. Other
// files have none.
func (f *File) Dicts() []Dict {
	if f.pytorch == nil {
		return nil
	}
	found := tensorDicts(f.pytorch.root)
	dicts := make([]Dict, len(found))
	for i, d := range found {
		dicts[i] = f.dictOf(d.path, d.tensors())
	}
	return dicts
}

// dictOf returns the Dict of a set of tensors.
func (f *File) dictOf(path string, set tensorSet) Dict {
	d := Dict{Path: path, Tensors: make([]*StoredTensor, len(set.names))}
	for i, name := range set.names {
		d.Tensors[i] = &StoredTensor{f, set.entries[name], name}
	}
	for _, name := range slices.Sorted(maps.Keys(set.unread)) {
		d.Unread = append(d.Unread, &UnreadError{name, set.unread[name]})
	}
	return d
}

// namesAverages reports whether a word in a path of keys indicates averaged weights.
func namesAverages(path string) bool {
	words := strings.FieldsFunc(strings.ToLower(path), func(r rune) bool { return r == '.' || r == '_' || r == '-' })
	return slices.ContainsFunc(words, func(w string) bool {
		return slices.Contains([]string{"ema", "swa", "average", "averages", "averaged", "shadow"}, w)
	})
}

// dictAt is a dict of a PyTorch file.
type dictAt struct {
	path string // keys joined by dots; "" for the file's root
	dict *ptfile.Dict
}

// tensorDicts returns the dicts of a PyTorch file that map names to floating-point tensors, parents
// first.
func tensorDicts(root any) []dictAt {
	const deepest = 4
	var found []dictAt
	seen := map[*ptfile.Dict]bool{}
	var visit func(path string, v any, depth int)
	visit = func(path string, v any, depth int) {
		d, ok := v.(*ptfile.Dict)
		if !ok || seen[d] || depth > deepest {
			return
		}
		seen[d] = true
		if hasWeights(d) {
			found = append(found, dictAt{path, d})
		}
		for key, value := range d.All() {
			name, ok := key.(string)
			if !ok {
				continue
			}
			if path != "" {
				name = path + "." + name
			}
			visit(name, value, depth+1)
		}
	}
	visit("", root, 0)
	return found
}

// hasWeights reports whether a dict names a floating-point tensor. A dict that has only tensors of
// other dtypes is not a model: it may hold the states of random generators, for example.
func hasWeights(d *ptfile.Dict) bool {
	for key, value := range d.All() {
		_, named := key.(string)
		t, ok := value.(*ptfile.Tensor)
		if named && ok && floating(t.DType()) {
			return true
		}
	}
	return false
}

func floating(d torch.DType) bool {
	switch d {
	case torch.Float16, torch.BFloat16, torch.Float32, torch.Float64, torch.Float8E5M2, torch.Float8E4M3FN:
		return true
	}
	return false
}

// stateDict chooses the dict with the model's tensors, in the order that [Open] documents.
func stateDict(root *ptfile.Dict) dictAt {
	// Under these keys a dict is the model's, whatever the dtypes of its tensors.
	for _, key := range []string{stateDictKey, "model_state_dict", "model"} {
		v, _ := root.Get(key)
		if d, ok := v.(*ptfile.Dict); ok {
			if at := (dictAt{key, d}); len(at.tensors().names) > 0 {
				return at
			}
		}
	}
	dicts := tensorDicts(root)
	for _, key := range []string{"", "net", "network", "module", "model_state", "params", "weights"} {
		if i := slices.IndexFunc(dicts, func(d dictAt) bool { return d.path == key }); i >= 0 {
			return dicts[i]
		}
	}
	plain := slices.DeleteFunc(slices.Clone(dicts), func(d dictAt) bool { return namesAverages(d.path) })
	switch {
	case len(plain) == 1:
		return plain[0]
	case len(plain) == 0 && len(dicts) > 0:
		return dicts[0]
	}
	return dictAt{"", root}
}

// tensors returns the dict's tensors, and the values that cannot be read.
func (d dictAt) tensors() tensorSet {
	set := tensorSet{entries: map[string]entry{}, unread: map[string]*ptfile.Opaque{}}
	for key, value := range d.dict.All() {
		name, ok := key.(string)
		if !ok {
			continue
		}
		switch v := value.(type) {
		case *ptfile.Tensor:
			set.names = append(set.names, name)
			set.entries[name] = storedEntry(v)
		case *ptfile.Opaque:
			set.unread[name] = v
		}
	}
	return set
}

// storedEntry returns the entry of a tensor in a PyTorch file.
func storedEntry(t *ptfile.Tensor) entry {
	return entry{dtype: t.DType(), shape: t.Shape, stored: t}
}
