package transform

import (
	"encoding/json"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/internal/imagecapi"
)

// TestAugmentDistributions compares 100,000 draws of every parameter with torchvision's
// distribution.
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
		{"jitter range", ColorJitter{SaturationRange: [2]float64{1.1, 1.7}},
			first(imagecapi.AugmentSaturation, value), 1, uniformCDF(1.1, 1.7)},
		{"jitter hue range", ColorJitter{HueRange: [2]float64{0, 0.3}}, first(imagecapi.AugmentHue, value),
			1, uniformCDF(0, 0.3)},
		{"distort brightness", RandomPhotometricDistort{}, first(imagecapi.AugmentBrightness, value), 0.5,
			uniformCDF(0.875, 1.125)},
		{"distort contrast", RandomPhotometricDistort{P: 0.7}, first(imagecapi.AugmentContrast, value), 0.7,
			uniformCDF(0.5, 1.5)},
		{"distort hue", RandomPhotometricDistort{P: 0.7}, first(imagecapi.AugmentHue, value), 0.7,
			uniformCDF(-0.05, 0.05)},
		// 1: contrast comes before saturation
		{"distort order", RandomPhotometricDistort{P: 1}, func(p *program) []float64 {
			if p.ops[1].Kind == imagecapi.AugmentContrast {
				return []float64{1}
			}
			return nil
		}, 0.5, nil},
		{"distort channels", RandomPhotometricDistort{P: 0.2}, first(imagecapi.AugmentPermute, value), 0.2, nil},
		// which of the six
		{"channels", RandomChannelPermutation{}, first(imagecapi.AugmentPermute, func(op *imagecapi.AugmentOp) float64 {
			second := op.Integers[1]
			if second > op.Integers[0] {
				second--
			}
			return float64(2*op.Integers[0] + second)
		}), 1, stepsCDF(0, 5)},
		{"choice with probabilities",
			RandomChoice{Ops: []Op{Grayscale{}, RandomInvert{P: 1}, CenterCrop{64}}, P: []float64{1, 3, 0}},
			first(imagecapi.AugmentInvert, value), 0.75, nil},
		{"order", RandomOrder{Ops: []Op{Grayscale{}, RandomInvert{P: 1}}}, func(p *program) []float64 {
			if len(p.ops) == 2 && p.ops[0].Kind == imagecapi.AugmentInvert &&
				p.ops[1].Kind == imagecapi.AugmentGrayscale {
				return []float64{1}
			}
			return nil
		}, 0.5, nil},
		{"blur sigma", GaussianBlur{KernelSize: [2]int{5, 9}, Sigma: [2]float64{0.5, 5}},
			first(imagecapi.AugmentBlur, value), 1, uniformCDF(0.5, 5)},
		{"crop x", RandomCrop{Padding: [4]int{4, 2, 3, 1}}, first(imagecapi.AugmentCrop, integer(0)), 1,
			stepsCDF(-4, 3)},
		{"crop y", RandomCrop{Padding: [4]int{4, 2, 3, 1}}, first(imagecapi.AugmentCrop, integer(1)), 1,
			stepsCDF(-2, 1)},
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
		{"choice", RandomChoice{Ops: []Op{Grayscale{}, RandomInvert{P: 1}, RandomInvert{P: 1}}},
			first(imagecapi.AugmentInvert, value), 2. / 3, nil},
		{"rotation", RandomRotation{Degrees: [2]float64{-20, 70}}, first(imagecapi.AugmentAffine, angle), 1,
			uniformCDF(-20, 70)},
		{"affine x", RandomAffine{Translate: [2]float64{0.1, 0.3}},
			first(imagecapi.AugmentAffine, func(op *imagecapi.AugmentOp) float64 { return -op.Values[2] }),
			1, roundedCDF(6.4)},
		{"affine y", RandomAffine{Translate: [2]float64{0.1, 0.3}},
			first(imagecapi.AugmentAffine, func(op *imagecapi.AugmentOp) float64 { return -op.Values[5] }),
			1, roundedCDF(14.4)},
		{"affine scale", RandomAffine{Scale: [2]float64{0.5, 1.5}},
			first(imagecapi.AugmentAffine,
				func(op *imagecapi.AugmentOp) float64 { return 1 / op.Values[0] }), 1, uniformCDF(0.5, 1.5)},
		{"affine shear x", RandomAffine{Shear: [4]float64{-10, 30}},
			first(imagecapi.AugmentAffine,
				func(op *imagecapi.AugmentOp) float64 { return math.Atan(op.Values[1]) * 180 / math.Pi }),
			1, uniformCDF(-10, 30)},
		{"perspective", RandomPerspective{P: 0.25}, first(imagecapi.AugmentPerspective, value), 0.25, nil},
		{"erasing", RandomErasing{P: 0.4}, first(imagecapi.AugmentErase, value), 0.4, nil},
		// 90 degrees is bin 20: 135 * 20/30 is 90.000003 in float32
		{"trivial rotate", TrivialAugmentWide{}, first(imagecapi.AugmentQuarterTurns, value), 0, nil},
		{"trivial brightness", TrivialAugmentWide{}, first(imagecapi.AugmentBrightness, value), 1. / 14,
			func(x float64) float64 { return stepsCDF(0, 60)(math.Round((x-1)/0.99*30) + 30) }},
		// 8 - i/5, rounded
		{"trivial posterize", TrivialAugmentWide{}, first(imagecapi.AugmentPosterize, integer(0)), 1. / 14,
			func(x float64) float64 {
				return [...]float64{0, 0, 3. / 31, 8. / 31, 13. / 31, 18. / 31, 23. / 31, 28. / 31,
					1}[int(math.Floor(x))]
			}},
		{"rand equalize", RandAugment{NumOps: 1}, first(imagecapi.AugmentEqualize, value), 1. / 14, nil},
		{"augmix own weight", AugMix{MixtureWidth: 1},
			func(p *program) []float64 { return []float64{p.ops[0].Values[0]} }, 1, uniformCDF(0, 1)},
		{"augmix last weight", AugMix{},
			func(p *program) []float64 { return []float64{p.ops[len(p.ops)-1].Values[0]} }, 1,
			// a uniform number times one of Dirichlet's three
			func(x float64) float64 { return x*x - 2*x*math.Log(max(x, 1e-300)) }},
		{"augmix weights of 0.5", AugMix{MixtureWidth: 1, Alpha: 0.5},
			func(p *program) []float64 { return []float64{p.ops[0].Values[0]} }, 1,
			func(x float64) float64 { return 2 / math.Pi * math.Asin(math.Sqrt(x)) }},
		{"augmix chains", AugMix{MixtureWidth: 4, ChainDepth: 2}, func(p *program) []float64 {
			return make([]float64, len(first(imagecapi.AugmentMix, value)(p))-1)
		}, 4, nil},
		{"augmix depth", AugMix{MixtureWidth: 1}, first(imagecapi.AugmentEqualize, value), 2. / 13, nil},
		{"augmix fixed depth", AugMix{MixtureWidth: 1, ChainDepth: 1},
			first(imagecapi.AugmentEqualize, value), 1. / 13, nil},
		{"augmix partial", AugMix{MixtureWidth: 1, ChainDepth: 1, PartialOps: true},
			first(imagecapi.AugmentEqualize, value), 1. / 9, nil},
		{"augmix no color", AugMix{PartialOps: true}, first(imagecapi.AugmentSaturation, value), 0, nil},
		{"augmix posterize", AugMix{MixtureWidth: 1, ChainDepth: 1, Severity: 10},
			first(imagecapi.AugmentPosterize, integer(0)), 1. / 13, stepsCDF(0, 4)},
		{"augmix brightness", AugMix{MixtureWidth: 1, ChainDepth: 1, Severity: 4},
			first(imagecapi.AugmentBrightness, func(op *imagecapi.AugmentOp) float64 {
				return math.Round((op.Values[0] - 1) * 10)
			}), 1. / 13,
			func(x float64) float64 { // 0 to 3, of either sign
				k := math.Floor(x)
				if k >= 0 {
					k++
				}
				return min(max((k+4)/8, 0), 1)
			}},
		{"auto invert", AutoAugment{}, first(imagecapi.AugmentInvert, value), (0.6 + 0.6 + 0.6) / 25, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			var values []float64
			draws(c.op, 64, 48, manyDraws, func(p *program) { values = append(values, c.values(p)...) })
			share, n := float64(len(values))/manyDraws, float64(manyDraws)
			if math.Abs(share-c.share) > 4*math.Sqrt(max(0, c.share*(1-c.share))/n)+1e-9 {
				t.Errorf("in %v of the draws, want %v", share, c.share)
			}
			if c.cdf == nil {
				return
			}
			limit := ksLimit / math.Sqrt(c.share)
			if c.name == "trivial brightness" { // a bin of 0 has one sign only
				limit += 1. / 61
			}
			if d := kolmogorov(values, c.cdf); d > limit {
				t.Errorf("the distribution is off by %.4f, want at most %.4f", d, limit)
			}
		})
	}
}

