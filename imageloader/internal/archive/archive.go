// Package archive reads the members of an archive.
//
// An [Archive] is a list of shards. Each shard is a .tar, .tar.gz, .tar.zst, .zip or Parquet file,
// or a directory, on the local file system or behind a [Source]. There are three ways to read an
// archive:
//
//   - [Archive.Members] walks every member once, from the first shard to the last. Peek, Content
//     and Checksum read the current member.
//   - [Archive.ReadForward] skips to members whose offsets are known from an index, in ascending
//     order, without parsing their headers.
//   - A [Reader] has random access to every shard. In a .tar.gz it starts inflating at a [Mark], a
//     [Checkpoint] that a walk has recorded.
//
// The first two move the archive's position, so they belong to one goroutine. Any number of Readers
// may read at the same time, even during a walk.
//
// The package knows nothing about images, labels, indexes or loaders. It extracts no files: a
// member's path is only a name, never a path on disk.
package archive

import (
	"archive/tar"
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"time"

	"github.com/klauspost/compress/zstd"

	"github.com/torchstream/torchstream/internal/imagecapi"
	"github.com/torchstream/torchstream/internal/safefile"
)

// Formats of shards.
const (
	Tar     = "tar"
	TarGzip = "tar.gz"
	TarZstd = "tar.zst"
	Zip     = "zip"
	Parquet = "parquet"
	Tree    = "directory"
)

// Limits that no real archive of images exceeds, but a hostile archive might.
const (
	MaxMembers   = 1 << 28
	MaxNameBytes = 4096 // of a member's path, like PATH_MAX
	MaxShards    = 1 << 16

	maxRatio      = 1100 // inflated to compressed bytes: deflate's own limit is 1032
	maxRatioAfter = 64 << 20
	maxZstdWindow = 128 << 20
)

const (
	// BlockBytes is the size of a tar header. In a plain .tar a header is right before each
	// member's content.
	BlockBytes = 512

	gzipReadBytes = 256 << 10 // compressed bytes per read
)

// File is an open shard: an *os.File, a remote file, or a faulty file in a test.
type File interface {
	io.ReadSeeker
	io.ReaderAt
	io.Closer
	Stat() (fs.FileInfo, error)
}

// Config sets how shards are found and opened. The zero value is valid.
type Config struct {
	// OpenFile opens a local file or directory; nil: safefile.OpenTree.
	OpenFile func(path string) (File, error)
	// OpenSource opens a URL; nil: OpenHTTP.
	OpenSource func(ctx context.Context, url string) (Source, error)
	// Again says that the archive has been open before. A failing server is then retried for as
	// long as during a read. Archive.Reopen sets it.
	Again bool
	// Requests records failed requests for URLs; nil: they are not recorded.
	Requests *Requests
	// Mappings speed up Reader.ReadPieces; nil: it calls ReadAt. All archives that share Mappings
	// have the same path.
	Mappings *Mappings
	// Ignore reports whether a pattern such as *.tar skips the file at path; nil: no file is
	// skipped.
	Ignore func(path string) bool
	// Columns selects the columns of Parquet files.
	Columns Columns
	// RowNames adds the file and the row to the names of Parquet files' images.
	RowNames bool
	// Inflaters is the number of goroutines that inflate a local .tar.gz ahead of a walk, at most
	// 16. Each needs about 4 MB of memory, and up to 16 MB for a file that shrinks much. With
	// fewer than 2, the walk inflates by itself.
	Inflaters int
}

// Archive is an open archive. Like tar -i, it accepts a shard that consists of several tar
// archives, such as the output of `cat a.tgz b.tgz`. It verifies every gzip checksum up to the end
// of the file.
type Archive struct {
	files
	ctx    context.Context
	config Config
	open   func(path string, again bool) (File, error)

	at      openShard
	member  currentMember
	folders emptyFolders
	scratch []byte // see room

	keep     func(shard int, c Checkpoint) // receives the checkpoints; nil: none are made
	readTime time.Duration                 // spent waiting for files during sequential reads, without inflating
	shared   sharedFiles
	contents
}

