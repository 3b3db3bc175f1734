package optim

import (
	"fmt"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

// batch lists the parameters of one group, device and dtype that have a gradient, in parallel
// slices.
type batch struct {
	e             *engine
	g             *group
	device        cuda.Device
	dtype         torch.DType
	slots         []*slot
	params, grads []*torch.Tensor
	private       bool // the memory of grads may be overwritten
	masters       bool // params are float32 copies of the slots' parameters
}

// step updates the parameters. With masters it gives the formula float32 gradients, and rounds the
// result to the parameters.
func (b *batch) step() error {
	if !b.masters {
		return b.g.rule.step(b)
	}
	wide := make([]*torch.Tensor, len(b.grads))
	for i, p := range b.params {
		wide[i] = b.e.open.add(torch.Call1("empty_like", p))
	}
	if err := torch.ForeachCopy_(wide, b.grads); err != nil {
		return err
	}
	b.grads, b.private = wide, true
	if err := b.g.rule.step(b); err != nil {
		return err
	}
	rounded := make([]*torch.Tensor, len(b.slots))
	for i, s := range b.slots {
		rounded[i] = s.marked
	}
	return torch.ForeachCopy_(rounded, b.params)
}

// state returns state tensor k of every parameter of the batch.
func (b *batch) state(k int) []*torch.Tensor {
	list := make([]*torch.Tensor, len(b.slots))
	for i, s := range b.slots {
		list[i] = s.state[k]
	}
	return list
}

// flat returns the gradients in a form that LibTorch's fused operators need not copy. On a CPU
// these operators walk a gradient's memory in order. They first copy a gradient that is not
// contiguous, such as a convolution's in channels_last, to a tensor that they never read. A
// one-dimensional view of the same memory avoids the copy.
func (b *batch) flat(grads []*torch.Tensor) ([]*torch.Tensor, error) {
	if b.device != cuda.CPU {
		return grads, nil
	}
	views := make([]*torch.Tensor, len(grads))
	for i, grad := range grads {
		if grad.IsContiguous(torch.Contiguous) {
			views[i] = grad
			continue
		}
		elements := int64(1)
		for _, n := range grad.Shape() {
			elements *= n
		}
		views[i] = b.e.open.add(grad.AsStrided([]int64{elements}, []int64{1}, torch.AsStridedOptions{}))
		if err := views[i].Err(); err != nil {
			return nil, err
		}
	}
	return views, nil
}

// own closes the tensors at the end of the step.
func (b *batch) own(list []*torch.Tensor, err error) ([]*torch.Tensor, error) {
	b.e.open = append(b.e.open, list...)
	return list, err
}

// addToGrads adds alpha*other to the gradients, in their memory if they are private.
func (b *batch) addToGrads(other []*torch.Tensor, alpha float64) error {
	if b.private {
		return torch.ForeachAdd_(b.grads, other, alpha)
	}
	sum, err := b.own(torch.ForeachAdd(b.grads, other, alpha))
	if err != nil {
		return err
	}
	b.grads, b.private = sum, true
	return nil
}

// adjustGrads applies Maximize (g = -g) and the group's weight decay (g = g + WeightDecay*p) to the
// gradients.
func (b *batch) adjustGrads() error {
	switch {
	case !b.e.common.maximize:
	case b.private:
		if err := torch.ForeachMul_(b.grads, -1); err != nil {
			return err
		}
	default:
		negative, err := b.own(torch.ForeachMul(b.grads, -1))
		if err != nil {
			return err
		}
		b.grads, b.private = negative, true
	}
	if b.g.decay == 0 {
		return nil
	}
	return b.addToGrads(b.params, b.g.decay)
}

// count adds 1 to the step counts, or 0 if the device skips the step.
func (b *batch) count() error {
	if b.e.found == nil {
		return torch.ForeachAddScalar_(b.state(b.g.steps), 1)
	}
	once := b.e.open.add(b.e.open.add(b.e.found.Neg()).AddScalar(1))
	_, err := torch.Call("_foreach_add_.Tensor", b.state(b.g.steps), once)
	return err
}

// decayParams applies the group's weight decay to the parameters: p = p - LR*WeightDecay*p.
func (b *batch) decayParams() error {
	switch {
	case b.g.decay == 0:
		return nil
	case b.g.rate == nil:
		// On a CPU, LibTorch rounds the factor of a bfloat16 ForeachMul_ to bfloat16, and the
		// rounded factor is far from 1-LR*WeightDecay.
		return torch.ForeachAdd_(b.params, b.params, -b.g.lr*b.g.decay)
	}
	scope := torch.NewScope("weight decay")
	defer scope.Close()
	// A GPU rounds a factor in device memory to the parameters' dtype, so 1-LR*WeightDecay cannot
	// be the factor: in bfloat16, 0.998 is 0.996.
	change, err := b.own(torch.ForeachMulTensor(b.params, b.g.rate.In(scope).MulScalar(-b.g.decay)))
	if err != nil {
		return err
	}
	return torch.ForeachAdd_(b.params, change, 1)
}

// byShape returns the indexes of the batch's parameters, grouped by shape.
func (b *batch) byShape() [][]int {
	var classes [][]int
	at := map[string]int{}
	for i, p := range b.params {
		shape := fmt.Sprint(p.Shape())
		k, ok := at[shape]
		if !ok {
			k = len(classes)
			at[shape], classes = k, append(classes, nil)
		}
		classes[k] = append(classes[k], i)
	}
	return classes
}

func pick(list []*torch.Tensor, at []int) []*torch.Tensor {
	picked := make([]*torch.Tensor, len(at))
	for i, k := range at {
		picked[i] = list[k]
	}
	return picked
}

// subtract subtracts update, times the learning rate and factor, from the parameters. With
// Capturable it overwrites a private update.
func (b *batch) subtract(params, update []*torch.Tensor, factor float64, private bool) error {
	if b.g.rate == nil {
		return torch.ForeachAdd_(params, update, -b.g.lr*factor)
	}
	var err error
	if private {
		err = torch.ForeachMulTensor_(update, b.g.rate)
	} else {
		update, err = b.own(torch.ForeachMulTensor(update, b.g.rate))
	}
	if err != nil {
		return err
	}
	return torch.ForeachAdd_(params, update, -factor)
}