func jitterRank(kind int32) int {
	return slices.Index([]int32{imagecapi.AugmentBrightness, imagecapi.AugmentContrast,
		imagecapi.AugmentSaturation, imagecapi.AugmentHue}, kind)
}

// TestAugmentQuantiles covers parameters whose distribution has no simple formula. It compares the
// 999 permilles of 100,000 draws with the permilles of at least as many draws of torchvision.
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
		"erase area": {RandomErasing{P: 1}, 224, 224, imagecapi.AugmentErase,
			func(op *imagecapi.AugmentOp) float64 { return float64(op.Integers[2] * op.Integers[3]) }},
		"erase log ratio": {RandomErasing{P: 1}, 224, 224, imagecapi.AugmentErase,
			func(op *imagecapi.AugmentOp) float64 {
				return math.Log(float64(op.Integers[3]) / float64(op.Integers[2]))
			}},
		"erase x": {RandomErasing{P: 1}, 224, 224, imagecapi.AugmentErase,
			func(op *imagecapi.AugmentOp) float64 { return float64(op.Integers[0]) }},
		"erase y": {RandomErasing{P: 1}, 224, 224, imagecapi.AugmentErase,
			func(op *imagecapi.AugmentOp) float64 { return float64(op.Integers[1]) }},
		"perspective 0": {RandomPerspective{P: 1}, 224, 160, imagecapi.AugmentPerspective,
			func(op *imagecapi.AugmentOp) float64 { return op.Values[0] }},
		"perspective 5": {RandomPerspective{P: 1}, 224, 160, imagecapi.AugmentPerspective,
			func(op *imagecapi.AugmentOp) float64 { return op.Values[5] }},
		"perspective 7": {RandomPerspective{P: 1}, 224, 160, imagecapi.AugmentPerspective,
			func(op *imagecapi.AugmentOp) float64 { return op.Values[7] }},
	} {
		t.Run(name, func(t *testing.T) {
			q := quantiles[name]
			if len(q) != 999 {
				t.Fatalf("%d quantiles, want 999", len(q))
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
				t.Errorf("only %d values, want at least %v", len(values), manyDraws*99/100)
			}
			slices.Sort(values)
			// Equal values form a run. torchvision's quantile is within the run's share, so both
			// ends are compared.
			for i, x := range q {
				below, _ := slices.BinarySearch(values, x)
				upTo, _ := slices.BinarySearch(values, math.Nextafter(x, math.Inf(1)))
				p, n := float64(i+1)/1000, float64(len(values))
				if off := math.Max(float64(below)/n-p, p-float64(upTo)/n); off > ksLimit+0.002 {
					t.Errorf("the quantile %.3f, %v, is off by %.4f, want at most %v",
						p, x, off, ksLimit+0.002)
					break
				}
			}
		})
		seen++
	}
	if seen != len(quantiles) {
		t.Errorf("%d of %d were compared", seen, len(quantiles))
	}
}

