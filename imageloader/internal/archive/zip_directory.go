package archive

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math"
	"slices"
	"strings"
	"unicode/utf8"

	"golang.org/x/text/encoding/charmap"
)

// The signatures and sizes of a zip's structures: PKWARE's APPNOTE.TXT 6.3.10, 4.3.
const (
	zipLocalMagic   = "PK\x03\x04"
	zipEntryMagic   = "PK\x01\x02"
	zipEndMagic     = "PK\x05\x06"
	zip64EndMagic   = "PK\x06\x06"
	zip64LocatorTag = "PK\x06\x07"

	zipLocalBytes   = 30
	zipEntryBytes   = 46
	zipEndBytes     = 22
	zip64EndBytes   = 56
	zip64Locator    = 20
	maxZipComment   = 1<<16 - 1
	zipExtra64      = 1
	zipExtraUnicode = 0x7075
	zipStored       = 0
	zipDeflated     = 8
	zipBufferBytes  = 256 << 10 // more than an entry can have
	zipNamesBytes   = 8 << 10
	zipSpareBytes   = 32
	// maxDeflateRatio is the largest ratio of deflate: 258 bytes from two bits.
	maxDeflateRatio = 1032
)

// isZip reports whether a file starts with a member of a zip, or is a zip without a member.
func isZip(head []byte) bool {
	return bytes.HasPrefix(head, []byte(zipLocalMagic)) || bytes.HasPrefix(head, []byte(zipEndMagic))
}

// zipEntry holds the fields of a central directory entry that are needed for reading its content.
type zipEntry struct {
	offset       int64 // of the local header in the file
	packed, size int64 // bytes of the content, compressed and inflated
	crc          uint32
	nameSum      uint32 // nameSum of the name's bytes, which the local header repeats
	// lead estimates the number of bytes from the start of the local header to the content, with
	// zipSpareBytes for extra fields that only the local header has. Only the local header has the
	// exact number.
	lead   uint32
	method uint16
}

// zipHeader is a whole entry of the central directory.
type zipHeader struct {
	zipEntry
	name  string
	kind  Kind
	isDir bool
}

// zipRecord is a zipEntry in 32 bytes. It stores a size of 4 GiB or more as 4 GiB - 1, because no
// sample is that large.
type zipRecord struct {
	offset       int64
	packed, size uint32
	crc, nameSum uint32
	lead         uint16
	method       uint8 // stored or deflated
}

// record returns the short form of an entry.
func (e *zipEntry) record() zipRecord {
	short := func(n int64) uint32 { return uint32(min(n, math.MaxUint32)) }
	return zipRecord{e.offset, short(e.packed), short(e.size), e.crc, e.nameSum, uint16(min(e.lead, math.MaxUint16)),
		uint8(e.method)}
}

func (r *zipRecord) entry() zipEntry {
	return zipEntry{r.offset, int64(r.packed), int64(r.size), r.crc, r.nameSum, uint32(r.lead), uint16(r.method)}
}

// zipDirectory is the central directory of a zip without its names.
type zipDirectory struct {
	zipPlace
	records []zipRecord // by offset
}

// zipPlace is the position of a central directory in its file.
type zipPlace struct {
	at, size int64
	count    uint64 // of entries
	exact    bool   // count has all its bits; without zip64, only the low 16
}

// find returns the entry whose local header is at offset.
func (d *zipDirectory) find(offset int64) (e zipEntry, found bool) {
	i, found := slices.BinarySearchFunc(d.records, offset,
		func(r zipRecord, at int64) int { return cmp.Compare(r.offset, at) })
	if found {
		e = d.records[i].entry()
	}
	return e, found
}

// readZipDirectory reads the central directory at place.
func readZipDirectory(file io.ReaderAt, place zipPlace) (*zipDirectory, error) {
	d := &zipDirectory{zipPlace: place}
	d.records = make([]zipRecord, 0, min(place.count, uint64(place.size/zipEntryBytes)))
	r := newZipHeaders(file, place)
	for {
		h, _, _, err := r.entry()
		if err == io.EOF {
			break
		}
		if err != nil {
			return nil, err
		}
		if h.kind == Regular { // folders too, whose content is empty
			d.records = append(d.records, h.record())
		}
	}
	byOffset := func(a, b zipRecord) int { return cmp.Compare(a.offset, b.offset) }
	if !slices.IsSortedFunc(d.records, byOffset) {
		slices.SortFunc(d.records, byOffset)
	}
	return d, d.check()
}

