// Package index records the position and the label of each sample of an archive, and reads samples
// in any order.
//
// A sample is a member of the archive that is in the directory of a class, or has a WebDataset
// label. Only a walk to the end of the archive shows which members are samples:
//
//   - A [Builder] walks an archive and collects a record of every member that may be a sample.
//     [Builder.Walk] is the only walk through an archive. The first epoch, the scan by [Build] and
//     the inspection of an archive are its visitors.
//   - An [Index] has only the records of the samples. [Build] makes an Index from a complete walk.
//     [Load] makes one from the file that an earlier walk has written.
//   - The file is called a sidecar. docs/index-format.md describes it byte by byte. It is
//     untrusted: checksums detect damage, and every number in it is checked against the archive
//     before it is used. A file that is damaged, stale or of another version is written again.
//   - A [Reader] reads the contents of samples in any order. In compressed shards it uses
//     checkpoints.
//
// For each member the sidecar also keeps data that the decoder can reuse in the next run: the entry
// points of a JPEG. This package treats them as an opaque blob.
//
// The package reads the archive through package archive. It recognises images by their first bytes
// and, through a [Codec], reads their headers. It knows nothing about loaders, epochs or batches.
package index
