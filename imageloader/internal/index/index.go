package index

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"os"
	"sync"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// Index records the positions of an archive's samples. For each sample it takes 32 bytes and the
// name, and 8 bytes more once entry points are used. All samples together take two allocations. It
// is safe for concurrent use.
type Index struct {
	indexedArchive
	recordTable
	nonSamples
	readCost

	classLabels
	left     []LeftOut
	listed   fromList
	unpaired string // why there are no pairs; "" if there are some

	// memory has the contents of samples that are kept in memory.
	memory contents

	entryPoints
	windows windows
	closing sync.Once
}

// classLabels are the classes of an index, and its lists of labels.
type classLabels struct {
	classes []string // sorted, unless given
	// With Config.MultiLabel, lists[k] has the labels of list k, and the label of a record is the
	// number of its list.
	lists [][]int32
}

// indexedArchive describes the archive at the time of the walk.
type indexedArchive struct {
	info   fs.FileInfo // describes all shards together
	shards []shard
}

// recordTable holds the records of samples.
type recordTable struct {
	samples []record // with Config.Pairs: images and partners, in the archive's order
	names   string
	// places holds the record number of each sample, followed by the record number of each sample's
	// partner. Without Config.Pairs it is nil: sample i is record i.
	places []int32
	// numbers holds, for each sample, its number among the sidecar's members. It is nil if the
	// numbers are the same.
	numbers []int32
	// oversize holds the headers of samples over Config.MaxPixels, from the sidecar. These samples
	// need not be read.
	oversize map[int32]header
}

// entryPoints holds the blobs of entry points. Without an index file they last as long as the
// Index.
type entryPoints struct {
	side  *sidecar // nil: no index file
	blobs unsavedBlobs
	spool func() (*os.File, error) // creates the file of blobs; nil: memory only
}

// windows holds the windows of marks, in the sidecar or in a spool.
type windows struct {
	io.ReaderAt
	spool spool
}

// take moves the windows of a builder's spool.
func (w *windows) take(s *spool) {
	w.spool, *s = *s, spool{}
	w.ReaderAt = &w.spool
}

// readCost is the cost of reading samples in any order.
type readCost struct {
	// work is the average number of bytes to inflate for each byte of a sample, with the existing
	// checkpoints. It is 0 if the archive can only be read in its own order.
	work float64
	// reach is the average number of bytes to inflate for a sample.
	reach float64
}

// Sample describes a sample of an index.
type Sample struct {
	Name  string // of the member
	Label int
	Size  int64 // of the content; 0 if the member is not a regular file
	Kind  archive.Kind
}

// Len returns the number of samples, including bad ones.
func (t *recordTable) Len() int {
	if t.places != nil {
		return len(t.places) / 2
	}
	return len(t.samples)
}

// Paired reports whether each sample has a partner: see [Pairs].
func (t *recordTable) Paired() bool { return t.places != nil }

// Partner returns the number of the partner of sample i, with Config.Pairs. Methods that accept the
// number of a sample also accept the number of a partner.
func (t *recordTable) Partner(i int) int { return len(t.places)/2 + i }

// at returns the number of the record of sample or partner i.
func (t *recordTable) at(i int) int {
	if t.places == nil {
		return i
	}
	return int(t.places[i])
}

// Classes returns the class names by label. The caller must not change them.
func (x *Index) Classes() []string { return x.classes }

// Ignored returns the number of members that are not samples.
func (x *Index) Ignored() int { return x.ignored }

// Orphans returns the number of ignored members that are images without a class.
func (x *Index) Orphans() int { return x.orphans }

// LeftOut returns the folders and links that are not classes, but may have been meant as classes.
func (x *Index) LeftOut() []LeftOut { return x.left }

// List compares the list with the archive. It is nil without a list.
func (x *Index) List() *ListReport { return x.listed.report }

// OrphansNamed returns the first [MaxOrphans] images that have no WebDataset label. The caller must
// not change them.
func (x *Index) OrphansNamed() []Orphan { return x.orphansNamed }

// Sample returns sample i, in the archive's order.
func (x *Index) Sample(i int) Sample {
	r := &x.samples[x.at(i)]
	return Sample{x.Name(i), x.Label(i), r.size, r.kind}
}

// Label returns the label of sample i, or 0 with Config.MultiLabel.
func (x *Index) Label(i int) int {
	if x.lists != nil {
		return 0
	}
	return int(x.samples[x.at(i)].label)
}

// Labels returns the labels of sample i, with Config.MultiLabel. The caller must not change them.
func (x *Index) Labels(i int) []int32 { return x.lists[x.samples[x.at(i)].label] }

// ListNumber returns the number of sample i's list of labels, with Config.MultiLabel.
func (x *Index) ListNumber(i int) int { return int(x.samples[x.at(i)].label) }

// Lists returns the lists of labels by number, with Config.MultiLabel, and nil otherwise. The
// caller must not change them.
func (x *Index) Lists() [][]int32 { return x.lists }

// Size returns the size of sample i's content in bytes.
func (x *Index) Size(i int) int64 { return x.samples[x.at(i)].size }

// Name returns the name of sample i's member.
func (x *Index) Name(i int) string { return x.recordName(x.at(i)) }

// Place returns the shard of sample i, and the offset of its content as in [archive.Member].
func (x *Index) Place(i int) (shard int, offset int64) {
	r := &x.samples[x.at(i)]
	return int(r.shard), r.offset
}

