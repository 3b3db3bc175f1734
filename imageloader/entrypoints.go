package imageloader

import (
	"sync"
	"sync/atomic"

	"github.com/torchstream/torchstream/internal/decodeplan"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// entryStore keeps a blob of entry points for a sample: an index does, in its file. Several
// goroutines call its methods.
type entryStore interface {
	// EntryPoints returns a blob, written over buffer or into a larger buffer. It is empty if there
	// is none.
	EntryPoints(i int, buffer []byte) []byte
	// KeepEntryPoints keeps a copy of a blob, in the place of one of an earlier process, unless it
	// has kept one before. It returns false if there is no room.
	KeepEntryPoints(i int, blob []byte) bool
}

// entryPoints are the entry points of an index's JPEG files, and which of them were compared with
// their images. docs/entry-points.md says what entry points are.
type entryPoints struct {
	store   entryStore
	trusted bool // a blob's own digests are enough
	// proofs has, by sample, the proof that the image library gives when all entry points of its
	// blob were compared with the image; 0: they were not, in this process.
	proofs []atomic.Uint64
	// refused has the samples whose blob, of an earlier process, was found to be wrong: it is not
	// used again, and the next decode makes another.
	refused sampleBits

	packings sync.Pool // of packing

	heads     *heads // nil until a consumer inflates
	makeHeads sync.Once

	transcodes atomic.Pointer[transcodes] // nil before the first progressive JPEG for a consumer that decodes
}

// headsOf returns the heads of the index's images, for a consumer that inflates.
func (p *entryPoints) headsOf() *heads {
	p.makeHeads.Do(func() { p.heads = newHeads(len(p.proofs)) })
	return p.heads
}

// forWorker returns the entry points for one worker with this decoder, or nil if there are none, or
// the decoder does not know them.
func (p *entryPoints) forWorker(d decoder) *workerEntryPoints {
	e, ok := d.(entryPointDecoder)
	if p == nil || !ok {
		return nil
	}
	return &workerEntryPoints{points: p, d: e}
}

func newEntryPoints(store entryStore, samples int, trusted bool) *entryPoints {
	return &entryPoints{store: store, trusted: trusted, proofs: make([]atomic.Uint64, samples), refused: newSampleBits(samples)}
}

// blob returns the blob of sample i, written over buffer or into a larger buffer. It is empty if
// there is none, or if it was refused and no other was made since.
func (p *entryPoints) blob(i int, buffer []byte) []byte {
	if p.refused.has(i) && p.proofs[i].Load() == 0 {
		return nil
	}
	return p.store.EntryPoints(i, buffer)
}

// sampleBits has a bit for each sample, clear at first. Several goroutines use it.
type sampleBits []atomic.Uint64

func newSampleBits(samples int) sampleBits { return make(sampleBits, samples/64+1) }

func (b sampleBits) set(i int)      { b[i/64].Or(1 << (i % 64)) }
func (b sampleBits) has(i int) bool { return b[i/64].Load()>>(i%64)&1 != 0 }

// workerEntryPoints decodes baseline JPEGs by their entry points, and makes those that are missing.
// One goroutine uses it.
type workerEntryPoints struct {
	points *entryPoints
	d      entryPointDecoder
	proof  uint64
	buffer []byte // for a blob that is used, or made
	blob   []byte // of the latest image, if a call has compared it, or planned with it; see keepHead
	head   []byte // of an image that is not on the host; reused
	plans  []byte // for a plan that is not written in its place, aligned; reused
	// baseline is for a progressive JPEG that is written as a baseline one; reused.
	baseline []byte
}

// plannable reports whether sample i may have a plan: its entry points were compared with the
// image, or are there and need no comparison.
func (b *workerEntryPoints) plannable(i int) bool {
	if b == nil {
		return false
	}
	if !b.points.trusted {
		return b.points.proofs[i].Load() != 0
	}
	blob := b.points.store.EntryPoints(i, b.buffer)
	if len(blob) == 0 {
		return false
	}
	b.buffer = blob[:cap(blob)]
	return true
}

// plan writes the plan of sample i and of operations on its pixels, for another decoder, to a
// slot's memory for plans. The row has no bytes if only the host decodes the image or runs an
// operation, also when nobody has compared its entry points yet, and if there is no room.
func (b *workerEntryPoints) plan(i int, data []byte, g *imagecapi.Geometry, ops []imagecapi.AugmentOp, to *staging) decodeplan.Row {
	d, ok := b.d.(planDecoder)
	if !ok {
		return decodeplan.Row{}
	}
	blob := b.points.store.EntryPoints(i, b.buffer)
	if len(blob) == 0 {
		return decodeplan.Row{}
	}
	b.buffer = blob[:cap(blob)]
	proof := &b.proof
	if b.points.trusted {
		proof = nil
	} else if b.proof = b.points.proofs[i].Load(); b.proof == 0 {
		return decodeplan.Row{}
	}
	b.blob = blob
	return b.append(d, data, g, blob, proof, ops, to)
}

// append does plan by the entry points in blob.
func (b *workerEntryPoints) append(d planDecoder, data []byte, g *imagecapi.Geometry, blob []byte, proof *uint64,
	ops []imagecapi.AugmentOp, to *staging) decodeplan.Row {
	if len(ops) > 0 {
		return b.planAugmented(d, data, g, blob, proof, ops, to)
	}
	at, n, err := d.AppendPlan(data, g, blob, proof, to.plans.Memory, &to.used)
	if err != nil { // the host says what is wrong with the image
		return decodeplan.Row{}
	}
	return decodeplan.Row{At: at, Bytes: n}
}

// planAugmented does append for a sample with operations.
func (b *workerEntryPoints) planAugmented(d planDecoder, data []byte, g *imagecapi.Geometry, blob []byte, proof *uint64,
	ops []imagecapi.AugmentOp, to *staging) decodeplan.Row {
	for {
		n, err := d.PlanAugmented(data, g, blob, proof, ops, b.plans)
		if err != nil || n == 0 {
			return decodeplan.Row{}
		}
		if n <= len(b.plans) {
			memory, row, _ := to.reserve(decodeplan.Row{Bytes: n})
			copy(memory, b.plans)
			return row
		}
		b.plans = alignedBytes(2 * n)
	}
}

// decode decodes sample i as the decoder's decode does. When a blob is first used in this process,
// it is compared with the image, which costs as much as decoding without it. So an index of any
// origin gives the right pixels or an error. A blob that is wrong is replaced by the next decode.
func (b *workerEntryPoints) decode(i int, data []byte, g *imagecapi.Geometry, dst []byte, stride int) error {
	p := b.points
	b.blob = nil
	if blob := p.blob(i, b.buffer); len(blob) > 0 {
		b.buffer = blob[:cap(blob)]
		if p.trusted {
			return b.d.DecodeByEntryPoints(data, g, dst, stride, blob, nil)
		}
		before := p.proofs[i].Load()
		b.proof = before
		err := b.d.DecodeByEntryPoints(data, g, dst, stride, blob, &b.proof)
		if b.proof != before {
			p.proofs[i].Store(b.proof)
			b.blob = blob
		} else if before == 0 && err == nil {
			p.refused.set(i)
		}
		return err
	}
	if need := len(data)/64 + 64; len(b.buffer) < need {
		b.buffer = make([]byte, 2*need)
	}
	n, proof, err := b.d.DecodeMakingEntryPoints(data, g, dst, stride, b.buffer)
	// A proof without a blob would keep the sample from being searched for entry points.
	if err == nil && n > 0 && n <= len(b.buffer) && p.store.KeepEntryPoints(i, b.buffer[:n]) {
		p.proofs[i].Store(proof)
		b.blob = b.buffer[:n]
	}
	return err
}
