package nn

import (
	"slices"

	"github.com/torchstream/torchstream/torch"
)

// MaxPoolOptions are the options of NewMaxPool1d, NewMaxPool2d and NewMaxPool3d. Sizes are in
// pixels and apply to all directions.
type MaxPoolOptions struct {
	Stride   int // 0 stands for the kernel's size
	Padding  int
	Dilation int  // 0 stands for 1
	CeilMode bool // round the output's size up rather than down

	// KernelSize, StrideSize, PaddingSize and DilationSize, if not nil, replace kernel, Stride,
	// Padding and Dilation with one value per direction.
	KernelSize, StrideSize, PaddingSize, DilationSize []int
}

// The options of NewMaxPool1d, NewMaxPool2d and NewMaxPool3d.
type (
	MaxPool1dOptions = MaxPoolOptions
	MaxPool2dOptions = MaxPoolOptions
	MaxPool3dOptions = MaxPoolOptions
)

// AvgPoolOptions are the options of NewAvgPool1d, NewAvgPool2d and NewAvgPool3d. Sizes are in
// pixels and apply to all directions.
type AvgPoolOptions struct {
	Stride         int // 0 stands for the kernel's size
	Padding        int
	CeilMode       bool // round the output's size up rather than down
	ExcludePadding bool // the mean does not count padding

	// KernelSize, StrideSize and PaddingSize, if not nil, replace kernel, Stride and Padding with
	// one value per direction.
	KernelSize, StrideSize, PaddingSize []int
}

// The options of NewAvgPool1d, NewAvgPool2d and NewAvgPool3d.
type (
	AvgPool1dOptions = AvgPoolOptions
	AvgPool2dOptions = AvgPoolOptions
	AvgPool3dOptions = AvgPoolOptions
)

// sizes returns an option's value for each direction: list, or all repeated if list is nil. It
// returns nil, the operator's default, if all is 0 too.
func sizes(list []int, all int) []int64 {
	if list == nil && all == 0 {
		return nil
	}
	return directions(list, all)
}

// operator converts the options to the operators' options.
func (o MaxPoolOptions) operator() torch.MaxPool2dOptions {
	return torch.MaxPool2dOptions{
		Stride: sizes(o.StrideSize, o.Stride), Padding: sizes(o.PaddingSize, o.Padding),
		Dilation: sizes(o.DilationSize, o.Dilation), CeilMode: o.CeilMode,
	}
}

// NewMaxPool1d returns a module that computes the maximum of each window of sequences [N C L].
func NewMaxPool1d(kernel int, o MaxPool1dOptions) Module {
	p := torch.MaxPool1dOptions(o.operator())
	k := directions(o.KernelSize, kernel)
	return newFunction("MaxPool1d", func(x *torch.Tensor) *torch.Tensor { return x.MaxPool1d(k, p) })
}

// NewMaxPool2d returns a module that computes the maximum of each window of kernel x kernel pixels.
func NewMaxPool2d(kernel int, o MaxPool2dOptions) Module {
	p := o.operator()
	k := directions(o.KernelSize, kernel)
	return newFunction("MaxPool2d", func(x *torch.Tensor) *torch.Tensor { return x.MaxPool2d(k, p) })
}

// NewMaxPool3d returns a module that computes the maximum of each cubic window of volumes
// [N C D H W].
func NewMaxPool3d(kernel int, o MaxPool3dOptions) Module {
	p := torch.MaxPool3dOptions(o.operator())
	k := directions(o.KernelSize, kernel)
	return newFunction("MaxPool3d", func(x *torch.Tensor) *torch.Tensor { return x.MaxPool3d(k, p) })
}

// operator converts the options to the operators' options.
func (o AvgPoolOptions) operator() torch.AvgPool2dOptions {
	include := !o.ExcludePadding
	return torch.AvgPool2dOptions{
		Stride: sizes(o.StrideSize, o.Stride), Padding: sizes(o.PaddingSize, o.Padding),
		CeilMode: o.CeilMode, CountIncludePad: &include,
	}
}

