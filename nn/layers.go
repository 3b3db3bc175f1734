package nn

import (
	"errors"
	"fmt"
	"math"
	"sync/atomic"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

var errNoModule = errors.New("the module is nil")

// parameter creates a float32 leaf on the CPU. fill works in place. An error stays in the tensor,
// so that a network can be written as one expression.
func parameter(op string, fill func(*torch.Tensor) *torch.Tensor, shape ...int64) *torch.Tensor {
	t, err := torch.Empty(cuda.CPU, torch.Float32, shape...)
	if err == nil {
		if f := fill(t); f.Err() != nil {
			err = f.Err()
		}
	}
	if err == nil {
		err = t.SetRequiresGrad(true)
	}
	if err != nil {
		t.Close()
		return torch.Fail(op, err)
	}
	return t
}

func buffer(op string, t *torch.Tensor, err error) *torch.Tensor {
	if err != nil {
		return torch.Fail(op, err)
	}
	return t
}

func ones(t *torch.Tensor) *torch.Tensor  { return t.Fill_(1) }
func zeros(t *torch.Tensor) *torch.Tensor { return t.Zero_() }

// kaimingUniform is PyTorch's default for weights: kaiming_uniform_ with a = sqrt(5).
func kaimingUniform(fanIn int) func(*torch.Tensor) *torch.Tensor {
	gain := math.Sqrt(2 / (1 + 5.0))
	bound := math.Sqrt(3) * (gain / math.Sqrt(float64(fanIn)))
	return func(t *torch.Tensor) *torch.Tensor { return t.Uniform_(-bound, bound) }
}

// biasUniform is PyTorch's default for biases.
func biasUniform(fanIn int) func(*torch.Tensor) *torch.Tensor {
	bound := 1 / math.Sqrt(float64(fanIn))
	return func(t *torch.Tensor) *torch.Tensor { return t.Uniform_(-bound, bound) }
}

func weightAndBias(weight, bias *torch.Tensor) Parts {
	p := Parts{Parameters: []Named{{"weight", weight}}}
	if bias != nil {
		p.Parameters = append(p.Parameters, Named{"bias", bias})
	}
	return p
}

// positive returns nil if all sizes are at least 1, and a failed tensor otherwise.
func positive(op string, names string, sizes ...int) *torch.Tensor {
	for _, s := range sizes {
		if s < 1 {
			return torch.Fail(op, fmt.Errorf("%s are %v: each must be at least 1: %w", names, sizes, cuda.ErrInvalidArgument))
		}
	}
	return nil
}

// Linear computes x * weight^T + bias.
type Linear struct {
	Weight *torch.Tensor // [out in]
	Bias   *torch.Tensor // [out], nil with LinearOptions.NoBias
}

// LinearOptions are the options of NewLinear.
type LinearOptions struct {
	NoBias bool
}

// NewLinear returns a layer from in to out features: x [... in] gives [... out].
func NewLinear(in, out int, o LinearOptions) *Linear {
	if bad := positive("nn.NewLinear", "in and out", in, out); bad != nil {
		return &Linear{Weight: bad}
	}
	l := &Linear{Weight: parameter("nn.NewLinear", kaimingUniform(in), int64(out), int64(in))}
	if !o.NoBias {
		l.Bias = parameter("nn.NewLinear", biasUniform(in), int64(out))
	}
	return l
}

// Forward computes the layer's output.
func (l *Linear) Forward(x *torch.Tensor) *torch.Tensor { return x.Linear(l.Weight, l.Bias) }

// Parts returns weight and bias.
func (l *Linear) Parts() Parts { return weightAndBias(l.Weight, l.Bias) }

// Conv2d is a convolution of images [N C H W].
type Conv2d struct {
	Weight *torch.Tensor // [out in/groups kernel kernel]
	Bias   *torch.Tensor // [out], nil with Conv2dOptions.NoBias

	stride, padding, dilation []int64
	groups                    int64
}

// Conv2dOptions are the options of NewConv2d. Stride, Padding and Dilation are in pixels and apply
// to both directions.
type Conv2dOptions struct {
	Stride   int // 0 stands for 1
	Padding  int // zeros on each side
	Dilation int // 0 stands for 1
	Groups   int // 0 stands for 1
	NoBias   bool
}

// NewConv2d returns a convolution from in to out channels with a square kernel.
func NewConv2d(in, out, kernel int, o Conv2dOptions) *Conv2d {
	const op = "nn.NewConv2d"
	stride, dilation, groups := max(o.Stride, 1), max(o.Dilation, 1), max(o.Groups, 1)
	c := &Conv2d{stride: []int64{int64(stride)}, padding: []int64{int64(o.Padding)}, dilation: []int64{int64(dilation)}, groups: int64(groups)}
	if c.Weight = positive(op, "in, out and kernel", in, out, kernel); c.Weight != nil {
		return c
	}
	if o.Stride < 0 || o.Padding < 0 || o.Dilation < 0 || o.Groups < 0 || in%groups != 0 || out%groups != 0 {
		c.Weight = torch.Fail(op, fmt.Errorf("options %+v: nothing may be negative, and groups must divide %d and %d: %w", o, in, out, cuda.ErrInvalidArgument))
		return c
	}
	fanIn := in / groups * kernel * kernel
	c.Weight = parameter(op, kaimingUniform(fanIn), int64(out), int64(in/groups), int64(kernel), int64(kernel))
	if !o.NoBias {
		c.Bias = parameter(op, biasUniform(fanIn), int64(out))
	}
	return c
}

// Forward computes the convolution.
func (c *Conv2d) Forward(x *torch.Tensor) *torch.Tensor {
	return x.Conv2d(c.Weight, c.Bias, torch.Conv2dOptions{Stride: c.stride, Padding: c.padding, Dilation: c.dilation, Groups: c.groups})
}

// Parts returns weight and bias.
func (c *Conv2d) Parts() Parts { return weightAndBias(c.Weight, c.Bias) }

// BatchNorm2d normalises the channels of images [N C H W]. In training it uses the mean and
// variance of the batch, and updates the running statistics with them. In evaluation it uses the
// running statistics.
type BatchNorm2d struct {
	Weight, Bias *torch.Tensor // [C], initially 1 and 0
	// Running statistics: mean and variance are [C], NumBatches is the int64 count of training
	// batches. Forward in training changes them in place, so two goroutines must not train one
	// module at once.
	RunningMean, RunningVar, NumBatches *torch.Tensor

	momentum, eps float64
	evaluating    atomic.Bool
}

// BatchNorm2dOptions are the options of NewBatchNorm2d.
type BatchNorm2dOptions struct {
	Momentum float64 // how far a batch moves the running statistics; 0 stands for 0.1
	Eps      float64 // added to the variance; 0 stands for 1e-5
}

// NewBatchNorm2d returns a normalisation of images with the given number of channels.
func NewBatchNorm2d(channels int, o BatchNorm2dOptions) *BatchNorm2d {
	const op = "nn.NewBatchNorm2d"
	b := &BatchNorm2d{momentum: o.Momentum, eps: o.Eps}
	if b.momentum == 0 {
		b.momentum = 0.1
	}
	if b.eps == 0 {
		b.eps = 1e-5
	}
	if bad := positive(op, "channels", channels); bad != nil {
		b.Weight, b.Bias, b.RunningMean, b.RunningVar, b.NumBatches = bad, bad, bad, bad, bad
		return b
	}
	n := int64(channels)
	b.Weight, b.Bias = parameter(op, ones, n), parameter(op, zeros, n)
	mean, err := torch.Zeros(cuda.CPU, torch.Float32, n)
	b.RunningMean = buffer(op, mean, err)
	variance, err := torch.Ones(cuda.CPU, torch.Float32, n)
	b.RunningVar = buffer(op, variance, err)
	count, err := torch.Zeros(cuda.CPU, torch.Int64)
	b.NumBatches = buffer(op, count, err)
	return b
}

// Forward computes the normalised images. In training a batch with one value per channel is an
// error, since one value has no variance.
func (b *BatchNorm2d) Forward(x *torch.Tensor) *torch.Tensor {
	training := !b.evaluating.Load()
	if training && x.Err() == nil {
		size := x.Shape()
		if len(size) == 4 && size[0]*size[2]*size[3] == 1 {
			return torch.Fail("nn.BatchNorm2d", fmt.Errorf("training needs more than one value per channel, and the input is %v: %w", size, cuda.ErrInvalidArgument))
		}
		if counted := b.NumBatches.NoGrad().AddInt_(1); counted.Err() != nil {
			return counted
		}
	}
	return x.BatchNorm(b.Weight, b.Bias, b.RunningMean, b.RunningVar, training, b.momentum, b.eps)
}

// Parts returns weight and bias, and the running statistics as buffers.
func (b *BatchNorm2d) Parts() Parts {
	return Parts{
		Parameters: []Named{{"weight", b.Weight}, {"bias", b.Bias}},
		Buffers:    []Named{{"running_mean", b.RunningMean}, {"running_var", b.RunningVar}, {"num_batches_tracked", b.NumBatches}},
	}
}

// SetTraining chooses between the batch's statistics and the running ones.
func (b *BatchNorm2d) SetTraining(training bool) { b.evaluating.Store(!training) }

// Dropout zeroes elements at random in training, and does nothing in evaluation.
type Dropout struct {
	p          float64
	evaluating atomic.Bool
}

// NewDropout returns a module that zeroes an element with probability p and scales the others by
// 1/(1-p).
func NewDropout(p float64) *Dropout { return &Dropout{p: p} }

// Forward drops elements in training.
func (d *Dropout) Forward(x *torch.Tensor) *torch.Tensor { return x.Dropout(d.p, !d.evaluating.Load()) }

// Parts returns nothing.
func (d *Dropout) Parts() Parts { return Parts{} }

// SetTraining switches dropping on or off.
func (d *Dropout) SetTraining(training bool) { d.evaluating.Store(!training) }

// NewReLU returns a module that computes max(x, 0).
func NewReLU() Module { return Func((*torch.Tensor).ReLU) }

// Pool2dOptions are the options of NewMaxPool2d and NewAvgPool2d. Stride and Padding are in pixels
// and apply to both directions.
type Pool2dOptions struct {
	Stride   int // 0 stands for the kernel's size
	Padding  int
	CeilMode bool // round the output's size up rather than down
}

func (o Pool2dOptions) stride(kernel int) []int64 {
	if o.Stride == 0 {
		return []int64{int64(kernel)}
	}
	return []int64{int64(o.Stride)}
}

// NewMaxPool2d returns a module that computes the maximum of each window of kernel x kernel pixels.
func NewMaxPool2d(kernel int, o Pool2dOptions) Module {
	size, stride, padding := []int64{int64(kernel)}, o.stride(kernel), []int64{int64(o.Padding)}
	return Func(func(x *torch.Tensor) *torch.Tensor {
		return x.MaxPool2d(size, torch.MaxPool2dOptions{Stride: stride, Padding: padding, CeilMode: o.CeilMode})
	})
}

// NewAvgPool2d returns a module that computes the mean of each window of kernel x kernel pixels.
// The mean counts padding.
func NewAvgPool2d(kernel int, o Pool2dOptions) Module {
	size, stride, padding := []int64{int64(kernel)}, o.stride(kernel), []int64{int64(o.Padding)}
	return Func(func(x *torch.Tensor) *torch.Tensor {
		return x.AvgPool2d(size, torch.AvgPool2dOptions{Stride: stride, Padding: padding, CeilMode: o.CeilMode})
	})
}

// NewAdaptiveAvgPool2d returns a module that outputs images of size x size pixels, each the mean of
// its share of the input.
func NewAdaptiveAvgPool2d(size int) Module {
	return Func(func(x *torch.Tensor) *torch.Tensor { return x.AdaptiveAvgPool2d(int64(size), int64(size)) })
}

// NewFlatten returns a module that joins all dimensions except the batch into one: [N C H W]
// becomes [N C*H*W].
func NewFlatten() Module {
	return Func(func(x *torch.Tensor) *torch.Tensor { return x.Flatten(1, -1) })
}
