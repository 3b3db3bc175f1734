package cuda

import "github.com/torchstream/torchstream/internal/capi"

// Fork makes work that is queued on each of to from now on start after everything queued on from so
// far: the beginning of work on several streams side by side. [Join] is its end. It is one call
// with one record, whatever the number of streams.
//
// The streams may be of any devices; one that is from itself, or named twice, is as if it were not
// there, and with none there is nothing to do. The host does not wait, and any thread may call it.
// A stream that does not exist is an error ([ErrInvalidArgument], [ErrNoDevice]) before anything is
// ordered.
//
// While from is captured into a graph, the streams become part of the capture, and each has to be
// joined into the captured stream, directly or by way of others, before the capture ends.
func Fork(from Stream, to ...Stream) error {
	var few [8]capi.Stream
	return checked(capi.ForkStreams(from.s, appendStreams(few[:0], to)))
}

// Join makes work that is queued on into from now on start after everything queued on each of from
// so far. The rest is as with [Fork].
func Join(into Stream, from ...Stream) error {
	var few [8]capi.Stream
	return checked(capi.JoinStreams(into.s, appendStreams(few[:0], from)))
}

func appendStreams(to []capi.Stream, streams []Stream) []capi.Stream {
	for _, s := range streams {
		to = append(to, s.s)
	}
	return to
}
