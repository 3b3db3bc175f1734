package imageloader

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math/bits"
	"slices"

	"github.com/torchstream/torchstream/internal/imagecapi"
)

const (
	inflateRoom    = 256 << 10 // bytes inflated at a time
	inflateSpacing = 16 << 10  // least distance of two checkpoints, in bytes of output
	windowBytes    = imagecapi.InflateWindow
)

// checkpoint is where a gzip file can be entered without inflating what comes before.
type checkpoint struct {
	bit    int64  // of the file: where a deflate block begins
	output int64  // bytes of output before it
	window []byte // what later bytes copy from the output before it: see packWindow; empty at the beginning of a gzip member
}

// gzipReader inflates a gzip file, member after member, and verifies the checksum and the length of each.
type gzipReader struct {
	in       io.Reader
	inflater *imagecapi.Inflater
	note     func(checkpoint) // if not nil, gets the checkpoints in order

	packed   []byte // compressed bytes; those from lo to hi are not consumed
	lo, hi   int
	offset   int64 // of packed[lo] in the file
	end      bool  // nothing comes after hi
	out      []byte
	rd, wr   int   // out[rd:wr] is not read yet
	produced int64 // bytes of output, all members
	inMember bool
	crc      uint32
	first    int64 // output offset of the member
	start    int64 // of its deflate stream in the file
	members  int
	err      error
}

// newGzipReader reads the first header. The reader holds memory outside of Go: close it.
func newGzipReader(in io.Reader) (*gzipReader, error) {
	inflater, err := imagecapi.NewInflater(0)
	if err != nil {
		return nil, err
	}
	r := &gzipReader{in: in, inflater: inflater, packed: make([]byte, gzipReadBytes), out: make([]byte, windowBytes+inflateRoom)}
	if err := r.header(); err != nil {
		r.close()
		return nil, err
	}
	return r, nil
}

// mark makes note get the checkpoints, in order. It is called before anything is read.
func (r *gzipReader) mark(note func(checkpoint)) error {
	inflater, err := imagecapi.NewInflater(inflateSpacing)
	if err != nil {
		return err
	}
	r.close()
	r.inflater, r.note = inflater, note
	note(checkpoint{bit: 8 * r.start})
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

// more reads on, so that at least n bytes lie in packed; fewer only at the end of the file.
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
		r.note(checkpoint{bit: 8 * r.offset, output: r.produced})
	}
	return nil
}

