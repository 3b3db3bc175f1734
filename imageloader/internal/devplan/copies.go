package devplan

import (
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/torchstream/torchstream/imageloader/internal/arena"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// A device does not decode progressive JPEGs, because their coefficients are spread over scans that
// depend on each other. The first goroutine that meets one converts it to a baseline JPEG with the
// same coefficients, and records entry points into the copy. Both stay in memory. Later plans of
// the image use the copy and do not read the archive.
//
// Copies and their entry points are never stored outside of the process, so no index can forge
// them. Every source file has passed the checks of a sample, and libjpeg-turbo decodes it without a
// warning. Each use of the entry points checks the copy and the entry points against their proof.

// copySpacing is the number of MCUs between two entry points of a baseline copy. With this spacing,
// the entry points take about 1 % of a photograph's size.
const copySpacing = 8

// Copy is the baseline copy of a progressive JPEG.
type Copy struct {
	Info  imagecapi.Info // header of the file
	data  []byte
	blob  []byte // the entry points of data
	proof uint64
}

// copies holds the baseline copies of an index's progressive JPEGs. It is safe for concurrent use.
type copies struct {
	kept    []atomic.Pointer[Copy]
	refused sampleBits // images that have no copy
	max     int64
	used    atomic.Int64 // bytes of all copies

	mu     sync.Mutex
	memory *arena.Arena
	freed  bool
}

func newCopies(samples int, maxBytes int64) *copies {
	return &copies{kept: make([]atomic.Pointer[Copy], samples), refused: newSampleBits(samples),
		max: maxBytes, memory: arena.New()}
}

// wants reports whether a copy of sample i may still be made: no attempt has failed, and there may
// be room for it. bytes is the size of the sample's file.
func (t *copies) wants(i, bytes int) bool {
	return bytes <= MaxFile && !t.refused.has(i) && t.used.Load()+int64(bytes) <= t.max
}

// keep stores a clone of made as the copy of sample i, unless the sample already has a copy. It
// returns the stored copy. If there is no room, keep returns nil, and from then on wants returns
// false for the sample.
func (t *copies) keep(i int, made *Copy) *Copy {
	t.mu.Lock()
	defer t.mu.Unlock()
	if before := t.kept[i].Load(); before != nil {
		return before
	}
	bytes := int64(len(made.data) + len(made.blob))
	if t.freed || t.used.Load()+bytes > t.max {
		t.refused.set(i)
		return nil
	}
	t.used.Add(bytes)
	made.data, made.blob = t.memory.Clone(made.data), t.memory.Clone(made.blob)
	t.kept[i].Store(made)
	return made
}

// copiesOf returns the baseline copies of the index's images.
func (p *EntryPoints) copiesOf(maxBytes int64) *copies {
	if t := p.copies.Load(); t != nil {
		return t
	}
	p.copies.CompareAndSwap(nil, newCopies(len(p.proofs), maxBytes))
	return p.copies.Load()
}

// CopyBytes returns the memory of all baseline copies.
func (p *EntryPoints) CopyBytes() int64 {
	if t := p.copies.Load(); t != nil {
		return t.used.Load()
	}
	return 0
}

// FreeCopies frees the memory of all baseline copies. No epoch may be using them.
func (p *EntryPoints) FreeCopies() {
	t := p.copies.Load()
	if t == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.freed = true
	for i := range t.kept {
		t.kept[i].Store(nil)
	}
	t.memory.Free()
	t.used.Store(0)
}

// Copy returns the baseline copy of sample i, or nil if there is none.
func (p *Planner) Copy(i int) *Copy {
	if p.Entries == nil || p.d == nil {
		return nil
	}
	t := p.Entries.points.copies.Load()
	if t == nil {
		return nil
	}
	return t.kept[i].Load()
}

// makeCopy makes the baseline copy of a progressive JPEG. It returns nil if the image cannot be
// converted, if there is no room, or if only the host can decode the image.
func (p *Planner) makeCopy(m *Image) *Copy {
	e := p.Entries
	if m.Geometry.DCTScaling || int64(len(m.Data)) > p.MaxCopyBytes {
		return nil
	}
	all := e.points.copiesOf(p.MaxCopyBytes)
	if !all.wants(m.Index, len(m.Data)) {
		return nil
	}
	// A copy that is much larger than its file is not worth its memory.
	if need := len(m.Data) + len(m.Data)/2 + 4<<10; len(p.baseline) < need {
		p.baseline = make([]byte, need)
	}
	n, err := p.d.Transcode(m.Data, p.baseline)
	if err != nil || n == 0 { // the host reports the image's error
		all.refused.set(m.Index)
		return nil
	}
	made := &Copy{Info: *m.Info, data: p.baseline[:n]}
	n, made.proof, err = p.d.MakeEntryPoints(made.data, copySpacing, e.buffer)
	if err == nil && n > len(e.buffer) {
		e.buffer = make([]byte, 2*n)
		n, made.proof, err = p.d.MakeEntryPoints(made.data, copySpacing, e.buffer)
	}
	if err != nil || n == 0 {
		all.refused.set(m.Index)
		return nil
	}
	p.copies++
	made.blob = e.buffer[:n]
	return all.keep(m.Index, made)
}

// TakeCopies returns the number of baseline copies made since its last call. The decoder's
// statistics count the entry points of copies too, although they are not written to the index. The
// caller corrects the statistics by this number.
func (p *Planner) TakeCopies() int64 {
	n := p.copies
	p.copies = 0
	return n
}

// PlanCopy plans an image from its baseline copy. It returns false if the host has to decode the
// image.
func (p *Planner) PlanCopy(c *Copy, m *Image, to *Staging) (Placed, bool) {
	e := p.Entries
	e.blob = nil                                    // no entry points of the file itself: KeepMemberHead and KeepPartHead do nothing
	defer runtime.KeepAlive(e.points.copies.Load()) // keeps the copy's memory alive
	e.proof = c.proof
	row := p.append(c.data, m, c.blob, &e.proof, to)
	return Placed{Row: row, Redo: m.redo()}, row.Bytes > 0
}
