package imageloader

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
	"unsafe"

	"crypto/sha256"
	"encoding/hex"

	"github.com/torchstream/torchstream/internal/safefile"
)

// The sidecar index, byte by byte: docs/index-format.md.

const (
	sidecarSuffix  = ".tsidx"
	sidecarMagic   = "TSIDX\x00\r\n"
	sidecarVersion = 2
	sidecarHeader  = 32
	sectionBytes   = 32
	mostSections   = 64
	edgeBytes      = 64 << 10 // of a shard's head and tail are in its digest
	mostEntryBlobs = 512 << 20
)

const (
	sectionShards      = 1
	sectionDirs        = 2
	sectionEntries     = 3
	sectionNames       = 4
	sectionCheckpoints = 5
	sectionWindows     = 6
	sectionCounts      = 7
	sectionBlobEnds    = 8
	sectionBlobs       = 9
	sectionHeads       = 10
)

const (
	entryBytes      = 32
	checkpointBytes = 32
	countsBytes     = 24
	shardBytes      = 32 // and its name
)

// indexFile is the kind of file that an index replaces.
var indexFile = safefile.Prefix("an index", sidecarMagic)

// checkIndexFile refuses an Options.IndexFile that is neither empty nor an index, before any work is done.
func (o *Options) checkIndexFile() error {
	if o.NoIndex || o.IndexFile == "" {
		return nil
	}
	if err := safefile.Check(o.IndexFile, indexFile); err != nil {
		return fmt.Errorf("imageloader: Options.IndexFile: %w", err)
	}
	return nil
}

// errIndex is the reason why a sidecar is not used: it is made anew.
type errIndex string

func (e errIndex) Error() string { return string(e) }

const (
	errIndexDamaged = errIndex("the index is damaged")
	errIndexVersion = errIndex("the index is of another version")
	errIndexLabels  = errIndex("the index has the labels of Options.WebDataset, or lacks them")
	errIndexStale   = errIndex("the archive has changed since it was indexed")
)

// section is a part of a sidecar: data, or for the large ones what write writes.
type section struct {
	kind  uint32
	count uint64
	write func(io.Writer) error
}

// place is where a section lies.
type place struct {
	kind, crc           uint32
	offset, size, count uint64
}

// writeSidecar writes an index file beside others, so that a reader sees the whole of it or none, whatever else ends the program or the machine. It returns the file that it has
// written, open: another process may have put its own at the path since.
func writeSidecar(path string, mode fs.FileMode, sections []section) (_ *os.File, err error) {
	if err := safefile.Check(path, indexFile); err != nil {
		return nil, err
	}
	f, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*.tmp")
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = f.Close() // err says more
			_ = os.Remove(f.Name())
		}
	}()
	w := &sectionWriter{file: f, at: uint64(sidecarHeader + len(sections)*sectionBytes)}
	w.buffer = make([]byte, 0, 256<<10)
	if _, err := f.Seek(int64(w.at), io.SeekStart); err != nil {
		return nil, err
	}
	var table []byte
	for _, s := range sections {
		begin := w.at
		w.crc = 0
		if err := s.write(w); err != nil {
			return nil, err
		}
		table = binary.LittleEndian.AppendUint32(table, s.kind)
		table = binary.LittleEndian.AppendUint32(table, w.crc)
		table = binary.LittleEndian.AppendUint64(table, begin)
		table = binary.LittleEndian.AppendUint64(table, w.at-begin)
		table = binary.LittleEndian.AppendUint64(table, s.count)
	}
	if err := w.flush(); err != nil {
		return nil, err
	}
	head := []byte(sidecarMagic)
	head = binary.LittleEndian.AppendUint32(head, sidecarVersion)
	head = binary.LittleEndian.AppendUint32(head, uint32(len(sections)))
	head = binary.LittleEndian.AppendUint64(head, w.at)
	head = binary.LittleEndian.AppendUint32(head, crc32.ChecksumIEEE(table))
	head = binary.LittleEndian.AppendUint32(head, crc32.ChecksumIEEE(head))
	if _, err := f.WriteAt(append(head, table...), 0); err != nil {
		return nil, err
	}
	if err := f.Chmod(mode); err != nil {
		return nil, err
	}
	if err := f.Sync(); err != nil {
		return nil, err
	}
	if err := safefile.Check(path, indexFile); err != nil { // again: writing took a while
		return nil, err
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return nil, err
	}
	sweep(path)
	return f, nil
}

