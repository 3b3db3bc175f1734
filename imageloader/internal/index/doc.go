// Package index knows the places and the labels of an archive's samples, and reads the samples in
// any order.
//
// A sample is a member of the archive in the directory of a class, or with a WebDataset label. Only
// after the archive was read to its end is it known which members are samples:
//
//   - A [Builder] walks an archive and collects a record of every member that may be a sample.
//     [Builder.Walk] is the only walk over an archive: the first epoch, the scan of [Build] and the
//     inspection of an archive are its visitors.
//   - An [Index] has the records of the samples alone. [Build] makes one from a whole walk, [Load]
//     from the file that an earlier walk has written.
//   - The file, called a sidecar, is described byte by byte in docs/index-format.md. It is
//     untrusted: checksums tell damage, and every number in it is checked against the archive
//     before it is used. A file that is damaged, stale or of another version is made again.
//   - A [Reader] reads the contents of samples in any order, by means of the checkpoints of
//     compressed shards.
//
// The sidecar also keeps, for each member, data of the decoder for the next run: the entry points
// of a JPEG, which are an opaque blob here.
//
// The package reads the archive through package archive. Of images it knows their first bytes and,
// by a [Codec], their headers. It knows nothing of loaders, epochs or batches.
package index
