package archive

import (
	"bufio"
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/klauspost/compress/flate"

	"github.com/torchstream/torchstream/internal/imagecapi"
)

// MemberError reports damage in the content of one member. The other members can be read.
type MemberError struct{ Err error }

func (e *MemberError) Error() string { return e.Err.Error() }
func (e *MemberError) Unwrap() error { return e.Err }

// MemberDamage returns the MemberError in err, or nil.
func MemberDamage(err error) *MemberError {
	var e *MemberError
	errors.As(err, &e) // or e stays nil
	return e
}

// damagedMember returns a MemberError.
func damagedMember(format string, args ...any) error {
	return &MemberError{fmt.Errorf(format, args...)}
}

// zipWalk walks the members of a zip in the order of its central directory. A walk that lists the
// members of an ordinary zip parses the directory once and keeps none of it.
type zipWalk struct {
	directory func() (*zipDirectory, error) // reads the whole directory at the first call
	headers   *zipHeaders
	previous  zipEntry // the last entry with content that the walk has reached
	checked   bool     // the whole directory is known to have no overlap
	file      io.ReaderAt
	reader    *contextReader // reads the current content; its field reader is nil before the first read
	buffered  *bufio.Reader
	inflater  io.ReadCloser // nil before the first deflated member
	entry     zipEntry      // the current entry
	content   io.Reader     // of the current entry; nil before its first read
	left      int64         // bytes of the content to read
	sum       uint32        // CRC-32 of the content's bytes that were read
}

// startZip creates the readers of the zip in a.at.file.
func (a *Archive) startZip() error {
	a.at.format, a.at.in = Zip, &stream{}
	shard, file, size := a.at.index, a.at.file, a.shards[a.at.index].Info.Size()
	place, err := a.zips.place(shard, file, size)
	if err != nil {
		return a.Fail(err)
	}
	a.at.zip = &zipWalk{headers: newZipHeaders(file, place), file: file, reader: a.at.packed,
		directory: func() (*zipDirectory, error) { return a.zips.directory(shard, file, size) },
		previous:  zipEntry{offset: -zipLocalBytes}} // ends where the file starts
	return nil
}

// nextOfZip moves to the next entry of a zip. It finds no member if the entry is a directory or
// metadata of macOS, or at the end of the shard.
func (a *Archive) nextOfZip() (m Member, found bool, err error) {
	z := a.at.zip
	h, err := z.next()
	if err == io.EOF {
		return m, false, a.advance()
	}
	if err != nil {
		return m, false, a.Fail(err)
	}
	a.member.position++
	a.member.name = h.name
	if len(h.name) > MaxNameBytes {
		a.member.name = h.name[:MaxNameBytes]
		return m, false, a.Fail(fmt.Errorf("a member's path has %d bytes, over the limit of %d",
			len(h.name), MaxNameBytes))
	}
	name := cleaned(h.name)
	if name == "__MACOSX" || strings.HasPrefix(name, "__MACOSX/") {
		return m, false, nil
	}
	a.folders.entry(name)
	if h.isDir {
		a.folders.folder(name)
		return m, false, nil
	}
	a.at.in.offset = h.offset // for Progress
	m = Member{Name: name, Shard: a.at.index, Offset: h.offset, Kind: h.kind}
	if m.Kind == Regular {
		m.Size, m.Stored = h.size, h.method == zipStored
		z.entry, z.content, z.left, z.sum = h.zipEntry, nil, h.size, 0
	}
	a.member.begin(&m)
	return m, true, nil
}

// next returns the next entry. It returns an error if the entry before it overlaps the following
// bytes. The whole directory is read only if its entries are not in the order of their offsets.
func (z *zipWalk) next() (h zipHeader, err error) {
	h, err = z.headers.next()
	following := h.offset
	switch {
	case err == io.EOF:
		following = z.headers.place.at
	case err != nil, h.kind != Regular:
		return h, err
	}
	previous := z.previous
	z.previous = h.zipEntry
	if z.checked {
		return h, err
	}
	if following < previous.offset {
		z.checked = true
		_, wrong := z.directory()
		return h, cmp.Or(wrong, err)
	}
	return h, cmp.Or(previous.within(following), err)
}

