package nn

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

// Module is a layer or a network of layers.
type Module interface {
	// Forward computes the module's output. Like an operator, it returns errors in the result.
	Forward(x *torch.Tensor) *torch.Tensor
	// Parts lists the module's parameters, buffers and children, in a fixed order.
	Parts() Parts
}

// Parts lists a module's contents. Names are components of PyTorch's state_dict keys:
// "conv1.weight" is parameter "weight" of the child "conv1".
type Parts struct {
	Parameters []torch.Named // trained leaves
	Buffers    []torch.Named // saved but not trained, such as BatchNorm2d's running statistics
	Modules    []Child
	// Unused names tensors that checkpoints of the module contain but the module does not use, such
	// as masks that the module computes itself. [Load] skips these tensors, and a note in its
	// report names them.
	Unused []string
}

// Child is a module inside another module.
type Child struct {
	Name   string
	Module Module
}

// Moder is a Module that behaves differently in training and in evaluation.
type Moder interface {
	SetTraining(training bool)
}

// walk visits m and all modules in it, parents first, with the prefix of their names. It sets the
// layers' paths.
func walk(prefix string, m Module, visit func(prefix string, m Module, p Parts)) {
	if m == nil {
		return
	}
	if l, ok := m.(layered); ok {
		l.base().locate(strings.TrimSuffix(prefix, "."))
	}
	p := m.Parts()
	visit(prefix, m, p)
	for _, c := range p.Modules {
		walk(prefix+c.Name+".", c.Module, visit)
	}
}

func collect(m Module, of ...func(Parts) []torch.Named) []torch.Named {
	var all []torch.Named
	walk("", m, func(prefix string, _ Module, p Parts) {
		for _, f := range of {
			for _, n := range f(p) {
				all = append(all, torch.Named{Name: prefix + n.Name, Tensor: n.Tensor})
			}
		}
	})
	return all
}

func parameters(p Parts) []torch.Named { return p.Parameters }
func buffers(p Parts) []torch.Named    { return p.Buffers }

// unused returns the full names of [Parts.Unused] of m and all modules in it.
func unused(m Module) map[string]bool {
	names := map[string]bool{}
	walk("", m, func(prefix string, _ Module, p Parts) {
		for _, name := range p.Unused {
			names[prefix+name] = true
		}
	})
	return names
}

// NamedParameters returns the parameters of m and all modules in it, under their full names, in
// PyTorch's order.
func NamedParameters(m Module) []torch.Named { return collect(m, parameters) }

// NamedBuffers returns the buffers of m and all modules in it, under their full names.
func NamedBuffers(m Module) []torch.Named { return collect(m, buffers) }

// State returns parameters and buffers under PyTorch's state_dict names, in PyTorch's order. [Save]
// writes this list.
func State(m Module) []torch.Named { return collect(m, parameters, buffers) }

// Parameters returns the tensors to train, for an optimizer. It includes parameters that [Freeze]
// excluded from training: an optimizer skips them until [Unfreeze].
func Parameters(m Module) []*torch.Tensor {
	named := NamedParameters(m)
	tensors := make([]*torch.Tensor, len(named))
	for i, n := range named {
		tensors[i] = n.Tensor
	}
	return tensors
}

// Freeze excludes all parameters of m and all modules in it from training. Backward computes no
// gradients for them, so an optimizer does not change them. Freeze drops their gradients.
// BatchNorm's running statistics still change in training mode, so a frozen part is usually in
// evaluation mode too (Train(part, false)).
func Freeze(m Module) error { return setRequiresGrad(m, false) }

// Unfreeze undoes [Freeze].
func Unfreeze(m Module) error { return setRequiresGrad(m, true) }

func setRequiresGrad(m Module, requires bool) error {
	for _, n := range NamedParameters(m) {
		err := n.Tensor.Err()
		if err == nil && !requires {
			err = torch.ClearGrads(n.Tensor)
		}
		if err == nil {
			err = n.Tensor.SetRequiresGrad(requires)
		}
		if err != nil {
			return fmt.Errorf("nn: %s: %w", n.Name, err)
		}
	}
	return nil
}

