package index

import (
	"encoding/binary"
	"slices"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// Numbers of image formats in imagecapi.Info.Format, beside those of the image library.
const (
	GIF = 100 + iota
	BMP
	TIFF
)

// Sniff returns the format of an image by its first bytes, or "" if the loader does not decode it.
func Sniff(b []byte) string {
	switch {
	case len(b) >= 3 && b[0] == 0xff && b[1] == 0xd8 && b[2] == 0xff:
		return "JPEG"
	case len(b) >= 8 && string(b[:8]) == "\x89PNG\r\n\x1a\n":
		return "PNG"
	case len(b) >= 12 && string(b[:4]) == "RIFF" && string(b[8:12]) == "WEBP":
		return "WebP"
	case len(b) >= 12 && string(b[4:12]) == "ftypavif":
		return "AVIF"
	case len(b) >= 12 && string(b[4:8]) == "ftyp" && slices.Contains([]string{"heic", "heix", "heim", "heis", "mif1"}, string(b[8:12])):
		return "HEIC"
	}
	return sniffRare(b)
}

// sniffRare is Sniff for the formats that package raster decodes.
func sniffRare(b []byte) string {
	switch {
	case len(b) >= 6 && (string(b[:6]) == "GIF87a" || string(b[:6]) == "GIF89a"):
		return "GIF"
	case len(b) >= 16 && string(b[:2]) == "BM" && string(b[6:10]) == "\x00\x00\x00\x00" &&
		b[15] == 0 && b[14] >= 12 && b[14] <= 124: // the size of the second header
		return "BMP"
	case len(b) >= 16 && isDIB(b):
		return "BMP"
	case len(b) >= 4 && slices.Contains([]string{"II*\x00", "MM\x00*", "II+\x00", "MM\x00+"}, string(b[:4])):
		return "TIFF"
	}
	return ""
}

// isDIB recognises a BMP without its file header by three fields of the header that follows: its
// size, the number of planes, which is 1, and the bits of a pixel.
func isDIB(b []byte) bool {
	size := binary.LittleEndian.Uint32(b)
	planes := b[12:]
	if size == 12 {
		planes = b[8:]
	} else if !slices.Contains([]uint32{40, 52, 56, 64, 108, 124}, size) {
		return false
	}
	depths := []uint16{1, 4, 8, 16, 24, 32}
	return binary.LittleEndian.Uint16(planes) == 1 && slices.Contains(depths, binary.LittleEndian.Uint16(planes[2:]))
}

// tarHeaderBytes is the number of bytes of a plain tar's member that are read for its image's
// header, which mostly lies in them. If it does not, archive.PeekBytes are read. In streams
// archive.PeekBytes are always read, because streams are inflated anyway.
const tarHeaderBytes = 4 << 10

const headerBytes = 12

// Formats of images in an index.
const (
	headerUnknown  = 0    // the header was not searched, or is not in the searched bytes
	headerNoImage  = 0xfe // the first bytes are not an image's
	headerUnusable = 0xff // the header is not in the member, which was searched to its end
)

var headerFormats = []struct {
	number byte
	format int32
	name   string
}{
	{1, imagecapi.JPEG, "JPEG"},
	{2, imagecapi.PNG, "PNG"},
	{3, imagecapi.WebP, "WebP"},
	{4, GIF, "GIF"},
	{5, BMP, "BMP"},
	{6, TIFF, "TIFF"},
	{7, imagecapi.AVIF, "AVIF"},
	{8, imagecapi.HEIC, "HEIC"},
}

// header is an image's header in the index. docs/index-format.md has its layout. No pixel depends
// on it, because the decoder reads the image's own header again.
type header [headerBytes]byte

// headerOf searches an image's header in the first bytes of a member, or in all its bytes if whole.
func headerOf(c Codec, first []byte, whole bool) (h header, found bool) {
	info, err := c.Header(first)
	if err != nil {
		switch {
		case Sniff(first) == "":
			h[8] = headerNoImage
		case whole:
			h[8] = headerUnusable
		}
		return h, false
	}
	if !whole && info.Orientation == 1 && info.Format != imagecapi.JPEG {
		info.Orientation = 0 // EXIF may follow at the end of the file
	}
	binary.LittleEndian.PutUint32(h[0:], uint32(info.Width))
	binary.LittleEndian.PutUint32(h[4:], uint32(info.Height))
	for _, f := range headerFormats {
		if f.format == info.Format {
			h[8] = f.number
		}
	}
	h[9], h[10], h[11] = byte(info.Components), byte(info.BitDepth), byte(info.Orientation)
	if info.Progressive {
		h[11] |= 1 << 7
	}
	return h, true
}

// info returns the header's content and the name of the format, or false if there is no header.
func (h *header) info() (info imagecapi.Info, format string, ok bool) {
	for _, f := range headerFormats {
		if f.number == h[8] {
			info.Format, format = f.format, f.name
		}
	}
	info.Width, info.Height = int32(binary.LittleEndian.Uint32(h[0:])), int32(binary.LittleEndian.Uint32(h[4:]))
	info.Components, info.BitDepth = int32(h[9]), int32(h[10])
	info.Orientation, info.Progressive = int32(h[11]&0x7f), h[11]>>7 == 1
	return info, format, format != "" && info.Width > 0 && info.Height > 0
}

// peekHeader searches an image's header in the archive's current member, and reads no more of the
// member than necessary.
func peekHeader(a *archive.Archive, c Codec, m *archive.Member) (header, error) {
	n := tarHeaderBytes
	if a.Streamed() {
		n = archive.PeekBytes
	}
	for {
		first, err := a.Peek(n)
		if err != nil {
			return header{}, err
		}
		whole := int64(len(first)) == m.Size
		h, found := headerOf(c, first, whole)
		if found || h[8] == headerNoImage || n == archive.PeekBytes || whole {
			return h, nil
		}
		n = archive.PeekBytes
	}
}

// HeaderState is an index's knowledge of a sample's header.
type HeaderState int

// The states of headers.
const (
	HeaderUnknown  HeaderState = iota // the header is too far behind the beginning of the file
	HeaderNoImage                     // the member is not an image
	HeaderUnusable                    // the member begins like an image, but has no usable header
	HeaderKnown
)

// Header is an index's knowledge of a sample's image.
type Header struct {
	State  HeaderState
	Format string         // "JPEG", "PNG", ..., of a known header
	Info   imagecapi.Info // of a known header
}
