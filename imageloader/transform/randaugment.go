package transform

import (
	"fmt"
	"math"
	"math/rand/v2"

	"github.com/torchstream/torchstream/internal/imagecapi"
)

// RandAugment applies NumOps (0: 2) random operations, each with strength Magnitude (0: 9) on a
// scale of NumMagnitudeBins (0: 31). The step also runs on a GPU that decodes.
type RandAugment struct {
	NumOps, Magnitude, NumMagnitudeBins int
	Interpolation                       Interpolation
	Fill                                Color // for pixels from outside of the image
}

func (o RandAugment) withDefaults() RandAugment {
	if o.NumOps == 0 {
		o.NumOps = 2
	}
	if o.Magnitude == 0 {
		o.Magnitude = 9
	}
	if o.NumMagnitudeBins == 0 {
		o.NumMagnitudeBins = 31
	}
	return o
}

const maxBins = 1 << 20

func (o RandAugment) check(w, h int) (int, int, error) {
	o = o.withDefaults()
	switch {
	case o.NumOps < 1 || o.NumOps > 1000:
		return 0, 0, fmt.Errorf("field NumOps is %d, not in 1 to 1000", o.NumOps)
	case o.NumMagnitudeBins < 2 || o.NumMagnitudeBins > maxBins:
		return 0, 0, fmt.Errorf("field NumMagnitudeBins is %d, not in 2 to %d", o.NumMagnitudeBins, maxBins)
	case o.Magnitude < 0 || o.Magnitude >= o.NumMagnitudeBins:
		return 0, 0, fmt.Errorf("field Magnitude is %d, not in 1 to NumMagnitudeBins-1 (%d)", o.Magnitude,
			o.NumMagnitudeBins-1)
	}
	return w, h, o.Interpolation.check()
}

func (o RandAugment) draw(rng *rand.Rand, p *program) {
	o = o.withDefaults()
	for range o.NumOps {
		op := policyOp(rng.IntN(int(numRandomOps)))
		m := randSpace.magnitude(op, o.Magnitude, o.NumMagnitudeBins, p.width, p.height)
		p.policy(op, signed(rng, op, m), o.Interpolation, outside(o.Fill))
	}
}

// TrivialAugmentWide applies one random operation with a random strength on a scale of
// NumMagnitudeBins (0: 31). The step also runs on a GPU that decodes.
type TrivialAugmentWide struct {
	NumMagnitudeBins int
	Interpolation    Interpolation
	Fill             Color
}

func (o TrivialAugmentWide) bins() int {
	if o.NumMagnitudeBins == 0 {
		return 31
	}
	return o.NumMagnitudeBins
}

func (o TrivialAugmentWide) check(w, h int) (int, int, error) {
	if n := o.bins(); n < 2 || n > maxBins {
		return 0, 0, fmt.Errorf("field NumMagnitudeBins is %d, not in 2 to %d", n, maxBins)
	}
	return w, h, o.Interpolation.check()
}

func (o TrivialAugmentWide) draw(rng *rand.Rand, p *program) {
	op := policyOp(rng.IntN(int(numRandomOps)))
	m := wideSpace.magnitude(op, rng.IntN(o.bins()), o.bins(), p.width, p.height)
	p.policy(op, signed(rng, op, m), o.Interpolation, outside(o.Fill))
}

// outside returns the fill that torchvision's policies use for c. For black it returns
// torchvision's default None, which differs from black where pixels are blended.
func outside(c Color) *Color {
	if c == (Color{}) {
		return nil
	}
	return &c
}

// policyOp is an operation of the policies.
type policyOp int

const ( // in torchvision's order
	opIdentity policyOp = iota
	opShearX
	opShearY
	opTranslateX
	opTranslateY
	opRotate
	opBrightness
	opColor
	opContrast
	opSharpness
	opPosterize
	opSolarize
	opAutoContrast
	opEqualize
	numRandomOps // number of operations of RandAugment and TrivialAugmentWide
	opInvert     = numRandomOps
)

// space has the maximum strengths of a policy's operations.
type space struct {
	shear     float64
	translate func(side int) float64
	rotate    float64
	color     float64
	posterize float64 // number of bits to clear
}

var (
	randSpace = space{0.3, func(side int) float64 { return 150. / 331 * float64(side) }, 30, 0.9, 4}
	wideSpace = space{0.99, func(int) float64 { return 32 }, 135, 0.99, 6}
)

// magnitude returns the strength with number bin on a scale of bins.
func (s *space) magnitude(op policyOp, bin, bins, w, h int) float64 {
	switch op {
	case opShearX, opShearY:
		return linspace(0, s.shear, bin, bins)
	case opTranslateX:
		return linspace(0, s.translate(w), bin, bins)
	case opTranslateY:
		return linspace(0, s.translate(h), bin, bins)
	case opRotate:
		return linspace(0, s.rotate, bin, bins)
	case opBrightness, opColor, opContrast, opSharpness:
		return linspace(0, s.color, bin, bins)
	case opPosterize:
		return math.RoundToEven(8 - float64(bin)/(float64(bins-1)/s.posterize))
	case opSolarize:
		return linspace(1, 0, bin, bins)
	}
	return 0
}

// linspace returns element i of torch.linspace(start, end, n). It uses the same float32 arithmetic,
// because rounding decides whether a threshold is above or below an integer.
func linspace(start, end float64, i, n int) float64 {
	from, to := float32(start), float32(end)
	step := (to - from) / float32(n-1)
	if i < n/2 {
		return float64(fma32(step, float32(i), from))
	}
	return float64(fma32(-step, float32(n-1-i), to))
}

// signed negates a strength with probability 1/2, for operations that have a direction.
func signed(rng *rand.Rand, op policyOp, m float64) float64 {
	if op >= opShearX && op <= opSharpness && hit(rng, 0.5) {
		return -m
	}
	return m
}

// policy adds the operations of torchvision's _apply_image_or_video_transform.
func (p *program) policy(op policyOp, m float64, i Interpolation, c *Color) {
	degrees := math.Atan(m) * (180 / math.Pi)
	switch op {
	case opShearX:
		p.affine(affine{scale: 1, shear: [2]float64{degrees, 0}, centre: &[2]float64{}}, i, c)
	case opShearY:
		p.affine(affine{scale: 1, shear: [2]float64{0, degrees}, centre: &[2]float64{}}, i, c)
	case opTranslateX:
		p.affine(affine{scale: 1, translate: [2]float64{math.Trunc(m), 0}}, i, c)
	case opTranslateY:
		p.affine(affine{scale: 1, translate: [2]float64{0, math.Trunc(m)}}, i, c)
	case opRotate:
		p.rotate(m, nil, false, i, c)
	case opBrightness:
		p.add(imagecapi.AugmentBrightness, [9]int32{}, 1+m)
	case opColor:
		p.add(imagecapi.AugmentSaturation, [9]int32{}, 1+m)
	case opContrast:
		p.add(imagecapi.AugmentContrast, [9]int32{}, 1+m)
	case opSharpness:
		p.add(imagecapi.AugmentSharpness, [9]int32{}, 1+m)
	case opPosterize:
		p.add(imagecapi.AugmentPosterize, [9]int32{int32(m)})
	case opSolarize:
		p.add(imagecapi.AugmentSolarize, [9]int32{}, 255*m)
	case opAutoContrast:
		p.add(imagecapi.AugmentAutocontrast, [9]int32{})
	case opEqualize:
		p.add(imagecapi.AugmentEqualize, [9]int32{})
	case opInvert:
		p.add(imagecapi.AugmentInvert, [9]int32{})
	}
}
