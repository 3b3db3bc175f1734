package transform

import (
	"fmt"
	"math/rand/v2"

	"github.com/torchstream/torchstream/internal/imagecapi"
)

// PaddingMode selects the pixels outside of an image.
type PaddingMode int

// The padding modes.
const (
	PadConstant  PaddingMode = iota // a single colour
	PadEdge                         // the nearest pixel at the edge
	PadReflect                      // the image mirrored at its edge pixels, which are not repeated
	PadSymmetric                    // the image mirrored, with its edge pixels repeated
)

// Pad adds Padding pixels at the left, top, right and bottom. A crop has to follow, because all
// steps together must keep the image's size. Samples with this step are decoded on the host.
type Pad struct {
	Padding [4]int
	Fill    Color // for PadConstant
	Mode    PaddingMode
}

func (o Pad) check(w, h int) (int, int, error) {
	return w + o.Padding[0] + o.Padding[2], h + o.Padding[1] + o.Padding[3], checkPadding(o.Padding, o.Mode, w, h)
}

func (o Pad) draw(_ *rand.Rand, p *program) {
	w, h := p.width+o.Padding[0]+o.Padding[2], p.height+o.Padding[1]+o.Padding[3]
	p.crop(-o.Padding[0], -o.Padding[1], w, h, o.Mode, o.Fill)
}

// RandomCrop adds Padding pixels (left, top, right, bottom) around the image, and then crops it to
// a random square of Size x Size pixels. Size 0 keeps the image's size: training on CIFAR-10 uses
// RandomCrop{Padding: [4]int{4, 4, 4, 4}}. To crop from a larger image, Transform.RandomCrop is
// faster. The step also runs on a GPU that decodes. If it changes the image's size, the samples are
// decoded on the host.
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
		return 0, 0, fmt.Errorf(
			"field Size is %d, not in 1 to the side of the padded image of %d x %d pixels", o.Size, w, h)
	}
	return cw, ch, nil
}

func (o RandomCrop) draw(rng *rand.Rand, p *program) {
	w, h := o.size(p.width, p.height)
	y := rng.IntN(p.height + o.Padding[1] + o.Padding[3] - h + 1)
	x := rng.IntN(p.width + o.Padding[0] + o.Padding[2] - w + 1)
	p.crop(x-o.Padding[0], y-o.Padding[1], w, h, o.Mode, o.Fill)
}

// CenterCrop crops the image to the square of Size x Size pixels in its middle. A smaller image
// gets a black border. The step also runs on a GPU that decodes. If it changes the image's size,
// the samples are decoded on the host.
type CenterCrop struct{ Size int }

func (o CenterCrop) check(w, h int) (int, int, error) {
	if o.Size < 1 || o.Size > maxSide {
		return 0, 0, fmt.Errorf("field Size is %d, not in 1 to %d", o.Size, maxSide)
	}
	return o.Size, o.Size, nil
}

func (o CenterCrop) crops() bool { return o.Size > 0 }

func (o CenterCrop) draw(_ *rand.Rand, p *program) {
	begin := func(side int) int {
		if side < o.Size {
			return -((o.Size - side) / 2)
		}
		return int(centre(side, o.Size))
	}
	p.crop(begin(p.width), begin(p.height), o.Size, o.Size, PadConstant, Color{})
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
		limit := maxSide
		switch mode {
		case PadReflect:
			limit = side - 1
		case PadSymmetric:
			limit = side
		}
		if n < 0 || n > limit {
			return fmt.Errorf("field Padding is %v: %d is not in 0 to %d", padding, n, limit)
		}
	}
	return nil
}

func (p *program) crop(x, y, w, h int, mode PaddingMode, fill Color) {
	p.add(imagecapi.AugmentCrop, [9]int32{int32(x), int32(y), int32(w), int32(h),
		int32(mode), int32(fill[0]), int32(fill[1]), int32(fill[2])})
	p.width, p.height = w, h
}
