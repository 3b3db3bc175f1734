package optim

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/torchstream/torchstream/checkpoint"
	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

// State is the state of an optimizer in the layout of PyTorch's Optimizer.state_dict, for
// safetensors files: see [Save].
type State struct {
	// Tensors are named "state.INDEX.NAME": INDEX counts the parameters of all groups, and NAME is
	// PyTorch's, such as "exp_avg". They belong to the optimizer, and its next Step, LoadState or
	// Close changes them.
	Tensors []torch.Named
	// Metadata has the JSON text of "param_groups", and the name of the "optimizer".
	Metadata map[string]string
}

const (
	stepName    = "step"
	groupsKey   = "param_groups"
	nameKey     = "optimizer"
	statePrefix = "state."
	masterName  = "master_param" // NVIDIA Apex's name; PyTorch has no masters
)

// Save writes the state of the optimizer to a safetensors file, with the guarantees of
// [checkpoint.Save]. This Python code loads the file into a PyTorch optimizer:
//
//	state, f = {}, safetensors.safe_open("adamw.safetensors", "pt")
//	for key in f.keys():
//	    _, index, name = key.split(".", 2)
//	    state.setdefault(int(index), {})[name] = f.get_tensor(key)
//	groups = json.loads(f.metadata()["param_groups"])
//	optimizer.load_state_dict({"state": state, "param_groups": groups})
//
// This Python code writes a file for [Load]:
//
//	sd, tensors = optimizer.state_dict(), {}
//	for index, state in sd["state"].items():
//	    for name, value in state.items():
//	        if value is not None:
//	            tensors[f"state.{index}.{name}"] = value.contiguous()
//	groups = json.dumps(sd["param_groups"])
//	safetensors.torch.save_file(tensors, "adamw.safetensors", {"param_groups": groups})
func Save(path string, o Optimizer) error {
	s, err := o.State()
	if err != nil {
		return err
	}
	if !checkpoint.IsPyTorchPath(path) {
		return checkpoint.Save(path, s.Tensors, s.Metadata)
	}
	dict, err := s.PyTorch()
	if err != nil {
		return err
	}
	return checkpoint.SavePyTorch(path, dict)
}

// Load reads a file that [Save] or PyTorch wrote into an optimizer of the same kind with the same
// parameters in the same groups. It restores the state and the learning rates, to the last bit; the
// other options stay as they are in the program. A file of torch.save may contain other data too.
// The optimizer's state_dict is then under the key "optimizer", "optimizer_state_dict" or "optim".
func Load(path string, o Optimizer) error {
	c, err := checkpoint.Open(path)
	if err != nil {
		return err
	}
	defer c.Close()
	return LoadFrom(c, o)
}

// LoadFrom is like [Load], but reads an open file. For a [Divided] optimizer it reads this rank's
// shard of the state.
func LoadFrom(c *checkpoint.File, o Optimizer) error {
	f := stateFile{path: c.Path(), c: c}
	defer f.read.close()
	load := o.LoadState
	if d, ok := o.(Divided); ok {
		f.cut, load = d.CutState, d.LoadParts
	}
	s, err := f.state()
	if err != nil {
		return err
	}
	if err := load(s); err != nil {
		return f.invalid(err)
	}
	return nil
}

// Divided is an optimizer that holds one rank's shard of the state, such as the sharded optimizers
// of package distributed.
type Divided interface {
	Optimizer
	// CutState returns this rank's share of the state tensor that State calls name.
	CutState(name string, shape []int64) (Cut, error)
	// LoadParts is like LoadState, but gets this rank's shard.
	LoadParts(s State) error
}

// Cut describes a rank's share of a tensor. The zero value is the whole tensor.
type Cut struct {
	None bool // nothing
	// Row says that the rank has Elements consecutive elements, as one row. First is the index of
	// the first one, in the memory order of a tensor with the Strides.
	Row             bool
	Strides         []int64
	First, Elements int64
}

// stateFile reads a state from a file of either format. Its errors name the file.
type stateFile struct {
	path string
	c    *checkpoint.File
	read handles                                       // the tensors
	cut  func(name string, shape []int64) (Cut, error) // nil for an optimizer of whole parameters
}

// readState reads the optimizer's share of a tensor, or returns nil if it has none. It turns a
// number into a tensor without dimensions.
func (f *stateFile) readState(name string, value any) (t *torch.Tensor, err error) {
	stored, number := (*checkpoint.StoredTensor)(nil), float64(0)
	var shape []int64
	switch v := value.(type) {
	case *checkpoint.StoredTensor:
		stored, shape = v, v.Spec().Shape
	case int64:
		number = float64(v)
	default:
		return nil, f.invalid(fmt.Errorf("%s: %v is no tensor: %w", name, v, cuda.ErrInvalidArgument))
	}
	var cut Cut
	if f.cut != nil {
		if cut, err = f.cut(name, shape); err != nil {
			return nil, f.invalid(fmt.Errorf("%s: %w", name, err))
		}
	}
	switch {
	case cut.None:
		return nil, nil
	case stored == nil:
		t, err = torch.Full(cuda.CPU, torch.Float32, number)
	case cut.Row:
		t, err = stored.ReadPart(cut.Strides, cut.First, cut.Elements)
	default:
		t, err = stored.Read()
	}
	if err != nil {
		return nil, fmt.Errorf("%w (tensor %q)", err, name)
	}
	return f.read.add(t), nil
}

