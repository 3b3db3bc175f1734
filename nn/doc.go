// Package nn provides the layers that networks are built from, and loads files into them.
//
// A [Module] computes an output and lists its parts. A network can be written as one expression: if
// a constructor fails, for example because of an invalid size or a lack of memory, the module's
// parameters hold the error, and [Err], Forward and an optimizer report it:
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
// # Errors
//
// A layer's error names its path in the model and the line that constructed it. [LayerError] has
// both:
//
//	layer2.0.conv1: Conv2d made at resnet.go:41: torch: Conv2d(float32[8 3 4 4] cpu, ...
//
// # Models
//
// [Summary] prints a model as a table. [Freeze] excludes a part from training. [Load] takes a
// checkpoint of exactly this model; with Partial, [LoadWith] loads all matching tensors, and
// reports the rest:
//
//	report, err := nn.LoadWith("pretrained.safetensors", net, nn.LoadOptions{Partial: true})
//	if err != nil {
//		return err
//	}
//	fmt.Println(report) // the loaded share, and the tensors that are missing or do not fit
//	if err := nn.Freeze(net.trunk); err != nil {
//		return err
//	}
//	opt, err := optim.NewSGD(nn.Parameters(net), optim.SGDOptions{LR: 0.01})
//
// Losses are methods of a tensor: output.CrossEntropy(labels), output.BCEWithLogitsLoss(targets)
// and the like in package torch. [KVCache] keeps the keys and values of a [MultiheadAttention]
// while a model generates.
//
// # PyTorch
//
// Constructors create parameters on the CPU as float32, with PyTorch's default initialisation: the
// same seed gives the same numbers as PyTorch. Parameters belong to no scope, so they outlive the
// batches that pass through. Tensors have PyTorch's state_dict names. Checkpoints are safetensors
// files or, for paths that end in .pt or .pth, files of torch.save. Weights can therefore be
// exchanged with PyTorch in both directions. [Load] and [checkpoint.Open] recognize a file by its
// content. Reading a PyTorch file executes no code from it.
//
// Tests compare every module and every loss of package torch with PyTorch: results, gradients and
// 20 training steps. They agree within 1e-10 in float64, 1e-5 in float32 and the rounding of
// bfloat16.
//
// # Concurrency
//
// In evaluation mode several goroutines may call Forward at once. In training mode only one
// goroutine at a time may use a module with running statistics.
package nn