// check returns an error if entries overlap each other or the directory. Overlapping entries would
// let a small file contain any number of large members.
func (d *zipDirectory) check() error {
	for i := range d.records {
		end := d.at
		if i+1 < len(d.records) {
			end = d.records[i+1].offset
		}
		e := d.records[i].entry()
		if err := e.within(end); err != nil {
			return err
		}
	}
	return nil
}

// within returns an error if the entry ends after end, the offset of the next structure in the
// file.
func (e *zipEntry) within(end int64) error {
	if e.packed > end-e.offset-zipLocalBytes {
		return fmt.Errorf("the zip's central directory is damaged: the member at byte %d has %d compressed bytes, "+
			"and overlaps the bytes from %d: fetch the file again, or repair it with `zip -FF`",
			e.offset, e.packed, end)
	}
	return nil
}

// nameSum returns a checksum of a name. It is CRC-32C, because processors have
// an instruction for its polynomial. Names are too short for the fast code of CRC-32 (IEEE).
func nameSum(name []byte) uint32 { return crc32.Checksum(name, crc32.MakeTable(crc32.Castagnoli)) }

// errZipEnd reports that a zip has no central directory at the end of the file, where it belongs.
var errZipEnd = fmt.Errorf("the zip has no central directory at its end: %w", io.ErrUnexpectedEOF)

// errZipSplit reports a zip of several files.
var errZipSplit = errors.New("it is a part of a split zip: join the parts with `zip -s 0 FIRST --out WHOLE.zip`")

// findZipDirectory finds the central directory by the record at the end of the file.
func findZipDirectory(file io.ReaderAt, size int64) (p zipPlace, err error) {
	tail := make([]byte, min(size, zipEndBytes+maxZipComment+zip64Locator))
	if n, err := file.ReadAt(tail, size-int64(len(tail))); n < len(tail) {
		return p, err
	}
	end := zipEnd(tail)
	if end < 0 {
		return p, errZipEnd
	}
	le, b := binary.LittleEndian, tail[end:]
	if disk := le.Uint16(b[4:]); disk != 0 && disk != 1<<16-1 {
		return p, errZipSplit
	}
	p = zipPlace{at: int64(le.Uint32(b[16:])), size: int64(le.Uint32(b[12:])), count: uint64(le.Uint16(b[10:]))}
	limit := size - int64(len(tail)-end) // the directory ends at or before limit
	if locator := end - zip64Locator; locator >= 0 && string(tail[locator:locator+4]) == zip64LocatorTag {
		limit = int64(le.Uint64(tail[locator+8:]))
		if p, err = readZip64End(file, limit, size-int64(len(tail)-locator)); err != nil {
			return p, err
		}
	}
	if p.at < 0 || p.size < 0 || p.at > limit || p.size > limit-p.at {
		return p, fmt.Errorf("the zip's central directory is at byte %d with %d bytes, and the file has %d: %w", p.at, p.size, size,
			io.ErrUnexpectedEOF)
	}
	return p, nil
}

// zipEnd returns the position of the last end record in the last bytes of a file, or -1. The file
// must include the record's comment.
func zipEnd(tail []byte) int {
	for i := len(tail) - zipEndBytes; i >= 0; i-- {
		if string(tail[i:i+4]) == zipEndMagic &&
			int(binary.LittleEndian.Uint16(tail[i+20:])) <= len(tail)-i-zipEndBytes {
			return i
		}
	}
	return -1
}

