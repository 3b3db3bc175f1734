package models

import (
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/torch"
)

// MobileNetV3 is a network for small devices (https://arxiv.org/abs/1905.02244).
type MobileNetV3 struct {
	// Classifier is the head: [N 576] (small) or [N 960] (large) to classes. Its layer "3" outputs
	// the classes. It may be replaced.
	Classifier nn.Module

	features *nn.Sequential
	mean     nn.Module
}

// MobileNetV3Options are the options of the MobileNetV3s.
type MobileNetV3Options struct {
	NumClasses int     // 0 stands for 1000
	Dropout    float64 // the probability before the last layer; 0 stands for 0.2, a negative value for none
}

// mobileNetBlock is a row of the paper's tables 1 and 2.
type mobileNetBlock struct {
	in, kernel, expanded, out int
	squeezes                  bool // has a squeezeExcitation
	hardswish                 bool // rather than ReLU
	stride                    int
}

// NewMobileNetV3Small returns torchvision's mobilenet_v3_small. It maps images [N 3 H W] to logits
// [N classes].
func NewMobileNetV3Small(o MobileNetV3Options) (*MobileNetV3, error) {
	return newMobileNetV3("MobileNetV3-Small", 1024, o, []mobileNetBlock{
		{16, 3, 16, 16, true, false, 2},
		{16, 3, 72, 24, false, false, 2},
		{24, 3, 88, 24, false, false, 1},
		{24, 5, 96, 40, true, true, 2},
		{40, 5, 240, 40, true, true, 1},
		{40, 5, 240, 40, true, true, 1},
		{40, 5, 120, 48, true, true, 1},
		{48, 5, 144, 48, true, true, 1},
		{48, 5, 288, 96, true, true, 2},
		{96, 5, 576, 96, true, true, 1},
		{96, 5, 576, 96, true, true, 1},
	})
}

// NewMobileNetV3Large returns torchvision's mobilenet_v3_large. It maps images [N 3 H W] to logits
// [N classes].
func NewMobileNetV3Large(o MobileNetV3Options) (*MobileNetV3, error) {
	return newMobileNetV3("MobileNetV3-Large", 1280, o, []mobileNetBlock{
		{16, 3, 16, 16, false, false, 1},
		{16, 3, 64, 24, false, false, 2},
		{24, 3, 72, 24, false, false, 1},
		{24, 5, 72, 40, true, false, 2},
		{40, 5, 120, 40, true, false, 1},
		{40, 5, 120, 40, true, false, 1},
		{40, 3, 240, 80, false, true, 2},
		{80, 3, 200, 80, false, true, 1},
		{80, 3, 184, 80, false, true, 1},
		{80, 3, 184, 80, false, true, 1},
		{80, 3, 480, 112, true, true, 1},
		{112, 3, 672, 112, true, true, 1},
		{112, 5, 672, 160, true, true, 2},
		{160, 5, 960, 160, true, true, 1},
		{160, 5, 960, 160, true, true, 1},
	})
}

func newMobileNetV3(kind string, hidden int, o MobileNetV3Options, blocks []mobileNetBlock) (*MobileNetV3, error) {
	if o.NumClasses < 0 {
		return nil, invalid(kind, "NumClasses is %d", o.NumClasses)
	}
	norm := nn.BatchNorm2dOptions{Eps: 1e-3, Momentum: 0.01}
	layers := []nn.Module{convNorm(3, blocks[0].in, 3, nn.Conv2dOptions{Stride: 2}, norm, nn.NewHardswish)}
	for _, b := range blocks {
		layers = append(layers, newMobileNetBlock(b, norm))
	}
	in := blocks[len(blocks)-1].out
	layers = append(layers, convNorm(in, 6*in, 1, nn.Conv2dOptions{}, norm, nn.NewHardswish))
	m := &MobileNetV3{
		features: nn.NewSequential(layers...),
		mean:     nn.NewAdaptiveAvgPool2d(1),
		Classifier: nn.NewSequential(
			nn.NewLinear(6*in, hidden, nn.LinearOptions{}),
			nn.NewHardswish(),
			nn.NewDropout(probability(o.Dropout, 0.2)),
			nn.NewLinear(hidden, classes(o.NumClasses), nn.LinearOptions{}),
		),
	}
	return checked(kind, m, initialise(m, nn.KaimingNormalFanOut(), nn.Normal(0, 0.01)))
}

func newMobileNetBlock(b mobileNetBlock, norm nn.BatchNorm2dOptions) *invertedResidual {
	activation := nn.NewReLU
	if b.hardswish {
		activation = nn.NewHardswish
	}
	var layers []nn.Module
	if b.expanded != b.in {
		layers = append(layers, convNorm(b.in, b.expanded, 1, nn.Conv2dOptions{}, norm, activation))
	}
	layers = append(layers, convNorm(b.expanded, b.expanded, b.kernel,
		nn.Conv2dOptions{Stride: b.stride, Groups: b.expanded}, norm, activation))
	if b.squeezes {
		layers = append(layers, newSqueezeExcitation(b.expanded, divisibleBy8(b.expanded/4), reluInPlace,
			nn.NewHardsigmoid))
	}
	layers = append(layers, convNorm(b.expanded, b.out, 1, nn.Conv2dOptions{}, norm, nil))
	return &invertedResidual{block: nn.NewSequential(layers...), adds: b.stride == 1 && b.in == b.out}
}

// divisibleBy8 rounds n to a multiple of 8, but never down by more than a tenth, like torchvision's
// _make_divisible.
func divisibleBy8(n int) int {
	rounded := max(8, (n+4)/8*8)
	if 10*rounded < 9*n {
		rounded += 8
	}
	return rounded
}

// Forward computes the logits [N classes] of images [N 3 H W].
func (m *MobileNetV3) Forward(x *torch.Tensor) *torch.Tensor {
	return m.Classifier.Forward(m.mean.Forward(m.features.Forward(x)).Flatten(1, -1))
}

// Parts returns the modules by torchvision's names.
func (m *MobileNetV3) Parts() nn.Parts { return featuresAndClassifier(m.features, m.Classifier) }

// String returns the module tree: see [nn.Tree].
func (m *MobileNetV3) String() string { return nn.Tree(m) }
