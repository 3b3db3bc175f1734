package index

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/torchstream/torchstream/internal/safefile"
)

// docs/index-format.md describes the sidecar byte by byte.

const (
	sidecarSuffix  = ".tsidx"
	sidecarMagic   = "TSIDX\x00\r\n"
	sidecarVersion = 3
	sidecarHeader  = 32
	sectionBytes   = 32 // size of the table's entry for a section, in bytes
	maxSections    = 64
)

// errIndex is the reason why a sidecar is not used and will be replaced.
type errIndex string

func (e errIndex) Error() string { return string(e) }

// Is makes each of labelErrors an ErrOtherLabels.
func (e errIndex) Is(target error) bool {
	return target == ErrOtherLabels && slices.Contains(labelErrors, e)
}

// ErrOtherLabels means that an index has labels from another source than the configuration wants.
var ErrOtherLabels = errors.New("imageloader: the index has other labels")

const (
	errIndexDamaged = errIndex("the index is damaged")
	errIndexVersion = errIndex("the index is of another version")
	errIndexStale   = errIndex("the archive has changed since it was indexed")

	// The index has other labels than the configuration asks for.
	errIndexDirectories = errIndex("the index has the labels of directories")
	errIndexWebDataset  = errIndex("the index has the labels of Options.WebDataset")
	errIndexList        = errIndex("the index is one of Options.List or Options.Boxes, without labels")
	errIndexLists       = errIndex("the index has the lists of labels of Options.MultiLabel")
	errIndexPairs       = errIndex("the index is one of Options.Masks, without labels")
	errIndexColumns     = errIndex("the index has the labels of a Parquet file")
	errIndexColumnLists = errIndex("the index has the lists of labels of a Parquet file")
)

// labelErrors lists the reasons by the numbers that labelling returns.
var labelErrors = []errIndex{errIndexDirectories, errIndexWebDataset, errIndexPairs, errIndexList, errIndexLists,
	errIndexColumns, errIndexColumnLists}

// place describes a section of a sidecar.
type place struct {
	kind, crc           uint32
	offset, size, count uint64
}

// sidecar is an open index file.
type sidecar struct {
	path   string
	file   *os.File
	places map[uint32]place
	saving saving
	sums   *sums // nil: no shard is a plain tar

	ends  blobEnds
	blobs unsavedBlobs

	once sync.Once
	err  error // error of close
}

// blobEnds is the section with the ends of the blobs. It is read when a blob is first used. Keeping
// it in memory saves a system call for each blob.
type blobEnds struct {
	load  sync.Once
	bytes []byte
}

// unsavedBlobs has the members' blobs that the file does not have yet, one after another.
type unsavedBlobs struct {
	mu    sync.RWMutex
	spool spool
	kept  []uint64 // their positions: 0, or position<<24 | size; nil: no blobs
	dirty bool
}

// close drops the blobs.
func (u *unsavedBlobs) close() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.spool.close()
	u.kept = nil
}

// takeDirty reports whether blobs were added since its last call.
func (u *unsavedBlobs) takeDirty() bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	dirty := u.dirty
	u.dirty = false
	return dirty
}

// saving configures how a sidecar is saved.
type saving struct {
	elsewhere []otherPlace             // places to try if the sidecar's own path can't be written
	create    func() (*os.File, error) // creates unnamed files; nil: impossible
	log       *slog.Logger
	// wait starts a timer that limits the wait for another process that is saving; nil: lockWait.
	wait func() <-chan time.Time
}

// otherPlace is another place for an index.
type otherPlace struct {
	path string
	was  fs.FileInfo // an unusable file at path that may be replaced; nil: no file
}

// openSidecar opens an index file. It checks the header and the table, but no section.
func openSidecar(path string) (*sidecar, error) {
	f, err := safefile.Open(path)
	if err != nil {
		return nil, err
	}
	return newSidecar(path, f)
}

// newSidecar implements openSidecar for an open file. It takes ownership of the file.
func newSidecar(path string, f *os.File) (_ *sidecar, err error) {
	defer func() {
		if err != nil {
			_ = f.Close() // err says more
		}
	}()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	places, err := readTable(f, info.Size())
	if err != nil {
		return nil, err
	}
	return &sidecar{path: path, file: f, places: places}, nil
}

// readTable reads the header and the table of sections of a file of this size.
func readTable(r io.ReaderAt, size int64) (map[uint32]place, error) {
	head := make([]byte, sidecarHeader)
	if _, err := r.ReadAt(head, 0); err != nil || string(head[:8]) != sidecarMagic {
		return nil, errIndexDamaged
	}
	le := binary.LittleEndian
	if le.Uint32(head[8:]) != sidecarVersion {
		return nil, errIndexVersion
	}
	n := le.Uint32(head[12:])
	if crc32.ChecksumIEEE(head[:28]) != le.Uint32(head[28:]) || n > maxSections ||
		le.Uint64(head[16:]) != uint64(size) {
		return nil, errIndexDamaged
	}
	table := make([]byte, n*sectionBytes)
	if _, err := r.ReadAt(table, sidecarHeader); err != nil || crc32.ChecksumIEEE(table) != le.Uint32(head[24:]) {
		return nil, errIndexDamaged
	}
	places := map[uint32]place{}
	for ; len(table) > 0; table = table[sectionBytes:] {
		p := place{le.Uint32(table), le.Uint32(table[4:]), le.Uint64(table[8:]), le.Uint64(table[16:]),
			le.Uint64(table[24:])}
		// There are as many windows as checkpoints, but windows may be empty.
		if p.offset > uint64(size) || p.size > uint64(size)-p.offset || p.count > p.size && p.kind != sectionWindows {
			return nil, errIndexDamaged
		}
		places[p.kind] = p
	}
	return places, nil
}

// section returns a section of the file. Each of its items must have at least minItem bytes.
func (s *sidecar) section(kind uint32, minItem uint64) (section, error) {
	p, ok := s.places[kind]
	if !ok || minItem > 0 && p.count > p.size/minItem {
		return section{}, errIndexDamaged
	}
	at := io.NewSectionReader(s.file, int64(p.offset), int64(p.size))
	return section{at: at, size: int64(p.size), count: int(p.count), crc: p.crc, checked: true}, nil
}

// read reads a whole section.
func (s *sidecar) read(kind uint32, minItem uint64) (data []byte, count int, err error) {
	p, err := s.section(kind, minItem)
	if err != nil {
		return nil, 0, err
	}
	data, err = p.all()
	return data, p.count, err
}

// large returns the large sections.
func (s *sidecar) large() (sections map[uint32]section, err error) {
	sections = map[uint32]section{}
	for _, kind := range largeSections {
		if sections[kind], err = s.section(kind, 0); err != nil {
			return nil, err
		}
	}
	return sections, nil
}

// close saves the kept blobs and closes the file. It may be called more than once.
func (s *sidecar) close() error {
	s.once.Do(func() {
		s.save()
		s.blobs.close()
		if err := s.file.Close(); err != nil {
			s.err = fmt.Errorf("imageloader: %w", err)
		}
	})
	return s.err
}
