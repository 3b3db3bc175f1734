package index

import (
	"errors"
	"hash/crc32"
	"runtime"
	"slices"
	"time"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/digest"
)

// segmentBytes is the number of bytes of a stream that are inflated at once for samples that stay
// in memory. The range between two marks is then inflated once for all its samples, not once for
// each.
const segmentBytes = 1 << 20

// maxLead exceeds the size of any member's headers, because archive/tar accepts extended headers of
// up to a megabyte.
const maxLead = 1<<20 + archive.HeaderBytes

// Reader reads the contents of an index's samples in any order. It belongs to one goroutine. Any
// number of Readers may read from one open archive at the same time.
type Reader struct {
	x       *Index
	archive *archive.Reader
	segment []byte // several samples, or a sample's header and content in a tar
	content []byte // the result of Content, with room for headers before it

	inflated   Inflated // describes the sample that was inflated last
	inflatedOf int      // the number of that sample
}

// NewReader returns a Reader for an Index whose Random is true. The archive must be open and
// unchanged since it was indexed. The caller closes the Reader before the archive.
func NewReader(x *Index, a *archive.Archive) *Reader {
	return &Reader{x: x, archive: archive.NewReader(a), inflatedOf: -1}
}

// FileTime returns the time that the Reader has waited for compressed files, without the time for
// inflating.
func (r *Reader) FileTime() time.Duration { return r.archive.FileTime() }

// Close frees the Reader's C memory.
func (r *Reader) Close() { r.archive.Close() }

// Read fills p with the content of sample i. The length of p must be the sample's size, and the
// sample must be a regular file. An error is an *archive.Error, or archive.ErrStopped.
// [archive.MemberDamage] tells whether it concerns this sample alone.
func (r *Reader) Read(i int, p []byte) error { return r.read(i, p, nil) }

// Content returns the content of sample i. The slice is read-only and valid until the next call,
// unless the Index has the content in memory. The requirements and errors are the same as for Read.
func (r *Reader) Content(i int) ([]byte, error) {
	if data := r.x.InMemory(i); data != nil {
		return data, nil
	}
	const lead = 3 * archive.BlockBytes // the maximum of archive.Lead
	size := lead + int(r.x.Size(i))
	if cap(r.content) < size {
		r.content = make([]byte, size+size/2)
	}
	room := r.content[:size]
	return room[lead:], r.read(i, room[lead:], room)
}

// read implements Read. If room is not nil, p is its last part, and read stores the headers before
// the content in its first part.
func (r *Reader) read(i int, p, room []byte) error {
	x, at := r.x, r.x.at(i)
	m := &x.samples[at]
	defer runtime.KeepAlive(x) // garbage collection of an Index frees its memory
	if data := x.InMemory(i); data != nil {
		copy(p, data)
		return nil
	}
	if x.memory.grows() {
		r.readSegment(at)
		if data := x.InMemory(i); data != nil {
			copy(p, data)
			return nil
		}
	}
	s := &x.shards[m.shard]
	err := r.readFrom(s, m, x.Name(i), p, room)
	if err == nil && (!m.matches(p) || !x.sameContent(at, p)) {
		err = ErrStale
	}
	if errors.Is(err, archive.ErrStopped) {
		return err
	}
	if err != nil {
		e := &archive.Error{File: archive.Shown(s.path), Member: x.Name(i), Position: at + 1, Err: archive.Explain(err)}
		if s.format != archive.Zip && s.format != archive.Parquet {
			e.Offset = m.offset
		}
		return e
	}
	if x.memory.grows() {
		x.memory.keep(at, p)
	}
	switch s.format {
	case archive.TarGzip:
		lead := min(archive.Lead(x.Name(i)), int64(len(r.segment))) // readGzip has compared the headers
		r.inflated.Lead, r.inflated.Begin = crc32.ChecksumIEEE(r.segment[int64(len(r.segment))-lead:]), 0
		r.inflatedOf = i
	case archive.Zip:
		begin, end := r.archive.Packed()
		if m.flags&recordStored != 0 {
			end = 0
		}
		r.inflated, r.inflatedOf = Inflated{Begin: begin, End: end}, i
	}
	return nil
}

