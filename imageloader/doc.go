// Package imageloader turns an archive of labelled images (.tar or .tar.gz of JPEG, PNG, WebP, GIF,
// BMP and TIFF files) into batches: decoded, cropped, resized and flipped on all cores, straight
// into memory that the consumer lends, in an order that depends on the seed and the epoch alone.
//
// # Labels and members
//
// A sample is a member of the archive that lies in the directory of a class; its label is the
// number of that directory's name among the classes. A directory is a class if it directly holds a
// member that claims to be an image, by its first bytes or its extension; classes are sorted, as
// torchvision's ImageFolder does. With Options.Classes given these, in their order, are the
// classes, and an image in any other directory is an *UnknownClassError.
//
// Members in the directory of a class that are no images (README, .DS_Store, links, empty files)
// are bad samples: see [BadSamplePolicy]. Other members (at the root of the archive, in directories
// without images) are ignored; Stats counts them. Nothing is ever extracted, so what a name looks
// like does no harm.
//
// # Order
//
// A plain .tar and a directory have random access, and so has a compressed archive that is held in
// memory or has an index with checkpoints, if Open knows it: a shuffled epoch is a permutation of
// all samples. Anything else is a stream: it is shuffled through a buffer of Options.ShuffleBuffer
// samples, so an archive larger than the buffer should be packed in mixed order, not class by
// class. While the buffer of a large archive fills, at the start of an epoch, one sample leaves it
// for two that come, so that the first batch is there at once. The sample's index is its position
// among the samples of the archive. All that is random about it is drawn from (Options.Seed, epoch,
// index): the batches of an epoch are the same bytes with any number of workers and any number of
// slots.
//
// Which samples an epoch has is up to Options.Repeat, Weights and Balanced; which of them this
// process gets, to Rank and World. docs/imageloader.md has the whole.
package imageloader
