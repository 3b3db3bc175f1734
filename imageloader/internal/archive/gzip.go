package archive

import (
	"bytes"
	"compress/gzip"
	"hash/crc32"
	"io"
	"math/bits"

	"github.com/torchstream/torchstream/internal/imagecapi"
)

const (
	inflateRoom    = 128 << 10 // bytes that one call inflates
	inflateSpacing = 16 << 10  // minimum distance between two checkpoints, in bytes of output
	windowBytes    = imagecapi.InflateWindow
)

// gzipReader inflates a gzip file, member after member, and verifies the checksum and the length of
// each. Like gzip, it accepts zeros after the last member as padding.
type gzipReader struct {
	in       gzipInput
	inflater *imagecapi.Inflater
	note     func(Checkpoint) // called with the checkpoints, in order; nil: none are made

	out      []byte
	rd, wr   int   // out[rd:wr] has not been read yet
	produced int64 // bytes of output, of all members
	member   gzipMember
	members  int
	err      error

	gzipJoined
}

// gzipJoined is what a gzipReader knows of the chunks that other goroutines inflate.
type gzipJoined struct {
	ahead  *gzipAhead // nil: this goroutine inflates everything
	chunk  *gzipChunk // the chunk whose output is in out; nil: out has the inflater's output
	memory gzipMemory // of the last chunk, to which out belongs
}

// gzipInput buffers the compressed file.
type gzipInput struct {
	file   io.Reader
	packed []byte // packed[lo:hi] is not consumed yet
	lo, hi int
	offset int64 // of packed[lo] in the file
	end    bool  // the file ends with packed[:hi]
}

// gzipMember is the member that is being inflated.
type gzipMember struct {
	open  bool // the member's end has not been reached
	crc   uint32
	first int64 // output offset of the member
	last  int64 // output offset of its last checkpoint, or first
	// origin is the offset in the file, and base the output offset, that the inflater counts from.
	origin, base int64
}

// newGzipReader reads the first header. The reader holds C memory until it is closed.
func newGzipReader(in io.Reader) (*gzipReader, error) {
	inflater, err := imagecapi.NewInflater(0)
	if err != nil {
		return nil, err
	}
	packed, out := make([]byte, gzipReadBytes), make([]byte, windowBytes+inflateRoom)
	r := &gzipReader{in: gzipInput{file: in, packed: packed}, inflater: inflater, out: out}
	if err := r.header(); err != nil {
		r.close()
		return nil, err
	}
	return r, nil
}

// mark makes the reader call note with the checkpoints, in order. It must be called before the
// first read.
func (r *gzipReader) mark(note func(Checkpoint)) error {
	inflater, err := imagecapi.NewInflater(inflateSpacing)
	if err != nil {
		return err
	}
	r.free()
	r.inflater, r.note = inflater, note
	note(Checkpoint{Bit: 8 * r.member.origin})
	return imagecapi.ResetInflater(r.inflater, 0, 0)
}

func (r *gzipReader) close() {
	if r.ahead != nil {
		r.ahead.close()
	}
	r.free()
}

func (r *gzipReader) free() {
	if r.inflater != nil {
		imagecapi.FreeInflater(r.inflater)
		r.inflater = nil
	}
}

func (r *gzipReader) Read(p []byte) (int, error) {
	for r.rd == r.wr {
		if r.err != nil {
			return 0, r.err
		}
		r.err = r.fill()
	}
	n := copy(p, r.out[r.rd:r.wr])
	r.rd += n
	return n, nil
}

// more reads until packed[lo:hi] has at least n bytes, or fewer at the end of the file.
func (in *gzipInput) more(n int) error {
	for in.hi-in.lo < n && !in.end {
		if in.lo > 0 {
			copy(in.packed, in.packed[in.lo:in.hi])
			in.hi -= in.lo
			in.lo = 0
		}
		got, err := in.file.Read(in.packed[in.hi:])
		in.hi += got
		switch {
		case err == io.EOF:
			in.end = true
		case err != nil:
			return err
		}
	}
	return nil
}

// waiting returns the bytes that have been read but not consumed.
func (in *gzipInput) waiting() []byte { return in.packed[in.lo:in.hi] }

func (in *gzipInput) consume(n int) {
	in.lo += n
	in.offset += int64(n)
}

// next returns the next n bytes of the file.
func (in *gzipInput) next(n int) ([]byte, error) {
	if err := in.more(n); err != nil {
		return nil, err
	}
	if in.hi-in.lo < n {
		return nil, io.ErrUnexpectedEOF
	}
	b := in.packed[in.lo : in.lo+n]
	in.consume(n)
	return b, nil
}

