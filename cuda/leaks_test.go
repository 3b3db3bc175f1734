package cuda

import (
	"testing"
)

func TestLeaksAreCounted(t *testing.T) {
	before := Leaks()
	closed := newEvent(nil)
	closed.Close()
	inner := newEvent(nil).event // its Event is unreachable from here on
	newPinned(nil, make([]byte, 100))
	newOwnedStream(Stream{})
	until(t, "the run of the cleanups", func() bool {
		after := Leaks()
		return after.Events > before.Events && after.Pinned > before.Pinned && after.Streams > before.Streams
	})
	after := Leaks()
	if after.Events != before.Events+1 || after.Streams != before.Streams+1 || after.Pinned != before.Pinned+1 || after.PinnedBytes != before.PinnedBytes+100 {
		t.Errorf("got %+v after %+v", after, before)
	}
	until(t, "the release of the event", func() bool { return inner.refs.Load() == 0 })
}
