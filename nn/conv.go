package nn

import (
	"fmt"
	"slices"

	"github.com/torchstream/torchstream/torch"
)

// Conv is the part that Conv1d, Conv2d and Conv3d share.
type Conv struct {
	layer
	Weight *torch.Tensor // [out in/groups kernel...], with kernel once for each direction
	Bias   *torch.Tensor // [out], nil with NoBias

	o torch.Conv2dOptions
}

// ConvOptions are the options of NewConv1d, NewConv2d and NewConv3d. Stride, Padding and Dilation
// are in pixels and apply to all directions.
type ConvOptions struct {
	Stride   int // 0 stands for 1
	Padding  int // zeros on each side
	Dilation int // 0 stands for 1
	Groups   int // 0 stands for 1
	NoBias   bool

	// KernelSize and PaddingSize, if not nil, replace kernel and Padding by one value for each
	// direction: []int{1, 7} is a kernel of 1 row and 7 columns.
	KernelSize, PaddingSize []int
}

// The options of NewConv1d, NewConv2d and NewConv3d.
type (
	Conv1dOptions = ConvOptions
	Conv2dOptions = ConvOptions
	Conv3dOptions = ConvOptions
)

// construct fills the convolution c of the given number of directions.
func (c *Conv) construct(dims, in, out, kernel int, o ConvOptions) {
	kind := fmt.Sprintf("Conv%dd", dims)
	op := "nn.New" + kind
	c.create(kind)
	groups := max(o.Groups, 1)
	c.o = torch.Conv2dOptions{
		Stride: int64s([]int{max(o.Stride, 1)}), Padding: int64s([]int{o.Padding}),
		Dilation: int64s([]int{max(o.Dilation, 1)}), Groups: int64(groups),
	}
	size := slices.Repeat([]int{kernel}, dims)
	if o.KernelSize != nil {
		size = o.KernelSize
	}
	if o.PaddingSize != nil {
		c.o.Padding = int64s(o.PaddingSize)
	}
	if c.Weight = positive(op, "in, out and kernel", append([]int{in, out}, size...)...); c.Weight != nil {
		return
	}
	if len(size) != dims || o.PaddingSize != nil && len(o.PaddingSize) != dims {
		c.Weight = invalid(op, "KernelSize %v and PaddingSize %v: they have one value for each of %d directions",
			o.KernelSize, o.PaddingSize, dims)
		return
	}
	if min(o.Stride, o.Dilation, o.Groups) < 0 || slices.Min(c.o.Padding) < 0 || in%groups != 0 || out%groups != 0 {
		c.Weight = invalid(op, "options %+v: nothing may be negative, and groups must divide %d and %d", o, in, out)
		return
	}
	c.Weight, c.Bias = kernels(op, append([]int{out, in / groups}, size...), out, o.NoBias)
}

// kernels returns a weight of the given shape, and a bias of out elements unless noBias is set.
// PyTorch takes the elements of a row of the weight as the bias's fan-in.
func kernels(op string, shape []int, out int, noBias bool) (weight, bias *torch.Tensor) {
	weight = parameter(op, defaultWeight(), int64s(shape)...)
	if noBias {
		return weight, nil
	}
	fanIn := 1
	for _, n := range shape[1:] {
		fanIn *= n
	}
	return weight, parameter(op, uniform(fanIn), int64(out))
}

// Parts returns weight and bias.
func (c *Conv) Parts() Parts { return weightAndBias(c.Weight, c.Bias) }

// Conv1d is a convolution of sequences [N C L].
type Conv1d struct{ Conv }

// NewConv1d returns a convolution from in to out channels.
func NewConv1d(in, out, kernel int, o Conv1dOptions) *Conv1d {
	c := &Conv1d{}
	c.construct(1, in, out, kernel, o)
	return c
}

// Forward computes the convolution.
func (c *Conv1d) Forward(x *torch.Tensor) *torch.Tensor {
	return c.result(x.Conv1d(c.Weight, c.Bias, torch.Conv1dOptions(c.o)), x)
}

// Conv2d is a convolution of images [N C H W].
type Conv2d struct{ Conv }

// NewConv2d returns a convolution from in to out channels with a square kernel, unless KernelSize
// is set.
func NewConv2d(in, out, kernel int, o Conv2dOptions) *Conv2d {
	c := &Conv2d{}
	c.construct(2, in, out, kernel, o)
	return c
}

// Forward computes the convolution.
func (c *Conv2d) Forward(x *torch.Tensor) *torch.Tensor {
	return c.result(x.Conv2d(c.Weight, c.Bias, c.o), x)
}

// Conv3d is a convolution of volumes [N C D H W].
type Conv3d struct{ Conv }

// NewConv3d returns a convolution from in to out channels with a cubic kernel, unless KernelSize is
// set.
func NewConv3d(in, out, kernel int, o Conv3dOptions) *Conv3d {
	c := &Conv3d{}
	c.construct(3, in, out, kernel, o)
	return c
}

