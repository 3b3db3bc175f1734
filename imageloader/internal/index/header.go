package index

import (
	"encoding/binary"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/codec"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// tarHeaderBytes is the number of bytes of a member in a plain tar that are read first to find the
// image's header. They are nearly always enough. Otherwise archive.PeekBytes are read. In
// compressed shards archive.PeekBytes are read at once, because everything is inflated anyway.
const tarHeaderBytes = 4 << 10

const headerBytes = 12

// Formats of images in an index.
const (
	headerUnknown  = 0    // the searched bytes do not contain the header, or none were searched
	headerForeign  = 0xfd // the member starts like an image of a format that is not decoded
	headerNoImage  = 0xfe // the member does not start like an image
	headerUnusable = 0xff // the whole member was searched, and has no usable header
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
// not depend on it, because the decoder reads the header in the image again.
type header [headerBytes]byte

// headerOf looks for an image's header in first, the first bytes of a member. whole says that first
// has all bytes of the member.
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
		info.Orientation = 0 // EXIF may come at the end of the file
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

// info returns the header's content and the name of the format. ok is false if there is no header.
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

// peekHeader looks for an image's header in the archive's current member. It reads no more of the
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
	HeaderUnknown  HeaderState = iota // the header was not found in the first bytes of the file
	HeaderNoImage                     // the member is not an image
	HeaderForeign                     // the member is an image of a format that is not decoded
	HeaderUnusable                    // the member starts like an image, but has no usable header
	HeaderKnown
)

// Header describes a sample's image, as far as the index has recorded it.
type Header struct {
	State  HeaderState
	Format string         // "JPEG", "PNG", ..., of a known header
	Info   imagecapi.Info // of a known header
}
