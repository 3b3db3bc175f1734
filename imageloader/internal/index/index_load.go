package index

import (
	"github.com/torchstream/torchstream/imageloader/internal/archive"
)

// loadMarks reads the checkpoints.
func (x *Index) loadMarks(sections map[uint32]section) error {
	items := sections[sectionCheckpoints].reader(checkpointBytes)
	windows := uint64(sections[sectionWindows].size)
	for {
		item, err := items.next()
		if err != nil {
			return err
		}
		if item == nil {
			break
		}
		shard, m := decodeMark(item)
		size := uint64(uint32(m.Size))
		if uint64(shard) >= uint64(len(x.shards)) || uint64(m.At) > windows ||
			size > windows-uint64(m.At) || size > archive.MaxWindowBytes {
			return errIndexDamaged
		}
		if !x.shards[shard].addMark(m) {
			return errIndexDamaged
		}
	}
	for i := range x.shards {
		if s := &x.shards[i]; s.format != archive.Parquet && s.format == archive.TarGzip != (len(s.marks) > 0) {
			return errIndexDamaged
		}
	}
	return nil
}

// eachMark returns a function that returns the next mark at each call.
func (x *Index) eachMark() func() (shard int, output int64, ok bool) {
	shard, i := 0, 0
	return func() (int, int64, bool) {
		for shard < len(x.shards) && i == len(x.shards[shard].marks) {
			shard, i = shard+1, 0
		}
		if shard == len(x.shards) {
			return 0, 0, false
		}
		i++
		return shard, x.shards[shard].marks[i-1].Output, true
	}
}

// noteNumber records that the next sample is member i. It allocates t.numbers at the first
// sample whose number differs from its member's. Until then the two are equal.
func (t *recordTable) noteNumber(i, members int) {
	k := len(t.samples)
	if t.numbers == nil && i != k {
		t.numbers = make([]int32, k, members)
		for j := range t.numbers {
			t.numbers[j] = int32(j)
		}
	}
	if t.numbers != nil {
		t.numbers = append(t.numbers, int32(i))
	}
}

// loadOversize reads the headers of samples over maxPixels, unless maxPixels is 0.
func (x *Index) loadOversize(headers section, maxPixels int64) error {
	if maxPixels == 0 {
		return nil
	}
	items := headers.reader(headerBytes)
	k := 0
	for i := 0; ; i++ {
		item, err := items.next()
		if item == nil || err != nil {
			return err
		}
		if k == len(x.samples) || int(x.number(k)) != i {
			continue
		}
		h := header(item)
		if info, _, ok := h.info(); ok && int64(info.Width)*int64(info.Height) > maxPixels {
			if x.oversize == nil {
				x.oversize = map[int32]header{}
			}
			x.oversize[int32(k)] = h
		}
		k++
	}
}