// Forward computes the convolution.
func (c *Conv3d) Forward(x *torch.Tensor) *torch.Tensor {
	return c.result(x.Conv3d(c.Weight, c.Bias, torch.Conv3dOptions(c.o)), x)
}

// ConvTranspose is the part that ConvTranspose1d, ConvTranspose2d and ConvTranspose3d share.
type ConvTranspose struct {
	layer
	Weight *torch.Tensor // [in out/groups kernel...], with kernel once for each direction
	Bias   *torch.Tensor // [out], nil with NoBias

	o torch.ConvTranspose2dOptions
}

// ConvTransposeOptions are the options of NewConvTranspose1d, NewConvTranspose2d and
// NewConvTranspose3d. All but Groups are in pixels and apply to all directions.
type ConvTransposeOptions struct {
	Stride        int // 0 stands for 1
	Padding       int // removes as many pixels from each side of the output
	OutputPadding int // enlarges one side of the output; less than Stride or Dilation
	Dilation      int // 0 stands for 1
	Groups        int // 0 stands for 1
	NoBias        bool
}

// The options of NewConvTranspose1d, NewConvTranspose2d and NewConvTranspose3d.
type (
	ConvTranspose1dOptions = ConvTransposeOptions
	ConvTranspose2dOptions = ConvTransposeOptions
	ConvTranspose3dOptions = ConvTransposeOptions
)

func (c *ConvTranspose) construct(dims, in, out, kernel int, o ConvTransposeOptions) {
	kind := fmt.Sprintf("ConvTranspose%dd", dims)
	op := "nn.New" + kind
	c.create(kind)
	groups := max(o.Groups, 1)
	c.o = torch.ConvTranspose2dOptions{
		Stride: int64s([]int{max(o.Stride, 1)}), Padding: int64s([]int{o.Padding}), OutputPadding: int64s([]int{o.OutputPadding}),
		Groups: int64(groups), Dilation: int64s([]int{max(o.Dilation, 1)}),
	}
	if c.Weight = positive(op, "in, out and kernel", in, out, kernel); c.Weight != nil {
		return
	}
	if min(o.Stride, o.Padding, o.OutputPadding, o.Dilation, o.Groups) < 0 || in%groups != 0 || out%groups != 0 {
		c.Weight = invalid(op, "options %+v: nothing may be negative, and groups must divide %d and %d", o, in, out)
		return
	}
	size := slices.Repeat([]int{kernel}, dims)
	c.Weight, c.Bias = kernels(op, append([]int{in, out / groups}, size...), out, o.NoBias)
}

// Parts returns weight and bias.
func (c *ConvTranspose) Parts() Parts { return weightAndBias(c.Weight, c.Bias) }

// ConvTranspose1d is a transposed convolution of sequences [N C L]: the gradient of a Conv1d.
type ConvTranspose1d struct{ ConvTranspose }

// NewConvTranspose1d returns a transposed convolution from in to out channels.
func NewConvTranspose1d(in, out, kernel int, o ConvTranspose1dOptions) *ConvTranspose1d {
	c := &ConvTranspose1d{}
	c.construct(1, in, out, kernel, o)
	return c
}

// Forward computes the transposed convolution.
func (c *ConvTranspose1d) Forward(x *torch.Tensor) *torch.Tensor {
	return c.result(x.ConvTranspose1d(c.Weight, c.Bias, torch.ConvTranspose1dOptions(c.o)), x)
}

// ConvTranspose2d is a transposed convolution of images [N C H W]: the gradient of a Conv2d. An
// output has (H-1)*stride - 2*padding + dilation*(kernel-1) + outputPadding + 1 rows.
type ConvTranspose2d struct{ ConvTranspose }

// NewConvTranspose2d returns a transposed convolution from in to out channels with a square kernel.
func NewConvTranspose2d(in, out, kernel int, o ConvTranspose2dOptions) *ConvTranspose2d {
	c := &ConvTranspose2d{}
	c.construct(2, in, out, kernel, o)
	return c
}

// Forward computes the transposed convolution.
func (c *ConvTranspose2d) Forward(x *torch.Tensor) *torch.Tensor {
	return c.result(x.ConvTranspose2d(c.Weight, c.Bias, c.o), x)
}

// ConvTranspose3d is a transposed convolution of volumes [N C D H W]: the gradient of a Conv3d.
type ConvTranspose3d struct{ ConvTranspose }

// NewConvTranspose3d returns a transposed convolution from in to out channels with a cubic kernel.
func NewConvTranspose3d(in, out, kernel int, o ConvTranspose3dOptions) *ConvTranspose3d {
	c := &ConvTranspose3d{}
	c.construct(3, in, out, kernel, o)
	return c
}

// Forward computes the transposed convolution.
func (c *ConvTranspose3d) Forward(x *torch.Tensor) *torch.Tensor {
	return c.result(x.ConvTranspose3d(c.Weight, c.Bias, torch.ConvTranspose3dOptions(c.o)), x)
}