// leftAfter is when a file under a temporary name is one that nobody writes any more.
const leftAfter = 24 * time.Hour

// sweep removes what processes have left that were killed while they wrote this index.
func sweep(path string) {
	list, err := os.ReadDir(filepath.Dir(path))
	if err != nil {
		return // it stays
	}
	for _, f := range list {
		if !strings.HasPrefix(f.Name(), filepath.Base(path)+".") || !unfinished(f.Name()) {
			continue
		}
		if info, err := f.Info(); err == nil && info.Mode().IsRegular() && time.Since(info.ModTime()) > leftAfter {
			_ = os.Remove(filepath.Join(filepath.Dir(path), f.Name())) // or it stays
		}
	}
}

// unfinished says whether a file is an index that is being written.
func unfinished(name string) bool {
	return strings.Contains(name, sidecarSuffix+".") && strings.HasSuffix(name, ".tmp")
}

type sectionWriter struct {
	file   *os.File
	at     uint64
	crc    uint32
	buffer []byte
}

func (w *sectionWriter) Write(p []byte) (int, error) {
	w.at += uint64(len(p))
	w.crc = crc32.Update(w.crc, crc32.IEEETable, p)
	if len(w.buffer)+len(p) > cap(w.buffer) {
		if err := w.flush(); err != nil {
			return 0, err
		}
		if len(p) > cap(w.buffer) {
			return w.file.Write(p)
		}
	}
	w.buffer = append(w.buffer, p...)
	return len(p), nil
}

func (w *sectionWriter) flush() error {
	_, err := w.file.Write(w.buffer)
	w.buffer = w.buffer[:0]
	return err
}

// edges is a digest of a shard's first and last bytes.
func (a *archive) edges(i int) (uint32, error) {
	file, err := a.acquire(i)
	if err != nil {
		return 0, err
	}
	defer a.release(i)
	size := a.shards[i].info.Size()
	b := make([]byte, min(size, edgeBytes))
	sum := uint32(0)
	for _, at := range []int64{0, size - int64(len(b))} {
		if n, err := file.ReadAt(b, at); n < len(b) {
			return 0, fmt.Errorf("%s: %w", a.shards[i].path, truncated(err))
		}
		sum = crc32.Update(sum, crc32.IEEETable, b)
	}
	return sum, nil
}

// sections are those of an index whose archive was read to its end.
func (x *indexer) sections(a *archive) ([]section, error) {
	var shards []byte
	for i := range a.shards {
		s := &a.shards[i]
		digest, err := a.edges(i)
		if err != nil {
			return nil, err
		}
		name := filepath.Base(s.path)
		shards = binary.LittleEndian.AppendUint64(shards, uint64(s.info.Size()))
		shards = binary.LittleEndian.AppendUint64(shards, uint64(s.info.ModTime().UnixNano()))
		shards = binary.LittleEndian.AppendUint32(shards, digest)
		shards = binary.LittleEndian.AppendUint32(shards, formatNumber(s.format))
		shards = binary.LittleEndian.AppendUint32(shards, uint32(len(name)))
		shards = binary.LittleEndian.AppendUint32(shards, 0)
		shards = append(shards, name...)
	}
	var dirs []byte
	for i, d := range x.dirList {
		length := uint32(len(d)) << 1
		if x.claimed[i] {
			length |= 1
		}
		dirs = append(binary.LittleEndian.AppendUint32(dirs, length), d...)
	}
	counts := binary.LittleEndian.AppendUint64(nil, uint64(x.ignored))
	counts = binary.LittleEndian.AppendUint64(counts, uint64(x.orphans))
	counts = binary.LittleEndian.AppendUint64(counts, labelling(x.web != nil))
	whole := func(b []byte) func(io.Writer) error {
		return func(w io.Writer) error { _, err := w.Write(b); return err }
	}
	list := []section{
		{sectionShards, uint64(len(a.shards)), whole(shards)},
		{sectionDirs, uint64(len(x.dirList)), whole(dirs)},
		{sectionCounts, 3, whole(counts)},
	}
	stored := x.stored()
	for _, kind := range largeSections {
		list = append(list, section{kind, uint64(stored[kind].count), stored[kind].copyTo})
	}
	return list, nil
}

// largeSections have something for every member.
var largeSections = []uint32{sectionEntries, sectionNames, sectionHeads, sectionCheckpoints, sectionWindows}

