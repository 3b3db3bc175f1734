package torch

import "github.com/torchstream/torchstream/internal/capi"

// Tidy calls fn with handles to the tensors of in, and returns its result as a new handle, which
// joins the youngest scope among in like an operator's result (TensorFlow.js's tidy). All other
// tensors that fn computes from these handles end when fn returns. Autograd keeps the tensors that
// the backward pass needs. A layer whose forward pass is in a Tidy therefore uses as much memory as
// in Python, where locals end with their function:
//
//	func (b *Block) Forward(x *torch.Tensor) *torch.Tensor {
//		return torch.Tidy(b.forward, x)
//	}
//
// Tidy also closes a tensor that fn stores elsewhere, such as in a field. Store the result of Keep
// there. Tidy makes no call to the device, and does not wait.
func Tidy(fn func(in ...*Tensor) *Tensor, in ...*Tensor) *Tensor {
	scope := newScope("torch.Tidy")
	defer scope.Close()
	handles := make([]*Tensor, len(in))
	for i, t := range in {
		if handles[i] = t.within(scope); handles[i].failure() != nil {
			return handles[i]
		}
		scope.outer = youngest(scope.outer, t.scope)
	}
	if scope.outer != nil {
		scope.casts.Store(scope.outer.casts.Load())
	}
	y := fn(handles...)
	var c *capi.Tensor
	err := y.use("Tidy", func(of *capi.Tensor) (err error) {
		c, err = capi.RetainTensor(of)
		return err
	})
	if err != nil {
		return failed(err)
	}
	joins := scope.outer
	if y.scope != scope { // a tensor of the caller's
		joins = youngest(joins, y.scope)
	}
	return provenance{scope: joins, marks: y.marks}.result(c)
}

// Within reports whether s is outer, or the scope of a [Tidy] whose results join outer, directly or
// through other scopes of Tidy.
func (s *Scope) Within(outer *Scope) bool {
	for ; s != nil; s = s.outer {
		if s == outer {
			return true
		}
	}
	return false
}
