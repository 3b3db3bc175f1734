package nn

import (
	"fmt"
	"slices"

	"github.com/torchstream/torchstream/torch"
)

// Conv is the common part of Conv1d, Conv2d and Conv3d.
type Conv struct {
	layer
	Weight *torch.Tensor // [out in/groups kernel...], with one kernel size per direction
	Bias   *torch.Tensor // [out], nil with NoBias

	o    torch.Conv2dOptions
	op   string  // the operator of a convolution with Same or PaddingMode, or ""
	mode string  // how to pad before the convolution, or ""
	pad  []int64 // argument of Tensor.Pad, if mode is set
}

// ConvOptions are the options of NewConv1d, NewConv2d and NewConv3d. Stride, Padding and Dilation
// are in pixels and apply to all directions.
type ConvOptions struct {
	Stride   int // 0 stands for 1
	Padding  int // zeros on each side
	Dilation int // 0 stands for 1
	Groups   int // 0 stands for 1
	NoBias   bool

	// KernelSize, StrideSize, PaddingSize and DilationSize, if not nil, replace kernel, Stride,
	// Padding and Dilation with one value per direction: a KernelSize of []int{1, 7} is a kernel of
	// 1 row and 7 columns.
	KernelSize, StrideSize, PaddingSize, DilationSize []int

	// Same pads so that the output has the input's size. Same cannot be combined with Padding, and
	// requires a stride of 1.
	Same bool
	// PaddingMode selects the padding values as [PadOptions].Mode does: "reflect", "replicate" or
	// "circular". The default is zeros.
	PaddingMode string
}

// The options of NewConv1d, NewConv2d and NewConv3d.
type (
	Conv1dOptions = ConvOptions
	Conv2dOptions = ConvOptions
	Conv3dOptions = ConvOptions
)

// construct initialises the convolution c for the given number of directions.
func (c *Conv) construct(dims, in, out, kernel int, o ConvOptions) {
	kind := fmt.Sprintf("Conv%dd", dims)
	op := "nn.New" + kind
	c.create(kind)
	groups := max(o.Groups, 1)
	c.o = torch.Conv2dOptions{
		Stride: directions(o.StrideSize, max(o.Stride, 1)), Padding: directions(o.PaddingSize, o.Padding),
		Dilation: directions(o.DilationSize, max(o.Dilation, 1)), Groups: int64(groups),
	}
	if c.Weight = positive(op, "in and out", in, out); c.Weight != nil {
		return
	}
	if c.Weight = checkDirections(op, dims, direction{"kernel", "KernelSize", o.KernelSize, kernel, 1},
		direction{"Stride", "StrideSize", o.StrideSize, max(o.Stride, 1), 1},
		direction{"Padding", "PaddingSize", o.PaddingSize, o.Padding, 0},
		direction{"Dilation", "DilationSize", o.DilationSize, max(o.Dilation, 1), 1}); c.Weight != nil {
		return
	}
	if min(o.Stride, o.Dilation, o.Groups) < 0 || in%groups != 0 || out%groups != 0 {
		c.Weight = invalid(op, "options %+v: nothing may be negative, and groups must divide %d and %d", o, in, out)
		return
	}
	size := o.KernelSize
	if size == nil {
		size = slices.Repeat([]int{kernel}, dims)
	}
	if c.Weight = c.padBefore(op, size, o); c.Weight != nil {
		return
	}
	c.Weight, c.Bias = kernels(op, append([]int{out, in / groups}, size...), out, o.NoBias)
}

// padBefore sets the padding of the convolution for a kernel of the given size. It returns a failed
// tensor if the options contradict each other, and nil otherwise.
func (c *Conv) padBefore(op string, kernel []int, o ConvOptions) *torch.Tensor {
	if o.Same {
		if slices.Max(c.o.Stride) > 1 || o.Padding != 0 || o.PaddingSize != nil {
			return invalid(op, "options %+v: Same excludes a stride and Padding", o)
		}
		c.op = fmt.Sprintf("conv%dd", len(kernel))
	}
	switch o.PaddingMode {
	case "", "zeros":
		return nil
	case "reflect", "replicate", "circular":
	default:
		return invalid(op, "the padding mode is %q, and it must be reflect, replicate or circular", o.PaddingMode)
	}
	of := func(list []int64, i int) int64 { return list[min(i, len(list)-1)] }
	for i := len(kernel) - 1; i >= 0; i-- { // Pad lists the last dimension first
		before, after := of(c.o.Padding, i), of(c.o.Padding, i)
		if o.Same {
			total := of(c.o.Dilation, i) * int64(kernel[i]-1)
			before, after = total/2, total-total/2
		}
		c.pad = append(c.pad, before, after)
	}
	c.mode, c.op = o.PaddingMode, fmt.Sprintf("conv%dd", len(kernel))
	return nil
}

