package imageloader

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"

	"github.com/torchstream/torchstream/internal/imagecapi"
)

// Op is a step of Transform.Ops. Those that there are have the names, parameters, distributions and (on the same parameters) results of torchvision.transforms.v2 on
// uint8 tensors, to the bit except for GaussianBlur and the hue of ColorJitter, where one byte in a thousand may differ by 1. Their zero values have torchvision's
// defaults; where torchvision has none, a comment says what zero stands for. [Func] is a step of your own.
//
// What is random about a step is drawn from (Options.Seed, epoch, sample index), after the crop and the flip were, so that adding steps changes neither of them.
type Op interface {
	// check says what is wrong with the fields, for images of width x height pixels, and which size the step makes of them.
	check(width, height int) (w, h int, err error)
	// draw adds what the step does to one image.
	draw(rng *rand.Rand, p *program)
}

// program is what the steps do to one image.
type program struct {
	ops           []imagecapi.AugmentOp
	calls         []call
	width, height int // of the image after ops
	mean, std     [3]float32
}

// call is a Func that runs after the first `after` operations.
type call struct {
	after int
	run   Func
}

func (p *program) reset(t *Transform) {
	p.ops, p.calls, p.width, p.height, p.mean, p.std = p.ops[:0], p.calls[:0], t.Size, t.Size, t.Mean, t.Std
}

func (p *program) add(kind int32, integers [9]int32, values ...float64) {
	op := imagecapi.AugmentOp{Kind: kind, Integers: integers}
	copy(op.Values[:], values)
	p.ops = append(p.ops, op)
}

// Pixels are an image in memory: Height rows of Width pixels of three bytes, red, green and blue, Stride bytes apart. They belong to the loader and are valid during
// the call that they are given to.
type Pixels struct {
	Pix           []byte
	Width, Height int
	Stride        int
}

// Func is a step of your own, on an image of Size x Size pixels, which it changes in place. rng is the sample's own generator: what is drawn from it, and from nothing else,
// is the same at any number of workers and after a resume. An error makes the sample a bad one, with the reason Rejected. It is called by several goroutines at a
// time, each with its own image.
type Func func(rng *rand.Rand, image *Pixels) error

func (f Func) check(w, h int) (int, int, error) {
	if f == nil {
		return 0, 0, errors.New("a Func is nil")
	}
	return w, h, nil
}

func (f Func) draw(_ *rand.Rand, p *program) { p.calls = append(p.calls, call{len(p.ops), f}) }

// Interpolation says how a pixel is made of the ones around the place that it comes from.
type Interpolation int

const (
	// DefaultInterpolation is the step's own: nearest for all but RandomPerspective.
	DefaultInterpolation Interpolation = iota
	Nearest
	Bilinear
)

func (i Interpolation) or(d Interpolation) int32 {
	if i == DefaultInterpolation {
		i = d
	}
	return int32(i) // capi's numbers
}

func (i Interpolation) check() error {
	if i < DefaultInterpolation || i > Bilinear {
		return fmt.Errorf("field Interpolation is %d, not Nearest or Bilinear", i)
	}
	return nil
}

// Color is a red, a green and a blue byte; the zero value is black.
type Color [3]uint8

// PaddingMode says what lies outside of an image.
type PaddingMode int

const (
	PadConstant  PaddingMode = iota // one colour
	PadEdge                         // the nearest pixel of the edge
	PadReflect                      // the image mirrored at its edge pixels, which are not repeated
	PadSymmetric                    // the image mirrored, edge pixels repeated
)

func probability(p, fallback float64) float64 {
	if p == 0 {
		return fallback
	}
	return p
}

func checkP(p float64) error {
	if !(p >= 0 && p <= 1) {
		return fmt.Errorf("field P is %v, not in 0 to 1", p)
	}
	return nil
}

func hit(rng *rand.Rand, p float64) bool { return rng.Float64() < p }

func between(rng *rand.Rand, r [2]float64) float64 { return r[0] + rng.Float64()*(r[1]-r[0]) }

func interval(r, fallback [2]float64) [2]float64 {
	if r == [2]float64{} {
		return fallback
	}
	return r
}

