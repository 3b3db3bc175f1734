package imageloader

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/order"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// golden is what torchvision gave (cshim/test/image/make_augment.py).
type golden struct {
	Width, Height, Seed int
	Steps               [][6]any // policy, operation, bin, sign, magnitude, CRC-32 of the result
	Rotations           [][6]any // angle, width, height, interpolation, fill, CRC-32
	Policies            map[string][][2][3]any
	Centres             [][8]any // angle, width, height, interpolation, fill, centre, CRC-32 of rotate and of affine
	Expansions          [][8]any // angle, width, height, interpolation, fill, width and height of the result, CRC-32 of its upper left corner
}

func readGolden(t *testing.T) *golden {
	t.Helper()
	data, err := os.ReadFile("testdata/augment.json")
	if err != nil {
		t.Fatal(err)
	}
	g := &golden{}
	if err := json.Unmarshal(data, g); err != nil {
		t.Fatal(err)
	}
	return g
}

// numbered is the picture that make_augment.py makes of a number.
func numbered(seed uint64, w, h int) []byte {
	out := make([]byte, 0, 3*w*h)
	state := seed
	for y := range h {
		for x := range w {
			for c := range 3 {
				state = state*6364136223846793005 + 1442695040888963407
				noise := int(state >> 56)
				slope := (x*7 + y*5 + c*40) % 256
				if slope < 128 {
					slope *= 2
				} else {
					slope = 510 - 2*slope
				}
				out = append(out, byte([]int{slope*7/8 + noise/8, noise, 100 + noise/16, slope*7/8 + noise/8}[seed%4]))
			}
		}
	}
	return out
}

// checksum runs a program on a numbered picture.
func checksum(t *testing.T, seed uint64, w, h int, draw func(p *program)) string {
	t.Helper()
	a, err := newAugmenter()
	if err != nil {
		t.Fatal(err)
	}
	defer a.close()
	p := program{width: w, height: h}
	draw(&p)
	pixels := numbered(seed, w, h)
	if err := imagecapi.Augment(a.c, pixels, w, h, 3*w, p.ops); err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%08x", crc32.ChecksumIEEE(pixels))
}

var policyNames = map[string]policyOp{
	"Identity": opIdentity, "ShearX": opShearX, "ShearY": opShearY, "TranslateX": opTranslateX, "TranslateY": opTranslateY, "Rotate": opRotate, "Brightness": opBrightness,
	"Color": opColor, "Contrast": opContrast, "Sharpness": opSharpness, "Posterize": opPosterize, "Solarize": opSolarize, "AutoContrast": opAutoContrast,
	"Equalize": opEqualize, "Invert": opInvert,
}

// TestPolicySteps: every operation of the policies at its strengths gives torchvision's bytes.
func TestPolicySteps(t *testing.T) {
	g := readGolden(t)
	if len(g.Steps) < 600 {
		t.Fatalf("only %d steps", len(g.Steps))
	}
	for _, s := range g.Steps {
		op, known := policyNames[s[1].(string)]
		if !known {
			t.Fatalf("what is %v?", s[1])
		}
		space, bins := &randSpace, 31
		switch s[0] {
		case "TrivialAugmentWide":
			space = &wideSpace
		case "AutoAugment":
			bins = 10
		}
		m := space.magnitude(op, int(s[2].(float64)), bins, g.Width, g.Height)
		if want := s[4].(float64); m != want {
			t.Errorf("%v: magnitude %v, want %v", s, m, want)
		}
		m *= s[3].(float64)
		if got := checksum(t, uint64(g.Seed), g.Width, g.Height, func(p *program) { p.policy(op, m, DefaultInterpolation, nil) }); got != s[5] {
			t.Errorf("%v: %s", s, got)
		}
	}
}

func TestRotations(t *testing.T) {
	for _, r := range readGolden(t).Rotations {
		fill := r[4].([]any)
		c := Color{uint8(fill[0].(float64)), uint8(fill[1].(float64)), uint8(fill[2].(float64))}
		got := checksum(t, 8, int(r[1].(float64)), int(r[2].(float64)), func(p *program) { p.rotate(r[0].(float64), nil, false, Interpolation(r[3].(float64)), &c) })
		if got != r[5] {
			t.Errorf("%v: %s", r, got)
		}
	}
}

func colorOf(v any) Color {
	fill := v.([]any)
	return Color{uint8(fill[0].(float64)), uint8(fill[1].(float64)), uint8(fill[2].(float64))}
}

