package order

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math"
	"math/rand/v2"
	"sort"
)

// Weights draws samples with replacement. A sample's probability is proportional to its weight.
// Weights is immutable, so it can be shared.
type Weights struct {
	sums   []float64 // sums[i] is the sum of the weights of samples 0 to i
	digest string
}

// NewWeights calls weight for each of n samples. It returns an error if a weight is negative or not
// finite, or if the sum is 0 or overflows.
func NewWeights(n int, weight func(i int) float64) (*Weights, error) {
	w := &Weights{sums: make([]float64, n)}
	sum := 0.0
	h := sha256.New()
	for i := range n {
		v := weight(i)
		if !(v >= 0) || math.IsInf(v, 0) {
			return nil, fmt.Errorf("the weight of sample %d is %v, not a number from 0 up", i, v)
		}
		sum += v
		w.sums[i] = sum
		var bits [8]byte
		binary.LittleEndian.PutUint64(bits[:], math.Float64bits(sum))
		h.Write(bits[:])
	}
	if !(sum > 0) || math.IsInf(sum, 0) {
		return nil, fmt.Errorf("the sum of all weights is %v", sum)
	}
	w.digest = hex.EncodeToString(h.Sum(nil)[:16])
	return w, nil
}

// Digest returns a digest of the weights.
func (w *Weights) Digest() string { return w.digest }

// Draw returns the sample at a position of an epoch. It is a pure function of its arguments.
func (w *Weights) Draw(seed uint64, epoch, position int) int {
	var g rand.PCG
	Seed(&g, seed, OfDraw, epoch, position)
	x := rand.New(&g).Float64() * w.sums[len(w.sums)-1]
	// Find the first sample whose sum exceeds x. A sample of weight 0 has the same sum as the
	// sample before it, so it is never found.
	i := sort.Search(len(w.sums), func(i int) bool { return w.sums[i] > x })
	return min(i, len(w.sums)-1)
}
