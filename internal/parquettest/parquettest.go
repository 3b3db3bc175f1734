// Package parquettest writes Parquet files for tests, in the form of Hugging Face's datasets. A
// file has a struct image with the fields bytes and path, an integer label, and the names of the
// classes.
package parquettest

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"testing"

	"github.com/klauspost/compress/snappy"
)

// Row is a row of a file.
type Row struct {
	Path  string
	Image string
	Label int
}

// Layout sets the form of a file. The zero value is one row group of one page, uncompressed.
type Layout struct {
	Classes []string // the names of labels; nil: the file has none
	Label   string   // name of the column of labels; "": label
	Group   int      // rows of a row group
	Page    int      // rows of a page
	Snappy  bool     // compresses all columns
}

// The types of Thrift's compact protocol that the metadata needs.
const (
	i32 = 5
	i64 = 6
	bin = 8
	lst = 9
	str = 12
)

// thrift writes structs in Thrift's compact protocol.
type thrift struct {
	bytes.Buffer
	last []int // the last field of each open struct
}

func (w *thrift) varint(v uint64)       { w.Write(binary.AppendUvarint(nil, v)) }
func (w *thrift) zigzag(v int)          { w.varint(uint64(v)<<1 ^ uint64(v>>63)) }
func (w *thrift) begin()                { w.last = append(w.last, 0) }
func (w *thrift) end()                  { w.last = w.last[:len(w.last)-1]; w.WriteByte(0) }
func (w *thrift) int(id, v int)         { w.field(id, i32); w.zigzag(v) }
func (w *thrift) long(id, v int)        { w.field(id, i64); w.zigzag(v) }
func (w *thrift) list(kind, n int)      { w.WriteByte(byte(15<<4 | kind)); w.varint(uint64(n)) }
func (w *thrift) text(s string)         { w.varint(uint64(len(s))); w.WriteString(s) }
func (w *thrift) name(id int, s string) { w.field(id, bin); w.text(s) }

// field writes the header of a field.
func (w *thrift) field(id, kind int) {
	k := len(w.last) - 1
	w.WriteByte(byte((id-w.last[k])<<4 | kind))
	w.last[k] = id
}

// column is a column chunk that was written.
type column struct {
	path                        []string
	physical                    int
	start, packed, size, values int
}

// file is a file that is being written.
type file struct {
	bytes.Buffer
	layout Layout
}

// File returns a file of the rows.
func File(t testing.TB, rows []Row, l Layout) []byte {
	t.Helper()
	if l.Group == 0 {
		l.Group = max(1, len(rows))
	}
	if l.Page == 0 {
		l.Page = l.Group
	}
	if l.Label == "" {
		l.Label = "label"
	}
	f := &file{layout: l}
	f.WriteString("PAR1")
	var groups [][]column
	for at := 0; at < len(rows); at += l.Group {
		group := rows[at:min(at+l.Group, len(rows))]
		groups = append(groups, []column{
			f.column([]string{"image", "bytes"}, 6, 2, group, func(r Row) []byte { return sized(r.Image) }),
			f.column([]string{"image", "path"}, 6, 2, group, func(r Row) []byte { return sized(r.Path) }),
			f.column([]string{l.Label}, 2, 1, group,
				func(r Row) []byte { return binary.LittleEndian.AppendUint64(nil, uint64(r.Label)) }),
		})
	}
	footer := f.footer(groups, len(rows))
	f.Write(footer)
	f.Write(binary.LittleEndian.AppendUint32(nil, uint32(len(footer))))
	f.WriteString("PAR1")
	return f.Bytes()
}

// sized returns s as a byte array, preceded by its length.
func sized(s string) []byte {
	return append(binary.LittleEndian.AppendUint32(nil, uint32(len(s))), s...)
}

// column writes a chunk.
func (f *file) column(path []string, physical, maxDef int, rows []Row, value func(Row) []byte) column {
	c := column{path: path, physical: physical, start: f.Len(), values: len(rows)}
	for at := 0; at < len(rows); at += f.layout.Page {
		page := rows[at:min(at+f.layout.Page, len(rows))]
		levels := append(binary.AppendUvarint(nil, uint64(len(page))<<1), byte(maxDef))
		data := append(binary.LittleEndian.AppendUint32(nil, uint32(len(levels))), levels...)
		for _, r := range page {
			data = append(data, value(r)...)
		}
		packed := data
		if f.layout.Snappy {
			packed = snappy.Encode(nil, data)
		}
		var h thrift
		h.begin()
		h.int(1, 0) // a data page
		h.int(2, len(data))
		h.int(3, len(packed))
		h.field(5, str)
		h.begin()
		h.int(1, len(page))
		h.int(2, 0) // PLAIN
		h.int(3, 3) // RLE
		h.int(4, 3)
		h.end()
		h.end()
		f.Write(h.Bytes())
		f.Write(packed)
		c.size += h.Len() + len(data)
	}
	c.packed = f.Len() - c.start
	return c
}

// footer returns the metadata.
func (f *file) footer(groups [][]column, rows int) []byte {
	var w thrift
	w.begin()
	w.int(1, 2)
	w.field(2, lst)
	w.schema(f.layout.Label)
	w.long(3, rows)
	w.field(4, lst)
	w.list(str, len(groups))
	for _, g := range groups {
		w.begin()
		w.field(1, lst)
		w.list(str, len(g))
		for _, c := range g {
			w.chunk(c, f.layout.Snappy)
		}
		w.long(2, 0)
		w.long(3, g[0].values)
		w.end()
	}
	if f.layout.Classes != nil {
		names, _ := json.Marshal(f.layout.Classes) // strings have no error
		w.field(5, lst)
		w.list(str, 1)
		w.begin()
		w.name(1, "huggingface")
		w.name(2, `{"info": {"features": {"image": {"_type": "Image"}, "`+f.layout.Label+`": {"names": `+
			string(names)+`, "_type": "ClassLabel"}}}}`)
		w.end()
	}
	w.end()
	return w.Bytes()
}

// schema writes the schema of the three columns.
func (w *thrift) schema(label string) {
	w.list(str, 5)
	node := func(name string, physical, children int) {
		w.begin()
		if physical >= 0 {
			w.int(1, physical)
		}
		if name != "schema" {
			w.int(3, 1) // optional
		}
		w.name(4, name)
		if children > 0 {
			w.int(5, children)
		}
		w.end()
	}
	node("schema", -1, 2)
	node("image", -1, 2)
	node("bytes", 6, 0)
	node("path", 6, 0)
	node(label, 2, 0)
}

// chunk writes the metadata of a chunk.
func (w *thrift) chunk(c column, compressed bool) {
	w.begin()
	w.long(2, c.start)
	w.field(3, str)
	w.begin()
	w.int(1, c.physical)
	w.field(2, lst)
	w.list(i32, 1)
	w.zigzag(0)
	w.field(3, lst)
	w.list(bin, len(c.path))
	for _, p := range c.path {
		w.text(p)
	}
	codec := 0
	if compressed {
		codec = 1
	}
	w.int(4, codec)
	w.long(5, c.values)
	w.long(6, c.size)
	w.long(7, c.packed)
	w.long(9, c.start)
	w.end()
	w.end()
}
