package nn

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/torchstream/torchstream/internal/ptfile"
	"github.com/torchstream/torchstream/torch"
)

// source is the set of tensors to load from: a file's, or those of one dict of a PyTorch file.
type source struct {
	dict    string // the path of the dict; "" for the file itself
	names   []string
	entries map[string]entry
	twins   map[string]string         // for names that the file lacks, the name of the tied tensor
	dicts   []tensorDict              // all dicts of the file
	unread  map[string]*ptfile.Opaque // values that cannot be read as tensors
}

// source returns the tensors of the named dict or, if the name is empty, those of the dict that
// OpenCheckpoint chose.
func (c *Checkpoint) source(dict string) (source, error) {
	s := source{dict: c.dict, names: c.names, entries: c.entries, unread: c.unread, twins: map[string]string{}, dicts: tensorDicts(c.root)}
	if dict != "" {
		i := slices.IndexFunc(s.dicts, func(d tensorDict) bool { return d.path == dict })
		if i < 0 {
			return s, fmt.Errorf("nn: %s: there is no dict of tensors %q%s", c.path, dict, listDicts(s.dicts, "; the file has "))
		}
		s.names, s.entries, s.unread = dictEntries(s.dicts[i].dict)
		s.dict = dict
	}
	// safetensors.torch.save_model writes one of several tied tensors, and maps the other names to
	// its name.
	for removed, kept := range c.metadata {
		_, has := s.entries[removed]
		if _, ok := s.entries[kept]; ok && !has && !c.pytorch {
			s.twins[removed] = kept
		}
	}
	return s, nil
}

// isTwin reports whether a tensor of a PyTorch file shares its memory with a used one.
func (s *source) isTwin(name string, used map[string]bool) bool {
	t := s.entries[name].stored
	if t == nil {
		return false
	}
	for other := range used {
		o := s.entries[other].stored
		if o != nil && o.Storage == t.Storage && o.DType() == t.DType() && o.Offset == t.Offset &&
			slices.Equal(o.Shape, t.Shape) && slices.Equal(o.Strides, t.Strides) {
			return true
		}
	}
	return false
}

// matched pairs a file's tensors with a module's.
type matched struct {
	file map[string]string // the file's name, by the module's
	left map[string]bool   // names of the file that are skipped on purpose
}

// namesFor matches the file's names with a module's names, and records in the report how they
// differ. unused has the module's names of tensors that it does not use.
func (s *source) namesFor(state []torch.Named, unused map[string]bool, rename func(string) string, r *LoadReport) (matched, error) {
	shapes := make(map[string][]int64, len(state))
	for _, n := range state {
		shapes[n.Name] = n.Tensor.Shape()
	}
	m := matched{file: map[string]string{}, left: map[string]bool{}}
	if rename == nil {
		change := s.bestChange(shapes)
		r.Notes = append(r.Notes, change.notes()...)
		for name := range change.left {
			m.left[name] = true
		}
		rename = change.apply
	}
	var notUsed []string
	for _, name := range s.names {
		to := rename(name)
		if unused[to] {
			notUsed = append(notUsed, fmt.Sprintf("%q", name))
		}
		if to == "" || unused[to] {
			m.left[name] = true
			continue
		}
		if first, twice := m.file[to]; twice {
			return m, fmt.Errorf("the tensors %s and %s both become %s", first, name, to)
		}
		m.file[to] = name
	}
	for _, removed := range slices.Sorted(maps.Keys(s.twins)) {
		to, kept := rename(removed), s.twins[removed]
		_, has := m.file[to]
		if _, wanted := shapes[to]; wanted && !has {
			m.file[to] = kept
			r.Notes = append(r.Notes, fmt.Sprintf("%s is the tied tensor %s of the file", to, kept))
		}
	}
	if len(notUsed) > 0 {
		r.Notes = append(r.Notes, "the network does not use these tensors of the file: "+listFirst(notUsed))
	}
	r.Notes = append(r.Notes, s.averagesNotTaken()...)
	return m, nil
}

