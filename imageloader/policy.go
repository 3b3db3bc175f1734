package imageloader

import (
	"fmt"
	"math"
	"math/rand/v2"

	"github.com/torchstream/torchstream/internal/imagecapi"
)

// RandAugment does NumOps (0: 2) random operations, each with strength Magnitude (0: 9) of NumMagnitudeBins (0: 31).
type RandAugment struct {
	NumOps, Magnitude, NumMagnitudeBins int
	Interpolation                       Interpolation
	Fill                                Color // of what comes from outside of the image
}

// TrivialAugmentWide does one random operation with a random strength out of NumMagnitudeBins (0: 31).
type TrivialAugmentWide struct {
	NumMagnitudeBins int
	Interpolation    Interpolation
	Fill             Color
}

// AutoAugment does what one of the 25 rules of a Policy says, drawn at random.
type AutoAugment struct {
	Policy        AutoAugmentPolicy
	Interpolation Interpolation
	Fill          Color
}

// AutoAugmentPolicy names the data that the rules of AutoAugment were learned on.
type AutoAugmentPolicy int

const (
	ImageNetPolicy AutoAugmentPolicy = iota
	CIFAR10Policy
	SVHNPolicy
)

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

const mostBins = 1 << 20

func (o RandAugment) check(w, h int) (int, int, error) {
	o = o.withDefaults()
	switch {
	case o.NumOps < 1 || o.NumOps > 1000:
		return 0, 0, fmt.Errorf("field NumOps is %d, not in 1 to 1000", o.NumOps)
	case o.NumMagnitudeBins < 2 || o.NumMagnitudeBins > mostBins:
		return 0, 0, fmt.Errorf("field NumMagnitudeBins is %d, not in 2 to %d", o.NumMagnitudeBins, mostBins)
	case o.Magnitude < 0 || o.Magnitude >= o.NumMagnitudeBins:
		return 0, 0, fmt.Errorf("field Magnitude is %d, not in 1 to NumMagnitudeBins-1 (%d)", o.Magnitude, o.NumMagnitudeBins-1)
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

func (o TrivialAugmentWide) bins() int {
	if o.NumMagnitudeBins == 0 {
		return 31
	}
	return o.NumMagnitudeBins
}

func (o TrivialAugmentWide) check(w, h int) (int, int, error) {
	if n := o.bins(); n < 2 || n > mostBins {
		return 0, 0, fmt.Errorf("field NumMagnitudeBins is %d, not in 2 to %d", n, mostBins)
	}
	return w, h, o.Interpolation.check()
}

func (o TrivialAugmentWide) draw(rng *rand.Rand, p *program) {
	op := policyOp(rng.IntN(int(numRandomOps)))
	m := wideSpace.magnitude(op, rng.IntN(o.bins()), o.bins(), p.width, p.height)
	p.policy(op, signed(rng, op, m), o.Interpolation, outside(o.Fill))
}

func (o AutoAugment) check(w, h int) (int, int, error) {
	if o.Policy < ImageNetPolicy || o.Policy > SVHNPolicy {
		return 0, 0, fmt.Errorf("field Policy is %d, not ImageNetPolicy, CIFAR10Policy or SVHNPolicy", o.Policy)
	}
	return w, h, o.Interpolation.check()
}

func (o AutoAugment) rules() *[25][2]policyStep {
	return [...]*[25][2]policyStep{&imageNetPolicy, &cifar10Policy, &svhnPolicy}[o.Policy]
}

func (o AutoAugment) draw(rng *rand.Rand, p *program) {
	rule := &o.rules()[rng.IntN(25)]
	for _, step := range rule {
		if !hit(rng, step.p) {
			continue
		}
		m := randSpace.magnitude(step.op, step.bin, 10, p.width, p.height)
		p.policy(step.op, signed(rng, step.op, m), o.Interpolation, outside(o.Fill))
	}
}

// outside is torchvision's fill of the policies: None by default, which is not the same as black where pixels are blended.
func outside(c Color) *Color {
	if c == (Color{}) {
		return nil
	}
	return &c
}

// policyOp is an operation that policies choose from.
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
	numRandomOps // those of RandAugment and TrivialAugmentWide
	opInvert     = numRandomOps
)

// policyStep is a step of a rule of AutoAugment.
type policyStep struct {
	op  policyOp
	p   float64
	bin int
}

// space says how strong the strongest of a policy's operations are.
type space struct {
	shear     float64
	translate func(side int) float64
	rotate    float64
	color     float64
	posterize float64 // bits that go
}

var (
	randSpace = space{0.3, func(side int) float64 { return 150. / 331 * float64(side) }, 30, 0.9, 4}
	wideSpace = space{0.99, func(int) float64 { return 32 }, 135, 0.99, 6}
)

// magnitude is the strength number bin of bins.
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

// linspace is element i of torch.linspace(start, end, n), in its float32 arithmetic: a threshold next to an integer is on the one side of it or on the other.
func linspace(start, end float64, i, n int) float64 {
	from, to := float32(start), float32(end)
	step := (to - from) / float32(n-1)
	if i < n/2 {
		return float64(fma32(step, float32(i), from))
	}
	return float64(fma32(-step, float32(n-1-i), to))
}

// fma32 is x*y + z rounded once: the product of two float32 is exact in float64, and where their sum is not, the two roundings almost never differ.
func fma32(x, y, z float32) float32 { return float32(math.FMA(float64(x), float64(y), float64(z))) }

// signed turns a strength around with probability 1/2 where that means something.
func signed(rng *rand.Rand, op policyOp, m float64) float64 {
	if op >= opShearX && op <= opSharpness && hit(rng, 0.5) {
		return -m
	}
	return m
}

// policy is torchvision's _apply_image_or_video_transform.
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

// The rules, with probabilities and strengths out of 10.

var imageNetPolicy = [...][2]policyStep{
	{{opPosterize, 0.4, 8}, {opRotate, 0.6, 9}},
	{{opSolarize, 0.6, 5}, {opAutoContrast, 0.6, 0}},
	{{opEqualize, 0.8, 0}, {opEqualize, 0.6, 0}},
	{{opPosterize, 0.6, 7}, {opPosterize, 0.6, 6}},
	{{opEqualize, 0.4, 0}, {opSolarize, 0.2, 4}},
	{{opEqualize, 0.4, 0}, {opRotate, 0.8, 8}},
	{{opSolarize, 0.6, 3}, {opEqualize, 0.6, 0}},
	{{opPosterize, 0.8, 5}, {opEqualize, 1, 0}},
	{{opRotate, 0.2, 3}, {opSolarize, 0.6, 8}},
	{{opEqualize, 0.6, 0}, {opPosterize, 0.4, 6}},
	{{opRotate, 0.8, 8}, {opColor, 0.4, 0}},
	{{opRotate, 0.4, 9}, {opEqualize, 0.6, 0}},
	{{opEqualize, 0, 0}, {opEqualize, 0.8, 0}},
	{{opInvert, 0.6, 0}, {opEqualize, 1, 0}},
	{{opColor, 0.6, 4}, {opContrast, 1, 8}},
	{{opRotate, 0.8, 8}, {opColor, 1, 2}},
	{{opColor, 0.8, 8}, {opSolarize, 0.8, 7}},
	{{opSharpness, 0.4, 7}, {opInvert, 0.6, 0}},
	{{opShearX, 0.6, 5}, {opEqualize, 1, 0}},
	{{opColor, 0.4, 0}, {opEqualize, 0.6, 0}},
	{{opEqualize, 0.4, 0}, {opSolarize, 0.2, 4}},
	{{opSolarize, 0.6, 5}, {opAutoContrast, 0.6, 0}},
	{{opInvert, 0.6, 0}, {opEqualize, 1, 0}},
	{{opColor, 0.6, 4}, {opContrast, 1, 8}},
	{{opEqualize, 0.8, 0}, {opEqualize, 0.6, 0}},
}

var cifar10Policy = [...][2]policyStep{
	{{opInvert, 0.1, 0}, {opContrast, 0.2, 6}},
	{{opRotate, 0.7, 2}, {opTranslateX, 0.3, 9}},
	{{opSharpness, 0.8, 1}, {opSharpness, 0.9, 3}},
	{{opShearY, 0.5, 8}, {opTranslateY, 0.7, 9}},
	{{opAutoContrast, 0.5, 0}, {opEqualize, 0.9, 0}},
	{{opShearY, 0.2, 7}, {opPosterize, 0.3, 7}},
	{{opColor, 0.4, 3}, {opBrightness, 0.6, 7}},
	{{opSharpness, 0.3, 9}, {opBrightness, 0.7, 9}},
	{{opEqualize, 0.6, 0}, {opEqualize, 0.5, 0}},
	{{opContrast, 0.6, 7}, {opSharpness, 0.6, 5}},
	{{opColor, 0.7, 7}, {opTranslateX, 0.5, 8}},
	{{opEqualize, 0.3, 0}, {opAutoContrast, 0.4, 0}},
	{{opTranslateY, 0.4, 3}, {opSharpness, 0.2, 6}},
	{{opBrightness, 0.9, 6}, {opColor, 0.2, 8}},
	{{opSolarize, 0.5, 2}, {opInvert, 0, 0}},
	{{opEqualize, 0.2, 0}, {opAutoContrast, 0.6, 0}},
	{{opEqualize, 0.2, 0}, {opEqualize, 0.6, 0}},
	{{opColor, 0.9, 9}, {opEqualize, 0.6, 0}},
	{{opAutoContrast, 0.8, 0}, {opSolarize, 0.2, 8}},
	{{opBrightness, 0.1, 3}, {opColor, 0.7, 0}},
	{{opSolarize, 0.4, 5}, {opAutoContrast, 0.9, 0}},
	{{opTranslateY, 0.9, 9}, {opTranslateY, 0.7, 9}},
	{{opAutoContrast, 0.9, 0}, {opSolarize, 0.8, 3}},
	{{opEqualize, 0.8, 0}, {opInvert, 0.1, 0}},
	{{opTranslateY, 0.7, 9}, {opAutoContrast, 0.9, 0}},
}

var svhnPolicy = [...][2]policyStep{
	{{opShearX, 0.9, 4}, {opInvert, 0.2, 0}},
	{{opShearY, 0.9, 8}, {opInvert, 0.7, 0}},
	{{opEqualize, 0.6, 0}, {opSolarize, 0.6, 6}},
	{{opInvert, 0.9, 0}, {opEqualize, 0.6, 0}},
	{{opEqualize, 0.6, 0}, {opRotate, 0.9, 3}},
	{{opShearX, 0.9, 4}, {opAutoContrast, 0.8, 0}},
	{{opShearY, 0.9, 8}, {opInvert, 0.4, 0}},
	{{opShearY, 0.9, 5}, {opSolarize, 0.2, 6}},
	{{opInvert, 0.9, 0}, {opAutoContrast, 0.8, 0}},
	{{opEqualize, 0.6, 0}, {opRotate, 0.9, 3}},
	{{opShearX, 0.9, 4}, {opSolarize, 0.3, 3}},
	{{opShearY, 0.8, 8}, {opInvert, 0.7, 0}},
	{{opEqualize, 0.9, 0}, {opTranslateY, 0.6, 6}},
	{{opInvert, 0.9, 0}, {opEqualize, 0.6, 0}},
	{{opContrast, 0.3, 3}, {opRotate, 0.8, 4}},
	{{opInvert, 0.8, 0}, {opTranslateY, 0, 2}},
	{{opShearY, 0.7, 6}, {opSolarize, 0.4, 8}},
	{{opInvert, 0.6, 0}, {opRotate, 0.8, 4}},
	{{opShearY, 0.3, 7}, {opTranslateX, 0.9, 3}},
	{{opShearX, 0.1, 6}, {opInvert, 0.6, 0}},
	{{opSolarize, 0.7, 2}, {opTranslateY, 0.6, 7}},
	{{opShearY, 0.8, 4}, {opInvert, 0.8, 0}},
	{{opShearX, 0.7, 9}, {opTranslateY, 0.8, 3}},
	{{opShearY, 0.8, 5}, {opAutoContrast, 0.7, 0}},
	{{opShearX, 0.7, 2}, {opInvert, 0.1, 0}},
}
