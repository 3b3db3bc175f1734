package archive

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"iter"
	"maps"
	"path"
	"slices"
	"strings"
)

// Member is an archive entry that is neither a directory nor metadata.
type Member struct {
	Name  string // path in the archive, cleaned
	Shard int
	// Offset is the offset of the content in the shard's (inflated) tar stream, or of the local
	// header in a zip.
	Offset int64
	Size   int64 // of the content, in bytes
	Kind   Kind
	// Block is the CRC-32 of the 512 bytes of header right before the content, in a tar.
	Block uint32
	// Labels are the labels of a row of a Parquet file.
	Labels []string
	// Stored means that the content is not compressed in a zip or a Parquet file. In a Parquet
	// file, Offset is then a position in the file. Otherwise a walk sets Offset to the position in
	// the stream of all decompressed pages.
	Stored bool
	// Page is an argument for ReadForward, for an image that is not Stored: the offset of the
	// image's page in the file. ReadForward then takes Offset as the position in this page after
	// decompression.
	Page int64
}

// currentMember is the last member that was reached. Errors name it.
type currentMember struct {
	position int // its ordinal, from 1
	name     string
	size     int64 // bytes of content to read
	sparse   bool
	peeked   []byte // the first bytes of the content, if already read
	magic    [magicBytes]byte
}

// Kind is the kind of a member. Indexes store these numbers.
type Kind uint8

// The kinds of members. Only a Regular member has content.
const (
	Regular Kind = iota // a regular file
	HardLink
	Symlink
	Sparse
	Other // a device, a pipe, or a part of a file
	// Kinds in a directory only, because its links are followed:
	BrokenLink // a symbolic link to nothing
	LinkLoop   // a symbolic link to a directory that contains it
	// Kinds in a zip only:
	Encrypted
	OtherMethod // compressed by a method other than deflate
)

const (
	// PeekBytes is the maximum number of bytes that Peek returns.
	PeekBytes = skipBytes

	skipBytes  = 256 << 10 // bytes to skip between two checks of the context
	magicBytes = 16        // enough to recognise an image
)

// Members walks the archive from its current position to its end. If an error ends the walk early,
// it is in the last pair: an [*Error], or ErrStopped.
//
// Peek, Content, Checksum and Pieces read the current member.
func (a *Archive) Members() iter.Seq2[Member, error] {
	return func(yield func(Member, error) bool) {
		for {
			m, err := a.next()
			if err == io.EOF {
				return
			}
			if !yield(m, err) || err != nil {
				return
			}
		}
	}
}

// next moves to the next member. It returns io.EOF at the end of the archive.
func (a *Archive) next() (m Member, err error) {
	a.member.peeked, a.member.size = nil, 0
	for {
		if a.ctx.Err() != nil {
			return m, ErrStopped
		}
		if a.member.position >= MaxMembers {
			return m, a.Fail(fmt.Errorf("more than %d members", MaxMembers))
		}
		var found bool
		switch {
		case a.at.tree != nil:
			m, found, err = a.nextOfTree()
		case a.at.zip != nil:
			m, found, err = a.nextOfZip()
		case a.at.table != nil:
			m, found, err = a.nextOfParquet()
		default:
			m, found, err = a.nextOfTar()
		}
		if err != nil || found {
			return m, err
		}
	}
}

// nextOfTree moves to the next file of a directory, or to the next shard.
func (a *Archive) nextOfTree() (m Member, found bool, err error) {
	m, err = a.at.tree.next()
	if err == io.EOF {
		for _, name := range a.at.tree.empty {
			a.folders.folder(name)
		}
		return m, false, a.advance()
	}
	if err != nil {
		return m, false, a.Fail(err)
	}
	a.member.position++
	a.member.name = m.Name
	m.Shard = a.at.index
	if m.Kind == Regular {
		a.inTrees += m.Size
	}
	a.member.begin(&m)
	return m, true, nil
}

// EmptyFolders returns the sorted paths of directories without an entry. Call it after a walk to
// the end of the archive. In a tar, the walk remembers at most 65,536 directories whose first entry
// has not come yet.
func (a *Archive) EmptyFolders() []string { return slices.Sorted(maps.Keys(a.folders.empty)) }

// maxEmpty is the maximum number of directories that are remembered.
const maxEmpty = 1 << 16

// emptyFolders are the directories that have had no entry so far. Their names are clean.
type emptyFolders struct {
	empty   map[string]struct{}
	entered string // the directory of the last entry
}