// readZip64End reads the end record of a zip64. It must end at or before limit.
func readZip64End(file io.ReaderAt, at, limit int64) (p zipPlace, err error) {
	if at < 0 || at > limit-zip64EndBytes {
		return p, errZipEnd
	}
	le, b := binary.LittleEndian, make([]byte, zip64EndBytes)
	if n, err := file.ReadAt(b, at); n < len(b) {
		return p, err
	}
	if string(b[:4]) != zip64EndMagic {
		return p, errZipEnd
	}
	if le.Uint32(b[16:]) != 0 {
		return p, errZipSplit
	}
	return zipPlace{at: int64(le.Uint64(b[48:])), size: int64(le.Uint64(b[40:])), count: le.Uint64(b[32:]),
		exact: true}, nil
}

// zipHeaders reads the entries of a central directory in order.
type zipHeaders struct {
	place zipPlace
	r     *bufio.Reader
	left  int64           // bytes
	read  uint64          // entries
	last  int             // bytes of the last entry, which are still in r
	names strings.Builder // the last names, which share an allocation
}

// newZipHeaders returns a reader of the entries of the directory at place.
func newZipHeaders(file io.ReaderAt, place zipPlace) *zipHeaders {
	return &zipHeaders{place: place, left: place.size, r: bufio.NewReaderSize(io.NewSectionReader(file,
		place.at, place.size), zipBufferBytes)}
}

// errZipEntry reports an entry of the central directory that can't be read.
var errZipEntry = errors.New(
	"the zip's central directory is damaged: fetch the file again, or repair it with `zip -FF`")

// next returns the next entry, and io.EOF at the end of the directory.
func (z *zipHeaders) next() (h zipHeader, err error) {
	h, fixed, rest, err := z.entry()
	if err != nil {
		return h, err
	}
	le := binary.LittleEndian
	nameBytes, extraBytes := int(le.Uint16(fixed[28:])), int(le.Uint16(fixed[30:]))
	h.name = zipName(z.text(rest[:nameBytes]), rest[nameBytes:nameBytes+extraBytes], le.Uint16(fixed[8:]), fixed[5])
	h.isDir = strings.HasSuffix(h.name, "/")
	return h, nil
}

// text returns a copy of a name's bytes. One allocation serves some hundred names.
func (z *zipHeaders) text(raw []byte) string {
	if z.names.Cap()-z.names.Len() < len(raw) {
		z.names.Reset()
		z.names.Grow(max(len(raw), zipNamesBytes))
	}
	at := z.names.Len()
	z.names.Write(raw)
	return z.names.String()[at:]
}

// entry returns the next entry, whose name is not set, and the entry's bytes: fixed has its fixed
// fields, and rest has its name, extra fields and comment. The bytes are valid until the next call.
// At the end of the directory it returns io.EOF.
func (z *zipHeaders) entry() (h zipHeader, fixed, rest []byte, err error) {
	_, _ = z.r.Discard(z.last) // always in the buffer
	z.last = 0
	if z.left == 0 {
		if z.read != z.place.count && (z.place.exact || uint16(z.read) != uint16(z.place.count)) {
			return h, nil, nil, fmt.Errorf("%w: it has %d entries, and its end says %d", errZipEntry, z.read, z.place.count)
		}
		return h, nil, nil, io.EOF
	}
	le := binary.LittleEndian
	b, err := z.peek(zipEntryBytes)
	if err != nil {
		return h, nil, nil, err
	}
	if string(b[:4]) != zipEntryMagic {
		return h, nil, nil, fmt.Errorf("%w: entry %d does not start with its signature", errZipEntry, z.read+1)
	}
	nameBytes, extraBytes, commentBytes := int(le.Uint16(b[28:])), int(le.Uint16(b[30:])), int(le.Uint16(b[32:]))
	if b, err = z.peek(zipEntryBytes + nameBytes + extraBytes + commentBytes); err != nil {
		return h, nil, nil, err
	}
	z.last = len(b)
	z.left -= int64(len(b))
	z.read++
	if z.read > MaxMembers {
		return h, nil, nil, fmt.Errorf("more than %d members", MaxMembers)
	}
	rest = b[zipEntryBytes:]
	h.zipEntry = zipEntry{
		offset: int64(le.Uint32(b[42:])), packed: int64(le.Uint32(b[20:])), size: int64(le.Uint32(b[24:])),
		crc: le.Uint32(b[16:]), method: le.Uint16(b[10:]), nameSum: nameSum(rest[:nameBytes]),
		lead: uint32(zipLocalBytes + nameBytes + extraBytes + zipSpareBytes),
	}
	if !h.widen(rest[nameBytes : nameBytes+extraBytes]) {
		return h, nil, nil, fmt.Errorf("%w: entry %d has wrong sizes or a wrong offset", errZipEntry, z.read)
	}
	h.kind = zipKind(le.Uint16(b[8:]), h.method, b[5], le.Uint32(b[38:])>>16)
	return h, b[:zipEntryBytes], rest, nil
}

