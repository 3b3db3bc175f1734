package parquet

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

const (
	// Magic is at the start and at the end of a file.
	Magic = "PAR1"

	encryptedMagic = "PARE"
	tailBytes      = 8 // the footer's size and the magic

	maxFooterBytes = 256 << 20
	maxRowGroups   = 1 << 20
	maxColumns     = 1 << 16
	maxSchemaDepth = 16
)

// The physical types.
const (
	typeBoolean   = 0
	typeInt32     = 1
	typeInt64     = 2
	typeFloat     = 4
	typeDouble    = 5
	typeByteArray = 6
)

var typeNames = []string{"BOOLEAN", "INT32", "INT64", "INT96", "FLOAT", "DOUBLE", "BYTE_ARRAY",
	"FIXED_LEN_BYTE_ARRAY"}

func typeName(physical int32) string {
	if physical < 0 || int(physical) >= len(typeNames) {
		return fmt.Sprintf("type %d", physical)
	}
	return typeNames[physical]
}

// footer is the metadata at the end of a file.
type footer struct {
	schema []element
	groups []rowGroup
	rows   int64
	keys   map[string]string
}

// element is a node of the schema. The schema is a tree in depth-first order.
type element struct {
	name       string
	physical   int32 // -1: the node is a group
	repetition int32 // 0 required, 1 optional, 2 repeated
	children   int32
	text       bool // the values are strings, not bytes
}

// rowGroup is a range of rows.
type rowGroup struct {
	rows   int64
	chunks []chunk
}

// chunk is a column chunk: the values of a column in one row group.
type chunk struct {
	codec      int32
	physical   int32
	values     int64
	start, end int64 // range of its pages in the file
	data, dict int64 // offset of its first data page, and of its dictionary page or 0
	packed     int64 // number of bytes in the file
	elsewhere  bool  // its pages are in another file
	encrypted  bool
}

// readFooter reads the metadata of a file of the given size.
func readFooter(r io.ReaderAt, size int64) (*footer, error) {
	if size < int64(len(Magic)+tailBytes) {
		return nil, fmt.Errorf("a Parquet file of %d bytes: %w", size, io.ErrUnexpectedEOF)
	}
	tail := make([]byte, tailBytes)
	if n, err := r.ReadAt(tail, size-tailBytes); n < len(tail) {
		return nil, err
	}
	switch string(tail[4:]) {
	case Magic:
	case encryptedMagic:
		return nil, errEncrypted
	default:
		return nil, fmt.Errorf("the Parquet file has no footer at its end: %w", io.ErrUnexpectedEOF)
	}
	n := int64(binary.LittleEndian.Uint32(tail))
	if n > size-int64(len(Magic)+tailBytes) || n > maxFooterBytes {
		return nil, fmt.Errorf("the footer of the Parquet file has %d bytes, and the file %d", n, size)
	}
	data := make([]byte, n)
	if got, err := r.ReadAt(data, size-tailBytes-n); got < len(data) {
		return nil, err
	}
	f := &footer{keys: map[string]string{}}
	t := &thrift{data: data}
	f.read(t)
	if t.err != nil {
		return nil, fmt.Errorf("the footer of the Parquet file: %w", t.err)
	}
	return f, f.check(size)
}

var errEncrypted = errors.New("the Parquet file is encrypted: write it again without encryption")

// read reads a FileMetaData.
func (f *footer) read(t *thrift) {
	t.fields(func(id int16, kind byte) bool {
		switch id {
		case 2:
			t.structs(kind, func() { f.schema = append(f.schema, readElement(t)) })
		case 3:
			f.rows = t.integer(kind)
		case 4:
			t.structs(kind, func() { f.groups = append(f.groups, readRowGroup(t)) })
		case 5:
			t.structs(kind, func() { f.readKey(t) })
		default:
			return false
		}
		return true
	})
}

