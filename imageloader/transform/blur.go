package transform

import (
	"fmt"
	"math/rand/v2"

	"github.com/torchstream/torchstream/internal/imagecapi"
)

// GaussianBlur blurs with a kernel of KernelSize pixels (width, height; odd; 0: 3) and a standard
// deviation in pixels that is uniform in Sigma (zero value: 0.1 to 2). The step also runs on a GPU
// that decodes.
type GaussianBlur struct {
	KernelSize [2]int
	Sigma      [2]float64
}

// sides returns the kernel's width and height.
func (o GaussianBlur) sides() [2]int {
	for i, k := range o.KernelSize {
		if k == 0 {
			o.KernelSize[i] = 3
		}
	}
	return o.KernelSize
}

func (o GaussianBlur) check(w, h int) (int, int, error) {
	for i, k := range o.sides() {
		if side := [2]int{w, h}[i]; k < 1 || k%2 == 0 || k/2 >= side || k > 1001 {
			return 0, 0, fmt.Errorf(
				"field KernelSize is %v: %d is not odd, positive, and less than twice the image's side (%d)",
				o.KernelSize, k, side)
		}
	}
	return w, h, checkInterval("Sigma", interval(o.Sigma, [2]float64{0.1, 2}), 1e-3, 1e3)
}

func (o GaussianBlur) draw(rng *rand.Rand, p *program) {
	sigma := between(rng, interval(o.Sigma, [2]float64{0.1, 2}))
	sides := o.sides()
	p.add(imagecapi.AugmentBlur, [9]int32{int32(sides[0]), int32(sides[1])}, sigma, sigma)
}

// RandomAdjustSharpness blurs (SharpnessFactor below 1; 0 blurs fully) or sharpens (above 1), with
// probability P (0: 1/2). The step also runs on a GPU that decodes.
type RandomAdjustSharpness struct{ SharpnessFactor, P float64 }

func (o RandomAdjustSharpness) check(w, h int) (int, int, error) {
	if !(o.SharpnessFactor >= 0 && o.SharpnessFactor <= 1e5) {
		return 0, 0, fmt.Errorf("field SharpnessFactor is %v, not in 0 to 1e5", o.SharpnessFactor)
	}
	return w, h, checkP(o.P)
}

func (o RandomAdjustSharpness) draw(rng *rand.Rand, p *program) {
	if hit(rng, probability(o.P, 0.5)) {
		p.add(imagecapi.AugmentSharpness, [9]int32{}, o.SharpnessFactor)
	}
}