func checkInterval(name string, r [2]float64, low, high float64) error {
	if !(r[0] >= low && r[0] <= r[1] && r[1] <= high) {
		return fmt.Errorf("field %s is %v, not an interval in %v to %v", name, r, low, high)
	}
	return nil
}

// RandomHorizontalFlip exchanges left and right with probability P (0: 1/2). Transform.FlipP costs less.
type RandomHorizontalFlip struct{ P float64 }

func (o RandomHorizontalFlip) check(w, h int) (int, int, error) { return w, h, checkP(o.P) }
func (o RandomHorizontalFlip) draw(rng *rand.Rand, p *program) {
	if hit(rng, probability(o.P, 0.5)) {
		p.add(imagecapi.AugmentFlipHorizontal, [9]int32{})
	}
}

// RandomVerticalFlip exchanges top and bottom with probability P (0: 1/2).
type RandomVerticalFlip struct{ P float64 }

func (o RandomVerticalFlip) check(w, h int) (int, int, error) { return w, h, checkP(o.P) }
func (o RandomVerticalFlip) draw(rng *rand.Rand, p *program) {
	if hit(rng, probability(o.P, 0.5)) {
		p.add(imagecapi.AugmentFlipVertical, [9]int32{})
	}
}

// Pad makes the image larger: Padding pixels at the left, top, right and bottom. A crop has to follow, since the steps together must keep the size.
type Pad struct {
	Padding [4]int
	Fill    Color // of PadConstant
	Mode    PaddingMode
}

func checkPadding(padding [4]int, mode PaddingMode, w, h int) error {
	if mode < PadConstant || mode > PadSymmetric {
		return fmt.Errorf("the padding mode is %d, not PadConstant, PadEdge, PadReflect or PadSymmetric", mode)
	}
	for i, n := range padding {
		side := w
		if i%2 == 1 {
			side = h
		}
		most := maxSide
		switch mode {
		case PadReflect:
			most = side - 1
		case PadSymmetric:
			most = side
		}
		if n < 0 || n > most {
			return fmt.Errorf("field Padding is %v: %d is not in 0 to %d", padding, n, most)
		}
	}
	return nil
}

func (o Pad) check(w, h int) (int, int, error) {
	return w + o.Padding[0] + o.Padding[2], h + o.Padding[1] + o.Padding[3], checkPadding(o.Padding, o.Mode, w, h)
}

func (o Pad) draw(_ *rand.Rand, p *program) {
	p.crop(-o.Padding[0], -o.Padding[1], p.width+o.Padding[0]+o.Padding[2], p.height+o.Padding[1]+o.Padding[3], o.Mode, o.Fill)
}

func (p *program) crop(x, y, w, h int, mode PaddingMode, fill Color) {
	p.add(imagecapi.AugmentCrop, [9]int32{int32(x), int32(y), int32(w), int32(h), int32(mode), int32(fill[0]), int32(fill[1]), int32(fill[2])})
	p.width, p.height = w, h
}

// RandomCrop takes a random square of Size pixels a side out of the image with Padding pixels (left, top, right, bottom) around it. Size 0 keeps the image's size:
// RandomCrop{Padding: [4]int{4, 4, 4, 4}} is what CIFAR-10 is trained with. For a random crop of a larger image, Transform.RandomCrop costs less.
type RandomCrop struct {
	Size    int
	Padding [4]int
	Fill    Color
	Mode    PaddingMode
}

func (o RandomCrop) size(w, h int) (int, int) {
	if o.Size == 0 {
		return w, h
	}
	return o.Size, o.Size
}

func (o RandomCrop) check(w, h int) (int, int, error) {
	cw, ch := o.size(w, h)
	if err := checkPadding(o.Padding, o.Mode, w, h); err != nil {
		return 0, 0, err
	}
	if o.Size < 0 || cw > w+o.Padding[0]+o.Padding[2] || ch > h+o.Padding[1]+o.Padding[3] {
		return 0, 0, fmt.Errorf("field Size is %d, not in 1 to the side of the padded image of %d x %d pixels", o.Size, w, h)
	}
	return cw, ch, nil
}

