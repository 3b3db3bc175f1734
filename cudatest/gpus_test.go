package cudatest

import (
	"testing"

	"github.com/torchstream/torchstream/cuda"
)

func TestRequireGPUsSkipsOrFails(t *testing.T) {
	for _, c := range []struct {
		name       string
		need, have int
		promised   string
		skips      bool
		fails      string // part of the message
	}{
		{name: "there", need: 2, have: 2},
		{name: "there and promised", need: 1, have: 2, promised: "2"},
		{name: "absent", need: 1, skips: true},
		{name: "too few", need: 2, have: 1, skips: true},
		{name: "none promised", need: 1, promised: "0", skips: true},
		{name: "fewer promised than needed", need: 2, have: 1, promised: "1", skips: true},
		{name: "absent but promised", need: 1, promised: "1", fails: "TORCHSTREAM_REQUIRE_GPUS=1"},
		{name: "too few of those promised", need: 2, have: 1, promised: "4", fails: "torchstream doctor"},
		{name: "no number promised", need: 1, promised: "yes", fails: `"yes"`},
		{name: "a negative number promised", need: 1, promised: "-1", fails: `"-1"`},
		{name: "none asked for", need: 0, have: 1, fails: "1 or more"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var got []cuda.Device
			r := inner(t, func(t testing.TB) { got = requireGPUs(t, c.need, c.have, c.promised) })
			switch {
			case c.fails != "":
				r.mustFail(t, c.fails)
			case c.skips:
				if !r.skipped || r.failed {
					t.Errorf("skipped %t, failed %t: %s", r.skipped, r.failed, r.text())
				}
			default:
				r.mustPass(t)
				if len(got) != c.need || got[c.need-1] != cuda.Device(c.need-1) {
					t.Errorf("got %v, want the first %d GPUs", got, c.need)
				}
			}
		})
	}
}

func TestStreamIsClosedAfterTheTest(t *testing.T) {
	gpu := RequireGPUs(t, 1)[0]
	var s cuda.Stream
	inner(t, func(t testing.TB) { s = Stream(t, gpu) }).mustPass(t)
	if err := s.Synchronize(); err == nil {
		t.Error("Synchronize of a stream whose test is over: got no error, want one")
	}
}
