// Package nn has the parts that networks are made of, and checkpoints.
//
// A [Module] computes an output and lists its parts. Networks are written down as one expression; a
// module that cannot be made (a size that makes no sense, no memory) keeps the error in its
// parameters, which [Err], Forward and an optimizer report:
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
// A module of your own is a struct with two methods:
//
//	type block struct {
//		conv *nn.Conv2d
//		norm *nn.BatchNorm2d
//	}
//
//	func (b *block) Forward(x *torch.Tensor) *torch.Tensor { return x.Add(b.norm.Forward(b.conv.Forward(x)).ReLU()) }
//	func (b *block) Parts() nn.Parts {
//		return nn.Parts{Modules: []nn.Child{{Name: "conv", Module: b.conv}, {Name: "norm", Module: b.norm}}}
//	}
//
// Parameters are made on the CPU as float32, with PyTorch's default initialisation: the same seed
// gives PyTorch's numbers. They belong to no scope, so they outlive the batches that pass through.
// Names are those of PyTorch's state_dict, and checkpoints are safetensors files, so weights go
// both ways between PyTorch and this package.
//
// Forward may be called from several goroutines at once in evaluation; in training a module with
// running statistics serves one at a time.
package nn
