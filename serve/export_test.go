package serve

import "context"

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
