//go:build linux

package imagecapi

/*
#include "torchstream_image.h"
#cgo noescape ts_augmenter_new
#cgo nocallback ts_augmenter_new
#cgo noescape ts_augmenter_run
#cgo nocallback ts_augmenter_run
#cgo noescape ts_image_plan_augment
#cgo nocallback ts_image_plan_augment
*/
import "C"

import "unsafe"

const (
	AugmentFlipHorizontal = C.TS_AUGMENT_FLIP_HORIZONTAL
	AugmentFlipVertical   = C.TS_AUGMENT_FLIP_VERTICAL
	AugmentQuarterTurns   = C.TS_AUGMENT_QUARTER_TURNS
	AugmentCrop           = C.TS_AUGMENT_CROP
	AugmentBrightness     = C.TS_AUGMENT_BRIGHTNESS
	AugmentContrast       = C.TS_AUGMENT_CONTRAST
	AugmentSaturation     = C.TS_AUGMENT_SATURATION
	AugmentSharpness      = C.TS_AUGMENT_SHARPNESS
	AugmentHue            = C.TS_AUGMENT_HUE
	AugmentGrayscale      = C.TS_AUGMENT_GRAYSCALE
	AugmentInvert         = C.TS_AUGMENT_INVERT
	AugmentSolarize       = C.TS_AUGMENT_SOLARIZE
	AugmentPosterize      = C.TS_AUGMENT_POSTERIZE
	AugmentAutocontrast   = C.TS_AUGMENT_AUTOCONTRAST
	AugmentEqualize       = C.TS_AUGMENT_EQUALIZE
	AugmentBlur           = C.TS_AUGMENT_BLUR
	AugmentErase          = C.TS_AUGMENT_ERASE
	AugmentAffine         = C.TS_AUGMENT_AFFINE
	AugmentPerspective    = C.TS_AUGMENT_PERSPECTIVE
	AugmentPermute        = C.TS_AUGMENT_PERMUTE
	AugmentMix            = C.TS_AUGMENT_MIX

	Nearest  = C.TS_INTERPOLATION_NEAREST
	Bilinear = C.TS_INTERPOLATION_BILINEAR

	PadConstant  = C.TS_PADDING_CONSTANT
	PadEdge      = C.TS_PADDING_EDGE
	PadReflect   = C.TS_PADDING_REFLECT
	PadSymmetric = C.TS_PADDING_SYMMETRIC
)

// AugmentOp has the layout of ts_augment_op.
type AugmentOp struct {
	Kind     int32
	Integers [9]int32
	Values   [8]float64
}

// C reads slices of AugmentOp in place: a size or offset that differs from C's fails to compile.
const (
	_ = -(unsafe.Sizeof(AugmentOp{}) ^ unsafe.Sizeof(C.ts_augment_op{}))
	_ = -(unsafe.Offsetof(AugmentOp{}.Integers) ^ unsafe.Offsetof(C.ts_augment_op{}.integers))
	_ = -(unsafe.Offsetof(AugmentOp{}.Values) ^ unsafe.Offsetof(C.ts_augment_op{}.values))
)

// Augmenter is a ts_augmenter. One goroutine at a time may use it.
type Augmenter = C.ts_augmenter

func NewAugmenter() (a *Augmenter, err error) {
	if err := Check(); err != nil {
		return nil, err
	}
	err = failure(C.ts_augmenter_new(&a))
	return a, err
}

func FreeAugmenter(a *Augmenter) { C.ts_augmenter_free(a) }

// Augment runs ops in place on an image of height rows of width RGB pixels, stride bytes apart. It
// checks that pixels holds the image, because C does not know the length of pixels.
func Augment(a *Augmenter, pixels []byte, width, height, stride int, ops []AugmentOp) error {
	if len(ops) == 0 {
		return nil
	}
	if err := room(width, height, len(pixels), stride); err != nil {
		return err
	}
	return failure(C.ts_augmenter_run(a, (*C.uint8_t)(unsafe.SliceData(pixels)), C.int32_t(width),
		C.int32_t(height), C.size_t(stride),
		(*C.ts_augment_op)(unsafe.Pointer(unsafe.SliceData(ops))), C.int64_t(len(ops))))
}

// PlanAugment appends ops to a plan written by PlanSegments at the start of buffer. The decoder of
// the plan then applies ops to the pixels. n is the plan's new size. If there is no room, n is
// greater than len(buffer) and the plan is unchanged. If only the host can run one of ops, n is 0
// and the plan is unchanged.
func PlanAugment(buffer []byte, ops []AugmentOp) (n int, err error) {
	if err := Check(); err != nil {
		return 0, err
	}
	var planned C.size_t
	err = failure(C.ts_image_plan_augment((*C.uint8_t)(unsafe.SliceData(buffer)), C.size_t(len(buffer)),
		(*C.ts_augment_op)(unsafe.Pointer(unsafe.SliceData(ops))), C.int64_t(len(ops)), &planned))
	return int(planned), err
}
