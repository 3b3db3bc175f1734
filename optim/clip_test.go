package optim_test

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/torch"
)

func TestClipGradNorm(t *testing.T) {
	for _, c := range []struct {
		name           string
		max, ord, norm float64
		a, b           []float32
	}{
		{name: "at the maximum", max: 13, norm: 13, a: []float32{3, 4}, b: []float32{12}},
		{name: "over the maximum", max: 6.5, norm: 13, a: []float32{1.5, 2}, b: []float32{6}},
		{name: "under the maximum", max: 100, norm: 13, a: []float32{3, 4}, b: []float32{12}},
		{name: "norm 1", max: 9.5, ord: 1, norm: 19, a: []float32{1.5, 2}, b: []float32{6}},
		{name: "norm infinity", max: 6, ord: math.Inf(1), norm: 12, a: []float32{1.5, 2}, b: []float32{6}},
		{name: "maximum 0", max: 0, norm: 13, a: []float32{0, 0}, b: []float32{0}},
	} {
		t.Run(c.name, func(t *testing.T) {
			a, still, b := leaf(t, 1.5, 2), leaf(t, 1), leaf(t, 6)
			turn(t, a) // the gradient is 3, 4
			turn(t, b) // the gradient is 12
			before := settled(t)
			norm, err := optim.ClipGradNorm([]*torch.Tensor{a, still, b}, c.max, optim.ClipOptions{NormType: c.ord})
			if err != nil {
				t.Fatal(err)
			}
			got, err := norm.Float64()
			if err != nil || math.Abs(got-c.norm) > 1e-5 {
				t.Errorf("norm %v, %v, want %v, nil", got, err, c.norm)
			}
			norm.Close()
			if live := torch.LiveTensors(); live != before {
				t.Errorf("%d references left behind, want 0", live-before)
			}
			if g := still.Grad(); g != nil {
				t.Errorf("Grad() of a parameter without a gradient = %v, want nil", g)
			}
			for p, want := range map[*torch.Tensor][]float32{a: c.a, b: c.b} {
				g := p.Grad()
				got, err := g.Float32s()
				if err != nil {
					t.Fatal(err)
				}
				for i := range want {
					if math.Abs(float64(got[i]-want[i])) > 1e-5 {
						t.Errorf("got %v, want %v", got, want)
					}
				}
				g.Close()
			}
		})
	}
	none, err := optim.ClipGradNorm([]*torch.Tensor{leaf(t, 1)}, 1, optim.ClipOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer none.Close()
	if v, err := none.Float64(); err != nil || v != 0 {
		t.Errorf("the norm without gradients is %v, %v, want 0, nil", v, err)
	}
	w := leaf(t, 1)
	for _, bad := range []struct{ max, ord float64 }{{-1, 2}, {math.NaN(), 2}, {1, -2}, {1, math.NaN()}} {
		t.Run(fmt.Sprintf("max %v of norm %v", bad.max, bad.ord), func(t *testing.T) {
			if _, err := optim.ClipGradNorm([]*torch.Tensor{w}, bad.max,
				optim.ClipOptions{NormType: bad.ord}); !errors.Is(err, cuda.ErrInvalidArgument) {
				t.Error(err)
			}
		})
	}
	if _, err := optim.ClipGradNorm([]*torch.Tensor{w, nil}, 1, optim.ClipOptions{}); !errors.Is(err,
		cuda.ErrInvalidArgument) || !strings.Contains(err.Error(), "parameter 1") {
		t.Errorf("a nil parameter: %v, want cuda.ErrInvalidArgument with \"parameter 1\"", err)
	}
}
