//go:build !debug

package origin

// Enabled reports whether this build counts handles.
const Enabled = false

// Origin is the place where one handle was made. It is the first field of its struct, because Go
// pads a struct whose last field is empty.
type Origin struct{}

// New counts an open handle of the kind, made by the caller's stack.
func New(kind string) Origin { return Origin{} }

// Closed counts the handle as no longer open. It is called once.
func (Origin) Closed() {}

// Leaked counts the handle as found by the garbage collector. Closed must follow, as for every
// handle.
func (Origin) Leaked() {}

// Holds are claims of one kind on one handle, each with the stack that made it.
type Holds struct{}

// Add adds a claim of the kind.
func (*Holds) Add(kind string) {}

// Drop ends the youngest claim, if there is one.
func (*Holds) Drop() {}

// DropAll ends every claim.
func (*Holds) DropAll() {}

// Sites returns every place that has made a handle, in no particular order.
func Sites() []Site { return nil }
