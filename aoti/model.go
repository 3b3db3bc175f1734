package aoti

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/internal/origin"
	"github.com/torchstream/torchstream/torch"
)

// Model is a loaded model. Any number of goroutines may use it at once.
type Model struct {
	Description

	made   origin.Origin
	device cuda.Device
	files  *folder
	names  []string // of the weights that can be replaced, in C's order
	mixed  bool     // the weights are on two devices

	instances []*capi.Model
	idle      chan *capi.Model // the instances that no run has
	closed    chan struct{}

	// changing is held by whoever takes all instances. It guards current for writing.
	// A goroutine that has an instance may read them.
	changing sync.Mutex
	current  weights
	ended    bool
}

// weights are the tensors that all instances use, in the order of Model.names.
type weights struct {
	tensors []*torch.Tensor
	scope   *torch.Scope // owns them; nil if they are the package's own
}

// ErrClosed is returned by methods of a closed model.
var ErrClosed = errors.New("aoti: the model is closed")

// Device returns the device on which the model runs.
func (m *Model) Device() cuda.Device { return m.device }

// Run runs the model on the goroutine's current stream, and returns its outputs in the order of
// Outputs. The inputs are in the order of Inputs, on the model's device. Sizes outside of the
// exported ranges, other dtypes, devices and memory formats are errors, which name the
// wanted value; then nothing has run.
//
// On a GPU, Run returns when the work is enqueued. It waits for nothing but an instance, and ctx
// ends this wait. Outputs join scopes as the results of operators do. Autograd records nothing.
func (m *Model) Run(ctx context.Context, inputs ...*torch.Tensor) ([]*torch.Tensor, error) {
	if err := m.checkInputs(inputs); err != nil {
		return nil, fmt.Errorf("aoti: model %s: %w", m.Name, err)
	}
	instance, err := m.borrow(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { m.idle <- instance }()
	outputs, err := torch.Call(capi.RunModel, capi.ModelAddress(instance), m.current.tensors, inputs)
	if err != nil {
		return nil, fmt.Errorf("aoti: model %s: %w", m.Name, runError(err))
	}
	return outputs, nil
}

// runError returns the reason of a failed run without the operator, whose operands include all
// weights.
func runError(err error) error {
	var operator *torch.Error
	if errors.As(err, &operator) {
		err = operator.Err
	}
	var failure *capi.Error
	if errors.As(err, &failure) && failure.Code == capi.CodeOperator {
		return fmt.Errorf("%w: PyTorch's compiled code wrote the reason to standard error", err)
	}
	return err
}

// borrow takes an idle instance.
func (m *Model) borrow(ctx context.Context) (*capi.Model, error) {
	select {
	case <-m.closed:
		return nil, ErrClosed
	default:
	}
	select {
	case instance := <-m.idle:
		return instance, nil
	case <-m.closed:
		return nil, ErrClosed
	case <-ctx.Done():
		return nil, fmt.Errorf("aoti: model %s: waiting for one of %d instances: %w", m.Name, len(m.instances),
			context.Cause(ctx))
	}
}

// checkInputs compares inputs with the description. PyTorch's compiled code would read beyond the
// memory of a smaller one.
func (m *Model) checkInputs(inputs []*torch.Tensor) error {
	if len(inputs) != len(m.Inputs) {
		return fmt.Errorf("%d inputs, want %d: %s", len(inputs), len(m.Inputs), m.inputs())
	}
	for i, x := range inputs {
		if err := x.Err(); err != nil {
			return fmt.Errorf("input %s: %w", m.Inputs[i].Name, err)
		}
		if err := m.Inputs[i].check(x, m.device); err != nil {
			return fmt.Errorf("input %s: %w", m.Inputs[i].Name, err)
		}
	}
	return nil
}

func (m *Model) inputs() string {
	all := make([]string, len(m.Inputs))
	for i, v := range m.Inputs {
		all[i] = v.Name
		if v.DType != "" {
			all[i] += " " + v.String()
		}
	}
	return strings.Join(all, ", ")
}

// check compares a tensor with the description, of which it knows only the device if DType is "".
func (v Value) check(x *torch.Tensor, device cuda.Device) error {
	if got := x.Device(); got != device {
		return fmt.Errorf("got a tensor on %v, want one on %v: move it with To", got, device)
	}
	if v.DType == "" {
		return nil
	}
	shape := x.Shape()
	fits := x.DType().String() == v.DType && len(shape) == len(v.Shape)
	for i := 0; fits && i < len(shape); i++ {
		fits = v.Shape[i].has(shape[i])
	}
	if !fits {
		return fmt.Errorf("got %v%v, want %v", x.DType(), shape, v)
	}
	switch {
	case v.MemoryFormat == contiguous && !x.IsContiguous(torch.Contiguous):
		return fmt.Errorf("got strides %v, want a contiguous tensor: call Contiguous(torch.Contiguous)", x.Strides())
	case v.MemoryFormat == channelsLast && !x.IsContiguous(torch.ChannelsLast):
		return fmt.Errorf("got strides %v, want channels last: call Contiguous(torch.ChannelsLast)", x.Strides())
	}
	return nil
}

// Close waits for runs that are being enqueued, and for the device's work, and frees the model.
// Later runs return ErrClosed. Close may be called again, and from any goroutine.
func (m *Model) Close() error {
	m.changing.Lock()
	defer m.changing.Unlock()
	if m.ended {
		return nil
	}
	m.ended = true
	close(m.closed)
	for range m.instances {
		<-m.idle
	}
	var errs []error
	if m.device != cuda.CPU && len(m.instances) > 0 {
		errs = append(errs, m.device.Synchronize())
	}
	for _, c := range m.instances {
		capi.FreeModel(c)
	}
	if m.current.scope != nil {
		errs = append(errs, m.current.scope.Close())
	}
	errs = append(errs, m.files.remove())
	m.made.Closed()
	runtime.KeepAlive(m)
	return errors.Join(errs...)
}

// Weights returns the names of the weights that SetWeights replaces, sorted.
func (m *Model) Weights() []string {
	if m.mixed {
		return nil
	}
	return slices.Clone(m.names)
}

// SetWeights replaces all weights: parameters and buffers, by their names in the exported module.
// The tensors may be on any device, and have the shapes of those that they replace. SetWeights
// copies them, and converts them to the model's dtypes. It blocks until the device has finished the
// work that was enqueued with the old weights. Other goroutines may run the model meanwhile. Each
// of their results is computed with the old weights or with the new ones. A graph that has captured
// a run keeps the old ones.
//
// SetWeights needs memory for a second set of weights. If it fails, the weights are unchanged.
func (m *Model) SetWeights(byName map[string]*torch.Tensor) error {
	if err := m.setWeights(byName); err != nil {
		return fmt.Errorf("aoti: model %s: SetWeights: %w", m.Name, err)
	}
	return nil
}

func (m *Model) setWeights(byName map[string]*torch.Tensor) error {
	if m.mixed {
		return fmt.Errorf("%w: it has weights on two devices, which AOTInductor does not replace", ErrUnsupported)
	}
	if err := m.checkNames(byName); err != nil {
		return err
	}
	m.changing.Lock()
	defer m.changing.Unlock()
	if m.ended {
		return ErrClosed
	}
	scope := torch.NewScope("aoti: weights")
	values := make([]*torch.Tensor, len(m.names))
	for i, name := range m.names {
		// A copy into a tensor of the old one's dtype and strides.
		old := m.current.tensors[i]
		values[i] = scope.Own(torch.Call1("empty_like", old).Keep())
		if got, want := byName[name].Shape(), old.Shape(); !slices.Equal(got, want) {
			return errors.Join(fmt.Errorf("%s has the shape %v, want %v", name, got, want), scope.Close())
		}
		if err := values[i].NoGrad().Copy_(byName[name]).Err(); err != nil {
			return errors.Join(fmt.Errorf("%s: %w", name, err), scope.Close())
		}
	}
	return m.use(weights{values, scope})
}

// checkNames returns an error unless the names are the names of the replaceable weights.
func (m *Model) checkNames(byName map[string]*torch.Tensor) error {
	var missing, unknown []string
	for _, name := range m.names {
		if byName[name] == nil {
			missing = append(missing, name)
		}
	}
	for name := range byName {
		if !slices.Contains(m.names, name) {
			unknown = append(unknown, name)
		}
	}
	slices.Sort(unknown)
	switch {
	case len(missing) > 0:
		return fmt.Errorf("no weights for %s", strings.Join(missing, ", "))
	case len(unknown) > 0:
		return fmt.Errorf("the package cannot replace %s: PyTorch compiled small tensors into its code, or the "+
			"model has no such weights: export it with tools/export.py", strings.Join(unknown, ", "))
	}
	return nil
}

// use makes all instances use other weights. The caller holds changing, or has the model alone. On
// failure use closes their scope.
func (m *Model) use(next weights) error {
	for range m.instances {
		<-m.idle
	}
	defer func() {
		for _, c := range m.instances {
			m.idle <- c
		}
	}()
	if err := m.setAll(next.tensors); err != nil {
		return errors.Join(err, m.setAll(m.current.tensors), next.scope.Close())
	}
	old := m.current
	m.current = next
	if old.scope == nil {
		return nil
	}
	// Work that is enqueued may read the old weights.
	if m.device != cuda.CPU {
		if err := m.device.Synchronize(); err != nil {
			return err
		}
	}
	return old.scope.Close()
}

func (m *Model) setAll(tensors []*torch.Tensor) error {
	if len(tensors) != len(m.names) {
		return nil // there are no old ones yet
	}
	return torch.CAPI("SetWeights", tensors, func(values []*capi.Tensor) error {
		for _, c := range m.instances {
			if err := capi.SetModelConstants(c, values); err != nil {
				return err
			}
		}
		return nil
	})
}
