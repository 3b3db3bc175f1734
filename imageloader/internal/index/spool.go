package index

import (
	"io"
	"os"
)

// spoolBytes is the maximum number of bytes that a spool keeps in memory.
const spoolBytes = 1 << 20

// spool collects bytes. The newest bytes are in memory, and the older ones in an unnamed file,
// which disappears even if the program crashes. If no file can be created or written, all bytes
// stay in memory. Only one goroutine at a time may use a spool, but several may read while none
// writes.
type spool struct {
	create func() (*os.File, error) // nil: memory only
	file   *os.File
	filed  int64 // number of bytes in file
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

// ReadAt implements io.ReaderAt.
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

// section returns the collected bytes as a section of count items.
func (s *spool) section(count int) section { return section{at: s, size: s.size(), count: count} }

func (s *spool) close() {
	if s.file != nil {
		_ = s.file.Close() // the file disappears
	}
	*s = spool{}
}
