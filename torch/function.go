package torch

import (
	"errors"
	"slices"

	"github.com/torchstream/torchstream/internal/capi"
)

// Function is a differentiable function in Go. Forward computes the outputs. Backward computes the
// inputs' gradients from the outputs' gradients. The outputs take part in a backward pass like an
// operator's results. A Function is a value without state, and any goroutine may apply it.
//
//	cube := torch.Function{
//		Name: "cube",
//		Forward: func(c *torch.FunctionContext, in []*torch.Tensor) ([]*torch.Tensor, error) {
//			c.SaveForBackward(in[0])
//			return []*torch.Tensor{in[0].Square().Mul(in[0])}, nil
//		},
//		Backward: func(c *torch.FunctionContext, g []*torch.Tensor) ([]*torch.Tensor, error) {
//			return []*torch.Tensor{g[0].Mul(c.SavedTensors()[0].Square()).MulScalar(3)}, nil
//		},
//	}
//	y := cube.Apply1(x)
type Function struct {
	// Name is the function's name in errors; "" means "Function".
	Name string

	// Forward returns the outputs, of any shape, dtype and device. The handles that it gets record
	// nothing for backward, and keep the marks of Autocast and Numerics. These handles, and results
	// computed from them, end with the call, except for the outputs. An output may be an input or a
	// view of one. Forward must not change an input in place. Gradients flow only to the inputs,
	// not to other tensors that an output depends on.
	Forward func(c *FunctionContext, inputs []*Tensor) ([]*Tensor, error)

	// Backward gets the gradient of each output, with the output's shape, dtype and device. A
	// gradient is zeros if nothing used the output, and nil if the output has no gradient. Backward
	// returns the gradient of each input, or nil for zeros. It may return nil for an input that
	// needs none (FunctionContext.NeedsInputGrad). [Hook] documents its goroutine and stream, the
	// marks and the scope of its handles, and how its error or panic is reported.
	//
	// With GradOptions.CreateGraph the operators of Backward on the gradients and the saved tensors
	// are recorded, so gradients of the result exist if these operators are differentiable.
	Backward func(c *FunctionContext, gradients []*Tensor) ([]*Tensor, error)
}

// FunctionContext connects the Forward and the Backward of one application of a [Function]. It is
// valid during the call that receives it.
type FunctionContext struct {
	// Data passes values other than tensors from Forward to Backward.
	Data any

	saved    []*Tensor
	constant []*Tensor
	needs    []bool
}

// SaveForBackward keeps tensors for Backward: inputs, outputs, or others. It is called in Forward,
// and each call adds to the tensors. They are kept until the first backward pass without
// RetainGraph, or until the outputs are gone. If a saved input or output is changed in place before
// Backward runs, Backward fails.
func (c *FunctionContext) SaveForBackward(tensors ...*Tensor) { c.saved = append(c.saved, tensors...) }

// SavedTensors returns the tensors of SaveForBackward, in Backward.
func (c *FunctionContext) SavedTensors() []*Tensor { return c.saved }

// MarkNonDifferentiable declares, in Forward, that outputs have no gradient. Outputs of integers
// and bools never have one.
func (c *FunctionContext) MarkNonDifferentiable(outputs ...*Tensor) {
	c.constant = append(c.constant, outputs...)
}

// NeedsInputGrad reports whether the input requires gradients. It returns false if the results get
// no history.
func (c *FunctionContext) NeedsInputGrad(input int) bool {
	return input >= 0 && input < len(c.needs) && c.needs[input]
}

// Apply calls Forward and returns its outputs, in the youngest scope of the inputs. If no input
// requires gradients, or if one is marked NoGrad, the outputs have no history and Backward is not
// called. A panic of Forward passes through.
func (f Function) Apply(inputs ...*Tensor) ([]*Tensor, error) {
	return f.apply(inputs, nil)
}

