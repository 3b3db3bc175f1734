package models

import (
	"fmt"
	"strings"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/nn"
)

// Options are the options that ByName takes for every model.
type Options struct {
	NumClasses int // 0 stands for the published number; a GPT-2 has no classes and takes only 0
	// ImageSize is the size of the square images in pixels, if not 0. Only a ViT depends on it: the
	// other networks take images of any size.
	ImageSize int
}

// entry is a model that ByName makes.
type entry struct {
	name string
	make func(o Options) (nn.Module, error)
}

// entries lists the models in the order of Names.
func entries() []entry {
	return []entry{
		{"resnet18", resNet(NewResNet18, 0, 0)},
		{"resnet34", resNet(NewResNet34, 0, 0)},
		{"resnet50", resNet(NewResNet50, 0, 0)},
		{"resnet101", resNet(NewResNet101, 0, 0)},
		{"resnet152", resNet(NewResNet152, 0, 0)},
		{"resnext50_32x4d", resNet(NewResNet50, 32, 4)},
		{"resnext101_32x8d", resNet(NewResNet101, 32, 8)},
		{"resnext101_64x4d", resNet(NewResNet101, 64, 4)},
		{"wide_resnet50_2", resNet(NewResNet50, 1, 128)},
		{"wide_resnet101_2", resNet(NewResNet101, 1, 128)},
		{"mobilenet_v3_small", func(o Options) (nn.Module, error) {
			return module(NewMobileNetV3Small(MobileNetV3Options{NumClasses: o.NumClasses}))
		}},
		{"mobilenet_v3_large", func(o Options) (nn.Module, error) {
			return module(NewMobileNetV3Large(MobileNetV3Options{NumClasses: o.NumClasses}))
		}},
		{"efficientnet_b0", func(o Options) (nn.Module, error) {
			return module(NewEfficientNetB0(EfficientNetOptions{NumClasses: o.NumClasses}))
		}},
		{"convnext_tiny", func(o Options) (nn.Module, error) {
			return module(NewConvNeXtT(ConvNeXtOptions{NumClasses: o.NumClasses}))
		}},
		{"vit_b_16", func(o Options) (nn.Module, error) {
			return module(NewViTB16(ViTOptions{NumClasses: o.NumClasses, ImageSize: o.ImageSize}))
		}},
		{"gpt2", gpt2(GPT2Options{})},
		{"gpt2-medium", gpt2(GPT2Options{Layers: 24, Heads: 16, Width: 1024})},
		{"gpt2-large", gpt2(GPT2Options{Layers: 36, Heads: 20, Width: 1280})},
		{"gpt2-xl", gpt2(GPT2Options{Layers: 48, Heads: 25, Width: 1600})},
	}
}

func resNet(make func(ResNetOptions) (*ResNet, error), groups, width int) func(Options) (nn.Module, error) {
	return func(o Options) (nn.Module, error) {
		return module(make(ResNetOptions{NumClasses: o.NumClasses, Groups: groups, WidthPerGroup: width}))
	}
}

func gpt2(size GPT2Options) func(Options) (nn.Module, error) {
	return func(o Options) (nn.Module, error) {
		if o.NumClasses != 0 || o.ImageSize != 0 {
			return nil, invalid("GPT-2", "options %+v: a language model has neither classes nor images", o)
		}
		return module(NewGPT2(size))
	}
}

// module turns a nil pointer into a nil interface.
func module[M nn.Module](m M, err error) (nn.Module, error) {
	if err != nil {
		return nil, err
	}
	return m, nil
}

// Names returns the names that [ByName] takes, smaller models of a family first.
func Names() []string {
	var names []string
	for _, e := range entries() {
		names = append(names, e.name)
	}
	return names
}

// ByName makes the model with the given name in torchvision or, for GPT-2, in Hugging Face. The
// error for an unknown name lists all names.
func ByName(name string, o Options) (nn.Module, error) {
	for _, e := range entries() {
		if e.name == name {
			return e.make(o)
		}
	}
	return nil, fmt.Errorf("models: there is no model %q; there are %s: %w", name,
		strings.Join(Names(), ", "), cuda.ErrInvalidArgument)
}
