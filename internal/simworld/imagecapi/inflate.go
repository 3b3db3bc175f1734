package imagecapi

import (
	"errors"
	"math/bits"
	"slices"
)

// Inflater inflates a deflate stream (RFC 1951). Between two runs it keeps the tables of the open
// block and the bit at which the next symbol starts in the input that it did not consume.
type Inflater struct {
	spacing int
	from    bitReader
	block
	ended bool

	consumed, produced int // since reset
	history            int
	marks              []mark
	lastMark           int
}

// block is the open block.
type block struct {
	kind   int // noBlock: a block header follows
	final  bool
	stored int // bytes left of a stored block
	left   int // bytes left of a copy
	back   int // distance of the copy
	codes  [2]code
}

// The kinds of blocks. The numbers are deflate's.
const (
	noBlock     = -1
	storedBlock = 0
	fixedBlock  = 1
)

// mark is a checkpoint that is recorded.
type mark struct {
	c     InflateCheckpoint
	ready bool
}

var (
	errShort   = errors.New("more input is needed")
	errDamaged = errors.New("damaged")
)

// NewInflater returns an inflater that records checkpoints at this spacing, or none at 0.
func NewInflater(spacing uint64) (*Inflater, error) {
	return &Inflater{spacing: int(spacing), block: block{kind: noBlock}}, nil
}

// FreeInflater does nothing.
func FreeInflater(*Inflater) {}

// ResetInflater starts a stream, or enters one whose window precedes the output.
func ResetInflater(i *Inflater, skipBits, history int) error {
	*i = Inflater{spacing: i.spacing, block: block{kind: noBlock}, from: bitReader{bit: skipBits}, history: history}
	return nil
}

// Inflate inflates input into buffer from at on.
func Inflate(i *Inflater, input []byte, last bool, buffer []byte, at int) (consumed, produced int, done bool, err error) {
	i.from.data = input
	out := at
	for out < len(buffer) && !i.ended {
		before := i.from.bit
		n, e := i.step(buffer, out)
		if e == errShort {
			i.from.bit = before
			if last {
				err = damaged("the stream is cut off")
			}
			break
		}
		if e != nil {
			return 0, 0, false, damaged("the stream is damaged")
		}
		out += n
	}
	if i.ended {
		i.from.bit = (i.from.bit + 7) &^ 7
		for k := range i.marks {
			i.marks[k].ready = true
		}
	}
	consumed, produced = i.from.bit>>3, out-at
	i.from.bit &= 7
	i.consumed += consumed
	return consumed, produced, i.ended, err
}

// step inflates a symbol, or reads a block header. It changes nothing but the bit if the input is
// too short.
func (i *Inflater) step(buffer []byte, out int) (n int, err error) {
	switch i.kind {
	case noBlock:
		return 0, i.header(buffer, out)
	case storedBlock:
		n = min(i.stored, len(buffer)-out, len(i.from.data)-i.from.bit>>3)
		if n <= 0 && i.stored > 0 {
			return 0, errShort
		}
		copy(buffer[out:], i.from.data[i.from.bit>>3:][:n])
		i.from.bit += 8 * n
		if i.stored -= n; i.stored == 0 {
			i.endBlock()
		}
	default:
		if i.left == 0 {
			if n, err = i.symbol(buffer, out); err != nil {
				return 0, err
			}
		}
		n += i.copy(buffer, out)
	}
	i.produced += n
	for k := range i.marks {
		m := &i.marks[k]
		m.ready = m.ready || i.produced-int(m.c.Output) >= InflateWindow
	}
	return n, nil
}

func (i *Inflater) endBlock() {
	i.kind = noBlock
	i.ended = i.final
}