// contents holds the central directories of zips and the footers of Parquet files.
type contents struct {
	zips      zipDirectories
	parquets  parquetFiles
	imageless int // number of rows without an image, among the rows of Parquet files read so far
}

// files are the shards of an archive.
type files struct {
	path    string
	shards  []Shard
	info    fs.FileInfo // of all shards together
	inTrees int64       // total size of the files that the walk has reached in directories
}

// openShard is the shard that a walk reads.
type openShard struct {
	index      int // -1 before the first shard
	format     string
	file       File
	packed     *contextReader // counts the bytes read from file
	in         *stream
	tar        *tar.Reader
	gzip       *gzipReader
	tree       *tree
	zip        *zipWalk
	table      *parquetWalk
	release    func() // frees the C memory of the shard's decompressor
	checkpoint *checkpointer
}

// clear removes the readers of the previous shard.
func (s *openShard) clear() {
	s.in, s.tar, s.gzip, s.tree, s.zip, s.table, s.checkpoint = nil, nil, nil, nil, nil, nil, nil
}

// streamed reports whether the shard is compressed, so that a walk reads all of it.
func (s *openShard) streamed() bool { return s.format == TarGzip || s.format == TarZstd }

// bytes returns the number of bytes read from the file.
func (s *openShard) bytes() int64 {
	if s.streamed() {
		return s.packed.count
	}
	return s.in.offset
}

// read fills p from the current member.
func (s *openShard) read(p []byte) error {
	if s.tree != nil {
		return s.tree.read(p)
	}
	if s.zip != nil {
		return s.zip.read(p)
	}
	if s.table != nil {
		return s.table.read(p)
	}
	_, err := io.ReadFull(s.tar, p)
	return err
}

// close frees the readers and closes the file.
func (s *openShard) close() error {
	if s.release != nil {
		s.release()
		s.release = nil
	}
	if s.file == nil {
		return nil
	}
	file := s.file
	s.file = nil
	return file.Close()
}

// Shard is one file of an archive.
type Shard struct {
	Path   string
	Info   fs.FileInfo
	Format string // "" until the shard has been read to its end
}

// Open opens the archive at path, which [ShardPaths] expands, and detects the format of the first
// shard. Every read first checks ctx, and returns [ErrStopped] once ctx is done. The caller closes
// the archive.
func Open(ctx context.Context, path string, c Config) (_ *Archive, err error) {
	paths, err := ShardPaths(path, c.Ignore)
	if err != nil {
		return nil, err
	}
	a := &Archive{ctx: ctx, config: c, open: c.opener(ctx),
		files: files{path: path, shards: make([]Shard, len(paths))}, at: openShard{index: -1}}
	defer func() {
		if err != nil {
			_ = a.Close() // err says more
		}
	}()
	all := totalInfo{name: path, shards: a.shards}
	for i, path := range paths {
		if i > 0 && ctx.Err() != nil {
			return nil, ErrStopped
		}
		file, err := a.open(path, c.Again || i > 0) // the first shard's server has already answered
		if err != nil {
			return nil, fmt.Errorf("imageloader: %w", err)
		}
		info, err := file.Stat()
		if i == 0 && err == nil {
			a.at.file = file
		} else {
			_ = file.Close() // only opened
		}
		if err != nil {
			return nil, fmt.Errorf("imageloader: %w", err)
		}
		a.shards[i] = Shard{Path: path, Info: info}
		all.add(info)
	}
	a.info = all
	if err := a.begin(0); err != nil {
		return nil, err
	}
	return a, nil
}

// Reopen opens the archive again, positioned at its start. The caller closes both.
func (a *Archive) Reopen() (*Archive, error) {
	c := a.config
	c.Again = true
	return Open(a.ctx, a.path, c)
}

// Path returns the path that was passed to Open, as messages show it (see [Shown]).
func (a *Archive) Path() string { return Shown(a.path) }

// Context returns the context that was passed to Open.
func (a *Archive) Context() context.Context { return a.ctx }