// TestCentres: about another centre than the image's.
func TestCentres(t *testing.T) {
	for _, r := range readGolden(t).Centres {
		c, at, i := colorOf(r[4]), r[5].([]any), Interpolation(r[3].(float64))
		centre := &[2]float64{at[0].(float64), at[1].(float64)}
		w, h, angle := int(r[1].(float64)), int(r[2].(float64)), r[0].(float64)
		if got := checksum(t, 8, w, h, func(p *program) { p.rotate(angle, centre, false, i, &c) }); got != r[6] {
			t.Errorf("rotate %v: %s", r, got)
		}
		a := affine{angle: angle, translate: [2]float64{3, -2}, scale: 0.8, shear: [2]float64{5, -7}, centre: centre}
		if got := checksum(t, 8, w, h, func(p *program) { p.affine(a, i, &c) }); got != r[7] {
			t.Errorf("affine %v: %s", r, got)
		}
	}
}

// TestExpand: what a turned image that is held whole is as large as, and its pixels.
func TestExpand(t *testing.T) {
	for _, r := range readGolden(t).Expansions {
		c, w, h := colorOf(r[4]), int(r[1].(float64)), int(r[2].(float64))
		got := checksum(t, 8, w, h, func(p *program) {
			p.rotate(r[0].(float64), nil, true, Interpolation(r[3].(float64)), &c)
			if p.width != int(r[5].(float64)) || p.height != int(r[6].(float64)) {
				t.Errorf("%v: %d x %d", r, p.width, p.height)
			}
			p.crop(0, 0, w, h, PadConstant, Color{})
		})
		if got != r[7] {
			t.Errorf("%v: %s", r, got)
		}
	}
}

// TestNoise: RandomErasing with random values is standard normal after normalisation, in its box alone, and GaussianNoise has the deviation asked for; both are the same
// at every run.
func TestNoise(t *testing.T) {
	transform := Transform{Size: 200, Ops: []Op{RandomErasing{P: 1, Scale: [2]float64{0.3, 0.3}, Random: true}}}.withDefaults()
	run := func(fill byte) []byte {
		a, err := newAugmenter()
		if err != nil {
			t.Fatal(err)
		}
		defer a.close()
		pixels := bytes.Repeat([]byte{fill}, 3*200*200)
		if err := a.run(&transform, rand.New(rand.NewPCG(1, 2)), pixels); err != nil {
			t.Fatal(err)
		}
		return pixels
	}
	first, second := run(77), run(78)
	var erased, others int
	var values []float64
	for i := range first {
		switch {
		case first[i] == second[i]: // the noise
			erased++
			if z := (float64(first[i])/255 - float64(transform.Mean[i%3])) / float64(transform.Std[i%3]); i%3 == 0 {
				values = append(values, z)
			}
		case first[i] == 77 && second[i] == 78:
			others++
		}
	}
	if erased+others != len(first) || math.Abs(float64(erased)/float64(len(first))-0.3) > 0.01 {
		t.Errorf("%d bytes are erased and %d are not, of %d", erased, others, len(first))
	}
	// A level is 0.0171 deviations of red, and 0 and 255 take what lies beyond.
	distance := kolmogorov(values, func(z float64) float64 {
		if z >= (1-0.485)/0.229-1e-6 {
			return 1
		}
		return 0.5 * math.Erfc(-(math.Floor(z*0.229*255+0.485*255+1e-3)+0.5-0.485*255)/255/0.229/math.Sqrt2)
	})
	if limit := ksLimit * math.Sqrt(manyDraws/float64(len(values))); distance > limit {
		t.Errorf("the distribution is off by %.4f, more than %.4f", distance, limit)
	}

	transform.Ops = []Op{GaussianNoise{Mean: 0.02, Sigma: 0.05}}
	noisy := run(120)
	if !bytes.Equal(noisy, run(120)) {
		t.Error("another run has other noise")
	}
	var sum, squares float64
	for _, b := range noisy {
		sum += float64(b)
		squares += float64(b) * float64(b)
	}
	n := float64(len(noisy))
	mean := sum / n
	// Cutting towards zero takes up to half a level off.
	if deviation := math.Sqrt(squares/n - mean*mean); math.Abs(mean-(120+0.02*255)) > 0.5 || deviation > 0.05*255 || deviation < 0.05*255-0.5 {
		t.Errorf("mean %v, deviation %v", mean, deviation)
	}
}

// TestAutoAugmentRules compares the tables with torchvision's.
func TestAutoAugmentRules(t *testing.T) {
	for name, rules := range readGolden(t).Policies {
		policy, known := map[string]AutoAugmentPolicy{"imagenet": ImageNetPolicy, "cifar10": CIFAR10Policy, "svhn": SVHNPolicy}[name]
		if !known || len(rules) != 25 {
			t.Fatalf("policy %q has %d rules", name, len(rules))
		}
		for i, rule := range rules {
			for j, step := range rule {
				bin, _ := step[2].(float64) // null: no strength
				want := policyStep{policyNames[step[0].(string)], step[1].(float64), int(bin)}
				if got := (AutoAugment{Policy: policy}).rules()[i][j]; got != want {
					t.Errorf("%s, rule %d, step %d: %v, want %v", name, i, j, got, want)
				}
			}
		}
	}
}