// header reads the header of a block.
func (i *Inflater) header(buffer []byte, out int) error {
	start := i.from.bit
	head, err := i.from.take(3)
	if err != nil {
		return err
	}
	var codes [2]code
	stored := 0
	switch kind := head >> 1; kind {
	case storedBlock:
		i.from.bit = (i.from.bit + 7) &^ 7
		n, err := i.from.take(16)
		if err != nil {
			return err
		}
		if check, err := i.from.take(16); err != nil {
			return err
		} else if n^check != 0xffff {
			return errDamaged
		}
		stored = n
	case fixedBlock:
		codes = fixedCodes()
	case 2:
		if codes, err = i.from.codes(); err != nil {
			return err
		}
	default:
		return errDamaged
	}
	i.record(start, buffer, out)
	i.kind, i.final, i.stored, i.codes = head>>1, head&1 == 1, stored, codes
	if i.kind == storedBlock && stored == 0 {
		i.endBlock()
	}
	return nil
}

// record makes a checkpoint at the start of a block.
func (i *Inflater) record(start int, buffer []byte, out int) {
	if i.spacing == 0 || i.produced == 0 || i.produced-i.lastMark < i.spacing || len(i.marks) == 64 {
		return
	}
	i.lastMark = i.produced
	window := make([]byte, InflateWindow)
	have := buffer[max(0, out-InflateWindow):out]
	copy(window[InflateWindow-len(have):], have)
	i.marks = append(i.marks, mark{c: InflateCheckpoint{Bit: uint64(8*i.consumed + start), Output: uint64(i.produced),
		Window: window, Used: make([]uint64, InflateWindow/64)}})
}

// NextInflateCheckpoint returns the next complete checkpoint.
func NextInflateCheckpoint(i *Inflater) (c InflateCheckpoint, found bool, err error) {
	if len(i.marks) == 0 || !i.marks[0].ready {
		return c, false, nil
	}
	c = i.marks[0].c
	i.marks = i.marks[1:]
	return c, true, nil
}

// Bases and extra bits of lengths from symbol 257 on, and of distances.
var (
	lengthBase  = []int{3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 15, 17, 19, 23, 27, 31, 35, 43, 51, 59, 67, 83, 99, 115, 131, 163, 195, 227, 258}
	lengthExtra = []int{0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 0}
)

// symbol inflates a literal, or reads a copy.
func (i *Inflater) symbol(buffer []byte, out int) (int, error) {
	s, err := i.from.symbol(&i.codes[0])
	if err != nil {
		return 0, err
	}
	if s < 256 {
		buffer[out] = byte(s)
		return 1, nil
	}
	if s == 256 {
		i.endBlock()
		return 0, nil
	}
	if s -= 257; s >= len(lengthBase) {
		return 0, errDamaged
	}
	extra, err := i.from.take(lengthExtra[s])
	if err != nil {
		return 0, err
	}
	length := lengthBase[s] + extra
	d, err := i.from.symbol(&i.codes[1])
	if err != nil {
		return 0, err
	}
	if d > 29 {
		return 0, errDamaged
	}
	distance := d + 1
	if d > 3 {
		more, err := i.from.take(d/2 - 1)
		if err != nil {
			return 0, err
		}
		distance = (2+d&1)<<(d/2-1) + more + 1
	}
	if distance > i.produced+i.history || distance > out {
		return 0, errDamaged
	}
	i.use(distance, length)
	i.left, i.back = length, distance
	return 0, nil
}

// copy makes as much of a copy as the buffer has room for.
func (i *Inflater) copy(buffer []byte, out int) int {
	n := min(i.left, len(buffer)-out)
	for k := range n {
		buffer[out+k] = buffer[out+k-i.back]
	}
	i.left -= n
	return n
}

// use marks the bytes of the windows to which a copy refers.
func (i *Inflater) use(distance, length int) {
	for k := range i.marks {
		c := &i.marks[k].c
		first := InflateWindow + i.produced - int(c.Output) - distance
		for at := max(first, 0); at < min(first+length, InflateWindow); at++ {
			c.Used[at/64] |= 1 << (at % 64)
		}
	}
}

// bitReader reads bits from the lowest of each byte.
type bitReader struct {
	data []byte
	bit  int
}

func (r *bitReader) take(n int) (v int, err error) {
	if r.bit+n > 8*len(r.data) {
		return 0, errShort
	}
	for k := range n {
		v |= int(r.data[r.bit>>3]>>(r.bit&7)&1) << k
		r.bit++
	}
	return v, nil
}

