// Package origin counts, in builds with the tag debug, the open handles of each line of a program,
// and the handles that the line left to the garbage collector. Without the tag its types are empty
// and its functions do nothing, so they make a handle neither larger nor slower.
//
// Package leaks shows the counts to programs.
package origin

// Site is a place in a program that makes handles of one kind.
type Site struct {
	Kind   string    // kind of the handles: "tensor", "event", ...
	PCs    []uintptr // the stack that made them, innermost call first, as runtime.Callers returns it
	Open   int64     // number of handles that are not closed yet
	Leaked int64     // number of handles that the garbage collector found before Close
}
