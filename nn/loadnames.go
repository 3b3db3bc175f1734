package nn

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/torchstream/torchstream/checkpoint"
	"github.com/torchstream/torchstream/torch"
)

// source is the set of tensors to load from: all tensors of a file, or the tensors of one dict in a
// PyTorch file.
type source struct {
	dict    checkpoint.Dict
	names   []string // in the file's order
	tensors map[string]*checkpoint.StoredTensor
	specs   map[string]torch.Spec
	twins   map[string]string // for names that the file lacks, the name of the tied tensor
	dicts   []checkpoint.Dict // all dicts of the file
}

// newSource returns the tensors of the named dict or, if the name is empty, the tensors that f
// lists.
func newSource(f *checkpoint.File, dict string) (source, error) {
	d, err := f.Dict(dict)
	if err != nil {
		return source{}, err
	}
	s := source{dict: d, tensors: map[string]*checkpoint.StoredTensor{}, specs: map[string]torch.Spec{},
		twins: map[string]string{}, dicts: f.Dicts()}
	for _, t := range d.Tensors {
		spec := t.Spec()
		s.names = append(s.names, spec.Name)
		s.tensors[spec.Name], s.specs[spec.Name] = t, spec
	}
	if f.IsPyTorch() {
		return s, nil
	}
	// safetensors.torch.save_model writes one of several tied tensors, and maps the other names to
	// its name.
	for removed, kept := range f.Metadata() {
		_, has := s.tensors[removed]
		if _, ok := s.tensors[kept]; ok && !has {
			s.twins[removed] = kept
		}
	}
	return s, nil
}

// isTwin reports whether a tensor of a PyTorch file shares its memory with one of the used tensors.
func (s *source) isTwin(name string, used []*checkpoint.StoredTensor) bool {
	return slices.ContainsFunc(used, s.tensors[name].TiedTo)
}

// matched pairs a file's tensors with a module's.
type matched struct {
	file map[string]string // the file's names, by the module's names
	left map[string]bool   // names of the file that are skipped on purpose
}

// namesFor matches the file's names with a module's names, and records in the report how they
// differ. unused has the names of tensors that the module does not use.
func (s *source) namesFor(state []torch.Named, unused map[string]bool, rename func(string) string,
	r *LoadReport) (matched, error) {
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
// these names. A layer may be called "module", like DistributedDataParallel's prefix. Therefore
// "module" is removed only as a prefix of all names.
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

// bestChange returns the change after which most tensors match the module in name and shape. If
// several changes match equally many, it returns the smallest of them.
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
		if slices.ContainsFunc(s.names, func(name string) bool {
			return strings.HasPrefix(name, w) ||
				strings.Contains(name, "."+w)
		}) {
			found = append(found, w)
		}
	}
	return found
}

// score counts the names of the module for which the changed file has a tensor of the same shape.
// Two tensors with one name count once.
func (s *source) score(n *nameChange, shapes map[string][]int64) int {
	matched := map[string]bool{}
	count := func(name string, spec torch.Spec) {
		to := n.apply(name)
		if shape, ok := shapes[to]; ok && fits(spec.Shape, shape) {
			matched[to] = true
		}
	}
	for _, name := range s.names {
		count(name, s.specs[name])
	}
	for removed, kept := range s.twins {
		count(removed, s.specs[kept])
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
		if slices.ContainsFunc(names,
			func(name string) bool { return len(name) <= len(prefix) || !strings.HasPrefix(name, prefix) }) {
			break
		}
		prefixes = append(prefixes, prefix)
	}
	return prefixes
}

// averagesNotTaken names the dicts of averages in the file that were not chosen. If averages were
// chosen because the file has nothing else, it says so.
func (s *source) averagesNotTaken() []string {
	var notes, others []string
	for _, d := range s.dicts {
		switch {
		case !d.Averages():
		case d.Path == s.dict.Path:
			notes = append(notes, fmt.Sprintf("the weights are the averages %q of the file", d.Path))
		default:
			others = append(others, d.String())
		}
	}
	if len(others) > 0 {
		notes = append(notes, "the file also has averages, which are not loaded: "+listFirst(others)+
			": LoadOptions.Dict names them")
	}
	return notes
}

// describe lists the file's names, dicts and unread values for an error, and any prefix that would
// help.
func (s *source) describe(state []torch.Named) []error {
	errs := []error{s.describeNames()}
	if prefix, n := s.partPrefix(state); n > 0 {
		errs = append(errs, fmt.Errorf(
			"%d of its names are the module's behind %q: remove it with LoadOptions.Rename", n, prefix))
	}
	for _, unread := range s.dict.Unread[:min(len(s.dict.Unread), mostListed)] {
		errs = append(errs, unread)
	}
	if len(s.dicts) > 1 && len(s.names) > 0 {
		errs = append(errs, errors.New("its dicts of tensors are "+listDicts(s.dicts)+": LoadOptions.Dict names one"))
	}
	return errs
}

func (s *source) describeNames() error {
	switch {
	case len(s.names) == 0 && len(s.dicts) == 0:
		return errors.New("the file has no tensors by name")
	case len(s.names) == 0:
		return errors.New("the file has no tensors by name outside of dicts; its dicts of tensors are " +
			listDicts(s.dicts) + ": LoadOptions.Dict names one")
	}
	quoted := make([]string, len(s.names))
	for i, name := range s.names {
		quoted[i] = fmt.Sprintf("%q", name)
	}
	where := ""
	if s.dict.Path != "" {
		where = fmt.Sprintf(" in its dict %q", s.dict.Path)
	}
	return fmt.Errorf("the file has %d tensors%s: %s", len(quoted), where, listFirst(quoted))
}

// partPrefix finds a prefix of some of the file's names. If it is removed, these names match the
// module's tensors, with the same shapes. partPrefix returns the prefix that gives the most
// matches, and their number.
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
			if shape, ok := shapes[name[at:]]; ok && fits(s.specs[name].Shape, shape) {
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

// listDicts lists dicts of tensors for an error.
func listDicts(dicts []checkpoint.Dict) string {
	texts := make([]string, len(dicts))
	for i, d := range dicts {
		texts[i] = d.String()
	}
	return listFirst(texts)
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
