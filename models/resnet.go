package models

import (
	"fmt"

	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/torch"
)

// ResNet is a residual network of torchvision. In a bottleneck block, the 3x3 convolution has the
// stride ("ResNet v1.5"; https://arxiv.org/abs/1512.03385).
type ResNet struct {
	FC nn.Module // the head: [N 512] to classes, or [N 2048] from ResNet-50 on; may be replaced

	conv1  *nn.Conv2d
	bn1    *nn.BatchNorm2d
	pool   nn.Module
	layers [4]*nn.Sequential
	mean   nn.Module
}

// ResNetOptions are the options of the ResNets.
type ResNetOptions struct {
	NumClasses int // 0 stands for 1000
	// ZeroInitResidual starts the last normalisation of each block with a weight of 0, so that a
	// new network's blocks are identities.
	ZeroInitResidual bool
	// Groups and WidthPerGroup shape the 3x3 convolution of a bottleneck; 0 stands for 1 and 64.
	// ResNet-50 with Groups 32 and WidthPerGroup 4 is ResNeXt-50 32x4d, and with WidthPerGroup 128
	// it is Wide ResNet-50-2. ResNet-18 and ResNet-34 have no bottlenecks and take only 0.
	Groups, WidthPerGroup int
}

// NewResNet18 returns torchvision's resnet18. It maps images [N 3 H W] to logits [N classes].
func NewResNet18(o ResNetOptions) (*ResNet, error) {
	return newResNet("ResNet-18", false, [4]int{2, 2, 2, 2}, o)
}

// NewResNet34 returns torchvision's resnet34. It maps images [N 3 H W] to logits [N classes].
func NewResNet34(o ResNetOptions) (*ResNet, error) {
	return newResNet("ResNet-34", false, [4]int{3, 4, 6, 3}, o)
}

// NewResNet50 returns torchvision's resnet50. It maps images [N 3 H W] to logits [N classes].
func NewResNet50(o ResNetOptions) (*ResNet, error) {
	return newResNet("ResNet-50", true, [4]int{3, 4, 6, 3}, o)
}

// NewResNet101 returns torchvision's resnet101. It maps images [N 3 H W] to logits [N classes].
func NewResNet101(o ResNetOptions) (*ResNet, error) {
	return newResNet("ResNet-101", true, [4]int{3, 4, 23, 3}, o)
}

// NewResNet152 returns torchvision's resnet152. It maps images [N 3 H W] to logits [N classes].
func NewResNet152(o ResNetOptions) (*ResNet, error) {
	return newResNet("ResNet-152", true, [4]int{3, 8, 36, 3}, o)
}

func newResNet(kind string, bottleneck bool, blocks [4]int, o ResNetOptions) (*ResNet, error) {
	switch {
	case o.NumClasses < 0 || o.Groups < 0 || o.WidthPerGroup < 0:
		return nil, invalid(kind, "options %+v: nothing may be negative", o)
	case !bottleneck && (o.Groups > 1 || o.WidthPerGroup != 0 && o.WidthPerGroup != 64):
		return nil, invalid(kind,
			"Groups %d and WidthPerGroup %d need bottlenecks: use ResNet-50 or deeper", o.Groups, o.WidthPerGroup)
	}
	// The order of these calls is torchvision's, so that the same seed gives the same numbers.
	r := &ResNet{
		conv1: nn.NewConv2d(3, 64, 7, nn.Conv2dOptions{Stride: 2, Padding: 3, NoBias: true}),
		bn1:   nn.NewBatchNorm2d(64, nn.BatchNorm2dOptions{}),
		pool:  nn.NewMaxPool2d(3, nn.MaxPool2dOptions{Stride: 2, Padding: 1}),
		mean:  nn.NewAdaptiveAvgPool2d(1),
	}
	in := 64
	for i, n := range blocks {
		modules := make([]nn.Module, n)
		for j := range modules {
			stride := 1
			if i > 0 && j == 0 {
				stride = 2
			}
			b := newResidualBlock(in, 64<<i, stride, bottleneck, o)
			modules[j], in = b, b.out
		}
		r.layers[i] = nn.NewSequential(modules...)
	}
	r.FC = nn.NewLinear(in, classes(o.NumClasses), nn.LinearOptions{})
	err := initialise(r, nn.KaimingNormalFanOut(), nil)
	if o.ZeroInitResidual && err == nil {
		err = r.zeroResiduals()
	}
	return checked(kind, r, err)
}

