package nn

import "github.com/torchstream/torchstream/torch"

// PadOptions are the options of NewPad.
type PadOptions struct {
	// Mode selects the padding values: "constant" (also ""), "reflect" (mirrored at the edge),
	// "replicate" (the edge's value) or "circular" (from the opposite edge).
	Mode  string
	Value float64 // the padding value of the mode "constant"
}

// NewPad returns a module that pads its input [N C ...]. padding lists the numbers of elements
// before and after the last dimension, then before and after the next-to-last dimension, and so on:
// left, right, top and bottom for images. It covers PyTorch's ZeroPad, ConstantPad, ReflectionPad,
// ReplicationPad and CircularPad in 1 to 3 dimensions. With the mode "constant" negative numbers
// remove elements.
func NewPad(padding []int, o PadOptions) Module {
	sizes := int64s(padding)
	p := torch.PadOptions{Mode: o.Mode}
	if o.Value != 0 {
		p.Value = &o.Value
	}
	return newFunction("Pad", func(x *torch.Tensor) *torch.Tensor {
		if len(sizes) == 0 || len(sizes)%2 != 0 {
			return invalid("nn.Pad", "the padding is %v, and it must have two numbers for each direction", sizes)
		}
		return x.Pad(sizes, p)
	})
}
