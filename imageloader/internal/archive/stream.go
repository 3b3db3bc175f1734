package archive

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"
)

// contextReader checks the context before each read, and counts bytes and time.
type contextReader struct {
	ctx    context.Context
	reader io.Reader
	count  int64
	spent  *time.Duration
}

func (r *contextReader) Read(p []byte) (int, error) {
	if r.ctx.Err() != nil {
		return 0, ErrStopped
	}
	began := time.Now()
	n, err := r.reader.Read(p)
	*r.spent += time.Since(began)
	r.count += int64(n)
	return n, err
}

// ratioReader fails if a stream inflates to more bytes than an archive of images can.
type ratioReader struct {
	reader io.Reader
	packed *contextReader
	count  int64
}

func (r *ratioReader) Read(p []byte) (int, error) {
	n, err := r.reader.Read(p)
	if r.count += int64(n); r.count > maxRatioAfter && r.count/maxRatio > r.packed.count {
		return n, fmt.Errorf("%d bytes inflate to more than %d: not an archive of images", r.packed.count, r.count)
	}
	return n, err
}

// stream is a tar stream. It counts its bytes and keeps the last block that it returned. One block
// can be pushed back.
type stream struct {
	reader io.Reader
	offset int64
	head   []byte
	clean  bool // the reader ended with io.EOF, at the end of its data
	block  [BlockBytes]byte
}

func (s *stream) Read(p []byte) (n int, err error) {
	if len(s.head) > 0 {
		n = copy(p, s.head)
		s.head = s.head[n:]
	} else {
		n, err = s.reader.Read(p)
		s.clean = err == io.EOF
	}
	s.offset += int64(n)
	if n < BlockBytes {
		copy(s.block[:], s.block[n:])
		copy(s.block[BlockBytes-n:], p[:n])
	} else {
		copy(s.block[:], p[n-BlockBytes:n])
	}
	return n, err
}

func (s *stream) unread(block []byte) {
	s.head = block
	s.offset -= int64(len(block))
}

// seekableStream is the stream of a plain tar. It lets archive/tar seek past the content of
// members.
type seekableStream struct {
	stream
	file io.Seeker
}

func (s *seekableStream) Seek(offset int64, whence int) (int64, error) {
	if whence != io.SeekCurrent || len(s.head) > 0 {
		return 0, errors.ErrUnsupported
	}
	at, err := s.file.Seek(offset, io.SeekCurrent)
	if err == nil {
		s.offset = at
	}
	return at, err
}
