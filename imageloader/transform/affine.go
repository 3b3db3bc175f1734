package transform

import (
	"fmt"
	"math"
	"math/rand/v2"

	"github.com/torchstream/torchstream/internal/imagecapi"
)

// RandomRotation rotates the image counter-clockwise around its centre, or around Center (in pixels
// from the left and from the top). The angle in degrees is uniform in Degrees. Pixels from outside
// get the colour Fill. With Expand, the image grows until it contains the whole rotated image, so a
// CenterCrop has to follow. The step also runs on a GPU that decodes. With Expand, the samples are
// decoded on the host.
type RandomRotation struct {
	Degrees       [2]float64
	Interpolation Interpolation
	Fill          Color
	Center        *[2]float64 // nil: the middle of the image
	Expand        bool
}

func (o RandomRotation) check(w, h int) (int, int, error) {
	if err := o.Interpolation.check(); err != nil {
		return 0, 0, err
	}
	if err := checkCenter(o.Center); err != nil {
		return 0, 0, err
	}
	return w, h, checkInterval("Degrees", o.Degrees, -1e6, 1e6)
}

func (o RandomRotation) expands() bool { return o.Expand }

func (o RandomRotation) draw(rng *rand.Rand, p *program) {
	p.rotate(between(rng, o.Degrees), o.Center, o.Expand, o.Interpolation, &o.Fill)
}

// RandomAffine rotates, moves, scales and shears the image. The angle of the rotation is uniform in
// Degrees. The image moves by up to Translate in either direction, in fractions of the width and of
// the height. The scale is uniform in Scale (zero value: 1). The angles of the shear are uniform in
// Shear[0] to Shear[1] along x, and in Shear[2] to Shear[3] along y. All angles are in degrees. The
// step also runs on a GPU that decodes.
type RandomAffine struct {
	Degrees       [2]float64
	Translate     [2]float64
	Scale         [2]float64
	Shear         [4]float64
	Interpolation Interpolation
	Fill          Color
	Center        *[2]float64 // as in RandomRotation
}

func (o RandomAffine) check(w, h int) (int, int, error) {
	for _, c := range []struct {
		name      string
		r         [2]float64
		low, high float64
	}{
		{"Degrees", o.Degrees, -1e6, 1e6},
		{"Scale", interval(o.Scale, [2]float64{1, 1}), 1e-3, 1e3},
		{"Shear[:2]", [2]float64{o.Shear[0], o.Shear[1]}, -89, 89},
		{"Shear[2:]", [2]float64{o.Shear[2], o.Shear[3]}, -89, 89},
	} {
		if err := checkInterval(c.name, c.r, c.low, c.high); err != nil {
			return 0, 0, err
		}
	}
	for _, t := range o.Translate {
		if !(t >= 0 && t <= 1) {
			return 0, 0, fmt.Errorf("field Translate is %v, not in 0 to 1", o.Translate)
		}
	}
	if err := checkCenter(o.Center); err != nil {
		return 0, 0, err
	}
	return w, h, o.Interpolation.check()
}

func (o RandomAffine) draw(rng *rand.Rand, p *program) {
	a := affine{angle: between(rng, o.Degrees), centre: o.Center}
	for i, side := range [2]int{p.width, p.height} {
		limit := o.Translate[i] * float64(side)
		a.translate[i] = math.RoundToEven(between(rng, [2]float64{-limit, limit}))
	}
	a.scale = between(rng, interval(o.Scale, [2]float64{1, 1}))
	a.shear[0] = between(rng, [2]float64{o.Shear[0], o.Shear[1]})
	a.shear[1] = between(rng, [2]float64{o.Shear[2], o.Shear[3]})
	p.affine(a, o.Interpolation, &o.Fill)
}

func checkCenter(c *[2]float64) error {
	if c != nil && !(math.Abs(c[0]) <= 1e6 && math.Abs(c[1]) <= 1e6) {
		return fmt.Errorf("field Center is %v, not in -1e6 to 1e6", *c)
	}
	return nil
}

// fill returns the integer parameters of an operation that resamples the image: the interpolation
// and the colour of pixels from outside. A nil colour means black. An explicit colour, even black,
// selects torchvision's other arithmetic.
func fill(interpolation int32, c *Color) [9]int32 {
	if c == nil {
		return [9]int32{interpolation}
	}
	return [9]int32{interpolation, 1, int32(c[0]), int32(c[1]), int32(c[2])}
}