func TestOpsChecks(t *testing.T) {
	nan := math.NaN()
	for says, ops := range map[string][]Op{
		"Ops[0] is nil": {nil},
		"Ops[1] is nil": {Grayscale{}, (*GaussianNoise)(nil)},
		"(*transform.RandomInvert): field P is 2":     {&RandomInvert{P: 2}},
		"Ops[0] (*transform.RandomOrder): field Ops[": {&RandomOrder{Ops: []Op{(*Func)(nil)}}},
		"a Func is nil":                         {Func(nil)},
		"Ops[1] (transform.RandomInvert): fiel": {Grayscale{}, RandomInvert{P: 1.1}},
		"field P is NaN":                        {RandomVerticalFlip{P: nan}},
		"a crop to the old size is missing":     {Pad{Padding: [4]int{1, 1, 1, 1}}},
		"between": {Pad{Padding: [4]int{1, 1, 1, 1}},
			Func(func(*rand.Rand, *Pixels) error { return nil }), CenterCrop{Size: 32}},
		"field Padding": {Pad{Padding: [4]int{32, 0, 0, 0}, Mode: PadReflect},
			CenterCrop{Size: 32}},
		"padding mode":                                {RandomCrop{Mode: 4}},
		"field Size is 33":                            {RandomCrop{Size: 33}},
		"field Size is 0":                             {CenterCrop{}},
		"field Hue is 0.6":                            {ColorJitter{Hue: 0.6}},
		"field Contrast is -1":                        {ColorJitter{Contrast: -1}},
		"field KernelSize is [4 0]":                   {GaussianBlur{KernelSize: [2]int{4, 0}}},
		"KernelSize is [65 65]":                       {GaussianBlur{KernelSize: [2]int{65, 65}}},
		"field Sigma is [2 1]":                        {GaussianBlur{Sigma: [2]float64{2, 1}}},
		"field Scale is [0.5 1.5]":                    {RandomErasing{Scale: [2]float64{0.5, 1.5}}},
		"field Ratio is [3 1]":                        {RandomErasing{Ratio: [2]float64{3, 1}}},
		"field Bits is 0":                             {RandomPosterize{}},
		"field Threshold is 256":                      {RandomSolarize{Threshold: 256}},
		"field SharpnessFactor is -1":                 {RandomAdjustSharpness{SharpnessFactor: -1}},
		"field Degrees is [NaN 1]":                    {RandomRotation{Degrees: [2]float64{nan, 1}}},
		"field Interpolation is 3":                    {RandomRotation{Interpolation: 3}},
		"field Shear[2:]":                             {RandomAffine{Shear: [4]float64{0, 0, 1, 90}}},
		"field Translate is [2 0]":                    {RandomAffine{Translate: [2]float64{2, 0}}},
		"field DistortionScale is 2":                  {RandomPerspective{DistortionScale: 2}},
		"field Ops is empty":                          {RandomChoice{}},
		"Ops[0] (transform.RandomApply): field Ops[0": {RandomApply{Ops: []Op{RandomPosterize{}}}},
		"field Severity is 11":                        {AugMix{Severity: 11}},
		"field MixtureWidth is -1":                    {AugMix{MixtureWidth: -1}},
		"field ChainDepth is 65":                      {AugMix{ChainDepth: 65}},
		"AugMix): field Alpha is -1":                  {AugMix{Alpha: -1}},
		"AugMix): field Interpolation is 3":           {AugMix{Interpolation: Bicubic}},
		"field NumOps is -1":                          {RandAugment{NumOps: -1}},
		"field Magnitude is 31":                       {RandAugment{Magnitude: 31}},
		"field NumMagnitudeBins is 1,":                {TrivialAugmentWide{NumMagnitudeBins: 1}},
		"field Policy is 3":                           {AutoAugment{Policy: 3}},
	} {
		t.Run(says, func(t *testing.T) {
			if _, err := Compile(Transform{Size: 32, Ops: ops}); err == nil || !strings.Contains(err.Error(), says) {
				t.Errorf("%T: %v does not say %q", ops[0], err, says)
			}
		})
	}
}