// folder remembers a directory until it has an entry.
func (f *emptyFolders) folder(name string) {
	if f.empty == nil {
		f.empty = map[string]struct{}{}
	}
	if len(f.empty) < maxEmpty && name != "." {
		f.empty[name] = struct{}{}
		f.entered = ""
	}
}

// entry records that all directories above name have an entry.
func (f *emptyFolders) entry(name string) {
	if len(f.empty) == 0 {
		return
	}
	slash := strings.LastIndexByte(name, '/')
	if slash <= 0 || name[:slash] == f.entered {
		return
	}
	f.entered = name[:slash]
	for dir := f.entered; ; dir = dir[:slash] {
		delete(f.empty, dir)
		if slash = strings.LastIndexByte(dir, '/'); slash <= 0 {
			return
		}
	}
}

// nextOfTar moves to the next header of a tar. It finds no member if the header belongs to a
// directory or metadata, or at the end of the tar archive or the shard.
func (a *Archive) nextOfTar() (m Member, found bool, err error) {
	if err := a.skipContent(); err != nil {
		return m, false, a.Fail(err)
	}
	h, err := a.at.tar.Next()
	if err == io.EOF {
		return m, false, a.endOfTar()
	}
	if err != nil && !errors.Is(err, tar.ErrInsecurePath) { // harmless: no file is extracted
		return m, false, a.Fail(a.headerError(err))
	}
	a.member.position++
	a.member.name = h.Name
	if len(h.Name) > MaxNameBytes {
		a.member.name = h.Name[:MaxNameBytes]
		return m, false, a.Fail(fmt.Errorf("a member's path has %d bytes, over the limit of %d",
			len(h.Name), MaxNameBytes))
	}
	if h.Typeflag == typeContinued {
		return m, false, a.Fail(errVolume)
	}
	kind, ok := kindOf(h)
	name := cleaned(h.Name)
	a.folders.entry(name)
	if !ok {
		if h.Typeflag == tar.TypeDir {
			a.folders.folder(name)
		}
		return m, false, nil
	}
	m = Member{
		Name:   name,
		Shard:  a.at.index,
		Offset: a.at.in.offset,
		Size:   h.Size,
		Kind:   kind,
		Block:  crc32.ChecksumIEEE(a.at.in.block[:]),
	}
	a.member.sparse = kind == Sparse
	a.member.begin(&m)
	return m, true, nil
}

// cleaned returns path.Clean(name), faster for names that are clean.
func cleaned(name string) string {
	if name == "" || name[0] == '.' || name[len(name)-1] == '/' ||
		strings.Contains(name, "/.") || strings.Contains(name, "//") {
		return path.Clean(name)
	}
	return name
}

// begin makes m the current member.
func (c *currentMember) begin(m *Member) {
	if m.Kind == Regular {
		c.size = m.Size
	}
}

