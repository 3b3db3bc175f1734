package index

import (
	"encoding/binary"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/codec"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// tarHeaderBytes is the number of bytes first read of a plain tar's member to find its image's
// header. They nearly always suffice. Otherwise archive.PeekBytes are read. In streams
// archive.PeekBytes are always read, because streams are inflated anyway.
const tarHeaderBytes = 4 << 10

const headerBytes = 12

// Formats of images in an index.
const (
	headerUnknown  = 0    // the header was not searched, or is not in the searched bytes
	headerForeign  = 0xfd // the first bytes are those of an image that is not decoded
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
	{4, codec.GIF, "GIF"},
	{5, codec.BMP, "BMP"},
	{6, codec.TIFF, "TIFF"},
	{7, imagecapi.AVIF, "AVIF"},
	{8, imagecapi.HEIC, "HEIC"},
}

// header is an image's header in the index. docs/index-format.md has its layout. Decoded pixels do
// not depend on it, because the decoder reads the image's own header again.
type header [headerBytes]byte

// headerOf searches an image's header in the first bytes of a member, or in all its bytes if whole.
func headerOf(c Codec, first []byte, whole bool) (h header, found bool) {
	info, err := c.Header(first)
	if err != nil {
		switch {
		case codec.Sniff(first) == "":
			h[8] = headerNoImage
			if foreign, _ := codec.NotDecoded(first); foreign {
				h[8] = headerForeign
			}
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
		if found || h[8] == headerNoImage || h[8] == headerForeign || n == archive.PeekBytes || whole {
			return h, nil
		}
		n = archive.PeekBytes
	}
}

// HeaderState says whether an index has a sample's header.
type HeaderState int

// The states of headers.
const (
	HeaderUnknown  HeaderState = iota // the header is too far behind the beginning of the file
	HeaderNoImage                     // the member is not an image
	HeaderForeign                     // the member is an image of a format that is not decoded
	HeaderUnusable                    // the member starts like an image, but has no usable header
	HeaderKnown
)

// Header describes a sample's image as far as an index knows it.
type Header struct {
	State  HeaderState
	Format string         // "JPEG", "PNG", ..., of a known header
	Info   imagecapi.Info // of a known header
}