// read fills p from the current member.
func (z *zipWalk) read(p []byte) error {
	if len(p) == 0 {
		return nil
	}
	if z.content == nil {
		if err := z.open(); err != nil {
			return err
		}
	}
	n, err := io.ReadFull(z.content, p)
	z.sum = crc32.Update(z.sum, crc32.IEEETable, p[:n])
	z.left -= int64(n)
	if err != nil {
		return z.damage(err)
	}
	if z.left > 0 {
		return nil
	}
	switch n, err := z.content.Read(make([]byte, 1)); {
	case n > 0:
		return errLongMember(&z.entry)
	case err != io.EOF:
		return z.damage(err)
	case z.sum != z.entry.crc:
		return errMemberSum
	}
	return nil
}

// readAt fills p with the content of a member. at is the member's Offset.
func (z *zipWalk) readAt(at int64, p []byte) error {
	d, err := z.directory()
	if err != nil {
		return err
	}
	e, found := d.find(at)
	if !found || e.size != int64(len(p)) {
		return ErrSourceChanged
	}
	z.entry, z.content, z.left, z.sum = e, nil, e.size, 0
	return z.read(p)
}

// damage returns a MemberError if err shows that the member's content is damaged, and otherwise
// err.
func (z *zipWalk) damage(err error) error {
	var corrupt flate.CorruptInputError
	switch {
	case errors.As(err, &corrupt):
		return damagedMember("its deflated bytes are damaged: %w", err)
	case err == io.EOF, errors.Is(err, io.ErrUnexpectedEOF):
		return errShortMember(&z.entry)
	}
	return err
}

// open starts reading the content of the current entry.
func (z *zipWalk) open() error {
	e := &z.entry
	if err := e.check(); err != nil {
		return err
	}
	head, err := readLocal(z.file, e, nil)
	if err != nil {
		return err
	}
	z.reader.reader = io.NewSectionReader(z.file, e.offset+int64(head), e.packed)
	if e.method == zipStored {
		z.content = z.reader
		return nil
	}
	if z.buffered == nil {
		z.buffered = bufio.NewReaderSize(z.reader, 64<<10)
		z.inflater = flate.NewReader(z.buffered)
	} else {
		z.buffered.Reset(z.reader)
		if err := z.inflater.(flate.Resetter).Reset(z.buffered, nil); err != nil {
			return err
		}
	}
	z.content = z.inflater
	return nil
}

// errMemberSum reports a content whose checksum differs from the checksum in the zip.
var errMemberSum = damagedMember("its bytes differ from their checksum in the zip")

func errShortMember(e *zipEntry) error {
	return damagedMember("its content ends before the %d bytes that the zip's directory declares", e.size)
}

func errLongMember(e *zipEntry) error {
	return damagedMember("its content has more than the %d bytes that the zip's directory declares", e.size)
}

// check returns an error if an entry declares sizes that its method can't have.
func (e *zipEntry) check() error {
	if e.method == zipStored && e.packed != e.size {
		return damagedMember("it is stored, and the zip's directory declares %d bytes and %d in the file",
			e.size, e.packed)
	}
	if e.method == zipDeflated && (e.size/maxDeflateRatio > e.packed || e.packed > 2*e.size+64<<10) {
		return damagedMember("the zip's directory declares %d bytes, which do not deflate to %d", e.size, e.packed)
	}
	return nil
}

// readLocal returns the size of an entry's local header, and checks that it has the entry's name.
// head has the first bytes of the header, if they were already read.
func readLocal(file io.ReaderAt, e *zipEntry, head []byte) (size int, err error) {
	read := func(n int) error {
		if len(head) >= n {
			return nil
		}
		head = make([]byte, n)
		got, err := file.ReadAt(head, e.offset)
		if got < n {
			return err
		}
		return nil
	}
	if err := read(zipLocalBytes); err != nil {
		return 0, err
	}
	if string(head[:4]) != zipLocalMagic {
		return 0, damagedMember("it has no local header at byte %d", e.offset)
	}
	le := binary.LittleEndian
	nameEnd := zipLocalBytes + int(le.Uint16(head[26:]))
	size = nameEnd + int(le.Uint16(head[28:]))
	if err := read(nameEnd); err != nil {
		return 0, err
	}
	if nameSum(head[zipLocalBytes:nameEnd]) != e.nameSum {
		return 0, damagedMember("the local header at byte %d has another name", e.offset)
	}
	return size, nil
}

// zipDirectories holds the central directories of the shards that were read. It is safe for
// concurrent use.
type zipDirectories struct {
	mu     sync.Mutex
	places map[int]zipPlace
	of     map[int]*zipDirectory
	reads  sync.Mutex // held while a directory is read
}

