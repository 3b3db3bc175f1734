package cuda

import (
	"errors"
	"fmt"
	"sync"

	"github.com/torchstream/torchstream/internal/capi"
)

// ErrInFlight: memory was asked for, or was to be freed, that a copy may still read or write.
var ErrInFlight = errors.New("cuda: the memory is in flight")

// RegisterPinned pins memory that is there already, such as a mapped file or a buffer of another
// library, so that copies from and to it need not wait. The memory stays its maker's: it must stay
// mapped until Close, which unpins it and does not free it. It blocks for about a millisecond per
// 10 MB.
//
// Go memory is refused, since the garbage collector may give it to others: [NewPinned] makes
// buffers. (It is taken if a runtime.Pinner holds it, which it must do until Close.) So is memory
// of which a part is pinned already, and a read-only mapping.
func RegisterPinned(memory []byte) (*Pinned, error) {
	if len(memory) == 0 {
		return nil, invalid("RegisterPinned", "no memory: a buffer has at least one byte")
	}
	c, err := capi.RegisterPinned(memory)
	if err != nil {
		return nil, checked(err)
	}
	return newPinned(c, memory[:len(memory):len(memory)]), nil
}

// slotAlign is where slots begin: at least what copy engines and LibTorch's own allocations have.
const slotAlign = 256

// Slab is pinned memory for several slots of one size, allocated at once: one call to the driver,
// and no rounding to powers of two, which LibTorch's own allocator of pinned memory does. It knows
// which slots are in flight, if it is told, and does not hand those out.
//
// A Slab may be used by any number of goroutines at once. It must be closed; see [Pinned] for one
// that is not.
type Slab struct {
	bytes, stride int
	done          func(*capi.Event) (bool, error) // capi.QueryEvent

	mu      sync.Mutex
	pinned  *Pinned
	flights [][]flight // of every slot
}

// flight is a copy that may not be done. The event is held.
type flight struct {
	event *event
	c     *capi.Event
}

// NewSlab makes zeroed memory for that many slots of that many bytes, each at least one. Slots
// begin at multiples of 256 bytes. It blocks as [NewPinned] does.
func NewSlab(slots, bytes int) (*Slab, error) {
	if slots < 1 || bytes < 1 || bytes > (1<<62)/slots-slotAlign {
		return nil, invalid("NewSlab", "%d slots of %d bytes: there is at least one of each, and not more than memory has", slots, bytes)
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

// Slots returns how many there are.
func (s *Slab) Slots() int { return len(s.flights) }

// Slot returns the memory of slot i, to be read and written: [ErrInFlight] if a copy that
// [Slab.InFlight] was told of is not done. It does not wait. The slice is valid until Close. One
// that was returned earlier is the same memory: whoever keeps it has to ask again before writing to
// it.
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

// InFlight says that copies from or to slot i are queued that are done when e's latest record is:
// call it after the copies were queued and e recorded behind them. It may be called for several
// events. e may be closed, but not recorded for something else, before the copies are done.
func (s *Slab) InFlight(i int, e *Event) error {
	c, err := e.use("Slab.InFlight")
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	err = s.check("Slab.InFlight", i)
	if err == nil {
		_, err = s.done(c) // ErrNotRecorded: e protects nothing
	}
	if err != nil {
		e.done()
		return checked(err)
	}
	s.flights[i] = append(s.flights[i], flight{e.event, c})
	return nil
}

// Wait blocks until the copies of slot i that InFlight was told of are done. The goroutine's OS
// thread is blocked with it.
func (s *Slab) Wait(i int) error {
	s.mu.Lock()
	if err := s.check("Slab.Wait", i); err != nil {
		s.mu.Unlock()
		return err
	}
	flights := s.flights[i]
	for _, f := range flights {
		f.event.refs.Add(1) // held already: it is not at zero
	}
	s.mu.Unlock()
	var errs []error
	for _, f := range flights {
		errs = append(errs, checked(capi.SynchronizeEvent(f.c)))
		f.event.done()
	}
	return errors.Join(errs...)
}

// Close gives the memory back. It waits for nothing: while a slot is in flight it is [ErrInFlight]
// and does nothing, and may be called again. Further calls, and calls on nil, do nothing and return
// nil.
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
	err := s.pinned.Close()
	s.pinned = nil
	return err
}

func (s *Slab) check(origin string, i int) error {
	if s.pinned == nil {
		return ErrClosed
	}
	if i < 0 || i >= len(s.flights) {
		return invalid(origin, "slot %d of %d", i, len(s.flights))
	}
	return nil
}

// busy reports whether a copy of the slot is not done, and lets go of those that are. If that
// cannot be known, the device is lost, and all stays as it is.
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
