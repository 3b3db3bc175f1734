package parquet

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// The encodings of values and levels.
const (
	encodingPlain       = 0
	encodingPlainDict   = 2
	encodingRLE         = 3
	encodingDelta       = 5
	encodingDeltaLength = 6
	encodingDeltaBytes  = 7
	encodingDict        = 8
)

var encodingNames = []string{"PLAIN", "encoding 1", "PLAIN_DICTIONARY", "RLE", "BIT_PACKED", "DELTA_BINARY_PACKED",
	"DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY", "RLE_DICTIONARY", "BYTE_STREAM_SPLIT"}

// errEncoding returns the error for an encoding that the package cannot read.
func errEncoding(encoding int32) error {
	name := fmt.Sprintf("encoding %d", encoding)
	if encoding >= 0 && int(encoding) < len(encodingNames) {
		name = encodingNames[encoding]
	}
	return fmt.Errorf("its values are encoded as %s, which is not read here: write the file again as PLAIN", name)
}

var errValues = errors.New("the values of its page are damaged")

// hybrid reads unsigned numbers in Parquet's hybrid of run lengths and bit packing (RLE).
type hybrid struct {
	data   []byte
	width  uint // bits of a number, at most 32
	left   uint64
	value  uint32
	packed []byte // data of the current run, if it is bit-packed
	bit    uint64
}

// next returns the next number.
func (h *hybrid) next() (uint32, error) {
	if h.width == 0 && len(h.data) == 0 {
		return 0, nil
	}
	for h.left == 0 {
		if err := h.run(); err != nil {
			return 0, err
		}
	}
	h.left--
	if h.packed == nil {
		return h.value, nil
	}
	v := bitsAt(h.packed, h.bit, h.width)
	h.bit += uint64(h.width)
	return uint32(v), nil
}

// run reads the header of the next run.
func (h *hybrid) run() error {
	head, n := binary.Uvarint(h.data)
	if n <= 0 {
		return errValues
	}
	h.data = h.data[n:]
	if head&1 == 0 {
		bytes := int(h.width+7) / 8
		if bytes > len(h.data) {
			return errValues
		}
		var word [4]byte
		copy(word[:], h.data[:bytes])
		h.left, h.value, h.packed = head>>1, binary.LittleEndian.Uint32(word[:]), nil
		h.data = h.data[bytes:]
		return nil
	}
	groups := head >> 1 // groups of eight numbers
	if groups == 0 {
		return nil
	}
	if h.width == 0 {
		h.left, h.value, h.packed = groups*8, 0, nil
		return nil
	}
	// The last run may end right after its last number, in the middle of a group.
	bytes := min(groups*uint64(h.width), uint64(len(h.data)))
	if groups > 1<<32 || bytes*8 < uint64(h.width) {
		return errValues
	}
	h.left, h.packed, h.bit = min(groups*8, bytes*8/uint64(h.width)), h.data[:bytes], 0
	h.data = h.data[bytes:]
	return nil
}

// bitsAt returns the number that starts at a bit of data. The number has width bits, at most 64.
func bitsAt(data []byte, bit uint64, width uint) (v uint64) {
	if width == 0 {
		return 0
	}
	for got := uint(0); got < width; {
		at, shift := bit>>3, uint(bit&7)
		n := min(8-shift, width-got)
		v |= uint64(data[at]>>shift&(1<<n-1)) << got
		got += n
		bit += uint64(n)
	}
	return v
}

// delta reads integers in the encoding DELTA_BINARY_PACKED.
type delta struct {
	data     []byte
	at       int
	left     uint64 // number of values that have not been returned
	value    int64
	first    bool
	perMini  uint64
	widths   []byte // widths of the block's next miniblocks
	minDelta int64
	minis    int
	miniblock
}

// miniblock is a run of values with the same number of bits.
type miniblock struct {
	begin       int // position in data
	width       uint
	bit         uint64 // position of the next value
	leftInBlock uint64
}

// newDelta reads the header. limit is the maximum number of values.
func newDelta(data []byte, limit int32) (*delta, error) {
	d := &delta{data: data, first: true}
	block, minis, count := d.uvarint(), d.uvarint(), d.uvarint()
	d.value = int64(d.zigzag())
	if d.at < 0 || minis == 0 || minis > 1<<10 || block > 1<<24 || block%minis != 0 || block/minis%8 != 0 ||
		block/minis == 0 || count > uint64(limit) {
		return nil, errValues
	}
	d.left, d.perMini, d.minis = count, block/minis, int(minis)
	return d, nil
}

// uvarint reads an unsigned varint. If there is none, it sets d.at to -1.
func (d *delta) uvarint() uint64 {
	if d.at < 0 {
		return 0
	}
	v, n := binary.Uvarint(d.data[d.at:])
	if n <= 0 {
		d.at = -1
		return 0
	}
	d.at += n
	return v
}

func (d *delta) zigzag() uint64 {
	v := d.uvarint()
	return v>>1 ^ -(v & 1)
}

// next returns the next value.
func (d *delta) next() (int64, error) {
	if d.left == 0 {
		return 0, errValues
	}
	d.left--
	if d.first {
		d.first = false
		return d.value, nil
	}
	if d.leftInBlock == 0 {
		if err := d.mini(); err != nil {
			return 0, err
		}
	}
	d.leftInBlock--
	d.value += d.minDelta + int64(bitsAt(d.data[d.begin:], d.bit, d.width))
	d.bit += uint64(d.width)
	return d.value, nil
}

// mini reads the header of the next miniblock.
func (d *delta) mini() error {
	if len(d.widths) == 0 {
		d.minDelta = int64(d.zigzag())
		if d.at < 0 || d.minis > len(d.data)-d.at {
			return errValues
		}
		d.widths = d.data[d.at : d.at+d.minis]
		d.at += d.minis
	}
	d.width, d.widths = uint(d.widths[0]), d.widths[1:]
	bytes := uint64(d.width) * d.perMini / 8
	if d.width > 64 || bytes > uint64(len(d.data)-d.at) {
		return errValues
	}
	d.begin, d.bit, d.leftInBlock = d.at, 0, d.perMini
	d.at += int(bytes)
	return nil
}

// end returns the position after the last value. It reads all values.
func (d *delta) end() (int, error) {
	for d.left > 0 {
		if _, err := d.next(); err != nil {
			return 0, err
		}
	}
	return d.at, nil
}
