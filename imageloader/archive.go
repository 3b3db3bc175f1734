package imageloader

import (
	"archive/tar"
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"

	"github.com/klauspost/compress/gzip"
)

// source is what an archive is read from: an *os.File, or a test's reader that misbehaves.
type source interface {
	io.ReadSeeker
	io.ReaderAt
	io.Closer
	Stat() (fs.FileInfo, error)
}

func openFile(path string) (source, error) { return os.Open(path) }

// Kinds of archive, as Report names them.
const (
	formatTar   = "tar"
	formatTarGz = "tar.gz"
)

const (
	gzipReadBytes = 256 << 10 // compressed bytes asked for at a time
	skipBytes     = 256 << 10 // how much is skipped between two looks at the context
	magicBytes    = 16        // how much of a member is looked at to tell whether it is an image
)

// archive walks the members of one archive, once, from front to back. It tolerates what tar -i tolerates (several archives one after another, as
// `cat a.tgz b.tgz` makes), and verifies every gzip checksum up to the end of the file.
type archive struct {
	path   string
	file   source
	info   fs.FileInfo
	format string
	in     *stream
	tar    *tar.Reader
	names  int    // members seen
	last   string // name of the last of them
	sparse bool   // the last of them is a sparse file
	skip   []byte
	magic  [magicBytes]byte
}

// member is a tar entry that is not a directory or metadata.
type member struct {
	name   string // cleaned
	offset int64  // of the content in the tar stream
	size   int64
	kind   memberKind
	target string // of a link
}

type memberKind uint8

const (
	kindFile memberKind = iota
	kindHardLink
	kindSymlink
	kindSparse
	kindOther // device, pipe
)

// openArchive opens path and finds out by its first bytes what it is. ctx is looked at before every read.
func openArchive(ctx context.Context, path string, open func(string) (source, error)) (*archive, error) {
	file, err := open(path)
	if err != nil {
		return nil, fmt.Errorf("imageloader: %w", err)
	}
	a := &archive{path: path, file: file}
	if err := a.start(ctx); err != nil {
		file.Close()
		return nil, err
	}
	return a, nil
}

func (a *archive) start(ctx context.Context) error {
	var err error
	if a.info, err = a.file.Stat(); err != nil {
		return fmt.Errorf("imageloader: %w", err)
	}
	switch mode := a.info.Mode(); {
	case mode.IsDir():
		return a.fail(errors.New("it is a directory: pack it with `tar -cf train.tar -C DIRECTORY .`"))
	case !mode.IsRegular():
		return a.fail(errors.New("it is not a regular file: every epoch reads the archive again, so it can't be a pipe or a device"))
	}
	head := make([]byte, 512)
	n, err := a.file.ReadAt(head, 0)
	if err != nil && err != io.EOF {
		return a.fail(err)
	}
	head = head[:n]
	switch {
	case n == 0:
		return a.fail(errors.New("the file is empty"))
	case bytes.HasPrefix(head, []byte{0x1f, 0x8b}):
		a.format = formatTarGz
		gz, err := gzip.NewReader(bufio.NewReaderSize(&contextReader{ctx, a.file}, gzipReadBytes))
		if err != nil {
			return a.fail(fmt.Errorf("gzip header: %w", truncated(err)))
		}
		a.in = &stream{reader: gz}
		a.tar = tar.NewReader(a.in)
	default:
		for _, other := range foreign {
			if bytes.HasPrefix(head, other.magic) {
				return a.fail(fmt.Errorf("it is %s; repack it as .tar or .tar.gz", other.name))
			}
		}
		a.format = formatTar
		seekable := &seekableStream{stream{reader: &contextReader{ctx, a.file}}, a.file}
		a.in = &seekable.stream
		a.tar = tar.NewReader(seekable)
	}
	return nil
}

// foreign are formats that people might hand over, by magic.
var foreign = []struct {
	name  string
	magic []byte
}{
	{"compressed with zstd, which is not handled yet", []byte{0x28, 0xb5, 0x2f, 0xfd}},
	{"a zip file", []byte("PK\x03\x04")},
	{"compressed with bzip2", []byte("BZh")},
	{"compressed with xz", []byte{0xfd, '7', 'z', 'X', 'Z', 0}},
	{"a JPEG image, not an archive", []byte{0xff, 0xd8, 0xff}},
	{"a PNG image, not an archive", []byte("\x89PNG")},
}

