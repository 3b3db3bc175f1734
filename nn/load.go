package nn

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/torchstream/torchstream/torch"
)

// Load reads a file that [Save] or PyTorch wrote into the module's parameters and buffers, on
// whichever device they are, and returns the file's metadata. The file must have exactly the
// module's names and shapes; otherwise the error lists the differences, and names that the file
// has. Load changes the module only after it has read the whole file, which it holds in host memory
// until then. Only a failure of the device can leave some tensors loaded and others not.
//
// A floating-point tensor of another dtype is converted as PyTorch converts it. Integers are
// converted if the module's dtype has all of them. Integers in the place of floating-point numbers,
// as in a quantized model, are an error.
//
// Names need not be the module's to the letter. Load removes a prefix that all names of the file
// have and without which they fit: "module." of DistributedDataParallel, "_orig_mod." of
// torch.compile, "model." of Lightning, or several. It adds a prefix that all names of the module
// have, such as "transformer.". Of tied weights the file needs only one: the metadata of
// safetensors.torch.save_model names the other one, and a PyTorch file shows which share memory.
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
	// that has no parameter of the module is an error still.
	Partial bool
	// Rename, if not nil, returns the module's name of a tensor for the file's name, or "" to leave
	// the tensor out. Load then removes and adds no prefix itself.
	Rename func(name string) string
	// Dict names the dict of a PyTorch file that has the tensors, such as "state_dict_ema". Keys of
	// nested dicts are joined by dots. "" stands for the dict that [OpenCheckpoint] chooses.
	Dict string
}

// LoadReport says how a file and a module compare.
type LoadReport struct {
	Metadata   map[string]string
	Loaded     []string   // the tensors that now have the file's values, in the module's order
	Converted  []Mismatch // those of Loaded that have another dtype in the file
	Missing    []string   // tensors of the module that are not in the file
	Unexpected []string   // tensors of the file, by its names, that are not in the module
	Mismatched []Mismatch // tensors whose shapes differ, or whose dtypes cannot be converted

	Parameters, AllParameters int   // the parameters that were loaded, and those of the module
	Elements, AllElements     int64 // the numbers in Loaded, and those in all parameters and buffers

	// Notes are sentences about names: a prefix that Load removed, a twin of tied weights, averages
	// in the file that Load did not take.
	Notes []string
}

// Mismatch is a tensor with another shape or dtype in file and module. Name is the module's.
type Mismatch struct {
	Name         string
	File, Module torch.Spec
}

func (m Mismatch) String() string {
	return fmt.Sprintf("%s is %v%v in the file and %v%v in the module", m.Name, m.File.DType, m.File.Shape, m.Module.DType, m.Module.Shape)
}

// LowShare is the [LoadReport.Share] below which a report asks whether the file is of this network.
const LowShare = 0.9

// Share returns the share of the module's numbers that came from the file: 0 to 1.
func (r *LoadReport) Share() float64 {
	if r.AllElements == 0 {
		return 1
	}
	return float64(r.Elements) / float64(r.AllElements)
}

// String is [LoadReport.Describe] with all differences.
func (r *LoadReport) String() string {
	return r.Describe("the same network", len(r.Missing)+len(r.Mismatched)+len(r.Unexpected))
}

// Describe says in a line how many tensors and parameters, and what share of the numbers, came from
// the file. The next lines are the notes and the differences, at most the given number of these. If
// the share is below [LowShare], a line asks "is this NETWORK?".
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

// percent rounds down, so that only all numbers are 100 %.
func percent(n, all int64) string {
	if n == all {
		return "100 %"
	}
	return fmt.Sprintf("%.1f %%", float64(int64(1000*float64(n)/float64(all)))/10)
}

// converted says how many tensors a load has converted, by dtypes.
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
	l := loading{c: c, state: State(m), report: &LoadReport{Metadata: c.Metadata()}}
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
			return nil, fmt.Errorf("nn: %s: tensor %s: %w", c.path, p.to.Name, err)
		}
	}
	return l.report, nil
}

