package mask

import (
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"hash/crc32"
	"math/rand/v2"
	"os"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/imageloader/transform"
	"github.com/torchstream/torchstream/internal/imagecapi"
	"github.com/torchstream/torchstream/tensor"
)

// goldenMasks holds torchvision's results (testdata/make_masks.py).
type goldenMasks struct {
	Nearest [][3]int
	Crops   [][10]any // width, height, classes, x, y, w, h, size, flip, CRC-32
	Resizes [][5]int  // width, height, resize, size, CRC-32
	Moves   map[string][][3]int
	Files   map[string][4]any // file, width, height, CRC-32
}

func readGoldenMasks(t testing.TB) *goldenMasks {
	t.Helper()
	data, err := os.ReadFile("testdata/masks.json")
	if err != nil {
		t.Fatal(err)
	}
	g := &goldenMasks{}
	if err := json.Unmarshal(data, g); err != nil {
		t.Fatal(err)
	}
	return g
}

// classesCRC returns the checksum of an int64 mask, as make_masks.py computes it.
func classesCRC(mask []byte) int {
	var b []byte
	for ; len(mask) > 0; mask = mask[8:] {
		b = append(b, mask[:2]...)
	}
	return int(crc32.ChecksumIEEE(b))
}

func TestNearestEqualsTorchvision(t *testing.T) {
	for _, c := range readGoldenMasks(t).Nearest {
		var line []byte
		for i := range c[1] {
			line = binary.LittleEndian.AppendUint16(line, uint16(nearest(i, c[0], c[1])))
		}
		if int(crc32.ChecksumIEEE(line)) != c[2] {
			t.Errorf("%d pixels to %d differ from torchvision's", c[0], c[1])
		}
	}
}

// decodeMask decodes a mask with a geometry, to int64.
func decodeMask(data []byte, width, height int, g imagecapi.Geometry, a *transform.Augmenter) ([]byte, error) {
	m := Decoder{DType: tensor.Int64}
	out := make([]byte, 8*g.WindowWidth*g.WindowHeight)
	return out, m.Decode(data, width, height, &g, a, out)
}

// whole is the identity geometry.
func whole(width, height int32) imagecapi.Geometry {
	return imagecapi.Geometry{CropWidth: width, CropHeight: height, ResizeWidth: width,
		ResizeHeight: height, WindowWidth: width, WindowHeight: height}
}

func TestClassesAreTheNumbersInTheFile(t *testing.T) {
	for name, c := range readGoldenMasks(t).Files {
		data, err := hex.DecodeString(c[0].(string))
		if err != nil {
			t.Fatal(err)
		}
		width, height := int(c[1].(float64)), int(c[2].(float64))
		got, err := decodeMask(data, width, height, whole(int32(width), int32(height)), nil)
		if err != nil || classesCRC(got) != int(c[3].(float64)) {
			t.Errorf("%s: other classes; %v", name, err)
		}
	}
}

func TestMaskCropsEqualTorchvision(t *testing.T) {
	golden := readGoldenMasks(t)
	for _, c := range golden.Crops {
		n := func(i int) int32 { return int32(c[i].(float64)) }
		g := imagecapi.Geometry{CropX: n(3), CropY: n(4), CropWidth: n(5), CropHeight: n(6),
			ResizeWidth: n(7), ResizeHeight: n(7),
			WindowWidth: n(7), WindowHeight: n(7), Flip: c[8].(bool)}
		got, err := decodeMask(archivetest.MaskPNG(t, int(n(0)), int(n(1)), int(n(2))), int(n(0)), int(n(1)), g, nil)
		if err != nil || classesCRC(got) != int(c[9].(float64)) {
			t.Errorf("crop %v differs from torchvision's; %v", c[:9], err)
		}
	}
	for _, c := range golden.Resizes {
		compiled, err := transform.Compile(transform.Transform{Size: c[3], Resize: c[2]})
		if err != nil {
			t.Fatal(err)
		}
		var g imagecapi.Geometry
		if err := compiled.Geometry(rand.New(rand.NewPCG(1, 1)),
			&imagecapi.Info{Width: int32(c[0]), Height: int32(c[1])}, &g); err != nil {
			t.Fatal(err)
		}
		got, err := decodeMask(archivetest.MaskPNG(t, c[0], c[1], 21), c[0], c[1], g, nil)
		if err != nil || classesCRC(got) != c[4] {
			t.Errorf("resize %v differs from torchvision's; %v", c[:4], err)
		}
	}
}

