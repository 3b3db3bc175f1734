//go:build !debug

package origin

// Enabled says whether this build counts.
const Enabled = false

// Origin is where one handle was made. It is the first field of its struct: Go pads a struct whose
// last field is empty.
type Origin struct{}

// New counts a handle of the kind as open, made by the caller's stack.
func New(kind string) Origin { return Origin{} }

// Closed counts the handle as no longer open. It is called once.
func (Origin) Closed() {}

// Leaked counts the handle as one that the garbage collector found. Closed follows, as for any
// other.
func (Origin) Leaked() {}

// Holds are claims of one kind on one handle, each with the stack that made it.
type Holds struct{}

// Add makes a claim.
func (*Holds) Add(kind string) {}

// Drop ends the youngest claim, if there is one.
func (*Holds) Drop() {}

// DropAll ends every claim.
func (*Holds) DropAll() {}

// Sites returns every place that has made a handle, in no order.
func Sites() []Site { return nil }