// TestPerspective compares coefficients with torchvision's _get_perspective_coeffs.
func TestPerspective(t *testing.T) {
	for _, c := range []struct {
		w, h int
		to   [4][2]int
		want [8]float64
	}{
		{224, 224, [4][2]int{{10, 20}, {200, 5}, {215, 190}, {30, 220}}, [8]float64{1.0682504177093506, -0.10682504624128342, -8.546003341674805, 0.08515805751085281, 1.0786687135696411, -22.424955368041992, -0.000411798624554649, -5.723936919821426e-05}},
		{64, 48, [4][2]int{{0, 0}, {63, 0}, {63, 47}, {0, 47}}, [8]float64{1, 0, 0, 0, 1, 0, 0, 0}},
	} {
		got, ok := perspective(c.w, c.h, c.to)
		if !ok {
			t.Fatal("not solved")
		}
		for i := range got {
			if math.Abs(got[i]-c.want[i]) > 1e-6*math.Max(math.Abs(c.want[i]), 1e-6)+1e-9 {
				t.Errorf("coefficient %d is %v, want %v", i, got[i], c.want[i])
			}
		}
	}
	if _, ok := perspective(10, 10, [4][2]int{{1, 1}, {2, 2}, {3, 3}, {4, 4}}); ok {
		t.Error("corners on a line have no perspective")
	}
}

// draws collects n programs of one step, as the loader seeds them.
func draws(op Op, w, h, n int, visit func(p *program)) {
	var source rand.PCG
	rng := rand.New(&source)
	for i := range n {
		order.Seed(&source, 9, order.OfSample, 1, i)
		p := program{width: w, height: h}
		op.draw(rng, &p)
		visit(&p)
	}
}

// kolmogorov is the largest distance between the distribution of values and cdf. values are sorted; for values with steps, cdf must be that of the steps.
func kolmogorov(values []float64, cdf func(float64) float64) float64 {
	slices.Sort(values)
	worst, n := 0.0, float64(len(values))
	for i := 0; i < len(values); {
		j := i
		for j < len(values) && values[j] == values[i] {
			j++
		}
		worst = math.Max(worst, math.Abs(cdf(values[i])-float64(j)/n))
		if i > 0 {
			worst = math.Max(worst, math.Abs(cdf(math.Nextafter(values[i], math.Inf(-1)))-float64(i)/n))
		}
		i = j
	}
	return worst
}

const (
	manyDraws = 100_000
	// ksLimit is passed by chance once in 10,000 tests of 100,000 draws: sqrt(ln(2/1e-4)/2/n).
	ksLimit = 0.00704
)

func uniformCDF(low, high float64) func(float64) float64 {
	return func(x float64) float64 { return math.Min(math.Max((x-low)/(high-low), 0), 1) }
}

// stepsCDF is the distribution of an integer that is uniform in low to high, both included.
func stepsCDF(low, high int) func(float64) float64 {
	return func(x float64) float64 {
		return math.Min(math.Max((math.Floor(x)-float64(low)+1)/float64(high-low+1), 0), 1)
	}
}

// roundedCDF is the distribution of round(u), u uniform in -most to most.
func roundedCDF(most float64) func(float64) float64 {
	return func(x float64) float64 { return math.Min(math.Max((math.Floor(x)+0.5+most)/(2*most), 0), 1) }
}