// invalid adds the file to an error that does not name it.
func (f *stateFile) invalid(err error) error { return fmt.Errorf("optim: %s: %w", f.path, err) }

func (f *stateFile) state() (State, error) {
	if f.c.IsPyTorch() {
		return f.pytorch()
	}
	s := State{Metadata: f.c.Metadata()}
	for _, spec := range f.c.Tensors() {
		stored, err := f.c.Tensor(spec.Name)
		if err != nil {
			return State{}, err
		}
		t, err := f.readState(spec.Name, stored)
		if err != nil {
			return State{}, err
		}
		if t != nil {
			s.Tensors = append(s.Tensors, torch.Named{Name: spec.Name, Tensor: t})
		}
	}
	return s, nil
}

// State returns the state: the tensors of all parameters that Step has updated, and the groups. It
// copies nothing, and does not wait for the device.
func (e *engine) State() (State, error) {
	s := State{Metadata: map[string]string{nameKey: e.name}}
	var groups []map[string]any
	for _, g := range e.groups {
		o := g.rule.options()
		o["lr"], o["initial_lr"], o["weight_decay"] = g.lr, g.base, g.decay
		// With nil, PyTorch chooses its implementation itself. With capturable set, PyTorch could
		// not load the state for parameters on the CPU.
		o["foreach"], o["fused"], o["capturable"], o["differentiable"] = nil, nil, false, false
		indexes := []int{}
		for _, p := range g.slots {
			indexes = append(indexes, p.index)
			if p.master != nil {
				s.Tensors = append(s.Tensors, torch.Named{Name: stateName(p.index, masterName), Tensor: p.master})
			}
			for k, name := range g.rule.states() {
				if p.state[k] != nil {
					s.Tensors = append(s.Tensors, torch.Named{Name: stateName(p.index, name), Tensor: p.state[k]})
				}
			}
		}
		o["params"] = indexes
		groups = append(groups, o)
	}
	text, err := json.Marshal(groups)
	s.Metadata[groupsKey] = string(text)
	return s, err
}

func stateName(index int, name string) string {
	return statePrefix + strconv.Itoa(index) + "." + name
}

// savedGroup is the part of a saved group that LoadState reads.
type savedGroup struct {
	LR     *float64 `json:"lr"`
	Params []int    `json:"params"`
}

// LoadState copies a state, as State or PyTorch made it, into the optimizer. It restores the
// learning rates too; other options stay. LoadState checks names and shapes before it changes
// anything. After a device failure, close the optimizer or load again. A parameter without state
// in s loses its state. Existing state tensors keep their memory, so that graphs which captured
// Step stay valid.
func (e *engine) LoadState(s State) error {
	rates, err := e.savedRates(s.Metadata)
	if err == nil {
		err = e.compare(s.Tensors)
	}
	if err != nil {
		return fmt.Errorf("optim.%s.LoadState: %w", e.name, err)
	}
	values := make(map[string]*torch.Tensor, len(s.Tensors))
	for _, n := range s.Tensors {
		values[n.Name] = n.Tensor
	}
	for _, g := range e.groups {
		for _, p := range g.slots {
			if err := e.load(g, p, values); err != nil {
				return fmt.Errorf("optim.%s.LoadState: the state of parameter %d: %w", e.name, p.index, err)
			}
		}
	}
	return e.SetLR(rates...)
}

// load replaces a parameter's state by the named values. If values has no master, the master is
// copied from the parameter.
func (e *engine) load(g *group, p *slot, values map[string]*torch.Tensor) error {
	known := func(name string) bool { return values[stateName(p.index, name)] != nil }
	if !known(masterName) && !slices.ContainsFunc(g.rule.states(), known) {
		p.close()
		p.master.Close()
		p.master = nil
		return nil
	}
	device, dtype := p.param.Device(), p.param.DType()
	if _, err := e.masterOf(p, device, dtype); err != nil {
		return err
	}
	if p.master != nil {
		value := values[stateName(p.index, masterName)]
		if value == nil {
			value = p.marked
		}
		if err := p.master.CopyFrom(value, torch.CopyOptions{}); err != nil {
			return err
		}
		dtype = torch.Float32
	}
	if p.device != device || p.dtype != dtype {
		p.close()
		p.device, p.dtype = device, dtype
	}
	for k, name := range g.rule.states() {
		value := values[stateName(p.index, name)]
		if value == nil {
			p.close()
			return nil // compare has seen that the others are missing too
		}
		if err := g.fill(p, k, value); err != nil {
			return err
		}
	}
	return nil
}

