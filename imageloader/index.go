package imageloader

import (
	"bytes"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/torchstream/torchstream/internal/safefile"
)

// index says where the samples of an archive are: 32 bytes for each of them and its name, in two pieces of memory, whatever their number.
type index struct {
	info    fs.FileInfo // of all shards together, when they were scanned
	shards  []indexShard
	classes []string // sorted
	entries []entry
	names   string
	ignored int // members that are no samples
	orphans int // images among them
	// held has the samples' contents, if they are kept in memory: then the archive is not read again.
	held [][]byte
	// lazy is the same for an index that was not made by reading: contents are kept when they are read. Each points to as many bytes as the entry's size says.
	lazy []atomic.Pointer[byte]
	side *sidecar // nil: there is none
	// windows are those of marks: in the sidecar, or without one in spool.
	windows io.ReaderAt
	spool   spool
	closing sync.Once
	// oversize has the headers of samples that are over Options.MaxPixels, as the sidecar says: they need not be read.
	oversize map[int32]imageHead
	// numbers of the samples among the entries of the sidecar; nil: they are the same.
	numbers []int32
	// work is how many bytes have to be inflated for one of samples, from the checkpoints that there are; 0: the archive is a stream.
	work float64
	// reach is the same for one sample, on average, in bytes.
	reach float64
	most  int64 // of lazy: larger samples are never read
}

// indexShard is one file of an archive.
type indexShard struct {
	path   string
	info   fs.FileInfo
	format string
	marks  []mark // of a gzip file; the first is its beginning
}

// mark is a checkpoint whose window lies elsewhere.
type mark struct {
	bit, output int64
	at          int64 // of the window
	size        int32 // the same
}

// entry is a member of the archive that is a sample, or may become one.
type entry struct {
	offset int64 // of the content in the shard's tar stream
	size   int64
	name   uint32 // where it begins in names; ends where the next one begins
	label  int32  // in an indexer: the number of the directory
	crc    uint32 // CRC-32 (IEEE) of the content, if entrySummed; of the header before it, if entryBlock
	shard  uint16
	kind   memberKind
	flags  uint8
}

const (
	entryImage  = 1 << iota // claims to be an image
	entrySummed             // crc is the content's
	entryBlock              // crc is that of the tar header before the content
)

func (x *index) name(i int) string {
	end := uint32(len(x.names))
	if i+1 < len(x.entries) {
		end = x.entries[i+1].name
	}
	return x.names[x.entries[i].name:end]
}

// mostLazyWork is the same for samples that are read from the archive once, and from memory then.
const mostLazyWork = 64

// segmentBytes is how much of a stream is inflated at once for samples that stay in memory, so that those between two checkpoints are inflated once, not once for each that
// comes after them.
const segmentBytes = 1 << 20

// fits says whether the archive is a stream whose samples take no more than limit bytes, without those of more than most bytes, which nobody reads.
func (x *index) fits(limit, most int64) bool {
	total, streamed := int64(0), false
	for i := range x.entries {
		if e := &x.entries[i]; e.kind == kindFile && e.size <= most {
			if e.size > limit-total {
				return false
			}
			total += e.size
		}
	}
	for i := range x.shards {
		streamed = streamed || x.shards[i].format == formatTarGz || x.shards[i].format == formatZstd
	}
	return streamed
}

// hold keeps the samples in memory, if they fit. The archive has just been opened.
func (x *index) hold(a *archive, limit, most int64) error {
	if !x.fits(limit, most) {
		return nil
	}
	if x.work > 0 && (x.work <= mostLazyWork || x.reach <= segmentBytes/2) {
		x.most = most
		x.lazy = make([]atomic.Pointer[byte], len(x.entries))
		return nil
	}
	held := make([][]byte, len(x.entries))
	for i := range x.entries {
		e := &x.entries[i]
		if e.kind != kindFile || e.size == 0 || e.size > most {
			continue
		}
		a.names, a.last = i+1, x.name(i) // for errors
		if err := a.seekTo(int(e.shard), e.offset); err != nil {
			return err
		}
		held[i] = make([]byte, e.size)
		if _, err := io.ReadFull(a.in, held[i]); err != nil {
			return a.fail(err)
		}
		if e.flags&entrySummed != 0 && crc32.ChecksumIEEE(held[i]) != e.crc {
			return a.fail(errStale)
		}
	}
	x.held = held
	return a.drainAll()
}

// mostWork is how many bytes may be inflated for one of samples, on average, before going through the archive in its order is better.
const mostWork = 6

// random says whether the content of any sample can be read in any order, by several goroutines at once, each with a sampleReader. It never changes in
// the life of an index.
func (x *index) random() bool {
	return x.held != nil || x.lazy != nil || randomBy(x.work)
}

// randomBy is what work alone says.
func randomBy(work float64) bool { return work > 0 && work <= mostWork }

