package serve

// OpenUnits has a decoder of the CPU decode as one of a GPU with Options.OnDevice does, with the
// arithmetic of the GPU's kernels.
func OpenUnits(d *Decoder, n int) error { return d.openUnits(n) }

// The limits of a unit.
const (
	MaxPlanned = maxPlanned
	PlansBytes = plansBytes
)