// labelling says where labels come from: 0 directories, 1 as in WebDataset.
func labelling(web bool) uint64 {
	if web {
		return 1
	}
	return 0
}

var formats = []string{formatTar, formatTarGz, formatZstd}

func formatNumber(format string) uint32 { return uint32(slices.Index(formats, format)) }

// otherPlace is where an index may be saved too.
type otherPlace struct {
	path string
	was  fs.FileInfo // what lies there and is of no use to anybody; nil: nothing
}

// sidecar is an open index file.
type sidecar struct {
	path   string
	file   *os.File
	places map[uint32]place
	// Of the loader: where else it may be saved, what makes nameless files, and who is told.
	elsewhere []otherPlace
	create    func() (*os.File, error)
	log       *slog.Logger

	// Blobs of entries that the file does not have yet, one after the other, and where: 0, or place<<24 | size.
	mu    sync.RWMutex
	blobs spool
	kept  []uint64 // nil: there are none
	dirty bool
	once  sync.Once
	err   error // of closing
}

// openSidecar checks an index file's header and table, but not what is in it.
func openSidecar(path string) (*sidecar, error) {
	f, err := safefile.Open(path)
	if err != nil {
		return nil, err
	}
	return newSidecar(path, f)
}

// newSidecar is openSidecar for an open file, which it takes over.
func newSidecar(path string, f *os.File) (_ *sidecar, err error) {
	defer func() {
		if err != nil {
			_ = f.Close() // err says more
		}
	}()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	places, err := readTable(f, info.Size())
	if err != nil {
		return nil, err
	}
	return &sidecar{path: path, file: f, places: places}, nil
}

func readTable(r io.ReaderAt, size int64) (map[uint32]place, error) {
	head := make([]byte, sidecarHeader)
	if _, err := r.ReadAt(head, 0); err != nil || string(head[:8]) != sidecarMagic {
		return nil, errIndexDamaged
	}
	le := binary.LittleEndian
	if le.Uint32(head[8:]) != sidecarVersion {
		return nil, errIndexVersion
	}
	n := le.Uint32(head[12:])
	if crc32.ChecksumIEEE(head[:28]) != le.Uint32(head[28:]) || n > mostSections || le.Uint64(head[16:]) != uint64(size) {
		return nil, errIndexDamaged
	}
	table := make([]byte, n*sectionBytes)
	if _, err := r.ReadAt(table, sidecarHeader); err != nil || crc32.ChecksumIEEE(table) != le.Uint32(head[24:]) {
		return nil, errIndexDamaged
	}
	places := map[uint32]place{}
	for ; len(table) > 0; table = table[sectionBytes:] {
		p := place{le.Uint32(table), le.Uint32(table[4:]), le.Uint64(table[8:]), le.Uint64(table[16:]), le.Uint64(table[24:])}
		// There are as many windows as checkpoints, but one may be empty.
		if p.offset > uint64(size) || p.size > uint64(size)-p.offset || p.count > p.size && p.kind != sectionWindows {
			return nil, errIndexDamaged
		}
		places[p.kind] = p
	}
	return places, nil
}

// section is a section of the file. Its items have at least least bytes each.
func (s *sidecar) section(kind uint32, least uint64) (stored, error) {
	p, ok := s.places[kind]
	if !ok || least > 0 && p.count > p.size/least {
		return stored{}, errIndexDamaged
	}
	return stored{at: io.NewSectionReader(s.file, int64(p.offset), int64(p.size)), size: int64(p.size), count: int(p.count), crc: p.crc, checked: true}, nil
}

// read reads a whole section.
func (s *sidecar) read(kind uint32, least uint64) ([]byte, int, error) {
	p, err := s.section(kind, least)
	if err != nil {
		return nil, 0, err
	}
	b, err := p.all()
	return b, p.count, err
}