// NewAvgPool1d returns a module that computes the mean of each window of sequences [N C L].
func NewAvgPool1d(kernel int, o AvgPool1dOptions) Module {
	p := torch.AvgPool1dOptions(o.operator())
	k := directions(o.KernelSize, kernel)
	return newFunction("AvgPool1d", func(x *torch.Tensor) *torch.Tensor { return x.AvgPool1d(k, p) })
}

// NewAvgPool2d returns a module that computes the mean of each window of kernel x kernel pixels.
func NewAvgPool2d(kernel int, o AvgPool2dOptions) Module {
	p := o.operator()
	k := directions(o.KernelSize, kernel)
	return newFunction("AvgPool2d", func(x *torch.Tensor) *torch.Tensor { return x.AvgPool2d(k, p) })
}

// NewAvgPool3d returns a module that computes the mean of each cubic window of volumes [N C D H W].
func NewAvgPool3d(kernel int, o AvgPool3dOptions) Module {
	p := torch.AvgPool3dOptions(o.operator())
	k := directions(o.KernelSize, kernel)
	return newFunction("AvgPool3d", func(x *torch.Tensor) *torch.Tensor { return x.AvgPool3d(k, p) })
}

// NewAdaptiveAvgPool1d returns a module that outputs sequences of the given length, each element
// the mean of its share of the input.
func NewAdaptiveAvgPool1d(size int) Module {
	n := int64(size)
	return newFunction("AdaptiveAvgPool1d", func(x *torch.Tensor) *torch.Tensor { return x.AdaptiveAvgPool1d(n) })
}

// NewAdaptiveAvgPool2d returns a module that outputs images of the given size, each pixel the mean
// of its share of the input. size is height and width, or one value for both.
func NewAdaptiveAvgPool2d(size ...int) Module {
	return newAdaptive("AdaptiveAvgPool2d", 2, size, func(x *torch.Tensor, n []int64) *torch.Tensor {
		return x.AdaptiveAvgPool2d(n...)
	})
}

// NewAdaptiveAvgPool3d returns a module that outputs volumes of the given size, each element the
// mean of its share of the input. size is depth, height and width, or one value for all.
func NewAdaptiveAvgPool3d(size ...int) Module {
	return newAdaptive("AdaptiveAvgPool3d", 3, size, func(x *torch.Tensor, n []int64) *torch.Tensor {
		return x.AdaptiveAvgPool3d(n...)
	})
}

// newAdaptive returns a module that calls f with one size for each direction.
func newAdaptive(kind string, dims int, size []int, f func(x *torch.Tensor, n []int64) *torch.Tensor) Module {
	n := int64s(size)
	if len(n) == 1 {
		n = slices.Repeat(n, dims)
	}
	return newFunction(kind, func(x *torch.Tensor) *torch.Tensor {
		if len(n) != dims {
			return invalid("nn."+kind, "the size is %v, and it must have one value, or %d", n, dims)
		}
		return f(x, n)
	})
}

// NewAdaptiveMaxPool1d returns a module that outputs sequences of the given length, each element
// the maximum of its share of the input.
func NewAdaptiveMaxPool1d(size int) Module {
	n := int64(size)
	return newFunction("AdaptiveMaxPool1d",
		func(x *torch.Tensor) *torch.Tensor { return first(x.AdaptiveMaxPool1d(n)) })
}

// NewAdaptiveMaxPool2d returns a module that outputs images of the given size, each pixel the
// maximum of its share of the input. size is height and width, or one value for both.
func NewAdaptiveMaxPool2d(size ...int) Module {
	return newAdaptive("AdaptiveMaxPool2d", 2, size, func(x *torch.Tensor, n []int64) *torch.Tensor {
		return first(x.AdaptiveMaxPool2d(n...))
	})
}

// NewAdaptiveMaxPool3d returns a module that outputs volumes of the given size, each element the
// maximum of its share of the input. size is depth, height and width, or one value for all.
func NewAdaptiveMaxPool3d(size ...int) Module {
	return newAdaptive("AdaptiveMaxPool3d", 3, size, func(x *torch.Tensor, n []int64) *torch.Tensor {
		return first(x.AdaptiveMaxPool3d(n...))
	})
}

// first closes the indices and returns the values.
func first(values, indices *torch.Tensor) *torch.Tensor {
	indices.Close()
	return values
}
