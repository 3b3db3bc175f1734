package devplan

import (
	"sync"
	"sync/atomic"

	"github.com/torchstream/torchstream/imageloader/internal/sample"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// Store keeps a blob of entry points for each sample, as an index does in its file. Its methods are
// safe for concurrent use.
type Store interface {
	// EntryPoints returns a blob, in buffer or in a larger one. It is empty if the sample has none.
	EntryPoints(i int, buffer []byte) []byte
	// KeepEntryPoints stores a copy of a blob. It replaces only blobs of earlier processes. It
	// returns false if there is no room.
	KeepEntryPoints(i int, blob []byte) bool
}

// EntryPoints holds the entry points of an index's JPEG files, and records which blobs have been
// compared with their images. It is safe for concurrent use.
type EntryPoints struct {
	store   Store
	trusted bool // a blob's own digests are enough
	// proofs holds, for each sample, the image library's proof that all entry points of the blob
	// were compared with the image. 0 means that this process has not compared them.
	proofs []atomic.Uint64
	// refused marks samples whose blob from an earlier process is wrong. The blob is not used
	// again, and the next decode makes a new one.
	refused sampleBits

	packings sync.Pool // of packing

	heads     *heads // nil before the first member is inflated by the consumer, or the first part of a file is read
	makeHeads sync.Once

	copies atomic.Pointer[copies] // nil before a device's plan first needs a copy of a progressive JPEG
}

// NewEntryPoints returns the entry points in a store. If trusted is set, blobs of earlier processes
// are used without a comparison with the image.
func NewEntryPoints(store Store, samples int, trusted bool) *EntryPoints {
	return &EntryPoints{store: store, trusted: trusted, proofs: make([]atomic.Uint64, samples),
		refused: newSampleBits(samples)}
}

// Of reports whether the entry points are in this store.
func (p *EntryPoints) Of(store Store) bool { return p != nil && p.store == store }

// headsOf returns the heads of the index's images.
func (p *EntryPoints) headsOf() *heads {
	p.makeHeads.Do(func() { p.heads = newHeads(len(p.proofs)) })
	return p.heads
}

// RefuseMember makes the host inflate sample i from now on, because the consumer could not.
// Otherwise the consumer would fail on the unusual stream in every epoch, and wait for the host
// each time.
func (p *EntryPoints) RefuseMember(i int) { p.headsOf().refuse(i) }

// RefusePart makes the next pass read the whole file of sample i, because the consumer could not
// decode the part that it has read.
func (p *EntryPoints) RefusePart(i int) { p.headsOf().refusePart(i) }

// blob returns the blob of sample i, in buffer or in a larger one. It is empty if there is no blob,
// or if the blob was refused and has not been replaced yet.
func (p *EntryPoints) blob(i int, buffer []byte) []byte {
	if p.refused.has(i) && p.proofs[i].Load() == 0 {
		return nil
	}
	return p.store.EntryPoints(i, buffer)
}

// sampleBits has a bit for each sample, initially clear. It is safe for concurrent use.
type sampleBits []atomic.Uint64

func newSampleBits(samples int) sampleBits { return make(sampleBits, samples/64+1) }

func (b sampleBits) set(i int)      { b[i/64].Or(1 << (i % 64)) }
func (b sampleBits) has(i int) bool { return b[i/64].Load()>>(i%64)&1 != 0 }

// entryPointDecoder is a decoder that supports entry points. [codec.Decoder] documents the methods.
type entryPointDecoder interface {
	DecodeByEntryPoints(data []byte, g *imagecapi.Geometry, dst []byte, stride int, blob []byte, proof *uint64) error
	DecodeMakingEntryPoints(data []byte, g *imagecapi.Geometry, dst []byte, stride int,
		buffer []byte) (n int, proof uint64, err error)
}

// Decoder decodes baseline JPEGs by their entry points, and makes missing entry points. It is not
// safe for concurrent use.
type Decoder struct {
	points *EntryPoints
	d      entryPointDecoder
	proof  uint64
	buffer []byte // for reading or making a blob
	// blob holds the entry points of the latest image, if a call has compared them with the image
	// or has planned with them.
	blob []byte
}

// NewDecoder returns a Decoder with these entry points for one goroutine. It returns nil if p is
// nil or d does not support entry points.
func NewDecoder(p *EntryPoints, d sample.Decoder) *Decoder {
	e, ok := d.(entryPointDecoder)
	if p == nil || !ok {
		return nil
	}
	return &Decoder{points: p, d: e}
}

// Plannable reports whether sample i may have a plan. The sample's entry points must be trusted, or
// a comparison with the image must have proven them.
func (b *Decoder) Plannable(i int) bool {
	if b == nil {
		return false
	}
	if !b.points.trusted {
		return b.points.proofs[i].Load() != 0
	}
	return len(b.stored(i)) > 0
}

// stored returns the blob of sample i in the store. It is valid until the next call.
func (b *Decoder) stored(i int) []byte {
	blob := b.points.store.EntryPoints(i, b.buffer)
	if len(blob) > 0 {
		b.buffer = blob[:cap(blob)]
	}
	return blob
}

// Decode decodes sample i like the decoder's Decode. When this process first uses a blob, Decode
// compares the blob with the image. This takes as long as decoding without entry points. Even a
// forged index therefore gives the right pixels or an error. The next decode replaces a wrong blob.
func (b *Decoder) Decode(i int, data []byte, g *imagecapi.Geometry, dst []byte, stride int) error {
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
	// A proof without a blob would prevent the search for the sample's entry points.
	if err == nil && n > 0 && n <= len(b.buffer) && p.store.KeepEntryPoints(i, b.buffer[:n]) {
		p.proofs[i].Store(proof)
		b.blob = b.buffer[:n]
	}
	return err
}
