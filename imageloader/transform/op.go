package transform

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"

	"github.com/torchstream/torchstream/internal/imagecapi"
)

// Op is a step of Transform.Ops. The operations of this package follow torchvision.transforms.v2 on
// uint8 tensors: they have the same names, parameters and distributions, and the same results for
// the same parameters. Results are equal to the bit, except for GaussianBlur and the hue of
// ColorJitter, where one byte in a thousand may differ by 1. Zero values select torchvision's
// defaults. If torchvision has no default, the step's comment says what zero means. [Func] is a
// step that the caller writes.
//
// The parameters of a step are drawn from (Options.Seed, epoch, sample index), after the parameters
// of the crop and the flip. Adding a step therefore changes neither the crop nor the flip.
//
// A GPU that decodes (prefetcher.Options.Decode) also runs the steps, with the same results to the
// bit, if it can run all steps that are drawn for a sample. Otherwise the sample is decoded on the
// host, and all its steps run there. The comment of each step says whether it can run on a GPU. A
// step that is not drawn for a sample, because of its probability, does not count.
type Op interface {
	// check returns the size of the step's result for images of width x height pixels, or an error
	// that names the wrong field.
	check(width, height int) (w, h int, err error)
	// draw draws the step's parameters for one image and adds its operations to p.
	draw(rng *rand.Rand, p *program)
}

// program has the steps for one image: operations of the image library, and calls of Funcs between
// them.
type program struct {
	ops           []imagecapi.AugmentOp
	calls         []call
	width, height int // of the image after ops
	mean, std     [3]float32
}

// call runs a Func after the first `after` operations.
type call struct {
	after int
	run   Func
}

func (p *program) reset(t *Transform) {
	p.ops, p.calls = p.ops[:0], p.calls[:0]
	p.width, p.height, p.mean, p.std = t.Size, t.Size, t.Mean, t.Std
}

func (p *program) add(kind int32, integers [9]int32, values ...float64) {
	op := imagecapi.AugmentOp{Kind: kind, Integers: integers}
	copy(op.Values[:], values)
	p.ops = append(p.ops, op)
}

func (p *program) call(f Func) { p.calls = append(p.calls, call{len(p.ops), f}) }

// Pixels is an image in memory: Height rows of Width pixels of three bytes, red, green and blue.
// The pixel in row y and column x starts at Pix[y*Stride+3*x]. Stride is at least 3*Width. The
// bytes between rows are not part of the image. The loader owns the memory, which a [Func] may use
// only until it returns.
type Pixels struct {
	Pix           []byte
	Width, Height int
	Stride        int
}

// Func is a step that the caller writes. It changes an image of Size x Size pixels in place. rng is
// the sample's generator. If a Func draws random numbers only from rng, its results are the same
// for any number of workers, and after resuming. An error or a panic makes the sample a bad one,
// with the reason Rejected. A Func is called from several goroutines at the same time, each with
// another image. With Options.Masks or Options.Boxes a Func gets only the image, so it must not
// move pixels. Samples with this step are decoded on the host.
type Func func(rng *rand.Rand, image *Pixels) error

func (f Func) check(w, h int) (int, int, error) {
	if f == nil {
		return 0, 0, errors.New("a Func is nil")
	}
	return w, h, nil
}

func (f Func) draw(_ *rand.Rand, p *program) { p.call(f) }

// call runs f. It returns a panic as an error, because f runs in the loader's goroutines, where the
// program that uses the loader could not recover the panic.
func (f Func) call(rng *rand.Rand, image *Pixels) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("a Func of the transform panicked: %v", v)
		}
	}()
	return f(rng, image)
}

// checkOps checks that the steps, one after another, keep the image's size.
func checkOps(ops []Op, width, height int) error {
	w, h := width, height
	for i, op := range ops {
		if isNil(op) {
			return fmt.Errorf("field Ops[%d] is nil", i)
		}
		if has(op, onPixels) && (w != width || h != height) {
			return fmt.Errorf("field Ops[%d] (%T) is on %d x %d pixels: it must come before or after "+
				"steps that change the size, "+
				"not between", i, op, w, h)
		}
		if expands(op) {
			if next, ok := at(ops, i+1).(interface{ crops() bool }); !ok || isNil(ops[i+1]) || !next.crops() {
				return fmt.Errorf("field Ops[%d] (%T) has Expand, which makes images of any size: "+
					"the next step must be a CenterCrop", i, op)
			}
		}
		nw, nh, err := op.check(w, h)
		if err == nil && (nw > maxSide || nh > maxSide) {
			err = fmt.Errorf("it makes %d x %d pixels", nw, nh)
		}
		if err != nil {
			return fmt.Errorf("field Ops[%d] (%T): %w", i, op, err)
		}
		w, h = nw, nh
	}
	if w != width || h != height {
		return fmt.Errorf("field Ops makes %d x %d pixels of %d x %d: a crop to the old size is missing", w,
			h, width, height)
	}
	return nil
}