// TestAugmentDistributions compares 100,000 draws of every parameter with torchvision's distribution of it.
func TestAugmentDistributions(t *testing.T) {
	first := func(kind int32, value func(op *imagecapi.AugmentOp) float64) func(*program) []float64 {
		return func(p *program) (values []float64) {
			for i := range p.ops {
				if p.ops[i].Kind == kind {
					values = append(values, value(&p.ops[i]))
				}
			}
			return values
		}
	}
	value := func(op *imagecapi.AugmentOp) float64 { return op.Values[0] }
	integer := func(i int) func(op *imagecapi.AugmentOp) float64 {
		return func(op *imagecapi.AugmentOp) float64 { return float64(op.Integers[i]) }
	}
	jitter := ColorJitter{Brightness: 0.4, Contrast: 1.5, Saturation: 0.2, Hue: 0.1}
	angle := func(op *imagecapi.AugmentOp) float64 { return math.Atan2(op.Values[3], op.Values[0]) * 180 / math.Pi }
	for _, c := range []struct {
		name   string
		op     Op
		values func(*program) []float64
		share  float64 // of the draws, that have a value
		cdf    func(float64) float64
	}{
		{"jitter brightness", jitter, first(imagecapi.AugmentBrightness, value), 1, uniformCDF(0.6, 1.4)},
		{"jitter contrast", jitter, first(imagecapi.AugmentContrast, value), 1, uniformCDF(0, 2.5)},
		{"jitter saturation", jitter, first(imagecapi.AugmentSaturation, value), 1, uniformCDF(0.8, 1.2)},
		{"jitter hue", jitter, first(imagecapi.AugmentHue, value), 1, uniformCDF(-0.1, 0.1)},
		{"jitter order", jitter, func(p *program) []float64 { // which of the 24
			rank := 0
			for i := range p.ops {
				smaller := 0
				for j := i + 1; j < len(p.ops); j++ {
					if jitterRank(p.ops[j].Kind) < jitterRank(p.ops[i].Kind) {
						smaller++
					}
				}
				rank = rank*(4-i) + smaller
			}
			return []float64{float64(rank)}
		}, 1, stepsCDF(0, 23)},
		{"jitter range", ColorJitter{SaturationRange: [2]float64{1.1, 1.7}}, first(imagecapi.AugmentSaturation, value), 1, uniformCDF(1.1, 1.7)},
		{"jitter hue range", ColorJitter{HueRange: [2]float64{0, 0.3}}, first(imagecapi.AugmentHue, value), 1, uniformCDF(0, 0.3)},
		{"distort brightness", RandomPhotometricDistort{}, first(imagecapi.AugmentBrightness, value), 0.5, uniformCDF(0.875, 1.125)},
		{"distort contrast", RandomPhotometricDistort{P: 0.7}, first(imagecapi.AugmentContrast, value), 0.7, uniformCDF(0.5, 1.5)},
		{"distort hue", RandomPhotometricDistort{P: 0.7}, first(imagecapi.AugmentHue, value), 0.7, uniformCDF(-0.05, 0.05)},
		{"distort order", RandomPhotometricDistort{P: 1}, func(p *program) []float64 { // 1: contrast comes before saturation
			if p.ops[1].Kind == imagecapi.AugmentContrast {
				return []float64{1}
			}
			return nil
		}, 0.5, nil},
		{"distort channels", RandomPhotometricDistort{P: 0.2}, first(imagecapi.AugmentPermute, value), 0.2, nil},
		{"channels", RandomChannelPermutation{}, first(imagecapi.AugmentPermute, func(op *imagecapi.AugmentOp) float64 { // which of the six
			second := op.Integers[1]
			if second > op.Integers[0] {
				second--
			}
			return float64(2*op.Integers[0] + second)
		}), 1, stepsCDF(0, 5)},
		{"choice with probabilities", RandomChoice{Ops: []Op{Grayscale{}, RandomInvert{P: 1}, CenterCrop{64}}, P: []float64{1, 3, 0}}, first(imagecapi.AugmentInvert, value), 0.75, nil},
		{"order", RandomOrder{Ops: []Op{Grayscale{}, RandomInvert{P: 1}}}, func(p *program) []float64 {
			if len(p.ops) == 2 && p.ops[0].Kind == imagecapi.AugmentInvert && p.ops[1].Kind == imagecapi.AugmentGrayscale {
				return []float64{1}
			}
			return nil
		}, 0.5, nil},
		{"blur sigma", GaussianBlur{KernelSize: [2]int{5, 9}, Sigma: [2]float64{0.5, 5}}, first(imagecapi.AugmentBlur, value), 1, uniformCDF(0.5, 5)},
		{"crop x", RandomCrop{Padding: [4]int{4, 2, 3, 1}}, first(imagecapi.AugmentCrop, integer(0)), 1, stepsCDF(-4, 3)},
		{"crop y", RandomCrop{Padding: [4]int{4, 2, 3, 1}}, first(imagecapi.AugmentCrop, integer(1)), 1, stepsCDF(-2, 1)},
		{"vertical flip", RandomVerticalFlip{P: 0.3}, first(imagecapi.AugmentFlipVertical, value), 0.3, nil},
		{"horizontal flip", RandomHorizontalFlip{}, first(imagecapi.AugmentFlipHorizontal, value), 0.5, nil},
		{"grayscale", RandomGrayscale{}, first(imagecapi.AugmentGrayscale, value), 0.1, nil},
		{"invert", RandomInvert{P: 1}, first(imagecapi.AugmentInvert, value), 1, nil},
		{"posterize", RandomPosterize{Bits: 2}, first(imagecapi.AugmentPosterize, value), 0.5, nil},
		{"solarize", RandomSolarize{Threshold: 128, P: 0.2}, first(imagecapi.AugmentSolarize, value), 0.2, nil},
		{"sharpness", RandomAdjustSharpness{SharpnessFactor: 2}, first(imagecapi.AugmentSharpness, value), 0.5, nil},
		{"autocontrast", RandomAutocontrast{}, first(imagecapi.AugmentAutocontrast, value), 0.5, nil},
		{"equalize", RandomEqualize{}, first(imagecapi.AugmentEqualize, value), 0.5, nil},
		{"apply", RandomApply{Ops: []Op{Grayscale{}}, P: 0.8}, first(imagecapi.AugmentGrayscale, value), 0.8, nil},
		{"choice", RandomChoice{Ops: []Op{Grayscale{}, RandomInvert{P: 1}, RandomInvert{P: 1}}}, first(imagecapi.AugmentInvert, value), 2. / 3, nil},
		{"rotation", RandomRotation{Degrees: [2]float64{-20, 70}}, first(imagecapi.AugmentAffine, angle), 1, uniformCDF(-20, 70)},
		{"affine x", RandomAffine{Translate: [2]float64{0.1, 0.3}}, first(imagecapi.AugmentAffine, func(op *imagecapi.AugmentOp) float64 { return -op.Values[2] }), 1, roundedCDF(6.4)},
		{"affine y", RandomAffine{Translate: [2]float64{0.1, 0.3}}, first(imagecapi.AugmentAffine, func(op *imagecapi.AugmentOp) float64 { return -op.Values[5] }), 1, roundedCDF(14.4)},
		{"affine scale", RandomAffine{Scale: [2]float64{0.5, 1.5}}, first(imagecapi.AugmentAffine, func(op *imagecapi.AugmentOp) float64 { return 1 / op.Values[0] }), 1, uniformCDF(0.5, 1.5)},
		{"affine shear x", RandomAffine{Shear: [4]float64{-10, 30}}, first(imagecapi.AugmentAffine, func(op *imagecapi.AugmentOp) float64 { return math.Atan(op.Values[1]) * 180 / math.Pi }), 1, uniformCDF(-10, 30)},
		{"perspective", RandomPerspective{P: 0.25}, first(imagecapi.AugmentPerspective, value), 0.25, nil},
		{"erasing", RandomErasing{P: 0.4}, first(imagecapi.AugmentErase, value), 0.4, nil},
		{"trivial rotate", TrivialAugmentWide{}, first(imagecapi.AugmentQuarterTurns, value), 0, nil}, // 90 degrees is bin 20: 135 * 20/30 is 90.000003 in float32
		{"trivial brightness", TrivialAugmentWide{}, first(imagecapi.AugmentBrightness, value), 1. / 14, func(x float64) float64 { return stepsCDF(0, 60)(math.Round((x-1)/0.99*30) + 30) }},
		{"trivial posterize", TrivialAugmentWide{}, first(imagecapi.AugmentPosterize, integer(0)), 1. / 14, func(x float64) float64 { // 8 - i/5, rounded
			return [...]float64{0, 0, 3. / 31, 8. / 31, 13. / 31, 18. / 31, 23. / 31, 28. / 31, 1}[int(math.Floor(x))]
		}},
		{"rand equalize", RandAugment{NumOps: 1}, first(imagecapi.AugmentEqualize, value), 1. / 14, nil},
		{"auto invert", AutoAugment{}, first(imagecapi.AugmentInvert, value), (0.6 + 0.6 + 0.6) / 25, nil},
	} {
		var values []float64
		draws(c.op, 64, 48, manyDraws, func(p *program) { values = append(values, c.values(p)...) })
		share, n := float64(len(values))/manyDraws, float64(manyDraws)
		if math.Abs(share-c.share) > 4*math.Sqrt(c.share*(1-c.share)/n)+1e-9 {
			t.Errorf("%s: in %v of the draws, want %v", c.name, share, c.share)
		}
		if c.cdf == nil {
			continue
		}
		limit := ksLimit / math.Sqrt(c.share)
		if c.name == "trivial brightness" { // a bin of 0 has one sign only
			limit += 1. / 61
		}
		if d := kolmogorov(values, c.cdf); d > limit {
			t.Errorf("%s: the distribution is off by %.4f, more than %.4f", c.name, d, limit)
		}
	}
}