func (f *footer) readKey(t *thrift) {
	key, value := "", ""
	t.fields(func(id int16, kind byte) bool {
		switch id {
		case 1:
			key = t.text(kind)
		case 2:
			value = t.text(kind)
		default:
			return false
		}
		return true
	})
	f.keys[key] = value
}

func readElement(t *thrift) element {
	e := element{physical: -1}
	t.fields(func(id int16, kind byte) bool {
		switch id {
		case 1:
			e.physical = t.int32(kind)
		case 3:
			e.repetition = t.int32(kind)
		case 4:
			e.name = t.text(kind)
		case 5:
			e.children = t.int32(kind)
		case 6:
			const utf8, enum = 0, 4 // of ConvertedType
			converted := t.int32(kind)
			e.text = e.text || converted == utf8 || converted == enum
		case 10:
			if kind != thriftStruct {
				return false
			}
			t.fields(func(id int16, _ byte) bool {
				const text, enum = 1, 4 // of LogicalType
				e.text = e.text || id == text || id == enum
				return false
			})
		default:
			return false
		}
		return true
	})
	return e
}

func readRowGroup(t *thrift) (g rowGroup) {
	t.fields(func(id int16, kind byte) bool {
		switch id {
		case 1:
			t.structs(kind, func() { g.chunks = append(g.chunks, readChunk(t)) })
		case 3:
			g.rows = t.integer(kind)
		default:
			return false
		}
		return true
	})
	return g
}

func readChunk(t *thrift) (c chunk) {
	t.fields(func(id int16, kind byte) bool {
		switch {
		case id == 1:
			c.elsewhere = len(t.binary(kind)) > 0
		case id == 3 && kind == thriftStruct:
			c.readMetadata(t)
		case id == 8 && kind == thriftStruct:
			c.encrypted = true
			return false
		default:
			return false
		}
		return true
	})
	return c
}

// readMetadata reads a ColumnMetaData.
func (c *chunk) readMetadata(t *thrift) {
	t.fields(func(id int16, kind byte) bool {
		switch id {
		case 1:
			c.physical = t.int32(kind)
		case 4:
			c.codec = t.int32(kind)
		case 5:
			c.values = t.integer(kind)
		case 7:
			c.packed = t.integer(kind)
		case 9:
			c.data = t.integer(kind)
		case 11:
			c.dict = t.integer(kind)
		default:
			return false
		}
		return true
	})
}

// check returns an error if the numbers of a footer are impossible in a file of this size.
func (f *footer) check(size int64) error {
	if len(f.groups) > maxRowGroups || len(f.schema) > maxColumns {
		return fmt.Errorf("the Parquet file has %d row groups and %d columns, over the limits of %d and %d",
			len(f.groups), len(f.schema), maxRowGroups, maxColumns)
	}
	if f.rows > size { // the image of a row has at least one byte
		return fmt.Errorf("the Parquet file has %d rows and %d bytes", f.rows, size)
	}
	rows := int64(0)
	for i := range f.groups {
		g := &f.groups[i]
		if g.rows < 0 || g.rows > f.rows-rows {
			return fmt.Errorf("row group %d of the Parquet file has %d rows, and the file %d", i, g.rows, f.rows)
		}
		rows += g.rows
		for k := range g.chunks {
			c := &g.chunks[k]
			c.start = c.data
			if c.dict > 0 && c.dict < c.data {
				c.start = c.dict
			}
			if c.start < int64(len(Magic)) || c.packed < 0 || c.start > size || c.packed > size-c.start {
				return fmt.Errorf("column %d of row group %d is at byte %d of the Parquet file, with %d bytes, and the file "+
					"has %d", k, i, c.start, c.packed, size)
			}
			c.end = c.start + c.packed
		}
	}
	if rows != f.rows {
		return fmt.Errorf("the Parquet file has %d rows, and its row groups %d", f.rows, rows)
	}
	return nil
}
