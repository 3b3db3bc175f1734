package nn

import "github.com/torchstream/torchstream/torch"

// NewReLU returns a module that computes max(x, 0).
func NewReLU() Module { return newFunction("ReLU", (*torch.Tensor).ReLU) }

// NewReLU6 returns a module that limits x to [0, 6].
func NewReLU6() Module { return newFunction("ReLU6", (*torch.Tensor).ReLU6) }

// LeakyReLUOptions are the options of NewLeakyReLU.
type LeakyReLUOptions struct {
	NegativeSlope float64 // 0 stands for 0.01
}

// NewLeakyReLU returns a module that multiplies negative elements by the slope.
func NewLeakyReLU(o LeakyReLUOptions) Module {
	slope := or(o.NegativeSlope, 0.01)
	return newFunction("LeakyReLU", func(x *torch.Tensor) *torch.Tensor { return x.LeakyReLU(slope) })
}

// GELUOptions are the options of NewGELU.
type GELUOptions struct {
	Tanh bool // the approximation by tanh, as in GPT-2
}

// NewGELU returns a module that computes the Gaussian error linear unit.
func NewGELU(o GELUOptions) Module {
	if !o.Tanh {
		return newFunction("GELU", (*torch.Tensor).GELU)
	}
	return newFunction("GELU", func(x *torch.Tensor) *torch.Tensor {
		return x.GELUWith(torch.GELUOptions{Approximate: "tanh"})
	})
}

// NewSiLU returns a module that computes x * sigmoid(x), also called Swish.
func NewSiLU() Module { return newFunction("SiLU", (*torch.Tensor).SiLU) }

// NewMish returns a module that computes x * tanh(softplus(x)).
func NewMish() Module { return newFunction("Mish", (*torch.Tensor).Mish) }

// NewHardswish returns a module that computes x * relu6(x + 3) / 6.
func NewHardswish() Module { return newFunction("Hardswish", (*torch.Tensor).Hardswish) }

// NewHardsigmoid returns a module that computes relu6(x + 3) / 6.
func NewHardsigmoid() Module { return newFunction("Hardsigmoid", (*torch.Tensor).Hardsigmoid) }

// NewSigmoid returns a module that computes 1 / (1 + exp(-x)).
func NewSigmoid() Module { return newFunction("Sigmoid", (*torch.Tensor).Sigmoid) }

// NewTanh returns a module that computes the hyperbolic tangent.
func NewTanh() Module { return newFunction("Tanh", (*torch.Tensor).Tanh) }

// NewSoftmax returns a module that computes exp(x) normalised to a sum of 1 along dim, which counts
// from the end if negative.
func NewSoftmax(dim int) Module {
	return newFunction("Softmax", func(x *torch.Tensor) *torch.Tensor { return x.Softmax(int64(dim)) })
}

// NewLogSoftmax returns a module that computes the logarithm of NewSoftmax's output.
func NewLogSoftmax(dim int) Module {
	return newFunction("LogSoftmax", func(x *torch.Tensor) *torch.Tensor { return x.LogSoftmax(int64(dim)) })
}

// ELUOptions are the options of NewELU.
type ELUOptions struct {
	Alpha float64 // 0 stands for 1
}

// NewELU returns a module that computes x where positive, and alpha * (exp(x) - 1) elsewhere.
func NewELU(o ELUOptions) Module {
	alpha := or(o.Alpha, 1)
	return newFunction("ELU", func(x *torch.Tensor) *torch.Tensor { return x.ELU(alpha) })
}

// NewSELU returns a module that computes the scaled exponential linear unit.
func NewSELU() Module { return newFunction("SELU", (*torch.Tensor).SELU) }

// CELUOptions are the options of NewCELU.
type CELUOptions struct {
	Alpha float64 // 0 stands for 1
}

// NewCELU returns a module that computes max(x, 0) + min(alpha * (exp(x/alpha) - 1), 0).
func NewCELU(o CELUOptions) Module {
	alpha := or(o.Alpha, 1)
	return newFunction("CELU", func(x *torch.Tensor) *torch.Tensor { return x.CELU(alpha) })
}

// HardtanhOptions are the options of NewHardtanh. The zero value selects the limits -1 and 1.
type HardtanhOptions struct {
	Min, Max float64
}

// NewHardtanh returns a module that limits x to [Min, Max].
func NewHardtanh(o HardtanhOptions) Module {
	if o == (HardtanhOptions{}) {
		o = HardtanhOptions{-1, 1}
	}
	return newFunction("Hardtanh", func(x *torch.Tensor) *torch.Tensor {
		if !(o.Min < o.Max) {
			return invalid("nn.Hardtanh", "Min %v must be less than Max %v", o.Min, o.Max)
		}
		return x.HardTanh(o.Min, o.Max)
	})
}

// NewLogSigmoid returns a module that computes log(1 / (1 + exp(-x))), stably.
func NewLogSigmoid() Module { return newFunction("LogSigmoid", (*torch.Tensor).LogSigmoid) }

// NewSoftsign returns a module that computes x / (1 + |x|).
func NewSoftsign() Module {
	return newFunction("Softsign", func(x *torch.Tensor) *torch.Tensor { return x.Div(x.Abs().AddScalar(1)) })
}

// SoftplusOptions are the options of NewSoftplus.
type SoftplusOptions struct {
	Beta      float64 // 0 stands for 1
	Threshold float64 // above it, beta * x counts as linear; 0 stands for 20
}

// NewSoftplus returns a module that computes log(1 + exp(beta * x)) / beta.
func NewSoftplus(o SoftplusOptions) Module {
	beta, threshold := or(o.Beta, 1), or(o.Threshold, 20)
	return newFunction("Softplus", func(x *torch.Tensor) *torch.Tensor { return x.Softplus(beta, threshold) })
}

// NewGLU returns a module that splits x along dim into halves a and b and computes a * sigmoid(b).
func NewGLU(dim int) Module {
	return newFunction("GLU", func(x *torch.Tensor) *torch.Tensor { return x.GLU(int64(dim)) })
}

// PReLU multiplies negative elements by a slope that is trained.
type PReLU struct {
	layer
	Weight *torch.Tensor // [channels], initially 0.25
}

// NewPReLU returns a PReLU with one slope for each channel (dimension 1), or with one slope for all
// if channels is 1.
func NewPReLU(channels int) *PReLU {
	const op = "nn.NewPReLU"
	p := &PReLU{}
	p.create("PReLU")
	if p.Weight = positive(op, "channels", channels); p.Weight == nil {
		p.Weight = parameter(op, Constant(0.25), int64(channels))
	}
	return p
}

// Forward computes the layer's output.
func (p *PReLU) Forward(x *torch.Tensor) *torch.Tensor { return p.result(x.PReLU(p.Weight), x) }

// Parts returns the slopes.
func (p *PReLU) Parts() Parts { return weightAndBias(p.Weight, nil) }
