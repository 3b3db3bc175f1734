package capi

import (
	"testing"

	"github.com/torchstream/torchstream/internal/racecheck"
)

// logged is a program of one GPU: entries of the log, and reads and writes of 64 bytes of memory by
// operators. The streams are numbers, which stand for their handles.
type logged struct {
	t     *testing.T
	check *racecheck.Checker
	s     *Sanitizer
}

const (
	caller, forward, side = 1, 2, 3
	memory, event         = 0x1000, 0x2000
)

func newLogged(t *testing.T) *logged {
	check := racecheck.New(racecheck.Options{})
	return &logged{t, check, newSanitizer(check)}
}

// apply applies entries and returns those of calls.
func (l *logged) apply(entries ...entry) (own []entry) {
	l.s.mu.Lock()
	defer l.s.mu.Unlock()
	for i := range entries {
		own = l.s.applyLocked(&entries[i], l.check.Here("a backward pass", 0), own)
	}
	return own
}

func (l *logged) operator(stream uintptr, write bool) {
	l.s.mu.Lock()
	q := l.s.handleLocked(0, stream)
	l.s.mu.Unlock()
	l.check.Do(racecheck.Launch{At: l.check.Here("an operator", 0), Accesses: []racecheck.Access{{
		Memory: racecheck.Memory{Device: 0, Storage: memory, StorageBytes: 64, Region: racecheck.Bytes(memory, 64)}, Queue: q, Write: write,
	}}})
}

func (l *logged) want(races int) {
	l.t.Helper()
	if found := l.check.Findings(); len(found) != races {
		l.t.Errorf("%d findings, want %d", len(found), races)
		for _, f := range found {
			l.t.Logf("%v", &f)
		}
	}
}

func allocated(stream uintptr) entry {
	return entry{kind: logAllocated, address: memory, handle: stream, nbytes: 64}
}
func recorded(stream uintptr) entry {
	return entry{kind: logEventRecorded, address: event, handle: stream}
}
func awaited(stream uintptr) entry {
	return entry{kind: logEventAwaited, address: event, handle: stream}
}
func wrote(stream uintptr) entry {
	return entry{kind: logWritten, address: memory, handle: stream, nbytes: 64}
}

// What a backward pass has done before a hook comes before the hook's operators, in the order in
// which the pass has done it, and nothing else does.
func TestOrderOfBackwardAppliesInTurn(t *testing.T) {
	gradient, record, wait, end := allocated(caller), recorded(caller), awaited(forward), entry{kind: logEventDeleted, address: event}
	for name, c := range map[string]struct {
		entries []entry
		races   int
	}{
		"the engine's edge":                       {[]entry{gradient, record, wait, end}, 0},
		"without the wait":                        {[]entry{gradient, record, end}, 1},
		"without the record":                      {[]entry{gradient, wait, end}, 1},
		"a wait of another stream":                {[]entry{gradient, record, awaited(side), end}, 1},
		"a record before the gradient is made":    {[]entry{record, wait, gradient, end}, 1},
		"a wait before the record":                {[]entry{gradient, wait, record, end}, 1},
		"an event that has ended before the wait": {[]entry{gradient, record, end, wait}, 1},
		"the host has waited":                     {[]entry{gradient, {kind: logStreamSynchronized, handle: caller}}, 0},
		"the host has waited for another stream":  {[]entry{gradient, {kind: logStreamSynchronized, handle: side}}, 1},
		"the host has waited for the device":      {[]entry{gradient, {kind: logDeviceSynchronized}}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLogged(t)
			if own := l.apply(c.entries...); len(own) > 0 {
				t.Errorf("%d entries are left for finish", len(own))
			}
			l.operator(forward, false)
			l.want(c.races)
		})
	}
}

// The events of an operator's call may be recorded behind its work, so they count after it too.
func TestOrderOfACallAppliesBeforeAndAfterIt(t *testing.T) {
	for _, behind := range []bool{true, false} {
		l := newLogged(t)
		own := []entry{recorded(caller), awaited(side)}
		for i := range own {
			own[i].ofCall = true
		}
		left := l.apply(own...)
		l.operator(caller, true)
		races := 1
		if behind {
			l.s.finish(left)
			races = 0
		}
		l.operator(side, false)
		l.want(races)
	}
}

// The reduction of gradients writes a bucket on a stream of its own, and the caller waits for it.
func TestAccessesOfTheLibraryAreChecked(t *testing.T) {
	for _, wait := range []bool{true, false} {
		l := newLogged(t)
		entries := []entry{allocated(caller), recorded(caller), awaited(side), wrote(side)}
		races := 1
		if wait {
			entries = append(entries, recorded(side), awaited(caller))
			races = 0
		}
		l.apply(entries...)
		l.operator(caller, false)
		l.want(races)
		if found := l.check.Findings(); len(found) == 1 && found[0].First.What != "a backward pass" {
			t.Errorf("the first use is %q", found[0].First.What)
		}
	}
}
