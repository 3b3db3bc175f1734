package imageloader

import (
	"encoding/binary"

	"github.com/torchstream/torchstream/internal/imagecapi"
)

// firstBytes is how much of a member of a plain tar is read for its image's header, which mostly lies in there. If it does not, and of streams, which are inflated
// anyway, it is skipBytes.
const firstBytes = 4 << 10

const headBytes = 12

// Formats of images in an index.
const (
	headUnknown  = 0    // not looked at, or not found in the bytes looked at
	headNoImage  = 0xfe // its first bytes are those of no image
	headUnusable = 0xff // all of the member was looked at, and it has none
)

var headFormats = []struct {
	number byte
	format int32
	name   string
}{{1, imagecapi.JPEG, "JPEG"}, {2, imagecapi.PNG, "PNG"}, {3, imagecapi.WebP, "WebP"}, {4, imageGIF, "GIF"}, {5, imageBMP, "BMP"}, {6, imageTIFF, "TIFF"}}

// imageHead is what an index keeps of an image's header, as docs/index-format.md says. No pixel depends on it: the decoder reads the header again.
type imageHead [headBytes]byte

// headOf looks at the first bytes of a member, or at all of them.
func headOf(c codec, first []byte, whole bool) (h imageHead, found bool) {
	info, err := c.header(first)
	if err != nil {
		switch {
		case sniff(first) == "":
			h[8] = headNoImage
		case whole:
			h[8] = headUnusable
		}
		return h, false
	}
	if !whole && info.Orientation == 1 && info.Format != imagecapi.JPEG {
		info.Orientation = 0 // may come at the end
	}
	binary.LittleEndian.PutUint32(h[0:], uint32(info.Width))
	binary.LittleEndian.PutUint32(h[4:], uint32(info.Height))
	for _, f := range headFormats {
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

// info is the header; false if the index has none.
func (h *imageHead) info() (info imagecapi.Info, format string, ok bool) {
	for _, f := range headFormats {
		if f.number == h[8] {
			info.Format, format = f.format, f.name
		}
	}
	info.Width, info.Height = int32(binary.LittleEndian.Uint32(h[0:])), int32(binary.LittleEndian.Uint32(h[4:]))
	info.Components, info.BitDepth, info.Orientation, info.Progressive = int32(h[9]), int32(h[10]), int32(h[11]&0x7f), h[11]>>7 == 1
	return info, format, format != "" && info.Width > 0 && info.Height > 0
}

// header looks for an image's header in the current member, whose first bytes are head, and returns the bytes that it has read of it for that: more than head only if they
// have not been read for another purpose anyway.
func (a *archive) header(c codec, m *member, head []byte) (h imageHead, first []byte, err error) {
	n := firstBytes
	if a.streamed() {
		n = skipBytes
	}
	for {
		if first, err = a.first(m, head, n); err != nil {
			return h, first, err
		}
		h, found := headOf(c, first, int64(len(first)) == m.size)
		if found || h[8] == headNoImage || n == skipBytes || int64(len(first)) == m.size {
			return h, first, nil
		}
		head, n = first, skipBytes
	}
}

// first reads on in the current member, of which the first bytes are head, until n of them are read, or all. They are valid until something else is read.
func (a *archive) first(m *member, head []byte, n int) ([]byte, error) {
	b := a.scratch()[:min(int64(n), m.size)]
	return b, a.read(b[copy(b, head):])
}
