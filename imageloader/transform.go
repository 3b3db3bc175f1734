package imageloader

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"

	"github.com/torchstream/torchstream/internal/imagecapi"
	"github.com/torchstream/torchstream/tensor"
)

// Transform turns an image of any size into Size x Size pixels. [Train] and [Eval] make the usual two; their fields can be changed afterwards. The zero value
// is Eval(256, 224).
//
// The geometry, results and distributions are torchvision's (RandomResizedCrop, Resize, CenterCrop, RandomHorizontalFlip, on decoded uint8 RGB with
// antialiased bilinear interpolation). Where the crop lies is drawn from the image's header, so what lies outside of it is not decoded where the format allows.
type Transform struct {
	// Size is the width and height of the result in pixels; 0 is 224.
	Size int

	// RandomResizedCrop takes a random box, resized to Size x Size: its share of the image's area is uniform in Scale (zero value: 0.08 to 1), the logarithm of
	// width/height is uniform between those of Ratio (zero value: 3/4 to 4/3).
	RandomResizedCrop bool
	Scale, Ratio      [2]float64
	// Resize, without RandomResizedCrop, is the length in pixels that the shorter side is resized to before the centre of Size x Size is taken. At least Size; 0 is
	// 256 * Size / 224, rounded.
	Resize int
	// ApplyEXIFOrientation turns images upright, as the notes in a JPEG, PNG, WebP or TIFF file say, before anything else. Off, as in torchvision, they are taken as stored.
	ApplyEXIFOrientation bool

	// RandomCrop, without RandomResizedCrop, takes a random window of Size x Size after Resize in place of the centre.
	RandomCrop bool
	// FlipP is the probability that left and right are exchanged.
	FlipP float64
	// Ops are the steps after that, on Size x Size bytes of red, green and blue, in order; together they keep the size. They are not to be changed while a loader uses them.
	Ops []Op
	// Mix, if not empty, mixes the samples of every batch by one of these, drawn at random, after Ops. "labels" is then float32 [classes], with sum 1, instead of int64.
	Mix []BatchOp

	// Mean and Std are for values from 0 to 1, in the order red, green, blue: a result is (byte/255 - Mean) / Std. The zero value of Std stands for ImageNet's Mean
	// and Std. They are applied on the device: see Loader.Finishes.
	Mean, Std [3]float32
	// DType is what Finish converts to: Float32 (also for the zero value), Float16 or BFloat16.
	DType tensor.DType
	// Bytes leaves normalisation out: Finish makes uint8, in the layout that is asked for. DType must not be set.
	Bytes bool
	// Contiguous asks Finish for NCHW memory. The default is channels last (NHWC memory with the shape [3, Size, Size] all the same), which convolutions on a GPU
	// prefer.
	Contiguous bool
}

// ImageNet's mean and standard deviation, which models that are trained on it expect.
var (
	imageNetMean = [3]float32{0.485, 0.456, 0.406}
	imageNetStd  = [3]float32{0.229, 0.224, 0.225}
)

// Train is the usual transform for training: RandomResizedCrop(size) and a horizontal flip with probability 1/2, normalised with ImageNet's mean and standard
// deviation.
func Train(size int) Transform {
	return Transform{Size: size, RandomResizedCrop: true, FlipP: 0.5}.withDefaults()
}

// Eval is the usual transform for evaluation: Resize(resize), CenterCrop(size), normalised with ImageNet's mean and standard deviation.
func Eval(resize, size int) Transform { return Transform{Size: size, Resize: resize}.withDefaults() }

func (t Transform) withDefaults() Transform {
	if t.Size == 0 {
		t.Size = 224
	}
	if t.Resize == 0 && !t.RandomResizedCrop {
		t.Resize = (256*t.Size + 112) / 224
	}
	if t.Scale == [2]float64{} {
		t.Scale = [2]float64{0.08, 1}
	}
	if t.Ratio == [2]float64{} {
		t.Ratio = [2]float64{3. / 4, 4. / 3}
	}
	if t.Std == [3]float32{} {
		t.Mean, t.Std = imageNetMean, imageNetStd
	}
	if t.DType == 0 && !t.Bytes { // 0 is also Uint8
		t.DType = tensor.Float32
	}
	return t
}

const maxSide = 1 << 15 // of the result: far over what a network takes, and nothing overflows

