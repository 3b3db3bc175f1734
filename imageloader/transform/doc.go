// Package transform describes how an image of a file becomes part of a batch: the crop, the resize,
// random operations on the pixels, the mixing of a batch, and the normalisation on the device. It
// knows nothing of archives. Package imageloader applies a [Transform], and exports this package's
// Transform, Train and Eval under the same names.
//
// An image passes through four stages.
//
//  1. Geometry. The crop and the flip are drawn from the image's header alone, so that pixels
//     outside of the crop are not decoded where the format allows. The result has Size x Size
//     pixels of three bytes.
//  2. Operations. Transform.Ops run on these bytes, in order, each an [Op] of this package or a
//     [Func] of the caller.
//  3. Mixing. When a batch is complete, one of Transform.Mix blends its samples: [MixUp] or
//     [CutMix].
//  4. Finish. The device converts the bytes to normalised numbers (Mean, Std, DType). Until then a
//     batch is bytes.
//
// Names, parameters, distributions and results are those of torchvision.transforms.v2 on uint8
// tensors. All random numbers are drawn from a generator that belongs to the sample alone, so an
// epoch has the same bytes with any number of workers.
//
// # Adding an operation
//
// An operation is a type with the two methods of [Op], in the file of its family. An operation of
// cshim/src/image/augment.cc computes its pixels in C++. CONTRIBUTING.md lists the places of such a
// change, in Go and in C++.
package transform
