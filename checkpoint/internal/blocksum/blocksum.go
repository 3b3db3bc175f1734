// Package blocksum computes and verifies the checksums of checkpoints. Each block of a tensor's
// bytes has a CRC-32. To verify a part of a tensor, a reader reads only the blocks that contain the
// part.
package blocksum

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"slices"
)

// BlockBytes is the size of a block. The last block of a tensor may be smaller.
const BlockBytes = 1 << 20

// Size returns the size in bytes of the checksums for that many bytes of data.
func Size(data int64) int64 { return 4 * ((data + BlockBytes - 1) / BlockBytes) }

// Append appends the checksums of data, little-endian.
func Append(sums, data []byte) []byte {
	for block := range slices.Chunk(data, BlockBytes) {
		sums = binary.LittleEndian.AppendUint32(sums, crc32.ChecksumIEEE(block))
	}
	return sums
}

// Read fills p with the bytes at an offset of the data, and verifies the checksums of all blocks
// that contain these bytes. size is the size of the data. read reads the data without verification.
// Read calls it at most three times, and allocates at most one block.
func Read(p []byte, offset, size int64, sums []byte, read func(p []byte, offset int64) error) error {
	var buf []byte
	part := func() error { // reads the part that p needs of the block at offset
		begin := offset - offset%BlockBytes
		if buf == nil {
			buf = make([]byte, min(BlockBytes, size))
		}
		block := buf[:min(BlockBytes, size-begin)]
		if err := readWhole(block, begin, sums, read); err != nil {
			return err
		}
		n := copy(p, block[offset-begin:])
		p, offset = p[n:], offset+int64(n)
		return nil
	}
	if len(p) > 0 && offset%BlockBytes != 0 {
		if err := part(); err != nil {
			return err
		}
	}
	whole := int64(len(p))
	if offset+whole < size {
		whole -= whole % BlockBytes
	}
	if whole > 0 {
		if err := readWhole(p[:whole], offset, sums, read); err != nil {
			return err
		}
		p, offset = p[whole:], offset+whole
	}
	if len(p) > 0 {
		return part()
	}
	return nil
}

// readWhole reads and verifies whole blocks. offset is the start of the first one.
func readWhole(p []byte, offset int64, sums []byte, read func(p []byte, offset int64) error) error {
	if err := read(p, offset); err != nil {
		return err
	}
	for block := range slices.Chunk(p, BlockBytes) {
		at := offset / BlockBytes * 4
		if crc32.ChecksumIEEE(block) != binary.LittleEndian.Uint32(sums[at:]) {
			return fmt.Errorf("its bytes %d to %d are not those that were written: copy the file again, "+
				"or go on from an older checkpoint",
				offset, offset+int64(len(block))-1)
		}
		offset += int64(len(block))
	}
	return nil
}