// affine has the parameters of torchvision's F.affine.
type affine struct {
	angle     float64 // degrees, clockwise
	translate [2]float64
	scale     float64
	shear     [2]float64  // degrees
	centre    *[2]float64 // pixels from the upper left corner; nil: the middle
}

// inverse computes torchvision's _get_inverse_affine_matrix, operation by operation.
func (a affine) inverse(w, h int) [6]float64 {
	var cx, cy float64
	if a.centre != nil {
		cx, cy = a.centre[0]-float64(w)*0.5, a.centre[1]-float64(h)*0.5
	}
	rot, sx, sy := a.angle*(math.Pi/180), a.shear[0]*(math.Pi/180), a.shear[1]*(math.Pi/180)
	// The conversions to float64 keep the compiler from fusing a product with a sum, because that
	// would round differently on some processors.
	ra := math.Cos(rot-sy) / math.Cos(sy)
	rb := -(float64(ra*math.Tan(sx)) + math.Sin(rot))
	rc := math.Sin(rot-sy) / math.Cos(sy)
	rd := math.Cos(rot) - float64(rc*math.Tan(sx))
	m := [6]float64{rd / a.scale, -rb / a.scale, 0, -rc / a.scale, ra / a.scale, 0}
	x, y := cx+a.translate[0], cy+a.translate[1]
	m[2] += cx - float64(m[0]*x) - float64(m[1]*y)
	m[5] += cy - float64(m[3]*x) - float64(m[4]*y)
	return m
}

func (p *program) affine(a affine, i Interpolation, c *Color) {
	m := a.inverse(p.width, p.height)
	p.add(imagecapi.AugmentAffine, fill(i.or(Nearest), c), m[:]...)
}

// rotate adds the operations of torchvision's F.rotate. Quarter turns around the middle move whole
// pixels, and other angles resample them.
func (p *program) rotate(degrees float64, centre *[2]float64, expand bool, i Interpolation, c *Color) {
	degrees = math.Mod(degrees, 360)
	if degrees < 0 {
		degrees += 360
	}
	switch {
	case degrees == 0 && centre == nil:
	case centre == nil && (degrees == 180 || (degrees == 90 || degrees == 270) && (expand || p.width == p.height)):
		p.add(imagecapi.AugmentQuarterTurns, [9]int32{int32(degrees / 90)})
		if degrees != 180 {
			p.width, p.height = p.height, p.width
		}
	default:
		m := affine{angle: -degrees, scale: 1, centre: centre}.inverse(p.width, p.height)
		integers := fill(i.or(Nearest), c)
		if expand {
			p.width, p.height = expanded(m, p.width, p.height)
			integers[5], integers[6] = int32(p.width), int32(p.height)
		}
		p.add(imagecapi.AugmentAffine, integers, m[:]...)
	}
}

// expanded returns the size that contains a whole rotated image. It computes torchvision's
// _compute_affine_output_size, with the same float32 arithmetic.
func expanded(m [6]float64, w, h int) (int, int) {
	var size [2]int
	for axis := range size {
		a, b, c := float32(m[3*axis]), float32(m[3*axis+1]), float32(m[3*axis+2])
		half := 0.5 * float32([2]int{w, h}[axis])
		low, high := float32(math.Inf(1)), float32(math.Inf(-1))
		for _, corner := range [4][2]float32{{-1, -1}, {-1, 1}, {1, 1}, {1, -1}} {
			x, y := corner[0]*0.5*float32(w), corner[1]*0.5*float32(h)
			at := fma32(b, y, float32(a*x)) + c
			low, high = min(low, at), max(high, at)
		}
		cut := func(v float32) float32 { return float32(math.Trunc(float64((v+half)*1e4))) * 1e-4 }
		size[axis] = int(math.Ceil(float64(cut(high))) - math.Floor(float64(cut(low))))
	}
	return size[0], size[1]
}

// fma32 returns x*y + z, rounded once. The product of two float32 is exact in float64. If the sum
// is inexact there, rounding twice almost never differs from rounding once.
func fma32(x, y, z float32) float32 { return float32(math.FMA(float64(x), float64(y), float64(z))) }
