package models

import (
	"strings"

	"github.com/torchstream/torchstream/nn"
)

// initialise fills the parameters of m again, in PyTorch's order of modules: convolutions' weights
// by conv, linear layers' weights by linear, and the biases of both with zeros. A nil Init leaves
// the layer's own weight and bias.
func initialise(m nn.Module, conv, linear nn.Init) error {
	filled := false // whether the weight before a bias was filled
	for _, p := range nn.NamedParameters(m) {
		var init nn.Init
		switch dims := len(p.Tensor.Shape()); {
		case strings.HasSuffix(p.Name, "bias"):
			if filled {
				init = nn.Constant(0)
			}
		case dims == 4:
			init = conv
		case dims == 2:
			init = linear
		}
		if filled = init != nil; filled {
			if err := nn.Initialise(p.Tensor, init); err != nil {
				return err
			}
		}
	}
	return nil
}
