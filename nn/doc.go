// Package nn provides the layers that networks are built from, and checkpoints.
//
// A [Module] computes an output and lists its parts. A network can be written as one expression: a
// constructor that fails (a size that makes no sense, no memory) keeps its error in the module's
// parameters, and [Err], Forward and an optimizer report it:
//
//	net := nn.NewSequential(
//		nn.NewConv2d(3, 32, 3, nn.Conv2dOptions{Padding: 1, NoBias: true}),
//		nn.NewBatchNorm2d(32, nn.BatchNorm2dOptions{}),
//		nn.NewReLU(),
//		nn.NewAdaptiveAvgPool2d(1),
//		nn.NewFlatten(),
//		nn.NewLinear(32, classes, nn.LinearOptions{}),
//	)
//	if err := nn.To(net, device); err != nil {
//		return err
//	}
//
// A custom module is a struct with two methods:
//
//	type block struct {
//		conv *nn.Conv2d
//		norm *nn.BatchNorm2d
//	}
//
//	func (b *block) Forward(x *torch.Tensor) *torch.Tensor {
//		return x.Add(b.norm.Forward(b.conv.Forward(x)).ReLU())
//	}
//
//	func (b *block) Parts() nn.Parts {
//		return nn.Parts{Modules: []nn.Child{
//			{Name: "conv", Module: b.conv},
//			{Name: "norm", Module: b.norm},
//		}}
//	}
//
// Constructors create parameters on the CPU as float32, with PyTorch's default initialisation: the
// same seed gives the same numbers as PyTorch. Parameters belong to no scope, so they outlive the
// batches that pass through. Names are those of PyTorch's state_dict, and checkpoints are
// safetensors files, so weights can be exchanged with PyTorch in both directions.
//
// In evaluation mode several goroutines may call Forward at once. In training mode a module with
// running statistics serves one goroutine at a time.
package nn
