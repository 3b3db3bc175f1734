package imageloader

import (
	"bytes"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"unsafe"
)

// index says where the samples of an archive are. Names share one string: an archive of a million images costs 90 MB, not 200.
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
	// oversize has the headers of samples that are over Options.MaxPixels, as the sidecar says: they need not be read.
	oversize map[int32]imageHead
	// numbers of the samples among the entries of the sidecar; nil: they are the same.
	numbers []int32
	// work is how many bytes have to be inflated for one of samples, from the checkpoints that there are; 0: the archive is a stream.
	work float64
}

// indexShard is one file of an archive.
type indexShard struct {
	path   string
	info   fs.FileInfo
	format string
	marks  []checkpoint // of a gzip file; the first is its beginning
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
	if x.work > 0 && x.work <= mostLazyWork {
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
	return x.held != nil || x.lazy != nil || x.work > 0 && x.work <= mostWork
}

// sampleReader reads the contents of an index's samples in any order. It is used by one goroutine at a time; several of them read one open archive at once.
type sampleReader struct {
	a       *archive
	x       *index
	inflate *inflateRange
	file    source // of shard
	timed   timedFile
	shard   int    // -1: none
	block   []byte // a tar header
}

// newSampleReader is for an index whose random is true, and an open archive that has not changed since. The archive stays the caller's.
func newSampleReader(a *archive, x *index) *sampleReader {
	return &sampleReader{a: a, x: x, shard: -1}
}

// read fills dst, which has the length of sample i's content, with it. The sample must be a regular file. Errors are *ArchiveError, or the marker errStopped.
func (r *sampleReader) read(i int, dst []byte) error {
	e := &r.x.entries[i]
	if r.x.held != nil {
		copy(dst, r.x.held[i])
		return nil
	}
	if r.x.lazy != nil {
		if data := r.x.lazy[i].Load(); data != nil {
			copy(dst, unsafe.Slice(data, e.size))
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
var errStale = fmt.Errorf("the bytes differ from the checksum in the index: the archive is damaged, or has changed since it was indexed (`torchstream index` makes a new one)")

func (r *sampleReader) readFrom(s *indexShard, e *entry, i int, dst []byte) error {
	if s.format == formatTree {
		file, err := os.Open(filepath.Join(s.path, filepath.FromSlash(r.x.name(i))))
		if err != nil {
			return err
		}
		defer file.Close()
		_, err = io.ReadFull(file, dst)
		return err
	}
	if r.shard != int(e.shard) {
		r.leave()
		file, err := r.a.acquire(int(e.shard))
		if err != nil {
			return err
		}
		r.file, r.timed.file, r.shard = file, file, int(e.shard)
	}
	if s.format == formatTar {
		// A tar of the same size and time may be another one all the same. What comes from a URL has its own version, and a request costs more than this is worth.
		if e.flags&entryBlock != 0 && !isURL(s.path) {
			if r.block == nil {
				r.block = make([]byte, tarBlock)
			}
			if n, err := r.file.ReadAt(r.block, e.offset-tarBlock); n < tarBlock {
				return err
			}
			if crc32.ChecksumIEEE(r.block) != e.crc {
				return errStale
			}
		}
		n, err := r.file.ReadAt(dst, e.offset)
		if n < len(dst) {
			return err
		}
		return nil
	}
	if r.inflate == nil {
		var err error
		if r.inflate, err = newInflateRange(); err != nil {
			return err
		}
	}
	c, until := s.enter(e)
	return r.inflate.read(&r.timed, c, e.offset, until, dst)
}

// enter says from which checkpoint a member is read, and where its compressed bytes end at the latest.
func (s *indexShard) enter(e *entry) (c *checkpoint, until int64) {
	at := func(offset int64) int { // the first checkpoint beyond offset
		n, _ := slices.BinarySearchFunc(s.marks, offset, func(c checkpoint, offset int64) int {
			if c.output <= offset {
				return -1
			}
			return 1
		})
		return n
	}
	until = s.info.Size()
	if end := at(e.offset + e.size - 1); end < len(s.marks) {
		until = min(until, s.marks[end].bit>>3+1)
	}
	return &s.marks[at(e.offset)-1], until
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
	f.open.Do(func() { f.file, f.err = a.open(a.shards[i].path) })
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

// checkpointer keeps, of the checkpoints of a stream, those that members are best read from: the last one before each.
type checkpointer struct {
	kept    []checkpoint
	pending []checkpoint // in order; the first may be kept already
	wanted  []int64      // where members begin for which that is not decided
	done    int          // how many of wanted are decided
}

// mostWindow is how much of the inflated bytes checkpoints may take: a larger one has to pay for itself by standing further from the one before.
const mostWindow = 48

func (k *checkpointer) note(c checkpoint) {
	k.pending = append(k.pending, c)
	if len(k.kept) == 0 {
		k.kept = append(k.kept, c)
	}
	k.decide(false)
}

// member says that a member's content begins at offset, and none begins before it any more.
func (k *checkpointer) member(offset int64) {
	k.wanted = append(k.wanted, offset)
	k.decide(false)
	if k.done == len(k.wanted) {
		k.forget(offset)
	}
}

// forget drops the checkpoints that nothing from offset on needs.
func (k *checkpointer) forget(offset int64) {
	n := 0
	for n+1 < len(k.pending) && k.pending[n+1].output <= offset {
		n++
	}
	k.pending = slices.Delete(k.pending, 0, n)
}

func (k *checkpointer) decide(end bool) {
	for k.done < len(k.wanted) {
		offset := k.wanted[k.done]
		if !end && (len(k.pending) == 0 || k.pending[len(k.pending)-1].output <= offset) {
			return // a better one may come
		}
		k.done++
		k.forget(offset)
		if len(k.pending) == 0 {
			continue
		}
		c, last := &k.pending[0], &k.kept[len(k.kept)-1]
		if c.output > last.output && c.output <= offset && c.output-last.output >= int64(mostWindow*len(c.window)) {
			k.kept = append(k.kept, *c)
		}
	}
	k.wanted, k.done = k.wanted[:0], 0
}

func (k *checkpointer) finish() []checkpoint {
	k.decide(true)
	return k.kept
}

// indexer collects an index member by member. With classes given, the members of these directories are the samples; without, those of every directory that
// has a member that claims to be an image (by its first bytes or its extension), which is known at the end only. It collects the members of all directories in
// either case, for a sidecar that serves both.
type indexer struct {
	file    string
	given   map[string]int32 // labels; nil: no classes are given
	list    []string         // the given classes
	dirs    map[string]int32
	dirList []string // by number
	claimed []bool   // the same: has a member that claims to be an image
	entries []entry
	heads   []imageHead // of the entries; those at the end may be missing
	names   []byte
	web     *webGroup // nil: directories are classes
	samples int       // with classes given: how many of entries are samples
	ignored int
	orphans int // images outside of any directory
	// maxPixels is how large images may be that the index has to tell from others; 0: it does not matter.
	maxPixels int64

	keeping   bool // contents, in held
	held      [][]byte
	heldBytes int64
	heldLimit int64
}

func newIndexer(file string, classes []string) (*indexer, error) {
	x := &indexer{file: file, dirs: map[string]int32{}, list: classes}
	if len(classes) > 0 {
		x.given = map[string]int32{}
	}
	for i, c := range classes {
		if _, twice := x.given[c]; twice {
			return nil, fmt.Errorf("imageloader: class %q is twice in Options.Classes", c)
		}
		x.given[c] = int32(i)
	}
	return x, nil
}

// hold makes the indexer keep contents, up to limit bytes in all: one more, and none is kept.
func (x *indexer) hold(limit int64) { x.keeping, x.heldLimit = true, limit }

// wants says whether the content of a member of this size would still be kept.
func (x *indexer) wants(size int64) bool { return x.keeping && x.heldBytes+size <= x.heldLimit }

// sum takes the checksum of an entry; flag says of what.
func (x *indexer) sum(i int, crc uint32, flag uint8) {
	x.entries[i].crc = crc
	x.entries[i].flags |= flag
}

// head takes the header of the image that an entry is.
func (x *indexer) head(i int, h imageHead) {
	x.heads = append(x.heads, make([]imageHead, i+1-len(x.heads))...)
	x.heads[i] = h
}

// keep takes an entry's content. data is nil if it is too large to be kept.
func (x *indexer) keep(i int, data []byte, size int64) {
	if !x.wants(size) {
		x.keeping, x.held = false, nil
		return
	}
	x.held = append(x.held, make([][]byte, len(x.entries)-len(x.held))...)
	x.held[i] = data
	x.heldBytes += size
}

// classOf is the name of the directory that a member lies in; "" if there is none. name is clean.
func classOf(name string) string {
	slash := strings.LastIndexByte(name, '/')
	if slash <= 0 {
		return ""
	}
	class := name[:slash]
	class = class[strings.LastIndexByte(class, '/')+1:]
	if class == ".." || class == "." {
		return ""
	}
	return class
}

// claims says whether a member wants to be an image. magic holds its first bytes.
func claims(m *member, magic []byte) bool {
	if sniff(magic) != "" {
		return true
	}
	base := m.name[strings.LastIndexByte(m.name, '/')+1:]
	if strings.HasPrefix(base, ".") { // .DS_Store, and the ._x.jpg of macOS
		return false
	}
	switch dot := strings.LastIndexByte(base, '.'); strings.ToLower(base[dot+1:]) {
	case "jpg", "jpeg", "png", "ppm", "pgm", "bmp", "tif", "tiff", "webp", "gif": // torchvision's list, and GIF
		return dot >= 0
	}
	return false
}

// sniff names the format of an image by its first bytes; "" if it is none that is handled.
func sniff(b []byte) string {
	switch {
	case len(b) >= 3 && b[0] == 0xff && b[1] == 0xd8 && b[2] == 0xff:
		return "JPEG"
	case len(b) >= 8 && string(b[:8]) == "\x89PNG\r\n\x1a\n":
		return "PNG"
	case len(b) >= 12 && string(b[:4]) == "RIFF" && string(b[8:12]) == "WEBP":
		return "WebP"
	}
	return sniffRare(b)
}

// add takes a member. entry is its number among the entries, -1 if it is none; s its sample, whose Index is -1 if it is none as far as is known. Without given
// classes, Index is the entry's number, and there is no label yet. An error is an *UnknownClassError.
func (x *indexer) add(m *member, magic []byte) (s Sample, number int, err error) {
	s = Sample{Name: m.name, Index: -1}
	class := classOf(m.name)
	image := claims(m, magic)
	if class == "" {
		if image {
			x.orphans++
		}
		x.ignored++
		return s, -1, nil
	}
	label, known := x.given[class]
	if x.given != nil && !known && image {
		return s, -1, &UnknownClassError{File: x.file, Name: m.name, Class: class, Known: x.list}
	}
	flags := uint8(0)
	if image {
		flags = entryImage
	}
	dir := x.dir(class)
	x.claimed[dir] = x.claimed[dir] || image
	if number, err = x.record(m, dir, flags); err != nil {
		return s, -1, err
	}
	switch {
	case x.given == nil:
		s.Index = number
	case known:
		s.Index, s.Label = x.samples, int(label)
		x.samples++
	}
	return s, number, nil
}

// dir is the number of a directory.
func (x *indexer) dir(name string) int32 {
	dir, seen := x.dirs[name]
	if !seen {
		dir = int32(len(x.dirList))
		name = strings.Clone(name)
		x.dirs[name] = dir
		x.dirList = append(x.dirList, name)
		x.claimed = append(x.claimed, false)
	}
	return dir
}

// record makes a member an entry.
func (x *indexer) record(m *member, dir int32, flags uint8) (number int, err error) {
	if len(x.names)+len(m.name) > 1<<32-1 {
		return -1, fmt.Errorf("imageloader: %s: more than 4 GB of member names", x.file)
	}
	x.entries = append(x.entries, entry{offset: m.offset, size: m.size, name: uint32(len(x.names)), label: dir, shard: uint16(m.shard), kind: m.kind, flags: flags})
	x.names = append(x.names, m.name...)
	return len(x.entries) - 1, nil
}

// finish sorts the classes and drops the members of directories that turned out to be none. The archive was read to its end.
func (x *indexer) finish(a *archive) *index {
	out := &index{info: a.info, ignored: x.ignored, orphans: x.orphans, held: x.held}
	if !x.keeping {
		out.held = nil
	}
	for i := range a.shards {
		s := &a.shards[i]
		out.shards = append(out.shards, indexShard{s.path, s.info, s.format, s.marks})
	}
	number := make([]int32, len(x.dirList)) // labels of directories
	if x.given != nil {
		out.classes = x.list
		for d, name := range x.dirList {
			number[d] = -1
			if label, ok := x.given[name]; ok {
				number[d] = label
			}
		}
	} else if classes := x.numbered(); x.web != nil && classes != nil {
		out.classes = classes
		for d, name := range x.dirList {
			n, _ := strconv.Atoi(name) // as numbered has found
			number[d] = int32(n)
		}
	} else {
		for d, name := range x.dirList {
			if x.claimed[d] {
				out.classes = append(out.classes, name)
			}
		}
		slices.Sort(out.classes)
		for d, name := range x.dirList {
			number[d] = -1
			if n, found := slices.BinarySearch(out.classes, name); found {
				number[d] = int32(n)
			}
		}
	}
	if out.held != nil {
		out.held = append(out.held, make([][]byte, len(x.entries)-len(out.held))...)
	}
	names, kept := x.names[:0], x.entries[:0]
	for i, e := range x.entries {
		end := len(x.names)
		if i+1 < len(x.entries) {
			end = int(x.entries[i+1].name)
		}
		if number[e.label] < 0 {
			out.ignored++
			continue
		}
		name := x.names[e.name:end]
		e.label = number[e.label]
		e.name = uint32(len(names))
		if x.maxPixels > 0 && i < len(x.heads) {
			if info, _, ok := x.heads[i].info(); ok && int64(info.Width)*int64(info.Height) > x.maxPixels {
				if out.oversize == nil {
					out.oversize = map[int32]imageHead{}
				}
				out.oversize[int32(len(kept))] = x.heads[i]
			}
		}
		if out.held != nil {
			out.held[len(kept)] = out.held[i]
		}
		names = append(names, name...)
		if out.numbers == nil && i != len(kept) {
			out.numbers = make([]int32, len(kept), len(x.entries))
			for k := range out.numbers {
				out.numbers[k] = int32(k)
			}
		}
		if out.numbers != nil {
			out.numbers = append(out.numbers, int32(i))
		}
		kept = append(kept, e)
	}
	if out.held != nil {
		out.held = slices.Clip(out.held[:len(kept)])
	}
	out.entries = slices.Clip(kept)
	out.names = unsafeString(names) // x is not used any more
	out.measure()
	return out
}

// measure finds out what reading the samples in any order costs.
func (x *index) measure() {
	var inflated, wanted float64 // sums of what an index claims
	for i := range x.entries {
		e := &x.entries[i]
		if e.kind != kindFile || e.size == 0 {
			continue
		}
		s := &x.shards[e.shard]
		wanted += float64(e.size)
		inflated += float64(e.size)
		switch {
		case s.format == formatTar || s.format == formatTree:
		case len(s.marks) == 0:
			x.work = 0
			return
		default:
			c, _ := s.enter(e)
			inflated += float64(e.offset - c.output)
		}
	}
	x.work = 1
	if wanted > 0 {
		x.work = inflated / wanted
	}
}
