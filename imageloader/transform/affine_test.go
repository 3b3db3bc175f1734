package transform

import (
	"fmt"
	"testing"
)

func TestRotations(t *testing.T) {
	for _, r := range readGolden(t).Rotations {
		t.Run(fmt.Sprint(r[:5]), func(t *testing.T) {
			fill := r[4].([]any)
			c := Color{uint8(fill[0].(float64)), uint8(fill[1].(float64)), uint8(fill[2].(float64))}
			got := checksum(t, 8, int(r[1].(float64)), int(r[2].(float64)),
				func(p *program) { p.rotate(r[0].(float64), nil, false, Interpolation(r[3].(float64)), &c) })
			if got != r[5] {
				t.Errorf("%v: %s, want %v", r, got, r[5])
			}
		})
	}
}

// TestRotationAboutCenterEqualsTorchvision compares rotations about points other than the image's
// centre.
func TestRotationAboutCenterEqualsTorchvision(t *testing.T) {
	for _, r := range readGolden(t).Centres {
		t.Run(fmt.Sprint(r[:6]), func(t *testing.T) {
			c, at, i := colorOf(r[4]), r[5].([]any), Interpolation(r[3].(float64))
			centre := &[2]float64{at[0].(float64), at[1].(float64)}
			w, h, angle := int(r[1].(float64)), int(r[2].(float64)), r[0].(float64)
			if got := checksum(t, 8, w, h, func(p *program) { p.rotate(angle, centre, false, i, &c) }); got != r[6] {
				t.Errorf("rotate %v: %s, want %v", r, got, r[6])
			}
			a := affine{angle: angle, translate: [2]float64{3, -2}, scale: 0.8, shear: [2]float64{5, -7},
				centre: centre}
			if got := checksum(t, 8, w, h, func(p *program) { p.affine(a, i, &c) }); got != r[7] {
				t.Errorf("affine %v: %s, want %v", r, got, r[7])
			}
		})
	}
}

// TestExpand compares the sizes and the pixels of rotations that set Expand with torchvision's.
func TestExpand(t *testing.T) {
	for _, r := range readGolden(t).Expansions {
		t.Run(fmt.Sprint(r[:5]), func(t *testing.T) {
			c, w, h := colorOf(r[4]), int(r[1].(float64)), int(r[2].(float64))
			got := checksum(t, 8, w, h, func(p *program) {
				p.rotate(r[0].(float64), nil, true, Interpolation(r[3].(float64)), &c)
				if p.width != int(r[5].(float64)) || p.height != int(r[6].(float64)) {
					t.Errorf("%v: %d x %d", r, p.width, p.height)
				}
				p.crop(0, 0, w, h, PadConstant, Color{})
			})
			if got != r[7] {
				t.Errorf("%v: %s, want %v", r, got, r[7])
			}
		})
	}
}