// nameChange maps a file's names to a module's.
type nameChange struct {
	wrappers []string        // removed anywhere in a name
	remove   string          // a prefix
	add      string          // another prefix, added after the removal
	left     map[string]bool // names that no module has
}

// apply returns the module's name for the file's, or "" for a skipped name.
func (n *nameChange) apply(name string) string {
	if n.left[name] {
		return ""
	}
	return n.add + strings.TrimPrefix(without(name, n.wrappers), n.remove)
}

// notes describes the changes of names.
func (n *nameChange) notes() []string {
	var notes []string
	for _, w := range n.wrappers {
		notes = append(notes, fmt.Sprintf("%q is removed from the file's names", w))
	}
	if n.remove != "" {
		notes = append(notes, fmt.Sprintf("the prefix %q is removed from the file's names", n.remove))
	}
	if n.add != "" {
		notes = append(notes, fmt.Sprintf("the prefix %q is added to the file's names", n.add))
	}
	if len(n.left) > 0 {
		notes = append(notes, "the weights are averages of an AveragedModel, which counts them in "+averagedCount)
	}
	return notes
}

// averagedCount is the name of the counter in torch.optim.swa_utils.AveragedModel, which keeps its
// network as "module".
const averagedCount = "n_averaged"

// wrappers are the infixes that PyTorch's wrappers of inner modules add to names. No layer has
// these names. A layer may be called "module" as DistributedDataParallel's prefix is, so that is
// removed only as a prefix of all names.
func wrappers() []string {
	return []string{"_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module."}
}

func without(name string, parts []string) string {
	for _, p := range parts {
		// At the start, or after a dot.
		if rest, ok := strings.CutPrefix(name, p); ok {
			name = rest
		}
		name = strings.ReplaceAll(name, "."+p, ".")
	}
	return name
}

// bestChange returns the change after which most tensors match the module in name and shape. Among
// equals it returns the smallest change.
func (s *source) bestChange(shapes map[string][]int64) nameChange {
	best := nameChange{}
	most := s.score(&best, shapes)
	if most == len(shapes) {
		return best
	}
	base := nameChange{wrappers: s.wrappersOf()}
	var plain []string
	for _, name := range s.names {
		if name == averagedCount || strings.HasSuffix(name, "."+averagedCount) {
			if base.left == nil {
				base.left = map[string]bool{}
			}
			base.left[name] = true
			continue
		}
		plain = append(plain, without(name, base.wrappers))
	}
	wanted := make([]string, 0, len(shapes))
	for name := range shapes {
		wanted = append(wanted, name)
	}
	for _, remove := range commonPrefixes(plain) {
		for _, add := range commonPrefixes(wanted) {
			n := base
			n.remove, n.add = remove, add
			if score := s.score(&n, shapes); score > most {
				best, most = n, score
			}
		}
	}
	return best
}

// wrappersOf returns the wrappers in the file's names.
func (s *source) wrappersOf() (found []string) {
	for _, w := range wrappers() {
		if slices.ContainsFunc(s.names, func(name string) bool { return strings.HasPrefix(name, w) || strings.Contains(name, "."+w) }) {
			found = append(found, w)
		}
	}
	return found
}

// score counts the names of the module for which the changed file has a tensor of the same shape.
// Two tensors with one name count once.
func (s *source) score(n *nameChange, shapes map[string][]int64) int {
	matched := map[string]bool{}
	count := func(name string, e entry) {
		to := n.apply(name)
		if shape, ok := shapes[to]; ok && fits(e.shape, shape) {
			matched[to] = true
		}
	}
	for _, name := range s.names {
		count(name, s.entries[name])
	}
	for removed, kept := range s.twins {
		count(removed, s.entries[kept])
	}
	return len(matched)
}

