package imageloader

import "github.com/torchstream/torchstream/imageloader/transform"

// Transform describes the way of an image from its file to a batch. Package transform documents it
// and has the operations for its fields Ops and Mix.
type Transform = transform.Transform

// Train returns the usual transform for training: RandomResizedCrop(size) and a horizontal flip
// with probability 1/2, normalised with ImageNet's mean and standard deviation.
func Train(size int) Transform { return transform.Train(size) }

// Eval returns the usual transform for evaluation: Resize(resize) and CenterCrop(size), normalised
// with ImageNet's mean and standard deviation.
func Eval(resize, size int) Transform { return transform.Eval(resize, size) }