func (o RandomCrop) draw(rng *rand.Rand, p *program) {
	w, h := o.size(p.width, p.height)
	y := rng.IntN(p.height + o.Padding[1] + o.Padding[3] - h + 1)
	x := rng.IntN(p.width + o.Padding[0] + o.Padding[2] - w + 1)
	p.crop(x-o.Padding[0], y-o.Padding[1], w, h, o.Mode, o.Fill)
}

// CenterCrop takes the middle square of Size pixels a side; a smaller image gets a black border.
type CenterCrop struct{ Size int }

func (o CenterCrop) check(w, h int) (int, int, error) {
	if o.Size < 1 || o.Size > maxSide {
		return 0, 0, fmt.Errorf("field Size is %d, not in 1 to %d", o.Size, maxSide)
	}
	return o.Size, o.Size, nil
}

func (o CenterCrop) draw(_ *rand.Rand, p *program) {
	begin := func(side int) int {
		if side < o.Size {
			return -((o.Size - side) / 2)
		}
		return int(centre(side, o.Size))
	}
	p.crop(begin(p.width), begin(p.height), o.Size, o.Size, PadConstant, Color{})
}

// ColorJitter changes brightness, contrast and saturation by factors that are uniform in 1-x to 1+x (but not negative) and turns the hue by a part of the circle
// that is uniform in -x to x (x at most 1/2), in random order. What is 0 stays. A range, if not zero, is the factors' interval in place of that.
type ColorJitter struct {
	Brightness, Contrast, Saturation, Hue                     float64
	BrightnessRange, ContrastRange, SaturationRange, HueRange [2]float64
}

// ranges are the intervals of the four factors.
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
		name        string
		value, most float64
	}{{"Brightness", o.Brightness, 1e5}, {"Contrast", o.Contrast, 1e5}, {"Saturation", o.Saturation, 1e5}, {"Hue", o.Hue, 0.5}} {
		if !(f.value >= 0 && f.value <= f.most) {
			return 0, 0, fmt.Errorf("field %s is %v, not in 0 to %v", f.name, f.value, f.most)
		}
	}
	for i, r := range o.ranges() {
		low, most := 0., 1e6
		if i == 3 {
			low, most = -0.5, 0.5
		}
		if err := checkInterval([4]string{"Brightness", "Contrast", "Saturation", "Hue"}[i]+"Range", r, low, most); err != nil {
			return 0, 0, err
		}
	}
	return w, h, nil
}

