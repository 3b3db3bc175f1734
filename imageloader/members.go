package imageloader

import (
	"encoding/binary"
	"hash/crc32"
	"hash/maphash"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/torchstream/torchstream/internal/decodeplan"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// A consumer that inflates (decodeplan.Plans.Rooms) gets a JPEG of a .tgz as it is compressed. Its
// bytes are not on the host then, so the plan is made from the head that an earlier pass of this
// process has seen: one that planned the image from its bytes, which were compared with the index's
// checksum and with the entry points. The consumer compares the checksum of what it inflates, tar
// header included, with that of those bytes, and hands an image back whose checksum differs.

// jpegHead is what a plan needs of a JPEG that is not on the host.
type jpegHead struct {
	info     imagecapi.Info
	tables   string // the segments that other images may have too; shared with them
	frame    string // the frame's and the scan's
	scan     int    // byte of the file where the data of its scan begin
	checksum uint32 // CRC-32 of the tar's headers and the file
	entries  uint64 // hash of the blob that the bytes were compared with
}

// heads has the heads of an index's samples. Several goroutines use it.
type heads struct {
	seed  maphash.Seed
	heads []atomic.Pointer[jpegHead]

	mu     sync.Mutex
	tables map[string]string
	used   int // bytes of tables
}

// maxTables bounds the memory of heads.tables. Nearly all images of a set have the same few.
const maxTables = 64 << 20

func newHeads(samples int) *heads {
	return &heads{seed: maphash.MakeSeed(), heads: make([]atomic.Pointer[jpegHead], samples), tables: map[string]string{}}
}

// Markers of JPEG segments.
const (
	markerFrame      = 0xC0 // baseline
	markerExtended   = 0xC1
	markerHuffman    = 0xC4
	markerImage      = 0xD8 // the file's beginning
	markerScan       = 0xDA
	markerQuantisers = 0xDB
	markerRestart    = 0xDD
	markerJFIF       = 0xE0
	markerAdobe      = 0xEE
	markerComment    = 0xFE
)

// maxKept bounds the tables of a head. Those of nearly all files have 600 bytes.
const maxKept = 4 << 10

// splitHead returns the segments in front of a JPEG's scan that matter to decoding, in two parts
// that follow each other: the tables, and the frame's and the scan's. ok is false for a file that
// does not consist of the usual segments.
func splitHead(data []byte) (tables, frame []byte, scan int, ok bool) {
	if len(data) < 2 || data[0] != 0xFF || data[1] != markerImage {
		return nil, nil, 0, false
	}
	tables = append(tables, data[:2]...)
	for at := 2; at+4 <= len(data) && data[at] == 0xFF; {
		marker := data[at+1]
		end := at + 2 + int(binary.BigEndian.Uint16(data[at+2:]))
		if end < at+4 || end > len(data) || len(tables)+len(frame)+end-at > maxKept && marker != markerComment && marker>>4 != markerJFIF>>4 {
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
			if len(segment) > 64 { // with a thumbnail
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

// keep keeps the head of sample i, whose bytes are data, behind tar headers with the CRC-32 lead,
// and were planned by the blob.
func (h *heads) keep(i int, data []byte, info *imagecapi.Info, lead uint32, blob []byte) {
	hash := maphash.Bytes(h.seed, blob)
	if before := h.heads[i].Load(); before != nil && before.entries == hash {
		return
	}
	tables, frame, scan, ok := splitHead(data)
	if !ok {
		return
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
	if known {
		h.heads[i].Store(&jpegHead{info: *info, tables: shared, frame: string(frame), scan: scan,
			checksum: crc32.Update(lead, crc32.IEEETable, data), entries: hash})
	}
}

// maxMember bounds the bytes that a member makes a device inflate, and maxPacked its compressed
// bytes. Members with more, which lie far behind their checkpoint, are inflated on the host.
const maxMember, maxPacked = 8 << 20, 4 << 20

// headsFor returns the heads for the consumer of a job's row, or nil if it does not inflate. Images
// with Transform.Ops are planned from their bytes.
func (q *planner) headsFor(j *job) *heads {
	if j.staging.plans.Rooms == 0 || q.w.augmenter != nil {
		return nil
	}
	return q.w.points.points.headsOf()
}

// keepHead keeps the head of a job's file, which is planned from its bytes.
func (q *planner) keepHead(j *job, info *imagecapi.Info) {
	if h := q.headsFor(j); h != nil {
		if lead, ok := q.r.Lead(j.sample.Index); ok {
			h.keep(j.sample.Index, j.data, info, lead, q.w.points.blob)
		}
	}
}

// planMember plans a job's image from its head, and reads the compressed member into the slot. It
// returns false if the host is to inflate the member.
func (q *planner) planMember(j *job) bool {
	h := q.headsFor(j)
	if h == nil {
		return false
	}
	head := h.heads[j.sample.Index].Load()
	if head == nil {
		return false
	}
	at, ok := q.r.Packed(j.sample.Index)
	if !ok || at.Input > maxPacked || at.Skip > maxMember || j.size > maxMember-int64(at.Skip) {
		return false
	}
	if q.w.p.l.judge.header(&j.sample, &head.info) != nil || q.w.draw(j, &head.info) != nil {
		return false
	}
	plan := q.w.points.planHead(j.sample.Index, int(j.size), head, h, &q.w.geometry)
	if len(plan) == 0 {
		return false
	}
	input := decodeplan.Aligned(len(plan))
	to, row, fits := j.staging.reserve(decodeplan.Row{Bytes: len(plan), Member: decodeplan.Member{
		Input: input, InputBytes: at.Input, Window: input + at.Input, WindowBytes: at.Window, SkipBits: at.SkipBits,
		Skip: at.Skip, Bytes: at.Lead + int(j.size), Scan: at.Lead + head.scan, Checksum: head.checksum,
	}})
	if !fits {
		return false
	}
	copy(to, plan)
	began := time.Now()
	err := q.r.ReadPacked(&at, to[row.Member.Window:], to[input:][:at.Input])
	q.read += time.Since(began)
	if err != nil { // reading the sample finds the error again, and has words for it
		return false
	}
	j.staging.rows[j.row] = rowPlan{Row: row, repeat: repeat{j.size, j.epoch, j.again}}
	if q.w.crops(&head.info) {
		q.cropped++
	}
	return true
}

// planHead returns a plan of a sample whose bytes are not here, valid until the next call, or
// nothing if there is none.
func (b *workerEntryPoints) planHead(i, bytes int, head *jpegHead, all *heads, g *imagecapi.Geometry) []byte {
	d, ok := b.d.(planDecoder)
	if !ok {
		return nil
	}
	blob := b.points.store.EntryPoints(i, b.buffer)
	if len(blob) == 0 || maphash.Bytes(all.seed, blob) != head.entries {
		return nil
	}
	b.buffer = blob[:cap(blob)]
	b.head = append(append(b.head[:0], head.tables...), head.frame...)
	for {
		n, err := d.PlanHead(b.head, bytes, head.scan, g, blob, b.plans)
		if err != nil || n == 0 { // the host says what is wrong with the image
			return nil
		}
		if n <= len(b.plans) {
			return b.plans[:n]
		}
		b.plans = alignedBytes(2 * n)
	}
}

// alignedBytes returns memory that is aligned for plans.
func alignedBytes(n int) []byte {
	memory := make([]byte, n+decodeplan.Align)
	skip := -uintptr(unsafe.Pointer(unsafe.SliceData(memory))) % decodeplan.Align
	return memory[skip:][:n:n]
}
