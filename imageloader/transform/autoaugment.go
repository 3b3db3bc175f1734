package transform

import (
	"fmt"
	"math/rand/v2"
)

// AutoAugment applies one of the 25 rules of a Policy, chosen at random. A rule has up to two
// operations. The step also runs on a GPU that decodes.
type AutoAugment struct {
	Policy        AutoAugmentPolicy
	Interpolation Interpolation
	Fill          Color
}

// AutoAugmentPolicy names the data set on which the rules of AutoAugment were learned.
type AutoAugmentPolicy int

// The policies of the paper.
const (
	ImageNetPolicy AutoAugmentPolicy = iota
	CIFAR10Policy
	SVHNPolicy
)

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

// policyStep is one step of a rule of AutoAugment.
type policyStep struct {
	op  policyOp
	p   float64
	bin int
}

// The rules: operation, probability, and strength out of 10.

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
