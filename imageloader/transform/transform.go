package transform

import (
	"errors"
	"fmt"
	"math"

	"github.com/torchstream/torchstream/tensor"
)

// Transform turns an image of any size into Size x Size pixels. [Train] and [Eval] return the two
// usual transforms. Their fields can be changed afterwards. The zero value is Eval(256, 224).
//
// The geometry, the results and the distributions are torchvision's (RandomResizedCrop, Resize,
// CenterCrop, RandomHorizontalFlip, on decoded uint8 RGB with antialias=True). The crop is drawn
// from the image's header, so pixels outside of the crop are not decoded where the format allows.
type Transform struct {
	// Size is the width and height of the result in pixels; 0 is 224.
	Size int

	// RandomResizedCrop takes a random box and resizes it to Size x Size. The box's share of the
	// image's area is uniform in Scale (zero value: 0.08 to 1). The logarithm of its width/height
	// is uniform between the logarithms of Ratio (zero value: 3/4 to 4/3).
	RandomResizedCrop bool
	Scale, Ratio      [2]float64
	// Resize is the length in pixels of the resized shorter side. It applies without
	// RandomResizedCrop, before the crop of Size x Size. It is at least Size; 0 is 256 * Size /
	// 224, rounded.
	Resize int
	// Interpolation selects how RandomResizedCrop and Resize compute pixels: Bilinear (also the
	// default) or Bicubic, both antialiased, or Nearest. The results are torchvision's for uint8
	// tensors, to the bit. Pillow's are within one level (bilinear), on photographs within five
	// (bicubic). Nearest takes the sample at the upper left corner of each pixel, like
	// torchvision's "nearest". Pillow takes the sample at the centre, like torchvision's
	// "nearest-exact".
	Interpolation Interpolation
	// DCTScaling decodes a JPEG at 1/2, 1/4 or 1/8 of its size if the result is far smaller, which
	// is faster. The crop must be at least four times as large as the result in both directions,
	// and the reduced crop is still at least twice as large. The pixels differ from a full-size
	// decode, and so from torchvision's. All paths through this loader give the same pixels.
	// DCTScaling does not apply to Nearest, to damaged images, or to other formats.
	DCTScaling bool
	// ApplyEXIFOrientation first turns an image upright. The orientation is in a tag of a JPEG,
	// PNG, WebP or TIFF file, or in the XMP packet of one of the first three. Without
	// ApplyEXIFOrientation, images are decoded as stored, as in torchvision. AVIF and HEIC are
	// always upright.
	ApplyEXIFOrientation bool

	// RandomCrop takes a random window of Size x Size after Resize instead of the centre, without
	// RandomResizedCrop.
	RandomCrop bool
	// FlipP is the probability that left and right are exchanged.
	FlipP float64
	// Ops run after crop, resize and flip, in order, on Size x Size pixels of red, green and blue
	// bytes. Together they keep the size. They must not change while a loader uses them.
	Ops []Op
	// Mix, if not empty, mixes the samples of every batch by one of these, drawn at random, after
	// Ops. The field "labels" of a batch is then float32 [classes], with sum 1, instead of int64.
	Mix []BatchOp

	// Mean and Std normalise values from 0 to 1, in the order red, green, blue: a result is
	// (byte/255 - Mean) / Std. The zero value of Std stands for ImageNet's Mean and Std. The device
	// applies them: see Loader.Finishes in package imageloader.
	Mean, Std [3]float32
	// DType is the finish's output type: Float32 (also for the zero value), Float16 or BFloat16.
	DType tensor.DType
	// Bytes omits the normalisation: the finish returns uint8, in the selected layout. DType must
	// not be set.
	Bytes bool
	// Contiguous selects NCHW memory for the finish. The default is channels last (NHWC memory with
	// the shape [3, Size, Size] all the same), which convolutions on a GPU prefer.
	Contiguous bool
}

