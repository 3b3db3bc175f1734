package cuda

import "github.com/torchstream/torchstream/internal/capi"

// Fork makes several streams wait for one. Work that is queued after the call on a stream of to
// starts only when all work that was queued on from before the call is done. Use Fork to start work
// on several streams in parallel, and [Join] to end it. Fork makes one call into C++ and one record
// for any number of streams.
//
// The streams may belong to any devices. Fork ignores repeated streams, and a stream of to that is
// from itself. Without streams Fork does nothing. The host does not wait, and any thread may call
// it. For a stream that does not exist Fork returns [ErrInvalidArgument] or [ErrNoDevice] before it
// orders anything.
//
// During a capture of from, the streams become part of the capture. Each must be joined into the
// captured stream, directly or through other streams, before the capture ends.
func Fork(from Stream, to ...Stream) error {
	var few [8]capi.Stream
	return checked(capi.ForkStreams(from.s, appendStreams(few[:0], to)))
}

// Join makes one stream wait for several. Work that is queued on into after the call starts only
// when all work that was queued on the streams of from before the call is done. Otherwise it
// behaves as [Fork] does.
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