// next goes to the next member that is not a directory or metadata; io.EOF at the end of the archive. All other errors are *ArchiveError.
func (a *archive) next() (member, error) {
	for {
		// archive/tar would skip in small steps. But not over a sparse file: its holes, of any size that a header of 512 bytes claims, would be read as zeros.
		if a.format == formatTarGz && a.names > 0 && !a.sparse {
			if a.skip == nil {
				a.skip = make([]byte, skipBytes)
			}
			for {
				_, err := a.tar.Read(a.skip)
				if err == io.EOF {
					break
				}
				if err != nil {
					return member{}, a.fail(err)
				}
			}
		}
		h, err := a.tar.Next()
		if err == io.EOF && a.in.clean && a.in.offset%512 != 0 { // in the filling after a member: archive/tar forgives that
			return member{}, a.fail(io.ErrUnexpectedEOF)
		}
		if err == io.EOF {
			more, err := a.following()
			if err != nil {
				return member{}, a.fail(err)
			}
			if !more {
				return member{}, io.EOF
			}
			continue
		}
		if err != nil && !errors.Is(err, tar.ErrInsecurePath) { // nothing is extracted: names are labels only
			return member{}, a.fail(err)
		}
		a.names++
		a.last = h.Name
		m := member{name: path.Clean(h.Name), offset: a.in.offset, size: h.Size, target: h.Linkname}
		switch h.Typeflag {
		case tar.TypeReg, tar.TypeCont, '\x00':
			for key := range h.PAXRecords {
				if len(key) > len("GNU.sparse.") && key[:len("GNU.sparse.")] == "GNU.sparse." {
					m.kind = kindSparse
				}
			}
		case tar.TypeDir:
			continue
		case tar.TypeXGlobalHeader:
			continue
		case tar.TypeLink:
			m.kind = kindHardLink
		case tar.TypeSymlink:
			m.kind = kindSymlink
		case tar.TypeGNUSparse:
			m.kind = kindSparse
		default:
			m.kind = kindOther
		}
		a.sparse = m.kind == kindSparse
		return m, nil
	}
}

// nextHead is next, and the member's first bytes, read and valid until the next call.
func (a *archive) nextHead() (m member, head []byte, err error) {
	if m, err = a.next(); err != nil {
		return m, nil, err
	}
	head = a.magic[:0]
	if m.kind == kindFile {
		head = a.magic[:min(m.size, magicBytes)]
		err = a.read(head)
	}
	return m, head, err
}

// rest fills p, whose length is the member's size, with head and what comes after it.
func (a *archive) rest(head, p []byte) error { return a.read(p[copy(p, head):]) }

// read fills p from the content of the current member.
func (a *archive) read(p []byte) error {
	if _, err := io.ReadFull(a.tar, p); err != nil {
		return a.fail(err)
	}
	return nil
}

// following is called at the end of a tar archive and says whether another one follows. It reads the zeros that fill up the last record, and so also verifies
// the last gzip checksum.
func (a *archive) following() (bool, error) {
	block := make([]byte, 512)
	for {
		n, err := io.ReadFull(a.in, block)
		zero := len(bytes.Trim(block[:n], "\x00")) == 0
		switch {
		case err == io.EOF, errors.Is(err, io.ErrUnexpectedEOF) && a.in.clean && zero:
			return false, nil
		case err != nil:
			return false, err
		case !zero:
			a.in.unread(block)
			a.tar = tar.NewReader(a.in)
			return true, nil
		}
	}
}

// seekTo skips to an offset of the tar stream, without looking at headers.
func (a *archive) seekTo(offset int64) error {
	if a.skip == nil {
		a.skip = make([]byte, skipBytes)
	}
	for a.in.offset < offset {
		n := min(int64(len(a.skip)), offset-a.in.offset)
		if _, err := io.ReadFull(a.in, a.skip[:n]); err != nil {
			return a.fail(err)
		}
	}
	return nil
}

// drain reads to the end of the file, for the checksum.
func (a *archive) drain() error {
	if a.skip == nil {
		a.skip = make([]byte, skipBytes)
	}
	for {
		if _, err := a.in.Read(a.skip); err == io.EOF {
			return nil
		} else if err != nil {
			return a.fail(err)
		}
	}
}

func (a *archive) Close() error { return a.file.Close() }

// fail says where in the archive err happened. A cancelled context stays what it is.
func (a *archive) fail(err error) error {
	if errors.Is(err, errStopped) {
		return err
	}
	e := &ArchiveError{File: a.path, Member: a.last, Position: a.names, Err: truncated(err)}
	if a.in != nil {
		e.Offset = a.in.offset
	}
	return e
}

func truncated(err error) error {
	switch {
	case errors.Is(err, io.ErrUnexpectedEOF), err == io.EOF:
		return fmt.Errorf("the file is cut off: %w", io.ErrUnexpectedEOF)
	case errors.Is(err, tar.ErrHeader):
		return fmt.Errorf("damaged header, or not a tar archive: %w", err)
	case errors.Is(err, gzip.ErrChecksum):
		return fmt.Errorf("the bytes differ from their checksum: %w", err)
	}
	return err
}

// errStopped ends reading because the context ended; whoever waits reports the context's own error.
var errStopped = errors.New("imageloader: stopped")

// contextReader looks at the context before each read.
type contextReader struct {
	ctx    context.Context
	reader io.Reader
}

func (r *contextReader) Read(p []byte) (int, error) {
	if r.ctx.Err() != nil {
		return 0, errStopped
	}
	return r.reader.Read(p)
}

// stream counts the bytes of the tar stream and can take back one block.
type stream struct {
	reader io.Reader
	offset int64
	head   []byte
	clean  bool // the reader ended with io.EOF, not in the middle of something
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
	return n, err
}

func (s *stream) unread(block []byte) {
	s.head = block
	s.offset -= int64(len(block))
}

// seekableStream is the stream of a plain tar: archive/tar seeks over the content of members.
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
