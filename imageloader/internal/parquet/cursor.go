package parquet

import (
	"errors"
	"fmt"
	"io"
	"math"
	"math/bits"
	"strconv"
)

// span is the position of a value in a page.
type span struct {
	dict     bool // the value is in the dictionary page, not in the data page
	at, size int
}

// content holds the values of a page.
type content struct {
	page int64 // offset of the page in the file if its values must be decompressed, or 0
	base int64 // offset of the first byte of body in the file, if page is 0
	body body
}

// cursor reads the values of a column chunk, in order.
type cursor struct {
	leaf   *leaf
	pages  *pages
	images bool // the values are images, not labels or names
	// maxValues is the maximum number of values of a page.
	maxValues int64

	left     int32 // number of levels of the page that have not been read
	rep, def hybrid
	data     content
	room     []byte // memory for data

	dictionary

	nextSpan func() (span, error)
	nextText func() (string, error)
}

// dictionary is the dictionary of a column chunk: the positions of images, or texts.
type dictionary struct {
	dict      content
	dictSpans []span
	dictTexts []string
}

// The number of bytes to read for the header of a page. Pages of labels are small, so that one read
// nearly always gets a whole page.
const (
	aheadOfImages = 4 << 10
	aheadOfLabels = 64 << 10
	// maxTextBytes is the maximum size of a page of labels or names.
	maxTextBytes = 256 << 20
)

// newCursor returns a cursor for a chunk of a row group. The row group has rows rows.
func newCursor(file io.ReaderAt, l *leaf, c *chunk, rows int64, images bool) (*cursor, error) {
	switch {
	case c.elsewhere:
		return nil, errors.New("its values are in another file")
	case c.encrypted:
		return nil, errEncrypted
	case c.physical != l.physical:
		return nil, errSchema
	}
	if err := checkCodec(c.codec); err != nil {
		return nil, err
	}
	ahead := aheadOfLabels
	if images {
		ahead = aheadOfImages
	}
	if l.maxRep > 0 {
		rows *= maxLabels
	}
	return &cursor{leaf: l, pages: newPages(file, c, ahead), images: images, maxValues: rows}, nil
}

var errFewValues = fmt.Errorf("it has fewer values than the row group has rows: %w", io.ErrUnexpectedEOF)

// level returns the repetition and definition levels of the next value. If the definition level is
// below the column's maximum, there is no value.
func (c *cursor) level() (rep, def int32, err error) {
	for c.left == 0 {
		err := c.page()
		if err == io.EOF {
			return 0, 0, errFewValues
		}
		if err != nil {
			return 0, 0, err
		}
	}
	c.left--
	r, err := c.rep.next()
	if err != nil {
		return 0, 0, err
	}
	d, err := c.def.next()
	if err != nil {
		return 0, 0, err
	}
	if r > uint32(c.leaf.maxRep) || d > uint32(c.leaf.maxDef) {
		return 0, 0, errValues
	}
	return int32(r), int32(d), nil
}

// page reads the header of the next page and prepares to read its values.
func (c *cursor) page() error {
	h, at, err := c.pages.next()
	if err != nil {
		return err
	}
	if !c.images && h.size > maxTextBytes {
		return fmt.Errorf("its page has %d bytes, over the limit of %d for labels and names", h.size, maxTextBytes)
	}
	if int64(h.values) > c.maxValues {
		return errValues
	}
	switch h.kind {
	case pageIndex:
		return nil
	case pageDict:
		return c.readDict(&h, at)
	case pageData, pageDataV2:
		return c.startPage(&h, at)
	}
	return fmt.Errorf("its page at byte %d is of the unknown kind %d", at, h.kind)
}

// open returns the values of a page. If whole is set, it reads all bytes. Otherwise images of an
// uncompressed page stay in the file.
func (c *cursor) open(h *pageHeader, at int64, room []byte, whole bool) (content, error) {
	levels := int64(0)
	if h.kind == pageDataV2 {
		levels = int64(h.levelBytes[0]) + int64(h.levelBytes[1])
	}
	stored := h.stored(c.pages.chunk)
	v := content{page: at - int64(h.length)}
	if stored {
		v.page, v.base = 0, at+levels
	}
	if stored && c.images && !whole {
		if levels > int64(h.packed) || h.size != h.packed {
			return v, errPageSize
		}
		v.body = body{pages: c.pages, base: v.base, size: int(int64(h.packed) - levels)}
		return v, nil
	}
	data, err := h.content(c.pages, at, room)
	if data == nil {
		data = []byte{}
	}
	v.body = body{data: data}
	return v, err
}

