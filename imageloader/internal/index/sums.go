package index

import (
	"encoding/binary"
	"hash/crc32"
	"io"
	"slices"
	"sync/atomic"
)

// sums has checksums of the contents of a plain tar's members or a Parquet file's images. Building
// the index reads only headers. A member's checksum is computed when the member is first read as a
// sample, and saved when the index is closed. Later processes compare the checksum when they first
// read the sample. They thereby detect contents that were exchanged while the headers stayed the
// same. sums is safe for concurrent use.
type sums struct {
	known []atomic.Uint32 // by member: the CRC-32, with 1 instead of 0; 0 means unknown
	seen  []atomic.Uint32 // one bit for each member: this process has computed or compared the checksum
	dirty atomic.Bool     // some sums are not in the index file yet
}

// same compares a member's content with the member's checksum. If there is no checksum yet, it
// records the checksum of the content. A process compares or records each member only once.
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

// write writes the section of checksums.
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

// attach makes s the index file of x, and reads the checksums of contents from s.
func (x *Index) attach(s *sidecar) error {
	if slices.ContainsFunc(x.shards, func(s shard) bool { return s.direct() }) {
		var err error
		if s.sums, err = s.loadSums(); err != nil {
			return err
		}
	}
	x.side = s
	return nil
}

// loadSums reads the checksums of contents. An index file has none until an epoch has used it.
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

// sameContent reports whether the content of a record of a plain tar or a Parquet file is the same
// as in earlier runs.
func (x *Index) sameContent(i int, content []byte) bool {
	return x.side == nil || x.side.sums == nil || !x.shards[x.samples[i].shard].direct() ||
		x.side.sums.same(x.number(i), content)
}
