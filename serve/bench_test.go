package serve_test

import (
	"bytes"
	"image"
	"image/color"
	"image/jpeg"
	"math/rand/v2"
	"sort"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/imageloader/decode"
	"github.com/torchstream/torchstream/imageloader/transform"
	"github.com/torchstream/torchstream/serve"
	"github.com/torchstream/torchstream/torch"
)

// typicalBytes is the mean size of ImageNet's training photographs.
const typicalBytes = 109 << 10

// synthetic returns a JPEG of 470 x 400 pixels and about typicalBytes: noise of several scales.
func synthetic(b *testing.B, seed uint64) []byte {
	b.Helper()
	const width, height = 470, 400
	rng := rand.New(rand.NewPCG(seed, 1))
	var grids [5][64 * 64]float64 // cells of 8, 16, ... 128 pixels
	for g := range grids {
		for i := range grids[g] {
			grids[g][i] = rng.NormFloat64() * float64(int(4)<<g)
		}
	}
	m := image.NewRGBA(image.Rect(0, 0, width, height))
	for y := range height {
		for x := range width {
			light := 128.
			for g := range grids {
				light += grids[g][y>>(3+g)*64+x>>(3+g)]
			}
			at := func(bias float64) uint8 { return uint8(min(max(light+bias+10*rng.NormFloat64(), 0), 255)) }
			m.SetRGBA(x, y, color.RGBA{at(8), at(0), at(-8), 255})
		}
	}
	encode := func(quality int) []byte {
		var out bytes.Buffer
		if err := jpeg.Encode(&out, m, &jpeg.Options{Quality: quality}); err != nil {
			b.Fatal(err)
		}
		return out.Bytes()
	}
	return encode(1 + sort.Search(99, func(q int) bool { return len(encode(1+q)) >= typicalBytes }))
}

// BenchmarkRequestOfEight is the latency of a request of eight photographs of about 109 KB, from
// encoded bytes to a normalised batch on the device.
func BenchmarkRequestOfEight(b *testing.B) {
	var images [][]byte
	total := 0
	for i := range uint64(8) {
		images = append(images, synthetic(b, i))
		total += len(images[i])
	}
	d, err := serve.NewDecoder(serve.Options{Decode: decode.Options{Transform: transform.Eval(256, 224)}})
	if err != nil {
		b.Fatal(err)
	}
	defer d.Close()
	request := func() {
		scope := torch.NewScope("request")
		defer scope.Close()
		if _, err := d.Batch(b.Context(), scope, images...); err != nil {
			b.Fatal(err)
		}
		if d.Device() == cuda.CPU {
			return
		}
		s, err := cuda.GetCurrentCUDAStream(d.Device())
		if err == nil {
			err = s.Synchronize()
		}
		if err != nil {
			b.Fatal(err)
		}
	}
	request() // allocates
	b.SetBytes(int64(total))
	for b.Loop() {
		request()
	}
	b.ReportMetric(float64(total)/8, "bytes/image")
}
