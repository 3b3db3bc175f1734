package raster

import (
	"errors"
	"io"
	"math/bits"
	"strings"
	"sync"
)

// fax decodes the compression formats of fax machines (ITU-T T.4 and T.6; TIFF 6.0, sections 10 and
// 11) to rows of one bit per pixel. 1 is black, as in a fax machine.
type fax struct {
	in       faxBits
	kind     uint64 // tiffHuffman, tiffGroup3 or tiffGroup4
	plane    bool   // a row of group 3 may be coded relative to the row before it
	width    int
	tables   *faxTables
	row      []byte
	left     []byte  // bytes of row that have not been read yet
	old, new []int32 // columns where the colour changes, in the previous row and in this one
}

var errFax = errors.New("a bad fax code")

func newFax(packed []byte, t *tiff) *fax {
	return &fax{
		in:   faxBits{data: packed, reversed: t.reversed},
		kind: t.compression, plane: t.twoDimensions,
		width: t.block.X, tables: faxTablesOnce(), row: make([]byte, (t.block.X+7)/8),
	}
}

func (f *fax) Read(p []byte) (int, error) {
	if len(f.left) == 0 {
		if err := f.next(); err != nil {
			return 0, err
		}
		f.left = f.row
	}
	n := copy(p, f.left)
	f.left = f.left[n:]
	return n, nil
}

// next decodes a row.
func (f *fax) next() error {
	plane := f.kind == tiffGroup4
	switch f.kind {
	case tiffHuffman:
		f.in.at = (f.in.at + 7) &^ 7
	case tiffGroup3:
		if f.in.peek(11) == 0 { // an end of line comes before the row, perhaps with more zeros as padding
			for f.in.peek(1) == 0 {
				if f.in.at++; f.in.spent() {
					return io.ErrUnexpectedEOF
				}
			}
			f.in.at++
			if f.plane {
				plane = f.in.peek(1) == 0
				f.in.at++
			}
		}
	}
	f.old, f.new = f.new, f.old[:0]
	var err error
	if plane {
		err = f.twoDimensional()
	} else {
		err = f.oneDimensional()
	}
	if err == nil && f.in.spent() {
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return err
	}
	f.paint()
	return nil
}

// oneDimensional decodes a row of runs that are alternately white and black.
func (f *fax) oneDimensional() error {
	for column, black := 0, false; column < f.width; black = !black {
		run, err := f.run(black)
		if err != nil {
			return err
		}
		if column += run; column > f.width {
			return errFax
		}
		f.new = append(f.new, int32(column))
		if len(f.new) > 2*f.width+2 {
			return errFax
		}
	}
	return nil
}

// twoDimensional decodes a row relative to the changes in the previous row.
func (f *fax) twoDimensional() error {
	column, black := -1, false
	for i := 0; column < f.width; {
		// b1 is the first change in the previous row to the right of column at which the row
		// changes to the other colour. b2 is the change after b1.
		for i > 0 && f.change(i-1) > column {
			i--
		}
		for f.change(i) <= column && f.change(i) < f.width || i%2 == 1 != black {
			i++
		}
		b1, b2 := f.change(i), f.change(i+1)
		mode, err := f.tables.modes.next(&f.in)
		switch {
		case err != nil:
			return err
		case mode == faxExtension:
			return unsupported("uncompressed parts of fax compression")
		case mode == faxPass:
			column = b2
			continue
		case mode == faxHorizontal:
			column = max(column, 0)
			for _, colour := range []bool{black, !black} {
				run, err := f.run(colour)
				if err != nil {
					return err
				}
				column += run
				f.new = append(f.new, int32(column))
			}
		default: // vertical
			if b1+mode < max(column, 0) {
				return errFax
			}
			column, black = b1+mode, !black
			f.new = append(f.new, int32(column))
		}
		if column > f.width || len(f.new) > 2*f.width+2 {
			return errFax
		}
	}
	return nil
}

// change returns the column of change i in the previous row. After the last change it returns the
// end of the row.
func (f *fax) change(i int) int {
	if i < len(f.old) {
		return int(f.old[i])
	}
	return f.width
}

// run reads the length of a run. The length consists of any number of makeup codes and a
// terminating code.
func (f *fax) run(black bool) (length int, err error) {
	table := f.tables.white
	if black {
		table = f.tables.black
	}
	for {
		part, err := table.next(&f.in)
		if err != nil {
			return 0, err
		}
		length += part
		if part < 64 {
			return length, nil
		}
		if length > f.width {
			return 0, errFax
		}
	}
}

// paint fills the row according to its changes.
func (f *fax) paint() {
	clear(f.row)
	for i := 0; i < len(f.new); i += 2 {
		end := f.width
		if i+1 < len(f.new) {
			end = int(f.new[i+1])
		}
		for x := int(f.new[i]); x < end; {
			if x%8 == 0 && end-x >= 8 {
				f.row[x/8] = 0xff
				x += 8
				continue
			}
			f.row[x/8] |= 0x80 >> (x % 8)
			x++
		}
	}
}

// faxBits reads bits. It returns zeros after the end.
type faxBits struct {
	data     []byte
	reversed bool // the lowest bit of a byte is the first
	at       int  // bits read so far
}