// Info describes all shards together: the sum of their sizes and the latest of their times.
func (a *Archive) Info() fs.FileInfo { return a.info }

// FileBytes returns the total size of all shards. In a directory, it counts only the files that the
// walk has reached.
func (a *Archive) FileBytes() int64 { return a.files.bytes() }

func (f *files) bytes() int64 {
	bytes := f.inTrees
	for _, s := range f.shards {
		if !s.Info.IsDir() {
			bytes += s.Info.Size()
		}
	}
	return bytes
}

// MaxStreamBytes returns an upper bound for the size of the inflated tar stream of a shard with
// this format and file size. A walk fails if a stream is larger.
func MaxStreamBytes(format string, size int64) int64 {
	switch {
	case format == Tar:
		return size
	case size >= math.MaxInt64/maxRatio:
		return math.MaxInt64
	}
	return max(maxRatioAfter, (size+1)*maxRatio)
}

// Shards returns the archive's files, in order. The caller must not change them.
func (a *Archive) Shards() []Shard { return a.shards }

// Format returns the format of the first shard.
func (a *Archive) Format() string { return cmp.Or(a.shards[0].Format, a.at.format) }

// Streamed reports whether the current shard is compressed, so that a walk reads all of it.
func (a *Archive) Streamed() bool { return a.at.streamed() }

// PlainTar reports whether the current shard is an uncompressed .tar.
func (a *Archive) PlainTar() bool { return a.at.format == Tar }

// InZip reports whether the current shard is a zip.
func (a *Archive) InZip() bool { return a.at.format == Zip }

// Position returns the number of members that the walk has reached, including the current one.
func (a *Archive) Position() int { return a.member.position }

// ReadTime returns the time that sequential reads have waited for files, without the time for
// inflating.
func (a *Archive) ReadTime() time.Duration { return a.readTime }

// Progress is the part of an archive that has been read.
type Progress struct {
	Members           int
	Bytes, TotalBytes int64 // of the files
}

// Progress returns how much of the archive has been read.
func (a *Archive) Progress() Progress {
	p := Progress{Members: a.member.position, TotalBytes: a.info.Size()}
	for i := range a.at.index {
		p.Bytes += a.shards[i].Info.Size()
	}
	p.Bytes += a.at.bytes()
	return p
}

// begin starts the walk of shard i. Its file may already be open as a.at.file.
func (a *Archive) begin(i int) error {
	a.at.index = i
	if a.at.file == nil {
		file, err := a.openAgain(i)
		if err != nil {
			return fmt.Errorf("imageloader: %w", err)
		}
		a.at.file = file
	}
	if err := a.start(&a.shards[i]); err != nil {
		return err
	}
	if i > 0 && (a.at.format == Parquet) != (a.shards[0].Format == Parquet) {
		return a.Fail(fmt.Errorf("it is a %s, and %s a %s: Parquet files have no shards of other formats",
			a.at.format, Shown(a.shards[0].Path), a.shards[0].Format))
	}
	return nil
}

// openAgain opens a shard that Open has opened before. It returns an error if the file has changed
// since, because an index would not match another file.
func (a *Archive) openAgain(i int) (File, error) {
	s := &a.shards[i]
	file, err := a.open(s.Path, true)
	if err != nil {
		return nil, err
	}
	info, err := file.Stat()
	if err == nil && !s.Info.IsDir() { // a directory's files are checked one by one
		if err = changed(s.Path, describe(info), describe(s.Info)); err != nil {
			err = fmt.Errorf("%s: %w", Shown(s.Path), err)
		}
	}
	if err != nil {
		_ = file.Close() // err says more
		return nil, err
	}
	return file, nil
}

