package transform

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
)

// BatchOp mixes the samples of a batch and their labels: [MixUp] or [CutMix]. As in torchvision,
// each sample is mixed with the previous sample of the batch, and the first with the last. The
// epoch should therefore be shuffled.
//
// The bytes are mixed on the host, before the batch is copied to the device. Random choices depend
// only on (Options.Seed, epoch, index of the batch's first sample).
type BatchOp interface {
	checkMix() error
	// mix mixes n images of size x size pixels. It returns the share of its own pixels, from 0 to
	// 1, that each image keeps.
	mix(rng *rand.Rand, images []byte, n, size int, scratch *[]byte) float64
}

// MixUp makes every sample a weighted sum of itself and its neighbour. The weight is drawn from a
// Beta distribution whose two parameters are both Alpha; 0 means 1.
type MixUp struct{ Alpha float64 }

// CutMix replaces a box in every sample with the same box of its neighbour. The share of its area
// that a sample keeps is drawn from a Beta distribution whose two parameters are both Alpha; 0
// means 1. The box's centre is uniform in the image, and parts of the box outside of the image are
// cut off.
type CutMix struct{ Alpha float64 }

func checkAlpha(alpha float64) error {
	if !(alpha >= 0 && alpha <= 1e3) || alpha > 0 && alpha < 1e-3 {
		return fmt.Errorf("field Alpha is %v, not in 0.001 to 1000", alpha)
	}
	return nil
}

func (m MixUp) checkMix() error { return checkAlpha(m.Alpha) }

func (m CutMix) checkMix() error { return checkAlpha(m.Alpha) }

func checkMixes(mix []BatchOp) error {
	for i, m := range mix {
		if isNil(m) {
			return fmt.Errorf("field Mix[%d] is nil", i)
		}
		if err := m.checkMix(); err != nil {
			return fmt.Errorf("field Mix[%d] (%T): %w", i, m, err)
		}
	}
	return nil
}

func (m MixUp) mix(rng *rand.Rand, images []byte, n, size int, scratch *[]byte) float64 {
	share := beta(rng, probability(m.Alpha, 1))
	rolled(images, n, 3*size*size, scratch, func(to, from []byte) { blend(to, from, share) })
	return share
}

func (m CutMix) mix(rng *rand.Rand, images []byte, n, size int, scratch *[]byte) float64 {
	x0, y0, x1, y1 := m.box(rng, size)
	rolled(images, n, 3*size*size, scratch, func(to, from []byte) {
		for y := y0; y < y1; y++ {
			copy(to[3*(y*size+x0):3*(y*size+x1)], from[3*(y*size+x0):])
		}
	})
	return 1 - float64((x1-x0)*(y1-y0))/float64(size*size)
}

// box is torchvision's CutMix.make_params.
func (m CutMix) box(rng *rand.Rand, size int) (x0, y0, x1, y1 int) {
	share := beta(rng, probability(m.Alpha, 1))
	x, y := rng.IntN(size), rng.IntN(size)
	half := int(0.5 * math.Sqrt(1-share) * float64(size))
	return max(x-half, 0), max(y-half, 0), min(x+half, size), min(y+half, size)
}

// rolled calls f with every image and the original content of the image before it. row is the size
// of an image in bytes.
func rolled(images []byte, n, row int, scratch *[]byte, f func(to, from []byte)) {
	if n == 0 {
		return
	}
	at := func(i int) []byte { return images[i*row : (i+1)*row : (i+1)*row] }
	*scratch = append((*scratch)[:0], at(n-1)...)
	for i := n - 1; i > 0; i-- {
		f(at(i), at(i-1))
	}
	f(at(0), *scratch)
}

// blend computes to = share * to + (1-share) * from, with share rounded to 1/256. The result is
// within one level of the exact sum. It processes eight bytes at a time, the even ones and the odd
// ones in separate words of four 16-bit lanes.
func blend(to, from []byte, share float64) {
	const (
		even = 0x00ff00ff00ff00ff
		half = 0x0080008000800080
	)
	a := uint64(math.Round(share * 256))
	b := 256 - a
	from = from[:len(to)]
	i := 0
	for ; i+8 <= len(to); i += 8 {
		x, y := binary.LittleEndian.Uint64(to[i:]), binary.LittleEndian.Uint64(from[i:])
		low := (x&even*a + y&even*b + half) >> 8 & even
		high := (x >> 8 & even * a) + (y >> 8 & even * b) + half
		binary.LittleEndian.PutUint64(to[i:], low|high&^even)
	}
	for ; i < len(to); i++ {
		to[i] = byte((uint64(to[i])*a + uint64(from[i])*b + 128) >> 8)
	}
}

// beta draws from Beta(alpha, alpha).
func beta(rng *rand.Rand, alpha float64) float64 {
	x, y := logGamma(rng, alpha), logGamma(rng, alpha)
	return 1 / (1 + math.Exp(y-x))
}

// logGamma returns the logarithm of a draw from Gamma(alpha, 1), by the method of Marsaglia and
// Tsang. For a small alpha the draw itself would underflow to 0.
func logGamma(rng *rand.Rand, alpha float64) float64 {
	boost := 0.0
	if alpha < 1 {
		boost = math.Log(1-rng.Float64()) / alpha
		alpha++
	}
	d := alpha - 1./3
	c := 1 / math.Sqrt(9*d)
	for {
		x := rng.NormFloat64()
		v := 1 + c*x
		if v <= 0 {
			continue
		}
		v *= v * v
		if math.Log(1-rng.Float64()) < 0.5*x*x+d-d*v+d*math.Log(v) {
			return math.Log(d*v) + boost
		}
	}
}