// recordName returns the name of a record's member.
func (t *recordTable) recordName(i int) string {
	end := uint32(len(t.names))
	if i+1 < len(t.samples) {
		end = t.samples[i+1].name
	}
	return t.names[t.samples[i].name:end]
}

// Oversize returns the header of sample i from the index file, if the image has more than
// Config.MaxPixels pixels.
func (x *Index) Oversize(i int) (info imagecapi.Info, found bool) {
	h, found := x.oversize[int32(x.at(i))]
	if found {
		info, _, _ = h.info()
	}
	return info, found
}

// Changed returns an error if an open archive differs from the archive that was indexed. The error
// names the difference.
func (x *Index) Changed(a *archive.Archive) error { return a.Changed(x.info) }

// HasFile reports whether there is an index file.
func (x *Index) HasFile() bool { return x.side != nil }

// Work returns the average number of bytes to read or inflate for each byte of a sample, if samples
// are read in any order. It returns 0 if the archive can only be read in its own order.
func (x *Index) Work() float64 { return x.work }

// maxWork is the maximum work for random access. With more work, reading the archive in its own
// order is faster.
const maxWork = 6

// Random reports whether Readers can read the samples in any order. The answer never changes during
// the life of an Index.
func (x *Index) Random() bool { return x.memory.holds() || randomBy(x.work) }

// randomBy reports whether random access is worthwhile with this work.
func randomBy(work float64) bool { return work > 0 && work <= maxWork }

// ErrStale means that an archive is damaged, or is not the archive that was indexed.
var ErrStale = errors.New("the bytes differ from the checksum in the index: " +
	"the archive is damaged, or has changed since it was indexed " +
	"(`torchstream index` makes a new one, with -webdataset, -masks, -boxes or -list for loaders with that option)")

// ReadForward fills p with the content of sample i. The length of p must be the sample's size.
// ReadForward advances the archive's position, so i must increase from call to call: see
// [archive.Archive.ReadForward]. The sample must be a regular file, and Config.Pairs must be nil.
func (x *Index) ReadForward(a *archive.Archive, i int, p []byte) error {
	return x.readForward(a, x.at(i), p)
}

// readForward implements ReadForward for a record.
func (x *Index) readForward(a *archive.Archive, i int, p []byte) error {
	r := &x.samples[i]
	m := archive.Member{Name: x.recordName(i), Shard: int(r.shard), Offset: r.offset}
	if s := &x.shards[r.shard]; s.format == archive.Parquet {
		m.Page, m.Offset = s.place(r)
	}
	heads, err := a.ReadForward(i+1, &m, p)
	if err != nil {
		return err
	}
	format := x.shards[r.shard].format
	headed := format == archive.Tree || format == archive.Zip || format == archive.Parquet ||
		len(heads) >= archive.BlockBytes && archive.Heads(heads[len(heads)%archive.BlockBytes:], m.Name, r.size)
	if !headed || !r.matches(p) || !x.sameContent(i, p) {
		return a.Fail(ErrStale)
	}
	return nil
}

// Headers yields the header of each sample from the index file, in order. If an error ends the
// iteration early, the last pair holds the error. There must be an index file, and Config.Pairs
// must be nil.
func (x *Index) Headers() iter.Seq2[Header, error] {
	return func(yield func(Header, error) bool) {
		s, err := x.side.section(sectionHeaders, headerBytes)
		items := s.reader(headerBytes)
		at := -1
		for i := range x.samples {
			var h header
			for ; at < int(x.number(i)) && err == nil; at++ {
				var b []byte
				if b, err = items.next(); b == nil {
					err = cmp.Or(err, error(errIndexDamaged))
					break
				}
				h = header(b)
			}
			if err != nil {
				yield(Header{}, fmt.Errorf("imageloader: %s: %w", x.side.path, err))
				return
			}
			if !yield(x.samples[i].header(h), nil) {
				return
			}
		}
	}
}

// EntryPoints returns the blob that was passed to KeepEntryPoints for sample i, in this run or,
// with an index file, an earlier run. It stores the blob in buffer if it fits, and otherwise in new
// memory. The result is empty if there is no blob.
func (x *Index) EntryPoints(i int, buffer []byte) []byte {
	if x.side == nil {
		return x.blobs.blob(int32(x.at(i)), buffer)
	}
	return x.side.blob(x.number(x.at(i)), buffer)
}

// KeepEntryPoints keeps a copy of a blob of entry points for sample i, unless this run has already
// kept one for it. The copy replaces a blob of an earlier run. Close writes it to the index file,
// if there is one. KeepEntryPoints returns false if it has no room for the blob.
func (x *Index) KeepEntryPoints(i int, blob []byte) bool {
	if x.side == nil {
		return x.blobs.keep(int32(x.at(i)), blob, uint64(len(x.samples)), x.spool)
	}
	return x.side.keep(x.number(x.at(i)), blob)
}

// number returns the number of record i among the members of the sidecar.
func (t *recordTable) number(i int) int32 {
	if t.numbers == nil {
		return int32(i)
	}
	return t.numbers[i]
}

// Close saves the kept entry points and closes the index file. It may be called more than once.
func (x *Index) Close() error {
	x.closing.Do(func() {
		x.windows.spool.close()
		x.memory.close()
		x.blobs.close()
	})
	if x.side == nil {
		return nil
	}
	return x.side.close()
}

// InMemory returns the content of sample i if it is in memory, and nil otherwise. The content is
// read-only. Close frees the memory, and so does the garbage collection of the Index. The caller
// must therefore keep the Index alive while it uses the content.
func (x *Index) InMemory(i int) []byte { return x.memory.of(x.at(i), x.Size(i)) }
