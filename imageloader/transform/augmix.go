package transform

import (
	"fmt"
	"math"
	"math/rand/v2"

	"github.com/torchstream/torchstream/internal/imagecapi"
)

// AugMix blends the image with the results of MixtureWidth (0: 3) chains of operations, as in
// Hendrycks et al., "AugMix: A Simple Data Processing Method to Improve Robustness and
// Uncertainty". A chain has ChainDepth operations (0: 1, 2 or 3, with equal probability). The
// strength of each operation is drawn from the Severity (0: 3) weakest of ten strengths. The
// weights are drawn from Dirichlet distributions whose parameters are all Alpha (0: 1). PartialOps
// excludes brightness, color, contrast and sharpness, like torchvision's all_ops=False. The step
// also runs on a GPU that decodes.
type AugMix struct {
	Severity     int
	MixtureWidth int
	ChainDepth   int
	Alpha        float64
	PartialOps   bool
	// Interpolation is Bilinear by default.
	Interpolation Interpolation
	Fill          Color // black is torchvision's fill=None
}

const (
	augMixBins = 10
	maxChains  = 64
)

func (o AugMix) withDefaults() AugMix {
	if o.Severity == 0 {
		o.Severity = 3
	}
	if o.MixtureWidth == 0 {
		o.MixtureWidth = 3
	}
	o.Alpha = probability(o.Alpha, 1)
	if o.Interpolation == DefaultInterpolation {
		o.Interpolation = Bilinear
	}
	return o
}

func (o AugMix) check(w, h int) (int, int, error) {
	o = o.withDefaults()
	switch {
	case o.Severity < 1 || o.Severity > augMixBins:
		return 0, 0, fmt.Errorf("field Severity is %d, not in 1 to %d", o.Severity, augMixBins)
	case o.MixtureWidth < 1 || o.MixtureWidth > maxChains:
		return 0, 0, fmt.Errorf("field MixtureWidth is %d, not in 1 to %d", o.MixtureWidth, maxChains)
	case o.ChainDepth < 0 || o.ChainDepth > maxChains:
		return 0, 0, fmt.Errorf("field ChainDepth is %d, not in 0 to %d", o.ChainDepth, maxChains)
	}
	if err := checkAlpha(o.Alpha); err != nil {
		return 0, 0, err
	}
	return w, h, o.Interpolation.check()
}

// mixes reports that the result is a sum of images whose pixels were moved in different ways.
func (AugMix) mixes() bool { return true }

// augMixOps are the operations in torchvision's order. The operations of PartialOps are the first.
var augMixOps = []policyOp{opShearX, opShearY, opTranslateX, opTranslateY, opRotate, opPosterize,
	opSolarize, opAutoContrast, opEqualize,
	opBrightness, opColor, opContrast, opSharpness}

const augMixPartial = 9

// augMixSpace has the maximum strengths of all operations except Posterize.
var augMixSpace = space{shear: 0.3, translate: func(side int) float64 { return float64(side) / 3 },
	rotate: 30, color: 0.9}

// augMixMagnitude returns strength number bin of ten.
func augMixMagnitude(op policyOp, bin, w, h int) float64 {
	if op == opPosterize {
		return math.RoundToEven(4 - float64(bin)/((augMixBins-1)/4.))
	}
	return augMixSpace.magnitude(op, bin, augMixBins, w, h)
}

// augMixStep is one operation in a chain.
type augMixStep struct {
	op policyOp
	m  float64
}

func (o AugMix) draw(rng *rand.Rand, p *program) {
	o = o.withDefaults()
	own := dirichlet(rng, o.Alpha, 2)
	weights := []float32{own[0]}
	for _, w := range dirichlet(rng, o.Alpha, o.MixtureWidth) {
		weights = append(weights, w*own[1])
	}
	ops := augMixOps
	if o.PartialOps {
		ops = ops[:augMixPartial]
	}
	chains := make([][]augMixStep, o.MixtureWidth)
	for i := range chains {
		depth := o.ChainDepth
		if depth == 0 {
			depth = 1 + rng.IntN(3)
		}
		for range depth {
			op := ops[rng.IntN(len(ops))]
			m := augMixMagnitude(op, rng.IntN(o.Severity), p.width, p.height)
			chains[i] = append(chains[i], augMixStep{op, signed(rng, op, m)})
		}
	}
	o.add(p, weights, chains)
}

// add adds the operations of the chains to p. The first weight is for the image itself.
func (o AugMix) add(p *program, weights []float32, chains [][]augMixStep) {
	p.add(imagecapi.AugmentMix, [9]int32{0}, float64(weights[0]))
	for i, chain := range chains {
		for _, step := range chain {
			p.policy(step.op, step.m, o.Interpolation, outside(o.Fill))
		}
		part := int32(1)
		if i == len(chains)-1 {
			part = 2
		}
		p.add(imagecapi.AugmentMix, [9]int32{part}, float64(weights[i+1]))
	}
}

// dirichlet draws n weights with sum 1 from a Dirichlet distribution whose parameters are all
// alpha.
func dirichlet(rng *rand.Rand, alpha float64, n int) []float32 {
	logs := make([]float64, n)
	highest := math.Inf(-1)
	for i := range logs {
		logs[i] = logGamma(rng, alpha)
		highest = max(highest, logs[i])
	}
	sum := 0.
	for i := range logs {
		logs[i] = math.Exp(logs[i] - highest)
		sum += logs[i]
	}
	weights := make([]float32, n)
	for i := range weights {
		weights[i] = float32(logs[i] / sum)
	}
	return weights
}
