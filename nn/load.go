package nn

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/torchstream/torchstream/checkpoint"
	"github.com/torchstream/torchstream/internal/hostblock"
	"github.com/torchstream/torchstream/torch"
)

// Load reads a file written by [Save] or PyTorch into the module's parameters and buffers, on any
// device, and returns the file's metadata. The file must have exactly the module's names and
// shapes; otherwise the error lists the differences and some of the file's names. Load holds the
// whole file in host memory before it changes the module. Only a device failure can leave some
// tensors loaded and others not.
//
// A floating-point tensor of another dtype is converted as PyTorch converts it. Integers are
// converted if the module's dtype can represent all of them. It is an error if the file has
// integers where the module has floating-point numbers, as in a quantized model.
//
// Names may differ by prefixes. Load removes a prefix that all names of the file have if the names
// then match: "module." of DistributedDataParallel, "_orig_mod." of torch.compile, "model." of
// Lightning, or several. It adds a prefix that all names of the module have, such as
// "transformer.". The file needs only one of several tied weights: the metadata of
// safetensors.torch.save_model names the others, and a PyTorch file shows which tensors share
// memory.
//
// As in PyTorch, a file may lack num_batches_tracked, the batch counts of normalisations, which
// PyTorch before 0.4.1 did not write. The module then keeps its counts.
func Load(path string, m Module) (map[string]string, error) {
	r, err := LoadWith(path, m, LoadOptions{})
	if err != nil {
		return nil, err
	}
	return r.Metadata, nil
}

// LoadOptions are the options of [LoadWith].
type LoadOptions struct {
	// Partial loads the tensors that file and module have in common, and does not change the
	// module's other tensors. Use it to fine-tune with another head, or to load a part of a model.
	// It is still an error if the file and the module have no parameter in common.
	Partial bool
	// Rename, if not nil, maps a tensor's name in the file to its name in the module, or to "" to
	// skip the tensor. Load then neither removes nor adds prefixes.
	Rename func(name string) string
	// Dict names the dict of a PyTorch file that has the tensors, such as "state_dict_ema". Dots
	// join the keys of nested dicts. "" selects the dict that [checkpoint.Open] chooses.
	Dict string
}

// LoadReport compares a file with a module.
type LoadReport struct {
	Metadata   map[string]string
	Loaded     []string   // the tensors that now have the file's values, in the module's order
	Converted  []Mismatch // the tensors of Loaded whose dtype in the file differs
	Missing    []string   // tensors of the module that are not in the file
	Unexpected []string   // tensors of the file, by its names, that are not in the module
	Mismatched []Mismatch // tensors whose shapes differ, or whose dtypes cannot be converted

	Parameters, AllParameters int   // the numbers of loaded parameters and of all parameters
	Elements, AllElements     int64 // the numbers in Loaded, and the numbers in all parameters and buffers

	// Notes are sentences about names: a removed prefix, a tied weight that the file lists under
	// another name, or averages in the file that were not loaded.
	Notes []string
}

// Mismatch is a tensor whose shape or dtype differs between file and module. Name is the module's
// name.
type Mismatch struct {
	Name         string
	File, Module torch.Spec
}

func (m Mismatch) String() string {
	return fmt.Sprintf("%s is %v%v in the file and %v%v in the module", m.Name, m.File.DType, m.File.Shape,
		m.Module.DType, m.Module.Shape)
}

// LowShare is the [LoadReport.Share] below which a report asks whether the file belongs to this
// network.
const LowShare = 0.9

// Share returns the fraction of the module's numbers that came from the file: 0 to 1.
func (r *LoadReport) Share() float64 {
	if r.AllElements == 0 {
		return 1
	}
	return float64(r.Elements) / float64(r.AllElements)
}

// String returns [LoadReport.Describe] with all differences.
func (r *LoadReport) String() string {
	return r.Describe("the same network", len(r.Missing)+len(r.Mismatched)+len(r.Unexpected))
}

// Describe reports how many tensors and parameters, and what share of the numbers, came from the
// file. The next lines are the notes and at most the given number of differences. If the share is
// below [LowShare], a line asks "is this NETWORK?".
func (r *LoadReport) Describe(network string, differences int) string {
	lines := []string{fmt.Sprintf("%d tensors loaded: %d of %d parameters, %s of the numbers",
		len(r.Loaded), r.Parameters, r.AllParameters, percent(r.Elements, r.AllElements))}
	if r.Share() < LowShare {
		lines = append(lines, fmt.Sprintf("is this %s? The other numbers stay as they were before", network))
	}
	if len(r.Converted) > 0 {
		lines = append(lines, converted(r.Converted))
	}
	lines = append(lines, r.Notes...)
	for _, d := range atMost(r.differences(), differences) {
		lines = append(lines, d.Error())
	}
	return strings.Join(lines, "\n")
}

