package imageloader

import (
	"archive/tar"
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"path"
	"time"

	"github.com/klauspost/compress/zstd"

	"github.com/torchstream/torchstream/internal/safefile"
)

// source is what an archive is read from: an *os.File, or a test's reader that misbehaves.
type source interface {
	io.ReadSeeker
	io.ReaderAt
	io.Closer
	Stat() (fs.FileInfo, error)
}

// openFile opens a regular file or a directory.
func openFile(path string) (source, error) {
	f, err := safefile.OpenTree(path)
	if errors.Is(err, safefile.ErrNotRegular) {
		return nil, fmt.Errorf("%w: every epoch reads the archive again", err)
	}
	if err != nil {
		return nil, err
	}
	return f, nil
}

// Kinds of archive, as Report names them.
const (
	formatTar   = "tar"
	formatTarGz = "tar.gz"
	formatZstd  = "tar.zst"
	formatTree  = "directory"
)

const (
	gzipReadBytes = 256 << 10 // compressed bytes asked for at a time
	skipBytes     = 256 << 10 // how much is skipped between two looks at the context
	tarBlock      = 512
	magicBytes    = 16 // how much of a member is looked at to tell whether it is an image
)

// What no archive of images exceeds, and a hostile one might.
const (
	maxMembers    = 1 << 28
	maxNameBytes  = 4096 // of a member's path, as PATH_MAX
	maxShards     = 1 << 16
	maxRatio      = 1100 // inflated to compressed bytes: deflate's own limit is 1032
	maxRatioAfter = 64 << 20
	zstdWindow    = 128 << 20
)

// archive walks the members of one archive, once, from front to back, shard after shard. It tolerates what tar -i tolerates (several archives one after another,
// as `cat a.tgz b.tgz` makes), and verifies every gzip checksum up to the end of the file.
type archive struct {
	path   string
	ctx    context.Context
	open   func(string) (source, error)
	shards []shard
	shard  int            // that is being read
	info   fs.FileInfo    // of all shards together
	format string         // of the shard that is being read
	file   source         // the same
	packed *contextReader // counts what was read of it
	in     *stream
	tar    *tar.Reader
	gzip   *gzipReader
	tree   *tree
	undo   func()                // frees what the shard's reader holds
	keep   func(int, checkpoint) // takes the checkpoints of shards; nil: they are not wanted
	mark   *checkpointer         // of the shard, if they are
	names  int                   // members seen
	last   string                // name of the last of them
	sparse bool                  // the last of them is a sparse file
	spent  time.Duration         // in reading files in order, not in inflating what they hold
	skip   []byte
	magic  [magicBytes]byte

	readers sharedFiles
}

// shard is one file of an archive.
type shard struct {
	path   string
	info   fs.FileInfo
	format string // known once the shard was read to its end
}

// member is a tar entry that is not a directory or metadata.
type member struct {
	name   string // cleaned
	shard  int
	offset int64 // of the content in the tar stream
	size   int64
	kind   memberKind
	target string // of a link
	block  uint32 // CRC-32 of the 512 bytes of header right before the content, in a tar
}

type memberKind uint8

const (
	kindFile memberKind = iota
	kindHardLink
	kindSymlink
	kindSparse
	kindOther // device, pipe
)

// openArchive opens path (see shardPaths) and finds out by the first bytes of the first shard what it is. ctx is looked at before every read.
func openArchive(ctx context.Context, path string, open opener) (_ *archive, err error) {
	paths, err := shardPaths(path)
	if err != nil {
		return nil, err
	}
	a := &archive{path: path, ctx: ctx, open: open.during(ctx), shards: make([]shard, len(paths)), shard: -1}
	defer func() {
		if err != nil {
			_ = a.Close() // err says more
		}
	}()
	all := totalInfo{name: path}
	for i, path := range paths {
		if i > 0 && ctx.Err() != nil {
			return nil, errStopped
		}
		file, err := a.open(path)
		if err != nil {
			return nil, fmt.Errorf("imageloader: %w", err)
		}
		info, err := file.Stat()
		if i == 0 && err == nil {
			a.file = file
		} else {
			_ = file.Close() // only looked at
		}
		if err != nil {
			return nil, fmt.Errorf("imageloader: %w", err)
		}
		a.shards[i] = shard{path: path, info: info}
		all.add(info)
	}
	a.info = all
	if err := a.begin(0); err != nil {
		return nil, err
	}
	return a, nil
}

// begin goes to a shard. a.file may be open already.
func (a *archive) begin(i int) error {
	a.shard = i
	if a.file == nil {
		file, err := a.openAgain(i)
		if err != nil {
			return fmt.Errorf("imageloader: %w", err)
		}
		a.file = file
	}
	return a.start(&a.shards[i])
}