// header reads the header of a gzip member (RFC 1952).
func (r *gzipReader) header() error {
	fixed, err := r.in.next(10)
	if err != nil {
		return err
	}
	if fixed[0] != 0x1f || fixed[1] != 0x8b || fixed[2] != 8 || fixed[3]&0xe0 != 0 {
		return gzip.ErrHeader
	}
	flags := fixed[3]
	sum := crc32.ChecksumIEEE(fixed)
	if flags&4 != 0 { // extra field
		b, err := r.in.next(2)
		if err != nil {
			return err
		}
		sum = crc32.Update(sum, crc32.IEEETable, b)
		if b, err = r.in.next(int(b[0]) | int(b[1])<<8); err != nil {
			return err
		}
		sum = crc32.Update(sum, crc32.IEEETable, b)
	}
	for range bits.OnesCount8(flags & (8 | 16)) { // name, comment
		for {
			b, err := r.in.next(1)
			if err != nil {
				return err
			}
			sum = crc32.Update(sum, crc32.IEEETable, b)
			if b[0] == 0 {
				break
			}
		}
	}
	if flags&2 != 0 {
		b, err := r.in.next(2)
		if err != nil {
			return err
		}
		if uint16(sum) != uint16(b[0])|uint16(b[1])<<8 {
			return gzip.ErrHeader
		}
	}
	if err := imagecapi.ResetInflater(r.inflater, 0, 0); err != nil {
		return err
	}
	r.begin(r.in.offset)
	return nil
}

// begin starts a member whose deflate stream is at an offset of the file.
func (r *gzipReader) begin(offset int64) {
	r.member = gzipMember{open: true, first: r.produced, last: r.produced, origin: offset, base: r.produced}
	r.members++
	if r.note != nil {
		r.note(Checkpoint{Bit: 8 * offset, Output: r.produced})
	}
}

// fill inflates the next bytes into out. It may inflate none.
func (r *gzipReader) fill() error {
	if r.chunk != nil {
		return r.deliver()
	}
	if joined, err := r.join(); joined || err != nil {
		return err
	}
	if !r.member.open {
		if err := r.nextMember(); err != nil || r.ahead != nil {
			return err
		}
	}
	if r.wr == len(r.out) {
		r.rd = copy(r.out, r.out[r.wr-windowBytes:])
		r.wr = r.rd
	}
	if err := r.in.more(1 << 10); err != nil {
		return err
	}
	room := r.out[:min(len(r.out), r.wr+inflateRoom)]
	consumed, produced, done, err := imagecapi.Inflate(r.inflater, r.in.waiting(), r.in.end, room, r.wr)
	if err != nil {
		if imagecapi.CutOff(err) {
			return io.ErrUnexpectedEOF
		}
		return err
	}
	r.in.consume(consumed)
	r.add(produced)
	if r.note != nil {
		if err := r.checkpoints(); err != nil {
			return err
		}
	}
	if done {
		b, err := r.in.next(8)
		if err != nil {
			return err
		}
		return r.endMember(le32(b), le32(b[4:]))
	}
	return nil
}

// nextMember reads the header of the next member. It returns io.EOF at the end of the file.
func (r *gzipReader) nextMember() error {
	if err := r.in.more(1); err != nil {
		return err
	}
	if r.in.end && r.in.lo == r.in.hi {
		return io.EOF
	}
	if r.in.packed[r.in.lo] == 0 {
		return r.padding()
	}
	if r.members > 0 && r.in.packed[r.in.lo] != 0x1f {
		return trailing{r.in.offset}
	}
	return r.header()
}

// add adds the next n bytes of out to the member.
func (r *gzipReader) add(n int) {
	r.member.crc = crc32.Update(r.member.crc, crc32.IEEETable, r.out[r.wr:r.wr+n])
	r.wr += n
	r.produced += int64(n)
}

// endMember compares a member with its checksum and its length.
func (r *gzipReader) endMember(crc, size uint32) error {
	if crc != r.member.crc || size != uint32(r.produced-r.member.first) {
		return gzip.ErrChecksum
	}
	r.member.open = false
	return nil
}

// padding reads zeros to the end of the file, and returns io.EOF there.
func (r *gzipReader) padding() error {
	for {
		if err := r.in.more(1); err != nil {
			return err
		}
		if r.in.lo == r.in.hi {
			return io.EOF
		}
		if r.in.consume(len(r.in.waiting()) - len(bytes.TrimLeft(r.in.waiting(), "\x00"))); r.in.lo < r.in.hi {
			return trailing{r.in.offset}
		}
	}
}

func le32(b []byte) uint32 {
	return uint32(b[0]) | uint32(b[1])<<8 | uint32(b[2])<<16 | uint32(b[3])<<24
}

// checkpoints calls note with the checkpoints that the inflater has recorded.
func (r *gzipReader) checkpoints() error {
	for {
		c, found, err := imagecapi.NextInflateCheckpoint(r.inflater)
		if err != nil || !found {
			return err
		}
		r.member.last = r.member.base + int64(c.Output)
		r.note(Checkpoint{
			Bit:    8*r.member.origin + int64(c.Bit),
			Output: r.member.last,
			Window: packWindow(c.Window, c.Used),
		})
	}
}
