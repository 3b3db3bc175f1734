package index

import (
	"encoding/binary"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// Numbers of image formats in imagecapi.Info.Format, beside those of the image library.
const (
	GIF = 100 + iota
	BMP
	TIFF
)

// Sniff names the format of an image by its first bytes; "" if it is none that the loader decodes.
func Sniff(b []byte) string {
	switch {
	case len(b) >= 3 && b[0] == 0xff && b[1] == 0xd8 && b[2] == 0xff:
		return "JPEG"
	case len(b) >= 8 && string(b[:8]) == "\x89PNG\r\n\x1a\n":
		return "PNG"
	case len(b) >= 12 && string(b[:4]) == "RIFF" && string(b[8:12]) == "WEBP":
		return "WebP"
	}
	return sniffRare(b)
}

// sniffRare is Sniff for the formats that Go's own libraries decode.
func sniffRare(b []byte) string {
	switch {
	case len(b) >= 6 && (string(b[:6]) == "GIF87a" || string(b[:6]) == "GIF89a"):
		return "GIF"
	case len(b) >= 16 && string(b[:2]) == "BM" && string(b[6:10]) == "\x00\x00\x00\x00" &&
		b[15] == 0 && b[14] >= 12 && b[14] <= 124: // the size of the second header
		return "BMP"
	case len(b) >= 4 && (string(b[:4]) == "II*\x00" || string(b[:4]) == "MM\x00*"):
		return "TIFF"
	}
	return ""
}

// tarHeaderBytes is how much of a member of a plain tar is read for its image's header, which
// mostly lies in there. If it does not, archive.PeekBytes are read; so are those of streams, which
// are inflated anyway.
const tarHeaderBytes = 4 << 10

const headerBytes = 12

// Formats of images in an index.
const (
	headerUnknown  = 0    // the header was not looked for, or is not in the bytes looked at
	headerNoImage  = 0xfe // the first bytes are those of no image
	headerUnusable = 0xff // the header is not in the member, all of which was looked at
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
}

// header is what an index keeps of an image's header; docs/index-format.md has its layout. No pixel
// depends on it: the decoder reads the image's own header again.
type header [headerBytes]byte

// headerOf looks for an image's header in the first bytes of a member; whole says that these are
// all.
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
		info.Orientation = 0 // may come at the end
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

// info returns what the header says, and the name of the format; false if there is no header.
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

// peekHeader looks for an image's header in the archive's current member, and reads as little of it
// as it has to.
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

// HeaderState says what an index knows of a sample's header.
type HeaderState int

// The states of headers.
const (
	HeaderUnknown  HeaderState = iota // the header lies too far behind the beginning of the file
	HeaderNoImage                     // the member is no image
	HeaderUnusable                    // the member begins like an image, and has no usable header
	HeaderKnown
)

// Header is what an index knows of a sample's image.
type Header struct {
	State  HeaderState
	Format string         // "JPEG", "PNG", ...; of a known header
	Info   imagecapi.Info // of a known header
}