// start detects the format of the shard in a.at.file and creates its readers.
func (a *Archive) start(s *Shard) error {
	a.at.clear()
	a.member.sparse = false
	switch mode := s.Info.Mode(); {
	case mode.IsDir():
		a.at.format, a.at.in = Tree, &stream{}
		a.at.tree = &tree{ctx: a.ctx, root: s.Path}
		a.at.release = a.at.tree.close
		return nil
	case !mode.IsRegular():
		return a.Fail(errors.New("it is not a regular file: " +
			"every epoch reads the archive again, so it can't be a pipe or a device"))
	}
	head := make([]byte, 512)
	n, err := a.at.file.ReadAt(head, 0)
	if err != nil && err != io.EOF {
		return a.Fail(err)
	}
	head = head[:n]
	a.at.packed = &contextReader{ctx: a.ctx, reader: a.at.file, spent: &a.readTime}
	switch {
	case n == 0:
		return a.Fail(errors.New("the file is empty"))
	case bytes.HasPrefix(head, []byte{0x1f, 0x8b}):
		return a.startGzip()
	case isZstd(head):
		return a.startZstd()
	case isZip(head):
		return a.startZip()
	case isParquet(head):
		return a.startParquet()
	}
	if err := foreignError(head); err != nil {
		return a.Fail(err)
	}
	if !bytes.Contains(head, []byte{0}) { // a header pads its fields with zeros
		return a.Fail(fmt.Errorf(
			"it is no archive (it begins with %.20q): want a .tar, .tar.gz, .tar.zst, .zip or .parquet, or a folder", head))
	}
	a.at.format = Tar
	seekable := &seekableStream{stream{reader: a.at.packed}, a.at.file}
	a.at.in = &seekable.stream
	a.at.tar = tar.NewReader(seekable)
	return nil
}

func (a *Archive) startGzip() error {
	a.at.format = TarGzip
	gz, err := newGzipReader(a.at.packed)
	var library *imagecapi.Error
	if errors.As(err, &library) { // the archive is fine: the library is missing, or out of memory
		return fmt.Errorf("imageloader: %w", err)
	}
	if err != nil {
		return a.Fail(fmt.Errorf("gzip header: %w", Explain(err)))
	}
	a.at.gzip, a.at.release = gz, gz.close
	if file, ok := a.at.file.(*os.File); ok {
		gz.inflateAhead(a.ctx, a.at.packed, file, a.shards[a.at.index].Info.Size(), gzipChunkBytes, a.config.Inflaters)
	}
	if a.keep != nil {
		if err := a.noteCheckpoints(); err != nil {
			return a.Fail(err)
		}
	}
	a.at.in = &stream{reader: &ratioReader{gz, a.at.packed, 0}}
	a.at.tar = tar.NewReader(a.at.in)
	return nil
}

func (a *Archive) startZstd() error {
	a.at.format = TarZstd
	packed := bufio.NewReaderSize(a.at.packed, gzipReadBytes)
	z, err := zstd.NewReader(packed, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(maxZstdWindow))
	if err != nil {
		return a.Fail(fmt.Errorf("zstd: %w", err))
	}
	a.at.release = z.Close
	a.at.in = &stream{reader: &ratioReader{z, a.at.packed, 0}}
	a.at.tar = tar.NewReader(a.at.in)
	return nil
}

// isZstd reports whether a file starts with a zstd frame or a skippable frame.
func isZstd(head []byte) bool {
	return bytes.HasPrefix(head, []byte{0x28, 0xb5, 0x2f, 0xfd}) ||
		len(head) >= 4 && head[0]&0xf0 == 0x50 && bytes.Equal(head[1:4], []byte{0x2a, 0x4d, 0x18})
}

// Advice for a file of a foreign format. RepackArrow makes a Parquet file of Arrow files.
const (
	asTar       = "repack it as .tar or .tar.gz"
	RepackArrow = `repack it in Python: datasets.load_from_disk("FOLDER").to_parquet("train.parquet"), ` +
		"where FOLDER is the folder with the .arrow files"
)