func jitterRank(kind int32) int {
	return slices.Index([]int32{imagecapi.AugmentBrightness, imagecapi.AugmentContrast, imagecapi.AugmentSaturation, imagecapi.AugmentHue}, kind)
}

// TestAugmentQuantiles compares 100,000 draws of what has no simple formula with the 999 permilles of as many and more of torchvision.
func TestAugmentQuantiles(t *testing.T) {
	data, err := os.ReadFile("testdata/quantiles.json")
	if err != nil {
		t.Fatal(err)
	}
	var quantiles map[string][]float64
	if err := json.Unmarshal(data, &quantiles); err != nil {
		t.Fatal(err)
	}
	seen := 0
	for name, c := range map[string]struct {
		op    Op
		w, h  int
		kind  int32
		value func(op *imagecapi.AugmentOp) float64
	}{
		"erase area": {RandomErasing{P: 1}, 224, 224, imagecapi.AugmentErase, func(op *imagecapi.AugmentOp) float64 { return float64(op.Integers[2] * op.Integers[3]) }},
		"erase log ratio": {RandomErasing{P: 1}, 224, 224, imagecapi.AugmentErase, func(op *imagecapi.AugmentOp) float64 {
			return math.Log(float64(op.Integers[3]) / float64(op.Integers[2]))
		}},
		"erase x":       {RandomErasing{P: 1}, 224, 224, imagecapi.AugmentErase, func(op *imagecapi.AugmentOp) float64 { return float64(op.Integers[0]) }},
		"erase y":       {RandomErasing{P: 1}, 224, 224, imagecapi.AugmentErase, func(op *imagecapi.AugmentOp) float64 { return float64(op.Integers[1]) }},
		"perspective 0": {RandomPerspective{P: 1}, 224, 160, imagecapi.AugmentPerspective, func(op *imagecapi.AugmentOp) float64 { return op.Values[0] }},
		"perspective 5": {RandomPerspective{P: 1}, 224, 160, imagecapi.AugmentPerspective, func(op *imagecapi.AugmentOp) float64 { return op.Values[5] }},
		"perspective 7": {RandomPerspective{P: 1}, 224, 160, imagecapi.AugmentPerspective, func(op *imagecapi.AugmentOp) float64 { return op.Values[7] }},
	} {
		q := quantiles[name]
		if len(q) != 999 {
			t.Fatalf("%s has %d quantiles", name, len(q))
		}
		var values []float64
		draws(c.op, c.w, c.h, manyDraws, func(p *program) {
			for i := range p.ops {
				if p.ops[i].Kind == c.kind {
					values = append(values, c.value(&p.ops[i]))
				}
			}
		})
		if len(values) < manyDraws*99/100 {
			t.Errorf("%s: only %d values", name, len(values))
		}
		slices.Sort(values)
		// The sorted values at both ends of a run of equal ones, since torchvision's quantile lies in the run's share.
		for i, x := range q {
			below, _ := slices.BinarySearch(values, x)
			upTo, _ := slices.BinarySearch(values, math.Nextafter(x, math.Inf(1)))
			p, n := float64(i+1)/1000, float64(len(values))
			if off := math.Max(float64(below)/n-p, p-float64(upTo)/n); off > ksLimit+0.002 {
				t.Errorf("%s: the quantile %.3f, %v, is off by %.4f", name, p, x, off)
				break
			}
		}
		seen++
	}
	if seen != len(quantiles) {
		t.Errorf("%d of %d were compared", seen, len(quantiles))
	}
}

