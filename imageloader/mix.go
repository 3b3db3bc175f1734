package imageloader

import (
	"encoding/binary"
	"math"
	"math/rand/v2"

	"github.com/torchstream/torchstream/imageloader/internal/order"
	"github.com/torchstream/torchstream/imageloader/transform"
)

// mixer mixes the batches of a pass and writes their labels, for one goroutine.
type mixer struct {
	mixer   *transform.Mixer
	seed    uint64
	epoch   int
	classes int
	width   int    // of Options.Target, whose numbers are mixed in place of labels; 0: labels
	last    []byte // scratch of mixTargets
	source  rand.PCG
	rng     *rand.Rand
}

// run mixes a batch in place and writes its labels: float32 [classes] for each sample, little
// endian. With Options.Target it mixes the targets, which are there already.
func (m *mixer) run(images, labels []byte, samples []Sample) {
	if len(samples) == 0 {
		return
	}
	if m.rng == nil {
		m.rng = rand.New(&m.source)
	}
	order.Seed(&m.source, m.seed, order.OfMixture, m.epoch, samples[0].Index)
	share := m.mixer.Mix(m.rng, images, len(samples))
	if m.width > 0 {
		m.mixTargets(labels, len(samples), share)
		return
	}
	clear(labels[:4*m.classes*len(samples)])
	for i := range samples {
		before := samples[(i+len(samples)-1)%len(samples)].Label
		addLabel(labels[4*m.classes*i:], samples[i].Label, share)
		addLabel(labels[4*m.classes*i:], before, 1-share)
	}
}

// addLabel adds a share to the probability of a label.
func addLabel(row []byte, label int, share float64) {
	at := row[4*label:]
	old := math.Float32frombits(binary.LittleEndian.Uint32(at))
	binary.LittleEndian.PutUint32(at, math.Float32bits(old+float32(share)))
}