func (o ColorJitter) draw(rng *rand.Rand, p *program) {
	var order [4]int
	for i := range order { // Fisher-Yates, inside out
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

var jitterKinds = [4]int32{imagecapi.AugmentBrightness, imagecapi.AugmentContrast, imagecapi.AugmentSaturation, imagecapi.AugmentHue}

// RandomPhotometricDistort changes brightness, contrast, saturation and hue by factors that are uniform in intervals (zero values: 0.875 to 1.125, 0.5 to 1.5, 0.5 to 1.5 and
// -0.05 to 0.05), contrast before or after the others, and permutes the channels: each with probability P (0: 1/2).
type RandomPhotometricDistort struct {
	Brightness, Contrast, Saturation, Hue [2]float64
	P                                     float64
}

func (o RandomPhotometricDistort) ranges() [4][2]float64 {
	half := [2]float64{0.5, 1.5}
	return [4][2]float64{interval(o.Brightness, [2]float64{0.875, 1.125}), interval(o.Contrast, half), interval(o.Saturation, half), interval(o.Hue, [2]float64{-0.05, 0.05})}
}

func (o RandomPhotometricDistort) check(w, h int) (int, int, error) {
	r := o.ranges()
	if _, _, err := (ColorJitter{BrightnessRange: r[0], ContrastRange: r[1], SaturationRange: r[2], HueRange: r[3]}).check(w, h); err != nil {
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

// RandomChannelPermutation exchanges the channels in one of the six ways, none of them included.
type RandomChannelPermutation struct{}

func (RandomChannelPermutation) check(w, h int) (int, int, error) { return w, h, nil }
func (RandomChannelPermutation) draw(rng *rand.Rand, p *program) {
	var order [9]int32
	for i := range 3 { // Fisher-Yates, inside out
		j := rng.IntN(i + 1)
		order[i], order[j] = order[j], int32(i)
	}
	p.add(imagecapi.AugmentPermute, order)
}

// GaussianNoise adds to every byte a number from a normal distribution with the mean 255*Mean and the deviation 255*Sigma (0: 0.1), cut to a whole one.
type GaussianNoise struct{ Mean, Sigma float64 }

func (o GaussianNoise) check(w, h int) (int, int, error) {
	if !(o.Mean >= -1 && o.Mean <= 1 && o.Sigma >= 0 && o.Sigma <= 10) {
		return 0, 0, fmt.Errorf("fields Mean and Sigma are %v and %v, not in -1 to 1 and 0 to 10", o.Mean, o.Sigma)
	}
	return w, h, nil
}

func (o GaussianNoise) draw(_ *rand.Rand, p *program) {
	mean, sigma := 255*o.Mean, 255*probability(o.Sigma, 0.1)
	p.calls = append(p.calls, call{len(p.ops), func(rng *rand.Rand, image *Pixels) error {
		for y := range image.Height {
			row := image.Pix[y*image.Stride:][:3*image.Width]
			for i := range row {
				row[i] = byte(min(max(int(row[i])+int(mean+sigma*rng.NormFloat64()), 0), 255))
			}
		}
		return nil
	}})
}

// Grayscale makes the three channels equal.
type Grayscale struct{}

func (Grayscale) check(w, h int) (int, int, error) { return w, h, nil }
func (Grayscale) draw(_ *rand.Rand, p *program)    { p.add(imagecapi.AugmentGrayscale, [9]int32{}) }

// RandomGrayscale makes the three channels equal with probability P (0: 0.1).
type RandomGrayscale struct{ P float64 }

func (o RandomGrayscale) check(w, h int) (int, int, error) { return w, h, checkP(o.P) }
func (o RandomGrayscale) draw(rng *rand.Rand, p *program) {
	if hit(rng, probability(o.P, 0.1)) {
		p.add(imagecapi.AugmentGrayscale, [9]int32{})
	}
}

// GaussianBlur blurs with a kernel of KernelSize (width, height; odd; 0: 3) and a deviation that is uniform in Sigma (zero value: 0.1 to 2).
type GaussianBlur struct {
	KernelSize [2]int
	Sigma      [2]float64
}

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
			return 0, 0, fmt.Errorf("field KernelSize is %v: %d is not odd, positive, and less than twice the image's side (%d)", o.KernelSize, k, side)
		}
	}
	return w, h, checkInterval("Sigma", interval(o.Sigma, [2]float64{0.1, 2}), 1e-3, 1e3)
}

func (o GaussianBlur) draw(rng *rand.Rand, p *program) {
	sigma := between(rng, interval(o.Sigma, [2]float64{0.1, 2}))
	sides := o.sides()
	p.add(imagecapi.AugmentBlur, [9]int32{int32(sides[0]), int32(sides[1])}, sigma, sigma)
}

// RandomErasing replaces, with probability P (0: 1/2), a box by one colour: its share of the area is uniform in Scale (zero value: 0.02 to 0.33), the logarithm of height/width
// between those of Ratio (zero value: 0.3 to 3.3). Value is the colour before normalisation, as everywhere in Ops: for what torchvision's value=0 is after Normalize, take
// 255 * Mean. Random is torchvision's value="random" instead: every byte is drawn so that it comes from a standard normal distribution after normalisation, as far as 0 to 255
// reach.
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
		p.add(imagecapi.AugmentErase, [9]int32{int32(x), int32(y), int32(w), int32(h), int32(o.Value[0]), int32(o.Value[1]), int32(o.Value[2])})
		return
	}
}

