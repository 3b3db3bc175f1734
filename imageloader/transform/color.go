package transform

import (
	"fmt"
	"math/rand/v2"

	"github.com/torchstream/torchstream/internal/imagecapi"
)

// ColorJitter multiplies brightness, contrast and saturation by random factors and rotates the hue,
// in random order. Each factor is uniform from 1-x (but at least 0) to 1+x, where x is the value of
// its field. The hue is rotated by a fraction of the circle that is uniform in -Hue to Hue (at most
// 1/2). A field that is 0 changes nothing. A range field that is not zero replaces the interval.
// The step also runs on a GPU that decodes.
type ColorJitter struct {
	Brightness, Contrast, Saturation, Hue                     float64
	BrightnessRange, ContrastRange, SaturationRange, HueRange [2]float64
}

// ranges returns the intervals of the four factors.
func (o ColorJitter) ranges() (r [4][2]float64) {
	for i, x := range [3]float64{o.Brightness, o.Contrast, o.Saturation} {
		r[i] = [2]float64{max(0, 1-x), 1 + x}
	}
	r[3] = [2]float64{-o.Hue, o.Hue}
	for i, given := range [4][2]float64{o.BrightnessRange, o.ContrastRange, o.SaturationRange, o.HueRange} {
		r[i] = interval(given, r[i])
	}
	return r
}

func (o ColorJitter) check(w, h int) (int, int, error) {
	for _, f := range []struct {
		name         string
		value, limit float64
	}{
		{"Brightness", o.Brightness, 1e5}, {"Contrast", o.Contrast, 1e5},
		{"Saturation", o.Saturation, 1e5}, {"Hue", o.Hue, 0.5},
	} {
		if !(f.value >= 0 && f.value <= f.limit) {
			return 0, 0, fmt.Errorf("field %s is %v, not in 0 to %v", f.name, f.value, f.limit)
		}
	}
	for i, r := range o.ranges() {
		low, high := 0., 1e6
		if i == 3 {
			low, high = -0.5, 0.5
		}
		name := [4]string{"BrightnessRange", "ContrastRange", "SaturationRange", "HueRange"}[i]
		if err := checkInterval(name, r, low, high); err != nil {
			return 0, 0, err
		}
	}
	return w, h, nil
}

func (o ColorJitter) draw(rng *rand.Rand, p *program) {
	var order [4]int
	for i := range order { // Fisher-Yates shuffle, inside-out variant
		j := rng.IntN(i + 1)
		order[i], order[j] = order[j], i
	}
	ranges := o.ranges()
	var factors [4]float64
	for i, r := range ranges {
		factors[i] = between(rng, r)
	}
	for _, i := range order {
		if nothing := [4]float64{1, 1, 1, 0}[i]; ranges[i] != [2]float64{nothing, nothing} {
			p.add(jitterKinds[i], [9]int32{}, factors[i])
		}
	}
}

var jitterKinds = [4]int32{
	imagecapi.AugmentBrightness, imagecapi.AugmentContrast, imagecapi.AugmentSaturation, imagecapi.AugmentHue,
}

// RandomPhotometricDistort changes brightness, contrast, saturation and hue, and permutes the
// channels, each with probability P (0: 1/2). The factors are uniform in intervals (zero values:
// 0.875 to 1.125, 0.5 to 1.5, 0.5 to 1.5 and -0.05 to 0.05). Contrast changes before or after
// saturation and hue. The step also runs on a GPU that decodes.
type RandomPhotometricDistort struct {
	Brightness, Contrast, Saturation, Hue [2]float64
	P                                     float64
}

func (o RandomPhotometricDistort) ranges() [4][2]float64 {
	half := [2]float64{0.5, 1.5}
	return [4][2]float64{
		interval(o.Brightness, [2]float64{0.875, 1.125}), interval(o.Contrast, half),
		interval(o.Saturation, half), interval(o.Hue, [2]float64{-0.05, 0.05}),
	}
}

func (o RandomPhotometricDistort) check(w, h int) (int, int, error) {
	r := o.ranges()
	jitter := ColorJitter{BrightnessRange: r[0], ContrastRange: r[1], SaturationRange: r[2], HueRange: r[3]}
	if _, _, err := jitter.check(w, h); err != nil {
		return 0, 0, err
	}
	return w, h, checkP(o.P)
}

func (o RandomPhotometricDistort) draw(rng *rand.Rand, p *program) {
	prob := probability(o.P, 0.5)
	var factors [4]float64
	var does [4]bool
	for i, r := range o.ranges() {
		does[i], factors[i] = hit(rng, prob), between(rng, r)
	}
	order := [4]int{0, 1, 2, 3}
	if !hit(rng, 0.5) {
		order = [4]int{0, 2, 3, 1}
	}
	for _, i := range order {
		if does[i] {
			p.add(jitterKinds[i], [9]int32{}, factors[i])
		}
	}
	if hit(rng, prob) {
		RandomChannelPermutation{}.draw(rng, p)
	}
}

