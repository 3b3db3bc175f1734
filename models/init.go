package models

import (
	"strings"

	"github.com/torchstream/torchstream/nn"
)

// initialise fills the parameters of m again, in PyTorch's order of modules. conv fills the weights
// of convolutions and linear the weights of linear layers. The biases of both become zeros. If conv
// or linear is nil, these layers keep their weights and biases.
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
