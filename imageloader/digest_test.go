package imageloader_test

// TestDigests pins the bytes of every batch of two epochs, for many configurations, against
// testdata/digests.txt. It uses only the public API, so that it survives any internal change. A
// change that is meant to change bytes rewrites the file:
//
//	go test ./imageloader -run TestDigests -update
//
// With -run TestDigests/NAME this replaces only the lines of those configurations.
//
// A digest depends on the files in testdata, cshim/test/data and examples/data, on the versions of
// the gzip and zstd compressors in go.mod (the blocks of an archive decide whether it has random
// access), and on math/rand/v2. It does not depend on the instructions of an amd64 CPU: the shim's
// tests check that its vectorised kernels give the bytes of the scalar ones, and libjpeg-turbo
// gives the same bytes with SSE2 and AVX2. Without SIMD (JSIMD_FORCENONE=1) libjpeg-turbo decodes
// some damaged files to other pixels, so configurations over the damaged archive need the SIMD that
// every amd64 build has. On other architectures Go may fuse a multiplication with an addition,
// which can move a crop: the test skips itself there.

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"hash"
	"image"
	_ "image/jpeg"
	"image/png"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	pinnedgzip "github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"

	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/imageloader/transform"
	"github.com/torchstream/torchstream/tensor"
)

var update = flag.Bool("update", false, "write testdata/digests.txt anew")

const digestFile = "testdata/digests.txt"

// Only the code from here to the archives refers to policies, decode paths and transforms.

const (
	digestSkip       = imageloader.Skip
	digestSubstitute = imageloader.Substitute
	digestRefuse     = imageloader.Refuse
	digestPartial    = imageloader.Partial
)

// entryPointsUsed reports whether a loader decoded an image by its entry points.
func entryPointsUsed(s imageloader.Stats) bool { return s.Decoded[imageloader.ByEntryPoints] > 0 }

func digestTrain(size int) imageloader.Transform        { return imageloader.Train(size) }
func digestEval(resize, size int) imageloader.Transform { return imageloader.Eval(resize, size) }

// uprighted returns t with the orientation of EXIF applied.
func uprighted(t imageloader.Transform) imageloader.Transform {
	t.ApplyEXIFOrientation = true
	return t
}

// digestTransforms returns transforms to 32 x 32 pixels by name.
func digestTransforms() map[string]imageloader.Transform {
	list := map[string]imageloader.Transform{
		"train": imageloader.Train(32),
		"eval":  imageloader.Eval(40, 32),
		"zero":  {},
		"narrow boxes": {Size: 32, RandomResizedCrop: true, Scale: [2]float64{0.05, 0.3},
			Ratio: [2]float64{0.2, 5}, FlipP: 1},
		"dct scaling": {Size: 16, Resize: 17, RandomCrop: true, FlipP: 0.5, DCTScaling: true},
		"bicubic":     {Size: 32, RandomResizedCrop: true, FlipP: 0.5, Interpolation: transform.Bicubic},
		"nearest":     {Size: 32, Resize: 48, RandomCrop: true, Interpolation: transform.Nearest},
		"random crop": {Size: 32, Resize: 48, RandomCrop: true, FlipP: 0.3},
		"enlarged":    {Size: 160, Resize: 200},
		"mixup":       {Size: 32, RandomResizedCrop: true, Mix: []transform.BatchOp{transform.MixUp{Alpha: 0.4}}},
		"cutmix":      {Size: 32, RandomResizedCrop: true, Mix: []transform.BatchOp{transform.CutMix{}}},
		"mixup or cutmix": {Size: 32, RandomCrop: true, Ops: []transform.Op{transform.RandAugment{}},
			Mix: []transform.BatchOp{transform.MixUp{}, transform.CutMix{Alpha: 2}}},
		"several ops": {Size: 32, RandomResizedCrop: true, FlipP: 0.5, Ops: []transform.Op{
			transform.RandomCrop{Padding: [4]int{4, 4, 4, 4}}, transform.ColorJitter{Brightness: 0.4, Saturation: 0.4},
			transform.TrivialAugmentWide{}, transform.GaussianNoise{}, transform.RandomErasing{}}},
	}
	for name, ops := range digestOps() {
		list["op "+name] = imageloader.Transform{Size: 32, Resize: 40, Ops: ops}
	}
	return list
}

