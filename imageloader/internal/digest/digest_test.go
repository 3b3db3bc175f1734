package digest

import (
	"bytes"
	"math/rand/v2"
	"slices"
	"testing"
	"unsafe"
)

func random(n int) []byte {
	r := rand.New(rand.NewPCG(1, 2))
	p := make([]byte, n)
	for i := range p {
		p[i] = byte(r.Uint32())
	}
	return p
}

// aligned returns n bytes at an address with this remainder modulo 64.
func aligned(n, remainder int) []byte {
	p := make([]byte, n+128)
	skip := int(-uintptr(unsafe.Pointer(&p[0])) & 63)
	return p[skip+remainder:][:n:n]
}

// TestCopyEqualsSum: for all sizes and alignments, Copy writes the bytes of its source and nothing
// else. Copy, Sum and the code in Go compute the same digests.
func TestCopyEqualsSum(t *testing.T) {
	k := NewKey()
	data := random(5*Piece + 100)
	for _, n := range []int{0, 1, 63, 64, Piece - 1, Piece, Piece + 1, 3 * Piece, 3*Piece + 17} {
		for _, from := range []int{0, 1, 512} {
			src := data[from:][:n]
			want := make([]uint64, Count(n))
			for i := range want {
				var padded [Piece]byte
				m := copy(padded[:], src[i*Piece:])
				var lane [lanes]uint64
				sumPieceGo(padded[:], &k.words, &lane)
				want[i] = k.merged(&lane, m)
			}
			sums := make([]uint64, Count(n))
			if k.Sum(src, sums); !slices.Equal(sums, want) {
				t.Errorf("Sum of %d bytes from %d = %x, want %x", n, from, sums, want)
			}
			for _, remainder := range []int{0, 1, 16, 48} {
				room := aligned(n+32, remainder)
				for i := range room {
					room[i] = 0xA5
				}
				clear(sums)
				k.Copy(room[:n], src, sums)
				if !slices.Equal(sums, want) || !bytes.Equal(room[:n], src) {
					t.Errorf("Copy of %d bytes from %d to %d: digests %x, same bytes %v, want %x, true", n, from, remainder,
						sums, bytes.Equal(room[:n], src), want)
				}
				if rest := room[n:]; bytes.Count(rest, []byte{0xA5}) != len(rest) {
					t.Errorf("Copy of %d bytes to %d has written after them: %x", n, remainder, rest)
				}
			}
		}
	}
}

// TestDigestsDiffer: each change of a bit, of the order of words or stripes, of the length and of
// the key changes the piece's digest.
func TestDigestsDiffer(t *testing.T) {
	k := NewKey()
	data := random(Piece)
	one := func(k *Key, p []byte) uint64 {
		var sums [1]uint64
		k.Sum(p, sums[:])
		return sums[0]
	}
	want := one(k, data)
	seen := map[uint64]int{want: -1}
	for bit := range 8 * Piece {
		data[bit/8] ^= 1 << (bit % 8)
		got := one(k, data)
		if before, ok := seen[got]; ok {
			t.Fatalf("bits %d and %d (-1: none) have the same digest %x", bit, before, got)
		}
		seen[got] = bit
		data[bit/8] ^= 1 << (bit % 8)
	}
	for _, n := range []int{8, 16, 64, 128} { // swaps two runs of n bytes
		for at := 0; at+2*n <= Piece; at += n {
			swapped := slices.Concat(data[:at], data[at+n:at+2*n], data[at:at+n], data[at+2*n:])
			if one(k, swapped) == want {
				t.Errorf("%d bytes from %d, swapped with the next: same digest", n, at)
			}
		}
	}
	if one(NewKey(), data) == want {
		t.Error("two keys give the same digest, want another")
	}
	zeros := make([]byte, Piece)
	if one(k, zeros) == one(k, zeros[:Piece-1]) {
		t.Error("a piece of zeros and one that is shorter have the same digest")
	}
}

func BenchmarkCopy(b *testing.B) {
	k := NewKey()
	const n = 20 * Piece
	src, dst := random(256<<20), aligned(96<<20, 16)
	sums := make([]uint64, 20)
	b.SetBytes(n)
	for i := 0; b.Loop(); i++ {
		from := i * 7919 % (len(src)/n - 1) * n
		k.Copy(dst[i%(len(dst)/n)*n:][:n], src[from:][:n], sums)
	}
}
