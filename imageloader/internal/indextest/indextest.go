// Package indextest edits index files for tests of damaged and forged indexes. Its numbers come
// from docs/index-format.md, not from package index.
package indextest

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"testing"
)

// The format.
const (
	Suffix       = ".tsidx"
	Magic        = "TSIDX\x00\r\n"
	FileHeader   = 32 // bytes
	TableItem    = 32 // bytes of the table, for each section
	MaxSections  = 64
	MemberBytes  = 32
	HeaderBytes  = 12
	FlagsOfImage = 1 // in the last byte of a member
)

// Kinds of sections.
const (
	Shards      = 1
	Directories = 2
	Members     = 3
	Names       = 4
	Checkpoints = 5
	Windows     = 6
	Headers     = 10
	Sums        = 11
)

// Forge returns a copy of an index file with one section changed and all checksums right.
func Forge(t testing.TB, index []byte, kind uint32, change func([]byte)) []byte {
	t.Helper()
	index = bytes.Clone(index)
	le := binary.LittleEndian
	table := index[FileHeader : FileHeader+le.Uint32(index[12:])*TableItem]
	found := false
	for at := 0; at < len(table); at += TableItem {
		if le.Uint32(table[at:]) == kind {
			found = true
			b := index[le.Uint64(table[at+8:]):][:le.Uint64(table[at+16:])]
			change(b)
			le.PutUint32(table[at+4:], crc32.ChecksumIEEE(b))
		}
	}
	if !found {
		t.Fatalf("no section %d", kind)
	}
	le.PutUint32(index[24:], crc32.ChecksumIEEE(table))
	le.PutUint32(index[28:], crc32.ChecksumIEEE(index[:28]))
	return index
}

// parts returns the header and the table of an index file, and then the sections that are inside of
// the file. It stops where the table can't be read.
func parts(index []byte) (list [][]byte) {
	le := binary.LittleEndian
	if len(index) < FileHeader {
		return [][]byte{index}
	}
	end := FileHeader + TableItem*uint64(min(le.Uint32(index[12:]), MaxSections))
	list = [][]byte{index[:min(end, uint64(len(index)))]}
	for at := uint64(FileHeader); at+TableItem <= uint64(len(list[0])); at += TableItem {
		offset, size := le.Uint64(index[at+8:]), le.Uint64(index[at+16:])
		if offset > uint64(len(index)) || size > uint64(len(index))-offset {
			list = append(list, nil)
			continue
		}
		list = append(list, index[offset:offset+size])
	}
	return list
}

// Reseal corrects the checksums of an index file with any content.
func Reseal(index []byte) {
	le := binary.LittleEndian
	list := parts(index)
	if len(list[0]) < FileHeader {
		return
	}
	table := list[0][FileHeader:]
	for i, part := range list[1:] {
		le.PutUint32(table[i*TableItem+4:], crc32.ChecksumIEEE(part))
	}
	le.PutUint64(index[16:], uint64(len(index)))
	le.PutUint32(index[24:], crc32.ChecksumIEEE(table))
	le.PutUint32(index[28:], crc32.ChecksumIEEE(index[:28]))
}

// Edit returns a changed copy of an index file. An edit has eight bytes: the part, the kind of
// change, the position and the value.
func Edit(index, edits []byte) []byte {
	const maxCopy = 64
	index = bytes.Clone(index)
	for ; len(edits) >= 8; edits = edits[8:] {
		list := parts(index)
		part := list[int(edits[0])%len(list)]
		at, value := int(binary.LittleEndian.Uint16(edits[2:])), binary.LittleEndian.Uint32(edits[4:])
		if len(part) < 8 {
			continue
		}
		word := part[at%(len(part)-7):]
		switch edits[1] % 8 {
		case 0:
			word[0] = byte(value)
		case 1:
			word[0] ^= 1 << (value % 8)
		case 2:
			binary.LittleEndian.PutUint32(word, value)
		case 3: // also negative
			binary.LittleEndian.PutUint64(word, uint64(int64(int32(value))))
		case 4:
			binary.LittleEndian.PutUint64(word, binary.LittleEndian.Uint64(word)+uint64(int64(int32(value))))
		case 5: // of another place of the same part
			copy(word, part[int(value)%len(part):][:min(len(part)-int(value)%len(part), maxCopy)])
		case 6: // of another part
			other := list[int(value)%len(list)]
			copy(word, other[min(len(other), int(value>>8)):])
		case 7: // cut off, or longer
			index = append(index[:len(index)-min(len(index), int(value%256))], make([]byte, value>>8%256)...)
		}
	}
	return index
}