// ImageNet's mean and standard deviation, which models trained on it expect.
var (
	imageNetMean = [3]float32{0.485, 0.456, 0.406}
	imageNetStd  = [3]float32{0.229, 0.224, 0.225}
)

// Train returns the usual transform for training: RandomResizedCrop(size) and a horizontal flip
// with probability 1/2, normalised with ImageNet's mean and standard deviation.
func Train(size int) Transform {
	return Transform{Size: size, RandomResizedCrop: true, FlipP: 0.5}.withDefaults()
}

// Eval returns the usual transform for evaluation: Resize(resize) and CenterCrop(size), normalised
// with ImageNet's mean and standard deviation.
func Eval(resize, size int) Transform {
	return Transform{Size: size, Resize: resize}.withDefaults()
}

func (t Transform) withDefaults() Transform {
	if t.Size == 0 {
		t.Size = 224
	}
	if t.Resize == 0 && !t.RandomResizedCrop {
		t.Resize = (256*t.Size + 112) / 224
	}
	t.Scale = interval(t.Scale, [2]float64{0.08, 1})
	t.Ratio = interval(t.Ratio, [2]float64{3. / 4, 4. / 3})
	if t.Std == [3]float32{} {
		t.Mean, t.Std = imageNetMean, imageNetStd
	}
	if t.DType == 0 && !t.Bytes { // 0 is also Uint8
		t.DType = tensor.Float32
	}
	return t
}

// maxSide bounds the sides of the result. It is far larger than any network's input, and no product
// of sides overflows.
const maxSide = 1 << 15

// check returns an error that names the wrong field. t has its defaults.
func (t Transform) check() error {
	if err := t.checkSize(); err != nil {
		return err
	}
	switch {
	case !(t.Scale[0] > 0 && t.Scale[0] <= t.Scale[1] && t.Scale[1] <= 1):
		return fmt.Errorf("field Scale is %v, not an interval in (0, 1]", t.Scale)
	case !(t.Ratio[0] > 0 && t.Ratio[0] <= t.Ratio[1]) || math.IsInf(t.Ratio[1], 0):
		return fmt.Errorf("field Ratio is %v, not an interval of positive numbers", t.Ratio)
	case t.Interpolation < DefaultInterpolation || t.Interpolation > Bicubic:
		return fmt.Errorf("field Interpolation is %d, not Nearest, Bilinear or Bicubic", t.Interpolation)
	case !(t.FlipP >= 0 && t.FlipP <= 1):
		return fmt.Errorf("field FlipP is %v, not in 0 to 1", t.FlipP)
	}
	if err := t.checkFinish(); err != nil {
		return err
	}
	if err := checkMixes(t.Mix); err != nil {
		return err
	}
	return checkOps(t.Ops, t.Size, t.Size)
}

// checkSize checks the fields that choose how the image gets its size.
func (t Transform) checkSize() error {
	switch {
	case t.Size < 1 || t.Size > maxSide:
		return fmt.Errorf("field Size is %d, not in 1 to %d", t.Size, maxSide)
	case !t.RandomResizedCrop && (t.Resize < t.Size || t.Resize > maxSide):
		return fmt.Errorf("field Resize is %d, not in Size (%d) to %d", t.Resize, t.Size, maxSide)
	case t.RandomResizedCrop && (t.Resize != 0 || t.RandomCrop):
		return errors.New("field RandomResizedCrop excludes Resize and RandomCrop")
	}
	return nil
}

func (t Transform) checkFinish() error {
	switch {
	case !(t.Std[0] > 0 && t.Std[1] > 0 && t.Std[2] > 0):
		return fmt.Errorf("field Std is %v, not positive", t.Std)
	case t.Bytes && t.DType != tensor.Uint8:
		return fmt.Errorf("field DType is %v, and Bytes is set: leave one out", t.DType)
	case !t.Bytes && t.DType != tensor.Float32 && t.DType != tensor.Float16 && t.DType != tensor.BFloat16:
		return fmt.Errorf("field DType is %v, not float32, float16 or bfloat16", t.DType)
	}
	return nil
}
