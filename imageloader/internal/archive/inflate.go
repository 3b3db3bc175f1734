package archive

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"math/bits"
	"slices"

	"github.com/torchstream/torchstream/internal/imagecapi"
)

// rangeInflater inflates parts of a gzip file, starting at checkpoints. Only one goroutine at a
// time may use it.
type rangeInflater struct {
	inflater *imagecapi.Inflater
	packed   []byte
	out      []byte
	end      int64 // see Reader.InflatedTo
}

func newRangeInflater() (*rangeInflater, error) {
	inflater, err := imagecapi.NewInflater(0)
	if err != nil {
		return nil, err
	}
	return &rangeInflater{inflater: inflater, packed: make([]byte, 64<<10), out: make([]byte, windowBytes+128<<10)}, nil
}

func (r *rangeInflater) close() { imagecapi.FreeInflater(r.inflater) }

// restart resets the inflater to a mark whose window is in windows.
func (r *rangeInflater) restart(windows io.ReaderAt, c *Mark) error {
	r.packed = slices.Grow(r.packed[:0], int(c.Size))
	window := r.packed[:c.Size] // packed is free until the first compressed bytes are read
	r.packed = r.packed[:cap(r.packed)]
	if n, err := windows.ReadAt(window, c.At); n < len(window) {
		return fmt.Errorf("reading the index: %w", err)
	}
	if err := unpackWindow(window, r.out[:windowBytes]); err != nil {
		return err
	}
	return imagecapi.ResetInflater(r.inflater, int(c.Bit&7), windowBytes)
}

// read fills head and then dst with the output that starts at offset. c is a mark at or before
// offset, and windows holds its window. until is an upper bound for the end of the compressed bytes
// in the file.
func (r *rangeInflater) read(file, windows io.ReaderAt, c *Mark, offset int64, until int64, head, dst []byte) error {
	r.end = 0
	if err := r.restart(windows, c); err != nil {
		return err
	}
	single := true   // all output so far is from one gzip member
	at := c.Bit >> 3 // the next read of the file
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
	skip := offset - c.Output
	for len(head)+len(dst) > 0 {
		if hi-lo < 1<<10 && at < until {
			if err := more(); err != nil {
				return err
			}
		}
		if wr == len(r.out) {
			wr = copy(r.out, r.out[wr-windowBytes:])
		}
		end := int(min(int64(len(r.out)), int64(wr)+skip+int64(len(head)+len(dst))))
		consumed, produced, done, err := imagecapi.Inflate(r.inflater, r.packed[lo:hi], at == until, r.out[:end], wr)
		if err != nil {
			return err
		}
		lo += consumed
		got := r.out[wr : wr+produced]
		wr += produced
		n := min(skip, int64(len(got)))
		skip -= n
		got = got[n:]
		n = int64(copy(head, got))
		head, dst = head[n:], dst[copy(dst, got[n:]):]
		if len(head)+len(dst) == 0 {
			break
		}
		if done { // the next gzip member comes after 8 bytes of checksum and length
			if err := more(); err != nil {
				return err
			}
			n := gzipHeader(r.packed[min(lo+8, hi):hi])
			if n == 0 {
				return fmt.Errorf("no gzip member where one should follow: %w", gzip.ErrHeader)
			}
			lo += 8 + n
			single = false
			if err := imagecapi.ResetInflater(r.inflater, 0, 0); err != nil {
				return err
			}
		} else if consumed+produced == 0 && at == until {
			return io.ErrUnexpectedEOF
		}
	}
	if single {
		r.end = at - int64(hi-lo)
	}
	return nil
}

// gzipHeader returns the length of the gzip header at the start of b, or 0 if there is none.
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
