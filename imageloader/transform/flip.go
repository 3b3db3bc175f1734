package transform

import (
	"math/rand/v2"

	"github.com/torchstream/torchstream/internal/imagecapi"
)

// RandomHorizontalFlip flips the image from left to right with probability P (0: 1/2).
// Transform.FlipP is faster. The step also runs on a GPU that decodes.
type RandomHorizontalFlip struct{ P float64 }

func (o RandomHorizontalFlip) check(w, h int) (int, int, error) { return w, h, checkP(o.P) }

func (o RandomHorizontalFlip) draw(rng *rand.Rand, p *program) {
	if hit(rng, probability(o.P, 0.5)) {
		p.add(imagecapi.AugmentFlipHorizontal, [9]int32{})
	}
}

// RandomVerticalFlip flips the image from top to bottom with probability P (0: 1/2). The step also
// runs on a GPU that decodes.
type RandomVerticalFlip struct{ P float64 }

func (o RandomVerticalFlip) check(w, h int) (int, int, error) { return w, h, checkP(o.P) }

func (o RandomVerticalFlip) draw(rng *rand.Rand, p *program) {
	if hit(rng, probability(o.P, 0.5)) {
		p.add(imagecapi.AugmentFlipVertical, [9]int32{})
	}
}
