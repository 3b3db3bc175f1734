package devplan

import (
	"bytes"

	"github.com/torchstream/torchstream/imageloader/internal/index"
	"github.com/torchstream/torchstream/internal/decodeplan"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// A consumer that decodes from plans also accepts an image whose entry points are unknown or
// unverified. The plan then contains the whole scan. The consumer finds the entry points in the
// scan and returns them (KeepFound), so that later epochs and processes can plan with them. The
// loader composes a batch before the consumer has decoded the image, so at that time it must
// already know that the sample is good. Only an image that is good whatever its scan contains gets
// such a plan (imagecapi.PlanScan). If the consumer flags an image as damaged or unusual, the host
// decodes it, in this epoch and in later ones.

// Search describes the entry points that a consumer has to find in a file.
type Search struct {
	imagecapi.Search
	head *Head // stored together with the entry points; nil: none
}

// Searches records the images of an index in which the consumer must not search for entry points.
// It is safe for concurrent use.
type Searches struct {
	of      *index.Index
	refused sampleBits
}

// NewSearches returns the Searches of an index. At first, the consumer may search every image.
func NewSearches(of *index.Index) *Searches {
	return &Searches{of: of, refused: newSampleBits(of.Len())}
}

// Of reports whether the searches belong to the index.
func (s *Searches) Of(x *index.Index) bool { return s != nil && s.of == x }

// Refuse makes the host decode sample i unless its entry points are known.
func (s *Searches) Refuse(i int) { s.refused.set(i) }

// Allowed reports whether the consumer may search sample i.
func (s *Searches) Allowed(i int) bool { return s != nil && !s.refused.has(i) }

// packing holds buffers for KeepFound.
type packing struct{ blob, before []byte }

// KeepFound stores the entry points that a consumer has found in sample i. made is true if they are
// new. others is true if the store already has different ones.
func (p *EntryPoints) KeepFound(i int, search *Search, found []byte) (made, others bool) {
	f, _ := p.packings.Get().(*packing)
	if f == nil {
		f = new(packing)
	}
	defer p.packings.Put(f)
	n, proof, err := imagecapi.PackEntries(&search.Search, found, f.blob)
	if err == nil && n > len(f.blob) {
		f.blob = make([]byte, 2*n)
		n, proof, err = imagecapi.PackEntries(&search.Search, found, f.blob)
	}
	if err != nil || n == 0 || n > len(f.blob) { // the image has none
		return false, false
	}
	before := p.blob(i, f.before)
	f.before = before[:cap(before)]
	if len(before) == 0 {
		if !p.store.KeepEntryPoints(i, f.blob[:n]) { // a later epoch searches the image again
			return false, false
		}
	} else if !bytes.Equal(before, f.blob[:n]) {
		return false, true
	}
	// A batch may contain a sample twice.
	made = p.proofs[i].Swap(proof) == 0 && len(before) == 0
	if search.head != nil {
		p.headsOf().put(i, search.head, f.blob[:n])
	}
	return made, false
}

// PlanScan plans a baseline JPEG whose entry points are unknown. It returns false if the host has
// to decode the image.
func (p *Planner) PlanScan(m *Image, to *Staging) (Placed, bool) {
	if p.d == nil || m.Info.Format != imagecapi.JPEG || m.Info.Progressive {
		return Placed{}, false
	}
	redo := m.redo()
	redo.Searched = true
	var wanted *imagecapi.Search
	if p.Entries != nil {
		redo.Search = new(Search)
		wanted = &redo.Search.Search
	}
	var row decodeplan.Row
	if len(m.Ops) > 0 {
		row = p.copied(to, func(buffer []byte) (int, error) {
			return p.d.PlanScan(m.Data, m.Geometry, m.Ops, wanted, buffer)
		})
	} else if at, n, err := p.d.AppendScan(m.Data, m.Geometry, to.plans.Memory, &to.used, wanted); err == nil {
		row = decodeplan.Row{At: at, Bytes: n}
	}
	if row.Bytes == 0 { // the host reports the error, if the image has one
		return Placed{}, false
	}
	if wanted != nil && wanted.Wanted != 0 {
		row.Found = wanted.FoundBytes()
		if h := p.memberHeads(to); h != nil && m.Inflated.End > 0 {
			redo.Search.head = h.make(m.Data, m.Info, m.Inflated)
		}
	}
	return Placed{Row: row, Redo: redo}, true
}
