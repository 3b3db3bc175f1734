package devplan

import (
	"encoding/binary"
	"hash/maphash"
	"slices"
	"unsafe"

	"github.com/torchstream/torchstream/imageloader/internal/digest"
	"github.com/torchstream/torchstream/imageloader/internal/index"
	"github.com/torchstream/torchstream/internal/decodeplan"
)

// A crop needs only a part of its file. The head, which an earlier pass of this process has stored,
// and the entry points together tell which bytes of the scan the crop needs. That part can
// therefore be read from a local .tar or zip straight into the slot's memory. The earlier pass also
// compared the whole file with its entry points, and stored the digests of the file's pieces. If a
// piece now has another digest, the whole file is read and checked. If the consumer's device reads
// the part itself (decodeplan.Row.File), it compares the digests, and the host decodes the image.

// maxPieces bounds the number of digests of an index's samples. The digests then take at most 256
// MiB, and cover 128 GiB of images. Images without digests are read whole.
const maxPieces = 32 << 20

// PartReader reads a part of a sample. [index.Reader] documents the methods.
type PartReader interface {
	ReadPart(i int, p *index.ContentPart) error
	DevicePart(i int, p *index.ContentPart, register func(memory []byte) (release func() error, err error)) []byte
}

// partHeads returns the heads if a part of sample i's file may be read alone. It returns nil if the
// whole file must be read.
func (p *Planner) partHeads(i int, to *Staging) *heads {
	if to == nil || p.Augments || p.Entries == nil || !p.Known.Parts(i) {
		return nil
	}
	return p.Entries.points.headsOf()
}

// KeepPartHead stores the head of an image and the digests of its file's pieces for later passes.
// Like KeepMemberHead, it does nothing unless the image's entry points have just been used.
func (p *Planner) KeepPartHead(m *Image, to *Staging) {
	h := p.partHeads(m.Index, to)
	if h == nil || len(p.Entries.blob) == 0 {
		return
	}
	before := h.heads[m.Index].Load()
	if before != nil && before.pieces != nil {
		return
	}
	head := h.make(m.Data, m.Info, m.Inflated)
	n := digest.Count(len(m.Data))
	if head == nil || !h.reserve(n) {
		return
	}
	head.pieces = make([]uint64, n)
	h.key.Sum(m.Data, head.pieces)
	h.replace(m.Index, before, head, p.Entries.blob)
}

// PartHead returns the head of sample i if a part of its file can be read, and otherwise nil.
func (p *Planner) PartHead(i int, to *Staging) *Head {
	h := p.partHeads(i, to)
	if h == nil {
		return nil
	}
	head := h.heads[i].Load()
	if head == nil || head.pieces == nil {
		return nil
	}
	return head
}

// PlanPart plans an image from its head, and reads the crop's part of the file into the slot,
// unless the consumer's device reads it. It returns false if the whole file has to be read.
func (p *Planner) PlanPart(head *Head, m *Image, r PartReader, to *Staging) (Placed, bool) {
	h := p.Entries.points.headsOf()
	blob := p.Entries.stored(m.Index)
	if p.d == nil || len(blob) == 0 || maphash.Bytes(h.seed, blob) != head.entries {
		return Placed{}, false
	}
	p.head = append(append(p.head[:0], head.tables...), head.frame...)
	part, err := p.d.PlanPart(p.head, int(m.Size), head.scan, m.Geometry, blob, digest.Piece, to.plans.Memory, &to.used)
	if err != nil || part.Bytes == 0 { // the host reports the image's error
		return Placed{}, false
	}
	memory := to.plans.Memory[part.Begin:part.End:part.End]
	first, n := part.From/digest.Piece, digest.Count(len(memory))
	p.pieces = slices.Grow(p.pieces[:0], n)[:n]
	content := index.ContentPart{Bytes: memory, From: part.From, Whole: head.from, Key: h.key, Sums: p.pieces}
	wanted := head.pieces[first:][:n]
	row, redo := decodeplan.Row{At: part.At, Bytes: part.Bytes}, m.redo()
	if file := r.DevicePart(m.Index, &content, to.plans.Register); file != nil {
		room := to.plans.Memory[part.Begin:] // with 16 bytes after the part, which may have fewer than a digest
		for i, sum := range wanted {
			binary.NativeEndian.PutUint64(room[8*i:], sum)
		}
		row.File = decodeplan.File{From: unsafe.SliceData(file), Key: h.words}
		redo.Read = true
		return Placed{Row: row, Redo: redo}, true
	}
	// After an error a worker reads the sample again. The second read reports the error with its
	// description.
	if r.ReadPart(m.Index, &content) != nil {
		return Placed{}, false
	}
	if !slices.Equal(p.pieces, wanted) {
		h.forget(m.Index, head)
		return Placed{}, false
	}
	return Placed{Row: row, Redo: redo}, true
}