// place returns the position of a shard's central directory, and finds it at the first call.
func (z *zipDirectories) place(shard int, file io.ReaderAt, size int64) (zipPlace, error) {
	z.mu.Lock()
	p, known := z.places[shard]
	z.mu.Unlock()
	if known {
		return p, nil
	}
	p, err := findZipDirectory(file, size)
	if err != nil {
		return p, err
	}
	z.mu.Lock()
	defer z.mu.Unlock()
	if z.places == nil {
		z.places = map[int]zipPlace{}
	}
	z.places[shard] = p
	return p, nil
}

// directory returns the central directory of a shard, and reads it at the first call.
func (z *zipDirectories) directory(shard int, file io.ReaderAt, size int64) (*zipDirectory, error) {
	if d := z.known(shard); d != nil {
		return d, nil
	}
	z.reads.Lock()
	defer z.reads.Unlock()
	if d := z.known(shard); d != nil {
		return d, nil
	}
	place, err := z.place(shard, file, size)
	if err != nil {
		return nil, err
	}
	d, err := readZipDirectory(file, place)
	if err != nil {
		return nil, err
	}
	z.mu.Lock()
	defer z.mu.Unlock()
	if z.of == nil {
		z.of = map[int]*zipDirectory{}
	}
	z.of[shard] = d
	return d, nil
}

func (z *zipDirectories) known(shard int) *zipDirectory {
	z.mu.Lock()
	defer z.mu.Unlock()
	return z.of[shard]
}

// ReadZipped fills p with the content of a member of a zip. at is the member's Offset, and the
// length of p must be its size. If the member is damaged, the error is a [MemberError].
func (r *Reader) ReadZipped(shard int, at int64, p []byte) error {
	r.packed.begin, r.packed.end = 0, 0
	began := time.Now()
	d, e, err := r.zipEntry(shard, at)
	if err != nil {
		return err
	}
	if e.method == zipDeflated { // FileTime counts only deflated members
		r.timed.spent += time.Since(began)
	}
	if e.size != int64(len(p)) {
		return ErrSourceChanged
	}
	if err := e.check(); err != nil {
		return err
	}
	var begin int64
	if e.method == zipStored {
		begin, err = r.readStored(d, &e, p)
	} else {
		begin, err = r.readDeflated(d, &e, p)
	}
	if err != nil {
		return err
	}
	if crc32.ChecksumIEEE(p) != e.crc {
		return errMemberSum
	}
	r.packed.begin, r.packed.end = begin, begin+e.packed
	return nil
}

// Packed returns the range of the bytes, in the file, of the member that ReadZipped has read last,
// compressed or stored. The range is empty if the last call of ReadZipped failed.
func (r *Reader) Packed() (begin, end int64) { return r.packed.begin, r.packed.end }

// zipEntry opens a zip, and returns its directory and the entry whose local header is at an offset.
func (r *Reader) zipEntry(shard int, at int64) (d *zipDirectory, e zipEntry, err error) {
	if err := r.enter(shard); err != nil {
		return nil, e, err
	}
	if d, err = r.a.zips.directory(shard, r.file, r.a.shards[shard].Info.Size()); err != nil {
		return nil, e, err
	}
	e, found := d.find(at)
	if !found {
		return nil, e, ErrSourceChanged
	}
	return d, e, nil
}

// minUncopied is the minimum size of a stored member whose content and local header are read by two
// requests. Two requests take less time than copying such a content.
const minUncopied = 16 << 10

// readStored fills p with the content of a stored entry. begin is the content's offset in the file.
func (r *Reader) readStored(d *zipDirectory, e *zipEntry, p []byte) (begin int64, err error) {
	if len(p) < minUncopied || IsURL(r.a.shards[r.shard].Path) {
		packed, begin, err := r.readPacked(r.file, d, e)
		copy(p, packed)
		return begin, err
	}
	// The content comes first, because its pages nearly always have the local header too. A disk
	// then reads once.
	guess := e.offset + int64(e.lead) - zipSpareBytes + r.extra
	if guess < e.offset || guess > d.at-e.size {
		guess = 0
	} else if err := readFull(r.file, p, guess); err != nil {
		return 0, err
	}
	if begin, err = r.contentOf(d, e); err != nil {
		return 0, err
	}
	r.extra = begin - (e.offset + int64(e.lead) - zipSpareBytes)
	if begin == guess {
		return begin, nil
	}
	return begin, readFull(r.file, p, begin)
}