// readDict reads a dictionary page.
func (c *cursor) readDict(h *pageHeader, at int64) (err error) {
	if h.encoding != encodingPlain && h.encoding != encodingPlainDict {
		return errEncoding(h.encoding)
	}
	if c.dict, err = c.open(h, at, nil, false); err != nil {
		return err
	}
	if int64(h.values) > int64(c.dict.body.len()) { // a value has at least one byte; only a bool has less, and has no dictionary
		return errValues
	}
	if c.images {
		next := plainSpans(&c.dict.body, 0)
		c.dictSpans = c.dictSpans[:0]
		for range h.values {
			s, err := next()
			if err != nil {
				return err
			}
			s.dict = true
			c.dictSpans = append(c.dictSpans, s)
		}
		return nil
	}
	next, err := c.plainTexts(&c.dict.body, 0)
	if err != nil {
		return err
	}
	c.dictTexts = c.dictTexts[:0]
	for range h.values {
		text, err := next()
		if err != nil {
			return err
		}
		c.dictTexts = append(c.dictTexts, text)
	}
	return nil
}

// startPage prepares to read a data page.
func (c *cursor) startPage(h *pageHeader, at int64) (err error) {
	if c.data, err = c.open(h, at, c.room, h.encoding == encodingDeltaLength || h.encoding == encodingDeltaBytes); err != nil {
		return err
	}
	b := &c.data.body
	if b.data != nil && cap(b.data) > cap(c.room) {
		c.room = b.data
	}
	start, err := c.startLevels(h, at)
	if err != nil {
		return err
	}
	c.left = h.values
	return c.startValues(h.encoding, start)
}

// startLevels prepares to read the levels of a page. It returns the position of the values in the
// page's content.
func (c *cursor) startLevels(h *pageHeader, at int64) (start int, err error) {
	b := &c.data.body
	widths := [2]uint{uint(bits.Len32(uint32(c.leaf.maxDef))), uint(bits.Len32(uint32(c.leaf.maxRep)))}
	c.rep, c.def = hybrid{width: widths[1]}, hybrid{width: widths[0]}
	if h.kind == pageDataV2 {
		rep, def := int(h.levelBytes[1]), int(h.levelBytes[0])
		if int64(rep)+int64(def) > int64(h.packed) {
			return 0, errPageSize
		}
		levels, err := c.pages.read(at, rep+def)
		if err != nil {
			return 0, err
		}
		c.rep.data, c.def.data = levels[:rep:rep], levels[rep:]
		if c.rep.width == 0 {
			c.rep.data = nil
		}
		if c.def.width == 0 {
			c.def.data = nil
		}
		return 0, nil
	}
	for i, to := range []*hybrid{&c.rep, &c.def} {
		if to.width == 0 {
			continue
		}
		if h.levels[1-i] != encodingRLE {
			return 0, errEncoding(h.levels[1-i])
		}
		n, err := b.uint32(start)
		if err != nil {
			return 0, err
		}
		levels, err := b.bytes(start+4, n)
		if err != nil {
			return 0, err
		}
		to.data = levels
		start += 4 + n
	}
	return start, nil
}

// startValues prepares to read the values of a page. start is their position in the page's content.
func (c *cursor) startValues(encoding int32, start int) (err error) {
	b := &c.data.body
	if encoding == encodingDict || encoding == encodingPlainDict {
		return c.startIndexes(start)
	}
	if !c.images {
		c.nextText, err = c.texts(encoding, start)
		return err
	}
	switch encoding {
	case encodingPlain:
		c.nextSpan = plainSpans(b, start)
	case encodingDeltaLength:
		c.nextSpan, err = c.deltaSpans(b, start)
	default:
		return errEncoding(encoding)
	}
	return err
}

// startIndexes prepares to read a page that has an index into the dictionary for each value.
func (c *cursor) startIndexes(start int) error {
	b := &c.data.body
	if start == b.len() { // a page without values
		c.nextSpan = func() (span, error) { return span{}, errValues }
		c.nextText = func() (string, error) { return "", errValues }
		return nil
	}
	data, err := b.bytes(start, b.len()-start)
	if err != nil {
		return err
	}
	h := hybrid{width: uint(data[0]), data: data[1:]}
	if h.width > 32 {
		return errValues
	}
	c.nextSpan = func() (span, error) {
		i, err := h.next()
		if err != nil || uint64(i) >= uint64(len(c.dictSpans)) {
			return span{}, errValues
		}
		return c.dictSpans[i], nil
	}
	c.nextText = func() (string, error) {
		i, err := h.next()
		if err != nil || uint64(i) >= uint64(len(c.dictTexts)) {
			return "", errValues
		}
		return c.dictTexts[i], nil
	}
	return nil
}

// plainSpans returns the positions of byte arrays in the encoding PLAIN. The size of each array
// precedes its bytes.
func plainSpans(b *body, at int) func() (span, error) {
	return func() (span, error) {
		n, err := b.uint32(at)
		if err != nil {
			return span{}, err
		}
		s := span{at: at + 4, size: n}
		if n > b.len()-s.at {
			return span{}, errValues
		}
		at = s.at + n
		return s, nil
	}
}

