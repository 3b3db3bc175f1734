package imageloader

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"
	"unsafe"

	"crypto/sha256"
	"encoding/hex"
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
	shardBytes      = 32 // and its name
)

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

// writeSidecar writes an index file beside others, so that a reader sees the whole of it or none, whatever else ends the program or the machine.
func writeSidecar(path string, mode fs.FileMode, sections []section) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*.tmp")
	if err != nil {
		return err
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
		return err
	}
	var table []byte
	for _, s := range sections {
		begin := w.at
		w.crc = 0
		if err := s.write(w); err != nil {
			return err
		}
		table = binary.LittleEndian.AppendUint32(table, s.kind)
		table = binary.LittleEndian.AppendUint32(table, w.crc)
		table = binary.LittleEndian.AppendUint64(table, begin)
		table = binary.LittleEndian.AppendUint64(table, w.at-begin)
		table = binary.LittleEndian.AppendUint64(table, s.count)
	}
	if err := w.flush(); err != nil {
		return err
	}
	head := []byte(sidecarMagic)
	head = binary.LittleEndian.AppendUint32(head, sidecarVersion)
	head = binary.LittleEndian.AppendUint32(head, uint32(len(sections)))
	head = binary.LittleEndian.AppendUint64(head, w.at)
	head = binary.LittleEndian.AppendUint32(head, crc32.ChecksumIEEE(table))
	head = binary.LittleEndian.AppendUint32(head, crc32.ChecksumIEEE(head))
	if _, err := f.WriteAt(append(head, table...), 0); err != nil {
		return err
	}
	if err := f.Chmod(mode); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
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
	marks := 0
	for i := range a.shards {
		s := &a.shards[i]
		marks += len(s.marks)
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
	return []section{
		{sectionShards, uint64(len(a.shards)), whole(shards)},
		{sectionDirs, uint64(len(x.dirList)), whole(dirs)},
		{sectionCounts, 3, whole(counts)},
		{sectionEntries, uint64(len(x.entries)), func(w io.Writer) error {
			b := make([]byte, 0, entryBytes)
			for i := range x.entries {
				e := &x.entries[i]
				b = binary.LittleEndian.AppendUint64(b[:0], uint64(e.offset))
				b = binary.LittleEndian.AppendUint64(b, uint64(e.size))
				b = binary.LittleEndian.AppendUint32(b, e.name)
				b = binary.LittleEndian.AppendUint32(b, uint32(e.label))
				b = binary.LittleEndian.AppendUint32(b, e.crc)
				b = binary.LittleEndian.AppendUint16(b, e.shard)
				b = append(b, byte(e.kind), e.flags)
				if _, err := w.Write(b); err != nil {
					return err
				}
			}
			return nil
		}},
		{sectionNames, uint64(len(x.names)), whole(x.names)},
		{sectionHeads, uint64(len(x.entries)), func(w io.Writer) error {
			for i := range x.entries {
				var h imageHead
				if i < len(x.heads) {
					h = x.heads[i]
				}
				if _, err := w.Write(h[:]); err != nil {
					return err
				}
			}
			return nil
		}},
		{sectionCheckpoints, uint64(marks), func(w io.Writer) error {
			at := uint64(0)
			b := make([]byte, 0, checkpointBytes)
			for i := range a.shards {
				for k := range a.shards[i].marks {
					c := &a.shards[i].marks[k]
					b = binary.LittleEndian.AppendUint64(b[:0], uint64(c.bit))
					b = binary.LittleEndian.AppendUint64(b, uint64(c.output))
					b = binary.LittleEndian.AppendUint64(b, at)
					b = binary.LittleEndian.AppendUint32(b, uint32(len(c.window)))
					b = binary.LittleEndian.AppendUint32(b, uint32(i))
					at += uint64(len(c.window))
					if _, err := w.Write(b); err != nil {
						return err
					}
				}
			}
			return nil
		}},
		{sectionWindows, uint64(marks), func(w io.Writer) error {
			for i := range a.shards {
				for k := range a.shards[i].marks {
					if _, err := w.Write(a.shards[i].marks[k].window); err != nil {
						return err
					}
				}
			}
			return nil
		}},
	}, nil
}

// labelling says where labels come from: 0 directories, 1 as in WebDataset.
func labelling(web bool) uint64 {
	if web {
		return 1
	}
	return 0
}

