package imageloader

import (
	"sync/atomic"

	"github.com/torchstream/torchstream/internal/imagecapi"
)

// entryStore keeps a blob of entry points for a sample: an index does, in its file. Several
// goroutines call its methods.
type entryStore interface {
	// EntryPoints returns a blob, written over buffer or into a larger one; empty if there is none.
	EntryPoints(i int, buffer []byte) []byte
	KeepEntryPoints(i int, blob []byte)
}

// entryPoints are the entry points of an index's samples, and which of them were compared with
// their images. docs/entry-points.md says what they are.
type entryPoints struct {
	store   entryStore
	trusted bool // the digests of a blob are enough
	// proofs has, by sample, what the shim says when all entries of its blob were compared with the
	// image; 0: not yet, in this process.
	proofs []atomic.Uint64
}

// by is for one worker with this decoder; nil if there are no entry points, or the decoder knows
// none.
func (p *entryPoints) by(d decoder) *byEntries {
	e, ok := d.(entryDecoder)
	if p == nil || !ok {
		return nil
	}
	return &byEntries{points: p, d: e}
}

func newEntryPoints(store entryStore, samples int, trusted bool) *entryPoints {
	return &entryPoints{store: store, trusted: trusted, proofs: make([]atomic.Uint64, samples)}
}

// byEntries decodes one baseline JPEG after the other by their entry points, and makes those that
// are missing. One goroutine's.
type byEntries struct {
	points *entryPoints
	d      entryDecoder
	proof  uint64
	buffer []byte // for blobs: that are used, or made
}

// decode is the decoder's decode of sample i. The first time in this process that a blob is used,
// it is compared with the image, which costs what decoding without it costs: a sidecar that
// somebody else wrote gives right pixels or none.
func (b *byEntries) decode(i int, data []byte, g *imagecapi.Geometry, dst []byte, stride int) error {
	p := b.points
	if blob := p.store.EntryPoints(i, b.buffer); len(blob) > 0 {
		b.buffer = blob[:cap(blob)]
		if p.trusted {
			return b.d.decodeEntries(data, g, dst, stride, blob, nil)
		}
		before := p.proofs[i].Load()
		b.proof = before
		err := b.d.decodeEntries(data, g, dst, stride, blob, &b.proof)
		if b.proof != before {
			p.proofs[i].Store(b.proof)
		}
		return err
	}
	if need := len(data)/64 + 64; len(b.buffer) < need {
		b.buffer = make([]byte, 2*need)
	}
	n, proof, err := b.d.decodeMakeEntries(data, g, dst, stride, b.buffer)
	if err == nil && n > 0 && n <= len(b.buffer) {
		p.store.KeepEntryPoints(i, b.buffer[:n])
		p.proofs[i].Store(proof)
	}
	return err
}
