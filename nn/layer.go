package nn

import (
	"errors"
	"fmt"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

var errNoModule = errors.New("the module is nil")

// layer is embedded in the package's modules. It stores the module's place in the model, for errors
// and for [Summary]. The zero value works too: the path and the line are then unknown.
type layer struct {
	kind  string                   // "Conv2d"
	made  [8]uintptr               // the stack of the constructor
	path  atomic.Pointer[string]   // "layer2.0.conv1", set by walk
	watch atomic.Pointer[recorder] // set while Summary runs
}

// layered is a module with a layer.
type layered interface{ base() *layer }

func (l *layer) base() *layer { return l }

// create records the kind and the constructor's callers.
func (l *layer) create(kind string) {
	l.kind = kind
	runtime.Callers(2, l.made[:])
}

// locate records the layer's path below the root of a walk. If the layer already has a longer path,
// from a walk of the whole model, locate keeps it.
func (l *layer) locate(path string) {
	known := l.path.Load()
	if path == "" || known != nil && (*known == path || strings.HasSuffix(*known, "."+path)) {
		return
	}
	l.path.Store(&path)
}

// location returns the path, or "" before the first walk.
func (l *layer) location() string {
	if p := l.path.Load(); p != nil {
		return *p
	}
	return ""
}

// line returns the line outside of this package that called the constructor.
func (l *layer) line() (file string, line int) {
	if l.made[0] == 0 {
		return "", 0
	}
	n := 0
	for n < len(l.made) && l.made[n] != 0 {
		n++
	}
	frames := runtime.CallersFrames(l.made[:n])
	own := ""
	for {
		f, more := frames.Next()
		if own == "" { // the constructor's package, also in a fork with another path
			slash := strings.LastIndexByte(f.Function, '/')
			own = f.Function[:slash+1+strings.IndexByte(f.Function[slash+1:], '.')+1]
		}
		if !strings.HasPrefix(f.Function, own) {
			return f.File, f.Line
		}
		if !more {
			return "", 0
		}
	}
}

// result returns y, the layer's output for the inputs. If y failed and no input did, result adds
// the layer's path and line to y's error.
func (l *layer) result(y *torch.Tensor, in ...*torch.Tensor) *torch.Tensor {
	if y.Err() == nil && l.watch.Load() == nil {
		return y
	}
	return l.report(y, "", l.kind, in...)
}

// report adds the place to an error that arose in the layer or its child, and passes the output to
// a running Summary.
func (l *layer) report(y *torch.Tensor, child, kind string, in ...*torch.Tensor) *torch.Tensor {
	err := y.Err()
	if err == nil {
		if w := l.watch.Load(); w != nil {
			w.record(l, child, y.Shape())
		}
		return y
	}
	for _, x := range in {
		if x != nil && x.Err() != nil {
			return y // an input failed already
		}
	}
	var inner *LayerError
	if errors.As(err, &inner) {
		return y
	}
	if y == nil {
		err = errNoOutput
	}
	e := &LayerError{Kind: kind, Err: err, layer: l, child: child}
	e.File, e.Line = l.line()
	return torch.Fail("nn."+kind, e)
}

// LayerError is an error of one layer of a model. The tensors that a failed Forward returns hold
// it, and errors.As finds it.
type LayerError struct {
	Kind string // the layer's type, such as "Conv2d"
	// File and Line are the place where the program called the layer's constructor. For a module
	// without a recorded place they are the place of the enclosing [Sequential] or [Parallel].
	File string
	Line int
	Err  error // the cause; errors.Is and errors.As unwrap it

	layer *layer
	child string
}

// Path returns the layer's path in the model, such as "layer2.0.conv1". Every function that lists a
// model's parameters or modules (To, Parameters, State, Load, Train and others) sets the layers'
// paths, relative to the module that it was called with. Before the first such call the path
// includes only the enclosing Sequentials and Parallels, and is empty without those.
func (e *LayerError) Path() string {
	path := e.layer.location()
	switch {
	case e.child == "":
		return path
	case path == "":
		return e.child
	}
	return path + "." + e.child
}

func (e *LayerError) Error() string {
	text := "nn: " + e.Kind
	if path := e.Path(); path != "" {
		text = path + ": " + e.Kind
	}
	if e.File != "" {
		text += fmt.Sprintf(" made at %s:%d", filepath.Base(e.File), e.Line)
	}
	return text + ": " + e.Err.Error()
}

func (e *LayerError) Unwrap() error { return e.Err }

// kindOf returns the name of the module's type.
func kindOf(m Module) string {
	if m == nil {
		return "nil"
	}
	if l, ok := m.(layered); ok && l.base().kind != "" {
		return l.base().kind
	}
	if w, ok := m.(interface{ Unwrap() Module }); ok {
		return kindOf(w.Unwrap())
	}
	name := strings.TrimLeft(fmt.Sprintf("%T", m), "*")
	return name[strings.LastIndexByte(name, '.')+1:]
}

// switchable is embedded in modules that behave differently in training and evaluation.
type switchable struct{ evaluating atomic.Bool }

// SetTraining selects training mode, which is the initial mode, or evaluation mode.
func (s *switchable) SetTraining(training bool) { s.evaluating.Store(!training) }

func (s *switchable) training() bool { return !s.evaluating.Load() }

// function is a named module without parts.
type function struct {
	layer
	f func(*torch.Tensor) *torch.Tensor
}

func newFunction(kind string, f func(*torch.Tensor) *torch.Tensor) Module {
	m := &function{f: f}
	m.create(kind)
	return m
}

// Forward calls the function.
func (f *function) Forward(x *torch.Tensor) *torch.Tensor { return f.result(f.f(x), x) }

// Parts returns nothing.
func (f *function) Parts() Parts { return Parts{} }

// parameter creates a float32 leaf on the CPU. fill works in place. An error stays in the tensor,
// so that a network can be written as one expression.
func parameter(op string, fill Init, shape ...int64) *torch.Tensor {
	t, err := torch.Empty(cuda.CPU, torch.Float32, shape...)
	if err == nil {
		if f := fill(t); f.Err() != nil {
			err = f.Err()
		}
	}
	if err == nil {
		err = t.SetRequiresGrad(true)
	}
	if err != nil {
		t.Close()
		return torch.Fail(op, err)
	}
	return t
}

func buffer(op string, t *torch.Tensor, err error) *torch.Tensor {
	if err != nil {
		return torch.Fail(op, err)
	}
	return t
}

// named lists the tensors that are not nil.
func named(all ...torch.Named) []torch.Named {
	var list []torch.Named
	for _, n := range all {
		if n.Tensor != nil {
			list = append(list, n)
		}
	}
	return list
}

func weightAndBias(weight, bias *torch.Tensor) Parts {
	return Parts{Parameters: named(torch.Named{Name: "weight", Tensor: weight},
		torch.Named{Name: "bias", Tensor: bias})}
}

// positive returns nil if all sizes are at least 1, and a failed tensor otherwise.
func positive(op string, names string, sizes ...int) *torch.Tensor {
	for _, s := range sizes {
		if s < 1 {
			return invalid(op, "%s are %v: each must be at least 1", names, sizes)
		}
	}
	return nil
}

// invalid returns a failed tensor for an invalid argument.
func invalid(op, format string, args ...any) *torch.Tensor {
	return torch.Fail(op, fmt.Errorf(format+": %w", append(args, cuda.ErrInvalidArgument)...))
}

// or returns v, or the default if v is 0.
func or(v, def float64) float64 {
	if v == 0 {
		return def
	}
	return v
}

func int64s(list []int) []int64 {
	all := make([]int64, len(list))
	for i, v := range list {
		all[i] = int64(v)
	}
	return all
}

// within returns t as a member of x's scope, so that results computed from t alone are closed with
// x's scope.
func within(x, t *torch.Tensor) *torch.Tensor {
	if s := x.Scope(); s != nil && t != nil {
		return t.In(s)
	}
	return t
}
