package prefetcher

import (
	"sync"
	"time"

	"github.com/torchstream/torchstream/cuda"
)

// starved measures how long a GPU had nothing to do because the next batch was not there: the time
// from the point where the consumer's stream has done its work on one batch to the point where the
// next is ready on P, if that comes later.
//
// The host's own waiting says nothing about it: a loop that queues work faster than the GPU does it
// always waits, for the GPU, in the next turn. So two timed events are recorded for every batch,
// and read some turns later, when they are done: nothing waits for them.
type starved struct {
	device cuda.Device

	mu       sync.Mutex
	arrivals map[int]*cuda.Event // by device slot: recorded after the finish, and not paired yet
	last     *cuda.Event         // the end of the turn before
	pairs    []starvedPair       // oldest first
	free     []*cuda.Event
	all      []*cuda.Event
	total    time.Duration
}

type starvedPair struct{ idle, arrival *cuda.Event }

// event is called with mu held. Events return to the list, so there are soon enough.
func (s *starved) event() (*cuda.Event, error) {
	if n := len(s.free); n > 0 {
		e := s.free[n-1]
		s.free = s.free[:n-1]
		return e, nil
	}
	e, err := cuda.NewEvent(cuda.EventOptions{Timing: true})
	if err == nil {
		s.all = append(s.all, e)
	}
	return e, err
}

// arrive is called after a batch's finish is queued.
func (s *starved) arrive(slot int, p cuda.Stream) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.arrivals[slot] // of a batch that nobody has seen
	if e == nil {
		var err error
		if e, err = s.event(); err != nil {
			return err
		}
		if s.arrivals == nil {
			s.arrivals = map[int]*cuda.Event{}
		}
		s.arrivals[slot] = e
	}
	return e.Record(p)
}

// begin is called when the consumer has a batch: its arrival is compared with the end of the turn
// before, if there was one in this epoch.
func (s *starved) begin(slot int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	arrival := s.arrivals[slot]
	delete(s.arrivals, slot)
	switch {
	case arrival == nil:
	case s.last == nil:
		s.free = append(s.free, arrival)
	default:
		s.pairs = append(s.pairs, starvedPair{s.last, arrival})
		s.last = nil
	}
	return s.collect()
}

// collect adds up the pairs that the device is done with. It is called with mu held.
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
		s.free = append(s.free, p.idle, p.arrival)
		s.pairs = s.pairs[:copy(s.pairs, s.pairs[1:])]
	}
	return nil
}

// end is called when the consumer's turn is over.
func (s *starved) end() error {
	stream, err := cuda.GetCurrentCUDAStream(s.device)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.drop()
	if s.last, err = s.event(); err != nil {
		return err
	}
	return s.last.Record(stream)
}

// leave is called after an epoch: the pause until the next is not the loader's.
func (s *starved) leave() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.drop()
}

func (s *starved) drop() {
	if s.last != nil {
		s.free = append(s.free, s.last)
		s.last = nil
	}
}

// time returns the sum so far: complete once the consumer has waited for its own work. A device
// that fails says so in the next turn or in Close.
func (s *starved) time() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	_ = s.collect()
	return s.total
}

func (s *starved) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	_ = s.collect() // the device is done with all of them
	s.pairs = nil
	for _, e := range s.all {
		e.Close()
	}
}
