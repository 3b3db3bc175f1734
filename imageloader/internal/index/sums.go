package index

import (
	"encoding/binary"
	"hash/crc32"
	"io"
	"slices"
	"sync/atomic"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
)

// sums has checksums of the contents of a plain tar's members. Making the index reads headers only,
// so a checksum is made when a sample is read for the first time, and kept in the index file when
// the index is closed. A later process compares a sample when it first reads it, which finds out
// contents that were exchanged under the same headers. Several goroutines may use it.
type sums struct {
	known []atomic.Uint32 // by member: the CRC-32, with 1 stored for a CRC-32 of 0; 0: not known
	seen  []atomic.Uint32 // a bit for each member: made or compared in this process
	dirty atomic.Bool     // there are sums that the index file does not have
}

// same compares a member's content with its checksum, or keeps the checksum of a content that has
// none. It looks at each member once in a process.
func (s *sums) same(number int32, content []byte) bool {
	word, bit := &s.seen[number/32], uint32(1)<<(number%32)
	if word.Load()&bit != 0 {
		return true
	}
	sum := max(1, crc32.ChecksumIEEE(content))
	if s.known[number].CompareAndSwap(0, sum) {
		s.dirty.Store(true)
	} else if s.known[number].Load() != sum {
		return false
	}
	word.Or(bit)
	return true
}

// write writes the section of an index file.
func (s *sums) write(w io.Writer) error {
	b := make([]byte, 0, items*sumBytes)
	for i := range s.known {
		b = binary.LittleEndian.AppendUint32(b, s.known[i].Load())
		if len(b) == cap(b) || i+1 == len(s.known) {
			if _, err := w.Write(b); err != nil {
				return err
			}
			b = b[:0]
		}
	}
	return nil
}

// attach makes s the index file of x, with the checksums of contents that it has.
func (x *Index) attach(s *sidecar) error {
	if slices.ContainsFunc(x.shards, func(s shard) bool { return s.format == archive.Tar }) {
		var err error
		if s.sums, err = s.loadSums(); err != nil {
			return err
		}
	}
	x.side = s
	return nil
}

// loadSums reads the checksums of contents. An index file that no epoch has used has none.
func (s *sidecar) loadSums() (*sums, error) {
	n := s.places[sectionMembers].count
	all := &sums{known: make([]atomic.Uint32, n), seen: make([]atomic.Uint32, (n+31)/32)}
	if _, found := s.places[sectionSums]; !found {
		return all, nil
	}
	section, err := s.section(sectionSums, sumBytes)
	if err != nil {
		return nil, err
	}
	if section.count != int(n) || section.size != int64(n)*sumBytes {
		return nil, errIndexDamaged
	}
	items := section.reader(sumBytes)
	for i := 0; ; i++ {
		item, err := items.next()
		if err != nil {
			return nil, err
		}
		if item == nil {
			return all, nil
		}
		all.known[i].Store(binary.LittleEndian.Uint32(item))
	}
}

// sameContent compares the content of a record of a plain tar with the content of earlier runs.
func (x *Index) sameContent(i int, content []byte) bool {
	return x.side == nil || x.side.sums == nil || x.shards[x.samples[i].shard].format != archive.Tar || x.side.sums.same(x.number(i), content)
}
