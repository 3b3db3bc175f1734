package aoti

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/internal/hostblock"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/torch"
)

// ErrFixedWeights is wrapped by errors about a package whose compiled code contains weights. The
// package runs, but its weights cannot be replaced.
var ErrFixedWeights = errors.New("the package's weights cannot be replaced")

// weight is a tensor that ReplaceWeights replaces.
type weight struct {
	torch.Spec
	places []int64 // in capi.ModelWeights: several if the code has several constants for one tensor
	names  []state // the names of the tensor, Spec.Name first
}

// weights are all weights of a model.
type weights struct {
	list   []weight        // sorted by name
	byName map[string]int  // index in list, by each name
	unused map[string]bool // names of the state_dict that the model does not use
	fixed  error           // why the weights cannot be replaced; nil if they can
}

// readWeights finds the model's weights. states is the package's description of them, or nil.
func (m *Model) readWeights(states []state) error {
	all, err := capi.ModelWeights(m.instances[0])
	if err != nil {
		return err
	}
	if states == nil {
		states = guessStates(all)
	}
	m.weights, err = newWeights(all, states)
	return err
}

// guessStates describes the weights of a package that has no description of them. PyTorch's names
// of constants in the program are no names of the module's state_dict.
func guessStates(all []capi.ModelWeight) []state {
	var states []state
	for _, w := range all {
		if strings.HasPrefix(w.Name, "_tensor_constant") || strings.HasPrefix(w.Name, "lifted_tensor_") {
			continue
		}
		states = append(states, state{Name: w.Name, Used: true})
		if prefix, ok := strings.CutSuffix(w.Name, "running_mean"); ok {
			states = append(states, state{Name: prefix + "num_batches_tracked"})
		}
	}
	return states
}

// newWeights pairs the names of a state_dict with the weights of the compiled code.
func newWeights(all []capi.ModelWeight, states []state) (weights, error) {
	w := weights{byName: map[string]int{}, unused: map[string]bool{}}
	groups, err := groupTied(states)
	if err != nil {
		return w, err
	}
	constants := map[string]int64{}
	for i, c := range all {
		if !strings.HasPrefix(c.Name, frozenPrefix) {
			constants[c.Name] = int64(i)
		}
	}
	var compiled []string
	for _, names := range groups {
		places, used := find(names, constants)
		fixed := slices.ContainsFunc(places, func(at int64) bool { return all[at].Fixed })
		switch {
		case len(places) > 0 && !fixed:
			first := all[places[0]]
			for _, at := range places[1:] {
				if c := all[at]; c.DType != first.DType || !slices.Equal(c.Shape, first.Shape) {
					return w, malformed("%s and %s are one weight in the description, and differ in dtype or shape", first.Name,
						c.Name)
				}
			}
			spec := torch.Spec{Name: names[0].Name, DType: torch.DType(first.DType), Shape: first.Shape}
			w.list = append(w.list, weight{spec, places, names})
		case used || fixed:
			compiled = append(compiled, names[0].Name)
		default:
			for _, s := range names {
				w.unused[s.Name] = true
			}
		}
	}
	slices.SortFunc(w.list, func(a, b weight) int { return strings.Compare(a.Name, b.Name) })
	for i, each := range w.list {
		for _, s := range each.names {
			w.byName[s.Name] = i
		}
	}
	if len(compiled) > 0 {
		w.fixed = fmt.Errorf("%w: its code contains %s: export it with tools/export.py --replaceable", ErrFixedWeights,
			listed(compiled))
	}
	return w, nil
}

// find returns the places of a tensor that has several names, and whether the program uses it.
func find(names []state, constants map[string]int64) (places []int64, used bool) {
	for _, s := range names {
		used = used || s.Used
		if at, ok := constants[s.Name]; ok {
			places = append(places, at)
		}
	}
	return places, used
}

// frozenPrefix is the prefix of the names that Inductor's option "freezing" gives to weights that
// it has computed from others.
const frozenPrefix = "_frozen_param"

