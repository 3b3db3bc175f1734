package serve

import (
	"context"

	"github.com/torchstream/torchstream/cuda"
)

// OpenUnits makes a CPU decoder decode with units, like a GPU decoder with Options.OnDevice. It
// runs the arithmetic of the GPU's kernels.
func OpenUnits(d *Decoder, n int) error { return d.openUnits(n) }

// TakeUnit takes a unit, as a call of Batch does, until release is called.
func TakeUnit(d *Decoder) (release func(), err error) {
	u, err := d.units.take(context.Background())
	return func() { d.units.put(u) }, err
}

// The limits of a unit.
const (
	MaxPlanned = maxPlanned
	PlansBytes = plansBytes
)

// NewProbedBatcher is NewBatcher whose devices are lost when probe returns an error.
func NewProbedBatcher(o BatcherOptions, probe func(cuda.Device) error) (*Batcher, error) {
	return newBatcher(o, hooks{NewDecoder, func(w *worker) error { return probe(w.gpu) }})
}

// NewUnitBatcher is NewBatcher whose decoders on the CPU decode with units, as on a GPU with
// Options.OnDevice.
func NewUnitBatcher(o BatcherOptions) (*Batcher, error) {
	return newBatcher(o, hooks{func(o Options) (*Decoder, error) {
		d, err := NewDecoder(o)
		if err == nil {
			err = d.openUnits(o.Concurrent)
		}
		return d, err
	}, (*worker).synchronize})
}

// TakeBatcherUnit takes a unit of a NewUnitBatcher's decoder until release is called.
func TakeBatcherUnit(b *Batcher) (release func(), err error) { return TakeUnit(b.core.decoders[0]) }
