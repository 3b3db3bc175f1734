package codec

import (
	"encoding/binary"
	"slices"
)

// Numbers of image formats in imagecapi.Info.Format, beside those of the image library.
const (
	GIF = 100 + iota
	BMP
	TIFF
)

// Sniff returns the format of an image by its first bytes, or "" for bytes that no decoder takes.
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
