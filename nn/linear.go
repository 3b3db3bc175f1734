package nn

import "github.com/torchstream/torchstream/torch"

// Linear computes x * weight^T + bias.
type Linear struct {
	layer
	Weight *torch.Tensor // [out in]
	Bias   *torch.Tensor // [out], nil with LinearOptions.NoBias
}

// LinearOptions are the options of NewLinear.
type LinearOptions struct {
	NoBias bool
}

// NewLinear returns a layer from in to out features: x [... in] gives [... out].
func NewLinear(in, out int, o LinearOptions) *Linear {
	const op = "nn.NewLinear"
	l := &Linear{}
	l.create("Linear")
	if l.Weight = positive(op, "in and out", in, out); l.Weight != nil {
		return l
	}
	l.Weight = parameter(op, defaultWeight(), int64(out), int64(in))
	if !o.NoBias {
		l.Bias = parameter(op, uniform(in), int64(out))
	}
	return l
}

// Forward computes the layer's output.
func (l *Linear) Forward(x *torch.Tensor) *torch.Tensor {
	return l.result(x.Linear(l.Weight, l.Bias), x)
}

// Parts returns weight and bias.
func (l *Linear) Parts() Parts { return weightAndBias(l.Weight, l.Bias) }

// NewFlatten returns a module that joins all dimensions except the batch into one: [N C H W]
// becomes [N C*H*W].
func NewFlatten() Module {
	return newFunction("Flatten", func(x *torch.Tensor) *torch.Tensor { return x.Flatten(1, -1) })
}

// NewUnflatten returns a module that splits dimension dim into dimensions of the given sizes. A
// negative dim counts from the end, and one size may be -1. With dim 1 and the sizes C, H and W, [N
// C*H*W] becomes [N C H W].
func NewUnflatten(dim int, sizes ...int) Module {
	split := int64s(sizes)
	return newFunction("Unflatten", func(x *torch.Tensor) *torch.Tensor { return x.Unflatten(int64(dim), split) })
}

// NewIdentity returns a module that returns its input.
func NewIdentity() Module {
	return newFunction("Identity", func(x *torch.Tensor) *torch.Tensor { return x })
}