// loading is one LoadInto.
type loading struct {
	c      *Checkpoint
	from   source
	state  []Named // of the module
	pairs  []loadPair
	report *LoadReport
}

// loadPair is a tensor that both sides have.
type loadPair struct {
	to     Named
	file   string        // the name in the file
	values *torch.Tensor // in the module's dtype and shape, once they are read
}

// match finds the tensors that file and module have in common, and all differences, before anything
// changes.
func (l *loading) match(o LoadOptions) error {
	var err error
	if l.from, err = l.c.source(o.Dict); err != nil {
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
	names, err := l.from.namesFor(l.state, o.Rename, l.report)
	if err != nil {
		return fmt.Errorf("nn: %s: %w", l.c.path, err)
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
	for _, name := range l.from.names {
		if !used[name] && !names.left[name] && !l.from.isTwin(name, used) {
			l.report.Unexpected = append(l.report.Unexpected, name)
		}
	}
	return nil
}

// pair adds a tensor of both sides to what is to be loaded, or to the mismatches.
func (l *loading) pair(n Named, file string) {
	e := l.from.entries[file]
	m := Mismatch{n.Name, torch.Spec{Name: file, DType: e.dtype, Shape: e.shape}, torch.Spec{Name: n.Name, DType: n.Tensor.DType(), Shape: n.Tensor.Shape()}}
	if !fits(e.shape, m.Module.Shape) || !convertible(e.dtype, m.Module.DType) {
		l.report.Mismatched = append(l.report.Mismatched, m)
		return
	}
	if e.dtype != m.Module.DType {
		l.report.Converted = append(l.report.Converted, m)
	}
	l.report.Loaded = append(l.report.Loaded, n.Name)
	l.pairs = append(l.pairs, loadPair{to: n, file: file})
}

// fits reports whether a tensor of the file's shape can be loaded. PyTorch before 0.4 had no
// tensors without dimensions, and wrote one element instead.
func fits(file, module []int64) bool {
	return slices.Equal(file, module) || len(module) == 0 && slices.Equal(file, []int64{1})
}

// sharedWithin moves names from the missing ones to the loaded ones if their tensor is loaded by
// another name.
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

// count sets the numbers of the report.
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

// accept returns an error if the options do not allow the differences.
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

// read reads the values of all pairs, in the module's dtypes, into the scope.
func (l *loading) read(scope *torch.Scope) error {
	kept := l.pairs[:0]
	for _, p := range l.pairs {
		t, err := l.c.read(l.from.entries[p.file])
		if err != nil {
			return fmt.Errorf("nn: %s: tensor %s: %w", l.c.path, p.file, err)
		}
		t = scope.Own(t)
		p.values, err = withDType(t, p.to.Tensor.DType())
		switch {
		case errors.Is(err, errChanged) && isBatchCount(p.to.Name):
			// A count of batches over 65,504 is infinite in float16. The module keeps its own.
			l.drop(p.to.Name)
			continue
		case err != nil:
			return fmt.Errorf("nn: %s: tensor %s: %w", l.c.path, p.file, err)
		}
		if len(p.to.Tensor.Shape()) == 0 {
			p.values = p.values.View()
		}
		kept = append(kept, p)
	}
	l.pairs = kept
	return nil
}

// drop makes a converted tensor one that was not loaded.
func (l *loading) drop(name string) {
	r := l.report
	r.Loaded = slices.DeleteFunc(r.Loaded, func(s string) bool { return s == name })
	i := slices.IndexFunc(r.Converted, func(m Mismatch) bool { return m.Name == name })
	r.Mismatched = append(r.Mismatched, r.Converted[i])
	r.Converted = slices.Delete(r.Converted, i, i+1)
}

// isBatchCount reports whether a name is that of a normalisation's count of batches.
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
	return fmt.Errorf("nn: %s does not fit the module: %w", l.c.path, errors.Join(errs...))
}

// atMost returns the first errors, and one that counts the others.
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