// Parts reports whether ReadPart can be used for sample i. The sample must be a regular file in a
// local, uncompressed tar, a stored member of a local zip, or an image in a local, uncompressed
// page of a Parquet file. The index must not keep samples in memory.
func (x *Index) Parts(i int) bool {
	defer runtime.KeepAlive(x)
	m := &x.samples[x.at(i)]
	s := &x.shards[m.shard]
	plain := s.format == archive.Tar ||
		(s.format == archive.Parquet || s.format == archive.Zip) && m.flags&recordStored != 0
	return plain && m.kind == archive.Regular && !archive.IsURL(s.path) && !x.memory.holds()
}

// ContentPart is a part of a sample's content to read.
type ContentPart struct {
	Bytes []byte // where to read it to; for a device, not for the host
	From  int    // offset of the first byte in the content
	// Whole is the sample's Inflated, from a Reader of this Index that has read the whole sample.
	Whole Inflated
	Key   *digest.Key
	Sums  []uint64 // digests of the pieces of Bytes; ReadPart fills them
}

// DevicePart returns a part of sample i in memory that devices can read, or nil if there is none:
// see [archive.Reader.DeviceBytes]. It uses the size of Bytes, From and Whole of p. Parts must have
// returned true.
func (r *Reader) DevicePart(i int, p *ContentPart, register archive.Register) []byte {
	defer runtime.KeepAlive(r.x)
	shard, begin := r.placeOf(i, p)
	return r.archive.DeviceBytes(shard, len(p.Bytes), begin, register)
}

// placeOf returns the shard of a part of sample i, and its offset in the shard.
func (r *Reader) placeOf(i int, p *ContentPart) (shard int, begin int64) {
	m := &r.x.samples[r.x.at(i)]
	begin = m.offset
	if r.x.shards[m.shard].format == archive.Zip {
		begin = p.Whole.Begin
	}
	return int(m.shard), begin + int64(p.From)
}

// ReadPart reads a part of sample i, and computes its digests. The part must be within the content,
// and Parts must have returned true. The caller verifies the digests.
func (r *Reader) ReadPart(i int, p *ContentPart) error {
	defer runtime.KeepAlive(r.x)
	shard, begin := r.placeOf(i, p)
	if n, err := r.archive.ReadPieces(shard, p.Bytes, begin, p.Key, p.Sums); n < len(p.Bytes) {
		return err
	}
	return nil
}

// Inflated describes the bytes of a sample in a gzip shard or a zip, as Read has found them.
type Inflated struct {
	Lead uint32 // CRC-32 of the Packed.Lead bytes before the content
	// Begin is the offset in a zip of the content's bytes, compressed or stored. It is 0 in a gzip
	// shard, whose marks say where inflating starts.
	Begin int64
	// End is the offset in the shard right after the content's compressed bytes. It is 0 if the
	// sample spans several gzip members, or is stored in a zip. Packed can't be used for such a
	// sample.
	End int64
}

// Inflated describes sample i if it is the last sample that Read or Content has read from a gzip
// shard or a zip. Otherwise its End is 0.
func (r *Reader) Inflated(i int) Inflated {
	if r.inflatedOf != i {
		return Inflated{}
	}
	return r.inflated
}

// Packed describes the data for inflating a sample's headers and content: compressed bytes and a
// window. A zip's member is a whole deflate stream, so its Packed has no headers and no window.
type Packed struct {
	Lead     int // bytes of headers before the content
	Skip     int // bytes of output before the headers
	SkipBits int // bits of the first compressed byte that belong to the previous block
	Window   int // size of the packed window, in bytes
	Input    int // compressed bytes, at least up to the end of the content

	shard  int
	window int64 // offset of the window
	input  int64 // offset in the shard
}