// noise fills a box with what is standard normal after normalisation.
func (p *program) noise(x, y, w, h int) {
	mean, std := p.mean, p.std
	p.calls = append(p.calls, call{len(p.ops), func(rng *rand.Rand, image *Pixels) error {
		for row := range h {
			to := image.Pix[(y+row)*image.Stride+3*x:][:3*w]
			for i := range to {
				v := 255 * (float64(mean[i%3]) + float64(std[i%3])*rng.NormFloat64())
				to[i] = byte(min(max(math.RoundToEven(v), 0), 255))
			}
		}
		return nil
	}})
}

// RandomInvert replaces every byte by 255 minus it, with probability P (0: 1/2).
type RandomInvert struct{ P float64 }

func (o RandomInvert) check(w, h int) (int, int, error) { return w, h, checkP(o.P) }
func (o RandomInvert) draw(rng *rand.Rand, p *program) {
	if hit(rng, probability(o.P, 0.5)) {
		p.add(imagecapi.AugmentInvert, [9]int32{})
	}
}

// RandomPosterize keeps the upper Bits (1 to 8) bits of every byte, with probability P (0: 1/2).
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

// RandomSolarize inverts the bytes of at least Threshold (0 to 255; 0 inverts all), with probability P (0: 1/2).
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

// RandomAdjustSharpness blurs (SharpnessFactor under 1, 0 most) or sharpens (over 1), with probability P (0: 1/2).
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

// RandomAutocontrast stretches every channel to 0 to 255, with probability P (0: 1/2).
type RandomAutocontrast struct{ P float64 }

func (o RandomAutocontrast) check(w, h int) (int, int, error) { return w, h, checkP(o.P) }
func (o RandomAutocontrast) draw(rng *rand.Rand, p *program) {
	if hit(rng, probability(o.P, 0.5)) {
		p.add(imagecapi.AugmentAutocontrast, [9]int32{})
	}
}

// RandomEqualize evens out the histogram of every channel, with probability P (0: 1/2).
type RandomEqualize struct{ P float64 }

func (o RandomEqualize) check(w, h int) (int, int, error) { return w, h, checkP(o.P) }
func (o RandomEqualize) draw(rng *rand.Rand, p *program) {
	if hit(rng, probability(o.P, 0.5)) {
		p.add(imagecapi.AugmentEqualize, [9]int32{})
	}
}

// RandomApply does all of Ops, which must keep the size, with probability P (0: 1/2), or none.
type RandomApply struct {
	Ops []Op
	P   float64
}

func (o RandomApply) check(w, h int) (int, int, error) {
	if err := checkP(o.P); err != nil {
		return 0, 0, err
	}
	return w, h, checkOps(o.Ops, w, h)
}

func (o RandomApply) draw(rng *rand.Rand, p *program) {
	if hit(rng, probability(o.P, 0.5)) {
		for _, op := range o.Ops {
			op.draw(rng, p)
		}
	}
}

// RandomChoice does one of Ops, each of which must keep the size: with the probabilities P, which are divided by their sum; all are as likely if P is empty.
type RandomChoice struct {
	Ops []Op
	P   []float64
}

func (o RandomChoice) check(w, h int) (int, int, error) {
	if len(o.Ops) == 0 {
		return 0, 0, errors.New("field Ops is empty")
	}
	sum := 0.
	for _, p := range o.P {
		if !(p >= 0) {
			sum = math.NaN()
		}
		sum += p
	}
	if len(o.P) > 0 && (len(o.P) != len(o.Ops) || !(sum > 0) || math.IsInf(sum, 0)) {
		return 0, 0, fmt.Errorf("field P is %v, not a probability for each of %d Ops", o.P, len(o.Ops))
	}
	return w, h, checkEach(o.Ops, w, h)
}

func (o RandomChoice) draw(rng *rand.Rand, p *program) {
	if len(o.P) == 0 {
		o.Ops[rng.IntN(len(o.Ops))].draw(rng, p)
		return
	}
	sum := 0.
	for _, p := range o.P {
		sum += p
	}
	at, last := rng.Float64()*sum, 0
	for i, p := range o.P {
		if p > 0 {
			last = i
			if at -= p; at < 0 {
				break
			}
		}
	}
	o.Ops[last].draw(rng, p)
}