// load makes the index, and sets what the archive knows of its shards. Errors that are errIndex mean: not usable.
func (s *sidecar) load(a *archive, x *indexer) (*index, error) {
	le := binary.LittleEndian
	size := 0
	for i := range a.shards {
		size += shardBytes + len(filepath.Base(a.shards[i].path))
	}
	if p := s.places[sectionShards]; p.count != uint64(len(a.shards)) || p.size != uint64(size) {
		return nil, errIndexStale
	}
	b, _, err := s.read(sectionShards, shardBytes)
	if err != nil {
		return nil, err
	}
	for i := range a.shards {
		sh := &a.shards[i]
		if len(b) < shardBytes {
			return nil, errIndexDamaged
		}
		name := le.Uint32(b[24:])
		format := le.Uint32(b[20:])
		if uint64(name) > uint64(len(b)-shardBytes) || format >= uint32(len(formats)) {
			return nil, errIndexDamaged
		}
		if int64(le.Uint64(b)) != sh.info.Size() || string(b[shardBytes:shardBytes+name]) != filepath.Base(sh.path) {
			return nil, errIndexStale
		}
		// A copied archive has another time: then its ends decide, as they do for what has no time. But not of a tar, whose samples have no checksums.
		if int64(le.Uint64(b[8:])) != sh.info.ModTime().UnixNano() || sh.info.ModTime().IsZero() {
			if formats[format] == formatTar {
				return nil, errIndexStale
			}
			digest, err := a.edges(i)
			if err != nil {
				return nil, err
			}
			if digest != le.Uint32(b[16:]) {
				return nil, errIndexStale
			}
		}
		sh.format = formats[format]
		b = b[shardBytes+name:]
	}
	if !s.plausible(a) {
		return nil, errIndexDamaged
	}
	b, n, err := s.read(sectionDirs, 4)
	if err != nil {
		return nil, err
	}
	for range n {
		if len(b) < 4 || uint64(le.Uint32(b)>>1) > uint64(len(b)-4) {
			return nil, errIndexDamaged
		}
		length := le.Uint32(b) >> 1
		name := string(b[4 : 4+length])
		if _, twice := x.dirs[name]; twice || name == "" {
			return nil, errIndexDamaged
		}
		dir, err := x.dir(name)
		if err != nil {
			return nil, errIndexDamaged
		}
		x.claimed[dir] = le.Uint32(b)&1 != 0
		b = b[4+length:]
	}
	if b, _, err = s.read(sectionCounts, 8); err != nil || len(b) != countsBytes {
		return nil, errIndexDamaged
	}
	if le.Uint64(b[16:]) != labelling(x.web != nil) {
		return nil, errIndexLabels
	}
	x.ignored, x.orphans = int(le.Uint64(b)), int(le.Uint64(b[8:]))
	if x.ignored < 0 || x.orphans < 0 {
		return nil, errIndexDamaged
	}
	sections, err := s.large()
	if err != nil {
		return nil, err
	}
	return x.build(a, sections)
}

// large are the large sections.
func (s *sidecar) large() (sections map[uint32]stored, err error) {
	sections = map[uint32]stored{}
	for _, kind := range largeSections {
		if sections[kind], err = s.section(kind, 0); err != nil {
			return nil, err
		}
	}
	return sections, nil
}

// plausible says whether an archive of this size can have sections of those sizes, before anything as large is read: a file may claim terabytes and be sparse.
func (s *sidecar) plausible(a *archive) bool {
	members := int64(0) // each has a header
	for i := range a.shards {
		members = min(maxMembers, members+a.shards[i].mostBytes()/tarBlock)
	}
	entries, dirs, names := s.places[sectionEntries], s.places[sectionDirs], s.places[sectionNames]
	return entries.count <= uint64(members) && entries.size == entries.count*entryBytes &&
		dirs.count <= entries.count && dirs.size <= dirs.count*(4+maxNameBytes) && dirs.size <= mostDirBytes &&
		names.size <= min(entries.count*maxNameBytes, math.MaxUint32) &&
		s.places[sectionHeads].size == entries.count*headBytes &&
		s.places[sectionCheckpoints].size <= uint64(members+int64(len(a.shards)))*checkpointBytes &&
		s.places[sectionCounts].size == countsBytes
}

// mostBytes is how long the tar stream of a shard can be: what an archive that is read may inflate to (ratioReader).
func (s *shard) mostBytes() int64 {
	size := s.info.Size()
	switch {
	case s.format == formatTar:
		return size
	case size >= math.MaxInt64/maxRatio:
		return math.MaxInt64
	}
	return max(maxRatioAfter, (size+1)*maxRatio)
}

// close saves what was kept. It may be called more than once.
func (s *sidecar) close() error {
	s.once.Do(func() {
		s.save()
		s.mu.Lock()
		s.blobs.close()
		s.kept = nil
		s.mu.Unlock()
		if err := s.file.Close(); err != nil {
			s.err = fmt.Errorf("imageloader: %w", err)
		}
	})
	return s.err
}

