package devplan

import (
	"hash/maphash"
	"unsafe"

	"github.com/torchstream/torchstream/imageloader/internal/index"
	"github.com/torchstream/torchstream/internal/decodeplan"
)

// A consumer that inflates (decodeplan.Plans.Rooms) receives a JPEG of a .tgz, or a deflated JPEG
// of a zip, still compressed. The image's bytes are then not on the host, so the plan uses a head
// that an earlier pass of this process stored. That pass compared the image's bytes with the
// checksum of the index or the zip. It also compared the entry points with the bytes, unless the
// entry points are trusted. The consumer computes the checksum of the inflated bytes, including the
// tar header, and compares it with the earlier checksum. If the checksums differ, it returns the
// image to the host. The checksum also covers compressed bytes that the consumer's device reads
// from the mapped archive (decodeplan.Member.From).
//
// A zip's first pass needs the host too: whether a member is damaged decides which samples a batch
// has, and the proof of the entry points is a hash of the image's bytes.

// maxMember is the maximum number of bytes that a device inflates for a member, and maxPacked the
// maximum number of compressed bytes. The host inflates larger members. It also inflates members
// that are far from the checkpoint before them.
const maxMember, maxPacked = 8 << 20, 4 << 20

// packed describes the compressed range of sample i. from has the end of the range, which was found
// when the host inflated the sample. ok is false if the host has to inflate it in this epoch too.
func packed(x *index.Index, i int, from index.Inflated) (at index.Packed, ok bool) {
	at, ok = x.Packed(i)
	at.Within(from)
	return at, ok && at.Input > 0 && at.Input <= maxPacked && at.Skip <= maxMember &&
		x.Size(i) <= maxMember-int64(at.Skip)
}

// PackedReader reads the compressed bytes of a sample. [index.Reader] documents the method.
type PackedReader interface {
	ReadPacked(p *index.Packed, window, input []byte) error
	DevicePacked(p *index.Packed, register func(memory []byte) (release func() error, err error)) []byte
}

// memberHeads returns the heads for a staging's consumer, or nil if the consumer does not inflate.
func (p *Planner) memberHeads(to *Staging) *heads {
	if p.Entries == nil || !to.Inflates() || !p.ReadsMembers {
		return nil
	}
	return p.Entries.points.headsOf()
}

// KeepMemberHead stores the head of an image for later passes. It does nothing unless the decoder
// has just used the image's entry points: made them, checked them, or planned with them.
func (p *Planner) KeepMemberHead(m *Image, to *Staging) {
	if h := p.memberHeads(to); h != nil && m.Inflated.End > 0 && len(p.Entries.blob) > 0 {
		h.keep(m.Index, m.Data, m.Info, m.Inflated, p.Entries.blob)
	}
}

// MemberHead returns the head of sample i if the staging's consumer can inflate the sample, and
// otherwise nil.
func (p *Planner) MemberHead(i int, to *Staging) *Head {
	h := p.memberHeads(to)
	if h == nil {
		return nil
	}
	head := h.heads[i].Load()
	if head == nil {
		return nil
	}
	if _, ok := packed(p.Known, i, head.from); !ok {
		return nil
	}
	return head
}

// PlanMember plans an image from its head, and reads the compressed member into the slot, unless
// the consumer's device reads it. It returns false if the host has to inflate the member.
func (p *Planner) PlanMember(head *Head, m *Image, r PackedReader, to *Staging) (Placed, bool) {
	at, ok := packed(p.Known, m.Index, head.from)
	if !ok || p.d == nil {
		return Placed{}, false
	}
	blob := p.Entries.stored(m.Index)
	if len(blob) == 0 || maphash.Bytes(p.Entries.points.headsOf().seed, blob) != head.entries {
		return Placed{}, false
	}
	p.head = append(append(p.head[:0], head.tables...), head.frame...)
	plan := p.written(func(buffer []byte) (int, error) {
		return p.d.PlanHead(p.head, int(m.Size), head.scan, m.Geometry, blob, m.Ops, buffer)
	})
	if len(plan) == 0 {
		return Placed{}, false
	}
	// The window is before the input, because a device that reads the input writes zeros after it.
	memory, row, fits := to.reserve(decodeplan.Row{Bytes: len(plan), Member: decodeplan.Member{
		Window: len(plan), WindowBytes: at.Window, Input: decodeplan.Aligned(len(plan) + at.Window),
		InputBytes: at.Input, SkipBits: at.SkipBits,
		Skip: at.Skip, Bytes: at.Lead + int(m.Size), Scan: at.Lead + head.scan, Checksum: head.checksum,
	}})
	if !fits {
		return Placed{}, false
	}
	copy(memory, plan)
	window, input := memory[len(plan):][:at.Window], memory[row.Member.Input:]
	if from := r.DevicePacked(&at, to.plans.Register); from != nil {
		row.Member.From, input = unsafe.SliceData(from), nil
	}
	// After an error a worker reads the sample again. The second read reports the error with its
	// description.
	if r.ReadPacked(&at, window, input) != nil {
		return Placed{}, false
	}
	redo := m.redo()
	redo.Inflated = true
	return Placed{Row: row, Redo: redo}, true
}