// groupTied returns the states with the same tensor together, each with the first name first.
func groupTied(states []state) ([][]state, error) {
	var groups [][]state
	index, seen := map[string]int{}, map[string]bool{}
	for _, s := range states {
		if seen[s.Name] {
			return nil, malformed("its description lists the weight %q twice", s.Name)
		}
		seen[s.Name] = true
		first := s.Tied
		if first == "" {
			first = s.Name
		}
		i, ok := index[first]
		if !ok {
			i = len(groups)
			index[first] = i
			groups = append(groups, nil)
		}
		groups[i] = append(groups[i], s)
	}
	return groups, nil
}

// listed returns at most ten names, and the number of the others.
func listed(names []string) string {
	const most = 10
	if len(names) <= most {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), len(names)-most)
}

// Weights lists the weights that ReplaceWeights replaces, sorted by name: parameters and buffers,
// by their names in the module's state_dict. Of several names of one tensor it lists one. Of a
// package for which ReplaceWeights returns [ErrFixedWeights], it lists the weights outside of the
// code.
func (m *Model) Weights() []torch.Spec {
	return m.weights.specs()
}

func (w *weights) specs() []torch.Spec {
	all := make([]torch.Spec, len(w.list))
	for i, each := range w.list {
		all[i] = each.Spec
		all[i].Shape = slices.Clone(each.Shape)
	}
	return all
}

// Weight returns a copy of a weight, on the model's device. The copy is enqueued on the goroutine's
// current stream. The caller closes it. Weight waits for an idle instance, as Run does.
func (m *Model) Weight(name string) (*torch.Tensor, error) {
	if err := m.usable(); err != nil {
		return nil, err
	}
	i, ok := m.weights.byName[name]
	if !ok {
		return nil, fmt.Errorf("aoti: %s has no weight %q: Weights lists the names", m.title(), name)
	}
	instance, err := m.borrow(context.Background()) // Close waits for it
	if err != nil {
		return nil, err
	}
	defer func() { m.idle <- instance }()
	t := torch.Call1(capi.ReadWeight, capi.ModelAddress(instance), m.weights.list[i].places[0])
	if err := t.Err(); err != nil {
		return nil, fmt.Errorf("aoti: %s: weight %s: %w", m.title(), name, reason(err))
	}
	return t, nil
}

// ReplaceWeights replaces all weights of all instances by copies of tensors on any device. The keys
// are names of the module's state_dict. Names that the model does not use, such as
// num_batches_tracked, are ignored. If a weight is missing, unknown or has another shape,
// ReplaceWeights returns an error that lists the differences, and changes nothing. Floating-point
// numbers are converted to the weight's dtype. Other dtypes must be equal.
//
// Runs continue meanwhile. Each run uses either all old weights or all new ones. A run that starts
// after ReplaceWeights uses the new ones. The device needs memory for both until the last run with
// the old weights is done. Without this memory ReplaceWeights returns an error that wraps
// cuda.ErrOutOfMemory, and changes nothing. A stream on which the model runs must exist until the
// weights of that run are replaced or the model is closed.
//
// A graph that has captured a run keeps the old weights in memory, and its replay returns
// cuda.ErrStale. At its next call a torch.Graphed without FixedArguments drops all its graphs, and
// captures again. So the device holds at most one old set of weights for each replacement since the
// last call of each Graphed: for a serve.Batcher, since the last batch of each worker.
//
// ReplaceWeights waits for another ReplaceWeights, unless ctx ends, and for the copies, which it
// enqueues on the goroutine's current stream. On a CPU it also waits for the runs of this moment.
// In a captured function it returns an error that wraps cuda.ErrCapture. If the code of the package
// contains weights, the error wraps [ErrFixedWeights].
func (m *Model) ReplaceWeights(ctx context.Context, tensors map[string]*torch.Tensor) error {
	err := m.replaceable()
	if err == nil {
		var places []int64
		var values []*torch.Tensor
		if places, values, err = m.weights.match(tensors); err == nil {
			err = m.replace(ctx, places, values)
		}
	}
	if err != nil {
		return fmt.Errorf("aoti: %s: ReplaceWeights: %w", m.title(), err)
	}
	return nil
}

