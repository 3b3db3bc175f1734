package transform

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// TestMixUpPixels: pixels are within one level of the sum in float64.
func TestMixUpPixels(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for _, share := range []float64{0, 1, 0.5, 1. / 3, 0.999, 0.0001} {
		t.Run(fmt.Sprint(share), func(t *testing.T) {
			for _, n := range []int{1, 7, 8, 3 * 5 * 5} {
				a, b := make([]byte, n), make([]byte, n)
				for i := range a {
					a[i], b[i] = byte(rng.Uint32()), byte(rng.Uint32())
					if i%5 == 0 {
						a[i], b[i] = 255, 255
					}
				}
				got := slices.Clone(a)
				blend(got, b, share)
				for i := range got {
					if want := share*float64(a[i]) + (1-share)*float64(b[i]); math.Abs(float64(got[i])-want) > 1 {
						t.Fatalf("%d bytes: %d and %d make %d, want %.2f", n, a[i], b[i], got[i], want)
					}
				}
			}
		})
	}
}

// TestMixRolls: each sample is mixed with the original content of the previous sample, and the
// first sample with the last.
func TestMixRolls(t *testing.T) {
	images := []byte{1, 1, 2, 2, 3, 3}
	var scratch []byte
	rolled(images, 3, 2, &scratch, func(to, from []byte) { to[1] = from[1] })
	if !slices.Equal(images, []byte{1, 3, 2, 1, 3, 2}) {
		t.Errorf("%v, want %+v", images, []byte{1, 3, 2, 1, 3, 2})
	}
}

func TestMixDistributions(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for alpha, cdf := range map[float64]func(float64) float64{
		0.5: func(x float64) float64 { return 2 / math.Pi * math.Asin(math.Sqrt(min(max(x, 0), 1))) },
		1:   uniformCDF(0, 1),
		2:   func(x float64) float64 { x = min(max(x, 0), 1); return x * x * (3 - 2*x) },
	} {
		values := make([]float64, manyDraws)
		for i := range values {
			values[i] = beta(rng, alpha)
		}
		if d := kolmogorov(values, cdf); d > ksLimit {
			t.Errorf("Beta(%v, %v) is off by %.4f, want at most %v", alpha, alpha, d, ksLimit)
		}
	}
	// The half side of a box that is not cut off is floor(size/2 * sqrt(1-share)), share uniform:
	// P(half <= k) = ((k+1) / (size/2))^2.
	const size = 64
	var halves, centres []float64
	for range manyDraws {
		x0, y0, x1, y1 := CutMix{}.box(rng, size)
		if x0 < 0 || y0 < 0 || x1 > size || y1 > size || x0 > x1 || y0 > y1 {
			t.Fatalf("the box is (%d, %d) to (%d, %d), want it within %d x %d", x0, y0, x1, y1, size, size)
		}
		if x0 > 0 && x1 < size && y0 > 0 && y1 < size {
			if x1-x0 != y1-y0 {
				t.Fatalf("a box that is not cut off is %d x %d, want a square", x1-x0, y1-y0)
			}
			if half := (x1 - x0) / 2; half <= 8 { // those with a centre in the middle half are never cut off
				if x := (x0 + x1) / 2; x >= 16 && x < 48 {
					if y := (y0 + y1) / 2; y >= 16 && y < 48 {
						halves, centres = append(halves, float64(half)), append(centres, float64(x))
					}
				}
			}
		}
	}
	limit := ksLimit * math.Sqrt(manyDraws/float64(len(halves)))
	if d := kolmogorov(halves,
		func(k float64) float64 { k = min(max(math.Floor(k), -1), 8); return (k + 1) * (k + 1) / 81 }); d > limit {
		t.Errorf("CutMix's sides are off by %.4f of %d, want at most %v", d, len(halves), limit)
	}
	if d := kolmogorov(centres, stepsCDF(16, 47)); d > limit {
		t.Errorf("CutMix's centres are off by %.4f, want at most %v", d, limit)
	}
}

func TestMixChecks(t *testing.T) {
	for says, mix := range map[string]BatchOp{
		"Mix[0] is nil": nil, "field Mix[0] is nil": (*CutMix)(nil), "Alpha is -1": MixUp{Alpha: -1},
		"Alpha is 1e-09": CutMix{Alpha: 1e-9},
	} {
		t.Run(says, func(t *testing.T) {
			if _, err := Compile(Transform{Mix: []BatchOp{mix}}); err == nil || !strings.Contains(err.Error(), says) {
				t.Errorf("got %v, want an error with %q", err, says)
			}
		})
	}
}