// RandomOrder does all of Ops, each of which must keep the size, in random order.
type RandomOrder struct{ Ops []Op }

func (o RandomOrder) check(w, h int) (int, int, error) { return w, h, checkEach(o.Ops, w, h) }
func (o RandomOrder) draw(rng *rand.Rand, p *program) {
	for _, i := range rng.Perm(len(o.Ops)) {
		o.Ops[i].draw(rng, p)
	}
}

// checkEach checks steps each of which must keep the size.
func checkEach(ops []Op, w, h int) error {
	for i := range ops {
		if err := checkOps(ops[i:i+1], w, h); err != nil {
			return err
		}
	}
	return nil
}

// onPixels says whether a step works on the image in Go's memory, which has the whole size.
func onPixels(op Op) bool {
	switch o := op.(type) {
	case Func, GaussianNoise:
		return true
	case RandomErasing:
		return o.Random
	case RandomApply:
		return slices.ContainsFunc(o.Ops, onPixels)
	case RandomChoice:
		return slices.ContainsFunc(o.Ops, onPixels)
	case RandomOrder:
		return slices.ContainsFunc(o.Ops, onPixels)
	}
	return false
}

// checkOps checks steps that together must keep the size.
func checkOps(ops []Op, width, height int) error {
	w, h := width, height
	for i, op := range ops {
		if op == nil {
			return fmt.Errorf("field Ops[%d] is nil", i)
		}
		if onPixels(op) && (w != width || h != height) {
			return fmt.Errorf("field Ops[%d] (%T) is on %d x %d pixels: it must come before or after steps that change the size, not between", i, op, w, h)
		}
		if r, ok := op.(RandomRotation); ok && r.Expand {
			if next, ok := at(ops, i+1).(CenterCrop); !ok || next.Size == 0 {
				return fmt.Errorf("field Ops[%d] (%T) has Expand, which makes images of any size: the next step must be a CenterCrop", i, op)
			}
		}
		nw, nh, err := op.check(w, h)
		if err == nil && (nw > maxSide || nh > maxSide) {
			err = fmt.Errorf("it makes %d x %d pixels", nw, nh)
		}
		if err != nil {
			return fmt.Errorf("field Ops[%d] (%T): %w", i, op, err)
		}
		w, h = nw, nh
	}
	if w != width || h != height {
		return fmt.Errorf("field Ops makes %d x %d pixels of %d x %d: a crop to the old size is missing", w, h, width, height)
	}
	return nil
}

// at is a step, or nil.
func at(ops []Op, i int) Op {
	if i < len(ops) {
		return ops[i]
	}
	return nil
}

// augmenter runs programs, for one goroutine.
type augmenter struct {
	c       *imagecapi.Augmenter
	program program
}

func newAugmenter() (*augmenter, error) {
	c, err := imagecapi.NewAugmenter()
	if err != nil {
		return nil, err
	}
	return &augmenter{c: c}, nil
}

func (a *augmenter) close() { imagecapi.FreeAugmenter(a.c) }

// errRejected wraps what a Func returned.
type errRejected struct{ error }

func (e errRejected) Unwrap() error { return e.error }

// run does t.Ops on size x size pixels.
func (a *augmenter) run(t *Transform, rng *rand.Rand, pixels []byte) error {
	a.program.reset(t)
	for _, op := range t.Ops {
		op.draw(rng, &a.program)
	}
	done := 0
	for _, c := range a.program.calls {
		if err := a.ops(t, pixels, a.program.ops[done:c.after]); err != nil {
			return err
		}
		done = c.after
		if err := c.run(rng, &Pixels{Pix: pixels, Width: t.Size, Height: t.Size, Stride: 3 * t.Size}); err != nil {
			return errRejected{err}
		}
	}
	return a.ops(t, pixels, a.program.ops[done:])
}

func (a *augmenter) ops(t *Transform, pixels []byte, ops []imagecapi.AugmentOp) error {
	return imagecapi.Augment(a.c, pixels, t.Size, t.Size, 3*t.Size, ops)
}