// RandomChannelPermutation permutes the channels. All six permutations are equally likely,
// including the identity. The step also runs on a GPU that decodes.
type RandomChannelPermutation struct{}

func (RandomChannelPermutation) check(w, h int) (int, int, error) { return w, h, nil }

func (RandomChannelPermutation) draw(rng *rand.Rand, p *program) {
	var order [9]int32
	for i := range 3 { // Fisher-Yates shuffle, inside-out variant
		j := rng.IntN(i + 1)
		order[i], order[j] = order[j], int32(i)
	}
	p.add(imagecapi.AugmentPermute, order)
}

// Grayscale makes the three channels equal. The step also runs on a GPU that decodes.
type Grayscale struct{}

func (Grayscale) check(w, h int) (int, int, error) { return w, h, nil }
func (Grayscale) draw(_ *rand.Rand, p *program)    { p.add(imagecapi.AugmentGrayscale, [9]int32{}) }

// RandomGrayscale makes the three channels equal with probability P (0: 0.1). The step also runs on
// a GPU that decodes.
type RandomGrayscale struct{ P float64 }

func (o RandomGrayscale) check(w, h int) (int, int, error) { return w, h, checkP(o.P) }

func (o RandomGrayscale) draw(rng *rand.Rand, p *program) {
	if hit(rng, probability(o.P, 0.1)) {
		p.add(imagecapi.AugmentGrayscale, [9]int32{})
	}
}

// RandomInvert replaces every byte b with 255-b, with probability P (0: 1/2). The step also runs on
// a GPU that decodes.
type RandomInvert struct{ P float64 }

func (o RandomInvert) check(w, h int) (int, int, error) { return w, h, checkP(o.P) }

func (o RandomInvert) draw(rng *rand.Rand, p *program) {
	if hit(rng, probability(o.P, 0.5)) {
		p.add(imagecapi.AugmentInvert, [9]int32{})
	}
}

// RandomPosterize keeps the upper Bits (1 to 8) bits of every byte, with probability P (0: 1/2).
// The step also runs on a GPU that decodes.
type RandomPosterize struct {
	Bits int
	P    float64
}

func (o RandomPosterize) check(w, h int) (int, int, error) {
	if o.Bits < 1 || o.Bits > 8 {
		return 0, 0, fmt.Errorf("field Bits is %d, not in 1 to 8", o.Bits)
	}
	return w, h, checkP(o.P)
}

func (o RandomPosterize) draw(rng *rand.Rand, p *program) {
	if hit(rng, probability(o.P, 0.5)) {
		p.add(imagecapi.AugmentPosterize, [9]int32{int32(o.Bits)})
	}
}

// RandomSolarize inverts the bytes that are at least Threshold (0 to 255; 0 inverts all), with
// probability P (0: 1/2). The step also runs on a GPU that decodes.
type RandomSolarize struct{ Threshold, P float64 }

func (o RandomSolarize) check(w, h int) (int, int, error) {
	if !(o.Threshold >= 0 && o.Threshold <= 255) {
		return 0, 0, fmt.Errorf("field Threshold is %v, not in 0 to 255", o.Threshold)
	}
	return w, h, checkP(o.P)
}

func (o RandomSolarize) draw(rng *rand.Rand, p *program) {
	if hit(rng, probability(o.P, 0.5)) {
		p.add(imagecapi.AugmentSolarize, [9]int32{}, o.Threshold)
	}
}

// RandomAutocontrast stretches the values of each channel to the range 0 to 255, with probability P
// (0: 1/2). The step also runs on a GPU that decodes.
type RandomAutocontrast struct{ P float64 }

func (o RandomAutocontrast) check(w, h int) (int, int, error) { return w, h, checkP(o.P) }

func (o RandomAutocontrast) draw(rng *rand.Rand, p *program) {
	if hit(rng, probability(o.P, 0.5)) {
		p.add(imagecapi.AugmentAutocontrast, [9]int32{})
	}
}

// RandomEqualize equalises the histogram of each channel, with probability P (0: 1/2). The step
// also runs on a GPU that decodes.
type RandomEqualize struct{ P float64 }

func (o RandomEqualize) check(w, h int) (int, int, error) { return w, h, checkP(o.P) }

func (o RandomEqualize) draw(rng *rand.Rand, p *program) {
	if hit(rng, probability(o.P, 0.5)) {
		p.add(imagecapi.AugmentEqualize, [9]int32{})
	}
}