// checkEach checks that each step alone keeps the image's size.
func checkEach(ops []Op, w, h int) error {
	for i := range ops {
		if err := checkOps(ops[i:i+1], w, h); err != nil {
			return err
		}
	}
	return nil
}

// at returns step i, or nil after the last one.
func at(ops []Op, i int) Op {
	if i < len(ops) {
		return ops[i]
	}
	return nil
}

// has reports whether kind is true for a step or for a step inside it.
func has(op Op, kind func(Op) bool) bool {
	if isNil(op) {
		return false
	}
	o, ok := op.(interface{ steps() []Op })
	return kind(op) || ok && slices.ContainsFunc(o.steps(), func(op Op) bool { return has(op, kind) })
}

func (o RandomApply) steps() []Op  { return o.Ops }
func (o RandomChoice) steps() []Op { return o.Ops }
func (o RandomOrder) steps() []Op  { return o.Ops }

// onPixels reports whether a step may run in Go, on pixels in Go's memory. Such a step needs an
// image of Size x Size pixels.
func onPixels(op Op) bool {
	o, ok := op.(interface{ onPixels() bool })
	return ok && o.onPixels()
}

// onDevice reports whether a GPU that decodes can run all steps on images of size x size pixels,
// whatever parameters are drawn. It returns false for steps that change the image's size.
// TestGPURunsWhatDocsClaim compares the result with the comment of each step.
func onDevice(ops []Op, size int) bool {
	for _, op := range ops {
		if w, h, err := op.check(size, size); err != nil || w != size || h != size {
			return false
		}
		if onPixels(op) || expands(op) {
			return false
		}
		if o, ok := op.(interface{ steps() []Op }); ok && !onDevice(o.steps(), size) {
			return false
		}
	}
	return true
}

// expands reports whether the size of a step's result may vary.
func expands(op Op) bool {
	o, ok := op.(interface{ expands() bool })
	return ok && o.expands()
}

func (Func) onPixels() bool            { return true }
func (GaussianNoise) onPixels() bool   { return true }
func (o RandomErasing) onPixels() bool { return o.Random }

// isNil reports whether a step is nil or a nil pointer. Pointers to steps are steps too.
func isNil(op any) bool {
	v := reflect.ValueOf(op)
	return op == nil || v.Kind() == reflect.Pointer && v.IsNil()
}

// Interpolation selects how a pixel is computed from the pixels around its position in the source.
type Interpolation int

// The interpolations.
const (
	// DefaultInterpolation is the step's default: Bilinear for resizing and RandomPerspective, and
	// Nearest for all others.
	DefaultInterpolation Interpolation = iota
	Nearest
	Bilinear
	// Bicubic can be used only for Transform.Interpolation.
	Bicubic
)

// ParseInterpolation returns the interpolation with a name of torchvision: nearest, bilinear or
// bicubic. "" is Bilinear.
func ParseInterpolation(name string) (Interpolation, error) {
	i, known := map[string]Interpolation{"": Bilinear, "bilinear": Bilinear, "bicubic": Bicubic, "nearest": Nearest}[name]
	if !known {
		return 0, fmt.Errorf("the interpolation %q is unknown: want bilinear, bicubic or nearest", name)
	}
	return i, nil
}

// or returns the image library's number for the interpolation. d replaces DefaultInterpolation.
func (i Interpolation) or(d Interpolation) int32 {
	if i == DefaultInterpolation {
		i = d
	}
	return int32(i)
}

func (i Interpolation) check() error {
	if i < DefaultInterpolation || i > Bilinear {
		return fmt.Errorf("field Interpolation is %d, not Nearest or Bilinear", i)
	}
	return nil
}

// Color is a red, a green and a blue byte; the zero value is black.
type Color [3]uint8

// probability returns p, or fallback if p is 0.
func probability(p, fallback float64) float64 {
	if p == 0 {
		return fallback
	}
	return p
}

func checkP(p float64) error {
	if !(p >= 0 && p <= 1) {
		return fmt.Errorf("field P is %v, not in 0 to 1", p)
	}
	return nil
}

// hit returns true with probability p.
func hit(rng *rand.Rand, p float64) bool { return rng.Float64() < p }

// between draws uniformly from an interval.
func between(rng *rand.Rand, r [2]float64) float64 { return r[0] + rng.Float64()*(r[1]-r[0]) }

// interval returns r, or fallback if r is zero.
func interval(r, fallback [2]float64) [2]float64 {
	if r == [2]float64{} {
		return fallback
	}
	return r
}

func checkInterval(name string, r [2]float64, low, high float64) error {
	if !(r[0] >= low && r[0] <= r[1] && r[1] <= high) {
		return fmt.Errorf("field %s is %v, not an interval in %v to %v", name, r, low, high)
	}
	return nil
}