// padded computes a convolution with Same or PaddingMode.
func (c *Conv) padded(x *torch.Tensor) *torch.Tensor {
	if c.mode == "" {
		return torch.Call1(c.op+".padding", x, c.Weight, c.Bias, c.o.Stride, "same", c.o.Dilation, c.o.Groups)
	}
	p := x.Pad(c.pad, torch.PadOptions{Mode: c.mode})
	defer p.Close() // autograd keeps what backward needs
	return torch.Call1(c.op, p, c.Weight, c.Bias, c.o.Stride, 0, c.o.Dilation, c.o.Groups)
}

// directions returns an option's value for each direction: list, or all repeated if list is nil.
func directions(list []int, all int) []int64 {
	if list == nil {
		return []int64{int64(all)}
	}
	return int64s(list)
}

// direction is an option for all directions, together with the option that replaces it per
// direction.
type direction struct {
	name, each string
	list       []int
	all        int
	least      int
}

// checkDirections returns nil if the values are valid, and a failed tensor otherwise.
func checkDirections(op string, dims int, options ...direction) *torch.Tensor {
	for _, d := range options {
		switch {
		case d.list == nil && d.all < d.least:
			return invalid(op, "%s is %d, and it must be at least %d", d.name, d.all, d.least)
		case d.list != nil && (len(d.list) != dims || slices.Min(d.list) < d.least):
			return invalid(op, "%s is %v, and it must have one value of at least %d for each of %d directions",
				d.each, d.list, d.least, dims)
		}
	}
	return nil
}

// kernels returns a weight of the given shape, and a bias of out elements unless noBias is set. As
// in PyTorch, the bias's fan-in is the number of elements in a row of the weight.
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
	if c.op != "" {
		return c.result(c.padded(x), x)
	}
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
	if c.op != "" {
		return c.result(c.padded(x), x)
	}
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
	if c.op != "" {
		return c.result(c.padded(x), x)
	}
	return c.result(x.Conv3d(c.Weight, c.Bias, torch.Conv3dOptions(c.o)), x)
}

// ConvTranspose is the common part of ConvTranspose1d, ConvTranspose2d and ConvTranspose3d.
type ConvTranspose struct {
	layer
	Weight *torch.Tensor // [in out/groups kernel...], with one kernel size per direction
	Bias   *torch.Tensor // [out], nil with NoBias

	o torch.ConvTranspose2dOptions
}

// ConvTransposeOptions are the options of NewConvTranspose1d, NewConvTranspose2d and
// NewConvTranspose3d. All except Groups are in pixels and apply to all directions.
type ConvTransposeOptions struct {
	Stride        int // 0 stands for 1
	Padding       int // removes this many pixels from each side of the output
	OutputPadding int // enlarges one side of the output; must be less than Stride or Dilation
	Dilation      int // 0 stands for 1
	Groups        int // 0 stands for 1
	NoBias        bool

	// KernelSize, StrideSize, PaddingSize, OutputPaddingSize and DilationSize, if not nil, replace
	// kernel, Stride, Padding, OutputPadding and Dilation with one value per direction.
	KernelSize, StrideSize, PaddingSize, OutputPaddingSize, DilationSize []int
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
		Stride: directions(o.StrideSize, max(o.Stride, 1)), Padding: directions(o.PaddingSize, o.Padding),
		OutputPadding: directions(o.OutputPaddingSize, o.OutputPadding),
		Groups:        int64(groups), Dilation: directions(o.DilationSize, max(o.Dilation, 1)),
	}
	if c.Weight = positive(op, "in and out", in, out); c.Weight != nil {
		return
	}
	if c.Weight = checkDirections(op, dims, direction{"kernel", "KernelSize", o.KernelSize, kernel, 1},
		direction{"Stride", "StrideSize", o.StrideSize, max(o.Stride, 1), 1},
		direction{"Padding", "PaddingSize", o.PaddingSize, o.Padding, 0},
		direction{"OutputPadding", "OutputPaddingSize", o.OutputPaddingSize, o.OutputPadding, 0},
		direction{"Dilation", "DilationSize", o.DilationSize, max(o.Dilation, 1), 1}); c.Weight != nil {
		return
	}
	if min(o.Stride, o.Dilation, o.Groups) < 0 || in%groups != 0 || out%groups != 0 {
		c.Weight = invalid(op, "options %+v: nothing may be negative, and groups must divide %d and %d", o, in, out)
		return
	}
	size := o.KernelSize
	if size == nil {
		size = slices.Repeat([]int{kernel}, dims)
	}
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

// NewConvTranspose2d returns a transposed convolution from in to out channels with a square kernel,
// unless KernelSize is set.
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

// NewConvTranspose3d returns a transposed convolution from in to out channels with a cubic kernel,
// unless KernelSize is set.
func NewConvTranspose3d(in, out, kernel int, o ConvTranspose3dOptions) *ConvTranspose3d {
	c := &ConvTranspose3d{}
	c.construct(3, in, out, kernel, o)
	return c
}

// Forward computes the transposed convolution.
func (c *ConvTranspose3d) Forward(x *torch.Tensor) *torch.Tensor {
	return c.result(x.ConvTranspose3d(c.Weight, c.Bias, torch.ConvTranspose3dOptions(c.o)), x)
}
