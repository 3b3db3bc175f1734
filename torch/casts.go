package torch

import (
	"sync/atomic"

	"github.com/torchstream/torchstream/internal/capi"
)

// ParameterCasts casts all parameters to the dtype of autocast once for a forward pass, instead of
// once for each operator. The results of products and convolutions are the same, with fewer kernels
// and less work for the host. A parameter that a pass uses several times is cast once, and its
// gradients are added in the lower precision, as in PyTorch's autocast.
//
// Only parameters that an earlier pass used as operands of such an operator are cast, so the first
// pass works as without ParameterCasts. The gradients of up to 16 parameters share an allocation. A
// program that keeps one of them and drops the others holds the memory of all: it should keep a
// Clone. Only one goroutine at a time may use a ParameterCasts.
type ParameterCasts struct {
	dtype      DType
	parameters []*Tensor
	index      map[*handle]int
	used       []atomic.Bool // by parameter: an operator could use a cast
}

// castsTogether is the number of parameters that are cast in one call. Their gradients are ready at
// the same time. A small number lets a reduction of gradients start during backward, and keeps few
// gradients in both dtypes at a time. The gradients of one call share an allocation, which is freed
// with the last of them.
const castsTogether = 16

// passCasts are the casts of one pass.
type passCasts struct {
	of   *ParameterCasts
	mark marks
	// tensors has the cast of each parameter, nil without one.
	tensors []*Tensor
}

// NewParameterCasts returns the casts of parameters to dtype, BFloat16 or Float16. It keeps the
// parameters' handles. The modules that compute with the parameters must use the same handles.
func NewParameterCasts(dtype DType, parameters []*Tensor) (*ParameterCasts, error) {
	if dtype != BFloat16 && dtype != Float16 {
		return nil, opError("NewParameterCasts", nil, invalid("to %v: want BFloat16 or Float16", dtype))
	}
	c := &ParameterCasts{dtype: dtype, parameters: parameters, index: map[*handle]int{},
		used: make([]atomic.Bool, len(parameters))}
	for i, p := range parameters {
		if err := p.Err(); err != nil {
			return nil, opError("NewParameterCasts", parameters, err)
		}
		c.index[p.h] = i
	}
	return c, nil
}

// Begin casts the parameters. The casts end with the scope. Operators under autocast to the same
// dtype use the casts if their results join the scope. The parameters must not change before the
// scope's last such operator. Begin enqueues work on the current stream, and does not wait.
func (c *ParameterCasts) Begin(scope *Scope) error {
	if scope == nil {
		return opError("ParameterCasts.Begin", nil, invalid("the scope is nil: the casts end with one"))
	}
	pass := &passCasts{of: c, mark: autocastBFloat16, tensors: make([]*Tensor, len(c.parameters))}
	if c.dtype == Float16 {
		pass.mark = autocastFloat16
	}
	var parameters []*Tensor
	var at []int
	cast := func() error {
		err := with("ParameterCasts.Begin", parameters, func(cs []*capi.Tensor) error {
			casts, err := capi.CastTensors(cs, int32(c.dtype))
			for i, made := range casts {
				if made != nil {
					pass.tensors[at[i]] = provenance{scope: scope}.tensor(made)
				}
			}
			return err
		})
		parameters, at = parameters[:0], at[:0]
		return err
	}
	for i, p := range c.parameters {
		if !c.used[i].Load() {
			continue
		}
		if parameters, at = append(parameters, p), append(at, i); len(at) == castsTogether {
			if err := cast(); err != nil {
				return err
			}
		}
	}
	if len(at) > 0 {
		if err := cast(); err != nil {
			return err
		}
	}
	scope.casts.Store(pass)
	return nil
}

// castsOperands reports whether autocast casts all operands of the operator to its dtype.
func (o operator) castsOperands() bool {
	switch o {
	case opLinear, opMatMul, opMM, opAddMM, opBMM, opBAddBMM, opConv1d, opConv2d, opConv3d,
		opConvTranspose1d, opConvTranspose2d, opConvTranspose3d:
		return true
	}
	return false
}

// castsOperandsOf is castsOperands for an operator that is given by its LibTorch name, such as
// "aten::addmm", and its overload.
func castsOperandsOf(aten, overload string) bool {
	for i := range operators {
		if operators[i].aten == aten && operators[i].overload == overload {
			return operator(i).castsOperands()
		}
	}
	return false
}

// replace replaces operands that are parameters by their casts. The operands are held.
func (p *passCasts) replace(in []*Tensor, cs []*capi.Tensor, m marks) {
	if m&(autocastBFloat16|autocastFloat16) != p.mark {
		return
	}
	for i, t := range in {
		if t == nil || t.scope != nil {
			continue
		}
		at, ok := p.of.index[t.h]
		if !ok {
			continue
		}
		cast := p.tensors[at]
		if cast == nil {
			p.of.used[at].Store(true)
			continue
		}
		if c, err := cast.acquire(); err == nil {
			t.h.release()
			in[i], cs[i] = cast, c
		}
	}
}
