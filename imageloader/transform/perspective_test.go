package transform

import (
	"fmt"
	"math"
	"testing"
)

// TestPerspective compares coefficients with torchvision's _get_perspective_coeffs.
func TestPerspective(t *testing.T) {
	for _, c := range []struct {
		w, h int
		to   [4][2]int
		want [8]float64
	}{
		{224, 224, [4][2]int{{10, 20}, {200, 5}, {215, 190}, {30, 220}},
			[8]float64{1.0682504177093506, -0.10682504624128342, -8.546003341674805, 0.08515805751085281,
				1.0786687135696411, -22.424955368041992, -0.000411798624554649, -5.723936919821426e-05}},
		{64, 48, [4][2]int{{0, 0}, {63, 0}, {63, 47}, {0, 47}}, [8]float64{1, 0, 0, 0, 1, 0, 0, 0}},
	} {
		t.Run(fmt.Sprintf("%dx%d", c.w, c.h), func(t *testing.T) {
			got, ok := perspective(c.w, c.h, c.to)
			if !ok {
				t.Fatalf("perspective(%d, %d, %v) = false, want a solution", c.w, c.h, c.to)
			}
			for i := range got {
				if math.Abs(got[i]-c.want[i]) > 1e-6*math.Max(math.Abs(c.want[i]), 1e-6)+1e-9 {
					t.Errorf("coefficient %d is %v, want %v", i, got[i], c.want[i])
				}
			}
		})
	}
	if got, ok := perspective(10, 10, [4][2]int{{1, 1}, {2, 2}, {3, 3}, {4, 4}}); ok {
		t.Errorf("perspective of corners on a line = %v, want no solution", got)
	}
}