// digestOps returns operations of every kind by name.
func digestOps() map[string][]transform.Op {
	color := transform.Color{200, 100, 50}
	centre := &[2]float64{10, 12.5}
	return map[string][]transform.Op{
		"AugMix": {transform.AugMix{}},
		"AugMix partial": {transform.AugMix{Severity: 9, MixtureWidth: 2, ChainDepth: 2, Alpha: 0.3, PartialOps: true,
			Interpolation: transform.Nearest, Fill: color}, transform.RandomHorizontalFlip{}},
		"AutoAugment CIFAR10":  {transform.AutoAugment{Policy: transform.CIFAR10Policy, Fill: color}},
		"AutoAugment ImageNet": {transform.AutoAugment{}},
		"AutoAugment SVHN": {transform.AutoAugment{Policy: transform.SVHNPolicy,
			Interpolation: transform.Bilinear}},
		"CenterCrop": {transform.CenterCrop{Size: 20}, transform.CenterCrop{Size: 32}},
		"ColorJitter": {transform.ColorJitter{Brightness: 0.4,
			Contrast: 0.4, Saturation: 0.4, Hue: 0.2}},
		"ColorJitter ranges": {transform.ColorJitter{BrightnessRange: [2]float64{0.2, 0.9},
			HueRange: [2]float64{0.1, 0.3}}},
		"Func":              {transform.Func(digestFunc)},
		"Func that rejects": {transform.Grayscale{}, transform.Func(digestReject)},
		"GaussianBlur":      {transform.GaussianBlur{}},
		"GaussianBlur wide": {transform.GaussianBlur{KernelSize: [2]int{5, 9},
			Sigma: [2]float64{1, 3}}},
		"GaussianNoise": {transform.GaussianNoise{Mean: 0.05, Sigma: 0.2}},
		"Grayscale":     {transform.Grayscale{}},
		"Pad constant": {transform.Pad{Padding: [4]int{3, 5, 7, 1},
			Fill: color}, transform.CenterCrop{Size: 32}},
		"Pad edge": {transform.Pad{Padding: [4]int{9, 2, 0, 4},
			Mode: transform.PadEdge}, transform.RandomCrop{Size: 32}},
		"Pad reflect": {transform.Pad{Padding: [4]int{9, 2, 0, 4},
			Mode: transform.PadReflect}, transform.RandomCrop{Size: 32}},
		"RandAugment": {transform.RandAugment{}},
		"RandAugment strong": {transform.RandAugment{NumOps: 3, Magnitude: 25,
			Interpolation: transform.Bilinear, Fill: color}},
		"RandomAdjustSharpness": {transform.RandomAdjustSharpness{SharpnessFactor: 2.5}},
		"RandomAffine": {transform.RandomAffine{Degrees: [2]float64{-30, 30}, Translate: [2]float64{0.2, 0.1},
			Scale: [2]float64{0.7, 1.4}, Shear: [4]float64{-10, 10, -5, 5}, Fill: color}},
		"RandomAffine bilinear": {transform.RandomAffine{Degrees: [2]float64{0, 90},
			Interpolation: transform.Bilinear, Center: centre}},
		"RandomApply": {transform.RandomApply{Ops: []transform.Op{transform.RandomInvert{P: 1},
			transform.GaussianBlur{}}, P: 0.4}},
		"RandomAutocontrast":       {transform.RandomAutocontrast{}},
		"RandomChannelPermutation": {transform.RandomChannelPermutation{}},
		"RandomChoice": {transform.RandomChoice{Ops: []transform.Op{transform.Grayscale{},
			transform.RandomInvert{P: 1}}, P: []float64{1, 3}}},
		"RandomCrop symmetric": {transform.RandomCrop{Padding: [4]int{4, 4, 4, 4},
			Mode: transform.PadSymmetric}},
		"RandomEqualize":       {transform.RandomEqualize{}},
		"RandomErasing":        {transform.RandomErasing{P: 0.9, Value: color}},
		"RandomErasing random": {transform.RandomErasing{P: 0.9, Random: true}},
		"RandomGrayscale":      {transform.RandomGrayscale{P: 0.5}},
		"RandomHorizontalFlip": {transform.RandomHorizontalFlip{}},
		"RandomInvert":         {transform.RandomInvert{}},
		"RandomOrder": {transform.RandomOrder{Ops: []transform.Op{transform.RandomPosterize{Bits: 3},
			transform.RandomSolarize{Threshold: 128}, transform.GaussianBlur{}}}},
		"RandomPerspective": {transform.RandomPerspective{Fill: color}},
		"RandomPerspective nearest": {transform.RandomPerspective{DistortionScale: 0.9,
			P: 1, Interpolation: transform.Nearest}},
		"RandomPhotometricDistort": {transform.RandomPhotometricDistort{}},
		"RandomPosterize":          {transform.RandomPosterize{Bits: 2}},
		"RandomRotation": {transform.RandomRotation{Degrees: [2]float64{-45, 45},
			Interpolation: transform.Bilinear, Fill: color}},
		"RandomRotation about a point": {transform.RandomRotation{Degrees: [2]float64{-180, 180},
			Center: centre}},
		"RandomRotation that expands": {transform.RandomRotation{Degrees: [2]float64{10, 80},
			Expand: true}, transform.CenterCrop{Size: 32}},
		"RandomSolarize":     {transform.RandomSolarize{Threshold: 100}},
		"RandomVerticalFlip": {transform.RandomVerticalFlip{}},
		"TrivialAugmentWide": {transform.TrivialAugmentWide{}},
		"TrivialAugmentWide with few bins": {transform.TrivialAugmentWide{NumMagnitudeBins: 5,
			Interpolation: transform.Bilinear, Fill: color}},
	}
}

// digestFunc writes random numbers into the first row and mirrors the last row.
func digestFunc(rng *rand.Rand, image *transform.Pixels) error {
	for i := range image.Pix[:3*image.Width] {
		image.Pix[i] = byte(rng.Uint32())
	}
	slices.Reverse(image.Pix[(image.Height-1)*image.Stride:][:3*image.Width])
	return nil
}

// digestReject makes every fifth sample a bad sample on average.
func digestReject(rng *rand.Rand, image *transform.Pixels) error {
	if rng.IntN(5) == 0 {
		return errors.New("rejected by the test")
	}
	return digestFunc(rng, image)
}

// The archives.

// digestMember is a file or a link of an archive. A link has no data.
type digestMember struct {
	name, data string
	link       bool
}

func readDigestInput(t *testing.T, file string) string {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// photographs returns the first n samples of examples/data: small JPEG files of every common kind
// and a few PNG files, in 12 classes.
func photographs(t *testing.T, n int) (list []digestMember) {
	t.Helper()
	z, err := gzip.NewReader(strings.NewReader(readDigestInput(t, "../examples/data/photos-train.tgz")))
	if err != nil {
		t.Fatal(err)
	}
	r := tar.NewReader(z)
	for len(list) < n {
		h, err := r.Next()
		if err != nil {
			t.Fatal(err)
		}
		data, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, digestMember{name: h.Name, data: string(data)})
	}
	return list
}

// largerJPEGs returns files of 8 to 30 KB, each several times under different names. They are large
// enough for entry points and random access.
func largerJPEGs(t *testing.T) (list []digestMember) {
	t.Helper()
	files := []string{"420.jpg", "tall.jpg", "422.jpg", "444.jpg", "restart.jpg", "progressive.jpg", "cmyk.jpg"}
	for i := range 70 {
		data := readDigestInput(t, filepath.Join("../cshim/test/data", files[i%len(files)]))
		list = append(list, digestMember{name: fmt.Sprintf("train/class%d/%03d.jpg", i*3%5, i), data: data})
	}
	return list
}

// everyFormat returns each image of testdata and of cshim/test/data, with its extension as its
// class. Only the fax is unsupported.
func everyFormat(t *testing.T) (list []digestMember) {
	t.Helper()
	for _, dir := range []string{"../cshim/test/data", "testdata", "testdata/formats"} {
		files, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			extension := strings.TrimPrefix(path.Ext(f.Name()), ".")
			if slices.Contains([]string{"jpg", "png", "webp", "gif", "bmp", "tiff"}, extension) {
				name := extension + "/" + path.Base(dir) + "-" + f.Name()
				list = append(list, digestMember{name: name, data: readDigestInput(t, filepath.Join(dir, f.Name()))})
			}
		}
	}
	return list
}

