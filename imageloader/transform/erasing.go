package transform

import (
	"errors"
	"math"
	"math/rand/v2"

	"github.com/torchstream/torchstream/internal/imagecapi"
)

// RandomErasing fills a random box with one colour, with probability P (0: 1/2). The box's share of
// the image's area is uniform in Scale (zero value: 0.02 to 0.33). The logarithm of its
// height/width is uniform between the logarithms of Ratio (zero value: 0.3 to 3.3).
//
// Value is a colour before normalisation, like all colours in Ops. If torchvision's RandomErasing
// follows Normalize, its value=0 corresponds to Value 255 * Mean. With Random, as with
// torchvision's value="random", the bytes are random instead: they have a standard normal
// distribution after normalisation, clipped to the range 0 to 255. The step also runs on a GPU that
// decodes. With Random, the samples are decoded on the host.
type RandomErasing struct {
	P            float64
	Scale, Ratio [2]float64
	Value        Color
	Random       bool
}

func (o RandomErasing) check(w, h int) (int, int, error) {
	if err := checkP(o.P); err != nil {
		return 0, 0, err
	}
	if o.Random && o.Value != (Color{}) {
		return 0, 0, errors.New("fields Random and Value exclude each other")
	}
	if err := checkInterval("Scale", o.Scale, 0, 1); err != nil {
		return 0, 0, err
	}
	return w, h, checkInterval("Ratio", interval(o.Ratio, [2]float64{0.3, 3.3}), 1e-3, 1e3)
}

func (o RandomErasing) draw(rng *rand.Rand, p *program) {
	if !hit(rng, probability(o.P, 0.5)) {
		return
	}
	scale, ratio := interval(o.Scale, [2]float64{0.02, 0.33}), interval(o.Ratio, [2]float64{0.3, 3.3})
	logs := [2]float64{math.Log(ratio[0]), math.Log(ratio[1])}
	for range 10 {
		area := float64(p.width) * float64(p.height) * between(rng, scale)
		aspect := math.Exp(between(rng, logs))
		h := int(math.RoundToEven(math.Sqrt(area * aspect)))
		w := int(math.RoundToEven(math.Sqrt(area / aspect)))
		if h >= p.height || w >= p.width {
			continue
		}
		y, x := rng.IntN(p.height-h+1), rng.IntN(p.width-w+1)
		if o.Random {
			p.noise(x, y, w, h)
			return
		}
		p.add(imagecapi.AugmentErase, [9]int32{int32(x), int32(y), int32(w), int32(h),
			int32(o.Value[0]), int32(o.Value[1]), int32(o.Value[2])})
		return
	}
}

// noise fills a box with bytes that have a standard normal distribution after normalisation.
func (p *program) noise(x, y, w, h int) {
	mean, std := p.mean, p.std
	p.call(func(rng *rand.Rand, image *Pixels) error {
		for row := range h {
			to := image.Pix[(y+row)*image.Stride+3*x:][:3*w]
			for i := range to {
				v := 255 * (float64(mean[i%3]) + float64(std[i%3])*rng.NormFloat64())
				to[i] = byte(min(max(math.RoundToEven(v), 0), 255))
			}
		}
		return nil
	})
}