// deltaSpans returns the positions of byte arrays in the encoding DELTA_LENGTH_BYTE_ARRAY. The
// sizes of all arrays precede the bytes of all arrays.
func (c *cursor) deltaSpans(b *body, start int) (func() (span, error), error) {
	data, err := b.bytes(start, b.len()-start)
	if err != nil {
		return nil, err
	}
	sizes, err := newDelta(data, c.left)
	if err != nil {
		return nil, err
	}
	ahead := *sizes
	at, err := ahead.end()
	if err != nil {
		return nil, err
	}
	at += start
	return func() (span, error) {
		n, err := sizes.next()
		if err != nil || n < 0 || n > int64(b.len()-at) {
			return span{}, errValues
		}
		s := span{at: at, size: int(n)}
		at += int(n)
		return s, nil
	}, nil
}

// texts returns the values of a page as texts.
func (c *cursor) texts(encoding int32, start int) (func() (string, error), error) {
	b := &c.data.body
	switch physical := c.leaf.physical; {
	case encoding == encodingPlain:
		return c.plainTexts(b, start)
	case encoding == encodingDeltaLength && physical == typeByteArray:
		next, err := c.deltaSpans(b, start)
		return spanTexts(b, next), err
	case encoding == encodingDeltaBytes && physical == typeByteArray:
		return c.deltaTexts(b, start)
	case encoding == encodingDelta && (physical == typeInt32 || physical == typeInt64):
		data, err := b.bytes(start, b.len()-start)
		if err != nil {
			return nil, err
		}
		d, err := newDelta(data, c.left)
		return func() (string, error) {
			v, err := d.next()
			if physical == typeInt32 {
				v = int64(int32(v))
			}
			return strconv.FormatInt(v, 10), err
		}, err
	case encoding == encodingRLE && physical == typeBoolean:
		n, err := b.uint32(start)
		if err != nil {
			return nil, err
		}
		data, err := b.bytes(start+4, n)
		h := hybrid{width: 1, data: data}
		return func() (string, error) {
			v, err := h.next()
			return strconv.Itoa(int(v)), err
		}, err
	}
	return nil, errEncoding(encoding)
}

// plainTexts returns values in the encoding PLAIN as texts.
func (c *cursor) plainTexts(b *body, at int) (func() (string, error), error) {
	size := map[int32]int{typeInt32: 4, typeInt64: 8, typeFloat: 4, typeDouble: 8}[c.leaf.physical]
	switch c.leaf.physical {
	case typeByteArray:
		return spanTexts(b, plainSpans(b, at)), nil
	case typeBoolean:
		bit := uint64(at) * 8
		return func() (string, error) {
			if bit/8 >= uint64(b.len()) {
				return "", errValues
			}
			v := bitsAt(b.data, bit, 1)
			bit++
			return strconv.Itoa(int(v)), nil
		}, nil
	case typeInt32, typeInt64, typeFloat, typeDouble:
		return func() (string, error) {
			p, err := b.bytes(at, size)
			if err != nil {
				return "", err
			}
			at += size
			return numberText(c.leaf.physical, bitsAt(p, 0, uint(8*size))), nil
		}, nil
	}
	return nil, errValues
}

// numberText returns a number as text.
func numberText(physical int32, v uint64) string {
	switch physical {
	case typeFloat:
		return strconv.FormatFloat(float64(math.Float32frombits(uint32(v))), 'g', -1, 64)
	case typeDouble:
		return strconv.FormatFloat(math.Float64frombits(v), 'g', -1, 64)
	case typeInt32:
		return strconv.FormatInt(int64(int32(v)), 10)
	}
	return strconv.FormatInt(int64(v), 10)
}

// spanTexts returns the byte arrays at the positions that next returns, as texts.
func spanTexts(b *body, next func() (span, error)) func() (string, error) {
	return func() (string, error) {
		s, err := next()
		if err != nil {
			return "", err
		}
		p, err := b.bytes(s.at, s.size)
		return string(p), err
	}
}

// deltaTexts returns byte arrays in the encoding DELTA_BYTE_ARRAY. Each value starts with a prefix
// of the value before it. The lengths of all prefixes come first. The remaining bytes of the values
// follow, in DELTA_LENGTH_BYTE_ARRAY.
func (c *cursor) deltaTexts(b *body, start int) (func() (string, error), error) {
	data, err := b.bytes(start, b.len()-start)
	if err != nil {
		return nil, err
	}
	shared, err := newDelta(data, c.left)
	if err != nil {
		return nil, err
	}
	ahead := *shared
	end, err := ahead.end()
	if err != nil {
		return nil, err
	}
	rests, err := c.deltaSpans(b, start+end)
	if err != nil {
		return nil, err
	}
	last, rest := "", spanTexts(b, rests)
	return func() (string, error) {
		n, err := shared.next()
		if err != nil || n < 0 || n > int64(len(last)) {
			return "", errValues
		}
		text, err := rest()
		if len(text)+int(n) > maxTextBytes {
			return "", errValues
		}
		last = last[:n] + text
		return last, err
	}, nil
}
