package epoch

import (
	"encoding/binary"
	"math"
	"math/rand/v2"

	"github.com/torchstream/torchstream/imageloader/internal/sample"
	"github.com/torchstream/torchstream/imageloader/transform"
	"github.com/torchstream/torchstream/internal/order"
)

// mixer mixes the batches of an epoch and writes their labels. One goroutine uses it.
type mixer struct {
	mixer  *transform.Mixer // nil if batches are not mixed
	labels Labels
	seed   uint64
	epoch  int
	last   []byte // scratch of mixTargets
	source rand.PCG
	rng    *rand.Rand
}

// run mixes a batch in place and writes its labels: float32 [classes] for each sample, little
// endian. Targets, which the workers have already written, are mixed like pixels.
func (m *mixer) run(images, labels []byte, samples []sample.Sample) {
	if m.mixer == nil || len(samples) == 0 {
		return
	}
	if m.rng == nil {
		m.rng = rand.New(&m.source)
	}
	order.Seed(&m.source, m.seed, order.OfMixture, m.epoch, samples[0].Index)
	share := m.mixer.Mix(m.rng, images, len(samples))
	if m.labels.Kind == Target {
		m.mixTargets(labels, len(samples), share)
		return
	}
	classes := m.labels.Width
	clear(labels[:4*classes*len(samples)])
	for i := range samples {
		before := samples[(i+len(samples)-1)%len(samples)].Label
		addLabel(labels[4*classes*i:], samples[i].Label, share)
		addLabel(labels[4*classes*i:], before, 1-share)
	}
}

// addLabel adds a share to the probability of a label.
func addLabel(row []byte, label int, share float64) {
	at := row[4*label:]
	old := math.Float32frombits(binary.LittleEndian.Uint32(at))
	binary.LittleEndian.PutUint32(at, math.Float32bits(old+float32(share)))
}

// mixTargets mixes each of n rows of targets with the row before it: share times the row plus
// 1-share times its predecessor. The first row is mixed with the last.
func (m *mixer) mixTargets(rows []byte, n int, share float64) {
	width := 4 * m.labels.Width
	row := func(i int) []byte { return rows[i*width : (i+1)*width] }
	number := func(b []byte) float32 { return math.Float32frombits(binary.LittleEndian.Uint32(b)) }
	own, other := float32(share), float32(1-share)
	m.last = append(m.last[:0], row(n-1)...)
	for i := n - 1; i >= 0; i-- {
		before := m.last
		if i > 0 {
			before = row(i - 1)
		}
		for to := row(i); len(to) > 0; to, before = to[4:], before[4:] {
			// The conversions prevent the compiler from fusing a product with the sum.
			binary.LittleEndian.PutUint32(to, math.Float32bits(float32(own*number(to))+float32(other*number(before))))
		}
	}
}