func TestRandomCropOfResize(t *testing.T) {
	transform := Transform{Size: 20, Resize: 24, RandomCrop: true}.withDefaults()
	var source rand.PCG
	rng := rand.New(&source)
	var x, y []float64
	for i := range manyDraws {
		order.Seed(&source, 5, order.OfSample, 0, i)
		var g imagecapi.Geometry
		if err := transform.geometry(rng, 50, 40, &g); err != nil {
			t.Fatal(err)
		}
		if g.ResizeWidth != 30 || g.ResizeHeight != 24 || g.WindowWidth != 20 || g.WindowHeight != 20 {
			t.Fatalf("%+v", g)
		}
		x, y = append(x, float64(g.WindowX)), append(y, float64(g.WindowY))
	}
	if d := kolmogorov(x, stepsCDF(0, 10)); d > ksLimit {
		t.Errorf("x is off by %v", d)
	}
	if d := kolmogorov(y, stepsCDF(0, 4)); d > ksLimit {
		t.Errorf("y is off by %v", d)
	}
}

// everyOp is a chain of all kinds of steps, with Funcs between them.
func everyOp() []Op {
	return []Op{
		Pad{Padding: [4]int{3, 2, 1, 4}, Mode: PadReflect}, RandomCrop{Size: 16},
		RandomVerticalFlip{}, ColorJitter{Brightness: 0.4, Contrast: 0.4, Saturation: 0.4, Hue: 0.1}, RandomGrayscale{},
		Func(func(rng *rand.Rand, m *Pixels) error {
			m.Pix[rng.IntN(len(m.Pix))] ^= byte(rng.Uint32())
			return nil
		}),
		RandomApply{Ops: []Op{GaussianBlur{KernelSize: [2]int{5, 5}}}}, RandomErasing{Value: Color{1, 2, 3}},
		RandomChoice{Ops: []Op{RandAugment{}, TrivialAugmentWide{}, AutoAugment{Policy: SVHNPolicy}}},
		RandomAffine{Degrees: [2]float64{-9, 9}, Scale: [2]float64{0.9, 1.1}, Interpolation: Bilinear}, RandomPerspective{},
		Pad{Padding: [4]int{1, 1, 1, 1}}, CenterCrop{Size: 16},
	}
}

