package nn

import (
	"math"
	"slices"

	"github.com/torchstream/torchstream/torch"
)

// UpsampleOptions are the options of NewUpsample. Set either Size or Scale.
type UpsampleOptions struct {
	Size  []int   // of the output: length; height and width; or depth, height and width. One value stands for all
	Scale float64 // the output's size divided by the input's, in all directions
	// Mode selects the interpolation: "nearest" (also ""), "linear" for [N C L], "bilinear" and
	// "bicubic" for [N C H W], "trilinear" for [N C D H W].
	Mode         string
	AlignCorners bool // map the corner elements onto each other; not for "nearest"
}

// NewUpsample returns a module that resizes its input [N C ...].
func NewUpsample(o UpsampleOptions) Module {
	return newFunction("Upsample", func(x *torch.Tensor) *torch.Tensor { return upsample(x, o) })
}

func upsample(x *torch.Tensor, o UpsampleOptions) *torch.Tensor {
	const op = "nn.Upsample"
	shape := x.Shape()
	if shape == nil {
		return x.Unsqueeze(0) // reports what is wrong with x
	}
	dims := len(shape) - 2
	if dims < 1 || dims > 3 {
		return invalid(op, "the input is %v, and it must have 3 to 5 dimensions", shape)
	}
	if (o.Scale != 0) == (len(o.Size) > 0) {
		return invalid(op, "set either Size or Scale")
	}
	size := o.size(shape[2:])
	if len(size) != dims {
		return invalid(op, "Size %v for the input %v", o.Size, shape)
	}
	s := o.Scale
	switch mode := o.Mode; {
	case mode == "linear" && dims == 1:
		return x.UpsampleLinear1d(size, o.AlignCorners, torch.UpsampleLinear1dOptions{Scales: s})
	case mode == "bilinear" && dims == 2:
		return x.UpsampleBilinear2d(size, o.AlignCorners, torch.UpsampleBilinear2dOptions{ScalesH: s, ScalesW: s})
	case mode == "bicubic" && dims == 2:
		return x.UpsampleBicubic2d(size, o.AlignCorners, torch.UpsampleBicubic2dOptions{ScalesH: s, ScalesW: s})
	case mode == "trilinear" && dims == 3:
		scales := torch.UpsampleTrilinear3dOptions{ScalesD: s, ScalesH: s, ScalesW: s}
		return x.UpsampleTrilinear3d(size, o.AlignCorners, scales)
	case mode != "" && mode != "nearest" || o.AlignCorners:
		return invalid(op, "Mode %q with AlignCorners %v does not fit the input %v", o.Mode, o.AlignCorners, shape)
	}
	return nearest(x, size, s)
}

// size returns the output's sizes for the input's sizes.
func (o UpsampleOptions) size(in []int64) []int64 {
	switch {
	case o.Scale != 0:
		out := make([]int64, len(in))
		for i, n := range in {
			out[i] = int64(math.Floor(float64(n) * o.Scale))
		}
		return out
	case len(o.Size) == 1:
		return slices.Repeat(int64s(o.Size), len(in))
	}
	return int64s(o.Size)
}

func nearest(x *torch.Tensor, size []int64, s float64) *torch.Tensor {
	switch len(size) {
	case 1:
		return x.UpsampleNearest1d(size, torch.UpsampleNearest1dOptions{Scales: s})
	case 2:
		return x.UpsampleNearest2d(size, torch.UpsampleNearest2dOptions{ScalesH: s, ScalesW: s})
	}
	return x.UpsampleNearest3d(size, torch.UpsampleNearest3dOptions{ScalesD: s, ScalesH: s, ScalesW: s})
}

// NewPixelShuffle returns a module that rearranges [N C*r*r H W] to images [N C H*r W*r].
func NewPixelShuffle(r int) Module {
	return newFunction("PixelShuffle", func(x *torch.Tensor) *torch.Tensor { return x.PixelShuffle(int64(r)) })
}

// NewPixelUnshuffle returns a module that rearranges images [N C H*r W*r] to [N C*r*r H W].
func NewPixelUnshuffle(r int) Module {
	return newFunction("PixelUnshuffle", func(x *torch.Tensor) *torch.Tensor { return x.PixelUnshuffle(int64(r)) })
}
