package imageloader

import (
	"hash/maphash"
	"slices"
	"time"

	"github.com/torchstream/torchstream/imageloader/internal/index"
	"github.com/torchstream/torchstream/internal/decodeplan"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// A crop needs a part of its file, and which one is known before the file is read: the head that an
// earlier pass of this process has kept, and the entry points, say where its segments lie. So the
// part is read from a local .tar straight into the slot, behind its plan. The earlier pass has
// compared the whole file with its entry points, and kept the digests of its pieces: the pieces
// that are read must still have them, or the file is read and judged as a whole.

// pieceBytes is the number of bytes that a digest is of. Parts are read in whole pieces.
const pieceBytes = 4 << 10

// maxPieces bounds the digests of an index's samples: 256 MiB, of 128 GiB of images. Images without
// them are read whole.
const maxPieces = 32 << 20

// partsFor returns the heads for a job of whose file a part may be read, or nil if the whole file
// is: the operations of Transform.Ops are planned from it.
func (w *worker) partsFor(j *job) *heads {
	if j.staging == nil || w.augmenter != nil || !w.p.known.Parts(j.sample.Index) {
		return nil
	}
	return w.points.points.headsOf()
}

// keepPieces keeps the head of a job's file, and the digests of its pieces, for later passes, if
// its entry points are those of the blob that was used last.
func (w *worker) keepPieces(j *job, info *imagecapi.Info) {
	h := w.partsFor(j)
	if h == nil || len(w.points.blob) == 0 {
		return
	}
	before := h.heads[j.sample.Index].Load()
	if before != nil && before.pieces != nil {
		return
	}
	head := h.make(j.data, info, index.Inflated{})
	n := (len(j.data) + pieceBytes - 1) / pieceBytes
	if head == nil || !h.reserve(n) {
		return
	}
	head.pieces = make([]uint64, n)
	if imagecapi.DigestPieces(j.data, pieceBytes, head.pieces) != nil {
		h.reserve(-n)
		return
	}
	h.replace(j.sample.Index, before, head, w.points.blob)
}

// replace keeps a head with digests, as put does, in the place of one without. If that is no longer
// there, another goroutine has kept the sample's, and the digests are not counted twice.
func (h *heads) replace(i int, before, head *jpegHead, blob []byte) {
	head.entries = maphash.Bytes(h.seed, blob)
	if !h.heads[i].CompareAndSwap(before, head) {
		h.reserve(-len(head.pieces))
	}
}

// reserve counts digests, and reports whether there is room for them.
func (h *heads) reserve(n int) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.pieces+n > maxPieces {
		return false
	}
	h.pieces += n
	return true
}

// forget drops the head of a sample whose file has other bytes than when the head was kept.
func (h *heads) forget(i int, head *jpegHead) {
	if h.heads[i].CompareAndSwap(head, nil) {
		h.reserve(-len(head.pieces))
	}
}

// planPart plans a job's image from its head, and reads the part of its file that the crop needs
// into the slot. It returns false if the whole file is to be read.
func (q *planner) planPart(j *job) bool {
	i := j.sample.Index
	h := q.w.partsFor(j)
	if h == nil {
		return false
	}
	head := h.heads[i].Load()
	if head == nil || head.pieces == nil || q.w.p.l.judge.header(&j.sample, &head.info) != nil || q.w.draw(j, &head.info) != nil {
		return false
	}
	part := q.w.points.planPart(i, int(j.size), head, h, &q.w.geometry, j.staging)
	if part.Bytes == 0 {
		return false
	}
	memory := j.staging.plans.Memory[part.Begin:part.End:part.End]
	began := time.Now()
	err := q.r.ReadPart(i, memory, part.From)
	q.read += time.Since(began)
	if err != nil { // reading the sample finds the error again, and has words for it
		return false
	}
	first, n := part.From/pieceBytes, (len(memory)+pieceBytes-1)/pieceBytes
	q.pieces = slices.Grow(q.pieces[:0], n)[:n]
	if imagecapi.DigestPieces(memory, pieceBytes, q.pieces) != nil || !slices.Equal(q.pieces, head.pieces[first:first+n]) {
		h.forget(i, head)
		return false
	}
	j.staging.rows[j.row] = rowPlan{Row: decodeplan.Row{At: part.At, Bytes: part.Bytes}, repeat: repeat{size: j.size, epoch: j.epoch, again: j.again}}
	if q.w.crops(&head.info) {
		q.cropped++
	}
	return true
}

// planPart plans sample i, of a file of so many bytes, in a slot's memory for plans, with room for
// the part of the file that the plan needs.
func (b *workerEntryPoints) planPart(i, bytes int, head *jpegHead, all *heads, g *imagecapi.Geometry, to *staging) imagecapi.Part {
	d, ok := b.d.(planDecoder)
	if !ok {
		return imagecapi.Part{}
	}
	blob := b.points.store.EntryPoints(i, b.buffer)
	if len(blob) == 0 || maphash.Bytes(all.seed, blob) != head.entries {
		return imagecapi.Part{}
	}
	b.buffer = blob[:cap(blob)]
	b.head = append(append(b.head[:0], head.tables...), head.frame...)
	part, err := d.PlanPart(b.head, bytes, head.scan, g, blob, pieceBytes, to.plans.Memory, &to.used)
	if err != nil { // the host says what is wrong with the image
		return imagecapi.Part{}
	}
	return part
}