// Packed returns the description of the bytes to inflate for sample i. Its Input is an upper bound
// until Within is called. ok is false if the sample is neither a regular file in a gzip shard nor a
// deflated member of a zip, or if the index keeps its samples in memory.
func (x *Index) Packed(i int) (p Packed, ok bool) {
	defer runtime.KeepAlive(x)
	m := &x.samples[x.at(i)]
	s := &x.shards[m.shard]
	if m.kind != archive.Regular || x.memory.holds() {
		return Packed{}, false
	}
	if s.format == archive.Zip {
		// No compressor adds more than an eighth: a literal of a fixed code has at most 9 bits.
		return Packed{Input: int(m.size + m.size/8 + 64), shard: int(m.shard)}, m.flags&recordStored == 0
	}
	lead := archive.Lead(x.Name(i))
	if s.format != archive.TarGzip || m.offset < lead {
		return Packed{}, false
	}
	mark, until := s.enter(m.offset-lead, m.offset+m.size)
	p = Packed{Lead: int(lead), Skip: int(m.offset - lead - mark.Output), SkipBits: int(mark.Bit & 7),
		Window: int(mark.Size),
		Input:  int(until - mark.Bit>>3), shard: int(m.shard), window: mark.At, input: mark.Bit >> 3}
	return p, p.Input > 0 // the marks are untrusted
}

// Within drops the compressed bytes that the sample does not need. from is its Inflated.
func (p *Packed) Within(from Inflated) {
	if from.Begin > 0 {
		p.input, p.Input = from.Begin, int(max(0, from.End-from.Begin))
		return
	}
	p.Input = int(max(0, min(int64(p.Input), from.End-p.input)))
}

// DevicePacked returns the compressed bytes that p describes in memory that devices can read, or
// nil if there is none: see [archive.Reader.DeviceBytes].
func (r *Reader) DevicePacked(p *Packed, register archive.Register) []byte {
	defer runtime.KeepAlive(r.x)
	return r.archive.DeviceBytes(p.shard, p.Input, p.input, register)
}

// ReadPacked fills window and input, which must have the sizes in p. input is empty if a device
// reads it.
func (r *Reader) ReadPacked(p *Packed, window, input []byte) error {
	defer runtime.KeepAlive(r.x)
	if n, err := r.x.windows.ReadAt(window, p.window); n < len(window) {
		return err
	}
	if n, err := r.archive.ReadAt(p.shard, input, p.input); n < len(input) {
		return err
	}
	return nil
}

// readFrom reads a record's content from its shard. room is as in read.
func (r *Reader) readFrom(s *shard, m *record, name string, p, room []byte) error {
	switch s.format {
	case archive.Tree:
		return r.archive.ReadFile(int(m.shard), name, p)
	case archive.Zip:
		return r.archive.ReadZipped(int(m.shard), m.offset, p)
	case archive.Parquet:
		page, offset := s.place(m)
		return r.archive.ReadRow(int(m.shard), page, offset, p)
	case archive.Tar:
		return r.readTar(s, m, name, p, room)
	}
	return r.readGzip(s, m, name, p)
}

// readGzip reads a record's content from a .tar.gz. The content must come right after a header with
// the record's name and size. The bytes before the content that are inflated first nearly always
// include all headers. They cost nothing, because inflating starts before the headers anyway.
func (r *Reader) readGzip(s *shard, m *record, name string, p []byte) error {
	end := m.offset + m.size
	for _, lead := range []int64{archive.Lead(name), archive.HeaderBytes, maxLead} {
		lead = min(lead, m.offset)
		if lead < archive.BlockBytes {
			return ErrStale
		}
		r.segment = slices.Grow(r.segment[:0], int(lead))[:lead]
		mark, until := s.enter(m.offset-lead, end)
		if err := r.archive.Inflate(int(m.shard), r.x.windows.ReaderAt, mark, m.offset-lead, until,
			r.segment, p); err != nil {
			return err
		}
		if p != nil {
			r.inflated.End = r.archive.InflatedTo()
		}
		if archive.Heads(r.segment[lead%archive.BlockBytes:], name, m.size) {
			return nil
		}
		p, end = nil, m.offset // p is filled; only headers are missing
	}
	return ErrStale
}

