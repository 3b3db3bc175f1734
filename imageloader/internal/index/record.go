package index

import (
	"encoding/binary"
	"hash/crc32"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
)

// record describes a member that is a sample, or may become one.
type record struct {
	offset int64 // of the content in the shard's tar stream
	size   int64
	name   uint32 // start of the name in the names; it ends where the next record's name starts
	label  int32  // in a Builder: number of the directory
	crc    uint32 // CRC-32 (IEEE), see the flags
	shard  uint16
	kind   archive.Kind
	flags  uint8
}

// Flags of records.
const (
	recordImage  = 1 << iota // the member looks like an image
	recordSummed             // crc is of the content
	recordBlock              // crc is of the tar header before the content
	recordStored             // the content is uncompressed in a zip or a Parquet file (archive.Member)
)

func (r *record) encode() (b [memberBytes]byte) {
	le := binary.LittleEndian
	le.PutUint64(b[0:], uint64(r.offset))
	le.PutUint64(b[8:], uint64(r.size))
	le.PutUint32(b[16:], r.name)
	le.PutUint32(b[20:], uint32(r.label))
	le.PutUint32(b[24:], r.crc)
	le.PutUint16(b[28:], r.shard)
	b[30], b[31] = byte(r.kind), r.flags
	return b
}

func (r *record) decode(b []byte) {
	le := binary.LittleEndian
	*r = record{
		offset: int64(le.Uint64(b)),
		size:   int64(le.Uint64(b[8:])),
		name:   le.Uint32(b[16:]),
		label:  int32(le.Uint32(b[20:])),
		crc:    le.Uint32(b[24:]),
		shard:  le.Uint16(b[28:]),
		kind:   archive.Kind(b[30]),
		flags:  b[31],
	}
}

// encodeMark returns an item of the section of checkpoints.
func encodeMark(shard int, m archive.Mark) (b [checkpointBytes]byte) {
	le := binary.LittleEndian
	le.PutUint64(b[0:], uint64(m.Bit))
	le.PutUint64(b[8:], uint64(m.Output))
	le.PutUint64(b[16:], uint64(m.At))
	le.PutUint32(b[24:], uint32(m.Size))
	le.PutUint32(b[28:], uint32(shard))
	return b
}

func decodeMark(b []byte) (shard uint32, m archive.Mark) {
	le := binary.LittleEndian
	return le.Uint32(b[28:]), archive.Mark{
		Bit:    int64(le.Uint64(b)),
		Output: int64(le.Uint64(b[8:])),
		At:     int64(le.Uint64(b[16:])),
		Size:   int32(le.Uint32(b[24:])),
	}
}

// matches reports whether p has the record's checksum. It returns true if the record has no
// checksum.
func (r *record) matches(p []byte) bool {
	return r.flags&recordSummed == 0 || crc32.ChecksumIEEE(p) == r.crc
}

// header returns a sample's Header, decoded from the index file.
func (r *record) header(h header) Header {
	info, format, ok := h.info()
	switch {
	case r.flags&recordImage == 0 || h[8] == headerNoImage:
		return Header{State: HeaderNoImage}
	case h[8] == headerForeign:
		return Header{State: HeaderForeign}
	case h[8] == headerUnusable:
		return Header{State: HeaderUnusable}
	case ok:
		return Header{HeaderKnown, format, info}
	}
	return Header{}
}