// sampleReader reads the contents of an index's samples in any order. It is used by one goroutine at a time; several of them read one open archive at once.
type sampleReader struct {
	a       *archive
	x       *index
	inflate *inflateRange
	file    source // of shard
	timed   timedFile
	shard   int    // -1: none
	segment []byte // samples one after the other, or what is read of a tar
}

// newSampleReader is for an index whose random is true, and an open archive that has not changed since. The archive stays the caller's.
func newSampleReader(a *archive, x *index) *sampleReader {
	return &sampleReader{a: a, x: x, shard: -1}
}

// inMemory is the content of sample i if it is kept in memory, for reading only; nil if it is not, or not yet.
func (x *index) inMemory(i int) []byte {
	if x.held != nil {
		return x.held[i]
	}
	if x.lazy != nil {
		if data := x.lazy[i].Load(); data != nil {
			return unsafe.Slice(data, x.entries[i].size)
		}
	}
	return nil
}

// read fills dst, which has the length of sample i's content, with it. The sample must be a regular file. Errors are *ArchiveError, or the marker errStopped.
func (r *sampleReader) read(i int, dst []byte) error {
	e := &r.x.entries[i]
	if data := r.x.inMemory(i); data != nil {
		copy(dst, data)
		return nil
	}
	if r.x.lazy != nil {
		r.readSegment(i)
		if data := r.x.inMemory(i); data != nil {
			copy(dst, data)
			return nil
		}
	}
	s := &r.x.shards[e.shard]
	err := r.readFrom(s, e, i, dst)
	if err == nil && e.flags&entrySummed != 0 && crc32.ChecksumIEEE(dst) != e.crc {
		err = errStale
	}
	if errors.Is(err, errStopped) {
		return errStopped
	}
	if err != nil {
		return &ArchiveError{File: s.path, Member: r.x.name(i), Position: i + 1, Offset: e.offset, Err: truncated(err)}
	}
	if r.x.lazy != nil && len(dst) > 0 {
		r.x.lazy[i].Store(unsafe.SliceData(bytes.Clone(dst)))
	}
	return nil
}

// errStale is what a damaged archive, and one that is not the one that was indexed, look like.
var errStale = fmt.Errorf("the bytes differ from the checksum in the index: the archive is damaged, or has changed since it was indexed " +
	"(`torchstream index` makes a new one; for Options.WebDataset with -webdataset)")

func (r *sampleReader) readFrom(s *indexShard, e *entry, i int, dst []byte) error {
	if s.format == formatTree {
		file, err := safefile.Open(filepath.Join(s.path, filepath.FromSlash(r.x.name(i))))
		if err != nil {
			return err
		}
		defer file.Close()
		_, err = io.ReadFull(file, dst)
		return err
	}
	if err := r.enter(e.shard); err != nil {
		return err
	}
	if s.format == formatTar {
		return r.readTar(s, e, dst)
	}
	c, until := s.enter(e)
	return r.inflate.read(&r.timed, r.x.windows, c, e.offset, until, dst)
}

// readTar reads a member of a plain tar. One of the same size and time may be another one all the same, also behind a URL (in another run): so the header before the member has
// to be the one that was indexed.
func (r *sampleReader) readTar(s *indexShard, e *entry, dst []byte) error {
	if e.flags&entryBlock == 0 {
		if n, err := r.file.ReadAt(dst, e.offset); n < len(dst) {
			return err
		}
		return nil
	}
	if e.offset < tarBlock {
		return errStale
	}
	part := tarBlock // of the header and the content that is read first
	if isURL(s.path) && len(dst) <= segmentBytes {
		part += len(dst) // a copy costs less than a second request
	}
	r.segment = slices.Grow(r.segment[:0], part)[:part]
	if n, err := r.file.ReadAt(r.segment, e.offset-tarBlock); n < part {
		return err
	}
	if crc32.ChecksumIEEE(r.segment[:tarBlock]) != e.crc {
		return errStale
	}
	if copy(dst, r.segment[tarBlock:]) == len(dst) {
		return nil
	}
	if n, err := r.file.ReadAt(dst, e.offset); n < len(dst) {
		return err
	}
	return nil
}

// enter makes the reader ready for a shard.
func (r *sampleReader) enter(shard uint16) error {
	if r.shard != int(shard) {
		r.leave()
		file, err := r.a.acquire(int(shard))
		if err != nil {
			return err
		}
		r.file, r.timed.file, r.shard = file, file, int(shard)
	}
	if r.inflate != nil || r.x.shards[shard].format != formatTarGz {
		return nil
	}
	var err error
	r.inflate, err = newInflateRange()
	return err
}