// Apply1 is [Function.Apply] for functions with one output. The returned tensor carries the error.
func (f Function) Apply1(inputs ...*Tensor) *Tensor {
	out, err := f.Apply(inputs...)
	switch {
	case err != nil:
		return failed(err)
	case len(out) != 1:
		closeAll(out)
		return failed(opError(f.name(), inputs, invalid("Forward returned %d outputs: use Apply", len(out))))
	}
	return out[0]
}

func (f Function) name() string {
	if f.Name == "" {
		return "Function"
	}
	return f.Name
}

// apply implements Apply. ended, if not nil, is called when the function's node in the autograd
// graph ends, if there is one.
func (f Function) apply(inputs []*Tensor, ended func()) ([]*Tensor, error) {
	op := f.name()
	if f.Forward == nil || f.Backward == nil {
		return nil, opError(op, inputs, invalid("the Function has no Forward or no Backward"))
	}
	scope := NewScope("a call of Forward of " + op)
	defer scope.Close()
	var p provenance
	c := &FunctionContext{needs: make([]bool, len(inputs))}
	in := make([]*Tensor, len(inputs))
	for i, t := range inputs {
		if in[i] = t.within(scope); in[i].failure() != nil {
			return nil, opErrorOnce(op, inputs, in[i].failure())
		}
		c.needs[i] = t.RequiresGrad()
		in[i].marks |= noGrad
		p.scope = youngest(p.scope, t.scope)
		p.marks |= t.marks
	}
	recorded := slices.Contains(c.needs, true) && p.marks&noGrad == 0
	if !recorded {
		clear(c.needs)
	}
	out, constant, err := f.forward(c, in)
	if err != nil {
		return nil, opErrorOnce(op, inputs, err)
	}
	var found []*capi.Tensor
	all := slices.Concat(inputs, out, c.saved)
	err = with(op, all, func(cs []*capi.Tensor) (err error) {
		attached := capi.Function{
			Name: op, Inputs: cs[:len(inputs)], Outputs: cs[len(inputs) : len(inputs)+len(out)],
			Saved:    cs[len(inputs)+len(out):],
			Constant: constant, Ended: ended,
		}
		if !recorded {
			found, err = retainAll(attached.Outputs)
			return err
		}
		needs, data := c.needs, c.Data
		attached.Backward = callback(op, func(in []*Tensor) ([]*Tensor, error) {
			c := &FunctionContext{Data: data, saved: in[len(out):], needs: needs}
			gradients, err := f.Backward(c, in[:len(out):len(out)])
			if err == nil && len(gradients) != len(inputs) {
				err = invalid("Backward returned %d gradients for %d inputs", len(gradients), len(inputs))
			}
			return gradients, err
		})
		found, err = capi.AttachFunction(attached)
		return err
	})
	if err != nil {
		return nil, err
	}
	results := make([]*Tensor, len(found))
	for i, c := range found {
		results[i] = p.result(c)
		err = errors.Join(err, results[i].failure())
	}
	return results, err
}

// forward runs Forward. It reports which outputs are constant. It detaches all other outputs that
// have a history, unless they are inputs.
func (f Function) forward(c *FunctionContext, in []*Tensor) (out []*Tensor, constant []bool, err error) {
	out, err = f.Forward(c, in)
	if err != nil {
		return nil, nil, err
	}
	if len(out) == 0 {
		return nil, nil, invalid("Forward returned no outputs")
	}
	constant = make([]bool, len(out))
	for i, t := range out {
		constant[i] = slices.ContainsFunc(c.constant,
			func(o *Tensor) bool { return o != nil && t != nil && o.h == t.h })
		if history, _ := t.info(); history.RequiresGrad &&
			!slices.ContainsFunc(in, func(o *Tensor) bool { return o.h == t.h }) {
			out[i] = t.Detach()
		}
	}
	return out, constant, nil
}

// retainAll returns a new reference to each tensor.
func retainAll(tensors []*capi.Tensor) (retained []*capi.Tensor, err error) {
	for _, t := range tensors {
		r, err := capi.RetainTensor(t)
		if err != nil {
			capi.FreeTensors(retained)
			return nil, err
		}
		retained = append(retained, r)
	}
	return retained, nil
}
