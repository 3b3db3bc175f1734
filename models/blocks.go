package models

import (
	"errors"
	"fmt"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/torch"
)

// This file has the building blocks that several families share, as in torchvision.ops.

// checked returns m. If a parameter could not be made, it closes m and returns the error.
func checked[M nn.Module](kind string, m M, err error) (M, error) {
	if err = errors.Join(nn.Err(m), err); err == nil {
		return m, nil
	}
	nn.Close(m)
	var none M
	return none, fmt.Errorf("models: %s: %w", kind, err)
}

// invalid returns an error for an option.
func invalid(kind, format string, args ...any) error {
	return fmt.Errorf("models: %s: %s: %w", kind, fmt.Sprintf(format, args...), cuda.ErrInvalidArgument)
}

// classes returns the number of classes: NumClasses, or ImageNet's for 0.
func classes(numClasses int) int {
	if numClasses == 0 {
		return 1000
	}
	return numClasses
}

// probability returns p. For 0 it returns the default, and for a negative p it returns 0.
func probability(p, def float64) float64 {
	if p == 0 {
		return def
	}
	return max(p, 0)
}

// reluInPlace returns a ReLU that overwrites its input, which must be the result of another layer.
func reluInPlace() nn.Module { return nn.Func((*torch.Tensor).ReLU_) }

// convNorm returns torchvision's Conv2dNormActivation: a convolution, batch normalisation, and the
// activation if it is not nil. The convolution pads its input so that only the stride changes the
// size.
func convNorm(in, out, kernel int, conv nn.Conv2dOptions, norm nn.BatchNorm2dOptions,
	activation func() nn.Module) *nn.Sequential {
	conv.Padding, conv.NoBias = (kernel-1)/2, true
	layers := []nn.Module{nn.NewConv2d(in, out, kernel, conv), nn.NewBatchNorm2d(out, norm)}
	if activation != nil {
		layers = append(layers, activation())
	}
	return nn.NewSequential(layers...)
}

// squeezeExcitation scales each channel of an image by a number in [0, 1] that it computes from the
// means of all channels (https://arxiv.org/abs/1709.01507).
type squeezeExcitation struct {
	pool, activation, scale nn.Module
	fc1, fc2                *nn.Conv2d
}

func newSqueezeExcitation(channels, squeezed int, activation, scale func() nn.Module) *squeezeExcitation {
	return &squeezeExcitation{
		pool:       nn.NewAdaptiveAvgPool2d(1),
		fc1:        nn.NewConv2d(channels, squeezed, 1, nn.Conv2dOptions{}),
		fc2:        nn.NewConv2d(squeezed, channels, 1, nn.Conv2dOptions{}),
		activation: activation(),
		scale:      scale(),
	}
}

// Forward returns the scaled image.
func (s *squeezeExcitation) Forward(x *torch.Tensor) *torch.Tensor {
	y := s.activation.Forward(s.fc1.Forward(s.pool.Forward(x)))
	return s.scale.Forward(s.fc2.Forward(y)).Mul(x)
}

// Parts returns the two convolutions.
func (s *squeezeExcitation) Parts() nn.Parts {
	return nn.Parts{Modules: []nn.Child{{Name: "fc1", Module: s.fc1}, {Name: "fc2", Module: s.fc2}}}
}

// invertedResidual is a block of MobileNetV3 and EfficientNet. It adds its input to the output if
// they have the same shape.
type invertedResidual struct {
	block *nn.Sequential
	depth *nn.Dropout // nil for none
	adds  bool
}

// Forward computes the block's output.
func (b *invertedResidual) Forward(x *torch.Tensor) *torch.Tensor { return torch.Tidy(b.forward, x) }

func (b *invertedResidual) forward(in ...*torch.Tensor) *torch.Tensor {
	x := in[0]
	y := b.block.Forward(x)
	if !b.adds {
		return y
	}
	if b.depth != nil {
		y = b.depth.Forward(y)
	}
	return y.Add_(x)
}

// Parts returns the layers, and the stochastic depth, which has no parameters but has a training
// mode.
func (b *invertedResidual) Parts() nn.Parts {
	p := nn.Parts{Modules: []nn.Child{{Name: "block", Module: b.block}}}
	if b.depth != nil {
		p.Modules = append(p.Modules, nn.Child{Name: "stochastic_depth", Module: b.depth})
	}
	return p
}

// featuresAndClassifier returns the parts of torchvision's convolutional networks.
func featuresAndClassifier(features, classifier nn.Module) nn.Parts {
	return nn.Parts{Modules: []nn.Child{{Name: "features", Module: features}, {Name: "classifier", Module: classifier}}}
}