// peek returns the next n bytes of the directory.
func (z *zipHeaders) peek(n int) ([]byte, error) {
	if int64(n) > z.left {
		return nil, fmt.Errorf("%w: entry %d is cut off", errZipEntry, z.read+1)
	}
	b, err := z.r.Peek(n)
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	return b, err
}

// widen replaces numbers that do not fit in 32 bits by the numbers of the zip64 extra field. It
// returns false if a number is missing or impossible.
func (e *zipEntry) widen(extra []byte) bool {
	const wide = 1<<32 - 1
	field := zipExtra(extra, zipExtra64)
	for _, n := range []*int64{&e.size, &e.packed, &e.offset} {
		if *n != wide {
			continue
		}
		if len(field) < 8 {
			return false
		}
		*n, field = int64(binary.LittleEndian.Uint64(field)), field[8:]
	}
	return e.size >= 0 && e.packed >= 0 && e.offset >= 0
}

// zipExtra returns the content of an extra field, or nil if there is none with this tag.
func zipExtra(extra []byte, tag uint16) []byte {
	for le := binary.LittleEndian; len(extra) >= 4; {
		n := int(le.Uint16(extra[2:]))
		if n > len(extra)-4 {
			return nil
		}
		if le.Uint16(extra) == tag {
			return extra[4 : 4+n]
		}
		extra = extra[4+n:]
	}
	return nil
}

// Values of the field "version made by" that change how the name and the kind of an entry are read.
const (
	madeOnDOS  = 0
	madeOnUnix = 3
	madeOnMac  = 19
)

// zipName decodes the name of an entry. A name is UTF-8 if its flag or an extra field says so, and
// CP437 otherwise. Programs on Unix and macOS write UTF-8 without the flag, so their names are
// CP437 only if they are not valid UTF-8. Old programs on Windows write backslashes between
// folders.
func zipName(name string, extra []byte, flags uint16, made byte) string {
	const utf8Flag = 1 << 11
	if field := zipExtra(extra, zipExtraUnicode); len(field) > 5 && field[0] == 1 &&
		binary.LittleEndian.Uint32(field[1:]) == crc32.ChecksumIEEE([]byte(name)) && utf8.Valid(field[5:]) {
		name = string(field[5:])
	} else if flags&utf8Flag == 0 && (made != madeOnUnix && made != madeOnMac || !utf8.ValidString(name)) &&
		!isASCII(name) {
		name, _ = charmap.CodePage437.NewDecoder().String(name) // every byte is a character
	}
	if made == madeOnDOS && !strings.Contains(name, "/") {
		name = strings.ReplaceAll(name, `\`, "/")
	}
	return name
}

func isASCII(s string) bool {
	for i := range len(s) {
		if s[i] >= utf8.RuneSelf {
			return false
		}
	}
	return true
}

// zipKind returns the kind of an entry.
func zipKind(flags, method uint16, made byte, mode uint32) Kind {
	const (
		encrypted = 1 << 0
		masked    = 1 << 13 // the local header is encrypted too
		patch     = 1 << 5
		typeMask  = 0o170000
		symlink   = 0o120000
		regular   = 0o100000
	)
	kind := mode & typeMask
	switch {
	case flags&(encrypted|masked) != 0:
		return Encrypted
	case (made == madeOnUnix || made == madeOnMac) && kind == symlink:
		return Symlink
	case (made == madeOnUnix || made == madeOnMac) && kind != 0 && kind != regular && kind != 0o040000:
		return Other
	case method != zipStored && method != zipDeflated || flags&patch != 0:
		return OtherMethod
	}
	return Regular
}
