package index

import (
	"hash/crc32"
	"io"
)

// Kinds of sections: see docs/index-format.md.
const (
	sectionShards      = 1
	sectionDirs        = 2
	sectionMembers     = 3
	sectionNames       = 4
	sectionCheckpoints = 5
	sectionWindows     = 6
	sectionCounts      = 7
	sectionBlobEnds    = 8
	sectionBlobs       = 9
	sectionHeaders     = 10
	sectionSums        = 11
	sectionOrphans     = 12
	sectionColumns     = 13
)

// Size of an item of each section, in bytes.
const (
	memberBytes     = 32
	checkpointBytes = 32
	countsBytes     = 24
	sumBytes        = 4
	shardBytes      = 32 // plus its name
)

// largeSections are the sections that have an item for every member or checkpoint.
var largeSections = []uint32{sectionMembers, sectionNames, sectionHeaders, sectionCheckpoints, sectionWindows}

// section is a part of an index, in the index file or in a spool.
type section struct {
	at    io.ReaderAt
	size  int64
	count int
	// crc is the CRC-32 of the bytes. checked says that reading verifies it.
	crc     uint32
	checked bool
}

// all reads the section into one buffer.
func (s section) all() ([]byte, error) {
	b := make([]byte, s.size)
	if n, err := s.at.ReadAt(b, 0); n < len(b) || s.checked && crc32.ChecksumIEEE(b) != s.crc {
		return nil, damagedBy(err)
	}
	return b, nil
}

// copyTo writes the section.
func (s section) copyTo(w io.Writer) error {
	_, err := io.Copy(w, io.NewSectionReader(s.at, 0, s.size))
	return err
}

// items is the number of items to read at a time.
const items = 4096

// reader reads the section item by item. item is the size of an item in bytes.
func (s section) reader(item int) *itemReader { return &itemReader{s: s, item: item} }

type itemReader struct {
	s    section
	item int
	at   int64
	buf  []byte
	rest []byte
	crc  uint32
}

// next returns the next item, which is valid until the next call. At the end it returns nil. If the
// section is damaged, it also returns an error.
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

// damagedBy returns the error for a section that could not be read completely.
func damagedBy(err error) error {
	if err == nil || err == io.EOF {
		return errIndexDamaged
	}
	return err
}
