package codec

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
)

// Numbers of image formats in imagecapi.Info.Format that extend the image library's numbers.
const (
	GIF = 100 + iota
	BMP
	TIFF
)

// Sniff returns the format of an image, judging by its first bytes. It returns "" if no decoder
// accepts it.
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
	case len(b) >= 12 && string(b[4:8]) == "ftyp" &&
		slices.Contains([]string{"heic", "heix", "heim", "heis", "mif1"}, string(b[8:12])):
		return "HEIC"
	}
	return sniffRare(b)
}

// sniffRare implements Sniff for the formats that package raster decodes.
func sniffRare(b []byte) string {
	switch {
	case len(b) >= 6 && (string(b[:6]) == "GIF87a" || string(b[:6]) == "GIF89a"):
		return "GIF"
	case len(b) >= 16 && string(b[:2]) == "BM" && string(b[6:10]) == "\x00\x00\x00\x00" &&
		b[15] == 0 && b[14] >= 12 && b[14] <= 124: // the size of the info header
		return "BMP"
	case len(b) >= 16 && isDIB(b):
		return "BMP"
	case len(b) >= 4 && slices.Contains([]string{"II*\x00", "MM\x00*", "II+\x00", "MM\x00+"}, string(b[:4])):
		return "TIFF"
	}
	return ""
}

// isDIB recognises a BMP without its file header, by three fields of the remaining header (the info
// header): its size, the number of planes (1), and the number of bits per pixel.
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

// foreign lists other files that are often mistaken for images, by their first bytes.
var foreign = []struct {
	at          int
	magic, what string
	image       bool
}{
	{0, "\x00\x00\x00\x0cJXL \r\n\x87\n", "a JPEG XL image", true},
	{0, "\xff\x0a", "a JPEG XL image", true},
	{0, "\x00\x00\x00\x0cjP  \r\n\x87\n", "a JPEG 2000 image", true},
	{0, "\xff\x4f\xff\x51", "a JPEG 2000 image", true},
	{4, "ftypavis", "an image sequence (animated AVIF)", true},
	{4, "ftypmsf1", "an image sequence (HEIF)", true},
	{4, "ftyphevc", "an image sequence (HEIC)", true},
	{4, "ftyphevx", "an image sequence (HEIC)", true},
	{0, "version https://git-lfs", "a pointer of Git LFS: fetch the file that it stands for, with git lfs pull", false},
	{0, "\x00\x05\x16\x07", "an AppleDouble file that macOS's tar adds; pack the archive with " +
		"COPYFILE_DISABLE=1", false},
}

// Claims reports whether a file's first bytes look like an image, in a format that Sniff knows or
// in another known one that is not decoded. It needs the first 16 bytes, and ignores formats that
// only two bytes identify.
func Claims(b []byte) bool {
	if Sniff(b) != "" {
		return true
	}
	for _, f := range foreign {
		if f.image && len(f.magic) > 2 && len(b) > f.at && bytes.HasPrefix(b[f.at:], []byte(f.magic)) {
			return true
		}
	}
	return false
}

// NotDecoded describes data for which Sniff returns "". image is true if the data is an image in a
// format that no decoder accepts.
func NotDecoded(b []byte) (image bool, err error) {
	for _, f := range foreign {
		switch {
		case len(b) <= f.at || !bytes.HasPrefix(b[f.at:], []byte(f.magic)):
		case f.image:
			return true, errors.New(f.what + ", which is not decoded: convert it to JPEG, PNG or WebP")
		default:
			return false, errors.New(f.what)
		}
	}
	return false, fmt.Errorf("it begins with %q", b[:min(len(b), 8)])
}
