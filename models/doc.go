// Package models provides published networks. Each network has the definition, the parameter names
// and the initialisation of its reference. The reference's checkpoints therefore load without
// renaming, and the same seed gives the same numbers.
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
//	vit_b_16              NewViTB16             86,567,656   torchvision
//	gpt2                  NewGPT2              124,439,808   Hugging Face
//	gpt2-medium           NewGPT2              354,823,168   Hugging Face
//	gpt2-large            NewGPT2              774,030,080   Hugging Face
//	gpt2-xl               NewGPT2            1,557,611,200   Hugging Face
//
// The zero value of the options is the published model. A constructor returns an error for invalid
// options, and if memory runs out.
//
// The tests compare the logits, the loss and the gradients of each model with torchvision 0.26,
// Hugging Face's transformers 4.57 and PyTorch 2.11, with parameters filled by a formula. Of the
// GPT-2s, they compare only the smallest. In float32 on a CPU with one thread, the logits are
// bit-identical on the processor that computed the reference. On other processors they differ by at
// most 1e-5 of the largest logit. In two cases they differ by up to 1e-5 on the reference's
// processor too: a ViT with several images, because PyTorch's attention multiplies their rows in
// another order, and GPT-2 with Hugging Face's default activation, which is GELU with tanh written
// as elementary operators.
//
// Pretrained weights are not part of the package. A checkpoint of the reference (safetensors, .pt
// or .pth) loads with [nn.Load]. If the head has another number of classes, it loads with
// [nn.LoadWith] and Partial: the package's example fine-tunes a network in this way. The head of a
// classifier is a field, and may be replaced by another module before training. The published files
// of GPT-2 lack the prefix "transformer." and load into [GPT2.Transformer]. Some files of
// torchvision's ViTs have the names of its older versions, mlp.linear_1 and mlp.linear_2. In
// Python, load such a file into torchvision's model and save the model's state_dict.
//
// [Open] makes the network of a checkpoint that torchstream train has written. It also opens
// checkpoints of other programs that save [Metadata].
//
// Images are float32 [N 3 H W], normalised with ImageNet's mean and standard deviation as the
// reference's weights expect. The memory format torch.ChannelsLast works too, and so do other
// dtypes after [nn.ToDType]. ReLU and the sums of residual blocks overwrite results that backward
// does not need, as in the reference.
package models
