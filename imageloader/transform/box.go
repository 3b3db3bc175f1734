package transform

import (
	"fmt"

	"github.com/torchstream/torchstream/internal/imagecapi"
)

// ForBoxes returns an error if a field of the transform can't be applied to an image together with
// its bounding boxes. The error names the field.
func (p *Compiled) ForBoxes() error {
	if err := p.unmixed("boxes"); err != nil {
		return err
	}
	for i, op := range p.t.Ops {
		if has(op, repeatsPixels) {
			return fmt.Errorf("field Ops[%d] (%T) repeats pixels outside of the image, where objects would "+
				"have no box: use the mode PadConstant", i, op)
		}
	}
	return nil
}

// repeatsPixels reports whether a step fills the outside of an image with pixels of the image.
func repeatsPixels(op Op) bool {
	o, ok := op.(interface{ repeatsPixels() bool })
	return ok && o.repeatsPixels()
}

func (o Pad) repeatsPixels() bool        { return o.Mode != PadConstant }
func (o RandomCrop) repeatsPixels() bool { return o.Mode != PadConstant }

// Box is a bounding box: the left, top, right and bottom edges, in pixels from the left and upper
// edge of an image.
type Box [4]float64

// Clamp moves the edges that are outside of a width x height image to the image's edge.
func (b *Box) Clamp(width, height float64) {
	for i, limit := range [4]float64{width, height, width, height} {
		b[i] = min(max(b[i], 0), limit)
	}
}

// FlipHorizontal mirrors the box in an image of this width.
func (b *Box) FlipHorizontal(width float64) { b[0], b[2] = width-b[2], width-b[0] }

// FlipVertical mirrors the box in an image of this height.
func (b *Box) FlipVertical(height float64) { b[1], b[3] = height-b[3], height-b[1] }

// Transpose exchanges rows and columns.
func (b *Box) Transpose() { b[0], b[1], b[2], b[3] = b[1], b[0], b[3], b[2] }

// bound makes b the bounding box of its corners after each of them has moved.
func (b *Box) bound(move func(x, y float64) (float64, float64)) {
	before := *b
	for i, corner := range [4][2]int{{0, 1}, {2, 1}, {2, 3}, {0, 3}} {
		x, y := move(before[corner[0]], before[corner[1]])
		if i == 0 {
			*b = Box{x, y, x, y}
			continue
		}
		*b = Box{min(b[0], x), min(b[1], y), max(b[2], x), max(b[3], y)}
	}
}

// MoveBox applies the moves of the last Draw, which was for an image, to a box in the image of Size
// x Size pixels. A rotated box becomes the bounding box of its corners. After each move the box is
// clamped to the image. This is torchvision's arithmetic, in float64. The result is not a number if
// a perspective moves a corner of the box to infinity.
func (a *Augmenter) MoveBox(b *Box) {
	w, h := float64(a.t.Size), float64(a.t.Size)
	for i := range a.program.ops {
		op := &a.program.ops[i]
		switch op.Kind {
		case imagecapi.AugmentFlipHorizontal:
			b.FlipHorizontal(w)
		case imagecapi.AugmentFlipVertical:
			b.FlipVertical(h)
		case imagecapi.AugmentQuarterTurns:
			for range op.Integers[0] { // counter-clockwise
				b.Transpose()
				b.FlipVertical(w)
				w, h = h, w
			}
		case imagecapi.AugmentCrop:
			x, y := float64(op.Integers[0]), float64(op.Integers[1])
			*b = Box{b[0] - x, b[1] - y, b[2] - x, b[3] - y}
			w, h = float64(op.Integers[2]), float64(op.Integers[3])
		case imagecapi.AugmentAffine:
			nw, nh := w, h
			if op.Integers[5] > 0 { // the image grows
				nw, nh = float64(op.Integers[5]), float64(op.Integers[6])
			}
			b.affine([6]float64(op.Values[:6]), [2]float64{w / 2, h / 2}, [2]float64{nw / 2, nh / 2})
			w, h = nw, nh
		case imagecapi.AugmentPerspective:
			b.perspective([8]float64(op.Values[:8]))
		default:
			continue
		}
		b.Clamp(w, h)
	}
}

// affine moves b by the inverse of m, which maps positions in the result to positions in the
// source. Both are relative to the centre of their image.
func (b *Box) affine(m [6]float64, from, to [2]float64) {
	det := m[0]*m[4] - m[1]*m[3]
	b.bound(func(x, y float64) (float64, float64) {
		x, y = x-from[0]-m[2], y-from[1]-m[5]
		return (m[4]*x-m[1]*y)/det + to[0], (m[0]*y-m[3]*x)/det + to[1]
	})
}

// perspective moves b by the inverse of the map with the coefficients c: see [perspective].
func (b *Box) perspective(c [8]float64) {
	b.bound(func(x, y float64) (float64, float64) {
		w := (c[3]*c[7]-c[4]*c[6])*x + (c[1]*c[6]-c[0]*c[7])*y + c[0]*c[4] - c[1]*c[3]
		return ((c[4]-c[5]*c[7])*x + (c[2]*c[7]-c[1])*y + c[1]*c[5] - c[2]*c[4]) / w,
			((c[5]*c[6]-c[3])*x + (c[0]-c[2]*c[6])*y + c[2]*c[3] - c[0]*c[5]) / w
	})
}
