package blocksum_test

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/checkpoint/internal/blocksum"
)

// Every part of the data can be read, with at most three reads. Damage is found in the blocks that
// contain the part.
func TestReadPartsOfBlocks(t *testing.T) {
	const size = 2*blocksum.BlockBytes + 77
	data := make([]byte, size)
	for i := range data {
		data[i] = byte(i * 13 >> 3)
	}
	sums := blocksum.Append(nil, data)
	if int64(len(sums)) != blocksum.Size(size) || len(sums) != 12 {
		t.Fatalf("%d bytes of checksums, want 12", len(sums))
	}
	edges := []int64{0, 1, blocksum.BlockBytes - 1, blocksum.BlockBytes, blocksum.BlockBytes + 1,
		2 * blocksum.BlockBytes, size - 1, size}
	for _, bad := range []int64{-1, 0, blocksum.BlockBytes, size - 1} {
		stored := bytes.Clone(data)
		if bad >= 0 {
			stored[bad] ^= 4
		}
		for i, from := range edges {
			for _, to := range edges[i:] {
				reads := 0
				got := make([]byte, to-from)
				err := blocksum.Read(got, from, size, sums, func(p []byte, at int64) error {
					reads++
					if n := copy(p, stored[at:]); n < len(p) {
						return io.ErrUnexpectedEOF
					}
					return nil
				})
				block := bad - bad%blocksum.BlockBytes
				found := bad >= 0 && from < to && from < block+blocksum.BlockBytes && to > block
				if (err != nil) != found || err != nil &&
					!strings.Contains(err.Error(), "are not those that were written") || reads > 3 {
					t.Errorf("%d to %d with byte %d wrong: %v after %d reads, want an error: %v", from, to,
						bad, err, reads, found)
				}
				if err == nil && !bytes.Equal(got, data[from:to]) {
					t.Errorf("%d to %d: other bytes", from, to)
				}
			}
		}
	}
}

func TestReadReturnsTheReadersError(t *testing.T) {
	sums := blocksum.Append(nil, make([]byte, 10))
	for _, p := range [][]byte{make([]byte, 10), make([]byte, 3)} {
		if err := blocksum.Read(p, 0, 10, sums,
			func([]byte, int64) error { return io.ErrUnexpectedEOF }); !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("%d bytes: %v, want %v", len(p), err, io.ErrUnexpectedEOF)
		}
	}
}
