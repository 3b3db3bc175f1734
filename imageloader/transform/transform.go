package transform

import (
	"errors"
	"fmt"
	"math"

	"github.com/torchstream/torchstream/tensor"
)

// Transform turns an image of any size into Size x Size pixels. [Train] and [Eval] return the two
// usual transforms, whose fields can then be changed. The zero value is Eval(256, 224).
//
// The geometry, the results and the distributions are the same as in torchvision
// (RandomResizedCrop, Resize, CenterCrop, RandomHorizontalFlip, on decoded uint8 RGB with
// antialias=True). The crop is drawn from the image's header, so pixels outside of the crop are not
// decoded if the format allows that.
type Transform struct {
	// Size is the width and height of the result in pixels; 0 is 224.
	Size int

	// RandomResizedCrop crops to a random box and resizes it to Size x Size. The box's share of the
	// image's area is uniform in Scale (zero value: 0.08 to 1). The logarithm of its width/height
	// is uniform between the logarithms of Ratio (zero value: 3/4 to 4/3).
	RandomResizedCrop bool
	Scale, Ratio      [2]float64
	// Resize is the length of the shorter side after resizing, in pixels. It is used without
	// RandomResizedCrop, before the crop to Size x Size. It must be at least Size. 0 means 256 *
	// Size / 224, rounded.
	Resize int
	// Interpolation selects how RandomResizedCrop and Resize compute pixels: Bilinear (also the
	// default) or Bicubic, both antialiased, or Nearest. The results are the same as torchvision's
	// for uint8 tensors, to the bit. Pillow's results differ by at most one level (bilinear), or on
	// photographs by at most five (bicubic). Nearest samples the upper left corner of each pixel,
	// like torchvision's "nearest". Pillow samples the centre, like torchvision's "nearest-exact".
	Interpolation Interpolation
	// DCTScaling decodes a JPEG at 1/2, 1/4 or 1/8 of its size if the result is much smaller, which
	// is faster. It applies if the crop is at least four times as large as the result in both
	// directions. The reduced crop is still at least twice as large as the result. The pixels
	// differ from a full-size decode, and so from torchvision, but they are the same in all modes
	// of this loader. DCTScaling does not apply to Nearest, to damaged images, or to other formats.
	DCTScaling bool
	// ApplyEXIFOrientation first turns the image upright. The orientation is in a tag of a JPEG,
	// PNG, WebP or TIFF file, or in the XMP packet of one of the first three. Without
	// ApplyEXIFOrientation, images are decoded as stored, as in torchvision. AVIF and HEIC images
	// are always upright.
	ApplyEXIFOrientation bool

	// RandomCrop crops to a random window of Size x Size after Resize, instead of the centre. It is
	// used without RandomResizedCrop.
	RandomCrop bool
	// FlipP is the probability of a flip from left to right.
	FlipP float64
	// Ops run after crop, resize and flip, in order, on Size x Size pixels of red, green and blue
	// bytes. Together they must keep the size. They must not change while a loader uses them.
	Ops []Op
	// Mix, if not empty, has the operations that mix the samples of a batch after Ops. For each
	// batch, one of them is chosen at random. The field "labels" of a batch is then float32
	// [classes], with sum 1, instead of int64.
	Mix []BatchOp

	// Mean and Std normalise values from 0 to 1, in the order red, green, blue: a result is
	// (byte/255 - Mean) / Std. If Std is zero, ImageNet's Mean and Std are used. The normalisation
	// is done on the device: see Loader.Finishes in package imageloader.
	Mean, Std [3]float32
	// DType is the dtype of the normalised result: Float32 (also for the zero value), Float16 or
	// BFloat16.
	DType tensor.DType
	// Bytes disables the normalisation: the result is uint8, in the selected layout. DType must not
	// be set.
	Bytes bool
	// Contiguous selects NCHW memory for the result. The default is channels last (NHWC memory,
	// although the shape is still [3, Size, Size]), which convolutions on a GPU prefer.
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
	if t.DType == 0 && !t.Bytes { // 0 is also the value of Uint8
		t.DType = tensor.Float32
	}
	return t
}

// maxSide limits the sides of the result. It is much larger than any network's input, and small
// enough that products of sides can't overflow.
const maxSide = 1 << 15

// check returns an error that names the wrong field. t must have its defaults.
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

// checkSize checks the fields that determine how the image gets its size.
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
