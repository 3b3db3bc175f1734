package models

import (
	"fmt"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/nn"
)

// Features returns a network that computes the input of a classifier's last layer, one vector per
// image: [N 3 H W] to [N features]. The network shares all modules with the classifier, so closing
// either of the two closes both, and training either trains both.
//
// The width is 512 or 2048 for a ResNet, 768 for ConvNeXt and ViT, 1280 for an EfficientNet, and
// 1024 or 1280 for a MobileNetV3. If the program has replaced the head by a module other than an
// [nn.Sequential], Features returns the input of that module. A GPT-2 has no classes and is an
// error.
func Features(net nn.Module) (nn.Module, error) {
	switch m := net.(type) {
	case *ResNet:
		body := *m
		body.FC = withoutLast(m.FC)
		return &body, nil
	case *ViT:
		body := *m
		body.Head = withoutLast(m.Head)
		return &body, nil
	case *ConvNeXt:
		body := *m
		body.Classifier = withoutLast(m.Classifier)
		return &body, nil
	case *EfficientNet:
		body := *m
		body.Classifier = withoutLast(m.Classifier)
		return &body, nil
	case *MobileNetV3:
		body := *m
		body.Classifier = withoutLast(m.Classifier)
		return &body, nil
	}
	return nil, fmt.Errorf("models: Features: %T is no classifier of this package: %w", net, cuda.ErrInvalidArgument)
}

// withoutLast returns a head without its last layer.
func withoutLast(head nn.Module) nn.Module {
	layers, ok := head.(*nn.Sequential)
	if !ok {
		return nn.NewIdentity()
	}
	var kept []nn.Module
	for _, child := range layers.Parts().Modules {
		kept = append(kept, child.Module)
	}
	return nn.NewSequential(kept[:max(0, len(kept)-1)]...)
}