// zeroResiduals zeroes the weight of the last normalisation of each block.
func (r *ResNet) zeroResiduals() error {
	for _, layer := range r.layers {
		for _, c := range layer.Parts().Modules {
			if b, ok := c.Module.(*residualBlock); ok {
				if err := nn.Initialise(b.norms[len(b.norms)-1].Weight, nn.Constant(0)); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// Forward computes the logits [N classes] of images [N 3 H W].
func (r *ResNet) Forward(x *torch.Tensor) *torch.Tensor {
	return r.FC.Forward(torch.Tidy(r.features, x))
}

// features computes the head's input vectors.
func (r *ResNet) features(in ...*torch.Tensor) *torch.Tensor {
	x := torch.Tidy(r.stem, in...)
	for _, layer := range r.layers {
		y := torch.Tidy(func(in ...*torch.Tensor) *torch.Tensor { return layer.Forward(in[0]) }, x)
		x.Close()
		x = y
	}
	return r.mean.Forward(x).Flatten(1, -1)
}

func (r *ResNet) stem(in ...*torch.Tensor) *torch.Tensor {
	return r.pool.Forward(r.bn1.ForwardReLU(r.conv1.Forward(in[0]), nil))
}

// Parts returns the modules by torchvision's names.
func (r *ResNet) Parts() nn.Parts {
	modules := []nn.Child{{Name: "conv1", Module: r.conv1}, {Name: "bn1", Module: r.bn1}}
	for i, layer := range r.layers {
		modules = append(modules, nn.Child{Name: fmt.Sprintf("layer%d", i+1), Module: layer})
	}
	return nn.Parts{Modules: append(modules, nn.Child{Name: "fc", Module: r.FC})}
}

// residualBlock is torchvision's BasicBlock, two 3x3 convolutions, or its Bottleneck, convolutions
// of 1x1, 3x3 and 1x1.
type residualBlock struct {
	convs      []*nn.Conv2d
	norms      []*nn.BatchNorm2d
	downsample *nn.Sequential // changes the input to the output's shape; nil if the shapes are equal
	out        int            // channels
}

func newResidualBlock(in, planes, stride int, bottleneck bool, o ResNetOptions) *residualBlock {
	b := &residualBlock{out: planes}
	if bottleneck {
		b.out = 4 * planes
	}
	if stride != 1 || in != b.out { // torchvision makes this part first
		b.downsample = nn.NewSequential(
			nn.NewConv2d(in, b.out, 1, nn.Conv2dOptions{Stride: stride, NoBias: true}),
			nn.NewBatchNorm2d(b.out, nn.BatchNorm2dOptions{}),
		)
	}
	add := func(in, out, kernel int, c nn.Conv2dOptions) {
		c.Padding, c.NoBias = kernel/2, true
		b.convs = append(b.convs, nn.NewConv2d(in, out, kernel, c))
		b.norms = append(b.norms, nn.NewBatchNorm2d(out, nn.BatchNorm2dOptions{}))
	}
	if !bottleneck {
		add(in, planes, 3, nn.Conv2dOptions{Stride: stride})
		add(planes, planes, 3, nn.Conv2dOptions{})
		return b
	}
	groups, perGroup := max(o.Groups, 1), 64
	if o.WidthPerGroup != 0 {
		perGroup = o.WidthPerGroup
	}
	width := planes * perGroup / 64 * groups
	add(in, width, 1, nn.Conv2dOptions{})
	add(width, width, 3, nn.Conv2dOptions{Stride: stride, Groups: groups})
	add(width, b.out, 1, nn.Conv2dOptions{})
	return b
}

// Forward computes the block's output.
func (b *residualBlock) Forward(x *torch.Tensor) *torch.Tensor { return torch.Tidy(b.forward, x) }

func (b *residualBlock) forward(in ...*torch.Tensor) *torch.Tensor {
	x, y := in[0], in[0]
	last := len(b.convs) - 1
	for i, conv := range b.convs[:last] {
		y = b.norms[i].ForwardReLU(conv.Forward(y), nil)
	}
	y = b.convs[last].Forward(y)
	if b.downsample != nil {
		x = b.downsample.Forward(x)
	}
	return b.norms[last].ForwardReLU(y, x)
}

// Parts returns the modules by torchvision's names.
func (b *residualBlock) Parts() nn.Parts {
	var p nn.Parts
	for i, conv := range b.convs {
		p.Modules = append(p.Modules,
			nn.Child{Name: fmt.Sprintf("conv%d", i+1), Module: conv},
			nn.Child{Name: fmt.Sprintf("bn%d", i+1), Module: b.norms[i]})
	}
	if b.downsample != nil {
		p.Modules = append(p.Modules, nn.Child{Name: "downsample", Module: b.downsample})
	}
	return p
}

// String returns the module tree: see [nn.Tree].
func (r *ResNet) String() string { return nn.Tree(r) }