// skipContent skips the rest of the current member in a stream. archive/tar would skip it too, but
// in small steps. skipContent leaves a sparse file to archive/tar's Next. Reading the file here
// would also produce its holes as zeros, and a header of 512 bytes may claim holes of any size.
func (a *Archive) skipContent() error {
	if !a.Streamed() || a.member.position == 0 || a.member.sparse {
		return nil
	}
	for {
		_, err := a.at.tar.Read(a.room())
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// Type flags of metadata entries in GNU and Solaris tars.
const (
	typeContinued   = 'M' // the rest of a file from another volume
	typeDumpDir     = 'D' // the names in a directory of an incremental backup
	typeVolumeLabel = 'V'
	typeOldNames    = 'N'
	typeACL         = 'A'
	typeAttributes  = 'E'
	typeInode       = 'I'
	typeOldExtended = 'X'
)

var errVolume = errors.New("it is a volume of a multi-volume tar, and has a part of a file: " +
	"unpack all volumes together (tar -xM -f FIRST -f SECOND ...) and pack the files again")

// headerError explains an error in a header. The first block of a compressed stream may be the
// start of another format.
func (a *Archive) headerError(err error) error {
	if n := a.at.in.offset; a.Streamed() && n <= BlockBytes {
		if inner := innerError(a.at.in.block[BlockBytes-n:]); inner != nil {
			return inner
		}
	}
	return err
}

// kindOf returns the kind of a tar header's member. ok is false for directories and metadata.
func kindOf(h *tar.Header) (Kind, bool) {
	switch h.Typeflag {
	case tar.TypeReg, tar.TypeCont, '\x00':
		for key := range h.PAXRecords {
			if len(key) > len("GNU.sparse.") && strings.HasPrefix(key, "GNU.sparse.") {
				return Sparse, true
			}
		}
		return Regular, true
	case tar.TypeDir, tar.TypeXGlobalHeader,
		typeDumpDir, typeVolumeLabel, typeOldNames, typeACL, typeAttributes, typeInode, typeOldExtended:
		return 0, false
	case tar.TypeLink:
		return HardLink, true
	case tar.TypeSymlink:
		return Symlink, true
	case tar.TypeGNUSparse:
		return Sparse, true
	}
	return Other, true
}

// endOfTar continues after the end of a tar archive, with another tar archive in the same shard or
// with the next shard. It returns io.EOF after the last shard.
func (a *Archive) endOfTar() error {
	// archive/tar takes a cut in the padding after a member for the end of the archive.
	if a.at.in.clean && a.at.in.offset%BlockBytes != 0 {
		return a.Fail(io.ErrUnexpectedEOF)
	}
	more, err := a.another()
	if err != nil {
		return a.Fail(err)
	}
	if more {
		return nil
	}
	return a.advance()
}

// another reports whether another tar archive follows in the shard. To find out, it reads the zeros
// that pad the last record. This also verifies the last gzip checksum.
func (a *Archive) another() (bool, error) {
	block := make([]byte, BlockBytes)
	for {
		n, err := io.ReadFull(a.at.in, block)
		zero := len(bytes.Trim(block[:n], "\x00")) == 0
		switch {
		case err == io.EOF, errors.Is(err, io.ErrUnexpectedEOF) && a.at.in.clean && zero:
			return false, nil
		case err != nil:
			return false, err
		case !zero:
			a.at.in.unread(block)
			a.at.tar = tar.NewReader(a.at.in)
			return true, nil
		}
	}
}

// Magic returns the first 16 bytes of the current member, or all of it if it is shorter. They are
// valid until Peek is called, the content is read, or the walk continues.
func (a *Archive) Magic() ([]byte, error) { return a.peek(a.member.magic[:], magicBytes) }

// Peek returns the first n bytes of the current member, at most PeekBytes, or all of it if it is
// shorter. It returns nothing if the member is not Regular. The bytes are valid until the next read
// from the archive.
func (a *Archive) Peek(n int) ([]byte, error) { return a.peek(a.room(), n) }

// peek implements Peek and Magic. It stores the bytes in room.
func (a *Archive) peek(room []byte, n int) ([]byte, error) {
	n = int(min(int64(n), a.member.size))
	if have := len(a.member.peeked); have < n {
		copy(room, a.member.peeked)
		if err := a.read(room[have:n]); err != nil {
			return nil, err
		}
		a.member.peeked = room[:n]
	}
	return a.member.peeked, nil
}

// Content fills p with the current member's content. The length of p must be the member's size. A
// member can be read only once: by Content, Checksum or Pieces.
func (a *Archive) Content(p []byte) error { return a.read(p[copy(p, a.member.peeked):]) }

// Checksum reads the current member's content and returns its CRC-32 (IEEE).
func (a *Archive) Checksum() (crc uint32, err error) {
	err = a.Pieces(func(piece []byte) error {
		crc = crc32.Update(crc, crc32.IEEETable, piece)
		return nil
	})
	return crc, err
}

// Pieces reads the current member's content, of any size, and calls take with each piece. It
// returns an error from take unchanged.
func (a *Archive) Pieces(take func(piece []byte) error) error {
	left := a.member.size - int64(len(a.member.peeked))
	if err := take(a.member.peeked); err != nil {
		return err
	}
	for left > 0 {
		piece := a.room()[:min(left, skipBytes)]
		if err := a.read(piece); err != nil {
			return err
		}
		if err := take(piece); err != nil {
			return err
		}
		left -= int64(len(piece))
	}
	return nil
}

// WantCheckpoint asks the archive to keep the last checkpoint at or before the headers of m, the
// current member. A checkpoint that is too near the previous kept one is dropped.
func (a *Archive) WantCheckpoint(m *Member) {
	if a.at.checkpoint != nil && m.Size > 0 {
		a.at.checkpoint.member(max(0, m.Offset-Lead(m.Name)))
	}
}

// read fills p from the current member.
func (a *Archive) read(p []byte) error {
	if err := a.at.read(p); err != nil {
		return a.Fail(err)
	}
	return nil
}

// room returns the archive's scratch buffer. The archive reads skipped bytes into it. Peek and
// Pieces return slices of it, which are valid only until the next use of room.
func (a *Archive) room() []byte {
	if a.scratch == nil {
		a.scratch = make([]byte, skipBytes)
	}
	return a.scratch
}