// percent rounds down, so that it returns 100 % only for all numbers.
func percent(n, all int64) string {
	if n == all {
		return "100 %"
	}
	return fmt.Sprintf("%.1f %%", float64(int64(1000*float64(n)/float64(all)))/10)
}

// converted describes the converted tensors: a count per pair of dtypes.
func converted(tensors []Mismatch) string {
	type pair struct{ from, to torch.DType }
	var pairs []pair
	count := map[pair]int{}
	for _, m := range tensors {
		p := pair{m.File.DType, m.Module.DType}
		if count[p] == 0 {
			pairs = append(pairs, p)
		}
		count[p]++
	}
	texts := make([]string, len(pairs))
	for i, p := range pairs {
		texts[i] = fmt.Sprintf("%d from %v to %v", count[p], p.from, p.to)
	}
	return "tensors converted: " + strings.Join(texts, ", ")
}

func (r *LoadReport) differences() []error {
	var errs []error
	for _, name := range r.Missing {
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

// LoadWith is [Load] with options, and returns a report. After an error the module is unchanged, as
// with Load.
func LoadWith(path string, m Module, o LoadOptions) (*LoadReport, error) {
	f, err := checkpoint.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return LoadFrom(f, m, o)
}

// LoadFrom is like [LoadWith], but reads an open file.
func LoadFrom(f *checkpoint.File, m Module, o LoadOptions) (*LoadReport, error) {
	l := loading{file: f, state: State(m), unused: unused(m), report: &LoadReport{Metadata: f.Metadata()}}
	err := l.match(o)
	if err == nil {
		l.count(m)
		err = l.accept(o)
	}
	if err != nil {
		return nil, err
	}
	read := torch.NewScope("nn.Load")
	defer read.Close()
	if err := l.read(read); err != nil {
		return nil, err
	}
	l.count(m)
	for _, p := range l.pairs {
		if err := p.to.Tensor.CopyFrom(p.values, torch.CopyOptions{}); err != nil {
			return nil, fmt.Errorf("nn: %s: tensor %s: %w", f.Path(), p.to.Name, err)
		}
	}
	return l.report, nil
}

// loading is the state of one LoadFrom.
type loading struct {
	file   *checkpoint.File
	from   source
	state  []torch.Named   // the module's tensors
	unused map[string]bool // names of the module: see Parts.Unused
	pairs  []loadPair
	report *LoadReport
}

// loadPair is a tensor that both file and module have.
type loadPair struct {
	to     torch.Named
	file   string        // the name in the file
	values *torch.Tensor // in the module's dtype and shape; nil before read
}

// match finds the common tensors and all differences, before anything changes.
func (l *loading) match(o LoadOptions) error {
	var err error
	if l.from, err = newSource(l.file, o.Dict); err != nil {
		return err
	}
	var errs []error
	for _, n := range l.state {
		if err := n.Tensor.Err(); err != nil {
			errs = append(errs, fmt.Errorf("the module's tensor %s: %w", n.Name, err))
		}
	}
	if len(errs) > 0 {
		return l.unfit(errs)
	}
	names, err := l.from.namesFor(l.state, l.unused, o.Rename, l.report)
	if err != nil {
		return fmt.Errorf("nn: %s: %w", l.file.Path(), err)
	}
	used := map[string]bool{}
	for _, n := range l.state {
		if file, ok := names.file[n.Name]; ok {
			used[file] = true
			l.pair(n, file)
		} else {
			l.report.Missing = append(l.report.Missing, n.Name)
		}
	}
	l.sharedWithin()
	var loaded []*checkpoint.StoredTensor
	for name := range used {
		loaded = append(loaded, l.from.tensors[name])
	}
	for _, name := range l.from.names {
		if !used[name] && !names.left[name] && !l.from.isTwin(name, loaded) {
			l.report.Unexpected = append(l.report.Unexpected, name)
		}
	}
	return nil
}

// pair adds a common tensor to the tensors to load, or to the mismatches.
func (l *loading) pair(n torch.Named, file string) {
	m := Mismatch{n.Name, l.from.specs[file],
		torch.Spec{Name: n.Name, DType: n.Tensor.DType(), Shape: n.Tensor.Shape()}}
	if !fits(m.File.Shape, m.Module.Shape) || !convertible(m.File.DType, m.Module.DType) {
		l.report.Mismatched = append(l.report.Mismatched, m)
		return
	}
	if m.File.DType != m.Module.DType {
		l.report.Converted = append(l.report.Converted, m)
	}
	l.report.Loaded = append(l.report.Loaded, n.Name)
	l.pairs = append(l.pairs, loadPair{to: n, file: file})
}

// fits reports whether a tensor of the file's shape can be loaded. PyTorch before 0.4 had no
// zero-dimensional tensors, and wrote one element instead.
func fits(file, module []int64) bool {
	return slices.Equal(file, module) || len(module) == 0 && slices.Equal(file, []int64{1})
}

// sharedWithin moves names from Missing to Loaded if their tensor is loaded under another name.
func (l *loading) sharedWithin() {
	r, shared := l.report, map[*torch.Tensor]bool{}
	for _, p := range l.pairs {
		shared[p.to.Tensor] = true
	}
	missing, loaded := r.Missing, r.Loaded
	r.Missing, r.Loaded = nil, nil
	for _, n := range l.state {
		switch absent := slices.Contains(missing, n.Name); {
		case absent && !shared[n.Tensor]:
			r.Missing = append(r.Missing, n.Name)
		case absent || slices.Contains(loaded, n.Name):
			r.Loaded = append(r.Loaded, n.Name)
		}
	}
}

// count sets the totals of the report.
func (l *loading) count(m Module) {
	r, loaded := l.report, map[*torch.Tensor]bool{}
	r.Parameters, r.AllParameters, r.Elements, r.AllElements = 0, 0, 0, 0
	for _, p := range l.pairs {
		loaded[p.to.Tensor] = true
	}
	seen := map[*torch.Tensor]bool{}
	for _, n := range l.state {
		if !seen[n.Tensor] {
			r.AllElements += n.Tensor.Elements()
			if loaded[n.Tensor] {
				r.Elements += n.Tensor.Elements()
			}
		}
		seen[n.Tensor] = true
	}
	clear(seen)
	for _, p := range Parameters(m) {
		if !seen[p] {
			r.AllParameters++
			if loaded[p] {
				r.Parameters++
			}
		}
		seen[p] = true
	}
}

// accept returns an error unless the options allow the differences.
func (l *loading) accept(o LoadOptions) error {
	r := l.report
	something := r.Parameters > 0 || r.AllParameters == 0 && len(r.Loaded) > 0
	if o.Partial && something {
		return nil
	}
	strict := *r
	if len(r.Loaded) > 0 {
		strict.Missing = slices.DeleteFunc(slices.Clone(r.Missing), isBatchCount)
	}
	errs := strict.differences()
	if o.Partial && len(errs) > 0 {
		errs = append([]error{errors.New("it has no parameter of the module")}, errs...)
	}
	return l.unfit(errs)
}

// read reads the values of all pairs in the module's dtypes. The scope owns them.
func (l *loading) read(scope *torch.Scope) error {
	specs := make([]torch.Spec, len(l.pairs))
	for i, p := range l.pairs {
		specs[i] = l.from.tensors[p.file].Spec()
	}
	block, err := hostblock.New(scope, specs)
	if err != nil {
		return fmt.Errorf("nn: %s: %w", l.file.Path(), err)
	}
	kept := l.pairs[:0]
	for i, p := range l.pairs {
		if err := l.from.tensors[p.file].ReadInto(block[i]); err != nil {
			return err
		}
		p.values, err = withDType(block[i], p.to.Tensor.DType())
		switch {
		case errors.Is(err, errChanged) && isBatchCount(p.to.Name):
			// A batch count over 65,504 is infinite in float16. The module keeps its count.
			l.drop(p.to.Name)
			continue
		case err != nil:
			return fmt.Errorf("nn: %s: tensor %s: %w", l.file.Path(), p.file, err)
		}
		if len(p.to.Tensor.Shape()) == 0 {
			p.values = p.values.View()
		}
		kept = append(kept, p)
	}
	l.pairs = kept
	return nil
}

// drop moves a converted tensor from the loaded ones to the mismatches.
func (l *loading) drop(name string) {
	r := l.report
	r.Loaded = slices.DeleteFunc(r.Loaded, func(s string) bool { return s == name })
	i := slices.IndexFunc(r.Converted, func(m Mismatch) bool { return m.Name == name })
	r.Mismatched = append(r.Mismatched, r.Converted[i])
	r.Converted = slices.Delete(r.Converted, i, i+1)
}

// isBatchCount reports whether a name is the name of a normalisation's batch count.
func isBatchCount(name string) bool {
	return name == batchCount || strings.HasSuffix(name, "."+batchCount)
}

// unfit returns an error that lists the differences, or nil if there are none.
func (l *loading) unfit(errs []error) error {
	const most = 10
	if len(errs) == 0 {
		return nil
	}
	errs = atMost(errs, most)
	if len(l.report.Missing)+len(l.report.Unexpected) > 0 {
		errs = append(errs, l.from.describe(l.state)...)
	}
	return fmt.Errorf("nn: %s does not fit the module: %w", l.file.Path(), errors.Join(errs...))
}

// atMost returns the first errors, and an error that counts the others.
func atMost(errs []error, most int) []error {
	more := len(errs) - most
	switch {
	case more <= 0:
		return errs
	case more == 1:
		return append(errs[:most:most], errors.New("and 1 more difference"))
	}
	return append(errs[:most:most], fmt.Errorf("and %d more differences", more))
}