// damagedMembers returns photographs, bad samples of every kind that a tar writer makes, and
// members that are not samples.
func damagedMembers(t *testing.T) (list []digestMember) {
	t.Helper()
	list = []digestMember{{name: "README", data: "no image"}, {name: "notes/a.txt", data: "no class"}}
	for i, m := range photographs(t, 150) {
		switch data := []byte(m.data); i % 13 {
		case 3:
			m.data = m.data[:len(data)*2/5]
		case 5:
			for k := range min(100, len(data)/4) {
				data[len(data)/2+k] = 0xfe
			}
			m.data = string(data)
		case 7:
			m.data = m.data[:20]
		}
		if i%10 == 9 {
			class := path.Dir(m.name)
			list = append(list, []digestMember{
				{name: class + "/empty.jpg"}, {name: class + "/text.jpg", data: "text"},
				{name: class + "/link.jpg", link: true},
				{name: class + "/fax.tiff", data: readDigestInput(t, "testdata/formats/fax.tiff")},
				{name: class + "/cut.gif", data: readDigestInput(t, "testdata/formats/palette.gif")[:900]},
				{name: class + "/cut.webp", data: readDigestInput(t, "../cshim/test/data/lossy.webp")[:4000]},
				{name: class + "/cut.png", data: readDigestInput(t, "../cshim/test/data/rgb.png")[:2000]},
			}[i/10%7])
		}
		list = append(list, m)
	}
	return list
}

// webDataset returns photographs with their labels in other members of their groups. One photograph
// has no label.
func webDataset(t *testing.T, numbers bool) (list []digestMember) {
	t.Helper()
	for i, m := range photographs(t, 90) {
		key, label := fmt.Sprintf("shard/%05d", i), path.Base(path.Dir(m.name))
		image := digestMember{name: key + path.Ext(m.name), data: m.data}
		switch {
		case i == 40:
			list = append(list, image)
		case numbers:
			list = append(list, digestMember{name: key + ".cls", data: fmt.Sprint(i * 5 % 7)}, image)
		case i%2 == 0:
			list = append(list, image,
				digestMember{name: key + ".json", data: fmt.Sprintf(`{"label":%q,"by":"somebody"}`, label)})
		default:
			list = append(list, image, digestMember{name: key + ".cls", data: label + "\n"},
				digestMember{name: key + ".txt", data: "a caption"})
		}
	}
	return list
}

// maskedMembers returns photographs and their masks. Some masks are truncated or missing.
func maskedMembers(t *testing.T) (list []digestMember) {
	t.Helper()
	encoder := png.Encoder{CompressionLevel: png.NoCompression} // the same bytes in every version
	for i, m := range photographs(t, 60) {
		config, _, err := image.DecodeConfig(strings.NewReader(m.data))
		if err != nil {
			t.Fatal(err)
		}
		mask := image.NewGray(image.Rect(0, 0, config.Width, config.Height))
		for k := range mask.Pix {
			mask.Pix[k] = byte((k%mask.Stride*7 + k/mask.Stride*13 + i) % 21)
		}
		var data bytes.Buffer
		if err := encoder.Encode(&data, mask); err != nil {
			t.Fatal(err)
		}
		if i%17 == 3 {
			data.Truncate(data.Len() / 2)
		}
		list = append(list, digestMember{name: fmt.Sprintf("images/%02d%s", i, path.Ext(m.name)), data: m.data})
		if i%17 != 5 {
			list = append(list, digestMember{name: fmt.Sprintf("masks/%02d.png", i), data: data.String()})
		}
	}
	return list
}