// blob is what the file keeps for an entry, written over buffer or into a larger one; empty if there is none.
func (s *sidecar) blob(number int32, buffer []byte) []byte {
	if b := s.keeps(number, buffer); b != nil {
		return b
	}
	ends, ok := s.places[sectionBlobEnds]
	blobs := s.places[sectionBlobs]
	if !ok || uint64(number) >= ends.count || ends.count > ends.size/8 {
		return nil
	}
	pair := slices.Grow(buffer[:0], 16)[:16]
	if number == 0 {
		clear(pair[:8])
		if _, err := s.file.ReadAt(pair[8:], int64(ends.offset)); err != nil {
			return nil
		}
	} else if _, err := s.file.ReadAt(pair, int64(ends.offset)+8*int64(number-1)); err != nil {
		return nil
	}
	begin, end := binary.LittleEndian.Uint64(pair), binary.LittleEndian.Uint64(pair[8:])
	if begin >= end || end > blobs.size || end-begin > 1<<24 {
		return nil
	}
	b := slices.Grow(pair[:0], int(end-begin))[:end-begin]
	if _, err := s.file.ReadAt(b, int64(blobs.offset+begin)); err != nil {
		return nil
	}
	return b
}

// keeps is what keep was given for an entry, written over buffer or into a larger one; nil if it was given nothing.
func (s *sidecar) keeps(number int32, buffer []byte) []byte {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if s.kept == nil || s.kept[number] == 0 {
		return nil
	}
	at, size := s.kept[number]>>24, int(s.kept[number]&(1<<24-1))
	b := slices.Grow(buffer[:0], size)[:size]
	if _, err := s.blobs.ReadAt(b, int64(at)); err != nil {
		return nil
	}
	return b
}

// keep takes a blob for an entry until save. Where there is no place for a file, only so many are kept as fit in memory.
func (s *sidecar) keep(number int32, blob []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.kept == nil {
		s.kept = make([]uint64, s.places[sectionEntries].count)
		s.blobs.create = s.create
	}
	if len(blob) == 0 || len(blob) >= 1<<24 || s.kept[number] != 0 || s.blobs.size() >= 1<<40 || len(s.blobs.mem)+len(blob) > mostEntryBlobs {
		return
	}
	s.kept[number] = uint64(s.blobs.size())<<24 | uint64(len(blob))
	s.blobs.write(blob)
	s.dirty = true
}

// save writes the file anew with the blobs that were kept, or where it lies in a folder that can't be written another one. What the sidecar has open stays valid. The blobs are
// worth no error: without them the next run is as slow as this one.
func (s *sidecar) save() {
	s.mu.Lock()
	dirty := s.dirty
	s.dirty = false
	s.mu.Unlock()
	if !dirty {
		return
	}
	mine, err := s.file.Stat()
	if err == nil {
		var now fs.FileInfo
		if now, err = os.Stat(s.path); err == nil && !os.SameFile(mine, now) {
			err = errors.New("another process has written the index since")
		}
	}
	if err != nil {
		s.log.Info("entry points are not kept", "index", s.path, "reason", err.Error())
		return
	}
	if err = s.saveTo(s.path, mine.Mode().Perm()); err == nil {
		return
	}
	for _, p := range s.elsewhere {
		if now, err := os.Stat(p.path); err == nil && (p.was == nil || !os.SameFile(now, p.was)) {
			continue // somebody's, since
		}
		_ = os.MkdirAll(filepath.Dir(p.path), 0o755) // the next call says more
		if s.saveTo(p.path, mine.Mode().Perm()) == nil {
			return
		}
	}
	s.log.Warn("entry points can't be kept: Options.IndexFile can name another place for the index", "index", s.path, "error", err)
}

func (s *sidecar) saveTo(path string, mode fs.FileMode) error {
	var sections []section
	for _, kind := range append([]uint32{sectionShards, sectionDirs, sectionCounts}, largeSections...) {
		p := s.places[kind]
		sections = append(sections, section{kind, p.count, func(w io.Writer) error {
			_, err := io.Copy(w, io.NewSectionReader(s.file, int64(p.offset), int64(p.size)))
			return err
		}})
	}
	n := int32(s.places[sectionEntries].count)
	var ends spool
	defer ends.close()
	ends.create = s.create
	at := uint64(0)
	blobs := section{sectionBlobs, 0, func(w io.Writer) error {
		var b []byte
		var end [8]byte
		for i := range n {
			b = s.blob(i, b)
			if _, err := w.Write(b); err != nil {
				return err
			}
			at += uint64(len(b))
			ends.write(binary.LittleEndian.AppendUint64(end[:0], at))
		}
		return nil
	}}
	sections = append(sections, blobs, section{sectionBlobEnds, uint64(n), func(w io.Writer) error { return ends.section(int(n)).copyTo(w) }})
	f, err := writeSidecar(path, mode, sections)
	if err != nil {
		return err
	}
	return f.Close()
}