var formats = []string{formatTar, formatTarGz, formatZstd}

func formatNumber(format string) uint32 { return uint32(slices.Index(formats, format)) }

// sidecar is an open index file.
type sidecar struct {
	path   string
	file   *os.File
	places map[uint32]place

	mu    sync.Mutex
	blobs map[int32][]byte // of entries, that the file does not have yet
	bytes int
	dirty bool
	once  sync.Once
	err   error // of closing
}

// openSidecar checks an index file's header and table, but not what is in it.
func openSidecar(path string) (_ *sidecar, err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
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

// section reads one whole section and checks it. Its items have at least least bytes each.
func (s *sidecar) section(kind uint32, least uint64) ([]byte, int, error) {
	p, ok := s.places[kind]
	if !ok || least > 0 && p.count > p.size/least {
		return nil, 0, errIndexDamaged
	}
	b := make([]byte, p.size)
	if _, err := s.file.ReadAt(b, int64(p.offset)); err != nil && err != io.EOF || crc32.ChecksumIEEE(b) != p.crc {
		return nil, 0, errIndexDamaged
	}
	return b, int(p.count), nil
}

// load makes an indexer, as if the archive had been read through, and sets what the archive knows of its shards. Errors that are errIndex mean: not usable.
func (s *sidecar) load(a *archive, classes []string, web bool) (*indexer, error) {
	x, err := newIndexer(a.path, classes)
	if err != nil {
		return nil, err
	}
	le := binary.LittleEndian
	b, n, err := s.section(sectionShards, shardBytes)
	if err != nil {
		return nil, err
	}
	if n != len(a.shards) {
		return nil, errIndexStale
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
	if b, n, err = s.section(sectionDirs, 4); err != nil {
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
		x.dirs[name] = int32(len(x.dirList))
		x.dirList = append(x.dirList, name)
		x.claimed = append(x.claimed, le.Uint32(b)&1 != 0)
		b = b[4+length:]
	}
	if b, _, err = s.section(sectionCounts, 8); err != nil || len(b) != 24 {
		return nil, errIndexDamaged
	}
	if le.Uint64(b[16:]) != labelling(web) {
		return nil, errIndexLabels
	}
	if web {
		x.web = &webGroup{image: -1}
	}
	x.ignored, x.orphans = int(le.Uint64(b)), int(le.Uint64(b[8:]))
	if x.ignored < 0 || x.orphans < 0 {
		return nil, errIndexDamaged
	}
	if x.names, _, err = s.section(sectionNames, 0); err != nil {
		return nil, err
	}
	if err := s.loadEntries(a, x); err != nil {
		return nil, err
	}
	if x.heads, err = s.heads(); err != nil {
		return nil, err
	}
	if len(x.heads) != len(x.entries) {
		return nil, errIndexDamaged
	}
	return x, s.loadCheckpoints(a)
}

// heads are the headers of images, by entry.
func (s *sidecar) heads() ([]imageHead, error) {
	b, n, err := s.section(sectionHeads, headBytes)
	if err != nil || len(b) != n*headBytes {
		return nil, errors.Join(err, errIndexDamaged)
	}
	return unsafe.Slice((*imageHead)(unsafe.Pointer(unsafe.SliceData(b))), n), nil
}

func (s *sidecar) loadEntries(a *archive, x *indexer) error {
	le := binary.LittleEndian
	b, n, err := s.section(sectionEntries, entryBytes)
	if err != nil {
		return err
	}
	if len(b) != n*entryBytes || n > maxMembers {
		return errIndexDamaged
	}
	x.entries = make([]entry, n)
	before := uint32(0)
	for i := range x.entries {
		r := b[i*entryBytes : (i+1)*entryBytes : (i+1)*entryBytes]
		e := entry{offset: int64(le.Uint64(r)), size: int64(le.Uint64(r[8:])), name: le.Uint32(r[16:]), label: int32(le.Uint32(r[20:])), crc: le.Uint32(r[24:]),
			shard: le.Uint16(r[28:]), kind: memberKind(r[30]), flags: r[31]}
		if e.offset < 0 || e.size < 0 || e.offset+e.size < 0 || uint64(e.name) > uint64(len(x.names)) || e.name < before || e.label < 0 || int(e.label) >= len(x.dirList) ||
			int(e.shard) >= len(a.shards) || e.kind > kindOther {
			return errIndexDamaged
		}
		sh := &a.shards[e.shard]
		if e.kind == kindFile && e.offset+e.size > sh.mostBytes() {
			return errIndexDamaged
		}
		before = e.name
		x.entries[i] = e
		if x.given != nil && e.flags&entryImage != 0 {
			if class := x.dirList[e.label]; e.label >= 0 {
				if _, known := x.given[class]; !known {
					end := len(x.names)
					if i+1 < n {
						end = int(min(uint64(len(x.names)), uint64(le.Uint32(b[(i+1)*entryBytes+16:]))))
					}
					return &UnknownClassError{File: x.file, Name: string(x.names[e.name:max(end, int(e.name))]), Class: class, Known: x.list}
				}
			}
		}
	}
	return nil
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

func (s *sidecar) loadCheckpoints(a *archive) error {
	le := binary.LittleEndian
	b, n, err := s.section(sectionCheckpoints, checkpointBytes)
	if err != nil {
		return err
	}
	windows, ok := s.places[sectionWindows]
	if !ok || len(b) != n*checkpointBytes {
		return errIndexDamaged
	}
	for i := range a.shards {
		a.shards[i].marks = nil
	}
	for ; len(b) > 0; b = b[checkpointBytes:] {
		shard := le.Uint32(b[28:])
		at, size := le.Uint64(b[16:]), uint64(le.Uint32(b[24:]))
		if uint64(shard) >= uint64(len(a.shards)) || at > windows.size || size > windows.size-at || size > 4*windowBytes {
			return errIndexDamaged
		}
		sh := &a.shards[shard]
		c := checkpoint{bit: int64(le.Uint64(b)), output: int64(le.Uint64(b[8:])), at: int64(windows.offset + at), size: int32(size), from: s.file}
		if c.bit < 0 || c.bit>>3 > sh.info.Size() || c.output < 0 {
			return errIndexDamaged
		}
		if k := len(sh.marks); k > 0 && (sh.marks[k-1].bit > c.bit || sh.marks[k-1].output > c.output) || k == 0 && c.output != 0 {
			return errIndexDamaged
		}
		sh.marks = append(sh.marks, c)
	}
	for i := range a.shards {
		if sh := &a.shards[i]; sh.format == formatTarGz != (len(sh.marks) > 0) {
			return errIndexDamaged
		}
	}
	return nil
}

// close saves what was kept. It may be called more than once.
func (s *sidecar) close() error {
	s.once.Do(func() {
		s.err = s.save()
		if err := s.file.Close(); s.err == nil {
			s.err = err
		}
	})
	return s.err
}

// blob is what the file keeps for an entry; nil if there is none.
func (s *sidecar) blob(number int32) []byte {
	s.mu.Lock()
	b := s.blobs[number]
	s.mu.Unlock()
	if b != nil {
		return b
	}
	ends, ok := s.places[sectionBlobEnds]
	blobs := s.places[sectionBlobs]
	if !ok || uint64(number) >= ends.count || ends.count > ends.size/8 {
		return nil
	}
	var pair [16]byte
	from := pair[:8]
	if number == 0 {
		if _, err := s.file.ReadAt(pair[8:], int64(ends.offset)); err != nil {
			return nil
		}
	} else if _, err := s.file.ReadAt(pair[:], int64(ends.offset)+8*int64(number-1)); err != nil {
		return nil
	}
	begin, end := binary.LittleEndian.Uint64(from), binary.LittleEndian.Uint64(pair[8:])
	if begin >= end || end > blobs.size || end-begin > 1<<24 {
		return nil
	}
	b = make([]byte, end-begin)
	if _, err := s.file.ReadAt(b, int64(blobs.offset+begin)); err != nil {
		return nil
	}
	return b
}

// keep takes a blob for an entry, up to a bound for all of them, until save.
func (s *sidecar) keep(number int32, blob []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(blob) == 0 || s.blobs[number] != nil || s.bytes+len(blob) > mostEntryBlobs {
		return
	}
	if s.blobs == nil {
		s.blobs = map[int32][]byte{}
	}
	s.blobs[number] = bytes.Clone(blob)
	s.bytes += len(blob)
	s.dirty = true
}

// save writes the file anew with the blobs that were kept. What the sidecar has open stays valid.
func (s *sidecar) save() error {
	s.mu.Lock()
	dirty := s.dirty
	s.dirty = false
	s.mu.Unlock()
	if !dirty {
		return nil
	}
	var sections []section
	for _, kind := range []uint32{sectionShards, sectionDirs, sectionCounts, sectionEntries, sectionNames, sectionHeads, sectionCheckpoints, sectionWindows} {
		p := s.places[kind]
		sections = append(sections, section{kind, p.count, func(w io.Writer) error {
			_, err := io.Copy(w, io.NewSectionReader(s.file, int64(p.offset), int64(p.size)))
			return err
		}})
	}
	n := int32(s.places[sectionEntries].count)
	var ends []byte
	at := uint64(0)
	blobs := section{sectionBlobs, 0, func(w io.Writer) error {
		for i := range n {
			b := s.blob(i)
			if _, err := w.Write(b); err != nil {
				return err
			}
			at += uint64(len(b))
			ends = binary.LittleEndian.AppendUint64(ends, at)
		}
		return nil
	}}
	sections = append(sections, blobs, section{sectionBlobEnds, uint64(n), func(w io.Writer) error {
		_, err := w.Write(ends)
		return err
	}})
	info, err := s.file.Stat()
	if err != nil {
		return err
	}
	return writeSidecar(s.path, info.Mode().Perm(), sections)
}

// sidecarMode is for an index file: it holds names and bytes of the archive, so nobody may read it who may not read the archive.
func (a *archive) sidecarMode() fs.FileMode {
	mode := fs.FileMode(0o044)
	for i := range a.shards {
		mode &= a.shards[i].info.Mode().Perm()
	}
	return mode | 0o600
}

// sidecarPaths are where the index of an archive may lie, the best place first.
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

// loadIndex looks for a sidecar; nil without an error if there is none that fits.
func (l *Loader) loadIndex(a *archive) (*index, error) {
	for _, path := range sidecarPaths(l, a) {
		began := time.Now()
		s, err := openSidecar(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err == nil {
			var x *indexer
			if x, err = s.load(a, l.o.Classes, l.o.WebDataset); err == nil {
				x.maxPixels = l.o.MaxPixels
				out := x.finish(a)
				out.side = s
				if len(out.entries) == 0 {
					_ = s.close() // only read
					return nil, l.noSamples(len(x.entries)+out.ignored, x.orphans)
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
		if unusable == errIndexVersion {
			l.o.Logger.Info("index is made anew", "archive", l.path, "index", path, "reason", string(unusable))
			continue
		}
		l.o.Logger.Warn("index is not used", "archive", l.path, "index", path, "reason", string(unusable))
	}
	return nil, nil
}

// saveIndex writes the sidecar of an archive that was read to its end, in the first place that can be written, and makes the index. An index that can't be
// written stays in memory.
func (l *Loader) saveIndex(a *archive, x *indexer) *index {
	x.maxPixels = l.o.MaxPixels
	var paths []string
	if len(x.entries) > 0 {
		paths = sidecarPaths(l, a)
	}
	var sections []section
	if len(paths) > 0 {
		var err error
		if sections, err = x.sections(a); err != nil {
			l.o.Logger.Warn("index is not written", "archive", l.path, "error", err)
			paths = nil
		}
	}
	for i, path := range paths {
		err := error(nil)
		if i > 0 {
			err = os.MkdirAll(filepath.Dir(path), 0o755)
		}
		if err == nil {
			err = writeSidecar(path, a.sidecarMode(), sections)
		}
		if err != nil {
			l.o.Logger.Info("index can't be written here", "archive", l.path, "index", path, "error", err)
			continue
		}
		l.o.Logger.Info("wrote index", "archive", l.path, "index", path)
		s, err := openSidecar(path)
		if err == nil {
			if err = s.loadCheckpoints(a); err != nil { // from the file from now on, not from memory
				_ = s.close() // only read
			}
		}
		if err != nil {
			l.o.Logger.Warn("index that was just written is not readable", "index", path, "error", err)
			break
		}
		out := x.finish(a)
		out.side = s
		return out
	}
	return x.finish(a)
}

// entriesOf is what keepEntries was given for sample i, in this run or in one before; nil if nothing was.
func (x *index) entriesOf(i int) []byte {
	if x.side == nil {
		return nil
	}
	return x.side.blob(x.number(i))
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
	if x.side == nil {
		return nil
	}
	return x.side.close()
}

// unsafeString is b as a string; b must not change any more.
func unsafeString(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }
