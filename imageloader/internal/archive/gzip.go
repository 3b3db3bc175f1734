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
	inflateRoom    = 256 << 10 // bytes that are inflated at a time
	inflateSpacing = 16 << 10  // minimum distance of two checkpoints, in bytes of output
	windowBytes    = imagecapi.InflateWindow
)

// gzipReader inflates a gzip file, member after member, and verifies the checksum and the length of
// each. Like gzip, it accepts zeros after the last member as padding.
type gzipReader struct {
	in       io.Reader
	inflater *imagecapi.Inflater
	note     func(Checkpoint) // takes the checkpoints, in order; nil: none are made

	packed   []byte // compressed bytes; packed[lo:hi] is not consumed yet
	lo, hi   int
	offset   int64 // of packed[lo] in the file
	end      bool  // the file ends with packed[:hi]
	out      []byte
	rd, wr   int   // out[rd:wr] is not read yet
	produced int64 // bytes of output, all members
	inMember bool
	crc      uint32
	first    int64 // output offset of the member
	start    int64 // offset of its deflate stream in the file
	members  int
	err      error
}

// newGzipReader reads the first header. The reader holds memory outside of Go until close.
func newGzipReader(in io.Reader) (*gzipReader, error) {
	inflater, err := imagecapi.NewInflater(0)
	if err != nil {
		return nil, err
	}
	packed, out := make([]byte, gzipReadBytes), make([]byte, windowBytes+inflateRoom)
	r := &gzipReader{in: in, inflater: inflater, packed: packed, out: out}
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
	r.close()
	r.inflater, r.note = inflater, note
	note(Checkpoint{Bit: 8 * r.start})
	return imagecapi.ResetInflater(r.inflater, 0, 0)
}

func (r *gzipReader) close() {
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
func (r *gzipReader) more(n int) error {
	for r.hi-r.lo < n && !r.end {
		if r.lo > 0 {
			copy(r.packed, r.packed[r.lo:r.hi])
			r.hi -= r.lo
			r.lo = 0
		}
		got, err := r.in.Read(r.packed[r.hi:])
		r.hi += got
		switch {
		case err == io.EOF:
			r.end = true
		case err != nil:
			return err
		}
	}
	return nil
}

func (r *gzipReader) consume(n int) {
	r.lo += n
	r.offset += int64(n)
}

// next returns the next n bytes of the file.
func (r *gzipReader) next(n int) ([]byte, error) {
	if err := r.more(n); err != nil {
		return nil, err
	}
	if r.hi-r.lo < n {
		return nil, io.ErrUnexpectedEOF
	}
	b := r.packed[r.lo : r.lo+n]
	r.consume(n)
	return b, nil
}

// header reads the header of a gzip member (RFC 1952).
func (r *gzipReader) header() error {
	fixed, err := r.next(10)
	if err != nil {
		return err
	}
	if fixed[0] != 0x1f || fixed[1] != 0x8b || fixed[2] != 8 || fixed[3]&0xe0 != 0 {
		return gzip.ErrHeader
	}
	flags := fixed[3]
	sum := crc32.ChecksumIEEE(fixed)
	if flags&4 != 0 { // extra field
		b, err := r.next(2)
		if err != nil {
			return err
		}
		sum = crc32.Update(sum, crc32.IEEETable, b)
		if b, err = r.next(int(b[0]) | int(b[1])<<8); err != nil {
			return err
		}
		sum = crc32.Update(sum, crc32.IEEETable, b)
	}
	for range bits.OnesCount8(flags & (8 | 16)) { // name, comment
		for {
			b, err := r.next(1)
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
		b, err := r.next(2)
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
	r.inMember, r.crc, r.first, r.start = true, 0, r.produced, r.offset
	r.members++
	if r.note != nil {
		r.note(Checkpoint{Bit: 8 * r.offset, Output: r.produced})
	}
	return nil
}

// fill inflates the next bytes into out, and may inflate none.
func (r *gzipReader) fill() error {
	if !r.inMember {
		if err := r.more(1); err != nil {
			return err
		}
		if r.end && r.lo == r.hi {
			return io.EOF
		}
		if r.packed[r.lo] == 0 {
			return r.padding()
		}
		if r.members > 0 && r.packed[r.lo] != 0x1f {
			return trailing{r.offset}
		}
		if err := r.header(); err != nil {
			return err
		}
	}
	if r.wr == len(r.out) {
		r.rd = copy(r.out, r.out[r.wr-windowBytes:])
		r.wr = r.rd
	}
	if err := r.more(1 << 10); err != nil {
		return err
	}
	consumed, produced, done, err := imagecapi.Inflate(r.inflater, r.packed[r.lo:r.hi], r.end, r.out, r.wr)
	if err != nil {
		if imagecapi.CutOff(err) {
			return io.ErrUnexpectedEOF
		}
		return err
	}
	r.consume(consumed)
	r.crc = crc32.Update(r.crc, crc32.IEEETable, r.out[r.wr:r.wr+produced])
	r.wr += produced
	r.produced += int64(produced)
	if r.note != nil {
		if err := r.checkpoints(); err != nil {
			return err
		}
	}
	if done {
		b, err := r.next(8)
		if err != nil {
			return err
		}
		if le32(b) != r.crc || le32(b[4:]) != uint32(r.produced-r.first) {
			return gzip.ErrChecksum
		}
		r.inMember = false
	}
	return nil
}

// padding reads zeros to the end of the file, and returns io.EOF there.
func (r *gzipReader) padding() error {
	for {
		if err := r.more(1); err != nil {
			return err
		}
		if r.lo == r.hi {
			return io.EOF
		}
		if r.consume(len(r.packed[r.lo:r.hi]) - len(bytes.TrimLeft(r.packed[r.lo:r.hi], "\x00"))); r.lo < r.hi {
			return trailing{r.offset}
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
		r.note(Checkpoint{
			Bit:    8*r.start + int64(c.Bit),
			Output: r.first + int64(c.Output),
			Window: packWindow(c.Window, c.Used),
		})
	}
}