// fill inflates on. It may leave nothing to be read.
func (r *gzipReader) fill() error {
	if !r.inMember {
		if err := r.more(1); err != nil {
			return err
		}
		if r.end && r.lo == r.hi {
			return io.EOF
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

func le32(b []byte) uint32 {
	return uint32(b[0]) | uint32(b[1])<<8 | uint32(b[2])<<16 | uint32(b[3])<<24
}

// checkpoints passes on what the inflater has noted.
func (r *gzipReader) checkpoints() error {
	for {
		c, found, err := imagecapi.NextInflateCheckpoint(r.inflater)
		if err != nil || !found {
			return err
		}
		r.note(checkpoint{bit: 8*r.start + int64(c.Bit), output: r.first + int64(c.Output), window: packWindow(c.Window, c.Used)})
	}
}

// packWindow keeps the bytes of a window that are used: runs of them, each with how many bytes are left out before it and how many it has, as varints, and the
// bytes. A gap of up to 3 bytes costs less than a new run.
func packWindow(window []byte, used []uint64) []byte {
	var packed []byte
	from, to := -1, 0 // the run under way
	last := 0         // end of the one before
	flush := func() {
		if from >= 0 {
			packed = appendUvarint(packed, uint64(from-last))
			packed = appendUvarint(packed, uint64(to-from))
			packed = append(packed, window[from:to]...)
			last = to
		}
	}
	for w, word := range used {
		for word != 0 {
			i := w*64 + bits.TrailingZeros64(word)
			n := bits.TrailingZeros64(^(word >> (i & 63)))
			if from < 0 || i-to > 3 {
				flush()
				from = i
			}
			to = i + n
			if n+i&63 >= 64 {
				word = 0
			} else {
				word &^= (1<<n - 1) << (i & 63)
			}
		}
	}
	flush()
	return packed
}

func appendUvarint(b []byte, v uint64) []byte {
	for v >= 0x80 {
		b = append(b, byte(v)|0x80)
		v >>= 7
	}
	return append(b, byte(v))
}

var errWindow = errors.New("damaged window of an inflate checkpoint")

// unpackWindow is the inverse of packWindow, into a window that is cleared first. Whatever packed is, nothing outside of the window is written.
func unpackWindow(packed, window []byte) error {
	clear(window)
	at := 0
	for len(packed) > 0 {
		skip, n := uvarint(packed)
		if n <= 0 {
			return errWindow
		}
		packed = packed[n:]
		length, n := uvarint(packed)
		if n <= 0 {
			return errWindow
		}
		packed = packed[n:]
		if skip > uint64(len(window)-at) || length > uint64(len(window)-at)-skip || length > uint64(len(packed)) {
			return errWindow
		}
		at += int(skip)
		at += copy(window[at:], packed[:length])
		packed = packed[length:]
	}
	return nil
}

// uvarint reads what appendUvarint wrote, up to 32 bits; n is 0 if there is no such thing.
func uvarint(b []byte) (v uint64, n int) {
	for i, c := range b[:min(len(b), 5)] {
		v |= uint64(c&0x7f) << (7 * i)
		if c < 0x80 {
			return v, i + 1
		}
	}
	return 0, 0
}

// inflateRange reads parts of a gzip file from checkpoints. It is used by one goroutine at a time.
type inflateRange struct {
	inflater *imagecapi.Inflater
	packed   []byte
	out      []byte
}

func newInflateRange() (*inflateRange, error) {
	inflater, err := imagecapi.NewInflater(0)
	if err != nil {
		return nil, err
	}
	return &inflateRange{inflater: inflater, packed: make([]byte, 64<<10), out: make([]byte, windowBytes+128<<10)}, nil
}

func (r *inflateRange) close() { imagecapi.FreeInflater(r.inflater) }

// read fills dst with the output from offset on. c is a checkpoint at or before offset, with its window in windows; until says where in the file the compressed bytes end at
// the latest.
func (r *inflateRange) read(file, windows io.ReaderAt, c *mark, offset int64, until int64, dst []byte) error {
	r.packed = slices.Grow(r.packed[:0], int(c.size))
	window := r.packed[:c.size] // not in use yet
	r.packed = r.packed[:cap(r.packed)]
	if n, err := windows.ReadAt(window, c.at); n < len(window) {
		return fmt.Errorf("reading the index: %w", err)
	}
	if err := unpackWindow(window, r.out[:windowBytes]); err != nil {
		return err
	}
	if err := imagecapi.ResetInflater(r.inflater, int(c.bit&7), windowBytes); err != nil {
		return err
	}
	at := c.bit >> 3 // of what is read from the file next
	lo, hi := 0, 0
	more := func() error {
		copy(r.packed, r.packed[lo:hi])
		lo, hi = 0, hi-lo
		n := int(min(int64(len(r.packed)-hi), until-at))
		got, err := file.ReadAt(r.packed[hi:hi+n], at)
		if got < n {
			if err == nil || err == io.EOF {
				err = io.ErrUnexpectedEOF
			}
			return err
		}
		hi += n
		at += int64(n)
		return nil
	}
	wr := windowBytes
	skip := offset - c.output
	for len(dst) > 0 {
		if hi-lo < 1<<10 && at < until {
			if err := more(); err != nil {
				return err
			}
		}
		if wr == len(r.out) {
			wr = copy(r.out, r.out[wr-windowBytes:])
		}
		end := int(min(int64(len(r.out)), int64(wr)+skip+int64(len(dst))))
		consumed, produced, done, err := imagecapi.Inflate(r.inflater, r.packed[lo:hi], at == until, r.out[:end], wr)
		if err != nil {
			return err
		}
		lo += consumed
		got := r.out[wr : wr+produced]
		wr += produced
		n := min(skip, int64(len(got)))
		skip -= n
		dst = dst[copy(dst, got[n:]):]
		if len(dst) == 0 {
			break
		}
		if done { // the next gzip member, 8 bytes of checksum and length later
			if err := more(); err != nil {
				return err
			}
			n := gzipHeader(r.packed[min(lo+8, hi):hi])
			if n == 0 {
				return fmt.Errorf("no gzip member where one should follow: %w", gzip.ErrHeader)
			}
			lo += 8 + n
			if err := imagecapi.ResetInflater(r.inflater, 0, 0); err != nil {
				return err
			}
		} else if consumed+produced == 0 && at == until {
			return io.ErrUnexpectedEOF
		}
	}
	return nil
}

// gzipHeader is the length of the gzip header that b begins with; 0 if there is none.
func gzipHeader(b []byte) int {
	if len(b) < 10 || b[0] != 0x1f || b[1] != 0x8b || b[2] != 8 {
		return 0
	}
	n := 10
	if b[3]&4 != 0 {
		if len(b) < n+2 {
			return 0
		}
		n += 2 + int(b[n]) + int(b[n+1])<<8
	}
	for range bits.OnesCount8(b[3] & (8 | 16)) {
		end := bytes.IndexByte(b[min(n, len(b)):], 0)
		if end < 0 {
			return 0
		}
		n += end + 1
	}
	if b[3]&2 != 0 {
		n += 2
	}
	if n > len(b) {
		return 0
	}
	return n
}