// commonPrefixes returns the prefixes that end in a dot and that all names share, the empty one
// first. A name is longer than its prefix.
func commonPrefixes(names []string) []string {
	const most = 8 // names of an untrusted file may have any number of dots
	prefixes := []string{""}
	if len(names) == 0 {
		return prefixes
	}
	for at := 0; len(prefixes) <= most; {
		n := strings.IndexByte(names[0][at:], '.')
		if n < 0 {
			break
		}
		at += n + 1
		prefix := names[0][:at]
		if slices.ContainsFunc(names, func(name string) bool { return len(name) <= len(prefix) || !strings.HasPrefix(name, prefix) }) {
			break
		}
		prefixes = append(prefixes, prefix)
	}
	return prefixes
}

// tensorDict is a dict of a PyTorch file that maps names to floating-point tensors.
type tensorDict struct {
	path    string // keys joined by dots; "" for the file's root
	tensors int
	dict    *ptfile.Dict
}

// averages reports whether a name in the path indicates averaged weights.
func (d tensorDict) averages() bool {
	words := strings.FieldsFunc(strings.ToLower(d.path), func(r rune) bool { return r == '.' || r == '_' || r == '-' })
	return slices.ContainsFunc(words, func(w string) bool {
		return slices.Contains([]string{"ema", "swa", "average", "averages", "averaged", "shadow"}, w)
	})
}