func (t Transform) check() error {
	switch {
	case t.Size < 1 || t.Size > maxSide:
		return fmt.Errorf("field Size is %d, not in 1 to %d", t.Size, maxSide)
	case !t.RandomResizedCrop && (t.Resize < t.Size || t.Resize > maxSide):
		return fmt.Errorf("field Resize is %d, not in Size (%d) to %d", t.Resize, t.Size, maxSide)
	case t.RandomResizedCrop && (t.Resize != 0 || t.RandomCrop):
		return errors.New("field RandomResizedCrop excludes Resize and RandomCrop")
	case !(t.Scale[0] > 0 && t.Scale[0] <= t.Scale[1] && t.Scale[1] <= 1):
		return fmt.Errorf("field Scale is %v, not an interval in (0, 1]", t.Scale)
	case !(t.Ratio[0] > 0 && t.Ratio[0] <= t.Ratio[1]) || math.IsInf(t.Ratio[1], 0):
		return fmt.Errorf("field Ratio is %v, not an interval of positive numbers", t.Ratio)
	case !(t.FlipP >= 0 && t.FlipP <= 1):
		return fmt.Errorf("field FlipP is %v, not in 0 to 1", t.FlipP)
	case !(t.Std[0] > 0 && t.Std[1] > 0 && t.Std[2] > 0):
		return fmt.Errorf("field Std is %v, not positive", t.Std)
	case t.Bytes && t.DType != tensor.Uint8:
		return fmt.Errorf("field DType is %v, and Bytes is set: leave one out", t.DType)
	case !t.Bytes && t.DType != tensor.Float32 && t.DType != tensor.Float16 && t.DType != tensor.BFloat16:
		return fmt.Errorf("field DType is %v, not float32, float16 or bfloat16", t.DType)
	}
	if err := checkMixes(t.Mix); err != nil {
		return err
	}
	return checkOps(t.Ops, t.Size, t.Size)
}

// maxResized bounds the longer side after Resize, as the shim does: an image of 1 x 100,000,000 pixels is an attack, not a photograph.
const maxResized = 1<<16 - 1

// geometryOf is geometry for an image as its file describes it.
func (t *Transform) geometryOf(rng *rand.Rand, info *imagecapi.Info, g *imagecapi.Geometry) error {
	width, height, orientation := info.Width, info.Height, int32(0)
	if t.ApplyEXIFOrientation && info.Orientation > 1 {
		if orientation = info.Orientation; orientation >= 5 { // it lies on its side
			width, height = height, width
		}
	}
	err := t.geometry(rng, width, height, g)
	g.Orientation = orientation
	return err
}

// geometry says which pixels of a width x height image become the result. It is a pure function of its arguments and of what rng yields. t has its defaults.
func (t *Transform) geometry(rng *rand.Rand, width, height int32, g *imagecapi.Geometry) error {
	size := int32(t.Size)
	if t.RandomResizedCrop {
		x, y, w, h := t.randomBox(rng, width, height)
		*g = imagecapi.Geometry{CropX: x, CropY: y, CropWidth: w, CropHeight: h, ResizeWidth: size, ResizeHeight: size, WindowWidth: size, WindowHeight: size}
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
	// Drawn even for probability 0 and 1, so that changing FlipP changes nothing else.
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
	w, h = width, height // the middle, as much of it as the ratio allows
	switch ratio := float64(width) / float64(height); {
	case ratio < t.Ratio[0]:
		h = max(1, int32(math.RoundToEven(float64(width)/t.Ratio[0])))
	case ratio > t.Ratio[1]:
		w = max(1, int32(math.RoundToEven(float64(height)*t.Ratio[1])))
	}
	return (width - w) / 2, (height - h) / 2, w, h
}

// shortSide is the size that torchvision's Resize(to) makes of an image: the shorter side becomes to, the longer one is cut to whole pixels.
func shortSide(width, height int32, to int) (w, h int) {
	if width <= height {
		return to, int(int64(to) * int64(height) / int64(width))
	}
	return int(int64(to) * int64(width) / int64(height)), to
}

// centre is where torchvision's CenterCrop begins: Python's round((side - size) / 2), halves to even.
func centre(side, size int) int32 {
	return int32(math.RoundToEven(float64(side-size) / 2))
}
