package transform

import (
	"fmt"
	"math"
	"math/rand/v2"

	"github.com/torchstream/torchstream/internal/imagecapi"
)

// maxResized limits the longer side after Resize, as the image library does: an image of 1 x
// 100,000,000 pixels is an attack, not a photograph.
const maxResized = 1<<16 - 1

// geometry selects the part of a width x height image that becomes the result. It depends only on
// its arguments and the numbers that rng returns. t must have its defaults.
func (t *Transform) geometry(rng *rand.Rand, width, height int32, g *imagecapi.Geometry) error {
	size := int32(t.Size)
	if t.RandomResizedCrop {
		x, y, w, h := t.randomBox(rng, width, height)
		*g = imagecapi.Geometry{CropX: x, CropY: y, CropWidth: w, CropHeight: h,
			ResizeWidth: size, ResizeHeight: size, WindowWidth: size, WindowHeight: size}
	} else {
		w, h := shortSide(width, height, t.Resize)
		if max(w, h) > maxResized {
			return fmt.Errorf("%d x %d pixels is too narrow to resize its shorter side to %d", width, height, t.Resize)
		}
		*g = imagecapi.Geometry{CropWidth: width, CropHeight: height, ResizeWidth: int32(w), ResizeHeight: int32(h),
			WindowX: centre(w, t.Size), WindowY: centre(h, t.Size), WindowWidth: size, WindowHeight: size}
		if t.RandomCrop {
			g.WindowY = rng.Int32N(int32(h) - size + 1)
			g.WindowX = rng.Int32N(int32(w) - size + 1)
		}
	}
	g.Interpolation, g.DCTScaling = int32(t.Interpolation), t.DCTScaling
	// Draw a number even for probabilities 0 and 1, so that changing FlipP changes nothing else.
	g.Flip = rng.Float64() < t.FlipP
	return nil
}

// randomBox is torchvision's RandomResizedCrop.get_params.
func (t *Transform) randomBox(rng *rand.Rand, width, height int32) (x, y, w, h int32) {
	area := float64(width) * float64(height)
	low, high := math.Log(t.Ratio[0]), math.Log(t.Ratio[1])
	for range 10 {
		target := area * (t.Scale[0] + rng.Float64()*(t.Scale[1]-t.Scale[0]))
		ratio := math.Exp(low + rng.Float64()*(high-low))
		fw := math.RoundToEven(math.Sqrt(target * ratio))
		fh := math.RoundToEven(math.Sqrt(target / ratio))
		if fw > 0 && fw <= float64(width) && fh > 0 && fh <= float64(height) {
			w, h = int32(fw), int32(fh)
			y = rng.Int32N(height - h + 1)
			x = rng.Int32N(width - w + 1)
			return x, y, w, h
		}
	}
	w, h = width, height // the middle of the image, as much as Ratio allows
	switch ratio := float64(width) / float64(height); {
	case ratio < t.Ratio[0]:
		h = max(1, int32(math.RoundToEven(float64(width)/t.Ratio[0])))
	case ratio > t.Ratio[1]:
		w = max(1, int32(math.RoundToEven(float64(height)*t.Ratio[1])))
	}
	return (width - w) / 2, (height - h) / 2, w, h
}

// shortSide returns the size that torchvision's Resize(to) gives an image: the shorter side becomes
// to, and the longer side is rounded down.
func shortSide(width, height int32, to int) (w, h int) {
	if width <= height {
		return to, int(int64(to) * int64(height) / int64(width))
	}
	return int(int64(to) * int64(width) / int64(height)), to
}

// centre returns the offset that torchvision's CenterCrop uses: Python's round((side - size) / 2),
// which rounds halves to even.
func centre(side, size int) int32 {
	return int32(math.RoundToEven(float64(side-size) / 2))
}