// TestMaskStepsEqualTorchvision compares the steps of Transform.Ops on masks with torchvision's.
func TestMaskStepsEqualTorchvision(t *testing.T) {
	pad := transform.Pad{Padding: [4]int{3, 5, 7, 1}, Fill: transform.Color{9, 9, 9}}
	edge := transform.Pad{Padding: pad.Padding, Mode: transform.PadEdge}
	moves := map[string][]transform.Op{
		"rotation":     {transform.RandomRotation{Degrees: [2]float64{33.5, 33.5}, Interpolation: transform.Bilinear}},
		"quarter turn": {transform.RandomRotation{Degrees: [2]float64{90, 90}}},
		"affine": {transform.RandomAffine{Degrees: [2]float64{-20, -20}, Scale: [2]float64{1.25, 1.25},
			Shear:         [4]float64{5, 5, -7, -7},
			Interpolation: transform.Bilinear, Fill: transform.Color{1, 2, 3}}},
		"flip":     {transform.RandomVerticalFlip{P: 1}},
		"pad":      {pad, transform.CenterCrop{Size: 32}},
		"pad edge": {edge, transform.CenterCrop{Size: 32}},
		"colours": {transform.RandomInvert{P: 1}, transform.ColorJitter{Brightness: 0.4},
			transform.GaussianBlur{}, transform.RandomErasing{P: 1},
			transform.GaussianNoise{}, transform.RandomEqualize{P: 1}},
	}
	golden := readGoldenMasks(t).Moves
	if len(golden) != len(moves) {
		t.Fatalf("%d kinds of moves are torchvision's, %d are compared", len(golden), len(moves))
	}
	for name, ops := range moves {
		compiled, err := transform.Compile(transform.Transform{Size: 32, Ops: ops})
		if err != nil {
			t.Fatal(err)
		}
		a, err := compiled.NewAugmenter()
		if err != nil {
			t.Fatal(err)
		}
		defer a.Close()
		for _, c := range golden[name] {
			if err := a.Apply(rand.New(rand.NewPCG(1, 1)), make([]byte, 3*32*32)); err != nil {
				t.Fatal(err)
			}
			if a.Moves() != (name != "colours") {
				t.Errorf("%s: moves pixels: %v", name, a.Moves())
			}
			m := Decoder{DType: tensor.Int64, Fill: c[1]}
			g, got := whole(32, 32), make([]byte, 8*32*32)
			if err := m.Decode(archivetest.MaskPNG(t, 32, 32, c[0]), 32, 32, &g, a, got); err != nil ||
				classesCRC(got) != c[2] {
				t.Errorf("%s of %d classes, fill %d, differs from torchvision's; %v", name, c[0], c[1], err)
			}
		}
	}
}

// TestSmallMaskFileTakesNoMemory: a mask too large for its file size is rejected before memory is
// allocated.
func TestSmallMaskFileTakesNoMemory(t *testing.T) {
	data := archivetest.PNGBomb(t, 30_000, 30_000)
	allocated := testing.AllocsPerRun(1, func() {
		if _, err := decodeMask(data, 30_000, 30_000, whole(1, 1), nil); !errors.Is(err,
			imagecapi.CodeDecode) || !strings.Contains(err.Error(), "too few") {
			t.Errorf("error %v, want the error %v with %q", err, imagecapi.CodeDecode, "too few")
		}
	})
	if allocated > 100 {
		t.Errorf("%v allocations, want at most 100", allocated)
	}
}

// FuzzMask: decoding any file as a mask returns classes or an error.
func FuzzMask(f *testing.F) {
	for _, file := range readGoldenMasks(f).Files {
		data, err := hex.DecodeString(file[0].(string))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data, true)
	}
	f.Fuzz(func(t *testing.T, data []byte, sums bool) {
		if sums {
			fixSums(data)
		}
		dtype := tensor.Int64
		if len(data) > 0 && data[0]&1 == 0 {
			dtype = tensor.Uint8
		}
		m := Decoder{DType: dtype}
		g := imagecapi.Geometry{CropX: 3, CropY: 1, CropWidth: 15, CropHeight: 16, ResizeWidth: 11,
			ResizeHeight: 10, WindowX: 1, WindowWidth: 9, WindowHeight: 10, Flip: true}
		err := m.Decode(data, 23, 17, &g, nil, make([]byte, 8*9*10))
		if err != nil && !errors.Is(err, imagecapi.CodeDecode) &&
			!errors.Is(err, imagecapi.CodeUnsupported) && !errors.Is(err, ErrSize) {
			t.Errorf("error %v", err)
		}
	})
}

// fixSums corrects the checksums of a PNG's chunks.
func fixSums(data []byte) {
	for at := 8; at+12 <= len(data); {
		n := int(binary.BigEndian.Uint32(data[at:]))
		if n > len(data)-at-12 {
			return
		}
		binary.BigEndian.PutUint32(data[at+8+n:], crc32.ChecksumIEEE(data[at+4:at+8+n]))
		at += 12 + n
	}
}