// replaceable returns an error if the model is closed or has fixed weights.
func (m *Model) replaceable() error {
	if err := m.usable(); err != nil {
		return err
	}
	return m.weights.fixed
}

// replace gives the weights at these places new values. The other weights keep their values.
func (m *Model) replace(ctx context.Context, places []int64, values []*torch.Tensor) error {
	select {
	case m.swapping <- struct{}{}:
	case <-m.closed:
		return ErrClosed
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	defer func() { <-m.swapping }()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if len(places) == 0 {
		return nil // a model without weights
	}
	err := torch.CAPI("ReplaceWeights", values, func(c []*capi.Tensor) error {
		return capi.SetModelWeights(m.instances[0], places, c)
	})
	return reason(err)
}

// match returns the places of all weights, and the tensor for each place.
func (w *weights) match(tensors map[string]*torch.Tensor) (places []int64, values []*torch.Tensor, err error) {
	given := make([]string, len(w.list)) // the first name of each weight in tensors
	var unknown []string
	var wrong []error
	for _, name := range slices.Sorted(maps.Keys(tensors)) {
		i, ok := w.byName[name]
		if !ok {
			if !w.unused[name] {
				unknown = append(unknown, name)
			}
			continue
		}
		err := w.list[i].check(tensors[name])
		if first := given[i]; err == nil && first != "" {
			err = w.list[i].equal(first, tensors[first], tensors[name])
		}
		if err != nil {
			wrong = append(wrong, fmt.Errorf("%s: %w", name, err))
		}
		if given[i] == "" {
			given[i] = name
		}
	}
	var missing []string
	for i, each := range w.list {
		if given[i] == "" {
			missing = append(missing, each.Name)
			continue
		}
		for _, place := range each.places {
			places, values = append(places, place), append(values, tensors[given[i]])
		}
	}
	var errs []error
	if len(missing) > 0 {
		errs = append(errs, fmt.Errorf("missing: %s", listed(missing)))
	}
	if len(unknown) > 0 {
		errs = append(errs, fmt.Errorf("not in the model: %s", listed(unknown)))
	}
	return places, values, errors.Join(append(errs, wrong...)...)
}

// equal returns an error if the bits of two tensors differ in the weight's dtype. name is the first
// one's name.
func (w *weight) equal(name string, first, second *torch.Tensor) error {
	if first == second || w.check(first) != nil { // the error about the first tensor is enough
		return nil
	}
	scope := torch.NewScope("tied weights")
	defer scope.Close()
	bits := func(x *torch.Tensor) *torch.Tensor {
		return x.In(scope).ToDType(w.DType).Contiguous(torch.Contiguous).Ravel().ViewDType(torch.Uint8)
	}
	a := bits(first)
	same, err := a.Equal(bits(second).To(a.Device()))
	switch {
	case err != nil:
		return fmt.Errorf("comparing it with %s, a name of the same weight: %w", name, err)
	case !same:
		return fmt.Errorf("%s is a name of the same weight, and has other values", name)
	}
	return nil
}

// check returns an error if a tensor cannot replace the weight.
func (w *weight) check(t *torch.Tensor) error {
	if err := t.Err(); err != nil {
		return err
	}
	if slices.Equal(t.Shape(), w.Shape) && (t.DType() == w.DType || floating(t.DType()) && floating(w.DType)) {
		return nil
	}
	return fmt.Errorf("got %v%v, want %v%v", t.DType(), t.Shape(), w.DType, w.Shape)
}

func floating(d torch.DType) bool {
	switch d {
	case torch.Float16, torch.BFloat16, torch.Float32, torch.Float64:
		return true
	}
	return false
}

// LoadWeights reads weights from a file of package checkpoint (.safetensors, .pt, .pth) as nn.Load
// does, and replaces the model's weights by them as ReplaceWeights does. With LoadOptions.Partial,
// weights that the file lacks keep their values. If the file has different values for two names of
// one weight, LoadWeights returns an error. It does not observe ctx while it reads the file. The
// host needs memory for twice the weights.
func (m *Model) LoadWeights(ctx context.Context, path string, o nn.LoadOptions) (*nn.LoadReport, error) {
	report, err := m.loadWeights(ctx, path, o)
	if err != nil {
		return nil, fmt.Errorf("aoti: %s: LoadWeights: %w", m.title(), err)
	}
	return report, nil
}

func (m *Model) loadWeights(ctx context.Context, path string, o nn.LoadOptions) (*nn.LoadReport, error) {
	scope := torch.NewScope("aoti.LoadWeights")
	defer scope.Close()
	f, err := m.readFile(ctx, scope, path, o)
	if err != nil {
		return nil, err
	}
	if err := m.replace(ctx, f.places, f.values); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return f.report, nil
}

// fileWeights are weights of a file in host memory.
type fileWeights struct {
	report *nn.LoadReport
	places []int64
	values []*torch.Tensor // for each place
}

// readFile reads a file of weights, and checks that it fits. The scope owns the values.
func (m *Model) readFile(ctx context.Context, scope *torch.Scope, path string, o nn.LoadOptions) (*fileWeights, error) {
	if err := m.replaceable(); err != nil {
		return nil, err
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	loaded, err := m.weights.host(scope)
	if err != nil {
		return nil, err
	}
	f := &fileWeights{}
	if f.report, err = nn.LoadWith(path, loaded, o); err != nil {
		return nil, err
	}
	names := map[string]bool{}
	for _, name := range f.report.Loaded {
		names[name] = true
	}
	for _, w := range m.weights.list {
		if !slices.ContainsFunc(w.names, func(s state) bool { return names[s.Name] }) {
			continue // the file lacks it
		}
		for _, place := range w.places {
			f.places, f.values = append(f.places, place), append(f.values, loaded.tensors[w.Name])
		}
	}
	return f, m.weights.compareTied(path, o, names)
}

// compareTied returns an error if a file has different values for two names of one weight. loaded
// has the names that the file has. nn.Load reads such names into one tensor, so compareTied reads
// them again into different tensors.
func (w *weights) compareTied(path string, o nn.LoadOptions, loaded map[string]bool) error {
	tied := weights{unused: map[string]bool{}}
	for _, each := range w.list {
		several := len(each.names) > 1
		for _, s := range each.names {
			if several && loaded[s.Name] {
				one := each
				one.Name, one.names = s.Name, []state{s}
				tied.list = append(tied.list, one)
			}
		}
	}
	if len(tied.list) == 0 {
		return nil
	}
	scope := torch.NewScope("aoti.LoadWeights: tied weights")
	defer scope.Close()
	apart, err := tied.host(scope)
	if err != nil {
		return err
	}
	o.Partial = true
	report, err := nn.LoadWith(path, apart, o)
	if err != nil {
		return err
	}
	first := map[int]string{}
	for _, name := range report.Loaded {
		i := w.byName[name]
		if other, ok := first[i]; ok {
			if err := w.list[i].equal(other, apart.tensors[other], apart.tensors[name]); err != nil {
				return fmt.Errorf("%s: %s: %w", path, name, err)
			}
			continue
		}
		first[i] = name
	}
	return nil
}

// host returns tensors in host memory for all weights. Their values are undefined.
func (w *weights) host(scope *torch.Scope) (*hostState, error) {
	all, err := hostblock.New(scope, w.specs())
	if err != nil {
		return nil, fmt.Errorf("memory for the weights: %w", err)
	}
	s := &hostState{parts: nn.Parts{Unused: slices.Sorted(maps.Keys(w.unused))}, tensors: map[string]*torch.Tensor{}}
	for i, each := range w.list {
		for _, n := range each.names {
			s.parts.Parameters = append(s.parts.Parameters, torch.Named{Name: n.Name, Tensor: all[i]})
			s.tensors[n.Name] = all[i]
		}
	}
	return s, nil
}

// hostState is a module for nn.Load, which uses its parts only.
type hostState struct {
	parts   nn.Parts
	tensors map[string]*torch.Tensor
}

func (s *hostState) Parts() nn.Parts { return s.parts }

// Forward returns its argument: the compiled model computes.
func (s *hostState) Forward(x *torch.Tensor) *torch.Tensor { return x }
