package parquet

import (
	"encoding/binary"
	"errors"
	"math"
)

// The types of Thrift's compact protocol.
const (
	thriftTrue   = 1
	thriftFalse  = 2
	thriftByte   = 3
	thriftI16    = 4
	thriftI32    = 5
	thriftI64    = 6
	thriftDouble = 7
	thriftBinary = 8
	thriftList   = 9
	thriftSet    = 10
	thriftMap    = 11
	thriftStruct = 12
)

// maxThriftDepth is the maximum depth of nested structs and lists. Parquet's metadata needs at most
// 8.
const maxThriftDepth = 24

var (
	errThrift = errors.New("damaged metadata")
	errShort  = errors.New("the metadata ends too early")
)

// thrift reads values in Thrift's compact protocol. It allocates nothing in proportion to a size
// that the data declares. After the first error it returns zero values.
type thrift struct {
	data  []byte
	at    int
	depth int
	err   error
}

// fail records the first error.
func (t *thrift) fail(err error) {
	if t.err == nil {
		t.err = err
	}
}

func (t *thrift) byte() byte {
	if t.err != nil || t.at >= len(t.data) {
		t.fail(errShort)
		return 0
	}
	t.at++
	return t.data[t.at-1]
}

func (t *thrift) uvarint() uint64 {
	if t.err != nil {
		return 0
	}
	v, n := binary.Uvarint(t.data[t.at:])
	switch {
	case n == 0:
		t.fail(errShort)
		return 0
	case n < 0:
		t.fail(errThrift)
		return 0
	}
	t.at += n
	return v
}

func (t *thrift) varint() int64 {
	v := t.uvarint()
	return int64(v>>1) ^ -int64(v&1)
}

// binary returns a string or bytes. The result aliases the data.
func (t *thrift) binary(kind byte) []byte {
	if kind != thriftBinary {
		t.fail(errThrift)
		return nil
	}
	n := t.uvarint()
	if t.err == nil && n > uint64(len(t.data)-t.at) {
		t.fail(errShort)
	}
	if t.err != nil {
		return nil
	}
	t.at += int(n)
	return t.data[t.at-int(n) : t.at]
}

func (t *thrift) text(kind byte) string { return string(t.binary(kind)) }

// integer returns an integer of any size.
func (t *thrift) integer(kind byte) int64 {
	if kind != thriftI16 && kind != thriftI32 && kind != thriftI64 {
		t.fail(errThrift)
		return 0
	}
	return t.varint()
}

// int32 returns an integer of 32 bits.
func (t *thrift) int32(kind byte) int32 {
	v := t.integer(kind)
	if v < math.MinInt32 || v > math.MaxInt32 {
		t.fail(errThrift)
		return 0
	}
	return int32(v)
}

// enter increments the depth at the start of a struct or a list. It returns false if the depth is
// over the limit.
func (t *thrift) enter() bool {
	if t.depth++; t.depth > maxThriftDepth {
		t.fail(errThrift)
	}
	return t.err == nil
}

// fields reads a struct, and calls field for each field. field must read the value, or return false
// to skip it.
func (t *thrift) fields(field func(id int16, kind byte) bool) {
	if !t.enter() {
		return
	}
	defer func() { t.depth-- }()
	id := int16(0)
	for t.err == nil {
		head := t.byte()
		kind := head & 15
		if kind == 0 {
			return
		}
		if delta := head >> 4; delta != 0 {
			id += int16(delta)
		} else {
			id = int16(t.varint())
		}
		if !field(id, kind) {
			t.skip(kind, false)
		}
	}
}

// list reads a list or a set, and calls item for each item. item must read it.
func (t *thrift) list(kind byte, item func(kind byte)) {
	if kind != thriftList && kind != thriftSet {
		t.fail(errThrift)
	}
	if !t.enter() {
		return
	}
	defer func() { t.depth-- }()
	head := t.byte()
	n := uint64(head >> 4)
	if n == 15 {
		n = t.uvarint()
	}
	if n > uint64(len(t.data)-t.at) { // every item has at least one byte
		t.fail(errShort)
	}
	for ; n > 0 && t.err == nil; n-- {
		item(head & 15)
	}
}

// structs reads a list of structs, and calls item for each struct. item must read its fields.
func (t *thrift) structs(kind byte, item func()) {
	t.list(kind, func(kind byte) {
		if kind != thriftStruct {
			t.fail(errThrift)
			return
		}
		item()
	})
}

// skip skips a value. A bool in a list has one byte. A bool that is a field has none, because its
// type is its value.
func (t *thrift) skip(kind byte, listed bool) {
	switch kind {
	case thriftTrue, thriftFalse:
		if listed {
			t.byte()
		}
	case thriftByte:
		t.byte()
	case thriftI16, thriftI32, thriftI64:
		t.uvarint()
	case thriftDouble:
		for range 8 {
			t.byte()
		}
	case thriftBinary:
		t.binary(kind)
	case thriftList, thriftSet:
		t.list(kind, func(kind byte) { t.skip(kind, true) })
	case thriftStruct:
		t.fields(func(int16, byte) bool { return false })
	case thriftMap:
		t.skipMap()
	default:
		t.fail(errThrift)
	}
}

func (t *thrift) skipMap() {
	n := t.uvarint()
	if n == 0 {
		return
	}
	kinds := t.byte()
	if n > uint64(len(t.data)-t.at) {
		t.fail(errShort)
	}
	if !t.enter() {
		return
	}
	defer func() { t.depth-- }()
	for ; n > 0 && t.err == nil; n-- {
		t.skip(kinds>>4, true)
		t.skip(kinds&15, true)
	}
}
