package aoti

import (
	"context"
	"errors"
	"fmt"
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

	instances []*capi.Model
	idle      chan *capi.Model // the instances that no run is using
	weights   weights
	swapping  chan struct{} // has an element during ReplaceWeights, and after Close
	closed    chan struct{}

	closing sync.Mutex // held by Close; guards ended
	ended   bool
}

// ErrClosed is returned by methods of a closed model.
var ErrClosed = errors.New("aoti: the model is closed")

// Device returns the device on which the model runs.
func (m *Model) Device() cuda.Device { return m.device }

// Run runs the model on the goroutine's current stream, and returns its outputs in the order of
// Outputs. The inputs are in the order of Inputs, on the model's device. If an input has a size
// outside of the exported range, or another dtype, device or memory format than the model expects,
// Run returns an error that names the expected value, and runs nothing.
//
// On a GPU, Run returns when the work is enqueued. It waits only for an idle instance; ctx can end
// that wait. Outputs join scopes as the results of operators do. Autograd records nothing.
func (m *Model) Run(ctx context.Context, inputs ...*torch.Tensor) ([]*torch.Tensor, error) {
	if err := m.checkInputs(inputs); err != nil {
		return nil, fmt.Errorf("aoti: %s: %w", m.title(), err)
	}
	instance, err := m.borrow(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { m.idle <- instance }()
	outputs, err := torch.Call(capi.RunModel, capi.ModelAddress(instance), inputs)
	if err != nil {
		return nil, fmt.Errorf("aoti: %s: %w", m.title(), runError(err))
	}
	return outputs, nil
}

// title returns the model's name in errors. Most packages have one model, whose name is "model".
func (m *Model) title() string {
	if m.Name == "model" {
		return "the model"
	}
	return "model " + m.Name
}

// reason returns an operator's error without the operator's name and its operands.
func reason(err error) error {
	var operator *torch.Error
	if errors.As(err, &operator) {
		return operator.Err
	}
	return err
}

// runError returns the reason why a run failed.
func runError(err error) error {
	err = reason(err)
	var failure *capi.Error
	if errors.As(err, &failure) && failure.Code == capi.CodeOperator {
		return fmt.Errorf("%w: PyTorch's compiled code wrote the reason to standard error. If it is the size of a batch, "+
			"export the model again with another range (tools/export.py --batch)", err)
	}
	return err
}

// usable returns ErrClosed for a closed model, and for one that Load has not made.
func (m *Model) usable() error {
	if m.closed == nil {
		return fmt.Errorf("%w: make a Model with Load", ErrClosed)
	}
	select {
	case <-m.closed:
		return ErrClosed
	default:
		return nil
	}
}

// borrow takes an idle instance.
func (m *Model) borrow(ctx context.Context) (*capi.Model, error) {
	if err := m.usable(); err != nil {
		return nil, err
	}
	select {
	case instance := <-m.idle:
		return instance, nil
	case <-m.closed:
		return nil, ErrClosed
	case <-ctx.Done():
		return nil, fmt.Errorf("aoti: %s: waiting for one of %d instances: %w", m.title(), len(m.instances),
			context.Cause(ctx))
	}
}

// checkInputs compares inputs with the description. Without a check, PyTorch's compiled code would
// read beyond the memory of an input that is too small.
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

// check compares a tensor with the description. If DType is "", there is no description, and check
// compares only the device.
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

// Close waits for runs that are being enqueued, for ReplaceWeights and for the device's work, and
// frees the model. On a goroutine that is capturing a graph, Close returns an error and changes
// nothing. Later runs return ErrClosed. A graph that has captured a run may be replayed after
// Close. Close may be called again, and from any goroutine.
func (m *Model) Close() error {
	m.closing.Lock()
	defer m.closing.Unlock()
	if m.ended || m.closed == nil {
		return nil
	}
	if err := m.synchronize(); err != nil {
		return fmt.Errorf("aoti: %s: Close: %w", m.title(), err)
	}
	m.ended = true
	close(m.closed)
	m.swapping <- struct{}{}
	for range m.instances {
		<-m.idle
	}
	err := m.synchronize() // for runs that were enqueued meanwhile
	for _, c := range m.instances {
		capi.FreeModel(c)
	}
	m.made.Closed()
	return errors.Join(err, m.files.remove())
}

// synchronize waits for the device's work, if instances may have enqueued some.
func (m *Model) synchronize() error {
	if m.device == cuda.CPU || len(m.instances) == 0 {
		return nil
	}
	return m.device.Synchronize()
}
