package models

import (
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/torch"
)

// ConvNeXt is a convolutional network built like a transformer (https://arxiv.org/abs/2201.03545).
type ConvNeXt struct {
	// Classifier is the head: [N 768 1 1] to classes. Its layer "2" is the linear one. It may be
	// replaced.
	Classifier nn.Module

	features *nn.Sequential
	mean     nn.Module
}

// ConvNeXtOptions are the options of NewConvNeXtT.
type ConvNeXtOptions struct {
	NumClasses int // 0 means 1000
	// StochasticDepth is the probability of dropping the last block. The probability grows linearly
	// from 0 at the first block. 0 stands for 0.1, and a negative value for no dropping.
	StochasticDepth float64
}

// NewConvNeXtT returns torchvision's convnext_tiny. It maps images [N 3 H W], of at least 32 x 32
// pixels, to logits [N classes].
func NewConvNeXtT(o ConvNeXtOptions) (*ConvNeXt, error) {
	const kind = "ConvNeXt-T"
	if o.NumClasses < 0 {
		return nil, invalid(kind, "NumClasses is %d", o.NumClasses)
	}
	stages := []struct{ channels, blocks int }{{96, 3}, {192, 3}, {384, 9}, {768, 3}}
	const total = 18 // blocks
	depth := probability(o.StochasticDepth, 0.1)
	layers := []nn.Module{nn.NewSequential(nn.NewConv2d(3, 96, 4, nn.Conv2dOptions{Stride: 4}), newLayerNorm2d(96))}
	block := 0
	for i, s := range stages {
		if i > 0 {
			in := stages[i-1].channels
			layers = append(layers, nn.NewSequential(newLayerNorm2d(in),
				nn.NewConv2d(in, s.channels, 2, nn.Conv2dOptions{Stride: 2})))
		}
		stage := make([]nn.Module, s.blocks)
		for j := range stage {
			stage[j] = newConvNeXtBlock(s.channels, depth*float64(block)/(total-1))
			block++
		}
		layers = append(layers, nn.NewSequential(stage...))
	}
	c := &ConvNeXt{
		features: nn.NewSequential(layers...),
		mean:     nn.NewAdaptiveAvgPool2d(1),
		Classifier: nn.NewSequential(newLayerNorm2d(768), nn.NewFlatten(),
			nn.NewLinear(768, classes(o.NumClasses), nn.LinearOptions{})),
	}
	weights := nn.TruncNormal(0, 0.02, -2, 2)
	return checked(kind, c, initialise(c, weights, weights))
}

// Forward computes the logits [N classes] of images [N 3 H W].
func (c *ConvNeXt) Forward(x *torch.Tensor) *torch.Tensor {
	return c.Classifier.Forward(c.mean.Forward(c.features.Forward(x)))
}

// Parts returns the modules by torchvision's names.
func (c *ConvNeXt) Parts() nn.Parts { return featuresAndClassifier(c.features, c.Classifier) }

// convNeXtBlock adds a scaled branch to its input. The branch is a depthwise convolution, followed
// by two linear layers at each pixel.
type convNeXtBlock struct {
	scale *torch.Tensor // [channels 1 1]
	block *nn.Sequential
	depth *nn.Dropout
}

func newConvNeXtBlock(channels int, depth float64) *convNeXtBlock {
	return &convNeXtBlock{
		scale: nn.NewParameter(nn.Constant(1e-6), int64(channels), 1, 1),
		block: nn.NewSequential(
			nn.NewConv2d(channels, channels, 7, nn.Conv2dOptions{Padding: 3, Groups: channels}),
			permute(0, 2, 3, 1),
			nn.NewLayerNorm([]int{channels}, nn.LayerNormOptions{Eps: 1e-6}),
			nn.NewLinear(channels, 4*channels, nn.LinearOptions{}),
			nn.NewGELU(nn.GELUOptions{}),
			nn.NewLinear(4*channels, channels, nn.LinearOptions{}),
			permute(0, 3, 1, 2),
		),
		depth: nn.NewStochasticDepth(depth),
	}
}

// permute returns a module that reorders the dimensions.
func permute(dims ...int64) nn.Module {
	return nn.Func(func(x *torch.Tensor) *torch.Tensor { return x.Permute(dims...) })
}

// Forward computes the block's output. The sum overwrites the scaled branch.
func (b *convNeXtBlock) Forward(x *torch.Tensor) *torch.Tensor {
	return torch.Tidy(func(in ...*torch.Tensor) *torch.Tensor {
		return b.depth.Forward(b.scale.Mul(b.block.Forward(in[0]))).Add_(in[0])
	}, x)
}

// Parts returns the scale and the layers by torchvision's names.
func (b *convNeXtBlock) Parts() nn.Parts {
	return nn.Parts{
		Parameters: []torch.Named{{Name: "layer_scale", Tensor: b.scale}},
		Modules:    []nn.Child{{Name: "block", Module: b.block}, {Name: "stochastic_depth", Module: b.depth}},
	}
}

// layerNorm2d normalises the channels of images [N C H W] at each pixel.
type layerNorm2d struct{ *nn.LayerNorm }

func newLayerNorm2d(channels int) layerNorm2d {
	return layerNorm2d{nn.NewLayerNorm([]int{channels}, nn.LayerNormOptions{Eps: 1e-6})}
}

// Forward computes the normalised images.
func (l layerNorm2d) Forward(x *torch.Tensor) *torch.Tensor {
	return l.LayerNorm.Forward(x.Permute(0, 2, 3, 1)).Permute(0, 3, 1, 2)
}

// String returns the module tree: see [nn.Tree].
func (c *ConvNeXt) String() string { return nn.Tree(c) }
