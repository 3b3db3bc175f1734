package serve

import "context"

// OpenUnits has a decoder of the CPU decode as one of a GPU with Options.OnDevice does, with the
// arithmetic of the GPU's kernels.
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
