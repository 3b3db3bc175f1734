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
	marks  []archive.Mark // of a gzip file; the first is its beginning
}

// maxStreamBytes is more than the tar stream of a shard can have.
func (s *shard) maxStreamBytes() int64 { return archive.MaxStreamBytes(s.format, s.info.Size()) }

// addMark takes the next mark; false if it does not follow the one before, or lies outside of the
// file.
func (s *shard) addMark(m archive.Mark) bool {
	if m.Bit < 0 || m.Bit>>3 > s.info.Size() || m.Output < 0 {
		return false
	}
	if k := len(s.marks); k == 0 && m.Output != 0 || k > 0 && (s.marks[k-1].Bit > m.Bit || s.marks[k-1].Output > m.Output) {
		return false
	}
	s.marks = append(s.marks, m)
	return true
}

// enter says at which mark a member's content is entered, and where its compressed bytes end at the
// latest.
func (s *shard) enter(r *record) (m *archive.Mark, until int64) {
	until = s.info.Size()
	if end := s.beyond(r.offset + r.size - 1); end < len(s.marks) {
		until = min(until, s.marks[end].Bit>>3+1)
	}
	return &s.marks[s.beyond(r.offset)-1], until
}

// beyond is the number of the first mark beyond an offset.
func (s *shard) beyond(offset int64) int {
	n, _ := slices.BinarySearchFunc(s.marks, offset, func(m archive.Mark, offset int64) int {
		if m.Output <= offset {
			return -1
		}
		return 1
	})
	return n
}
