// Package imagecapi replaces internal/imagecapi in code that a simulation runs. It needs no
// library: images have a format that is cheap to decode, and pixels that show which bytes they were
// decoded from and with which geometry.
package imagecapi

import (
	"encoding/binary"
	"hash/crc32"
	"sync/atomic"

	"github.com/torchstream/torchstream/internal/imagecapi"
	"github.com/torchstream/torchstream/internal/simworld/world"
)

// Types of internal/imagecapi.
type (
	AugmentOp         = imagecapi.AugmentOp
	Augmenter         = imagecapi.Augmenter
	Code              = imagecapi.Code
	Error             = imagecapi.Error
	Geometry          = imagecapi.Geometry
	InflateCheckpoint = imagecapi.InflateCheckpoint
	InflateCopy       = imagecapi.InflateCopy
	InflateState      = imagecapi.InflateState
	Info              = imagecapi.Info
	Part              = imagecapi.Part
	Search            = imagecapi.Search
	Stats             = imagecapi.Stats
)

// Constants of internal/imagecapi.
const (
	AugmentAffine         = imagecapi.AugmentAffine
	AugmentAutocontrast   = imagecapi.AugmentAutocontrast
	AugmentBlur           = imagecapi.AugmentBlur
	AugmentBrightness     = imagecapi.AugmentBrightness
	AugmentContrast       = imagecapi.AugmentContrast
	AugmentCrop           = imagecapi.AugmentCrop
	AugmentEqualize       = imagecapi.AugmentEqualize
	AugmentErase          = imagecapi.AugmentErase
	AugmentFlipHorizontal = imagecapi.AugmentFlipHorizontal
	AugmentFlipVertical   = imagecapi.AugmentFlipVertical
	AugmentGrayscale      = imagecapi.AugmentGrayscale
	AugmentHue            = imagecapi.AugmentHue
	AugmentInvert         = imagecapi.AugmentInvert
	AugmentMix            = imagecapi.AugmentMix
	AugmentPermute        = imagecapi.AugmentPermute
	AugmentPerspective    = imagecapi.AugmentPerspective
	AugmentPosterize      = imagecapi.AugmentPosterize
	AugmentQuarterTurns   = imagecapi.AugmentQuarterTurns
	AugmentSaturation     = imagecapi.AugmentSaturation
	AugmentSharpness      = imagecapi.AugmentSharpness
	AugmentSolarize       = imagecapi.AugmentSolarize

	Nearest  = imagecapi.Nearest
	Bilinear = imagecapi.Bilinear

	PadConstant  = imagecapi.PadConstant
	PadEdge      = imagecapi.PadEdge
	PadReflect   = imagecapi.PadReflect
	PadSymmetric = imagecapi.PadSymmetric

	CodeDecode      = imagecapi.CodeDecode
	CodeNoLibrary   = imagecapi.CodeNoLibrary
	CodeUnsupported = imagecapi.CodeUnsupported

	DamageRefuse  = imagecapi.DamageRefuse
	DamageWarn    = imagecapi.DamageWarn
	DamagePartial = imagecapi.DamagePartial

	JPEG = imagecapi.JPEG
	PNG  = imagecapi.PNG
	WebP = imagecapi.WebP
	AVIF = imagecapi.AVIF
	HEIC = imagecapi.HEIC

	InflateWindow = imagecapi.InflateWindow
	FoundMember   = imagecapi.FoundMember
	FoundNone     = imagecapi.FoundNone
	FoundStored   = imagecapi.FoundStored
)

// Check returns nil: nothing has to be loaded.
func Check() error { return nil }

// CutOff is imagecapi.CutOff.
func CutOff(err error) bool { return imagecapi.CutOff(err) }

// unsupported is the error of functions that no simulated image needs.
func unsupported() error { return imagecapi.NewFailure(CodeUnsupported, "not simulated") }

// ---- images

const (
	magic      = "\x89PNG\r\n\x1a\n"
	headerSize = 12 // the magic, then width and height
	trailer    = 4  // a checksum of all bytes before it
)

// Image makes an image of a size with a payload.
func Image(width, height int, payload []byte) []byte {
	b := []byte(magic)
	b = binary.LittleEndian.AppendUint16(b, uint16(width))
	b = binary.LittleEndian.AppendUint16(b, uint16(height))
	b = append(b, payload...)
	return binary.LittleEndian.AppendUint32(b, check(b))
}

// Sum identifies an image's bytes. The pixels of the image start with it.
func Sum(data []byte) uint32 {
	return crc32.ChecksumIEEE(data[:max(0, len(data)-trailer)]) ^ 0x5ca1ab1e
}

// check returns the checksum in an image's trailer. It is not the CRC-32 of an index: a CRC-32 of
// bytes that end with their own CRC-32 is the same for all bytes, so no index could tell images of
// one size apart.
func check(data []byte) uint32 {
	return crc32.Checksum(data, crc32.MakeTable(crc32.Castagnoli))
}

