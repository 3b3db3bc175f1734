package imagecapi

import (
	"bytes"
	"hash/crc32"
	"testing"
)

// TestImagesOfOneSizeHaveOtherChecksums: an index tells images of one size apart by their CRC-32.
func TestImagesOfOneSizeHaveOtherChecksums(t *testing.T) {
	seen := map[uint32]int{}
	for i := range 8 {
		sum := crc32.ChecksumIEEE(Image(8, 6, bytes.Repeat([]byte{byte(i)}, 40)))
		if other, found := seen[sum]; found {
			t.Errorf("images %d and %d have the CRC-32 %08x, want two checksums", other, i, sum)
		}
		seen[sum] = i
	}
}