// code is a prefix code: the symbol of each 15 bits of input, and the length of its code.
type code struct {
	symbols []uint16 // nil: no code
	bits    []uint8
}

const maxCodeBits = 15

func newCode(lengths []int) code {
	var next, count [maxCodeBits + 2]int
	longest := 1
	for _, l := range lengths {
		if l > 0 {
			count[l]++
			longest = max(longest, l)
		}
	}
	for l := 1; l <= maxCodeBits; l++ {
		next[l+1] = (next[l] + count[l]) << 1
	}
	c := code{make([]uint16, 1<<longest), make([]uint8, 1<<longest)}
	for s, l := range lengths {
		if l == 0 {
			continue
		}
		first := int(bits.Reverse16(uint16(next[l])) >> (16 - l))
		next[l]++
		for at := first; at < len(c.bits); at += 1 << l {
			c.symbols[at], c.bits[at] = uint16(s), uint8(l)
		}
	}
	return c
}

// symbol reads a symbol.
func (r *bitReader) symbol(c *code) (int, error) {
	if len(c.bits) == 0 {
		return 0, errDamaged
	}
	index := 0
	for k := range bits.Len(uint(len(c.bits) - 1)) {
		if at := r.bit + k; at < 8*len(r.data) {
			index |= int(r.data[at>>3]>>(at&7)&1) << k
		}
	}
	n := int(c.bits[index])
	switch {
	case n == 0 && r.bit+maxCodeBits > 8*len(r.data):
		return 0, errShort
	case n == 0:
		return 0, errDamaged
	case r.bit+n > 8*len(r.data):
		return 0, errShort
	}
	r.bit += n
	return int(c.symbols[index]), nil
}

func fixedCodes() [2]code {
	lengths := slices.Concat(slices.Repeat([]int{8}, 144), slices.Repeat([]int{9}, 112),
		slices.Repeat([]int{7}, 24), slices.Repeat([]int{8}, 8))
	return [2]code{newCode(lengths), newCode(slices.Repeat([]int{5}, 30))}
}

// codes reads the codes of a block.
func (r *bitReader) codes() (codes [2]code, err error) {
	head, err := r.take(14)
	if err != nil {
		return codes, err
	}
	literals, distances, meta := head&31+257, head>>5&31+1, head>>10+4
	lengths := make([]int, 19)
	for _, at := range []int{16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15}[:meta] {
		if lengths[at], err = r.take(3); err != nil {
			return codes, err
		}
	}
	c := newCode(lengths)
	var all []int
	for len(all) < literals+distances {
		s, err := r.symbol(&c)
		if err != nil {
			return codes, err
		}
		if s < 16 {
			all = append(all, s)
			continue
		}
		extra, base, value := []int{2, 3, 7}[s-16], []int{3, 3, 11}[s-16], 0
		if s == 16 {
			if len(all) == 0 {
				return codes, errDamaged
			}
			value = all[len(all)-1]
		}
		n, err := r.take(extra)
		if err != nil {
			return codes, err
		}
		all = append(all, slices.Repeat([]int{value}, base+n)...)
	}
	if len(all) > literals+distances {
		return codes, errDamaged
	}
	return [2]code{newCode(all[:literals]), newCode(all[literals:])}, nil
}

// FollowInflater fails.
func FollowInflater(*Inflater, int, int) error { return unsupported() }

// SettleInflater fails.
func SettleInflater(*Inflater, []byte, int, int64) error { return unsupported() }

// FinishInflater fails.
func FinishInflater(*Inflater, []byte, []InflateCopy) error { return unsupported() }

// StopInflaterAt fails.
func StopInflaterAt(*Inflater, uint64) error { return unsupported() }

// GetInflateState fails.
func GetInflateState(*Inflater) (InflateState, error) { return InflateState{}, unsupported() }

// FindInflate finds nothing.
func FindInflate([]byte, uint64, uint64) (bit uint64, kind int, err error) {
	return 0, FoundNone, nil
}
