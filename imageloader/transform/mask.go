package transform

import (
	"fmt"
	"slices"

	"github.com/torchstream/torchstream/internal/imagecapi"
)

// ForMasks returns an error if a field of the transform can't be applied to an image together with
// its mask. The error names the field.
func (p *Compiled) ForMasks() error {
	return p.unmixed("masks")
}

// unmixed returns an error if images are mixed, so that masks or boxes would not belong to them.
func (p *Compiled) unmixed(what string) error {
	if len(p.t.Mix) > 0 {
		return fmt.Errorf("field Mix mixes images and their labels, and %s can't be mixed: leave it out", what)
	}
	for i, op := range p.t.Ops {
		if has(op, mixes) {
			return fmt.Errorf("field Ops[%d] (%T) adds up images whose pixels were moved in different "+
				"ways: no %s belong to the sum", i, op, what)
		}
	}
	return nil
}

func mixes(op Op) bool {
	o, ok := op.(interface{ mixes() bool })
	return ok && o.mixes()
}

// moves are the operations that move pixels. All others change colours and do not apply to masks,
// as in torchvision.
var moves = []int32{imagecapi.AugmentFlipHorizontal, imagecapi.AugmentFlipVertical, imagecapi.AugmentQuarterTurns,
	imagecapi.AugmentCrop, imagecapi.AugmentAffine, imagecapi.AugmentPerspective}

// Moves reports whether the operations from the last Draw move pixels. A [Func] does not count.
func (a *Augmenter) Moves() bool {
	return slices.ContainsFunc(a.program.ops,
		func(op imagecapi.AugmentOp) bool { return slices.Contains(moves, op.Kind) })
}

// ApplyMoves applies the moves of the last Draw, which was for an image, to the image's mask, in
// place. The mask has Size x Size x 3 bytes. Every pixel becomes a copy of the nearest source
// pixel, with all three bytes. A pixel from outside of the mask becomes fill. Under the padding
// modes that repeat or mirror the image, the mask is repeated or mirrored in the same way.
func (a *Augmenter) ApplyMoves(mask []byte, fill Color) error {
	a.moved = a.moved[:0]
	for _, op := range a.program.ops {
		outside := 0
		switch {
		case !slices.Contains(moves, op.Kind):
			continue
		case op.Kind == imagecapi.AugmentCrop:
			outside = 5
		case op.Kind == imagecapi.AugmentAffine || op.Kind == imagecapi.AugmentPerspective:
			op.Integers[0], op.Integers[1] = int32(Nearest), 1
			outside = 2
		}
		for c := range fill {
			if outside > 0 {
				op.Integers[outside+c] = int32(fill[c])
			}
		}
		a.moved = append(a.moved, op)
	}
	return a.run(mask, a.moved)
}
