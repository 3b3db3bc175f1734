package models

import (
	"math"

	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/torch"
)

// EfficientNet is the baseline of a family of networks that balance depth, width and resolution
// (https://arxiv.org/abs/1905.11946).
type EfficientNet struct {
	// Classifier is the head: [N 1280] to classes. Its layer "1" is the linear one. It may be
	// replaced.
	Classifier nn.Module

	features *nn.Sequential
	mean     nn.Module
}

// EfficientNetOptions are the options of NewEfficientNetB0.
type EfficientNetOptions struct {
	NumClasses int     // 0 stands for 1000
	Dropout    float64 // the probability before the last layer; 0 stands for 0.2, a negative value for none
	// StochasticDepth determines the probability of dropping a block: StochasticDepth * i/16 for
	// block i of the 16 blocks, counted from 0. 0 stands for 0.2, and a negative value for no
	// dropping.
	StochasticDepth float64
}

// NewEfficientNetB0 returns torchvision's efficientnet_b0. It maps images [N 3 H W] to logits [N
// classes].
func NewEfficientNetB0(o EfficientNetOptions) (*EfficientNet, error) {
	const kind = "EfficientNet-B0"
	if o.NumClasses < 0 {
		return nil, invalid(kind, "NumClasses is %d", o.NumClasses)
	}
	stages := []struct{ expand, kernel, stride, in, out, blocks int }{
		{1, 3, 1, 32, 16, 1},
		{6, 3, 2, 16, 24, 2},
		{6, 5, 2, 24, 40, 2},
		{6, 3, 2, 40, 80, 3},
		{6, 5, 1, 80, 112, 3},
		{6, 5, 2, 112, 192, 4},
		{6, 3, 1, 192, 320, 1},
	}
	const total = 16 // blocks
	depth := probability(o.StochasticDepth, 0.2)
	norm := nn.BatchNorm2dOptions{}
	layers := []nn.Module{convNorm(3, 32, 3, nn.Conv2dOptions{Stride: 2}, norm, nn.NewSiLU)}
	block := 0
	for _, s := range stages {
		stage := make([]nn.Module, s.blocks)
		for i := range stage {
			b := newMBConv(s.in, s.in*s.expand, s.out, s.kernel, s.stride, norm)
			b.depth = nn.NewStochasticDepth(depth * float64(block) / total)
			stage[i] = b
			s.in, s.stride = s.out, 1
			block++
		}
		layers = append(layers, nn.NewSequential(stage...))
	}
	layers = append(layers, convNorm(320, 1280, 1, nn.Conv2dOptions{}, norm, nn.NewSiLU))
	n := classes(o.NumClasses)
	e := &EfficientNet{
		features: nn.NewSequential(layers...),
		mean:     nn.NewAdaptiveAvgPool2d(1),
		Classifier: nn.NewSequential(nn.NewDropout(probability(o.Dropout, 0.2)),
			nn.NewLinear(1280, n, nn.LinearOptions{})),
	}
	bound := 1 / math.Sqrt(float64(n))
	return checked(kind, e, initialise(e, nn.KaimingNormalFanOut(), nn.Uniform(-bound, bound)))
}

func newMBConv(in, expanded, out, kernel, stride int, norm nn.BatchNorm2dOptions) *invertedResidual {
	var layers []nn.Module
	if expanded != in {
		layers = append(layers, convNorm(in, expanded, 1, nn.Conv2dOptions{}, norm, nn.NewSiLU))
	}
	layers = append(layers,
		convNorm(expanded, expanded, kernel, nn.Conv2dOptions{Stride: stride, Groups: expanded}, norm, nn.NewSiLU),
		newSqueezeExcitation(expanded, max(1, in/4), nn.NewSiLU, nn.NewSigmoid),
		convNorm(expanded, out, 1, nn.Conv2dOptions{}, norm, nil),
	)
	return &invertedResidual{block: nn.NewSequential(layers...), adds: stride == 1 && in == out}
}

// Forward computes the logits [N classes] of images [N 3 H W].
func (e *EfficientNet) Forward(x *torch.Tensor) *torch.Tensor {
	return e.Classifier.Forward(e.mean.Forward(e.features.Forward(x)).Flatten(1, -1))
}

// Parts returns the modules by torchvision's names.
func (e *EfficientNet) Parts() nn.Parts { return featuresAndClassifier(e.features, e.Classifier) }

// String returns the module tree: see [nn.Tree].
func (e *EfficientNet) String() string { return nn.Tree(e) }