// Err returns the first error of a parameter or buffer, with the tensor's name. The error says why
// a constructor failed. Forward reports the same error.
func Err(m Module) error {
	for _, n := range State(m) {
		if err := n.Tensor.Err(); err != nil {
			return fmt.Errorf("nn: %s: %w", n.Name, err)
		}
	}
	return nil
}

// To moves all parameters and buffers to the device in place. The tensors stay the same, so an
// existing optimizer keeps working. The optimizer moves its state at its next step. To drops
// gradients. It blocks until all copies are complete. After an error some tensors may have moved.
func To(m Module, device cuda.Device) error {
	for _, n := range State(m) {
		if err := move(n.Tensor, device); err != nil {
			return fmt.Errorf("nn: %s: %w", n.Name, err)
		}
	}
	return nil
}

// ToDType converts all floating-point parameters and buffers to the dtype, which is one of Float16,
// BFloat16, Float32 and Float64. Like [To], it keeps the tensors and drops gradients.
func ToDType(m Module, dtype torch.DType) error {
	if !floating(dtype) {
		return fmt.Errorf("nn.ToDType: %v is not a floating-point type: %w", dtype, cuda.ErrInvalidArgument)
	}
	for _, n := range State(m) {
		if err := convert(n.Tensor, dtype); err != nil {
			return fmt.Errorf("nn: %s: %w", n.Name, err)
		}
	}
	return nil
}

// ToMemoryFormat converts all four-dimensional parameters and buffers, such as convolution kernels,
// to the memory format. In ChannelsLast, convolutions use a GPU's tensor cores without reordering
// their operands. Give the network images in the same format (prefetcher's finish makes them).
// Values, names and files stay the same. Like [To], it keeps the tensors and drops gradients.
func ToMemoryFormat(m Module, f torch.MemoryFormat) error {
	for _, n := range State(m) {
		if err := arrange(n.Tensor, f); err != nil {
			return fmt.Errorf("nn: %s: %w", n.Name, err)
		}
	}
	return nil
}

func arrange(t *torch.Tensor, f torch.MemoryFormat) error {
	if err := t.Err(); err != nil {
		return err
	}
	s := t.Shape()
	if len(s) != 4 {
		return nil
	}
	strides := []int64{s[1] * s[2] * s[3], s[2] * s[3], s[3], 1}
	if f == torch.ChannelsLast {
		strides = []int64{s[1] * s[2] * s[3], 1, s[3] * s[1], s[1]}
	}
	// For a kernel of one pixel both formats have the same element order. The strides must change
	// too: the gradient will have them, and fused optimizers compare strides.
	if slices.Equal(t.Strides(), strides) {
		return nil
	}
	return replace(t, torch.Call1("clone", t.NoGrad(), torch.Keywords{"memory_format": f}))
}

func floating(d torch.DType) bool {
	return d == torch.Float16 || d == torch.BFloat16 || d == torch.Float32 || d == torch.Float64
}

func convert(t *torch.Tensor, dtype torch.DType) error {
	if err := t.Err(); err != nil {
		return err
	}
	if d := t.DType(); d == dtype || !floating(d) {
		return nil
	}
	return replace(t, t.NoGrad().ToDType(dtype))
}

func move(t *torch.Tensor, device cuda.Device) error {
	if err := t.Err(); err != nil {
		return err
	}
	if t.Device() == device {
		return nil
	}
	return replace(t, t.NoGrad().To(device))
}

// replace gives t the memory of moved, closes moved, and drops t's gradient.
func replace(t, moved *torch.Tensor) error {
	if err := moved.Err(); err != nil {
		return err
	}
	defer moved.Close()
	if err := torch.ClearGrads(t); err != nil {
		return err
	}
	return t.SetData(moved)
}

