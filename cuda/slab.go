package cuda

import (
	"errors"
	"fmt"
	"sync"

	"github.com/torchstream/torchstream/internal/capi"
)

// ErrInFlight is the error of an access to memory, or of its release, while a copy may still read
// or write the memory.
var ErrInFlight = errors.New("cuda: the memory is in flight")

// slotAlign is the alignment of slots in bytes. Copy engines and LibTorch's own allocations need no
// larger alignment.
const slotAlign = 256

// Slab is pinned memory for several slots of one size, in one allocation. It needs one call to the
// driver, and does not round sizes to powers of two, as LibTorch's own allocator of pinned memory
// does. While a copy from or to a slot is in flight ([Slab.InFlight]), the Slab does not hand out
// the slot.
//
// Any number of goroutines may use a Slab at once. Close every Slab. The comment of [Pinned] says
// what happens to pinned memory that is never closed.
type Slab struct {
	bytes, stride int
	done          func(*capi.Event) (bool, error) // capi.QueryEvent; tests replace it

	mu      sync.Mutex
	pinned  *Pinned
	flights [][]flight // by slot
}

// flight is a copy that may still be running. It holds a reference to its event.
type flight struct {
	event *event
	c     *capi.Event
}

// NewSlab makes zeroed memory for the given number of slots of the given number of bytes, each at
// least one. Slots start at multiples of 256 bytes. NewSlab blocks as [NewPinned] does.
func NewSlab(slots, bytes int) (*Slab, error) {
	if slots < 1 || bytes < 1 || bytes > (1<<62)/slots-slotAlign {
		return nil, invalid("NewSlab",
			"%d slots of %d bytes: both must be at least one, and their product must fit into memory", slots, bytes)
	}
	stride := (bytes + slotAlign - 1) / slotAlign * slotAlign
	pinned, err := NewPinned(stride * slots)
	if err != nil {
		return nil, err
	}
	return newSlab(pinned, slots, bytes, stride), nil
}

func newSlab(pinned *Pinned, slots, bytes, stride int) *Slab {
	return &Slab{bytes: bytes, stride: stride, done: capi.QueryEvent, pinned: pinned, flights: make([][]flight, slots)}
}

// Slots returns the number of slots.
func (s *Slab) Slots() int { return len(s.flights) }

// Slot returns the memory of slot i for reading and writing. It returns [ErrInFlight] if a copy
// that [Slab.InFlight] reported is not done. It does not wait. The slice is valid until Close.
// Every call for slot i returns the same memory, so call Slot again before each new write to a
// slice that you kept.
func (s *Slab) Slot(i int) ([]byte, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.check("Slab.Slot", i); err != nil {
		return nil, err
	}
	if busy, err := s.busy(i); err != nil || busy {
		return nil, inFlight(i, err)
	}
	begin := i * s.stride
	return s.pinned.Bytes()[begin : begin+s.bytes : begin+s.bytes], nil
}

// InFlight declares that copies from or to slot i are queued, and that they are done when e's
// latest record is done. Call it after queueing the copies and recording e after them. It may be
// called for several events. Before the copies are done, e may be closed but must not be recorded
// for another purpose.
func (s *Slab) InFlight(i int, e *Event) error {
	c, err := e.use("Slab.InFlight")
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	err = s.check("Slab.InFlight", i)
	if err == nil {
		_, err = s.done(c) // ErrNotRecorded: an unrecorded e protects nothing
	}
	if err != nil {
		e.done()
		return checked(err)
	}
	s.flights[i] = append(s.flights[i], flight{e.event, c})
	return nil
}

// Wait blocks until the copies of slot i that were declared with InFlight are done. It also blocks
// the goroutine's OS thread.
func (s *Slab) Wait(i int) error {
	s.mu.Lock()
	if err := s.check("Slab.Wait", i); err != nil {
		s.mu.Unlock()
		return err
	}
	flights := s.flights[i]
	for _, f := range flights {
		f.event.refs.Add(1) // the slab holds a reference, so the count is not zero
	}
	s.mu.Unlock()
	var errs []error
	for _, f := range flights {
		errs = append(errs, checked(capi.SynchronizeEvent(f.c)))
		f.event.done()
	}
	return errors.Join(errs...)
}

// Close frees the memory. It does not wait. While a slot is in flight, it returns [ErrInFlight] and
// does nothing. After that error, or after an error of the driver, it may be called again. Further
// calls, and calls on nil, do nothing and return nil.
func (s *Slab) Close() error {
	if s == nil {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pinned == nil {
		return nil
	}
	for i := range s.flights {
		if busy, err := s.busy(i); err != nil || busy {
			return inFlight(i, err)
		}
	}
	if err := s.pinned.Close(); err != nil {
		return err
	}
	s.pinned = nil
	return nil
}

func (s *Slab) check(origin string, i int) error {
	if s.pinned == nil {
		return ErrClosed
	}
	if i < 0 || i >= len(s.flights) {
		return invalid(origin, "slot %d is out of range: the Slab has %d slots", i, len(s.flights))
	}
	return nil
}

// busy reports whether a copy of the slot is not done, and releases the events of finished copies.
// If the query fails, the device is lost, and busy changes nothing.
func (s *Slab) busy(i int) (bool, error) {
	flights := s.flights[i]
	for len(flights) > 0 {
		done, err := s.done(flights[0].c)
		if err != nil {
			return false, checked(err)
		}
		if !done {
			break
		}
		flights[0].event.done()
		flights = flights[1:]
	}
	s.flights[i] = flights
	return len(flights) > 0, nil
}

func inFlight(i int, err error) error {
	if err == nil {
		err = ErrInFlight
	}
	return fmt.Errorf("slot %d: %w", i, err)
}