// openAgain opens a shard, which must still be the one that openArchive saw: what is known of it is of no use for another one.
func (a *archive) openAgain(i int) (source, error) {
	s := &a.shards[i]
	file, err := a.open(s.path)
	if err != nil {
		return nil, err
	}
	info, err := file.Stat()
	if err == nil && !s.info.IsDir() && !sameArchive(info, s.info) { // a directory's files are looked at one by one
		err = fmt.Errorf("%s: %w", s.path, ErrSourceChanged)
	}
	if err != nil {
		_ = file.Close() // err says more
		return nil, err
	}
	return file, nil
}

func (a *archive) start(s *shard) error {
	a.in, a.tar, a.gzip, a.tree, a.mark, a.sparse = nil, nil, nil, nil, nil, false
	switch mode := s.info.Mode(); {
	case mode.IsDir():
		a.format, a.in = formatTree, &stream{}
		a.tree = &tree{root: s.path}
		a.undo = a.tree.close
		return nil
	case !mode.IsRegular():
		return a.fail(errors.New("it is not a regular file: every epoch reads the archive again, so it can't be a pipe or a device"))
	}
	head := make([]byte, 512)
	n, err := a.file.ReadAt(head, 0)
	if err != nil && err != io.EOF {
		return a.fail(err)
	}
	head = head[:n]
	counted := &contextReader{ctx: a.ctx, reader: a.file, spent: &a.spent}
	a.packed = counted
	switch {
	case n == 0:
		return a.fail(errors.New("the file is empty"))
	case bytes.HasPrefix(head, []byte{0x1f, 0x8b}):
		a.format = formatTarGz
		gz, err := newGzipReader(counted)
		if err != nil {
			return a.fail(fmt.Errorf("gzip header: %w", truncated(err)))
		}
		a.gzip, a.undo = gz, gz.close
		if a.keep != nil {
			if err := a.note(); err != nil {
				return a.fail(err)
			}
		}
		a.in = &stream{reader: &ratioReader{gz, counted, 0}}
		a.tar = tar.NewReader(a.in)
	case bytes.HasPrefix(head, []byte{0x28, 0xb5, 0x2f, 0xfd}), len(head) >= 4 && head[0]&0xf0 == 0x50 && bytes.Equal(head[1:4], []byte{0x2a, 0x4d, 0x18}):
		a.format = formatZstd
		z, err := zstd.NewReader(bufio.NewReaderSize(counted, gzipReadBytes), zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(zstdWindow))
		if err != nil {
			return a.fail(fmt.Errorf("zstd: %w", err))
		}
		a.undo = z.Close
		a.in = &stream{reader: &ratioReader{z, counted, 0}}
		a.tar = tar.NewReader(a.in)
	default:
		for _, other := range foreign {
			if bytes.HasPrefix(head, other.magic) {
				return a.fail(fmt.Errorf("it is %s; repack it as .tar or .tar.gz", other.name))
			}
		}
		a.format = formatTar
		seekable := &seekableStream{stream{reader: counted}, a.file}
		a.in = &seekable.stream
		a.tar = tar.NewReader(seekable)
	}
	return nil
}

// streamed says whether going through the archive means reading all of it.
func (a *archive) streamed() bool { return a.format == formatTarGz || a.format == formatZstd }

// noteCheckpoints makes the archive tell keep where its shards can be entered again, in order. It is called before anything is read.
func (a *archive) noteCheckpoints(keep func(shard int, c checkpoint)) error {
	a.keep = keep
	if a.gzip != nil {
		return a.note()
	}
	return nil
}

func (a *archive) note() error {
	shard := a.shard
	a.mark = newCheckpointer(func(c checkpoint) { a.keep(shard, c) }, func() int64 {
		if a.in == nil { // the first one
			return 0
		}
		return a.in.offset
	})
	return a.gzip.mark(a.mark.note)
}

// foreign are formats that people might hand over, by magic.
var foreign = []struct {
	name  string
	magic []byte
}{
	{"a zip file", []byte("PK\x03\x04")},
	{"compressed with bzip2", []byte("BZh")},
	{"compressed with xz", []byte{0xfd, '7', 'z', 'X', 'Z', 0}},
	{"a JPEG image, not an archive", []byte{0xff, 0xd8, 0xff}},
	{"a PNG image, not an archive", []byte("\x89PNG")},
}