// TestOpsDeterminism: the bytes of an epoch with every kind of step are the same at any number of workers, and change with seed and epoch.
func TestOpsDeterminism(t *testing.T) {
	path := writeFile(t, "a.tar", fakeArchive(t, 60, func(i int) bool { return i%13 == 5 }))
	run := func(workers, epoch int, seed uint64, ops []Op) string {
		l := openFake(t, path, Options{BatchSize: 7, Shuffle: true, Seed: seed, Workers: workers, BadSamples: Skip,
			Transform: Transform{Size: 16, RandomResizedCrop: true, FlipP: 0.5, Ops: ops}})
		batches, err := collect(t, l, epoch, 2)
		if err != nil {
			t.Fatal(err)
		}
		return digest(batches)
	}
	want := run(1, 0, 1, everyOp())
	for _, workers := range []int{2, 5, 16} {
		if got := run(workers, 0, 1, everyOp()); got != want {
			t.Errorf("%d workers make other bytes", workers)
		}
	}
	for what, got := range map[string]string{"epoch": run(3, 1, 1, everyOp()), "seed": run(3, 0, 2, everyOp()), "steps": run(3, 0, 1, everyOp()[2:])} {
		if got == want {
			t.Errorf("another %s makes the same bytes", what)
		}
	}
}

// TestOpsLeaveTheCropAlone: steps that do nothing to the pixels leave those of a loader without steps.
func TestOpsLeaveTheCropAlone(t *testing.T) {
	path := writeFile(t, "a.tar", fakeArchive(t, 20, nil))
	var digests []string
	for _, ops := range [][]Op{nil, {RandomInvert{P: 1}, RandomInvert{P: 1}}, {Func(func(rng *rand.Rand, m *Pixels) error { rng.Uint64(); return nil })}} {
		l := openFake(t, path, Options{Transform: Transform{Size: 8, RandomResizedCrop: true, FlipP: 0.5, Ops: ops}})
		batches, err := collect(t, l, 0, 2)
		if err != nil {
			t.Fatal(err)
		}
		digests = append(digests, digest(batches))
	}
	if digests[1] != digests[0] || digests[2] != digests[0] {
		t.Errorf("%v", digests)
	}
}

// TestFunc: a custom step sees the sample's pixels between the others, and what it refuses is a bad sample.
func TestFunc(t *testing.T) {
	path := writeFile(t, "a.tar", fakeArchive(t, 12, nil))
	broken := errors.New("not today")
	fill := func(rng *rand.Rand, m *Pixels) error {
		if m.Width != 8 || m.Height != 8 || m.Stride != 24 || len(m.Pix) != 8*8*3 {
			return fmt.Errorf("%d x %d, stride %d, %d bytes", m.Width, m.Height, m.Stride, len(m.Pix))
		}
		if m.Pix[0]%4 == 0 {
			return broken
		}
		for i := range m.Pix {
			m.Pix[i] = 10
		}
		return nil
	}
	transform := Transform{Size: 8, Resize: 8, Ops: []Op{Func(fill), RandomInvert{P: 1}}}
	l := openFake(t, path, Options{Transform: transform, BadSamples: Skip})
	batches, err := collect(t, l, 0, 1)
	if err != nil {
		t.Fatal(err)
	}
	samples := 0
	for _, b := range batches {
		samples += len(b.labels)
		if i := slices.IndexFunc(b.images, func(v byte) bool { return v != 245 }); i >= 0 {
			t.Errorf("byte %d is %d", i, b.images[i])
		}
	}
	if s := l.Stats(); int(s.Bad)+samples != 12 || s.Bad == 0 || s.BadBy[Rejected] != s.Bad {
		t.Errorf("%d samples, %+v", samples, s)
	}
	_, err = collect(t, openFake(t, path, Options{Transform: transform}), 0, 1)
	var bad *SampleError
	if !errors.As(err, &bad) || bad.Reason != Rejected || !errors.Is(err, broken) {
		t.Errorf("%v", err)
	}
}

// TestOpsEndToEnd runs real pixels: the eval pixels of TestEvalPixels, inverted.
func TestOpsEndToEnd(t *testing.T) {
	data, err := os.ReadFile("testdata/small.png")
	if err != nil {
		t.Fatal(err)
	}
	want, err := os.ReadFile("testdata/small-resize24-centre20.rgb")
	if err != nil {
		t.Fatal(err)
	}
	transform := Eval(24, 20)
	transform.Ops = []Op{RandomInvert{P: 1}}
	l, err := Open(writeFile(t, "a.tar", tarBytes(t, tarMember{name: "c/small.png", data: string(data)})), Options{Transform: transform})
	if err != nil {
		t.Fatal(err)
	}
	got, err := collect(t, l, 0, 1)
	if err != nil {
		t.Fatal(err)
	}
	for i := range want {
		want[i] = 255 - want[i]
	}
	if !bytes.Equal(got[0].images, want) {
		t.Error("the pixels are not the inverse of Eval's")
	}
}

