package index

import (
	"io/fs"
	"slices"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
)

// shard is one file of an archive.
type shard struct {
	path   string
	info   fs.FileInfo
	format string
	marks  []archive.Mark // marks of a gzip file; the first is the start of the file
}

// direct reports whether an index of the shard can be made without reading all contents.
func (s *shard) direct() bool { return s.format == archive.Tar || s.format == archive.Parquet }

// maxStreamBytes returns an upper bound of the size of the shard's tar stream.
func (s *shard) maxStreamBytes() int64 { return archive.MaxStreamBytes(s.format, s.info.Size()) }

// addMark adds the next mark. It returns false if the mark is not after the previous mark, or not
// within the file.
func (s *shard) addMark(m archive.Mark) bool {
	if m.Bit < 0 || m.Bit>>3 > s.info.Size() || m.Output < 0 {
		return false
	}
	if k := len(s.marks); k == 0 && m.Output != 0 || k > 0 &&
		(s.marks[k-1].Bit > m.Bit || s.marks[k-1].Output > m.Output) {
		return false
	}
	s.marks = append(s.marks, m)
	return true
}

// place returns the position of a record's content in a Parquet file. If the content is in a
// compressed page, page is the offset of that page in the file, and offset is in the decompressed
// page. Otherwise page is 0, and offset is in the file.
func (s *shard) place(m *record) (page, offset int64) {
	if m.flags&recordStored != 0 {
		return 0, m.offset
	}
	mark := &s.marks[s.beyond(m.offset)-1]
	return mark.Bit >> 3, m.offset - mark.Output
}

// enter returns the last mark at or before the output offset begin. The compressed bytes of the
// output up to the offset end are in the file before the offset until.
func (s *shard) enter(begin, end int64) (m *archive.Mark, until int64) {
	until = s.info.Size()
	if last := s.beyond(end - 1); last < len(s.marks) {
		until = min(until, s.marks[last].Bit>>3+1)
	}
	return &s.marks[s.beyond(begin)-1], until
}

// beyond returns the number of the first mark after an offset.
func (s *shard) beyond(offset int64) int {
	n, _ := slices.BinarySearchFunc(s.marks, offset, func(m archive.Mark, offset int64) int {
		if m.Output <= offset {
			return -1
		}
		return 1
	})
	return n
}