// sidecarMode is for an index file: it holds names and bytes of the archive, so nobody may read it who may not read the archive.
func (a *archive) sidecarMode() fs.FileMode {
	mode := fs.FileMode(0o044)
	for i := range a.shards {
		mode &= a.shards[i].info.Mode().Perm()
	}
	return mode | 0o600
}

// sidecarPaths are where the index of an archive may lie, the best place to write it first. They are looked at from the last to the first: what lies in the user's own folder was put
// there because nothing can be written beside the archive, and has entry points.
func sidecarPaths(l *Loader, a *archive) []string {
	if l.o.NoIndex || a.format == formatTree {
		return nil
	}
	if l.o.IndexFile != "" {
		return []string{l.o.IndexFile}
	}
	first := a.shards[0].path
	for i := range a.shards { // memory and other sources that are no files have no place
		if !a.shards[i].info.Mode().IsRegular() || a.shards[i].info.ModTime().IsZero() && !isURL(a.shards[i].path) {
			return nil
		}
	}
	var paths []string
	if !isURL(first) {
		if _, err := os.Lstat(first); err != nil {
			return nil // opened in another way than by its name
		}
		name := first + sidecarSuffix
		if len(a.shards) > 1 {
			name = fmt.Sprintf("%s+%d%s", first, len(a.shards)-1, sidecarSuffix)
		}
		paths = append(paths, name)
	}
	if dir, err := os.UserCacheDir(); err == nil {
		name := first
		if !isURL(first) {
			if whole, err := filepath.Abs(first); err == nil {
				name = whole
			}
		}
		sum := sha256.Sum256([]byte(fmt.Sprint(name, len(a.shards))))
		paths = append(paths, filepath.Join(dir, "torchstream", "index", hex.EncodeToString(sum[:12])+sidecarSuffix))
	}
	return paths
}

// indexer is for the loader's options.
func (l *Loader) indexer() (*indexer, error) {
	x, err := newIndexer(l.path, l.o.Classes)
	if err != nil {
		return nil, err
	}
	if l.o.WebDataset {
		x.web = &webGroup{image: -1}
	}
	x.maxPixels = l.o.MaxPixels
	return x, nil
}

// loadIndex looks for a sidecar; nil without an error if there is none that fits.
func (l *Loader) loadIndex(a *archive) (*index, error) {
	paths := sidecarPaths(l, a)
	var elsewhere []otherPlace
	var labelled error // an index with other labels than are asked for, which is not to be lost
	for _, path := range slices.Backward(paths) {
		began := time.Now()
		x, err := l.indexer()
		if err != nil {
			return nil, err
		}
		s, err := openSidecar(path)
		if errors.Is(err, fs.ErrNotExist) {
			elsewhere = append(elsewhere, otherPlace{path, nil})
			continue
		}
		was, _ := os.Stat(path) // nil, and it is left alone, if it is gone by now
		if err == nil {
			s.elsewhere, s.create, s.log = elsewhere, l.spoolBeside(a), l.o.Logger
			var out *index
			if out, err = s.load(a, x); err == nil {
				out.side = s
				if len(out.entries) == 0 {
					_ = s.close() // only read
					return nil, l.noSamples(out.ignored, x.orphans)
				}
				if err := out.hold(a, l.o.ShuffleBytes, l.o.MaxSampleBytes); err != nil {
					_ = s.close() // err says more
					return nil, err
				}
				l.o.Logger.Info("opened index", "archive", l.path, "index", path, "samples", len(out.entries), "seconds", time.Since(began).Seconds())
				return out, nil
			}
			_ = s.close() // only read
		}
		var unusable errIndex
		var unknown *UnknownClassError
		if errors.As(err, &unknown) {
			return nil, err
		}
		if !errors.As(err, &unusable) {
			unusable = errIndex(err.Error())
		}
		if unusable != errIndexLabels {
			elsewhere = append(elsewhere, otherPlace{path, was})
		} else if l.inspecting {
			how := "with -webdataset"
			if l.o.WebDataset {
				how = "without -webdataset"
			}
			labelled = fmt.Errorf("imageloader: %s: %w: ask %s, as its loaders do, or remove it", path, errIndexLabels, how)
			continue
		}
		if unusable == errIndexVersion {
			l.o.Logger.Info("index is made anew", "archive", l.path, "index", path, "reason", string(unusable))
			continue
		}
		l.o.Logger.Warn("index is not used", "archive", l.path, "index", path, "reason", string(unusable))
	}
	return nil, labelled
}

