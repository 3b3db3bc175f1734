package devplan

import (
	"encoding/binary"
	"hash/crc32"
	"hash/maphash"
	"sync"
	"sync/atomic"

	"github.com/torchstream/torchstream/imageloader/internal/digest"
	"github.com/torchstream/torchstream/imageloader/internal/index"
	"github.com/torchstream/torchstream/internal/decodeplan"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// Head holds the data for planning a JPEG whose bytes are not on the host.
type Head struct {
	Info     imagecapi.Info
	tables   string         // segments that several images may share
	frame    string         // segments of the frame and the scan
	scan     int            // offset of the scan's data in the file
	from     index.Inflated // its End is 0 if the consumer does not inflate the image
	checksum uint32         // CRC-32 of the tar's headers and the file
	pieces   []uint64       // digests of the file's pieces, if parts of it are read: see PlanPart
	entries  uint64         // hash of the blob of entry points that was compared with the file
}

// heads holds the heads of an index's samples. It is safe for concurrent use.
type heads struct {
	seed  maphash.Seed
	key   *digest.Key                     // of Head.pieces
	words *[decodeplan.DigestWords]uint64 // of key
	heads []atomic.Pointer[Head]

	mu     sync.Mutex
	tables map[string]string
	used   int // bytes of tables
	pieces int // total number of digests
}

// maxTables bounds the memory of heads.tables. Nearly all images of a set share a few tables.
const maxTables = 64 << 20

func newHeads(samples int) *heads {
	key := digest.NewKey()
	words := key.Numbers()
	return &heads{seed: maphash.MakeSeed(), key: key, words: &words, heads: make([]atomic.Pointer[Head], samples),
		tables: map[string]string{}}
}

// Markers of JPEG segments.
const (
	markerFrame      = 0xC0 // baseline
	markerExtended   = 0xC1
	markerHuffman    = 0xC4
	markerImage      = 0xD8 // start of the file
	markerScan       = 0xDA
	markerQuantisers = 0xDB
	markerRestart    = 0xDD
	markerJFIF       = 0xE0
	markerAdobe      = 0xEE
	markerComment    = 0xFE
)

// maxKept bounds the tables of a head, in bytes. Nearly all files have 600 bytes of tables.
const maxKept = 4 << 10

// splitHead returns the segments that decoding needs from before a JPEG's scan. The results are the
// tables, and then the segments of the frame and the scan: a decoder reads them in this order,
// whatever their order in the file. ok is false if the file has unusual segments.
func splitHead(data []byte) (tables, frame []byte, scan int, ok bool) {
	if len(data) < 2 || data[0] != 0xFF || data[1] != markerImage {
		return nil, nil, 0, false
	}
	tables = append(tables, data[:2]...)
	for at := 2; at+4 <= len(data) && data[at] == 0xFF; {
		marker := data[at+1]
		end := at + 2 + int(binary.BigEndian.Uint16(data[at+2:]))
		if end < at+4 || end > len(data) || len(tables)+len(frame)+end-at > maxKept &&
			marker != markerComment && marker>>4 != markerJFIF>>4 {
			return nil, nil, 0, false
		}
		segment := data[at:end]
		switch {
		case marker == markerFrame, marker == markerExtended:
			if frame != nil {
				return nil, nil, 0, false
			}
			frame = append(frame, segment...)
		case marker == markerScan:
			return tables, append(frame, segment...), end, frame != nil
		case marker == markerQuantisers, marker == markerHuffman, marker == markerRestart, marker == markerAdobe:
			tables = append(tables, segment...)
		case marker == markerJFIF:
			if len(segment) > 64 { // it contains a thumbnail
				return nil, nil, 0, false
			}
			tables = append(tables, segment...)
		case marker>>4 != markerJFIF>>4 && marker != markerComment:
			return nil, nil, 0, false
		}
		at = end
	}
	return nil, nil, 0, false
}

// keep stores the head of sample i. data is the sample's file, which has been compared with blob.
func (h *heads) keep(i int, data []byte, info *imagecapi.Info, from index.Inflated, blob []byte) {
	if before := h.heads[i].Load(); before != nil && before.entries == maphash.Bytes(h.seed, blob) {
		return
	}
	h.put(i, h.make(data, info, from), blob)
}

// put stores the head of sample i unless head is nil. blob holds the entry points of the same file.
func (h *heads) put(i int, head *Head, blob []byte) {
	if head != nil {
		head.entries = maphash.Bytes(h.seed, blob)
		h.heads[i].Store(head)
	}
}

// replace stores a head with digests, like put, but only if the stored head is still the one passed
// as before. If another goroutine has stored a different head, that head stays, and replace gives
// back the room that was reserved for the digests.
func (h *heads) replace(i int, before, head *Head, blob []byte) {
	head.entries = maphash.Bytes(h.seed, blob)
	if !h.heads[i].CompareAndSwap(before, head) {
		h.reserve(-len(head.pieces))
	}
}

// make returns the head of a file, or nil if the file has unusual segments or there is no room.
func (h *heads) make(data []byte, info *imagecapi.Info, from index.Inflated) *Head {
	tables, frame, scan, ok := splitHead(data)
	if !ok {
		return nil
	}
	h.mu.Lock()
	shared, known := h.tables[string(tables)]
	if !known && h.used+len(tables) <= maxTables {
		shared = string(tables)
		h.tables[shared] = shared
		h.used += len(shared)
		known = true
	}
	h.mu.Unlock()
	if !known {
		return nil
	}
	return &Head{Info: *info, tables: shared, frame: string(frame), scan: scan, from: from,
		checksum: crc32.Update(from.Lead, crc32.IEEETable, data)}
}

// refuse makes the host inflate sample i.
func (h *heads) refuse(i int) {
	if head := h.heads[i].Load(); head != nil {
		refused := *head
		refused.from.End = 0
		h.heads[i].Store(&refused)
	}
}

// refusePart makes the host read the file of sample i as a whole.
func (h *heads) refusePart(i int) {
	if head := h.heads[i].Load(); head != nil && head.pieces != nil {
		h.forget(i, head)
	}
}

// reserve counts n more digests, and reports whether there is room for them.
func (h *heads) reserve(n int) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.pieces+n > maxPieces {
		return false
	}
	h.pieces += n
	return true
}

// forget drops the head of a sample whose file has changed since the head was stored.
func (h *heads) forget(i int, head *Head) {
	if h.heads[i].CompareAndSwap(head, nil) {
		h.reserve(-len(head.pieces))
	}
}
