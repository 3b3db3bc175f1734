package transform

import (
	"fmt"
	"math"
	"math/rand/v2"

	"github.com/torchstream/torchstream/internal/imagecapi"
)

// RandomPerspective moves each corner inwards by up to half of DistortionScale (0: 1/2) of the
// side, with probability P (0: 1/2). The step also runs on a GPU that decodes.
type RandomPerspective struct {
	DistortionScale float64
	P               float64
	Interpolation   Interpolation // default: Bilinear
	Fill            Color
}

func (o RandomPerspective) check(w, h int) (int, int, error) {
	if !(o.DistortionScale >= 0 && o.DistortionScale <= 1) {
		return 0, 0, fmt.Errorf("field DistortionScale is %v, not in 0 to 1", o.DistortionScale)
	}
	if w < 2 || h < 2 {
		return 0, 0, fmt.Errorf("%d x %d pixels have no perspective", w, h)
	}
	if err := o.Interpolation.check(); err != nil {
		return 0, 0, err
	}
	return w, h, checkP(o.P)
}

func (o RandomPerspective) draw(rng *rand.Rand, p *program) {
	if !hit(rng, probability(o.P, 0.5)) {
		return
	}
	scale := probability(o.DistortionScale, 0.5)
	w, h := p.width, p.height
	across, down := int(scale*float64(w/2))+1, int(scale*float64(h/2))+1
	corners := [4][2]int{
		{rng.IntN(across), rng.IntN(down)},
		{w - across + rng.IntN(across), rng.IntN(down)},
		{w - across + rng.IntN(across), h - down + rng.IntN(down)},
		{rng.IntN(across), h - down + rng.IntN(down)},
	}
	if c, ok := perspective(w, h, corners); ok {
		p.add(imagecapi.AugmentPerspective, fill(o.Interpolation.or(Bilinear), &o.Fill), c[:]...)
	}
}

// perspective computes torchvision's _get_perspective_coeffs. The corners of a w x h image move to
// `to` (top left, top right, bottom right, bottom left). ok is false if the corners are on a line.
func perspective(w, h int, to [4][2]int) (c [8]float64, ok bool) {
	from := [4][2]int{{0, 0}, {w - 1, 0}, {w - 1, h - 1}, {0, h - 1}}
	var m [8][9]float64
	for i := range to {
		x, y, u, v := float64(to[i][0]), float64(to[i][1]), float64(from[i][0]), float64(from[i][1])
		m[2*i] = [9]float64{x, y, 1, 0, 0, 0, -u * x, -u * y, u}
		m[2*i+1] = [9]float64{0, 0, 0, x, y, 1, -v * x, -v * y, v}
	}
	for column := range 8 {
		pivot := column
		for row := column + 1; row < 8; row++ {
			if math.Abs(m[row][column]) > math.Abs(m[pivot][column]) {
				pivot = row
			}
		}
		m[column], m[pivot] = m[pivot], m[column]
		if math.Abs(m[column][column]) < 1e-9 {
			return c, false
		}
		for row := range 8 {
			if row == column {
				continue
			}
			f := m[row][column] / m[column][column]
			for k := column; k < 9; k++ {
				m[row][k] -= f * m[column][k]
			}
		}
	}
	for i := range c {
		c[i] = float64(float32(m[i][8] / m[i][i]))
	}
	return c, true
}