// next goes to the next member that is not a directory or metadata; io.EOF at the end of the archive. All other errors are *ArchiveError.
func (a *archive) next() (member, error) {
	for {
		if a.names >= maxMembers {
			return member{}, a.fail(fmt.Errorf("more than %d members", maxMembers))
		}
		if a.tree != nil {
			m, err := a.tree.next()
			if err == io.EOF {
				if err = a.advance(); err != nil {
					return member{}, err
				}
				continue
			}
			if err != nil {
				return member{}, a.fail(err)
			}
			a.names++
			a.last = m.name
			m.shard = a.shard
			return m, nil
		}
		// archive/tar would skip in small steps. But not over a sparse file: its holes, of any size that a header of 512 bytes claims, would be read as zeros.
		if a.streamed() && a.names > 0 && !a.sparse {
			for {
				_, err := a.tar.Read(a.scratch())
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
				if err := a.advance(); err != nil {
					return member{}, err
				}
			}
			continue
		}
		if err != nil && !errors.Is(err, tar.ErrInsecurePath) { // nothing is extracted: names are labels only
			return member{}, a.fail(err)
		}
		a.names++
		a.last = h.Name
		if len(h.Name) > maxNameBytes {
			a.last = h.Name[:maxNameBytes]
			return member{}, a.fail(fmt.Errorf("a member's path has %d bytes, over the limit of %d", len(h.Name), maxNameBytes))
		}
		m := member{name: path.Clean(h.Name), shard: a.shard, offset: a.in.offset, size: h.Size, target: h.Linkname, block: crc32.ChecksumIEEE(a.in.block[:])}
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

// advance goes to the next shard; io.EOF if there is none.
func (a *archive) advance() error {
	a.shards[a.shard].format = a.format
	if a.mark != nil {
		a.mark.finish()
	}
	if a.shard+1 == len(a.shards) {
		return io.EOF
	}
	if err := a.closeShard(); err != nil {
		return a.fail(err)
	}
	return a.begin(a.shard + 1)
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
	if a.tree != nil {
		if err := a.tree.read(p); err != nil {
			return a.fail(err)
		}
		return nil
	}
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

// seekTo skips to an offset of a shard's tar stream, without looking at headers.
func (a *archive) seekTo(shard int, offset int64) error {
	for a.shard < shard {
		if err := a.drain(); err != nil {
			return err
		}
	}
	for a.in.offset < offset {
		n := min(int64(len(a.scratch())), offset-a.in.offset)
		if _, err := io.ReadFull(a.in, a.skip[:n]); err != nil {
			return a.fail(err)
		}
	}
	return nil
}

// drain reads to the end of the shard, for its checksum, and goes to the next one, if there is one.
func (a *archive) drain() error {
	for {
		if _, err := a.in.Read(a.scratch()); err == io.EOF {
			break
		} else if err != nil {
			return a.fail(err)
		}
	}
	if err := a.advance(); err != io.EOF {
		return err
	}
	return nil
}

// drainAll reads to the end of the last shard.
func (a *archive) drainAll() error {
	for a.shard+1 < len(a.shards) {
		if err := a.drain(); err != nil {
			return err
		}
	}
	return a.drain()
}

func (a *archive) scratch() []byte {
	if a.skip == nil {
		a.skip = make([]byte, skipBytes)
	}
	return a.skip
}

func (a *archive) Close() error {
	err := a.closeShard()
	if e := a.readers.close(); err == nil {
		err = e
	}
	return err
}

func (a *archive) closeShard() error {
	if a.undo != nil {
		a.undo()
		a.undo = nil
	}
	if a.file == nil {
		return nil
	}
	file := a.file
	a.file = nil
	return file.Close()
}

// fail says where in the archive err happened. A cancelled context stays what it is.
func (a *archive) fail(err error) error {
	if errors.Is(err, errStopped) {
		return err
	}
	file := a.path
	if a.shard >= 0 {
		file = a.shards[a.shard].path
	}
	e := &ArchiveError{File: file, Member: a.last, Position: a.names, Err: truncated(err)}
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

// contextReader looks at the context before each read, and counts bytes and time.
type contextReader struct {
	ctx    context.Context
	reader io.Reader
	count  int64
	spent  *time.Duration
}

func (r *contextReader) Read(p []byte) (int, error) {
	if r.ctx.Err() != nil {
		return 0, errStopped
	}
	began := time.Now()
	n, err := r.reader.Read(p)
	*r.spent += time.Since(began)
	r.count += int64(n)
	return n, err
}

// ratioReader ends a stream that inflates to more than any archive of images does.
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

// stream counts the bytes of the tar stream, can take back one block, and knows the last one that it gave.
type stream struct {
	reader io.Reader
	offset int64
	head   []byte
	clean  bool // the reader ended with io.EOF, not in the middle of something
	block  [tarBlock]byte
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
	if n < tarBlock {
		copy(s.block[:], s.block[n:])
		copy(s.block[tarBlock-n:], p[:n])
	} else {
		copy(s.block[:], p[n-tarBlock:n])
	}
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
