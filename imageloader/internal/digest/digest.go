// Package digest computes digests of a file's pieces, also while it copies the pieces. Copying and
// digesting in one pass reads the bytes from memory once.
package digest

import (
	"crypto/rand"
	"encoding/binary"
	"math/bits"
	"unsafe"
)

// Piece is the number of bytes that a digest covers. A file's last piece may be shorter.
const Piece = 4 << 10

const (
	stripe  = 64 // bytes that enter the lanes at once
	lanes   = stripe / 8
	stripes = Piece / stripe
)

// Key makes the digests of a process unpredictable. Digests of different keys do not compare. Keys
// are safe for concurrent use.
type Key struct {
	words [stripes + lanes]uint64 // stripe i uses 8 words from word i
	merge [lanes]uint64
}

// NewKey returns a random key.
func NewKey() *Key {
	k := new(Key)
	var random [8]byte
	for _, words := range [][]uint64{k.words[:], k.merge[:]} {
		for i := range words {
			_, _ = rand.Read(random[:]) // never fails
			words[i] = binary.LittleEndian.Uint64(random[:])
		}
	}
	return k
}

// Numbers returns the key's numbers, in the order that decoders of plans expect
// (decodeplan.DigestWords).
func (k *Key) Numbers() (n [stripes + 2*lanes]uint64) {
	copy(n[copy(n[:], k.words[:]):], k.merge[:])
	return n
}

// Count returns the number of pieces of n bytes.
func Count(n int) int { return (n + Piece - 1) / Piece }

// Sum computes the digests of p's pieces. It fills sums, which has Count(len(p)) elements.
func (k *Key) Sum(p []byte, sums []uint64) {
	_ = sums[:Count(len(p))]
	for i := 0; len(p) > 0; i++ {
		n := min(len(p), Piece)
		sums[i] = k.sum(p[:n])
		p = p[n:]
	}
}

// Copy copies src to dst, which is as long, and computes the digests of the copied pieces as Sum
// does. The bytes of src may change meanwhile. Copy is for bytes that only a device reads: it may
// bypass the processor's caches.
func (k *Key) Copy(dst, src []byte, sums []uint64) {
	_, _ = sums[:Count(len(src))], dst[:len(src)]
	direct := fast() && len(dst) > 0 && uintptr(unsafe.Pointer(unsafe.SliceData(dst)))%alignment == 0
	for i := 0; len(src) > 0; i++ {
		n := min(len(src), Piece)
		if direct && n == Piece {
			var lane [lanes]uint64
			copyPiece(unsafe.SliceData(dst), unsafe.SliceData(src), &k.words, &lane)
			sums[i] = k.merged(&lane, n)
		} else {
			copy(dst[:n], src[:n])
			sums[i] = k.sum(dst[:n])
		}
		dst, src = dst[n:], src[n:]
	}
	if direct {
		fence()
	}
}

// sum returns the digest of a piece. A short piece is padded with zeros.
func (k *Key) sum(p []byte) uint64 {
	n := len(p)
	if n < Piece {
		var padded [Piece]byte
		copy(padded[:], p)
		p = padded[:]
	}
	var lane [lanes]uint64
	if fast() {
		sumPiece(unsafe.SliceData(p), &k.words, &lane)
	} else {
		sumPieceGo(p, &k.words, &lane)
	}
	return k.merged(&lane, n)
}

// sumPieceGo adds a piece to the lanes. Each word of a stripe adds the product of its keyed halves
// to its lane, and itself to the neighbouring lane.
func sumPieceGo(p []byte, key *[stripes + lanes]uint64, lane *[lanes]uint64) {
	for s := range stripes {
		for i := range lanes {
			word := binary.LittleEndian.Uint64(p[s*stripe+8*i:])
			keyed := word ^ key[s+i]
			lane[i] += (keyed & 0xFFFF_FFFF) * (keyed >> 32)
			lane[i^1] += word
		}
	}
}

// merged returns the digest of a piece of n bytes from its lanes.
func (k *Key) merged(lane *[lanes]uint64, n int) uint64 {
	digest := uint64(n) * 0x9E37_79B9_7F4A_7C15
	for i := 0; i < lanes; i += 2 {
		high, low := bits.Mul64(lane[i]^k.merge[i], lane[i+1]^k.merge[i+1])
		digest += high ^ low
	}
	digest = (digest ^ digest>>37) * 0x1656_6791_9E37_79F9
	return digest ^ digest>>32
}
