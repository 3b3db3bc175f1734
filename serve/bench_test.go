package serve_test

import (
	"bytes"
	"image"
	"image/color"
	"image/jpeg"
	"math/rand/v2"
	"slices"
	"sort"
	"testing"
	"time"

	"github.com/torchstream/torchstream/cuda"
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

// BenchmarkRequestOfEight measures the latency of a request of eight photographs of about 109 KB,
// from encoded bytes to a normalised batch on the device. It reports the median and the 99th
// percentile for each way of decoding that the machine supports.
func BenchmarkRequestOfEight(b *testing.B) {
	var images [][]byte
	for i := range uint64(8) {
		images = append(images, synthetic(b, i))
	}
	b.Run("host", func(b *testing.B) { requests(b, images, serve.Options{}) })
	if cuda.DeviceCount() > 0 {
		b.Run("device", func(b *testing.B) { requests(b, images, serve.Options{OnDevice: true, Concurrent: 1}) })
	}
}

// requests measures requests one after the other.
func requests(b *testing.B, images [][]byte, o serve.Options) {
	o.Decode.Transform = transform.Eval(256, 224)
	d := newDecoder(b, o)
	request := func() time.Duration {
		began := time.Now()
		scope := torch.NewScope("request")
		defer scope.Close()
		if _, err := d.Batch(b.Context(), scope, images...); err != nil {
			b.Fatal(err)
		}
		if d.Device() != cuda.CPU {
			s, err := cuda.GetCurrentCUDAStream(d.Device())
			if err == nil {
				err = s.Synchronize()
			}
			if err != nil {
				b.Fatal(err)
			}
		}
		return time.Since(began)
	}
	for range 3 {
		request() // allocates, and starts workers
	}
	var took []time.Duration
	for b.Loop() {
		took = append(took, request())
	}
	slices.Sort(took)
	at := func(share float64) float64 { return took[int(share*float64(len(took)-1))].Seconds() * 1e3 }
	b.ReportMetric(at(0.5), "median-ms")
	b.ReportMetric(at(0.99), "p99-ms")
	total := 0
	for _, image := range images {
		total += len(image)
	}
	b.ReportMetric(float64(total)/float64(len(images)), "bytes/image")
	if st := d.Stats(); o.OnDevice && (st.Decoded == 0 || st.DecodedAgain != 0) {
		b.Errorf("the GPU has not decoded all images: %+v", st)
	}
}
