package index

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"sync"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// Index says where the samples of an archive are: in 32 bytes for each of them and its name, in two
// pieces of memory, whatever their number. Several goroutines may call its methods.
type Index struct {
	info    fs.FileInfo // of all shards together, when they were walked
	shards  []shard
	classes []string // sorted, unless they were given
	samples []record
	names   string
	ignored int // members that are no samples
	orphans int // images among them

	// memory has contents of samples, if they are kept there.
	memory contents

	side *sidecar // nil: there is none
	// windows has the windows of marks: the sidecar, or without one spool.
	windows io.ReaderAt
	spool   spool
	closing sync.Once

	// oversize has the headers of samples that are over Config.MaxPixels, as the sidecar says: they
	// need not be read.
	oversize map[int32]header
	// numbers are the numbers of the samples among the members of the sidecar; nil: they are the
	// same.
	numbers []int32

	// work is how many bytes have to be inflated for each byte of a sample, on average, from the
	// checkpoints that there are; 0: the archive can be read in its own order only.
	work float64
	// reach is how many bytes have to be inflated for a sample, on average.
	reach float64
}

// Sample is a sample of an index.
type Sample struct {
	Name  string // of the member
	Label int
	Size  int64 // of the content; 0 if the member is no file
	Kind  archive.Kind
}

// Len is how many samples the archive has, bad ones included.
func (x *Index) Len() int { return len(x.samples) }

// Classes are the class names by label. The caller does not change them.
func (x *Index) Classes() []string { return x.classes }

// Ignored is how many members of the archive are no samples.
func (x *Index) Ignored() int { return x.ignored }

// Orphans is how many of the ignored members are images that have no class.
func (x *Index) Orphans() int { return x.orphans }

// Sample returns sample i, in the archive's order.
func (x *Index) Sample(i int) Sample {
	r := &x.samples[i]
	return Sample{x.Name(i), int(r.label), r.size, r.kind}
}

// Label is the label of sample i.
func (x *Index) Label(i int) int { return int(x.samples[i].label) }

// Size is how many bytes the content of sample i has.
func (x *Index) Size(i int) int64 { return x.samples[i].size }

// Name is the name of sample i's member.
func (x *Index) Name(i int) string {
	end := uint32(len(x.names))
	if i+1 < len(x.samples) {
		end = x.samples[i+1].name
	}
	return x.names[x.samples[i].name:end]
}

// Oversize returns what the index file says of sample i's header if that has more than
// Config.MaxPixels pixels.
func (x *Index) Oversize(i int) (info imagecapi.Info, found bool) {
	h, found := x.oversize[int32(i)]
	if found {
		info, _, _ = h.info()
	}
	return info, found
}

// Matches says whether an open archive is the one that was indexed.
func (x *Index) Matches(a *archive.Archive) bool { return archive.SameFile(a.Info(), x.info) }

// HasFile says whether there is an index file, so that entry points can be kept.
func (x *Index) HasFile() bool { return x.side != nil }

// Work is how many bytes have to be read or inflated for each byte of a sample, on average, if
// samples are read in any order; 0: they can be read in the archive's order only.
func (x *Index) Work() float64 { return x.work }

// maxWork is how many bytes may be inflated for each byte of a sample, on average, before reading
// the archive in its order is better.
const maxWork = 6

// Random says whether Readers can read the samples in any order. It never changes in the life of an
// Index.
func (x *Index) Random() bool { return x.memory.holds() || randomBy(x.work) }

// randomBy is what work alone says.
func randomBy(work float64) bool { return work > 0 && work <= maxWork }

// ErrStale is what a damaged archive, and one that is not the one that was indexed, look like.
var ErrStale = errors.New("the bytes differ from the checksum in the index: " +
	"the archive is damaged, or has changed since it was indexed " +
	"(`torchstream index` makes a new one; for Options.WebDataset with -webdataset)")

// ReadForward fills p, which has the length of sample i's content, with it. It moves a, so that i
// grows from call to call: see [archive.Archive.ReadForward]. The sample must be a regular file.
func (x *Index) ReadForward(a *archive.Archive, i int, p []byte) error {
	r := &x.samples[i]
	m := archive.Member{Name: x.Name(i), Shard: int(r.shard), Offset: r.offset}
	if err := a.ReadForward(i+1, &m, p); err != nil {
		return err
	}
	if !r.matches(p) {
		return a.Fail(ErrStale)
	}
	return nil
}

// Headers yields what the index file says of each sample's header, in order. The last pair has the
// error that ended it early, if there is one. There must be an index file.
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

// EntryPoints returns what KeepEntryPoints was given for sample i, in this run or in one before. It
// is written over buffer, or into a larger one; empty if there is nothing.
func (x *Index) EntryPoints(i int, buffer []byte) []byte {
	if x.side == nil {
		return nil
	}
	return x.side.blob(x.number(i), buffer)
}

// KeepEntryPoints keeps a copy of a blob of entry points for sample i. The index file has it when
// the index is closed.
func (x *Index) KeepEntryPoints(i int, blob []byte) {
	if x.side != nil {
		x.side.keep(x.number(i), blob)
	}
}

// number is the number of sample i among the members of the sidecar.
func (x *Index) number(i int) int32 {
	if x.numbers == nil {
		return int32(i)
	}
	return x.numbers[i]
}

// Close saves the entry points that were kept, and closes the index file. It may be called more
// than once.
func (x *Index) Close() error {
	x.closing.Do(func() {
		x.spool.close()
		x.memory.arena.Free()
	})
	if x.side == nil {
		return nil
	}
	return x.side.close()
}

// InMemory is the content of sample i, for reading only, if it is kept in memory; nil if it is not,
// or not yet. The memory ends with Close, and with the Index: the caller holds on to the Index
// while it reads.
func (x *Index) InMemory(i int) []byte { return x.memory.of(i, x.samples[i].size) }
