// Package imageloader turns an archive of labelled images into batches. An archive is a .tar,
// .tar.gz, .tar.zst, .zip or Parquet file, or a directory. Its images are JPEG, PNG, WebP, GIF, BMP
// and TIFF files. If libheif is installed, they may also be AVIF and HEIC files. The package
// decodes, crops, resizes and flips on all cores, straight into memory that the consumer lends. The
// order depends only on the seed and the epoch.
//
// A [Loader] is an open archive. [Loader.Epoch] yields the batches of an epoch as a loop. A
// prefetcher calls [Loader.Fill] instead: package imagefeed opens both. [Loader.Restore] continues
// an epoch from a [State]. [Inspect] and [MakeIndex] read an archive without loading it.
// [Loader.Stats] returns the counts and times of a loader.
//
// An archive need not be a local file. Options.OpenSource opens a path with a scheme
// (s3://bucket/a.tgz) as a [Source]. Without it, the loader opens http and https itself. Package
// imageloader/blob opens the objects of object stores.
//
// # Labels and members
//
// A member is a file in an archive. By default, the directories of an archive are its classes. A
// directory is a class if it directly holds a member that claims to be an image, by its first bytes
// or its extension. The classes are sorted by name, as in torchvision's ImageFolder. A sample is a
// member in the directory of a class, and its label is the position of the class in the list.
// Options.Classes, if given, replaces the list: an image in any other directory is then an
// *UnknownClassError.
//
// A member that claims to be an image and cannot be decoded (a damaged or empty file, a link in a
// tar) is a bad sample: see [BadSamplePolicy]. Other members (a README, images at the root of the
// archive) are ignored, and Stats counts them. The loader extracts no file, so no member's path can
// do harm.
//
// # Order
//
// A plain .tar, a .zip and a directory have random access. A compressed archive has random access
// if it is held in memory, or if its index had checkpoints (positions at which decompression can
// start) when it was opened. With random access, a shuffled epoch is a permutation of all samples.
// Any other archive is a stream, and is shuffled through a buffer of Options.ShuffleBuffer samples.
// If such an archive is larger than the buffer, pack it in mixed order, not class by class. At the
// start of an epoch the first batch does not wait until the buffer is full: while the buffer fills,
// one sample leaves it for every two that enter.
//
// A sample's index is its position among the samples of the archive. Every random choice for a
// sample is drawn from (Options.Seed, epoch, index). The number of workers and the number of
// batches in memory therefore do not change a byte of any batch.
//
// Options.Repeat, Weights and Balanced select the samples of an epoch. Rank and World select this
// process's share. docs/imageloader.md describes these options.
package imageloader