// writeIndex writes the sidecar of an archive that was read to its end in the first place that can be written, and opens it; nil if there is none.
func (l *Loader) writeIndex(a *archive, x *indexer) *sidecar {
	paths := sidecarPaths(l, a)
	if x.count == 0 || len(paths) == 0 {
		return nil
	}
	sections, err := x.sections(a)
	if err != nil {
		l.o.Logger.Warn("index is not written", "archive", l.path, "error", err)
		return nil
	}
	for i, path := range paths {
		if i > 0 {
			_ = os.MkdirAll(filepath.Dir(path), 0o755) // the next call says more
		}
		var s *sidecar
		f, err := writeSidecar(path, a.sidecarMode(), sections)
		if err == nil {
			s, err = newSidecar(path, f)
		}
		if err == nil {
			l.o.Logger.Info("wrote index", "archive", l.path, "index", path)
			s.create, s.log = l.spoolBeside(a), l.o.Logger
			for _, older := range paths[i+1:] {
				if safefile.Check(older, indexFile) == nil {
					_ = os.Remove(older) // or it is looked at, and not used
				}
				s.elsewhere = append(s.elsewhere, otherPlace{older, nil})
			}
			return s
		}
		l.o.Logger.Info("index can't be written here", "archive", l.path, "index", path, "error", err)
	}
	return nil
}

// spoolBeside makes files without names where the index may lie.
func (l *Loader) spoolBeside(a *archive) func() (*os.File, error) {
	paths := sidecarPaths(l, a)
	if len(paths) == 0 {
		return nil
	}
	return func() (f *os.File, err error) {
		for i, path := range paths {
			if i > 0 {
				_ = os.MkdirAll(filepath.Dir(path), 0o755) // the next call says more
			}
			if f, err = namelessFile(path); err == nil {
				return f, nil
			}
		}
		return nil, err
	}
}

// namelessFile is a new file beside path, which is gone when it is closed.
func namelessFile(path string) (*os.File, error) {
	f, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*.tmp")
	if err != nil {
		return nil, err
	}
	if err := os.Remove(f.Name()); err != nil {
		_ = f.Close() // err says more
		return nil, err
	}
	return f, nil
}

// saveIndex writes the sidecar of an archive that was read to its end, and makes the index: of the sidecar, or where that can't be written of what is in memory.
func (l *Loader) saveIndex(a *archive, x *indexer) (*index, error) {
	if s := l.writeIndex(a, x); s != nil {
		sections, err := s.large()
		if err == nil {
			var out *index
			if out, err = x.build(a, sections); err == nil {
				out.side = s
				return out, nil
			}
		}
		_ = s.close() // only read
		l.o.Logger.Warn("index that was just written is not readable", "index", s.path, "error", err)
	}
	return x.build(a, x.stored())
}

// entriesOf is what keepEntries was given for sample i, in this run or in one before, written over buffer or into a larger one; empty if nothing was.
func (x *index) entriesOf(i int, buffer []byte) []byte {
	if x.side == nil {
		return nil
	}
	return x.side.blob(x.number(i), buffer)
}

// keepEntries keeps a blob of entry points for sample i. It may be called by several goroutines. The blob is copied.
func (x *index) keepEntries(i int, blob []byte) {
	if x.side != nil {
		x.side.keep(x.number(i), blob)
	}
}

// number is the number of sample i among the entries of the sidecar.
func (x *index) number(i int) int32 {
	if x.numbers == nil {
		return int32(i)
	}
	return x.numbers[i]
}

// close saves what was kept and closes the sidecar.
func (x *index) close() error {
	x.closing.Do(x.spool.close)
	if x.side == nil {
		return nil
	}
	return x.side.close()
}

// unsafeString is b as a string; b must not change any more.
func unsafeString(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }
