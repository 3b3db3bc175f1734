package imageloader

import (
	"encoding/binary"
	"hash/crc32"
	"hash/maphash"
	"math"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/torchstream/torchstream/imageloader/internal/index"
	"github.com/torchstream/torchstream/internal/decodeplan"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// A consumer that inflates (decodeplan.Plans.Rooms) gets a JPEG of a .tgz as it is compressed. Its
// bytes are not on the host then, so the plan is made from the head that an earlier pass of this
// process has kept. That pass compared the image's bytes with the index's checksum, and with the
// entry points or, if these are trusted, planned the image by them. The consumer compares the
// checksum of what it inflates, tar header included, with that of those bytes, and hands an image
// back whose checksum differs.

// jpegHead is what a plan needs of a JPEG that is not on the host.
type jpegHead struct {
	info     imagecapi.Info
	tables   string   // the segments that other images may have too; shared with them
	frame    string   // the frame's and the scan's
	scan     int      // byte of the file where the data of its scan begin
	end      int64    // of its compressed bytes: see index.Inflated; 0: see refuse
	checksum uint32   // CRC-32 of the tar's headers and the file
	pieces   []uint64 // digests of the file's pieces, if parts of it are read: see planPart
	entries  uint64   // hash of the blob that the bytes were compared with
}

// heads has the heads of an index's samples. Several goroutines use it.
type heads struct {
	seed  maphash.Seed
	heads []atomic.Pointer[jpegHead]

	mu     sync.Mutex
	tables map[string]string
	used   int // bytes of tables
	pieces int // digests of all heads
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

// keep keeps the head of sample i, whose bytes are data, and were compared with the blob.
func (h *heads) keep(i int, data []byte, info *imagecapi.Info, from index.Inflated, blob []byte) {
	if before := h.heads[i].Load(); before != nil && before.entries == maphash.Bytes(h.seed, blob) {
		return
	}
	h.put(i, h.make(data, info, from), blob)
}

// put keeps the head of sample i, unless it is nil: the blob's entry points are those of its file.
func (h *heads) put(i int, head *jpegHead, blob []byte) {
	if head != nil {
		head.entries = maphash.Bytes(h.seed, blob)
		h.heads[i].Store(head)
	}
}

// make returns the head of a file, or nil if it has none.
func (h *heads) make(data []byte, info *imagecapi.Info, from index.Inflated) *jpegHead {
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
	return &jpegHead{info: *info, tables: shared, frame: string(frame), scan: scan, end: from.End,
		checksum: crc32.Update(from.Lead, crc32.IEEETable, data)}
}

// refuse leaves a sample to the host from now on, because a consumer could not inflate it. The
// consumer would hand an unusual stream back in every epoch, and wait each time.
func (h *heads) refuse(i int) {
	if head := h.heads[i].Load(); head != nil {
		refused := *head
		refused.end = 0
		h.heads[i].Store(&refused)
	}
}

// maxMember bounds the bytes that a member makes a device inflate, and maxPacked its compressed
// bytes. Members with more, which lie far behind their checkpoint, are inflated on the host.
const maxMember, maxPacked = 8 << 20, 4 << 20

// packed says what to inflate for sample i, whose compressed bytes end at a place of its file. ok
// is false if the host inflates it.
func packed(x *index.Index, i int, end int64) (at index.Packed, ok bool) {
	at, ok = x.Packed(i)
	at.EndAt(end)
	return at, ok && at.Input > 0 && at.Input <= maxPacked && at.Skip <= maxMember && x.Size(i) <= maxMember-int64(at.Skip)
}

// MemberBytes implements decodeplan.Planner. Both are 0 if the host inflates all members: those of
// an archive that is not a .tgz or that is kept in memory.
func (p *devicePlanner) MemberBytes() (staging, rooms int) {
	l := (*Loader)(p)
	if _, err := p.PlanBytes(); err != nil || !l.keepsEntryPoints() {
		return 0, 0
	}
	x := l.index.Load()
	if x == nil { // it may become that of a .tgz
		return l.bytesOfBatch(spread{n: 1, sum: typicalBytes + planTables}), l.bytesOfBatch(spread{n: 1, sum: typicalBytes + typicalWindow})
	}
	var inputs, outputs spread
	members := 0
	for i := 0; i < x.Len(); i += 1 + x.Len()/1000 {
		size := x.Size(i)
		at, ok := packed(x, i, math.MaxInt64)
		if !ok {
			inputs.add(size + planTables) // the plan has its data
			outputs.add(0)
			continue
		}
		members++
		// The place where the compressed bytes end is not known. Compressors make no more of them
		// than of output, but for a few headers of blocks.
		m := decodeplan.Member{Skip: at.Skip, Bytes: at.Lead + int(size)}
		inputs.add(int64(min(at.Input, m.Skip+m.Bytes)+at.Window) + planTables)
		outputs.add(int64(m.Room()))
	}
	if members == 0 {
		return 0, 0
	}
	return l.bytesOfBatch(inputs), l.bytesOfBatch(outputs)
}

// spread has the sums of numbers of bytes, and of their squares.
type spread struct {
	n, sum  int64
	squares float64
}

func (s *spread) add(bytes int64) {
	s.n++
	s.sum += bytes
	s.squares += float64(bytes) * float64(bytes)
}

// bytesOfBatch returns the memory for a batch of samples with this spread: the mean sum of a random
// batch, and four standard deviations, within the bounds of a slot's memory.
func (l *Loader) bytesOfBatch(s spread) int {
	batch, mean := float64(l.o.BatchSize), float64(s.sum)/float64(s.n)
	deviation := math.Sqrt(batch * max(0, s.squares/float64(s.n)-mean*mean))
	return decodeplan.Aligned(int(min(max(batch*mean+4*deviation, minPlanBytes), maxPlanBytes)))
}

// headsFor returns the heads for the consumer of a job's row, or nil if it does not inflate.
func (w *worker) headsFor(j *job) *heads {
	if w.points == nil || j.staging == nil || j.staging.plans.Rooms == 0 || !w.p.fetchPlans() {
		return nil
	}
	return w.points.points.headsOf()
}

// keepHead keeps the head of a job's file for later passes, if its entry points are those of the
// blob that was used last.
func (w *worker) keepHead(j *job, info *imagecapi.Info) {
	if h := w.headsFor(j); h != nil && j.inflated.End > 0 && len(w.points.blob) > 0 {
		h.keep(j.sample.Index, j.data, info, j.inflated, w.points.blob)
	}
}

// planMember plans a job's image from its head, and reads the compressed member into the slot. It
// returns false if the host is to inflate the member.
func (q *planner) planMember(j *job) bool {
	h := q.w.headsFor(j)
	if h == nil {
		return false
	}
	head := h.heads[j.sample.Index].Load()
	if head == nil {
		return false
	}
	at, ok := packed(q.w.p.known, j.sample.Index, head.end)
	if !ok {
		return false
	}
	if q.w.p.l.judge.header(&j.sample, &head.info) != nil || q.w.draw(j, &head.info) != nil {
		return false
	}
	ops, ok := q.w.operations()
	if !ok {
		return false
	}
	plan := q.w.points.planHead(j.sample.Index, int(j.size), head, h, &q.w.geometry, ops)
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
	j.staging.rows[j.row] = rowPlan{Row: row, repeat: repeat{size: j.size, epoch: j.epoch, again: j.again, member: true}}
	if q.w.crops(&head.info) {
		q.cropped++
	}
	return true
}

// planHead returns a plan of a sample whose bytes are not here, and of operations on its pixels,
// valid until the next call, or nothing if there is none.
func (b *workerEntryPoints) planHead(i, bytes int, head *jpegHead, all *heads, g *imagecapi.Geometry, ops []imagecapi.AugmentOp) []byte {
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
		n, err := d.PlanHead(b.head, bytes, head.scan, g, blob, ops, b.plans)
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