func TestOpsChecks(t *testing.T) {
	nan := math.NaN()
	for says, ops := range map[string][]Op{
		"Ops[0] is nil": {nil},
		"a Func is nil": {Func(nil)},
		"Ops[1] (imageloader.RandomInvert): fiel": {Grayscale{}, RandomInvert{P: 1.1}},
		"field P is NaN":                                {RandomVerticalFlip{P: nan}},
		"a crop to the old size is missing":             {Pad{Padding: [4]int{1, 1, 1, 1}}},
		"between":                                       {Pad{Padding: [4]int{1, 1, 1, 1}}, everyOp()[5], CenterCrop{Size: 32}},
		"field Padding":                                 {Pad{Padding: [4]int{32, 0, 0, 0}, Mode: PadReflect}, CenterCrop{Size: 32}},
		"padding mode":                                  {RandomCrop{Mode: 4}},
		"field Size is 33":                              {RandomCrop{Size: 33}},
		"field Size is 0":                               {CenterCrop{}},
		"field Hue is 0.6":                              {ColorJitter{Hue: 0.6}},
		"field Contrast is -1":                          {ColorJitter{Contrast: -1}},
		"field KernelSize is [4 0]":                     {GaussianBlur{KernelSize: [2]int{4, 0}}},
		"KernelSize is [65 65]":                         {GaussianBlur{KernelSize: [2]int{65, 65}}},
		"field Sigma is [2 1]":                          {GaussianBlur{Sigma: [2]float64{2, 1}}},
		"field Scale is [0.5 1.5]":                      {RandomErasing{Scale: [2]float64{0.5, 1.5}}},
		"field Ratio is [3 1]":                          {RandomErasing{Ratio: [2]float64{3, 1}}},
		"field Bits is 0":                               {RandomPosterize{}},
		"field Threshold is 256":                        {RandomSolarize{Threshold: 256}},
		"field SharpnessFactor is -1":                   {RandomAdjustSharpness{SharpnessFactor: -1}},
		"field Degrees is [NaN 1]":                      {RandomRotation{Degrees: [2]float64{nan, 1}}},
		"field Interpolation is 3":                      {RandomRotation{Interpolation: 3}},
		"field Shear[2:]":                               {RandomAffine{Shear: [4]float64{0, 0, 1, 90}}},
		"field Translate is [2 0]":                      {RandomAffine{Translate: [2]float64{2, 0}}},
		"field DistortionScale is 2":                    {RandomPerspective{DistortionScale: 2}},
		"field Ops is empty":                            {RandomChoice{}},
		"Ops[0] (imageloader.RandomApply): field Ops[0": {RandomApply{Ops: []Op{RandomPosterize{}}}},
		"field NumOps is -1":                            {RandAugment{NumOps: -1}},
		"field Magnitude is 31":                         {RandAugment{Magnitude: 31}},
		"field NumMagnitudeBins is 1,":                  {TrivialAugmentWide{NumMagnitudeBins: 1}},
		"field Policy is 3":                             {AutoAugment{Policy: 3}},
	} {
		err := Transform{Size: 32, Ops: ops}.withDefaults().check()
		if err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%T: %v does not say %q", ops[0], err, says)
		}
	}
	if err := (Transform{Size: 16, Ops: everyOp()}).withDefaults().check(); err != nil {
		t.Error(err)
	}
}

// TestExpandIsCropped: Expand without a CenterCrop after it, and steps on whole images between those that change the size, are refused.
func TestExpandIsCropped(t *testing.T) {
	turn := RandomRotation{Degrees: [2]float64{-40, 40}, Expand: true}
	noise := Func(func(*rand.Rand, *Pixels) error { return nil })
	pad, crop := Pad{Padding: [4]int{1, 1, 1, 1}}, CenterCrop{16}
	for name, c := range map[string]struct {
		ops  []Op
		says string
	}{
		"cropped":             {[]Op{turn, crop}, ""},
		"alone":               {[]Op{turn}, "CenterCrop"},
		"noise between":       {[]Op{turn, noise, crop}, "CenterCrop"},
		"noise after":         {[]Op{turn, crop, noise, GaussianNoise{}}, ""},
		"noise when padded":   {[]Op{pad, GaussianNoise{}, crop}, "between"},
		"hidden when padded":  {[]Op{pad, RandomApply{Ops: []Op{RandomOrder{Ops: []Op{noise}}}}, crop}, "between"},
		"erasing when padded": {[]Op{pad, RandomErasing{Random: true}, crop}, "between"},
		"one colour":          {[]Op{pad, RandomErasing{}, crop}, ""},
		"both":                {[]Op{RandomErasing{Random: true, Value: Color{1}}}, "exclude"},
		"probabilities":       {[]Op{RandomChoice{Ops: []Op{noise}, P: []float64{0}}}, "field P"},
		"far centre":          {[]Op{RandomAffine{Center: &[2]float64{math.NaN(), 0}}}, "field Center"},
	} {
		transform := Transform{Size: 16, Ops: c.ops}.withDefaults()
		err := transform.check()
		if (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: error %v", name, err)
		}
		if err != nil {
			continue
		}
		a, err := newAugmenter()
		if err != nil {
			t.Fatal(err)
		}
		for seed := range uint64(50) {
			if err := a.run(&transform, rand.New(rand.NewPCG(seed, 1)), make([]byte, 3*16*16)); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
		a.close()
	}
}
