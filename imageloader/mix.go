package imageloader

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"

	"github.com/torchstream/torchstream/imageloader/internal/order"
)

// BatchOp mixes the samples of a batch and their labels: MixUp or CutMix. As in torchvision, each sample is mixed with the one before it in the batch and the first with
// the last, so an epoch should be shuffled.
//
// The bytes are mixed on the host, before the batch is copied; what is drawn depends on (Options.Seed, epoch, index of the batch's first sample) alone.
type BatchOp interface {
	checkMix() error
	// mix changes a batch of size x size pixels, and returns what share of each sample is left.
	mix(rng *rand.Rand, images []byte, n, size int, scratch *[]byte) float64
}

// MixUp makes every sample a sum of itself and its neighbour, with weights that are drawn from a Beta distribution whose two parameters are Alpha (0: 1).
type MixUp struct{ Alpha float64 }

// CutMix replaces a box of every sample by that of its neighbour. Its share of the area is drawn from a Beta distribution whose two parameters are Alpha (0: 1), its centre is
// uniform in the image, and what lies outside is cut off.
type CutMix struct{ Alpha float64 }

func checkAlpha(alpha float64) error {
	if !(alpha >= 0 && alpha <= 1e3) || alpha > 0 && alpha < 1e-3 {
		return fmt.Errorf("field Alpha is %v, not in 0.001 to 1000", alpha)
	}
	return nil
}

func (m MixUp) checkMix() error  { return checkAlpha(m.Alpha) }
func (m CutMix) checkMix() error { return checkAlpha(m.Alpha) }

func checkMixes(mix []BatchOp) error {
	for i, m := range mix {
		if m == nil {
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

// rolled calls f with every row and what the row before it was.
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

// blend makes to = share * to + (1-share) * from, with share rounded to 1/256: within one level of the exact sum. Eight bytes at a time, four in the even and four in the odd
// halves of 16 bits.
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

// logGamma is the logarithm of a draw from Gamma(alpha, 1), by Marsaglia and Tsang's method: small alphas make draws that are 0 in float64.
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

// mixer mixes the batches of a pass, for one goroutine.
type mixer struct {
	t       *Transform
	seed    uint64
	epoch   int
	classes int
	source  rand.PCG
	rng     *rand.Rand
	scratch []byte
}

func (m *mixer) run(images, labels []byte, samples []Sample) {
	if len(samples) == 0 {
		return
	}
	if m.rng == nil {
		m.rng = rand.New(&m.source)
	}
	order.Seed(&m.source, m.seed, order.OfMixture, m.epoch, samples[0].Index)
	op := m.t.Mix[m.rng.IntN(len(m.t.Mix))]
	share := op.mix(m.rng, images, len(samples), m.t.Size, &m.scratch)
	clear(labels[:4*m.classes*len(samples)])
	for i := range samples {
		before := samples[(i+len(samples)-1)%len(samples)].Label
		addLabel(labels[4*m.classes*i:], samples[i].Label, share)
		addLabel(labels[4*m.classes*i:], before, 1-share)
	}
}

func addLabel(row []byte, label int, share float64) {
	at := row[4*label:]
	old := math.Float32frombits(binary.LittleEndian.Uint32(at))
	binary.LittleEndian.PutUint32(at, math.Float32bits(old+float32(share)))
}

// soft is how many classes the labels of mixed batches have; 0 if batches are not mixed.
func (l *Loader) soft() (int, error) {
	if len(l.o.Transform.Mix) == 0 {
		return 0, nil
	}
	if n := len(l.Classes()); n > 0 {
		return n, nil
	}
	return 0, errors.New("imageloader: Transform.Mix needs classes, and there are none")
}