func damaged(what string) error { return imagecapi.NewFailure(CodeDecode, what) }

// Header reads the header of an image.
func Header(data []byte) (Info, error) {
	if len(data) < headerSize || string(data[:8]) != magic {
		return Info{}, damaged("no header")
	}
	return Info{Format: PNG, Width: int32(binary.LittleEndian.Uint16(data[8:])),
		Height: int32(binary.LittleEndian.Uint16(data[10:])), Components: 3, BitDepth: 8, Orientation: 1}, nil
}

// Decoder decodes images.
type Decoder struct{ maxPixels int64 }

// NewDecoder returns a decoder.
func NewDecoder(maxPixels int64) (*Decoder, error) { return &Decoder{maxPixels}, nil }

// FreeDecoder does nothing.
func FreeDecoder(*Decoder) {}

// SetDamage does nothing: every damaged image is bad.
func SetDamage(*Decoder, int32) error { return nil }

// Tolerated returns "".
func Tolerated(*Decoder) string { return "" }

// DecoderStats returns zeros.
func DecoderStats(*Decoder) (Stats, error) { return Stats{}, nil }

// Decode takes a while, and fills dst with numbers that depend on the image's bytes and the
// geometry.
func Decode(d *Decoder, data []byte, g *Geometry, dst []byte, stride int) error {
	world.Current().Wait("decode")
	if _, err := Header(data); err != nil {
		return err
	}
	if at := len(data) - trailer; at < headerSize ||
		check(data[:at]) != binary.LittleEndian.Uint32(data[at:]) {
		return damaged("wrong checksum")
	}
	Pixels(data, g, dst, stride)
	return nil
}

// Pixels fills dst with the pixels of an image. They start with Sum, and depend on the crop and the
// flip.
func Pixels(data []byte, g *Geometry, dst []byte, stride int) {
	state := uint64(Sum(data))
	bytes := binary.LittleEndian.AppendUint32(nil, Sum(data))
	for _, v := range []int32{g.CropX, g.CropY, g.CropWidth, g.CropHeight} {
		state = (state ^ uint64(uint32(v))) * 0x9e3779b97f4a7c15
	}
	if g.Flip {
		state = ^state
	}
	bytes = binary.LittleEndian.AppendUint64(bytes, state)
	for y := range int(g.WindowHeight) {
		row := dst[y*stride:][:3*g.WindowWidth]
		for x := range row {
			row[x] = bytes[(x+y*len(row))%len(bytes)]
		}
	}
}

// ---- functions that no simulated image needs

// NewAugmenter fails.
func NewAugmenter() (*Augmenter, error) { return nil, unsupported() }

// FreeAugmenter does nothing.
func FreeAugmenter(*Augmenter) {}

// Augment fails.
func Augment(*Augmenter, []byte, int, int, int, []AugmentOp) error { return unsupported() }

// PlanAugment fails.
func PlanAugment([]byte, []AugmentOp) (int, error) { return 0, unsupported() }

// DecodeEntries fails.
func DecodeEntries(*Decoder, []byte, *Geometry, []byte, int, []byte, *uint64) error {
	return unsupported()
}

// DecodeMakeEntries fails.
func DecodeMakeEntries(*Decoder, []byte, *Geometry, []byte, int, int, []byte) (int, uint64, error) {
	return 0, 0, unsupported()
}

// MakeEntries fails.
func MakeEntries(*Decoder, []byte, int, []byte) (int, uint64, error) { return 0, 0, unsupported() }

// Transcode fails.
func Transcode(*Decoder, []byte, []byte) (int, error) { return 0, unsupported() }

// PlanSegments fails.
func PlanSegments(*Decoder, []byte, *Geometry, []byte, *uint64, []byte) (int, error) {
	return 0, unsupported()
}

// PlanAppend fails.
func PlanAppend(*Decoder, []byte, *Geometry, []byte, *uint64, []byte, *atomic.Uint64) (int, int, error) {
	return 0, 0, unsupported()
}

// PlanHead fails.
func PlanHead(*Decoder, []byte, int, int, *Geometry, []byte, []byte) (int, error) {
	return 0, unsupported()
}

// PlanScan fails.
func PlanScan(*Decoder, []byte, *Geometry, []byte, *atomic.Uint64, *Search) (int, int, error) {
	return 0, 0, unsupported()
}

// PlanPart fails.
func PlanPart(*Decoder, []byte, int, int, *Geometry, []byte, int, []byte, *atomic.Uint64) (Part, error) {
	return Part{}, unsupported()
}

// PackEntries fails.
func PackEntries(*Search, []byte, []byte) (int, uint64, error) { return 0, 0, unsupported() }

// Resize fails.
func Resize(*Decoder, []byte, int, int, int, *Geometry, []byte, int) error { return unsupported() }