// Train puts all modules in m into training mode (the initial mode) or evaluation mode.
func Train(m Module, training bool) {
	walk("", m, func(_ string, m Module, _ Parts) {
		if t, ok := m.(Moder); ok {
			t.SetTraining(training)
		}
	})
}

// Close frees all parameters and buffers, and the streams of every [Parallel]. A program that uses
// a network until it exits need not call Close.
func Close(m Module) error {
	for _, n := range State(m) {
		if n.Tensor != nil {
			if err := n.Tensor.Close(); err != nil {
				return err
			}
		}
	}
	var errs []error
	walk("", m, func(_ string, m Module, _ Parts) {
		// Only a Parallel is closed here, not every io.Closer: the Close of a custom module may
		// call this function.
		if p, ok := m.(*Parallel); ok {
			errs = append(errs, p.Close())
		}
	})
	return errors.Join(errs...)
}

// Func is a module without parts: any function of a tensor.
type Func func(x *torch.Tensor) *torch.Tensor

// Forward calls the function.
func (f Func) Forward(x *torch.Tensor) *torch.Tensor {
	if f == nil {
		return torch.Fail("nn.Func", errNoModule)
	}
	return f(x)
}

// Parts returns nothing.
func (f Func) Parts() Parts { return Parts{} }

// Sequential passes its input through modules in order. Their names are "0", "1", ..., as in
// PyTorch. A [BatchNorm2d] followed by a ReLU runs as one [BatchNorm.ForwardReLU].
type Sequential struct {
	layer
	modules []Module
}

// NewSequential returns a module that runs the given modules in order.
func NewSequential(modules ...Module) *Sequential {
	s := &Sequential{modules: modules}
	s.create("Sequential")
	return s
}

// Forward returns the output of the last module.
func (s *Sequential) Forward(x *torch.Tensor) *torch.Tensor {
	input, watched := x, s.watch.Load() != nil
	skip := false // the previous module computed this one too
	for i, m := range s.modules {
		if skip {
			skip = false
			continue
		}
		if m == nil {
			return s.report(torch.Fail("nn.Sequential", fmt.Errorf("module %d: %w", i, errNoModule)),
				fmt.Sprint(i), kindOf(m), x)
		}
		var y *torch.Tensor
		if norm := s.normBeforeReLU(i); norm != nil && !watched {
			y, skip = norm.ForwardReLU(x, nil), true
		} else {
			y = m.Forward(x)
		}
		if watched || y.Err() != nil {
			y = s.child(i, m, x, y)
		}
		x = y
	}
	if watched {
		s.report(x, "", s.kind, input)
	}
	return x
}

// normBeforeReLU returns module i if it is an image normalisation followed by a ReLU, and nil
// otherwise. It returns nil after Synchronize: the function's backward may need its result, which
// ReLU would overwrite.
func (s *Sequential) normBeforeReLU(i int) *BatchNorm2d {
	norm, ok := s.modules[i].(*BatchNorm2d)
	if !ok || norm.shared != nil || i+1 == len(s.modules) {
		return nil
	}
	if next, ok := s.modules[i+1].(*function); ok && next.kind == "ReLU" {
		return norm
	}
	return nil
}

// child reports the output of module i for the input x.
func (s *Sequential) child(i int, m Module, x, y *torch.Tensor) *torch.Tensor {
	if y.Err() != nil {
		// The layers may not know their paths yet.
		walk("", s, func(string, Module, Parts) {})
	} else if _, ok := m.(layered); ok {
		return y // the module reports its output itself
	}
	return s.report(y, fmt.Sprint(i), kindOf(m), x)
}

// Parts returns the modules.
func (s *Sequential) Parts() Parts {
	p := Parts{Modules: make([]Child, len(s.modules))}
	for i, m := range s.modules {
		p.Modules[i] = Child{fmt.Sprint(i), m}
	}
	return p
}