// tensorDicts returns the dicts of tensors of a PyTorch file, parents first.
func tensorDicts(root any) []tensorDict {
	const deepest = 4
	var found []tensorDict
	seen := map[*ptfile.Dict]bool{}
	var visit func(path string, v any, depth int)
	visit = func(path string, v any, depth int) {
		d, ok := v.(*ptfile.Dict)
		if !ok || seen[d] || depth > deepest {
			return
		}
		seen[d] = true
		if n := countTensors(d); n > 0 {
			found = append(found, tensorDict{path, n, d})
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

// countTensors counts the named tensors of a dict. It returns 0 if none is floating-point: such a
// dict holds the states of random generators and the like.
func countTensors(d *ptfile.Dict) int {
	n, numbers := 0, false
	for key, value := range d.All() {
		_, named := key.(string)
		t, ok := value.(*ptfile.Tensor)
		if named && ok {
			n++
			numbers = numbers || floating(t.DType()) || float8(t.DType())
		}
	}
	if !numbers {
		return 0
	}
	return n
}

// stateDict chooses the dict with the model's tensors: a dict under a key that training programs
// use; else root itself; else the only other dict; else averages.
func stateDict(root *ptfile.Dict) (path string, d *ptfile.Dict) {
	// The first keys name a model's tensors, whatever the dtypes.
	for _, key := range []string{stateDictKey, "model_state_dict", "model"} {
		v, _ := root.Get(key)
		if d, ok := v.(*ptfile.Dict); ok {
			if names, _, _ := dictEntries(d); len(names) > 0 {
				return key, d
			}
		}
	}
	dicts := tensorDicts(root)
	for _, key := range []string{"", "net", "network", "module", "model_state", "params", "weights"} {
		if i := slices.IndexFunc(dicts, func(d tensorDict) bool { return d.path == key }); i >= 0 {
			return key, dicts[i].dict
		}
	}
	plain := slices.DeleteFunc(slices.Clone(dicts), tensorDict.averages)
	switch {
	case len(plain) == 1:
		return plain[0].path, plain[0].dict
	case len(plain) == 0 && len(dicts) > 0:
		return dicts[0].path, dicts[0].dict
	}
	return "", root
}

// dictEntries returns the tensors of a dict, and the values that cannot be read.
func dictEntries(d *ptfile.Dict) (names []string, entries map[string]entry, unread map[string]*ptfile.Opaque) {
	entries, unread = map[string]entry{}, map[string]*ptfile.Opaque{}
	for key, value := range d.All() {
		name, ok := key.(string)
		if !ok {
			continue
		}
		switch v := value.(type) {
		case *ptfile.Tensor:
			names = append(names, name)
			entries[name] = entry{dtype: v.DType(), shape: v.Shape, stored: v}
		case *ptfile.Opaque:
			unread[name] = v
		}
	}
	return names, entries, unread
}

// averagesNotTaken names the dicts of averages in the file that were not chosen. If averages were
// chosen because the file has nothing else, it says so.
func (s *source) averagesNotTaken() []string {
	var notes, others []string
	for _, d := range s.dicts {
		switch {
		case !d.averages():
		case d.path == s.dict:
			notes = append(notes, fmt.Sprintf("the weights are the averages %q of the file", d.path))
		default:
			others = append(others, fmt.Sprintf("%q (%d tensors)", d.path, d.tensors))
		}
	}
	if len(others) > 0 {
		notes = append(notes, "the file also has averages, which are not loaded: "+listFirst(others)+": LoadOptions.Dict names them")
	}
	return notes
}

// describe lists the file's names, dicts and unread values for an error, and any prefix that would
// help.
func (s *source) describe(state []torch.Named) []error {
	errs := []error{s.describeNames()}
	if prefix, n := s.partPrefix(state); n > 0 {
		errs = append(errs, fmt.Errorf("%d of its names are the module's behind %q: remove it with LoadOptions.Rename", n, prefix))
	}
	for _, name := range slices.Sorted(maps.Keys(s.unread))[:min(len(s.unread), mostListed)] {
		errs = append(errs, &UnreadError{name, s.unread[name]})
	}
	if len(s.dicts) > 1 && len(s.names) > 0 {
		errs = append(errs, errors.New(listDicts(s.dicts, "its dicts of tensors are ")+": LoadOptions.Dict names one"))
	}
	return errs
}

func (s *source) describeNames() error {
	switch {
	case len(s.names) == 0 && len(s.dicts) == 0:
		return errors.New("the file has no tensors by name")
	case len(s.names) == 0:
		return errors.New(listDicts(s.dicts, "the file has no tensors by name outside of dicts; its dicts of tensors are ") + ": LoadOptions.Dict names one")
	}
	quoted := make([]string, len(s.names))
	for i, name := range s.names {
		quoted[i] = fmt.Sprintf("%q", name)
	}
	where := ""
	if s.dict != "" {
		where = fmt.Sprintf(" in its dict %q", s.dict)
	}
	return fmt.Errorf("the file has %d tensors%s: %s", len(quoted), where, listFirst(quoted))
}

// partPrefix returns a prefix of some of the file's names after whose removal most names match the
// module, with their shapes.
func (s *source) partPrefix(state []torch.Named) (best string, most int) {
	shapes := map[string][]int64{}
	for _, n := range state {
		shapes[n.Name] = n.Tensor.Shape()
	}
	counts := map[string]int{}
	for _, name := range s.names {
		for at := 0; ; {
			n := strings.IndexByte(name[at:], '.')
			if n < 0 || at > 200 {
				break
			}
			at += n + 1
			if shape, ok := shapes[name[at:]]; ok && fits(s.entries[name].shape, shape) {
				counts[name[:at]]++
			}
		}
	}
	for prefix, n := range counts {
		if n > most || n == most && prefix < best {
			best, most = prefix, n
		}
	}
	return best, most
}

// listDicts lists dicts of tensors for an error, after the text before. It returns "" if there are
// none.
func listDicts(dicts []tensorDict, before string) string {
	texts := make([]string, len(dicts))
	for i, d := range dicts {
		texts[i] = fmt.Sprintf("%q (%d tensors)", d.path, d.tensors)
	}
	if len(texts) == 0 {
		return ""
	}
	return before + listFirst(texts)
}

// mostListed is the number of the file's names in an error.
const mostListed = 5

// listFirst joins the first texts, followed by dots if there are more.
func listFirst(texts []string) string {
	if len(texts) > mostListed {
		return strings.Join(texts[:mostListed], ", ") + ", ..."
	}
	return strings.Join(texts, ", ")
}