// readDeflated fills p with the content of a deflated entry. begin is the offset of its compressed
// bytes in the file.
func (r *Reader) readDeflated(d *zipDirectory, e *zipEntry, p []byte) (begin int64, err error) {
	packed, begin, err := r.readPacked(&r.timed, d, e)
	if err != nil {
		return 0, err
	}
	return begin, r.unzip(e, packed, p)
}

// contentOf reads the local header of an entry, and returns the offset of the entry's compressed
// bytes in the file.
func (r *Reader) contentOf(d *zipDirectory, e *zipEntry) (begin int64, err error) {
	r.zipped = slices.Grow(r.zipped[:0], int(e.lead))[:min(int64(e.lead), d.at-e.offset)]
	if err := readFull(r.file, r.zipped, e.offset); err != nil {
		return 0, err
	}
	head, err := readLocal(r.file, e, r.zipped)
	if err != nil {
		return 0, err
	}
	return e.offset + int64(head), e.before(d, head)
}

// before returns an error if the compressed bytes of an entry, which follow a local header of head
// bytes, do not end before the central directory.
func (e *zipEntry) before(d *zipDirectory, head int) error {
	if int64(head)+e.packed > d.at-e.offset {
		return damagedMember("its content overlaps the zip's central directory")
	}
	return nil
}

// readPacked reads the compressed bytes of an entry. begin is their offset in the file. Nearly
// always, one read gets the local header and the content. The bytes are valid until the next call.
func (r *Reader) readPacked(file io.ReaderAt, d *zipDirectory, e *zipEntry) (packed []byte, begin int64, err error) {
	n := int(min(int64(e.lead)+e.packed, d.at-e.offset))
	r.zipped = slices.Grow(r.zipped[:0], n)[:n]
	if err := readFull(file, r.zipped, e.offset); err != nil {
		return nil, 0, err
	}
	head, err := readLocal(file, e, r.zipped)
	if err != nil {
		return nil, 0, err
	}
	if err := e.before(d, head); err != nil {
		return nil, 0, err
	}
	if end := head + int(e.packed); n < end {
		r.zipped = slices.Grow(r.zipped, end-n)[:end]
		if err := readFull(file, r.zipped[n:], e.offset+int64(n)); err != nil {
			return nil, 0, err
		}
	}
	return r.zipped[head:][:e.packed], e.offset + int64(head), nil
}

// readFull fills p with the bytes of a file at an offset.
func readFull(file io.ReaderAt, p []byte, at int64) error {
	if n, err := file.ReadAt(p, at); n < len(p) {
		return err
	}
	return nil
}

// unzip inflates the compressed bytes of an entry into p.
func (r *Reader) unzip(e *zipEntry, packed, p []byte) error {
	if r.inflate == nil {
		var err error
		if r.inflate, err = newRangeInflater(); err != nil {
			return err
		}
	}
	inflater := r.inflate.inflater
	if err := imagecapi.ResetInflater(inflater, 0, 0); err != nil {
		return err
	}
	for at := 0; ; {
		consumed, produced, done, err := imagecapi.Inflate(inflater, packed, true, p, at)
		switch {
		case errors.Is(err, imagecapi.CodeDecode) && imagecapi.CutOff(err):
			return errShortMember(e)
		case errors.Is(err, imagecapi.CodeDecode):
			return damagedMember("its deflated bytes are damaged: %w", err)
		case err != nil:
			return err
		}
		packed, at = packed[consumed:], at+produced
		switch {
		case done && at < len(p):
			return errShortMember(e)
		case done:
			return nil
		case at == len(p):
			return r.endUnzip(e, packed, p)
		case consumed+produced == 0:
			return errShortMember(e)
		}
	}
}

// endUnzip checks that the deflate stream of an entry ends right after the output p. packed holds
// the compressed bytes that have not been consumed.
func (r *Reader) endUnzip(e *zipEntry, packed, p []byte) error {
	n := copy(r.inflate.out[:windowBytes], p[max(0, len(p)-windowBytes):])
	_, produced, done, err := imagecapi.Inflate(r.inflate.inflater, packed, true, r.inflate.out[:n+1], n)
	switch {
	case produced > 0:
		return errLongMember(e)
	case err != nil && !errors.Is(err, imagecapi.CodeDecode):
		return err
	case err != nil || !done:
		return damagedMember("its deflated bytes have no end")
	}
	return nil
}
