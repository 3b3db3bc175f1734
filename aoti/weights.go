package aoti

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/torch"
)

// ErrFixedWeights is wrapped by errors about a package whose compiled code contains weights. The
// package runs, but its weights cannot be replaced.
var ErrFixedWeights = errors.New("the package's weights cannot be replaced")

// weight is a tensor that SwapWeights replaces.
type weight struct {
	torch.Spec
	place int64   // in capi.ModelWeights
	names []state // the names of the tensor, Spec.Name first
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
	m.weights = newWeights(all, states)
	return nil
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
func newWeights(all []capi.ModelWeight, states []state) weights {
	w := weights{byName: map[string]int{}, unused: map[string]bool{}}
	places := map[string]int64{}
	for i, c := range all {
		if !c.Fixed && !strings.HasPrefix(c.Name, frozenPrefix) {
			places[c.Name] = int64(i)
		}
	}
	var compiled []string
	for _, names := range groupTied(states) {
		place, found, used := find(names, places)
		switch {
		case found:
			c := all[place]
			spec := torch.Spec{Name: names[0].Name, DType: torch.DType(c.DType), Shape: c.Shape}
			w.list = append(w.list, weight{spec, place, names})
		case used:
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
	return w
}

// find returns the place of a tensor that has several names, and whether the program uses it.
func find(names []state, places map[string]int64) (place int64, found, used bool) {
	for _, s := range names {
		used = used || s.Used
		if at, ok := places[s.Name]; ok {
			place, found = at, true
		}
	}
	return place, found, used
}

// frozenPrefix begins the names that Inductor's option "freezing" gives to weights that it has
// computed from others.
const frozenPrefix = "_frozen_param"

// groupTied returns the states with the same tensor together, each with the first name first.
func groupTied(states []state) [][]state {
	var groups [][]state
	index := map[string]int{}
	for _, s := range states {
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
	return groups
}

// listed returns at most ten names, and the number of the others.
func listed(names []string) string {
	const most = 10
	if len(names) <= most {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), len(names)-most)
}

// Weights lists the weights that SwapWeights replaces, sorted by name: parameters and buffers, by
// their names in the module's state_dict. Of several names of one tensor it lists one.
func (m *Model) Weights() []torch.Spec {
	all := make([]torch.Spec, len(m.weights.list))
	for i, w := range m.weights.list {
		all[i] = w.Spec
		all[i].Shape = slices.Clone(w.Shape)
	}
	return all
}

// Weight returns a copy of a weight, on the model's device. The copy is enqueued on the goroutine's
// current stream. The caller closes it.
func (m *Model) Weight(name string) (*torch.Tensor, error) {
	select {
	case <-m.closed:
		return nil, ErrClosed
	default:
	}
	i, ok := m.weights.byName[name]
	if !ok {
		return nil, fmt.Errorf("aoti: %s has no weight %q: Weights lists the names", m.title(), name)
	}
	t := torch.Call1(capi.ReadWeight, capi.ModelAddress(m.instances[0]), m.weights.list[i].place)
	if err := t.Err(); err != nil {
		return nil, fmt.Errorf("aoti: %s: weight %s: %w", m.title(), name, reason(err))
	}
	return t, nil
}

// SwapWeights replaces all weights of all instances by copies of tensors on any device. The keys
// are names of the module's state_dict. Names that the model does not use, such as
// num_batches_tracked, are ignored. If a weight is missing, unknown or has another shape,
// SwapWeights returns an error that lists the differences, and changes nothing. Floating-point
// numbers are converted to the weight's dtype. Other dtypes must be equal.
//
// Runs continue meanwhile. Each run uses either all old weights or all new ones. A run that begins
// after SwapWeights uses the new ones. The device needs memory for both until the last run with the
// old weights is done. Without this memory SwapWeights returns cuda.ErrOutOfMemory, and changes
// nothing. A graph that has captured a run keeps the old weights in memory, and its replay returns
// cuda.ErrStale. A torch.Graphed then captures again.
//
// SwapWeights waits for another SwapWeights, unless ctx ends, and for the copies, which it enqueues
// on the goroutine's current stream. On a CPU it also waits for the runs of this moment. In a
// captured function it returns cuda.ErrCapture. If the code of the package contains weights, it
// returns [ErrFixedWeights].
func (m *Model) SwapWeights(ctx context.Context, tensors map[string]*torch.Tensor) error {
	if err := m.swapWeights(ctx, tensors); err != nil {
		return fmt.Errorf("aoti: %s: SwapWeights: %w", m.title(), err)
	}
	return nil
}

func (m *Model) swapWeights(ctx context.Context, tensors map[string]*torch.Tensor) error {
	if m.weights.fixed != nil {
		return m.weights.fixed
	}
	places, values, err := m.weights.match(tensors)
	if err != nil {
		return err
	}
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
	err = torch.CAPI("SwapWeights", values, func(c []*capi.Tensor) error {
		return capi.SetModelWeights(m.instances[0], places, c)
	})
	return reason(err)
}

// match returns the tensor for each weight, in the order of list.
func (w *weights) match(tensors map[string]*torch.Tensor) (places []int64, values []*torch.Tensor, err error) {
	given := make([]*torch.Tensor, len(w.list))
	var unknown []string
	var wrong []error
	for _, name := range slices.Sorted(maps.Keys(tensors)) {
		i, ok := w.byName[name]
		switch {
		case ok && given[i] == nil:
			given[i] = tensors[name]
			if err := w.list[i].check(given[i]); err != nil {
				wrong = append(wrong, fmt.Errorf("%s: %w", name, err))
			}
		case ok && given[i] != tensors[name]:
			same, err := given[i].Equal(tensors[name])
			if err != nil || !same {
				wrong = append(wrong, fmt.Errorf("%s is another name of %s, and their values differ", name, w.list[i].Name))
			}
		case !ok && !w.unused[name]:
			unknown = append(unknown, name)
		}
	}
	var missing []string
	for i, each := range w.list {
		if given[i] == nil {
			missing = append(missing, each.Name)
		}
		places = append(places, each.place)
	}
	var errs []error
	if len(missing) > 0 {
		errs = append(errs, fmt.Errorf("missing: %s", listed(missing)))
	}
	if len(unknown) > 0 {
		errs = append(errs, fmt.Errorf("not in the model: %s", listed(unknown)))
	}
	return places, given, errors.Join(append(errs, wrong...)...)
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
// does, and replaces the model's weights by them as SwapWeights does. With LoadOptions.Partial,
// weights that the file lacks keep their values. The host needs memory for twice the weights.
func (m *Model) LoadWeights(ctx context.Context, path string, o nn.LoadOptions) (*nn.LoadReport, error) {
	if m.weights.fixed != nil {
		return nil, fmt.Errorf("aoti: %s: LoadWeights: %w", m.title(), m.weights.fixed)
	}
	scope := torch.NewScope("aoti.LoadWeights")
	defer scope.Close()
	loaded, err := m.hostState(scope, o.Partial)
	if err != nil {
		return nil, err
	}
	report, err := nn.LoadWith(path, loaded, o)
	if err != nil {
		return nil, fmt.Errorf("aoti: %s: LoadWeights: %w", m.title(), err)
	}
	tensors := map[string]*torch.Tensor{}
	for _, n := range loaded.parts.Parameters {
		tensors[n.Name] = n.Tensor
	}
	return report, m.SwapWeights(ctx, tensors)
}

// hostState returns tensors in host memory for all weights. If copies is set, they have the model's
// values.
func (m *Model) hostState(scope *torch.Scope, copies bool) (*hostState, error) {
	s := &hostState{parts: nn.Parts{Unused: slices.Sorted(maps.Keys(m.weights.unused))}}
	for _, w := range m.weights.list {
		t, err := torch.Empty(cuda.CPU, w.DType, w.Shape...)
		if err != nil {
			return nil, fmt.Errorf("aoti: %s: weight %s: %w", m.title(), w.Name, err)
		}
		t = scope.Own(t)
		if copies {
			now, err := m.Weight(w.Name)
			if err != nil {
				return nil, err
			}
			if err := errors.Join(t.CopyFrom(now, torch.CopyOptions{}), now.Close()); err != nil {
				return nil, fmt.Errorf("aoti: %s: weight %s: %w", m.title(), w.Name, err)
			}
		}
		for _, n := range w.names {
			s.parts.Parameters = append(s.parts.Parameters, torch.Named{Name: n.Name, Tensor: t})
		}
	}
	return s, nil
}

// hostState is a module for nn.Load, which uses its parts only.
type hostState struct{ parts nn.Parts }

func (s *hostState) Parts() nn.Parts { return s.parts }

// Forward returns its argument: the compiled model computes.
func (s *hostState) Forward(x *torch.Tensor) *torch.Tensor { return x }
