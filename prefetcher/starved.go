package prefetcher

import (
	"sync"
	"time"

	"github.com/torchstream/torchstream/cuda"
)

// starved measures how long a GPU was idle because the next batch was not ready. The idle time
// starts when the consumer's stream has completed its work on one batch. It ends when the next
// batch is ready on P, if that is later.
//
// The time that the host waits does not show this: if a loop queues work faster than the GPU
// executes it, the loop always waits for the GPU in the next turn. Therefore two timed events are
// recorded for every batch. They are read some turns later, when they have completed. Nothing waits
// for them.
type starved struct {
	device cuda.Device

	mu       sync.Mutex
	arrivals map[int]*cuda.Event // by device slot: event after the finish, without a pair so far
	pairs    []starvedPair       // oldest first
	events   timedEvents
	total    time.Duration
}

// timedEvents holds events for reuse, so that only a few are created.
type timedEvents struct{ all, free []*cuda.Event }

// take returns a free event or a new one.
func (t *timedEvents) take() (*cuda.Event, error) {
	if n := len(t.free); n > 0 {
		e := t.free[n-1]
		t.free = t.free[:n-1]
		return e, nil
	}
	e, err := cuda.NewEvent(cuda.EventOptions{Timing: true})
	if err == nil {
		t.all = append(t.all, e)
	}
	return e, err
}

// put makes events free for later calls of take.
func (t *timedEvents) put(events ...*cuda.Event) { t.free = append(t.free, events...) }

// used returns the number of events that are not free.
func (t *timedEvents) used() int { return len(t.all) - len(t.free) }

func (t *timedEvents) close() {
	for _, e := range t.all {
		e.Close()
	}
}

// starvedEpoch is the state of one epoch. If a second epoch starts while one is running, it is
// refused, but it has a separate state until then.
type starvedEpoch struct {
	*starved
	last *cuda.Event // recorded at the end of the previous turn
}

type starvedPair struct{ idle, arrival *cuda.Event }

// arrive records that a batch has arrived. The ring calls it after queueing the batch's finish.
func (s *starved) arrive(slot int, p cuda.Stream) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.arrivals[slot] // the event of a batch that the consumer never got
	if e == nil {
		var err error
		if e, err = s.events.take(); err != nil {
			return err
		}
		if s.arrivals == nil {
			s.arrivals = map[int]*cuda.Event{}
		}
		s.arrivals[slot] = e
	}
	return e.Record(p)
}

// begin is called when the consumer has received a batch. It pairs the batch's arrival with the end
// of the previous turn, if this epoch has had one.
func (s *starvedEpoch) begin(slot int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	arrival := s.arrivals[slot]
	delete(s.arrivals, slot)
	switch {
	case arrival == nil:
	case s.last == nil:
		s.events.put(arrival)
	default:
		s.pairs = append(s.pairs, starvedPair{s.last, arrival})
		s.last = nil
	}
	return s.collect()
}

// collect adds up the times of the pairs whose events have completed. The caller holds mu.
func (s *starved) collect() error {
	for len(s.pairs) > 0 {
		p := s.pairs[0]
		for _, e := range []*cuda.Event{p.idle, p.arrival} {
			if done, err := e.Query(); err != nil || !done {
				return err
			}
		}
		gap, err := cuda.Elapsed(p.idle, p.arrival)
		if err != nil {
			return err
		}
		s.total += max(0, gap)
		s.events.put(p.idle, p.arrival)
		s.pairs = s.pairs[:copy(s.pairs, s.pairs[1:])]
	}
	return nil
}

// end records the end of the consumer's turn.
func (s *starvedEpoch) end() error {
	stream, err := cuda.GetCurrentCUDAStream(s.device)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.drop()
	if s.last, err = s.events.take(); err != nil {
		return err
	}
	return s.last.Record(stream)
}

// leave is called after an epoch. It drops the end of the last turn, because the loader does not
// cause the pause before the next epoch.
func (s *starvedEpoch) leave() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.drop()
}

func (s *starvedEpoch) drop() {
	if s.last != nil {
		s.events.put(s.last)
		s.last = nil
	}
}

// time returns the sum of the idle times so far. It is complete once the consumer has waited for
// its own work. If the device fails, the next turn or Close returns the error.
func (s *starved) time() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	_ = s.collect()
	return s.total
}

func (s *starved) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	_ = s.collect() // the device has completed all events
	s.pairs = nil
	s.events.close()
}
