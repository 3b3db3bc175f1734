// Package origin counts, in builds with the tag debug, how many handles each line of a program has
// open, and how many it left to the garbage collector. Without the tag its types are empty and its
// functions do nothing, so that a handle is as small and as fast as one without them.
//
// Package leaks shows the counts to programs.
package origin

// Site is a place where handles of one kind are made.
type Site struct {
	Kind   string    // of the handles: "tensor", "event", ...
	PCs    []uintptr // the stack that made them, innermost call first, as runtime.Callers returns it
	Open   int64     // handles that are not closed now
	Leaked int64     // handles that the garbage collector found before Close
}
