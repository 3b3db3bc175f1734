package imageloader

import (
	"hash/crc32"
	"io"
	"os"
)

// spoolBytes is how much of a spool is in memory.
const spoolBytes = 1 << 20

// spool collects bytes: the last ones in memory, what is more in a file that has no name and is gone when it is closed, however the program ends. Where no file can be made or
// written, all stays in memory. Its methods are called by one goroutine at a time, except that several may read while nobody writes.
type spool struct {
	create func() (*os.File, error) // nil: no file
	file   *os.File
	filed  int64 // bytes in file
	mem    []byte
}

func (s *spool) size() int64 { return s.filed + int64(len(s.mem)) }

func (s *spool) write(p []byte) {
	s.mem = append(s.mem, p...)
	if len(s.mem) < spoolBytes || s.create == nil {
		return
	}
	err := error(nil)
	if s.file == nil {
		s.file, err = s.create()
	}
	if err == nil {
		_, err = s.file.WriteAt(s.mem, s.filed)
	}
	if err != nil {
		s.create = nil
		return
	}
	s.filed += int64(len(s.mem))
	s.mem = s.mem[:0]
}

// ReadAt is io.ReaderAt.
func (s *spool) ReadAt(p []byte, at int64) (n int, err error) {
	if at < s.filed {
		k := min(int64(len(p)), s.filed-at)
		if n, err = s.file.ReadAt(p[:k], at); int64(n) < k {
			return n, err
		}
	}
	if n < len(p) && at+int64(n) < s.size() {
		n += copy(p[n:], s.mem[at+int64(n)-s.filed:])
	}
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

func (s *spool) close() {
	if s.file != nil {
		_ = s.file.Close() // nobody reads it any more
	}
	*s = spool{}
}

// stored is a section of an index: in a file, or in a spool that just was filled.
type stored struct {
	at    io.ReaderAt
	size  int64
	count int
	// crc is the CRC-32 that the bytes have to have, if checked.
	crc     uint32
	checked bool
}

func (p *spool) section(count int) stored { return stored{at: p, size: p.size(), count: count} }

// all reads the section into one buffer.
func (s stored) all() ([]byte, error) {
	b := make([]byte, s.size)
	if n, err := s.at.ReadAt(b, 0); n < len(b) || s.checked && crc32.ChecksumIEEE(b) != s.crc {
		return nil, damagedBy(err)
	}
	return b, nil
}

// items is how many items of a buffer's worth are read at a time.
const items = 4096

// reader reads the section item by item; each has so many bytes.
func (s stored) reader(item int) *itemReader { return &itemReader{s: s, item: item} }

type itemReader struct {
	s    stored
	item int
	at   int64
	buf  []byte
	rest []byte
	crc  uint32
}

// next returns the next item, valid until the next call; nil at the end, or if the section is damaged, which err tells.
func (r *itemReader) next() (item []byte, err error) {
	if len(r.rest) == 0 {
		left := r.s.size - r.at
		if left == 0 {
			if r.s.checked && r.crc != r.s.crc {
				return nil, errIndexDamaged
			}
			return nil, nil
		}
		if r.buf == nil {
			r.buf = make([]byte, min(left, int64(items*r.item)))
		}
		r.rest = r.buf[:min(left, int64(len(r.buf)))]
		if n, err := r.s.at.ReadAt(r.rest, r.at); n < len(r.rest) {
			return nil, damagedBy(err)
		}
		r.at += int64(len(r.rest))
		if r.s.checked {
			r.crc = crc32.Update(r.crc, crc32.IEEETable, r.rest)
		}
	}
	if len(r.rest) < r.item {
		return nil, errIndexDamaged
	}
	item, r.rest = r.rest[:r.item:r.item], r.rest[r.item:]
	return item, nil
}

// copyTo writes the section.
func (s stored) copyTo(w io.Writer) error {
	_, err := io.Copy(w, io.NewSectionReader(s.at, 0, s.size))
	return err
}

func damagedBy(err error) error {
	if err == nil || err == io.EOF {
		return errIndexDamaged
	}
	return err
}