// TestExpandIsCropped: Expand without a later CenterCrop is refused. So are steps on whole images
// between steps that change the size.
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
		"pointers":            {[]Op{&turn, &crop}, ""},
		"a pointer alone":     {[]Op{&turn}, "CenterCrop"},
		"a nil crop":          {[]Op{&turn, (*CenterCrop)(nil)}, "CenterCrop"},
		"a pointer to noise":  {[]Op{pad, &GaussianNoise{}, crop}, "between"},
		"a pointer to erase":  {[]Op{pad, &RandomErasing{Random: true}, crop}, "between"},
		"hidden pointers":     {[]Op{pad, &RandomApply{Ops: []Op{&RandomOrder{Ops: []Op{&noise}}}}, crop}, "between"},
		"hidden nil":          {[]Op{pad, &RandomApply{Ops: []Op{(*GaussianNoise)(nil)}}, crop}, "is nil"},
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
		t.Run(name, func(t *testing.T) {
			transform := Transform{Size: 16, Ops: c.ops}
			_, err := Compile(transform)
			if (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) {
				t.Errorf("error %v", err)
			}
			if err != nil {
				return
			}
			a := newAugmenter(t, transform)
			for seed := range uint64(50) {
				if err := a.Apply(rand.New(rand.NewPCG(seed, 1)), make([]byte, 3*16*16)); err != nil {
					t.Error(err)
				}
			}
		})
	}
}