// savedRates reads the groups' learning rates. The groups must match the optimizer's.
func (e *engine) savedRates(metadata map[string]string) ([]float64, error) {
	if name, ok := metadata[nameKey]; ok && name != e.name {
		return nil, fmt.Errorf("the state is of %s: %w", name, cuda.ErrInvalidArgument)
	}
	text, ok := metadata[groupsKey]
	if !ok {
		return nil, fmt.Errorf("the metadata has no %q: %w", groupsKey, cuda.ErrInvalidArgument)
	}
	var saved []savedGroup
	if err := json.Unmarshal([]byte(text), &saved); err != nil {
		return nil, fmt.Errorf("%s: %w", groupsKey, err)
	}
	if len(saved) != len(e.groups) {
		return nil, fmt.Errorf("the state has %d groups, and the optimizer %d: %w", len(saved),
			len(e.groups), cuda.ErrInvalidArgument)
	}
	rates := make([]float64, len(saved))
	for i, g := range e.groups {
		if len(saved[i].Params) != len(g.slots) {
			return nil, fmt.Errorf("group %d has %d parameters in the state, and %d in the optimizer: %w",
				i, len(saved[i].Params), len(g.slots), cuda.ErrInvalidArgument)
		}
		for k, p := range g.slots {
			if saved[i].Params[k] != p.index {
				return nil, fmt.Errorf("group %d: parameter %d is %d in the state: %w", i, p.index,
					saved[i].Params[k], cuda.ErrInvalidArgument)
			}
		}
		if lr := saved[i].LR; lr == nil || !finite(*lr) || *lr < 0 {
			return nil, fmt.Errorf("group %d: lr is missing, negative or not finite: %w", i, cuda.ErrInvalidArgument)
		}
		rates[i] = *saved[i].LR
	}
	return rates, nil
}

// compare checks that the tensors are the state of the optimizer's parameters. Each parameter's
// state must be complete or absent, and have the parameter's shape.
func (e *engine) compare(tensors []torch.Named) error {
	const maxListed = 10 // differences in the error
	given := make(map[int]map[string]*torch.Tensor)
	var errs []error
	for _, n := range tensors {
		index, name, ok := splitName(n.Name)
		switch {
		case !ok || index >= len(e.params):
			errs = append(errs, fmt.Errorf("tensor %q is the state of no parameter", n.Name))
		case n.Tensor.Err() != nil:
			errs = append(errs, fmt.Errorf("tensor %q: %w", n.Name, n.Tensor.Err()))
		case given[index] == nil:
			given[index] = map[string]*torch.Tensor{name: n.Tensor}
		default:
			given[index][name] = n.Tensor
		}
	}
	for _, g := range e.groups {
		names := g.rule.states()
		for _, p := range g.slots {
			errs = append(errs, e.compareMaster(p, given[p.index])...)
			errs = append(errs, g.compare(p, names, given[p.index])...)
		}
	}
	if len(errs) == 0 {
		return nil
	}
	if more := len(errs) - maxListed; more > 0 {
		errs = append(errs[:maxListed], fmt.Errorf("and %d more differences", more))
	}
	return fmt.Errorf("the state does not fit: %w: %w", cuda.ErrInvalidArgument, errors.Join(errs...))
}

// compareMaster checks a parameter's master and removes it from given.
func (e *engine) compareMaster(p *slot, given map[string]*torch.Tensor) []error {
	t := given[masterName]
	if t == nil || !e.common.masters || !narrow(p.param.DType()) {
		return nil
	}
	delete(given, masterName)
	if want := p.param.Shape(); !slices.Equal(t.Shape(), want) {
		return []error{fmt.Errorf("tensor %q has shape %v, and should have %v",
			stateName(p.index, masterName), t.Shape(), want)}
	}
	return nil
}

// compare lists the differences of one parameter.
func (g *group) compare(p *slot, names []string, given map[string]*torch.Tensor) []error {
	var errs []error
	for k, name := range names {
		t := given[name]
		if t == nil {
			if len(given) > 0 {
				errs = append(errs, fmt.Errorf("tensor %q is missing", stateName(p.index, name)))
			}
			continue
		}
		want := p.param.Shape()
		if k == g.steps {
			want = nil
		}
		if !slices.Equal(t.Shape(), want) {
			errs = append(errs, fmt.Errorf("tensor %q has shape %v, and should have %v",
				stateName(p.index, name), t.Shape(), want))
		}
	}
	for name := range given {
		if !slices.Contains(names, name) && !ignored(name, names) {
			errs = append(errs, fmt.Errorf("tensor %q is no state of this optimizer with these options",
				stateName(p.index, name)))
		}
	}
	return errs
}

// ignored reports whether the formula ignores a state of PyTorch's.
func ignored(name string, names []string) bool {
	return name == stepName && !slices.Contains(names, stepName)
}

// splitName splits "state.INDEX.NAME".
func splitName(s string) (index int, name string, ok bool) {
	s, ok = strings.CutPrefix(s, statePrefix)
	number, name, found := strings.Cut(s, ".")
	index, err := strconv.Atoi(number)
	return index, name, ok && found && err == nil && index >= 0
}
