package nn

import "github.com/torchstream/torchstream/torch"

// PadOptions are the options of NewPad.
type PadOptions struct {
	// Mode is what the new elements are: "constant" (also ""), "reflect" (those on the other side
	// of the edge), "replicate" (the edge) or "circular" (those at the opposite edge).
	Mode  string
	Value float64 // of the new elements, with the mode "constant"
}

// NewPad returns a module that enlarges its input [N C ...]. padding has the numbers of elements
// before and after the last dimension, then those for the one before, and so on: left, right, top
// and bottom for images. It is PyTorch's ZeroPad, ConstantPad, ReflectionPad, ReplicationPad and
// CircularPad in 1 to 3 dimensions. With the mode "constant" numbers below 0 remove elements.
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
