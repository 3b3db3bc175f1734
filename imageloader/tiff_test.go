package imageloader

import (
	"bytes"
	"cmp"
	"compress/zlib"
	"encoding/binary"
	"fmt"
	"image"
	"image/color"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"golang.org/x/image/tiff"

	"github.com/torchstream/torchstream/imageloader/internal/raster"
)

// Values of a TIFF's compression.
const (
	tiffUncompressed = 1
	tiffLZW          = 5
	tiffDeflate      = 8
	tiffPackBits     = 32773
	tiffDeflateOld   = 32946
)

// madeTIFF describes a TIFF that build makes.
type madeTIFF struct {
	order         binary.AppendByteOrder
	width, height int
	photometric   int // 0: white is 0; 1: black is 0; 2: RGB; 3: palette
	samples, bits int
	extra         int // kind of the fourth sample: 1: associated, 2: unassociated alpha
	compression   int
	predictor     bool
	tile          image.Point // zero: strips
	rows          int         // rows of a strip
}

func (m madeTIFF) String() string {
	return fmt.Sprintf("%v %dx%d photometric %d, %d samples of %d bits, extra %d, compression %d, "+
		"predictor %v, tile %v, %d rows", m.order, m.width, m.height, m.photometric, m.samples, m.bits,
		m.extra, m.compression, m.predictor, m.tile, m.rows)
}

// build makes the file. content returns the uncompressed bytes of block k, which has the given
// number of rows of stride bytes.
func (m madeTIFF) build(t testing.TB, content func(k, rows, stride int) []byte) []byte {
	t.Helper()
	data, _ := m.buildBlocks(t, content)
	return data
}

// buildBlocks is build, and also returns the end of the blocks, which start at byte 8.
func (m madeTIFF) buildBlocks(t testing.TB, content func(k, rows, stride int) []byte) (data []byte, end int) {
	t.Helper()
	block, blocks := image.Pt(m.width, min(m.rows, m.height)), 0
	if m.tile != (image.Point{}) {
		block = m.tile
	}
	across, down := (m.width+block.X-1)/block.X, (m.height+block.Y-1)/block.Y
	data = []byte("II*\x00\x00\x00\x00\x00")
	if m.order == binary.AppendByteOrder(binary.BigEndian) {
		copy(data, "MM\x00*")
	}
	var offsets, counts []byte
	for ; blocks < across*down; blocks++ {
		rows := block.Y
		if m.tile == (image.Point{}) {
			rows = min(rows, m.height-blocks*block.Y)
		}
		raw := content(blocks, rows, (block.X*m.samples*m.bits+7)/8)
		packed := raw
		switch m.compression {
		case tiffDeflate:
			var b bytes.Buffer
			z := zlib.NewWriter(&b)
			if _, err := z.Write(raw); err != nil {
				t.Fatal(err)
			}
			if err := z.Close(); err != nil {
				t.Fatal(err)
			}
			packed = b.Bytes()
		case tiffPackBits:
			packed = nil
			for len(raw) > 0 {
				same := 1
				for same < min(len(raw), 128) && raw[same] == raw[0] {
					same++
				}
				if same > 1 {
					packed, raw = append(packed, byte(1-same), raw[0]), raw[same:]
				} else {
					n := min(len(raw), 3)
					packed, raw = append(append(packed, byte(n-1)), raw[:n]...), raw[n:]
				}
			}
		case tiffLZW: // without compression: a clear code every 200 literals keeps codes at 9 bits
			var bits, have uint64
			packed = nil
			put := func(code uint64) {
				bits, have = bits<<9|code, have+9
				for ; have >= 8; have -= 8 {
					packed = append(packed, byte(bits>>(have-8)))
				}
			}
			for i, b := range raw {
				if i%200 == 0 {
					put(256)
				}
				put(uint64(b))
			}
			put(257)
			put(0) // fills up the last byte
		}
		offsets, counts = m.order.AppendUint32(offsets, uint32(len(data))), m.order.AppendUint32(counts,
			uint32(len(packed)))
		data = append(data, packed...)
	}
	end = len(data)
	var entries [][]byte
	entry := func(tag, kind, count int, value []byte) {
		e := m.order.AppendUint16(m.order.AppendUint16(nil, uint16(tag)), uint16(kind))
		e = m.order.AppendUint32(e, uint32(count))
		if len(value) > 4 {
			e = m.order.AppendUint32(e, uint32(len(data)))
			data = append(data, value...)
		} else {
			e = append(append(e, value...), make([]byte, 4-len(value))...)
		}
		entries = append(entries, e)
	}
	short := func(values ...int) (b []byte) {
		for _, v := range values {
			b = m.order.AppendUint16(b, uint16(v))
		}
		return b
	}
	entry(256, 3, 1, short(m.width))
	entry(257, 3, 1, short(m.height))
	entry(258, 3, m.samples, short(slices.Repeat([]int{m.bits}, m.samples)...))
	entry(259, 3, 1, short(m.compression))
	entry(262, 3, 1, short(m.photometric))
	entry(277, 3, 1, short(m.samples))
	if m.predictor {
		entry(317, 3, 1, short(2))
	}
	if m.photometric == 3 {
		palette := make([]int, 3<<min(m.bits, 8))
		for i := range palette {
			palette[i] = i * 40503 % 65536
		}
		entry(320, 3, len(palette), short(palette...))
	}
	if m.samples == 4 {
		entry(338, 3, 1, short(m.extra))
	}
	if m.tile == (image.Point{}) {
		entry(273, 4, blocks, offsets)
		entry(278, 3, 1, short(m.rows))
		entry(279, 4, blocks, counts)
	} else {
		entry(322, 3, 1, short(block.X))
		entry(323, 3, 1, short(block.Y))
		entry(324, 4, blocks, offsets)
		entry(325, 4, blocks, counts)
	}
	slices.SortFunc(entries, func(a, b []byte) int { return cmp.Compare(tagOf(m.order, a), tagOf(m.order, b)) })
	copy(data[4:8], m.order.AppendUint32(nil, uint32(len(data))))
	data = m.order.AppendUint16(data, uint16(len(entries)))
	for _, e := range entries {
		data = append(data, e...)
	}
	return append(data, 0, 0, 0, 0), end
}

