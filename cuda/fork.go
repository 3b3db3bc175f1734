package cuda

import "github.com/torchstream/torchstream/internal/capi"

// Fork orders the streams in to after the stream from. Work that is later queued on them starts
// only after everything that is already queued on from. Use Fork to start work on several streams
// in parallel, and [Join] to end it. Fork makes one call into C++ and one record for any number of
// streams.
//
// The streams may belong to any devices. Fork ignores from in to, and repeated streams. Without
// streams it does nothing. The host does not wait, and any thread may call it. For a stream that
// does not exist Fork returns [ErrInvalidArgument] or [ErrNoDevice] before it orders anything.
//
// During a capture of from, the streams become part of the capture. Each must be joined into the
// captured stream, directly or through other streams, before the capture ends.
func Fork(from Stream, to ...Stream) error {
	var few [8]capi.Stream
	return checked(capi.ForkStreams(from.s, appendStreams(few[:0], to)))
}

// Join orders the stream into after the streams in from. Work that is later queued on into starts
// only after everything that is already queued on them. Otherwise it behaves as [Fork] does.
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