// tarOf returns an archive, and the offset of each member.
func tarOf(t *testing.T, members []digestMember) (archive []byte, begins []int) {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, m := range members {
		if err := w.Flush(); err != nil {
			t.Fatal(err)
		}
		begins = append(begins, b.Len())
		h := &tar.Header{Name: m.name, Size: int64(len(m.data)), Mode: 0o644, Typeflag: tar.TypeReg}
		if m.link {
			h.Typeflag, h.Linkname = tar.TypeSymlink, "elsewhere"
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(m.data)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes(), begins
}

// gzipOf compresses data. A block starts at each of places, so that random access can start there.
func gzipOf(t *testing.T, data []byte, places []int) []byte {
	t.Helper()
	var b bytes.Buffer
	w := pinnedgzip.NewWriter(&b)
	at := 0
	for _, place := range append(slices.Clone(places), len(data)) {
		if _, err := w.Write(data[at:place]); err != nil {
			t.Fatal(err)
		}
		if err := w.Flush(); err != nil {
			t.Fatal(err)
		}
		at = place
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// zstdOf compresses data into frames that start at places.
func zstdOf(t *testing.T, data []byte, places []int) (out []byte) {
	t.Helper()
	w, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1))
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	at := 0
	for _, place := range append(slices.Clone(places), len(data)) {
		if place > at {
			out = w.EncodeAll(data[at:place], out)
		}
		at = place
	}
	return out
}

// digestArchives writes all archives into one directory and returns it.
func digestArchives(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	put := func(name string, data []byte) {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	photos := photographs(t, 210)
	whole, _ := tarOf(t, photos)
	put("photos.tar", whole)
	put("photos.tgz", gzipOf(t, whole, nil))
	put("photos.tar.zst", zstdOf(t, whole, nil))
	put("cut.tgz", gzipOf(t, whole, nil)[:150_000])
	few, _ := tarOf(t, photos[:48])
	put("few.tar", few)
	for i, shard := range [][]digestMember{photos[:80], photos[80:95], photos[95:]} {
		data, _ := tarOf(t, shard)
		put(fmt.Sprintf("shard-%02d.tar", i), data)
		put(fmt.Sprintf("shard-%02d.tgz", i), gzipOf(t, data, nil))
	}
	large, begins := tarOf(t, largerJPEGs(t))
	put("large.tar", large)
	put("large.tgz", gzipOf(t, large, begins))
	put("large.tar.zst", zstdOf(t, large, begins))
	formats, _ := tarOf(t, everyFormat(t))
	put("formats.tar", formats)
	damaged, _ := tarOf(t, damagedMembers(t))
	put("damaged.tar", damaged)
	put("damaged.tgz", gzipOf(t, damaged, nil))
	names, _ := tarOf(t, webDataset(t, false))
	put("web.tar", names)
	numbers, _ := tarOf(t, webDataset(t, true))
	put("web-numbers.tgz", gzipOf(t, numbers, nil))
	masked, _ := tarOf(t, maskedMembers(t))
	put("masks.tar", masked)
	put("masks.tgz", gzipOf(t, masked, nil))
	for _, m := range photos {
		file := filepath.Join(dir, "directory", m.name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(m.data), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// memorySource is an object of a store in memory.
type memorySource struct{ data string }

func (s memorySource) Info() imageloader.SourceInfo {
	return imageloader.SourceInfo{Size: int64(len(s.data)), Version: "1"}
}

func (s memorySource) ReadRange(_ context.Context, offset, n int64) (io.ReadCloser, error) {
	return io.NopCloser(strings.NewReader(s.data[offset : offset+n])), nil
}

func (memorySource) Close() error { return nil }

// openDirectory opens store://FILE as a file of a directory.
func openDirectory(dir string) func(context.Context, string) (imageloader.Source, error) {
	return func(_ context.Context, url string) (imageloader.Source, error) {
		data, err := os.ReadFile(filepath.Join(dir, strings.TrimPrefix(url, "store://")))
		return memorySource{string(data)}, err
	}
}

// The configurations.

// indexUse selects how a configuration uses the archive's index.
type indexUse int

const (
	noIndex    indexUse = iota
	writeIndex          // the loader finds no index, and writes it
	madeIndex           // MakeIndex wrote it, and it gives the archive random access
	orderIndex          // MakeIndex wrote it, and it gives no random access
)

// digestConfig is a configuration. Its digest covers the batches of epochs 0 and 1 on every rank,
// unless it has a separate run.
type digestConfig struct {
	archive string // a path in the directory of archives, or a URL
	index   indexUse
	entries bool // entry points must have been used
	o       imageloader.Options
	run     func(t *testing.T, c digestConfig, h hash.Hash) // nil: runEpochs
}

var photoClasses = strings.Fields(
	"astronaut brick cameraman cat clock coffee galaxies grass gravel raccoon retina rocket")

// smallBuffer is smaller than every archive, so that a compressed archive is a stream.
const smallBuffer = 60_000

func digestConfigs(server, dir string) map[string]digestConfig {
	type options = imageloader.Options
	transforms := digestTransforms()
	train, eval := digestTrain(24), digestEval(28, 24)
	uneven := func(s imageloader.Sample) float64 { return float64(s.Index % 5) }
	configs := map[string]digestConfig{
		"format tar": {archive: "photos.tar", o: options{Transform: eval}},
		"format tar.gz": {archive: "photos.tgz",
			o: options{Transform: eval, ShuffleBytes: smallBuffer}},
		"format tar.gz in memory": {archive: "photos.tgz", o: options{Transform: eval}},
		"format tar.zst": {archive: "photos.tar.zst",
			o: options{Transform: eval, ShuffleBytes: smallBuffer}},
		"format directory":          {archive: "directory", o: options{Transform: eval}},
		"format directory shuffled": {archive: "directory", o: options{Transform: train, Shuffle: true}},
		"format shards of tar":      {archive: "shard-{00..02}.tar", o: options{Transform: train, Shuffle: true}},
		"format shards of tar.gz": {archive: "shard-{00..02}.tgz",
			o: options{Transform: train, Shuffle: true, ShuffleBytes: smallBuffer}},
		"format shards mixed": {archive: "shard-{00.tgz,01.tar,02.tgz}", o: options{Transform: eval}},
		"format shards by pattern": {archive: "shard-*.tgz", index: writeIndex,
			o: options{Transform: train, Shuffle: true}},
		"format http tar": {archive: server + "/photos.tar",
			o: options{Transform: train, Shuffle: true}},
		"format http tar.gz": {archive: server + "/photos.tgz",
			o: options{Transform: train, Shuffle: true, ShuffleBytes: smallBuffer}},
		"format http shards": {archive: server + "/shard-{00..02}.tgz", o: options{Transform: eval}},
		"format source": {archive: "store://photos.tgz",
			o: options{Transform: train, Shuffle: true, OpenSource: openDirectory(dir)}},
		"format source with index": {archive: "store://large.tgz", index: madeIndex,
			o: options{Transform: train, Shuffle: true, ShuffleBytes: smallBuffer, OpenSource: openDirectory(dir)}},
		"format webdataset": {archive: "web.tar",
			o: options{Transform: train, Shuffle: true, WebDataset: true}},
		"format webdataset numbers": {archive: "web-numbers.tgz", o: options{Transform: eval, WebDataset: true}},
		"format webdataset with index": {archive: "web-numbers.tgz", index: orderIndex,
			o: options{Transform: train, Shuffle: true, WebDataset: true, ShuffleBytes: smallBuffer}},
		"format webdataset some classes": {archive: "web.tar",
			o: options{Transform: eval, WebDataset: true, Classes: slices.Sorted(slices.Values(photoClasses))}},

		"images as stored": {archive: "formats.tar",
			o: options{Transform: transforms["eval"], BadSamples: digestSkip}},
		"images upright": {archive: "formats.tar",
			o: options{Transform: uprighted(transforms["eval"]), BadSamples: digestSkip}},
		"images upright, random crops": {archive: "formats.tar",
			o: options{Transform: uprighted(transforms["train"]), Shuffle: true, BadSamples: digestSkip}},

		"classes given, first pass": {archive: "photos.tgz",
			o: options{Transform: train, Classes: photoClasses, Shuffle: true, ShuffleBytes: smallBuffer}},
		"classes given, in memory": {archive: "photos.tgz",
			o: options{Transform: train, Classes: photoClasses, Shuffle: true}},
		"classes given, first pass, in order": {archive: "photos.tgz", index: writeIndex,
			o: options{Transform: train, Classes: photoClasses, ShuffleBytes: smallBuffer}},
		"classes given, first pass, large": {archive: "large.tgz", index: writeIndex,
			o: options{Transform: train, Classes: largeClasses, Shuffle: true, ShuffleBytes: smallBuffer}},
		"classes given, first pass, zstd, large": {archive: "large.tar.zst", index: writeIndex,
			o: options{Transform: train, Classes: largeClasses, Shuffle: true, ShuffleBytes: smallBuffer}},
		"classes given in another order": {archive: "photos.tar",
			o: options{Transform: train, Classes: reversed(photoClasses), Shuffle: true}},

		"index none": {archive: "large.tgz",
			o: options{Transform: train, Shuffle: true, ShuffleBytes: smallBuffer}},
		"index written": {archive: "large.tgz", index: writeIndex,
			o: options{Transform: train, Shuffle: true, ShuffleBytes: smallBuffer}},
		"index made tar": {archive: "large.tar", index: madeIndex, entries: true,
			o: options{Transform: train, Shuffle: true}},
		"index made tar.gz": {archive: "large.tgz", index: madeIndex, entries: true,
			o: options{Transform: train, Shuffle: true, ShuffleBytes: smallBuffer}},
		"index made tar.zst": {archive: "large.tar.zst", index: orderIndex, entries: true,
			o: options{Transform: train, Shuffle: true, ShuffleBytes: smallBuffer}},
		"index made tar.zst in memory": {archive: "large.tar.zst", index: orderIndex, entries: true,
			o: options{Transform: train, Shuffle: true}},
		"index made tar.gz in memory": {archive: "large.tgz", index: madeIndex, entries: true,
			o: options{Transform: train, Shuffle: true}},
		"index made tar.gz in order": {archive: "large.tgz", index: madeIndex, entries: true,
			o: options{Transform: train, ShuffleBytes: smallBuffer}},
		"index made, small samples": {archive: "photos.tgz", index: orderIndex,
			o: options{Transform: train, Shuffle: true, ShuffleBytes: smallBuffer}},
		"index trusted": {archive: "large.tgz", index: madeIndex, entries: true,
			o:   options{Transform: train, Shuffle: true, ShuffleBytes: smallBuffer, TrustIndex: true},
			run: runTwice},
		"index of an earlier process": {archive: "large.tgz", index: madeIndex, entries: true,
			o:   options{Transform: train, Shuffle: true, ShuffleBytes: smallBuffer},
			run: runTwice},
		"index without entry points": {archive: "large.tgz", index: madeIndex,
			o: options{Transform: train, Shuffle: true, ShuffleBytes: smallBuffer, NoEntryPoints: true}},
		"index, larger crops": {archive: "large.tar", index: madeIndex, entries: true,
			o: options{Transform: transforms["enlarged"], Shuffle: true}},
		"index, narrow boxes, upright": {archive: "large.tar", index: madeIndex, entries: true,
			o: options{Transform: uprighted(transforms["narrow boxes"]), Shuffle: true}},
		"index, dct scaling": {archive: "large.tar", index: madeIndex, entries: true,
			o: options{Transform: uprighted(transforms["dct scaling"]), Shuffle: true}},
		"index of shards": {archive: "shard-{00..02}.tgz", index: orderIndex,
			o: options{Transform: train, Shuffle: true, ShuffleBytes: smallBuffer}},
		"index weighted, random access": {archive: "large.tgz", index: madeIndex, entries: true,
			o: options{Transform: train, Weights: uneven, Shuffle: true, ShuffleBytes: smallBuffer}},
		"index balanced, many draws": {archive: "large.tar.zst", index: orderIndex, entries: true,
			o: options{Transform: train, Balanced: true, Draws: 150}},
		"index rank of 2, random access": {archive: "large.tgz", index: madeIndex,
			o: options{Transform: train, Shuffle: true, ShuffleBytes: smallBuffer, World: 2}},

		"order archive's": {archive: "photos.tar", o: options{Transform: train}},
		"order shuffled":  {archive: "photos.tar", o: options{Transform: train, Shuffle: true}},
		"order shuffled, other seed": {archive: "photos.tar",
			o: options{Transform: train, Shuffle: true, Seed: 1 << 60}},
		"order shuffled in memory": {archive: "photos.tgz",
			o: options{Transform: train, Shuffle: true, ShuffleBytes: 100 << 20}},
		"order shuffled, small buffer": {archive: "photos.tgz",
			o: options{Transform: train, Shuffle: true, ShuffleBytes: smallBuffer}},
		"order shuffled, few samples": {archive: "photos.tgz",
			o: options{Transform: train, Shuffle: true, ShuffleBytes: smallBuffer * 4, ShuffleBuffer: 20}},
		"order weighted": {archive: "photos.tar", o: options{Transform: train, Weights: uneven}},
		"order weighted, draws": {archive: "photos.tgz",
			o: options{Transform: train, Weights: uneven, Draws: 70}},
		"order balanced": {archive: "damaged.tar",
			o: options{Transform: train, Balanced: true, BadSamples: digestSubstitute}},
		"order repeated": {archive: "few.tar", o: options{Transform: train, Shuffle: true, Repeat: 3}},
		"order repeated stream": {archive: "photos.tgz",
			o: options{Transform: train, Shuffle: true, ShuffleBytes: smallBuffer, Repeat: 2}},
		"order drop last": {archive: "photos.tar",
			o: options{Transform: train, Shuffle: true, DropLast: true}},
		"order pad last": {archive: "photos.tar",
			o: options{Transform: train, Shuffle: true, PadLast: true}},
		"order 3 ranks, even": {archive: "few.tar", o: options{Transform: train, Shuffle: true, World: 3}},
		"order 3 ranks, uneven": {archive: "damaged.tar",
			o: options{Transform: train, Shuffle: true, World: 3, BadSamples: digestSubstitute}},
		"order 4 ranks, uneven": {archive: "photos.tar",
			o: options{Transform: train, Shuffle: true, World: 4}},
		"order 3 ranks, drop last": {archive: "photos.tar",
			o: options{Transform: train, Shuffle: true, World: 3, DropLast: true}},
		"order 3 ranks, pad last": {archive: "photos.tar",
			o: options{Transform: train, World: 3, PadLast: true}},
		"order 3 ranks, skip": {archive: "damaged.tar",
			o: options{Transform: train, Shuffle: true, World: 3, BadSamples: digestSkip}},
		"order 3 ranks, stream": {archive: "photos.tgz",
			o: options{Transform: train, Shuffle: true, World: 3, ShuffleBytes: smallBuffer}},
		"order 3 ranks, weighted": {archive: "photos.tar",
			o: options{Transform: train, Weights: uneven, World: 3}},
		"order 3 ranks, repeated": {archive: "few.tar",
			o: options{Transform: train, Shuffle: true, World: 3, Repeat: 2}},
		"order batches of 1": {archive: "few.tar",
			o: options{Transform: train, Shuffle: true, BatchSize: 1}},
		"order one batch of everything": {archive: "photos.tar",
			o: options{Transform: train, Shuffle: true, BatchSize: 1000}},
		"bad samples skipped": {archive: "damaged.tar",
			o: options{Transform: train, BadSamples: digestSkip}},
		"bad samples skipped, damage refused": {archive: "damaged.tar",
			o: options{Transform: train, BadSamples: digestSkip, Damaged: digestRefuse}},
		"bad samples skipped, damage partial": {archive: "damaged.tar",
			o: options{Transform: train, BadSamples: digestSkip, Damaged: digestPartial}},
		"bad samples skipped, shuffled": {archive: "damaged.tar",
			o: options{Transform: train, Shuffle: true, BadSamples: digestSkip}},
		"bad samples skipped, stream": {archive: "damaged.tgz",
			o: options{Transform: train, Shuffle: true, ShuffleBytes: smallBuffer, BadSamples: digestSkip}},
		"bad samples skipped, pad last": {archive: "damaged.tar",
			o: options{Transform: train, Shuffle: true, BadSamples: digestSkip, PadLast: true}},
		"bad samples substituted": {archive: "damaged.tar",
			o: options{Transform: train, BadSamples: digestSubstitute}},
		"bad samples substituted, gzip": {archive: "damaged.tgz",
			o: options{Transform: train, Shuffle: true, ShuffleBytes: smallBuffer, BadSamples: digestSubstitute}},
		"bad samples substituted, gzip, damage refused": {archive: "damaged.tgz",
			o: options{Transform: train, Shuffle: true, ShuffleBytes: smallBuffer,
				BadSamples: digestSubstitute, Damaged: digestRefuse}},
		"bad samples substituted, mixed": {archive: "damaged.tar",
			o: options{Transform: transforms["mixup or cutmix"], Shuffle: true, BadSamples: digestSubstitute}},
		"bad samples too large": {archive: "photos.tar",
			o: options{Transform: train, BadSamples: digestSkip, MaxPixels: 10_000, MaxSampleBytes: 3000}},
		"bad samples end an epoch": {archive: "damaged.tar", o: options{Transform: train, BatchSize: 8}},
		"bad archive, cut": {archive: "cut.tgz",
			o: options{Transform: train, Classes: photoClasses, ShuffleBytes: smallBuffer}},

		"fill": {archive: "photos.tar", o: options{Transform: train, Shuffle: true}, run: runFill},
		"fill of a stream": {archive: "photos.tgz",
			o:   options{Transform: train, Shuffle: true, ShuffleBytes: smallBuffer, DropLast: true},
			run: runFill},
		"fill, soft labels": {archive: "photos.tar",
			o:   options{Transform: transforms["cutmix"], Shuffle: true},
			run: runFill},
		"fill, bad samples": {archive: "damaged.tar",
			o:   options{Transform: train, Shuffle: true, BadSamples: digestSkip},
			run: runFill},

		"masks": {archive: "masks.tgz",
			o: options{Transform: train, Shuffle: true, Masks: photoMasks, BadSamples: digestSkip}},
		"masks, int64": {archive: "masks.tar",
			o: options{Transform: eval,
				Masks: imageloader.Masks{Image: photoMasks.Image, Mask: photoMasks.Mask, DType: tensor.Int64}}},
		"masks, moved": {archive: "masks.tar",
			o: options{Transform: transforms["several ops"], Shuffle: true, Masks: photoMasks,
				BadSamples: digestSubstitute, World: 2}},
		"target": {archive: "damaged.tar",
			o: options{Transform: train, Shuffle: true, BadSamples: digestSkip, Target: digestTarget, TargetWidth: 3}},
		"target, mixed, stream": {archive: "photos.tgz",
			o: options{Transform: transforms["mixup or cutmix"], Shuffle: true, ShuffleBytes: smallBuffer,
				Target: digestTarget, TargetWidth: 3}},
		"target, state": {archive: "photos.tar",
			o: options{Transform: train, Target: digestTarget, TargetWidth: 3}, run: runState},
		"masks, resumed": {archive: "masks.tar",
			o:   options{Transform: train, Shuffle: true, Masks: photoMasks, BadSamples: digestSkip},
			run: runResumed(1)},
		"masks, state": {archive: "masks.tar",
			o: options{Transform: train, Masks: photoMasks, BadSamples: digestSubstitute}, run: runState},

		"resumed": {archive: "photos.tar",
			o:   options{Transform: train, Shuffle: true},
			run: runResumed(1)},
		"resumed, in order": {archive: "photos.tar", o: options{Transform: train}, run: runResumed(1)},
		"resumed, stream": {archive: "photos.tgz",
			o:   options{Transform: train, Shuffle: true, ShuffleBytes: smallBuffer},
			run: runResumed(1)},
		"resumed, weighted": {archive: "photos.tar",
			o:   options{Transform: train, Weights: uneven},
			run: runResumed(1)},
		"resumed, bad samples skipped": {archive: "damaged.tar",
			o:   options{Transform: train, Shuffle: true, BadSamples: digestSkip},
			run: runResumed(1)},
		"resumed, 3 ranks of 3": {archive: "photos.tar",
			o:   options{Transform: train, Shuffle: true, World: 3},
			run: runResumed(3)},
		"resumed, 2 ranks of 3": {archive: "photos.tar",
			o:   options{Transform: train, Shuffle: true, World: 3},
			run: runResumed(2)},
		"resumed, 5 ranks of 2, skip": {archive: "damaged.tgz",
			o:   options{Transform: train, Shuffle: true, World: 2, BadSamples: digestSkip},
			run: runResumed(5)},
		"resumed, 1 rank of 3, stream": {archive: "photos.tgz",
			o:   options{Transform: train, Shuffle: true, World: 3, ShuffleBytes: smallBuffer, Repeat: 2},
			run: runResumed(1)},
		"resumed, with mixes": {archive: "photos.tar",
			o:   options{Transform: transforms["mixup or cutmix"], Shuffle: true},
			run: runResumed(1)},

		// Programs keep the JSON of a state, and Restore compares the options in it as text.
		"state": {archive: "photos.tar",
			o:   options{Transform: train, Shuffle: true, Seed: 4, BadSamples: digestSkip, Classes: photoClasses},
			run: runState},
		"state of a rank": {archive: "photos.tar",
			o:   options{Transform: eval, Weights: uneven, World: 3},
			run: runState},
		"state with mixes": {archive: "photos.tar",
			o:   options{Transform: transforms["mixup or cutmix"]},
			run: runState},
	}
	for name, transform := range transforms {
		c := digestConfig{archive: "few.tar",
			o: options{Transform: transform, Shuffle: true, Seed: 7, BadSamples: digestSubstitute}}
		if c.o.Transform.Size == 0 {
			c.o.BatchSize = 24
		}
		configs["transform "+name] = c
		if len(transform.Ops) > 0 {
			c.run = runState
			configs["state, transform "+name] = c
		}
	}
	return configs
}

// photoMasks are the masks of maskedMembers.
var photoMasks = imageloader.Masks{Image: "images/*.*", Mask: "masks/*.png", Fill: 255}

// digestTarget writes numbers that depend on the sample's name and label.
func digestTarget(s imageloader.Sample, target []float32) error {
	target[0], target[1], target[2] = float32(len(s.Name)), 1/float32(s.Label+3), float32(s.Name[len(s.Name)/2])
	return nil
}

var largeClasses = []string{"class0", "class1", "class2", "class3", "class4"}

func reversed(list []string) []string {
	list = slices.Clone(list)
	slices.Reverse(list)
	return list
}

// The digest of a configuration.

func openDigest(t *testing.T, c digestConfig) *imageloader.Loader {
	t.Helper()
	l, err := imageloader.OpenContext(t.Context(), c.archive, c.o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

func writeSamples(h hash.Hash, n int, samples []imageloader.Sample) {
	fmt.Fprintf(h, "batch of %d\n", n)
	for _, s := range samples {
		fmt.Fprintf(h, "%q %d %d\n", s.Name, s.Index, s.Label)
	}
}

// writeEpoch hashes an epoch, and the error that ends it. It reports whether the epoch ended
// without an error.
func writeEpoch(t *testing.T, h hash.Hash, l *imageloader.Loader, epoch int) (whole bool) {
	t.Helper()
	batches := 0
	whole = true
	for b, err := range l.Epoch(t.Context(), epoch) {
		if err != nil {
			whole = false
			writeError(t, h, err)
			continue
		}
		batches++
		writeSamples(h, b.N, b.Samples)
		h.Write(b.Images)
		_ = binary.Write(h, binary.LittleEndian, b.Labels) // a hash never fails
		_ = binary.Write(h, binary.LittleEndian, b.Soft)
		h.Write(b.Masks)
	}
	fmt.Fprintf(h, "%d batches\n", batches)
	return whole
}

// writeError hashes the kind and the place of an error, without its text.
func writeError(t *testing.T, h hash.Hash, err error) {
	t.Helper()
	var sample *imageloader.SampleError
	var archive *imageloader.ArchiveError
	switch {
	case errors.As(err, &sample):
		fmt.Fprintf(h, "%q %d %s\n", sample.Name, sample.Index, sample.Reason)
	case errors.As(err, &archive):
		fmt.Fprintf(h, "%q %d %d\n", archive.Member, archive.Position, archive.Offset)
	default:
		t.Fatal(err)
	}
}

// writeStats hashes a loader's counts of samples. It hashes Bytes only after whole epochs: before
// an error, the number of images that the workers decode ahead depends on timing. It sorts bad
// samples, because workers meet them in any order.
func writeStats(h hash.Hash, s imageloader.Stats, whole bool) {
	fmt.Fprintf(h, "%d samples, %d batches, %d bad, %d ignored\n", s.Samples, s.Batches, s.Bad, s.Ignored)
	if whole {
		fmt.Fprintf(h, "%d bytes\n", s.Bytes)
	}
	for _, r := range slices.Sorted(maps.Keys(s.BadBy)) {
		fmt.Fprintf(h, "%s %d\n", r, s.BadBy[r])
	}
	slices.SortFunc(s.BadNamed, func(a, b *imageloader.SampleError) int { return a.Index - b.Index })
	for _, e := range s.BadNamed {
		fmt.Fprintf(h, "%q %d %s\n", e.Name, e.Index, e.Reason)
	}
}

// runEpochs hashes epochs 0 and 1 of every rank.
func runEpochs(t *testing.T, c digestConfig, h hash.Hash) {
	t.Helper()
	for rank := range max(c.o.World, 1) {
		c.o.Rank = rank
		l := openDigest(t, c)
		fmt.Fprintf(h, "rank %d: %q, %d samples, %d batches\n", rank, l.Classes(), l.Len(), l.Batches())
		whole := true
		for epoch := range 2 {
			whole = writeEpoch(t, h, l, epoch) && whole
		}
		writeStats(h, l.Stats(), whole)
		if c.entries && !entryPointsUsed(l.Stats()) {
			t.Errorf("no image was decoded by entry points: %v", l.Stats().Decoded)
		}
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}
}

// runTwice runs the epochs with the index that an earlier loader has left.
func runTwice(t *testing.T, c digestConfig, h hash.Hash) {
	t.Helper()
	runEpochs(t, c, sha256.New())
	runEpochs(t, c, h)
}

// runFill hashes the content of two slots, lent in turn, after each batch of epochs 0 and 1.
func runFill(t *testing.T, c digestConfig, h hash.Hash) {
	t.Helper()
	l := openDigest(t, c)
	free, lent := make(chan [][]byte, 2), make(chan [][]byte, 2)
	for range cap(free) {
		var slot [][]byte
		for _, field := range l.Fields() {
			slot = append(slot, bytes.Repeat([]byte{0xa5}, l.BatchSize()*int(field.Bytes())))
		}
		free <- slot
	}
	for epoch := range 2 {
		err := l.Fill(t.Context(), epoch, func(ctx context.Context) ([][]byte, error) {
			select {
			case slot := <-free:
				lent <- slot
				return slot, nil
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}, func(n int, info any) error {
			slot := <-lent
			writeSamples(h, n, info.(imageloader.Info).Samples)
			for i, field := range l.Fields() {
				h.Write(slot[i][:n*int(field.Bytes())])
			}
			free <- slot
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		for len(lent) > 0 { // the loader may have borrowed one more slot than it needed
			free <- <-lent
		}
	}
	writeStats(h, l.Stats(), true)
}

// statesAfter returns each rank's state after some batches of an epoch, through JSON.
func statesAfter(t *testing.T, c digestConfig, epoch, batches int) (states []imageloader.State) {
	t.Helper()
	for rank := range max(c.o.World, 1) {
		c.o.Rank = rank
		for b, err := range openDigest(t, c).Epoch(t.Context(), epoch) {
			if err != nil {
				t.Fatal(err)
			}
			if b.State.Batches() < batches {
				continue
			}
			data, err := json.Marshal(b.State)
			if err != nil {
				t.Fatal(err)
			}
			var s imageloader.State
			if err := json.Unmarshal(data, &s); err != nil {
				t.Fatal(err)
			}
			states = append(states, s)
			break
		}
	}
	return states
}

// runResumed hashes the rest of epoch 1 after two batches, dealt to a world of ranks, and the epoch
// after it.
func runResumed(world int) func(t *testing.T, c digestConfig, h hash.Hash) {
	return func(t *testing.T, c digestConfig, h hash.Hash) {
		t.Helper()
		states := statesAfter(t, c, 1, 2)
		for rank := range world {
			c.o.Rank, c.o.World = rank, world
			l := openDigest(t, c)
			if err := l.Restore(t.Context(), states...); err != nil {
				t.Fatal(err)
			}
			writeEpoch(t, h, l, 1)
			writeEpoch(t, h, l, 2)
		}
	}
}

// runState hashes the JSON of states in epoch 1.
func runState(t *testing.T, c digestConfig, h hash.Hash) {
	t.Helper()
	for _, s := range statesAfter(t, c, 1, 2) {
		data, err := json.Marshal(s)
		if err != nil {
			t.Fatal(err)
		}
		h.Write(data)
	}
}

// digestOf runs a configuration with the given number of workers.
func digestOf(t *testing.T, c digestConfig, dir string, workers int) string {
	t.Helper()
	if !strings.Contains(c.archive, "://") {
		c.archive = filepath.Join(dir, c.archive)
	}
	c.o.Workers, c.o.NoIndex = workers, c.index == noIndex
	if c.o.BatchSize == 0 {
		c.o.BatchSize = 16
	}
	if c.index != noIndex {
		c.o.IndexFile = filepath.Join(t.TempDir(), "index")
	}
	if c.index == madeIndex || c.index == orderIndex {
		r, err := imageloader.MakeIndex(t.Context(), c.archive, c.o, nil)
		if err != nil {
			t.Fatal(err)
		}
		if r.Random != (c.index == madeIndex) {
			t.Errorf("random access of %+v is %v, want %v", r, r.Random, c.index == madeIndex)
		}
	}
	if c.run == nil {
		c.run = runEpochs
	}
	h := sha256.New()
	c.run(t, c, h)
	return fmt.Sprintf("%x", h.Sum(nil))
}

// readDigests reads the file, whose lines have a digest and a name.
func readDigests(t *testing.T) map[string]string {
	t.Helper()
	data, err := os.ReadFile(digestFile)
	if err != nil && !(*update && os.IsNotExist(err)) {
		t.Fatal(err)
	}
	list := map[string]string{}
	for line := range strings.Lines(string(data)) {
		digest, name, found := strings.Cut(strings.TrimSuffix(line, "\n"), "  ")
		if !found {
			t.Fatalf("%s has the line %q", digestFile, line)
		}
		list[name] = digest
	}
	return list
}

func TestDigests(t *testing.T) {
	if runtime.GOARCH != "amd64" {
		t.Skip("the digests are those of amd64: see the comment at the top of this file")
	}
	dir := digestArchives(t)
	server := httptest.NewServer(http.FileServer(http.Dir(dir)))
	defer server.Close()
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	configs, want := digestConfigs(server.URL, dir), readDigests(t)
	for name := range want {
		if _, known := configs[name]; !known && !*update {
			t.Errorf("%s has a digest of %q, which is not a configuration", digestFile, name)
		}
	}
	maps.DeleteFunc(want, func(name, _ string) bool { _, known := configs[name]; return !known })
	for _, name := range slices.Sorted(maps.Keys(configs)) {
		t.Run(name, func(t *testing.T) {
			got := digestOf(t, configs[name], dir, 1)
			if other := digestOf(t, configs[name], dir, 3); other != got {
				t.Errorf("with 3 workers %s, with 1 %s", other, got)
			}
			if *update {
				want[name] = got
			}
			if got != want[name] {
				t.Errorf("the batches have the digest %s, want %q", got, want[name])
			}
		})
	}
	if *update && !t.Failed() {
		var b strings.Builder
		for _, name := range slices.Sorted(maps.Keys(want)) {
			fmt.Fprintf(&b, "%s  %s\n", want[name], name)
		}
		if err := os.WriteFile(digestFile, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// TestDigestsWithSharedMemory: ShareOnHost changes no byte of any configuration of a compressed
// archive.
func TestDigestsWithSharedMemory(t *testing.T) {
	if runtime.GOARCH != "amd64" {
		t.Skip("the digests are those of amd64: see the comment at the top of this file")
	}
	dir := digestArchives(t)
	server := httptest.NewServer(http.FileServer(http.Dir(dir)))
	defer server.Close()
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	want := readDigests(t)
	compressed := 0
	for name, c := range digestConfigs(server.URL, dir) {
		if !strings.Contains(c.archive, "gz") && !strings.HasSuffix(c.archive, ".zst") {
			continue
		}
		compressed++
		c.o.ShareOnHost = true
		if got := digestOf(t, c, dir, 3); got != want[name] {
			t.Errorf("%s: the batches have the digest %s, want %s", name, got, want[name])
		}
	}
	if compressed < 20 {
		t.Errorf("%d configurations of compressed archives, want at least 20", compressed)
	}
}