func tagOf(order binary.AppendByteOrder, entry []byte) uint16 {
	return order.(binary.ByteOrder).Uint16(entry)
}

// libraryRGB decodes with golang.org/x/image/tiff alone.
func libraryRGB(data []byte) ([]byte, error) {
	m, err := tiff.Decode(bytes.NewReader(data))
	if err != nil {
		return nil, err
	}
	var rgb []byte
	pick := func(pix []byte, size, r, g, b int) {
		for ; len(pix) > 0; pix = pix[size:] {
			rgb = append(rgb, pix[r], pix[g], pix[b])
		}
	}
	switch m := m.(type) {
	case *image.Paletted:
		for _, index := range m.Pix {
			c := color.NRGBAModel.Convert(m.Palette[index]).(color.NRGBA)
			rgb = append(rgb, c.R, c.G, c.B)
		}
	case *image.RGBA:
		pick(m.Pix, 4, 0, 1, 2)
	case *image.NRGBA:
		pick(m.Pix, 4, 0, 1, 2)
	case *image.RGBA64:
		pick(m.Pix, 8, 0, 2, 4)
	case *image.NRGBA64:
		pick(m.Pix, 8, 0, 2, 4)
	case *image.Gray:
		pick(m.Pix, 1, 0, 0, 0)
	case *image.Gray16:
		pick(m.Pix, 2, 0, 0, 0)
	default:
		return nil, fmt.Errorf("%T", m)
	}
	return rgb, nil
}

// TestTIFFEqualsTheLibrary: files that golang.org/x/image/tiff decodes at once are decoded row by
// row to the same pixels, with damaged blocks too. (The library reads whole blocks, so it refuses
// damage after the pixels.)
func TestTIFFEqualsTheLibrary(t *testing.T) {
	rng := rand.New(rand.NewPCG(57, 8))
	var files, damaged, decoded int
	used := func(n int) []byte { return bytes.Repeat([]byte{0xa5}, n) } // memory left by an earlier image
	check := func(what any, data []byte) {
		want, wantErr := libraryRGB(data)
		if wantErr != nil {
			return
		}
		decoded++
		var got []byte
		image, err := raster.ParseTIFF(data)
		if err == nil {
			err = image.Check()
		}
		if err == nil {
			h := image.Header()
			got = used(3 * h.Width * h.Height)
			err = image.Decode(got, nil)
		}
		if err != nil && strings.Contains(err.Error(), zlib.ErrChecksum.Error()) {
			return // the library does not always read that far
		}
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("%v: error %v, or other pixels", what, err)
		}
	}
	random := func(_, rows, stride int) []byte {
		b := make([]byte, rows*stride)
		for i := range b {
			b[i] = byte(rng.Uint32() >> (rng.Uint32() % 32))
		}
		return b
	}
	build := func(m madeTIFF) {
		data, end := m.buildBlocks(t, random)
		files++
		check(m, data)
		for range 10 {
			changed := slices.Clone(data)
			for range 1 + rng.IntN(3) {
				changed[8+rng.IntN(end-8)] = byte(rng.Uint32())
			}
			damaged++
			check(fmt.Sprintf("%v, damaged", m), changed)
		}
	}
	kinds := [][4]int{{0, 1, 1}, {0, 1, 8}, {0, 1, 16}, {1, 1, 1}, {1, 1, 8}, {1, 1, 16}, {2, 3, 8},
		{2, 3, 16}, {2, 4, 8, 2}, {2, 4, 16, 2}, {3, 1, 1}, {3, 1, 8}}
	for _, order := range []binary.AppendByteOrder{binary.LittleEndian, binary.BigEndian} {
		for _, kind := range kinds {
			for _, compression := range []int{tiffUncompressed, tiffLZW, tiffDeflate, tiffPackBits, tiffDeflateOld} {
				for _, tile := range []image.Point{{}, {16, 16}, {32, 48}} {
					m := madeTIFF{order, 1 + rng.IntN(70), 1 + rng.IntN(70), kind[0], kind[1], kind[2],
						kind[3], compression, false, tile, 1 + rng.IntN(80)}
					build(m)
					if compression != tiffUncompressed && compression != tiffPackBits && kind[2] >= 8 {
						m.predictor = true
						build(m)
					}
				}
			}
		}
	}
	if decoded < files+damaged/3 {
		t.Errorf("%d of %d files, and of %d damaged ones, could be decoded, want at least %v",
			decoded, files, damaged, files+damaged/3)
	}
}
