// Package models provides published networks: each with the definition, the names of parameters and
// the initialisation of its reference, so that the reference's checkpoints load without renaming,
// and the same seed gives the same numbers.
//
//	name in ByName        constructor           parameters   reference
//	resnet18              NewResNet18           11,689,512   torchvision
//	resnet34              NewResNet34           21,797,672   torchvision
//	resnet50              NewResNet50           25,557,032   torchvision
//	resnet101             NewResNet101          44,549,160   torchvision
//	resnet152             NewResNet152          60,192,808   torchvision
//	resnext50_32x4d       NewResNet50           25,028,904   torchvision
//	resnext101_32x8d      NewResNet101          88,791,336   torchvision
//	resnext101_64x4d      NewResNet101          83,455,272   torchvision
//	wide_resnet50_2       NewResNet50           68,883,240   torchvision
//	wide_resnet101_2      NewResNet101         126,886,696   torchvision
//	mobilenet_v3_small    NewMobileNetV3Small    2,542,856   torchvision
//	mobilenet_v3_large    NewMobileNetV3Large    5,483,032   torchvision
//	efficientnet_b0       NewEfficientNetB0      5,288,548   torchvision
//	convnext_tiny         NewConvNeXtT          28,589,128   torchvision
//
// The zero value of the options is the published model. A constructor returns an error for options
// that make no sense, or if there is no memory.
//
// The tests hold the logits, the loss and the gradients of each model against torchvision 0.26 and
// LibTorch 2.11, with parameters filled by a formula. In float32 on a CPU with one thread the
// logits are equal to the last bit on the processor that computed the reference. On others they
// are within 1e-5 of the largest logit.
//
// Pretrained weights are not part of the package. A checkpoint that PyTorch saved as safetensors
// loads with [nn.Load], and with [nn.LoadWith] and Partial if the head has another number of
// classes: the package's example fine-tunes a network in this way. A field of each model is its
// head, and may be replaced by another module before training.
//
// Images are float32 [N 3 H W], normalised with ImageNet's mean and standard deviation as the
// reference's weights expect. Any dtype and memory format (torch.ChannelsLast) that the layers
// take works too.
package models
