package transform

import (
	"fmt"
	"math/rand/v2"
	"testing"
)

// TestAugMixEqualsTorchvision: with the weights, operations, bins and signs that torchvision's
// AugMix has drawn, AugMix gives torchvision's pixels.
func TestAugMixEqualsTorchvision(t *testing.T) {
	g := readGolden(t)
	if len(g.Augmixes) != 40 {
		t.Fatalf("%d mixtures, want 40", len(g.Augmixes))
	}
	for i, m := range g.Augmixes {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			var weights []float32
			for _, w := range m[0].([]any) {
				weights = append(weights, float32(w.(float64)))
			}
			var chains [][]augMixStep
			for _, chain := range m[1].([]any) {
				var steps []augMixStep
				for _, s := range chain.([]any) {
					step := s.([]any)
					op := policyNames[step[0].(string)]
					strength := augMixMagnitude(op, int(step[1].(float64)), g.Width, g.Height)
					steps = append(steps, augMixStep{op, strength * step[2].(float64)})
				}
				chains = append(chains, steps)
			}
			got := checksum(t, uint64(g.Seed), g.Width, g.Height,
				func(p *program) { AugMix{}.withDefaults().add(p, weights, chains) })
			if got != m[2] {
				t.Errorf("%v: %s, want %v", m, got, m[2])
			}
		})
	}
}

// TestAugMixWeightsAddUpToOne: with large and small Alpha, no sum exceeds 255.
func TestAugMixWeightsAddUpToOne(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	for _, alpha := range []float64{0.001, 0.1, 1, 1000} {
		for n := 1; n <= 5; n++ {
			sum := float32(0)
			for _, w := range dirichlet(rng, alpha, n) {
				if !(w >= 0 && w <= 1) {
					t.Errorf("a weight of %v", w)
				}
				sum += w
			}
			if sum < 0.99999 || sum > 1.00001 {
				t.Errorf("%d weights of %v: the sum is %v, want sum from 0.99999 to 1.00001",
					n, alpha, sum)
			}
		}
	}
}
