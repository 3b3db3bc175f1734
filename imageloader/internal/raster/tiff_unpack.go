package raster

import (
	"bytes"
	"compress/zlib"
	"errors"
	"io"
	"math/bits"

	"golang.org/x/image/tiff/lzw"
)

// Values of a TIFF's compression.
const (
	tiffUncompressed = 1
	tiffHuffman      = 2
	tiffGroup3       = 3
	tiffGroup4       = 4
	tiffLZW          = 5
	tiffOldJPEG      = 6
	tiffJPEG         = 7
	tiffDeflate      = 8
	tiffPackBits     = 32773
	tiffDeflateOld   = 32946
)

var tiffCompressions = map[uint64]string{
	tiffOldJPEG: "JPEG of TIFF 6.0, which TIFF's authors withdrew", 32771: "16-bit words of fax",
	32809: "ThunderScan", 32908: "PixarFilm", 32909: "PixarLog",
	33003: "JPEG 2000", 33005: "JPEG 2000", 34661: "JBIG", 34676: "SGI Log", 34677: "SGI Log",
	34712: "JPEG 2000", 34887: "LERC", 34892: "lossy DNG",
	34925: "LZMA", 50000: "Zstandard", 50001: "WebP", 50002: "JPEG XL", 52546: "JPEG XL",
}

// tiffMaxRatio is the maximum number of bytes to which one compressed byte can expand. The JPEG
// decoder checks its sizes itself: a block of 8 x 8 samples takes at least a bit.
var tiffMaxRatio = map[uint64]int{
	0: 1, tiffUncompressed: 1, tiffLZW: 4096 * 8 / 9, tiffDeflate: 1032, tiffDeflateOld: 1032,
	tiffPackBits: 64, tiffJPEG: 64 * 3 * 8,
	tiffHuffman: 1, tiffGroup3: 1, tiffGroup4: 1, // checked by rows
}

func (t *tiff) fax() bool { return t.compression >= tiffHuffman && t.compression <= tiffGroup4 }

func (t *tiff) deflated() bool {
	return t.compression == tiffDeflate || t.compression == tiffDeflateOld
}

// checkCompression returns an error for unsupported features.
func (t *tiff) checkCompression() error {
	switch {
	case tiffMaxRatio[t.compression] == 0:
		if name := tiffCompressions[t.compression]; name != "" {
			return unsupported("TIFF: %s compression", name)
		}
		return unsupported("TIFF: compression %d", t.compression)
	case t.fax() && (t.depth != 1 || t.samples != 1):
		return unsupported("TIFF: fax compression of %d samples of %d bits", t.samples, t.depth)
	case t.compression == tiffJPEG && t.separate && t.samples > 1:
		return unsupported("TIFF: JPEG compression of separate planes")
	case t.compression == tiffJPEG &&
		(t.depth != 8 || t.samples != t.colours || t.photometric == tiffPalette || t.colours == 4):
		return unsupported("TIFF: JPEG compression of other than 8-bit grey, RGB and YCbCr")
	}
	return t.checkPredictor()
}

// checkPredictor reads the predictor of LZW and deflate. For other compressions it is ignored, as
// in libtiff.
func (t *tiff) checkPredictor() error {
	if t.compression != tiffLZW && !t.deflated() {
		return nil
	}
	switch predictor := t.first(tiffPredictor, 1); {
	case predictor == 1:
	case predictor == 2 && (t.depth == 8 || t.depth == 16):
		t.predictor = true
	case predictor == 2:
		return unsupported("TIFF: a horizontal predictor with %d bits", t.depth)
	default:
		return unsupported("TIFF: predictor %d", predictor)
	}
	return nil
}

// unpack returns a reader of a block's rows.
func (t *tiff) unpack(packed []byte) (io.Reader, error) {
	if t.fax() {
		return newFax(packed, t), nil
	}
	var in interface {
		io.Reader
		io.ByteReader
	} = bytes.NewReader(packed)
	if t.reversed {
		in = &reversedBits{left: packed}
	}
	switch t.compression {
	case tiffDeflate, tiffDeflateOld:
		return zlib.NewReader(in)
	case tiffLZW:
		if !t.reversed && len(packed) > 1 && packed[0] == 0 && packed[1]&1 == 1 {
			return nil, unsupported("LZW compression in the order of bits of before TIFF 5.0")
		}
		return lzw.NewReader(in, lzw.MSB, 8), nil
	case tiffPackBits:
		return &packBits{in: in}, nil
	}
	return in, nil
}

// reversedBits reads bytes stored with the lowest bit first.
type reversedBits struct{ left []byte }

func (r *reversedBits) Read(p []byte) (int, error) {
	if len(r.left) == 0 {
		return 0, io.EOF
	}
	n := copy(p, r.left)
	r.left = r.left[n:]
	for i, b := range p[:n] {
		p[i] = bits.Reverse8(b)
	}
	return n, nil
}

func (r *reversedBits) ReadByte() (byte, error) {
	var b [1]byte
	_, err := r.Read(b[:])
	return b[0], err
}

// packBits unpacks PackBits (TIFF 6.0, section 9). A run is a length followed by literal bytes, or
// a length followed by a byte to repeat.
type packBits struct {
	in     io.ByteReader
	left   int  // bytes left in the run
	repeat bool // the run repeats value; otherwise it has literals
	value  byte
}