// readTar reads a record's content from a plain tar. Another file of the same size and time may
// have replaced the tar (behind a URL, between runs), and the index may be forged. The header
// before the content must therefore be the indexed one, and have the record's name and size. room
// is as in read. If it is not nil, one request reads headers and content.
func (r *Reader) readTar(s *shard, m *record, name string, p, room []byte) error {
	shard := int(m.shard)
	lead := min(m.offset, archive.Lead(name))
	if lead < archive.BlockBytes {
		return ErrStale
	}
	var segment []byte // the headers, and the content if the same request reads it
	switch {
	case room != nil:
		segment = room[len(room)-len(p)-int(lead):]
	case archive.IsURL(s.path) && len(p) <= segmentBytes:
		// a copy costs less than a second request
		r.segment = slices.Grow(r.segment[:0], int(lead)+len(p))[:int(lead)+len(p)]
		segment = r.segment
	default: // content first, because its pages nearly always have the headers too, and a disk reads once
		if n, err := r.archive.ReadAt(shard, p, m.offset); n < len(p) {
			return err
		}
		r.segment = slices.Grow(r.segment[:0], int(lead))[:lead]
		segment = r.segment
	}
	if n, err := r.archive.ReadAt(shard, segment, m.offset-lead); n < len(segment) {
		return err
	}
	heads := segment[lead%archive.BlockBytes : lead]
	if m.flags&recordBlock != 0 && crc32.ChecksumIEEE(heads[len(heads)-archive.BlockBytes:]) != m.crc {
		return ErrStale
	}
	if room == nil {
		copy(p, segment[lead:]) // nothing if p is full already
	}
	headed := archive.Heads(heads, name, m.size)
	for _, lead := range []int64{archive.HeaderBytes, maxLead} { // a long name is in an earlier header
		if headed {
			break
		}
		more := make([]byte, min(m.offset, lead))
		if n, err := r.archive.ReadAt(shard, more, m.offset-int64(len(more))); n < len(more) {
			return err
		}
		headed = archive.Heads(more[len(more)%archive.BlockBytes:], name, m.size)
	}
	if !headed {
		return ErrStale
	}
	return nil
}

// readSegment inflates sample i together with its neighbours between two marks, and keeps their
// contents in memory. It does nothing if the sample has no neighbours or if they take too many
// bytes. It keeps nothing if inflating fails, and no sample whose bytes differ from the index. Read
// then reads the sample alone, and reports the error.
func (r *Reader) readSegment(i int) {
	x := r.x
	shard := x.samples[i].shard
	s := &x.shards[shard]
	if s.format != archive.TarGzip {
		return
	}
	first, last, mark := r.neighbours(s, i)
	begin := x.head(first)
	end := x.samples[last].offset + x.samples[last].size
	if first == last || end-begin > segmentBytes {
		return
	}
	_, until := s.enter(begin, end)
	r.segment = slices.Grow(r.segment[:0], int(end-begin))[:end-begin]
	if r.archive.Inflate(int(shard), x.windows.ReaderAt, mark, begin, until, nil, r.segment) != nil {
		return
	}
	for j := first; j <= last; j++ {
		m := &x.samples[j]
		heads, data := r.segment[max(0, x.head(j)-begin):m.offset-begin], r.segment[m.offset-begin:][:m.size]
		if m.kind == archive.Regular && m.size > 0 && m.size <= x.memory.limit && m.flags&recordSummed != 0 &&
			!x.memory.has(j) && len(heads) >= archive.BlockBytes &&
			archive.Heads(heads[len(heads)%archive.BlockBytes:], x.recordName(j), m.size) &&
			crc32.ChecksumIEEE(data) == m.crc {
			x.memory.keep(j, data)
		}
	}
}

// head returns the offset where the headers of a record start. It is right for nearly all records.
func (x *Index) head(i int) int64 {
	return max(0, x.samples[i].offset-archive.Lead(x.recordName(i)))
}

// neighbours returns the first and the last sample that are inflated together with sample i, and
// the mark where inflating starts. These samples are between two marks, and take at most
// segmentBytes.
func (r *Reader) neighbours(s *shard, i int) (first, last int, mark *archive.Mark) {
	x := r.x
	m := &x.samples[i]
	next := s.beyond(x.head(i))
	mark = &s.marks[next-1]
	first, last = i, i
	for first > 0 && i-first < items {
		p := &x.samples[first-1]
		if p.shard != m.shard || x.head(first-1) < mark.Output || p.offset+p.size > x.samples[first].offset {
			break
		}
		first--
	}
	begin := x.head(first)
	for last+1 < len(x.samples) && last-i < items {
		p, end := &x.samples[last+1], x.samples[last].offset+x.samples[last].size
		if p.shard != m.shard || p.offset < end || next < len(s.marks) && x.head(last+1) >= s.marks[next].Output ||
			p.offset+p.size-begin > segmentBytes {
			break
		}
		last++
	}
	return first, last, mark
}
