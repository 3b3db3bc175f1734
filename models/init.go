package models

import (
	"math"
	"strings"

	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/torch"
)

// filler sets the elements of a parameter in place.
type filler func(t *torch.Tensor) *torch.Tensor

// initialise fills the parameters of m again, in PyTorch's order of modules: convolutions' weights
// by conv, linear layers' weights by linear, and all biases with zeros. A nil filler leaves the
// layer's own initialisation, including the biases.
func initialise(m nn.Module, conv, linear filler) error {
	filled := false // whether the weight before a bias was filled
	for _, p := range nn.NamedParameters(m) {
		var f filler
		switch dims := len(p.Tensor.Shape()); {
		case strings.HasSuffix(p.Name, "bias"):
			if filled {
				f = (*torch.Tensor).Zero_
			}
		case dims == 4:
			f = conv
		case dims == 2:
			f = linear
		}
		filled = f != nil
		if err := fill(p.Tensor, f); err != nil {
			return err
		}
	}
	return nil
}

// fill applies f, which may be nil, without recording it for backward.
func fill(t *torch.Tensor, f filler) error {
	if f == nil {
		return t.Err()
	}
	return f(t.NoGrad()).Err()
}

// kaimingNormal is PyTorch's kaiming_normal_ with mode="fan_out" and the gain of ReLU. The fan-out
// of weights [out in/groups k k] is out*k*k, whatever the number of groups.
func kaimingNormal(t *torch.Tensor) *torch.Tensor {
	shape := t.Shape()
	if len(shape) != 4 {
		return t // a failed tensor has no shape
	}
	return t.Normal_(0, math.Sqrt2/math.Sqrt(float64(shape[0]*shape[2]*shape[3])))
}

// normal draws from the normal distribution with mean 0.
func normal(std float64) filler {
	return func(t *torch.Tensor) *torch.Tensor { return t.Normal_(0, std) }
}

// truncatedNormal is PyTorch's trunc_normal_ with mean 0 and the bounds -2 and 2: a uniform draw
// through the inverse of the distribution function.
func truncatedNormal(std float64) filler {
	bound := math.Erf(2 / std / math.Sqrt2)
	return func(t *torch.Tensor) *torch.Tensor {
		t = torch.Call1("erfinv_", t.Uniform_(-bound, bound))
		return torch.Call1("clamp_", t.MulScalar_(std*math.Sqrt2), -2.0, 2.0)
	}
}