// spent reports whether more bits have been read than data has.
func (b *faxBits) spent() bool { return b.at > 8*len(b.data) }

// peek returns the next count bits, at most 13.
func (b *faxBits) peek(count int) int {
	value := 0
	for i := range 3 {
		value <<= 8
		if at := b.at/8 + i; at < len(b.data) {
			octet := b.data[at]
			if b.reversed {
				octet = bits.Reverse8(octet)
			}
			value |= int(octet)
		}
	}
	return value >> (24 - b.at%8 - count) & (1<<count - 1)
}

// Modes of a two-dimensional row that are not a distance from b1.
const (
	faxPass = iota + 100
	faxHorizontal
	faxExtension
)

// faxCodes maps each value of faxLongest bits to the code at the start of these bits: its meaning
// and its length.
type faxCodes [1 << faxLongest]struct{ value, bits int16 }

const faxLongest = 13

func (c *faxCodes) next(in *faxBits) (int, error) {
	code := c[in.peek(faxLongest)]
	if code.bits == 0 {
		if in.at+faxLongest > 8*len(in.data) {
			return 0, io.ErrUnexpectedEOF
		}
		return 0, errFax
	}
	in.at += int(code.bits)
	return int(code.value), nil
}

type faxTables struct{ white, black, modes *faxCodes }

var faxTablesOnce = sync.OnceValue(func() *faxTables {
	white, black := map[string]int{}, map[string]int{}
	add := func(codes map[string]int, list string, first, step int) {
		for i, code := range strings.Fields(list) {
			codes[code] = first + i*step
		}
	}
	add(white, faxWhite, 0, 1)
	add(white, faxWhiteMakeup, 64, 64)
	add(white, faxMakeup, 1792, 64)
	add(black, faxBlack, 0, 1)
	add(black, faxBlackMakeup, 64, 64)
	add(black, faxMakeup, 1792, 64)
	modes := map[string]int{
		"0001": faxPass, "001": faxHorizontal, "0000001": faxExtension, "1": 0,
		"011": 1, "000011": 2, "0000011": 3, "010": -1, "000010": -2, "0000010": -3,
	}
	return &faxTables{newFaxCodes(white), newFaxCodes(black), newFaxCodes(modes)}
})

func newFaxCodes(codes map[string]int) *faxCodes {
	table := &faxCodes{}
	for code, value := range codes {
		first := 0
		for _, bit := range code {
			first = first<<1 | int(bit-'0')
		}
		free := faxLongest - len(code)
		for i := range 1 << free {
			entry := &table[first<<free|i]
			entry.value, entry.bits = int16(value), int16(len(code))
		}
	}
	return table
}

// The codes of T.4, tables 2 and 3: runs of 0 to 63 pixels, then runs of 64, 128, ... pixels.
const (
	faxWhite = `00110101 000111 0111 1000 1011 1100 1110 1111 10011 10100 00111 01000 001000 000011 110100
		110101
		101010 101011 0100111 0001100 0001000 0010111 0000011 0000100 0101000 0101011 0010011 0100100 0011000
		00000010 00000011 00011010
		00011011 00010010 00010011 00010100 00010101 00010110 00010111 00101000 00101001 00101010 00101011
		00101100 00101101 00000100 00000101 00001010
		00001011 01010010 01010011 01010100 01010101 00100100 00100101 01011000 01011001 01011010 01011011
		01001010 01001011 00110010 00110011 00110100`
	faxWhiteMakeup = `11011 10010 010111 0110111 00110110 00110111 01100100 01100101 01101000 01100111 011001100
		011001101 011010010 011010011
		011010100 011010101 011010110 011010111 011011000 011011001 011011010 011011011 010011000 010011001
		010011010 011000 010011011`
	faxBlack = `0000110111 010 11 10 011 0011 0010 00011 000101 000100 0000100 0000101 0000111 00000100 00000111
		000011000
		0000010111 0000011000 0000001000 00001100111 00001101000 00001101100 00000110111 00000101000 00000010111
		00000011000
		000011001010 000011001011 000011001100 000011001101 000001101000 000001101001 000001101010 000001101011
		000011010010 000011010011
		000011010100 000011010101 000011010110 000011010111 000001101100 000001101101 000011011010 000011011011
		000001010100 000001010101
		000001010110 000001010111 000001100100 000001100101 000001010010 000001010011 000000100100 000000110111
		000000111000 000000100111
		000000101000 000001011000 000001011001 000000101011 000000101100 000001011010 000001100110 000001100111`
	faxBlackMakeup = `0000001111 000011001000 000011001001 000001011011 000000110011 000000110100 000000110101
		0000001101100 0000001101101
		0000001001010 0000001001011 0000001001100 0000001001101 0000001110010 0000001110011 0000001110100
		0000001110101 0000001110110
		0000001110111 0000001010010 0000001010011 0000001010100 0000001010101 0000001011010 0000001011011
		0000001100100 0000001100101`
	faxMakeup = `00000001000 00000001100 00000001101 000000010010 000000010011 000000010100 000000010101
		000000010110 000000010111
		000000011100 000000011101 000000011110 000000011111`
)