func (p *packBits) Read(to []byte) (n int, err error) {
	for n < len(to) {
		if p.left == 0 {
			if err := p.next(); err != nil {
				return n, err
			}
			continue
		}
		if !p.repeat {
			if p.value, err = p.in.ReadByte(); err != nil {
				return n, io.ErrUnexpectedEOF
			}
		}
		to[n] = p.value
		p.left--
		n++
	}
	return n, nil
}

// next starts a run. It returns io.EOF if the input ends between two runs.
func (p *packBits) next() error {
	code, err := p.in.ReadByte()
	switch {
	case err != nil:
		return err
	case code < 128:
		p.left, p.repeat = int(code)+1, false
	case code > 128:
		p.left, p.repeat = 257-int(code), true
		if p.value, err = p.in.ReadByte(); err != nil {
			return io.ErrUnexpectedEOF
		}
	}
	return nil
}

// Markers of JPEG.
const (
	jpegStart = 0xd8
	jpegEnd   = 0xd9
	jpegScan  = 0xda
)

// decodeJPEG decodes a block that is a JPEG. The JPEG's tables may be in the directory.
func (t *tiff) decodeJPEG(rgb []byte, i, j int, jpeg JPEG) error {
	if jpeg == nil {
		return unsupported("JPEG compression")
	}
	part := t.visible(i, j)
	file := []byte{0xff, jpegStart}
	if t.colours == 3 { // Adobe's marker tells the colour space
		transform := byte(0)
		if t.photometric == tiffYCbCr {
			transform = 1
		}
		file = append(file, 0xff, 0xee, 0, 14, 'A', 'd', 'o', 'b', 'e', 0, 100, 0, 0, 0, 0, transform)
	}
	file, _, _, err := appendJPEG(file, t.jpegTables, 0)
	if err != nil {
		return err
	}
	file, width, height, err := appendJPEG(file, t.source(0, i, j), t.samples)
	if err != nil {
		return err
	}
	if width < part.Dx() || height < part.Dy() || width > t.block.X+64 || height > t.block.Y+64 {
		return errors.New("a JPEG of another size than its strip or tile")
	}
	file = append(file, 0xff, jpegEnd)
	at := 3 * (part.Min.Y*t.width + part.Min.X)
	if err := jpeg(file, part.Dx(), part.Dy(), rgb[at:], 3*t.width); err != nil {
		return err
	}
	if t.photometric == tiffWhiteIsZero {
		for y := range part.Dy() {
			row := rgb[at+3*t.width*y:][:3*part.Dx()]
			for x := range row {
				row[x] = 255 - row[x]
			}
		}
	}
	return nil
}

// maxJPEGTables is the maximum size of the tables in a directory, in bytes.
const maxJPEGTables = 1<<16 - 1

// appendJPEG appends the tables of a JPEG and, if components is not 0, its frame and scans. It
// drops application markers, because the TIFF's tags define the meaning of the samples.
func appendJPEG(file, data []byte, components int) (joined []byte, width, height int, err error) {
	for at := 0; at+4 <= len(data); {
		marker := data[at+1]
		switch {
		case data[at] == 0xff && marker == jpegStart:
			at += 2
			continue
		case data[at] != 0xff || marker == 0xff:
			at++
			continue
		case marker == jpegEnd:
			return file, 0, 0, checkTables(components)
		case marker == jpegScan && (width == 0 || at+5 > len(data)):
			return nil, 0, 0, errors.New("a JPEG without a frame")
		case marker == jpegScan && int(data[at+4]) != components: // decoding it would take the memory of a progressive JPEG
			return nil, 0, 0, unsupported("JPEG compression with a scan for each component")
		case marker == jpegScan:
			return append(file, data[at:]...), width, height, nil
		}
		size := int(data[at+2])<<8 | int(data[at+3])
		if size < 2 || at+2+size > len(data) {
			break
		}
		segment := data[at : at+2+size]
		at += len(segment)
		if isFrame(marker) {
			if height, width, err = readFrame(segment, components); err != nil {
				return nil, 0, 0, err
			}
		}
		if marker < 0xe0 || marker > 0xef && marker != 0xfe {
			file = append(file, segment...)
		}
	}
	return file, 0, 0, checkTables(components)
}

// checkTables returns an error if a JPEG with scans was expected, because this JPEG has ended
// without one.
func checkTables(components int) error {
	if components != 0 {
		return io.ErrUnexpectedEOF
	}
	return nil
}

// isFrame reports whether a marker starts the header of a frame.
func isFrame(marker byte) bool {
	return marker >= 0xc0 && marker <= 0xcf && marker != 0xc4 && marker != 0xc8 && marker != 0xcc
}

// readFrame returns the size in the header of a frame.
func readFrame(segment []byte, components int) (height, width int, err error) {
	switch {
	case segment[1] > 0xc1:
		return 0, 0, unsupported("JPEG compression other than baseline")
	case len(segment) < 10 || int(segment[9]) != components:
		return 0, 0, errors.New("a JPEG with another number of components than the TIFF")
	}
	return int(segment[5])<<8 | int(segment[6]), int(segment[7])<<8 | int(segment[8]), nil
}