// foreign lists formats that a user might pass by mistake, with their first bytes.
var foreign = []struct {
	name  string
	magic []byte
	next  string // what to do
}{
	{"a zip file", []byte("PK\x03\x04"), asTar},
	{"a 7z archive", []byte("7z\xbc\xaf\x27\x1c"), asTar},
	{"a RAR archive", []byte("Rar!\x1a\x07"), asTar},
	{"compressed with bzip2", []byte("BZh"), asTar},
	{"compressed with xz", []byte{0xfd, '7', 'z', 'X', 'Z', 0}, asTar},
	{"a Parquet file", []byte("PAR1"), asTar},
	{"an HDF5 file: write its images to files, in a folder for each class", []byte("\x89HDF\r\n\x1a\n"), asTar},
	{"an Arrow file", []byte("ARROW1"), RepackArrow},
	{"an Arrow file, as save_to_disk of Hugging Face's datasets writes it", []byte("\xff\xff\xff\xff"), RepackArrow},
	{"a JPEG image, not an archive", []byte{0xff, 0xd8, 0xff}, asTar},
	{"a PNG image, not an archive", []byte("\x89PNG"), asTar},
}

// foreignError returns an error if a file or a stream starts with the first bytes of a foreign
// format, and nil otherwise.
func foreignError(head []byte) error {
	for _, other := range foreign {
		if bytes.HasPrefix(head, other.magic) {
			return fmt.Errorf("it is %s; %s", other.name, other.next)
		}
	}
	return nil
}

// innerError returns an error if the first block of a compressed stream is not a tar header but the
// start of another format. Otherwise it returns nil.
func innerError(block []byte) error {
	if bytes.HasPrefix(block, []byte{0x1f, 0x8b}) || isZstd(block) {
		return errors.New("it is compressed twice: decompress it once (gzip -dc or zstd -dc FILE > NEW)")
	}
	if err := foreignError(block); err != nil {
		return fmt.Errorf("inside the compression: %w", err)
	}
	return nil
}

// Checkpoints registers a function that receives the checkpoints of gzip shards, in order. The
// archive calls keep for each checkpoint that [Archive.WantCheckpoint] has asked for. Checkpoints
// must be called before the first read.
func (a *Archive) Checkpoints(keep func(shard int, c Checkpoint)) error {
	a.keep = keep
	if a.at.gzip != nil {
		return a.noteCheckpoints()
	}
	return nil
}

func (a *Archive) noteCheckpoints() error {
	shard := a.at.index
	a.at.checkpoint = newCheckpointer(func(c Checkpoint) { a.keep(shard, c) }, func() int64 {
		if a.at.in == nil { // the first checkpoint
			return 0
		}
		return max(0, a.at.in.offset-HeaderBytes) // the archive may already have read the headers of the next member
	})
	return a.at.gzip.mark(a.at.checkpoint.note)
}

// advance moves to the next shard. It returns io.EOF after the last shard.
func (a *Archive) advance() error {
	a.shards[a.at.index].Format = a.at.format
	if a.at.checkpoint != nil {
		a.at.checkpoint.finish()
	}
	if a.at.index+1 == len(a.shards) {
		return io.EOF
	}
	if err := a.at.close(); err != nil {
		return a.Fail(err)
	}
	return a.begin(a.at.index + 1)
}

// Fail wraps err in an [*Error] that names the current position in the archive. It returns
// ErrStopped unchanged.
func (a *Archive) Fail(err error) error {
	if errors.Is(err, ErrStopped) {
		return err
	}
	file := a.path
	if a.at.index >= 0 {
		file = a.shards[a.at.index].Path
		err = explainTrailing(err, a.shards[a.at.index].Info.Size())
	}
	e := &Error{File: Shown(file), Member: a.member.name, Position: a.member.position, Err: Explain(err)}
	if a.at.in != nil && a.at.zip == nil && a.at.table == nil {
		e.Offset = a.at.in.offset
	}
	return e
}

// Close closes all files of the archive. All readers must already be closed.
func (a *Archive) Close() error {
	err := a.at.close()
	if e := a.shared.close(); err == nil {
		err = e
	}
	return err
}

// openFile opens a regular file or a directory, and never blocks on a pipe.
func openFile(path string) (File, error) {
	f, err := safefile.OpenTree(path)
	if errors.Is(err, safefile.ErrNotRegular) {
		return nil, fmt.Errorf("%w: every epoch reads the archive again", err)
	}
	if err != nil {
		return nil, err
	}
	return f, nil
}
