package nn

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"slices"

	"github.com/torchstream/torchstream/torch"
)

// The file of a rank has CRC-32s of its tensors' bytes, as its last tensor, and rank 0's file has
// one of each file's header and last tensor. A CRC is of a block of one tensor, so that a reader of
// a part checks what it reads, with little more of the file than that.

const (
	// checksumsName names the tensor: 4 bytes for each block, little-endian, in the file's order.
	checksumsName = "checksums"
	// blockBytes is the size of a block. The last one of a tensor may be smaller.
	blockBytes = 1 << 20
)

// checksumBytes returns the size of the checksums of a tensor of so many bytes.
func checksumBytes(tensor int64) int64 { return 4 * ((tensor + blockBytes - 1) / blockBytes) }

// appendChecksums appends those of a tensor.
func appendChecksums(sums, tensor []byte) []byte {
	for block := range slices.Chunk(tensor, blockBytes) {
		sums = binary.LittleEndian.AppendUint32(sums, crc32.ChecksumIEEE(block))
	}
	return sums
}

// checksums are those of a file.
type checksums struct {
	sums []byte
	at   map[string]int64 // where those of a tensor begin
	seal uint32           // CRC-32 of the file's header and of sums
}

// readChecksums reads the checksums of a rank's file.
func (c *Checkpoint) readChecksums() (*checksums, error) {
	s := &checksums{at: map[string]int64{}}
	size := int64(0)
	for _, name := range c.names {
		if name != checksumsName {
			s.at[name] = size
			size += checksumBytes(c.entries[name].end - c.entries[name].begin)
		}
	}
	e, ok := c.entries[checksumsName]
	if !ok || e.dtype != torch.Uint8 || !slices.Equal(e.shape, []int64{size}) {
		return nil, fmt.Errorf("it has no %d bytes of checksums: it was cut, or another version of this library wrote it", size)
	}
	header := make([]byte, c.data)
	s.sums = make([]byte, size)
	if err := errors.Join(c.readFull(header, 0), c.readFull(s.sums, c.data+e.begin)); err != nil {
		return nil, err
	}
	s.seal = crc32.Update(crc32.ChecksumIEEE(header), crc32.IEEETable, s.sums)
	return s, nil
}

// readFull reads bytes at an offset of the file.
func (c *Checkpoint) readFull(b []byte, offset int64) error {
	n, err := c.file.ReadAt(b, offset)
	if n == len(b) {
		return nil
	}
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	return err
}

// read reads bytes of a tensor from an offset, and compares the checksums of the blocks in which
// they are.
func (s *checksums) read(c *Checkpoint, b []byte, name string, e entry, offset int64) error {
	var buf []byte // for blocks of which b has a part
	for len(b) > 0 {
		i := offset / blockBytes
		begin := i * blockBytes
		end := min(begin+blockBytes, e.end-e.begin)
		n := min(end-offset, int64(len(b)))
		block := b[:n]
		if n < end-begin {
			if buf == nil {
				buf = make([]byte, min(blockBytes, e.end-e.begin))
			}
			block = buf[:end-begin]
		}
		if err := c.readFull(block, c.data+e.begin+begin); err != nil {
			return err
		}
		if crc32.ChecksumIEEE(block) != binary.LittleEndian.Uint32(s.sums[s.at[name]+4*i:]) {
			return fmt.Errorf("its bytes %d to %d are not those that were written: copy the file again, or go on from an older checkpoint", begin, end-1)
		}
		if n < end-begin {
			copy(b, block[offset-begin:])
		}
		b, offset = b[n:], offset+n
	}
	return nil
}
