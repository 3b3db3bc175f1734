// Package imageloader turns an archive of labelled images into batches. An archive is a .tar, a
// .tar.gz, a .tar.zst or a directory of JPEG, PNG, WebP, GIF, BMP and TIFF files, and of AVIF and
// HEIC files if libheif is installed. The package decodes, crops, resizes and flips on all cores,
// straight into memory that the consumer lends. The order depends only on the seed and the epoch.
//
// A [Loader] is an open archive. [Loader.Epoch] yields the batches of an epoch as a loop. A
// prefetcher calls [Loader.Fill] instead. [Loader.Restore] continues an epoch from a [State].
// [Inspect] and [MakeIndex] read an archive without loading it. [Loader.Stats] returns the counts
// and times of a loader.
//
// An archive may be elsewhere. Options.OpenSource opens a path with a scheme (s3://bucket/a.tgz) as
// a [Source]. Without it, the loader opens http and https itself. Package imageloader/blob opens
// the objects of object stores.
//
// # Labels and members
//
// A sample is a member of the archive in the directory of a class. Its label is the number of that
// directory's name among the classes. A directory is a class if it directly holds a member that
// claims to be an image, by its first bytes or its extension. Classes are sorted, as in
// torchvision's ImageFolder. Options.Classes, if given, are the classes in their order, and an
// image in any other directory is an *UnknownClassError.
//
// A member that claims to be an image and cannot be decoded (a damaged or empty file, a link in a
// tar) is a bad sample: see [BadSamplePolicy]. Other members (a README, images at the root of the
// archive) are ignored, and Stats counts them. The loader extracts no file, so no member's path can
// do harm.
//
// # Order
//
// A plain .tar, a .zip and a directory have random access. So has a compressed archive that is held
// in memory, or that has an index with checkpoints when it is opened. A shuffled epoch is then a
// permutation of all samples. Any other archive is a stream, and is shuffled through a buffer of
// Options.ShuffleBuffer samples: pack an archive larger than the buffer in mixed order, not class
// by class. At the start of an epoch, while the buffer fills, one sample leaves it for every two
// that enter, so that the first batch is ready at once.
//
// A sample's index is its position among the samples of the archive. Every random choice for it is
// drawn from (Options.Seed, epoch, index). The batches of an epoch are the same bytes with any
// number of workers and any number of slots.
//
// Options.Repeat, Weights and Balanced select the samples of an epoch. Rank and World select this
// process's share. docs/imageloader.md describes all of it.
package imageloader
