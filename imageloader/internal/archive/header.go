package archive

import (
	"archive/tar"
	"bytes"
	"encoding/binary"
	"errors"
	"path"
)

// HeaderBytes is a number of bytes right before a member's content in a tar. These bytes nearly
// always contain all headers of the member, including the header of a long name.
const HeaderBytes = 8 << 10

// Lead returns the size in bytes that the headers of a member with this name nearly always have. It
// is one block, or three blocks if the name is too long for one block or has characters that one
// block can't hold.
func Lead(name string) int64 {
	const room = 100
	plain := len(name) <= room
	for i := 0; plain && i < len(name); i++ {
		plain = name[i] < 0x80
	}
	if plain {
		return BlockBytes
	}
	return 3 * BlockBytes
}

// Heads reports whether blocks end with the header of a regular file with this name and size.
// blocks are the bytes of a tar right before a member's content. One block is enough, unless the
// name is too long for it or has characters that it can't hold. For such a name, blocks must
// include the extended header.
func Heads(blocks []byte, name string, size int64) bool {
	block := blocks[len(blocks)-BlockBytes:]
	if headsAlone(block, name, size) {
		return true
	}
	for start := len(blocks) - BlockBytes; start >= 0; start -= BlockBytes {
		switch blocks[start+156] {
		case tar.TypeXHeader, tar.TypeXGlobalHeader, tar.TypeGNULongName, tar.TypeGNULongLink:
		default:
			if start < len(blocks)-BlockBytes {
				continue // not the start of a header
			}
		}
		in := bytes.NewReader(blocks[start:])
		h, err := tar.NewReader(in).Next()
		if err != nil && !errors.Is(err, tar.ErrInsecurePath) || in.Len() > 0 {
			continue
		}
		if kind, ok := kindOf(h); ok && kind == Regular && path.Clean(h.Name) == name && h.Size == size {
			return true
		}
	}
	return false
}

// headsAlone implements Heads for the header of a short name without allocating. If it returns
// false, Heads still has to parse the headers.
func headsAlone(block []byte, name string, size int64) bool {
	sum := sumBytes(block) + 8*' ' // the checksum's own bytes count as spaces
	for _, c := range block[148:156] {
		sum -= int64(c)
	}
	if flag := block[156]; octal(block[148:156]) != sum || octal(block[124:136]) != size ||
		flag != tar.TypeReg && flag != 0 {
		return false
	}
	last := bytes.TrimPrefix(field(block[:100]), []byte("./"))
	if block[345] != 0 && string(block[257:263]) == "ustar\x00" {
		prefix := bytes.TrimPrefix(field(block[345:500]), []byte("./"))
		n := len(prefix)
		return len(name) == n+1+len(last) && name[:n] == string(prefix) && name[n] == '/' && name[n+1:] == string(last)
	}
	return string(last) == name
}

// sumBytes returns the sum of the bytes of a block. It adds eight bytes at a time, in four sums of
// 16 bits, which can't overflow.
func sumBytes(block []byte) int64 {
	const even = 0x00ff00ff00ff00ff
	var sums uint64
	for block = block[:BlockBytes]; len(block) > 0; block = block[8:] {
		word := binary.LittleEndian.Uint64(block)
		sums += word&even + word>>8&even
	}
	return int64(sums&0xffff + sums>>16&0xffff + sums>>32&0xffff + sums>>48)
}

// field returns a header field without the trailing NUL.
func field(b []byte) []byte {
	if end := bytes.IndexByte(b, 0); end >= 0 {
		return b[:end]
	}
	return b
}

// octal returns the number in a header field, or -1 if the field has no number, or one that is not
// octal.
func octal(b []byte) int64 {
	b = bytes.Trim(b, " \x00")
	n := int64(0)
	for _, c := range b {
		if c < '0' || c > '7' {
			return -1
		}
		n = 8*n + int64(c-'0')
	}
	if len(b) == 0 {
		return -1
	}
	return n
}
