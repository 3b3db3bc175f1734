// Package audit describes the images of an archive for a report on it, and encodes images as PNG.
package audit

import (
	"encoding/binary"
	"hash/maphash"
	"strconv"
	"strings"

	"github.com/torchstream/torchstream/internal/imagecapi"
)

// UnknownFormat is the format of an image whose header an index does not know.
const UnknownFormat = "unknown"

// Limits beyond which an image is rare.
const (
	hugePixels = 50_000_000
	tinySide   = 32
	thinFactor = 10
)

// Describe returns the name for an image's kind in Report.Formats.
func Describe(format string, i imagecapi.Info) string {
	if i.BitDepth != 8 {
		format += " " + strconv.Itoa(int(i.BitDepth)) + "-bit"
	}
	switch {
	case i.Components == 1:
		format += " grey"
	case i.Components == 2:
		format += " grey with alpha"
	case i.Components == 4 && i.Format == imagecapi.JPEG:
		format += " CMYK"
	case i.Components == 4:
		format += " with alpha"
	}
	if i.Progressive {
		if i.Format == imagecapi.PNG {
			return format + " interlaced"
		}
		return format + " progressive"
	}
	return format
}

// Rarities lists the rare properties of an image, judging by its header and its name.
func Rarities(name, format string, i imagecapi.Info) (list []string) {
	if i.Orientation > 1 {
		list = append(list, "EXIF orientation (turned only with Options.Transform.ApplyEXIFOrientation)")
	}
	if i.Components == 4 && i.Format == imagecapi.JPEG {
		list = append(list, "CMYK")
	}
	if i.BitDepth > 8 {
		list = append(list, strconv.Itoa(int(i.BitDepth))+" bits a channel")
	}
	short, long := int64(min(i.Width, i.Height)), int64(max(i.Width, i.Height))
	if short*long > hugePixels {
		list = append(list, "huge: more than 50 megapixels")
	}
	if short < tinySide {
		list = append(list, "tiny: a side of less than 32 pixels")
	}
	if long > thinFactor*short {
		list = append(list, "thin: a side of more than 10 times the other")
	}
	if ext := extension(name); formatOfExtension[ext] != "" && formatOfExtension[ext] != format {
		list = append(list, format+" with the extension ."+ext)
	}
	return list
}

// extension returns the extension of a member's name, in lower case and without the dot.
func extension(name string) string {
	return strings.ToLower(name[strings.LastIndexByte(name, '.')+1:])
}

var formatOfExtension = map[string]string{
	"jpg": "JPEG", "jpeg": "JPEG", "jfif": "JPEG", "jpe": "JPEG", "png": "PNG", "webp": "WebP",
	"gif": "GIF", "bmp": "BMP", "tif": "TIFF", "tiff": "TIFF",
	"avif": "AVIF", "heic": "HEIC", "heif": "HEIC",
}

// Animated reports whether an image has several frames. format is the format that codec.Sniff
// returns.
func Animated(format string, data []byte) bool {
	switch format {
	case "GIF":
		return animatedGIF(data)
	case "PNG":
		return animatedPNG(data)
	case "WebP": // a flag in the extended header
		return len(data) > 20 && string(data[12:16]) == "VP8X" && data[20]&2 != 0
	}
	return false
}

// animatedGIF looks for a second image descriptor.
func animatedGIF(data []byte) bool {
	const screen, descriptor = 13, 10
	if len(data) < screen {
		return false
	}
	table := func(flags byte) int { // returns the size of a colour table
		if flags&0x80 == 0 {
			return 0
		}
		return 3 << (flags&7 + 1)
	}
	frames := 0
	for at := screen + table(data[10]); at < len(data); {
		switch data[at] {
		case ',':
			if frames++; frames > 1 {
				return true
			}
			if len(data)-at < descriptor {
				return false
			}
			at += descriptor + table(data[at+9]) + 1 // the last byte is a code size
		case '!':
			at += 2
		default:
			return false
		}
		for at < len(data) && data[at] != 0 { // blocks, each after its length
			at += 1 + int(data[at])
		}
		at++
	}
	return false
}

// animatedPNG looks for an acTL chunk with more than one frame before the image data.
func animatedPNG(data []byte) bool {
	const signature, lead, crc = 8, 8, 4
	for at := int64(signature); at+lead+crc <= int64(len(data)); {
		size, kind := int64(binary.BigEndian.Uint32(data[at:])), string(data[at+4:at+lead])
		switch kind {
		case "acTL":
			return at+lead+4 <= int64(len(data)) && binary.BigEndian.Uint32(data[at+lead:]) > 1
		case "IDAT":
			return false
		}
		at += lead + size + crc
	}
	return false
}

// Names detects names that occur more than once. It keeps a 64-bit digest of each name.
type Names struct {
	seed maphash.Seed
	seen map[uint64]struct{}
}

// NewNames returns an empty set.
func NewNames() *Names { return &Names{maphash.MakeSeed(), map[uint64]struct{}{}} }

// Digest returns the digest of a name. A set always returns the same digest for the same name.
func (s *Names) Digest(name string) uint64 { return maphash.String(s.seed, name) }

// Again adds a name. It reports whether the name was already in the set.
func (s *Names) Again(name string) bool {
	digest := s.Digest(name)
	_, found := s.seen[digest]
	s.seen[digest] = struct{}{}
	return found
}

// NameAgain is the finding for a sample with the name of an earlier one.
const NameAgain = "the name of an earlier sample"