// readSegment reads sample i into lazy, with those that lie beside it between two checkpoints, if that is worth it. Whatever fails, and samples whose bytes are not what the
// index says, are left to who reads a sample alone.
func (r *sampleReader) readSegment(i int) {
	x := r.x
	e := &x.entries[i]
	s := &x.shards[e.shard]
	if s.format != formatTarGz {
		return
	}
	next := s.beyond(e.offset)
	c := &s.marks[next-1]
	first, last := i, i
	for first > 0 && i-first < items {
		p := &x.entries[first-1]
		if p.shard != e.shard || p.offset < c.output || p.offset+p.size > x.entries[first].offset {
			break
		}
		first--
	}
	begin := x.entries[first].offset
	for last+1 < len(x.entries) && last-i < items {
		p := &x.entries[last+1]
		if p.shard != e.shard || p.offset < x.entries[last].offset+x.entries[last].size || next < len(s.marks) && p.offset >= s.marks[next].output || p.offset+p.size-begin > segmentBytes {
			break
		}
		last++
	}
	end := x.entries[last].offset + x.entries[last].size
	if first == last || end-begin > segmentBytes || r.enter(e.shard) != nil {
		return
	}
	_, until := s.enter(&x.entries[last])
	r.segment = slices.Grow(r.segment[:0], int(end-begin))[:end-begin]
	if r.inflate.read(&r.timed, x.windows, c, begin, until, r.segment) != nil {
		return
	}
	for j := first; j <= last; j++ {
		p := &x.entries[j]
		data := r.segment[p.offset-begin:][:p.size]
		if p.kind == kindFile && p.size > 0 && p.size <= x.most && p.flags&entrySummed != 0 && x.lazy[j].Load() == nil && crc32.ChecksumIEEE(data) == p.crc {
			x.lazy[j].Store(unsafe.SliceData(bytes.Clone(data)))
		}
	}
}

// enter says from which checkpoint a member is read, and where its compressed bytes end at the latest.
func (s *indexShard) enter(e *entry) (c *mark, until int64) {
	until = s.info.Size()
	if end := s.beyond(e.offset + e.size - 1); end < len(s.marks) {
		until = min(until, s.marks[end].bit>>3+1)
	}
	return &s.marks[s.beyond(e.offset)-1], until
}

// beyond is the number of the first checkpoint beyond an offset.
func (s *indexShard) beyond(offset int64) int {
	n, _ := slices.BinarySearchFunc(s.marks, offset, func(c mark, offset int64) int {
		if c.output <= offset {
			return -1
		}
		return 1
	})
	return n
}

// close gives back what the reader holds outside of Go's memory.
func (r *sampleReader) close() {
	if r.inflate != nil {
		r.inflate.close()
		r.inflate = nil
	}
	r.leave()
}

// leave gives back the shard that was read last.
func (r *sampleReader) leave() {
	if r.shard >= 0 {
		r.a.release(r.shard)
		r.file, r.shard = nil, -1
	}
}

// mostIdleShards is how many shards stay open that nobody reads at the moment: an archive of thousands has no more files open than that, and one for each reader.
const mostIdleShards = 32

// sharedFiles are the shards of an archive that readers of samples have opened.
type sharedFiles struct {
	mu    sync.Mutex
	files map[int]*sharedFile
	idle  []int // nobody reads them; the one left longest ago is the first
}

type sharedFile struct {
	open  sync.Once // outside of the lock: a server may take its time
	file  source
	err   error
	users int
}

// acquire opens a shard for ReadAt, by as many goroutines as like to, until release.
func (a *archive) acquire(i int) (source, error) {
	s := &a.readers
	s.mu.Lock()
	f := s.files[i]
	if f == nil {
		f = &sharedFile{}
		if s.files == nil {
			s.files = map[int]*sharedFile{}
		}
		s.files[i] = f
	}
	f.users++
	if k := slices.Index(s.idle, i); k >= 0 {
		s.idle = slices.Delete(s.idle, k, k+1)
	}
	s.mu.Unlock()
	f.open.Do(func() { f.file, f.err = a.openAgain(i) })
	if f.err != nil {
		a.release(i)
		return nil, f.err
	}
	return f.file, nil
}

// release is called once for each acquire that had no error, and before the archive is closed.
func (a *archive) release(i int) {
	s := &a.readers
	s.mu.Lock()
	defer s.mu.Unlock()
	f := s.files[i]
	if f.users--; f.users > 0 {
		return
	}
	if f.err != nil { // to be tried again
		delete(s.files, i)
		return
	}
	s.idle = append(s.idle, i)
	if len(s.idle) > mostIdleShards {
		_ = s.files[s.idle[0]].file.Close() // only read
		delete(s.files, s.idle[0])
		s.idle = slices.Delete(s.idle, 0, 1)
	}
}

func (s *sharedFiles) close() (err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, f := range s.files {
		if f.file == nil {
			continue
		}
		if e := f.file.Close(); err == nil {
			err = e
		}
	}
	s.files, s.idle = nil, nil
	return err
}
