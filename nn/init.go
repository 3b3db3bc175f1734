package nn

import (
	"math"

	"github.com/torchstream/torchstream/torch"
)

// Init fills a tensor in place, under NoGrad, and returns it, or a failed tensor. After the same
// seed it draws the same numbers as the function of that name in torch.nn.init.
type Init func(t *torch.Tensor) *torch.Tensor

// NewParameter returns a float32 leaf of the shape on the CPU, for a custom module. An error stays
// in the tensor, so that a network can be written as one expression.
func NewParameter(init Init, shape ...int64) *torch.Tensor {
	return parameter("nn.NewParameter", init, shape...)
}

// Initialise overwrites a parameter's initial values, for example the values of a layer's Weight.
func Initialise(parameter *torch.Tensor, init Init) error {
	return init(parameter.NoGrad()).Err()
}

// Constant fills with one value.
func Constant(value float64) Init {
	return func(t *torch.Tensor) *torch.Tensor { return t.Fill_(value) }
}

// Uniform draws from the uniform distribution on [from, to).
func Uniform(from, to float64) Init {
	return func(t *torch.Tensor) *torch.Tensor { return t.Uniform_(from, to) }
}

// Normal draws from the normal distribution.
func Normal(mean, std float64) Init {
	return func(t *torch.Tensor) *torch.Tensor { return t.Normal_(mean, std) }
}

// TruncNormal draws from the normal distribution, restricted to [min, max].
func TruncNormal(mean, std, min, max float64) Init {
	below := func(x float64) float64 { return (1 + math.Erf((x-mean)/std/math.Sqrt2)) / 2 }
	return func(t *torch.Tensor) *torch.Tensor {
		drawn := t.Uniform_(2*below(min)-1, 2*below(max)-1)
		drawn = torch.Call1("erfinv_", drawn)
		drawn = drawn.MulScalar_(std * math.Sqrt2).AddScalar_(mean)
		return torch.Call1("clamp_", drawn, min, max)
	}
}

// XavierUniform draws uniformly for the variance 2 / (fan-in + fan-out).
func XavierUniform() Init {
	return scaled(func(in, out float64) float64 { return math.Sqrt(2 / (in + out)) }, symmetric)
}

// XavierNormal draws normally with the variance 2 / (fan-in + fan-out).
func XavierNormal() Init {
	return scaled(func(in, out float64) float64 { return math.Sqrt(2 / (in + out)) }, centred)
}

// Orthogonal draws a matrix whose rows or columns, whichever are fewer, are orthogonal and have
// length gain. In a tensor with more than 2 dimensions, each index of the first dimension is a row.
// Orthogonal suits the weights of recurrent layers (Saxe et al., "Exact solutions to the nonlinear
// dynamics of learning in deep linear neural networks").
func Orthogonal(gain float64) Init {
	return func(t *torch.Tensor) *torch.Tensor {
		shape := t.Shape()
		if t.Err() == nil && (len(shape) < 2 || t.Elements() == 0) {
			return invalid("nn.Orthogonal", "the shape is %v, and it must have 2 dimensions that are not 0", shape)
		}
		if shape == nil {
			return t.Zero_() // reports what is wrong with t
		}
		drawn := torch.Tidy(func(in ...*torch.Tensor) *torch.Tensor {
			rows := shape[0]
			cols := in[0].Elements() / rows
			m := in[0].Reshape(rows, cols).Clone().Normal_(0, 1)
			if rows < cols {
				m = m.Transpose(0, 1)
			}
			q, r := m.LinalgQR(torch.LinalgQROptions{})
			q = q.Mul(r.Diag(0).Sign()) // uniform among orthogonal matrices
			if rows < cols {
				q = q.Transpose(0, 1)
			}
			return q.MulScalar(gain).Reshape(shape...)
		}, t)
		defer drawn.Close()
		return t.Copy_(drawn)
	}
}

// KaimingUniform draws uniformly for the variance 2 / fan-in, which suits ReLU. It is PyTorch's
// kaiming_uniform_ with nonlinearity="relu". Layers use a = sqrt(5) by default instead.
func KaimingUniform() Init {
	return scaled(func(in, _ float64) float64 { return math.Sqrt(2) / math.Sqrt(in) }, symmetric)
}

// KaimingNormal draws normally with the variance 2 / fan-in, which suits ReLU: PyTorch's
// kaiming_normal_ with nonlinearity="relu".
func KaimingNormal() Init {
	return scaled(func(in, _ float64) float64 { return math.Sqrt(2) / math.Sqrt(in) }, centred)
}

// KaimingNormalFanOut draws normally with the variance 2 / fan-out: PyTorch's kaiming_normal_ with
// mode="fan_out" and nonlinearity="relu", as in torchvision's ResNets.
func KaimingNormalFanOut() Init {
	return scaled(func(_, out float64) float64 { return math.Sqrt(2) / math.Sqrt(out) }, centred)
}

func symmetric(t *torch.Tensor, std float64) *torch.Tensor {
	bound := math.Sqrt(3) * std
	return t.Uniform_(-bound, bound)
}

func centred(t *torch.Tensor, std float64) *torch.Tensor { return t.Normal_(0, std) }

// scaled draws with a standard deviation that depends on the fan-in and fan-out of a weight [out in
// ...]. Further dimensions multiply both.
func scaled(std func(in, out float64) float64, draw func(t *torch.Tensor, std float64) *torch.Tensor) Init {
	return func(t *torch.Tensor) *torch.Tensor {
		shape := t.Shape()
		if t.Err() == nil && len(shape) < 2 {
			return invalid("nn.Init", "fan-in and fan-out need 2 dimensions, and the shape is %v", shape)
		}
		if shape == nil {
			return t.Zero_() // reports what is wrong with t
		}
		in, out := float64(shape[1]), float64(shape[0])
		for _, n := range shape[2:] {
			in, out = in*float64(n), out*float64(n)
		}
		return draw(t, std(in, out))
	}
}

// defaultWeight is PyTorch's default for the weights of linear and convolutional layers:
// kaiming_uniform_ with a = sqrt(5).
func defaultWeight() Init {
	return scaled(func(in, _ float64) float64 { return math.Sqrt(2/(1+5.0)) / math.Sqrt(in) }, symmetric)
}

// uniform draws from [-bound, bound), where bound is 1/sqrt(n). It is PyTorch's default for biases
// (n is the fan-in) and for recurrent layers (n is the hidden size).
func uniform(n int) Init {
	bound := 1 / math.Sqrt(float64(n))
	return Uniform(-bound, bound)
}
