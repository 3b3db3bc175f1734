//go:build linux

package cuda

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/torchstream/torchstream/internal/capi"
)

// fakeSlab has Go memory, and events whose state the test sets.
type fakeSlab struct {
	*Slab
	// pending holds the events that are not done, each with the error of its query.
	pending map[*capi.Event]error
}

func newFakeSlab(t *testing.T, slots, bytes, stride int) *fakeSlab {
	t.Helper()
	check(t, capi.Check()) // closing the test's objects calls the library
	f := &fakeSlab{newSlab(newPinned(nil, make([]byte, slots*stride)), slots, bytes, stride), map[*capi.Event]error{}}
	f.done = func(c *capi.Event) (bool, error) {
		err, pending := f.pending[c]
		return !pending, err
	}
	return f
}

func TestSlabRefusesWrongSizesAndSlots(t *testing.T) {
	for _, c := range [][2]int{{0, 1}, {1, 0}, {-1, 1}, {1, -1}, {1 << 40, 1 << 40}, {1, 1<<63 - 1}} {
		t.Run(fmt.Sprintf("%d_slots_of_%d_bytes", c[0], c[1]), func(t *testing.T) {
			if _, err := NewSlab(c[0], c[1]); !errors.Is(err, ErrInvalidArgument) {
				t.Errorf("%d slots of %d bytes: got %v, want ErrInvalidArgument", c[0], c[1], err)
			}
		})
	}
	s := newFakeSlab(t, 2, 10, 256)
	e := newEvent(nil)
	defer e.Close()
	for _, i := range []int{-1, 2} {
		_, err := s.Slot(i)
		for name, err := range map[string]error{"Slot": err, "InFlight": s.InFlight(i, e), "Wait": s.Wait(i)} {
			if !errors.Is(err, ErrInvalidArgument) {
				t.Errorf("%s(%d): got %v, want ErrInvalidArgument", name, i, err)
			}
		}
	}
	if e.refs.Load() != 1 {
		t.Errorf("a failed InFlight left %d references to its event, want 1", e.refs.Load())
	}
}

func TestSlabSlotsAreAligned(t *testing.T) {
	s := newFakeSlab(t, 3, 10, 256)
	for i := range s.Slots() {
		memory := must[[]byte](t)(s.Slot(i))
		if len(memory) != 10 || cap(memory) != 10 || &memory[0] != &s.pinned.Bytes()[256*i] {
			t.Errorf("slot %d: %d bytes with capacity %d, or at another address", i, len(memory), cap(memory))
		}
	}
}

// A slot in flight is neither handed out nor freed, even if its event is closed.
func TestSlabInFlight(t *testing.T) {
	s := newFakeSlab(t, 2, 10, 256)
	e := newEvent(nil)
	s.pending[nil] = nil // every event of this test has a nil C event
	check(t, s.InFlight(0, e))
	check(t, s.InFlight(0, e))
	e.Close()
	for range 2 {
		if _, err := s.Slot(0); !errors.Is(err, ErrInFlight) {
			t.Errorf("Slot: got %v, want ErrInFlight", err)
		}
		if err := s.Close(); !errors.Is(err, ErrInFlight) {
			t.Errorf("Close: got %v, want ErrInFlight", err)
		}
	}
	must[[]byte](t)(s.Slot(1))
	if n := e.refs.Load(); n != 2 {
		t.Errorf("%d references to the event, want one per flight", n)
	}
	lost := errors.New("lost")
	s.pending[nil] = lost
	if _, err := s.Slot(0); !errors.Is(err, lost) {
		t.Errorf("Slot: got %v, want the device's error", err)
	}
	delete(s.pending, nil)
	must[[]byte](t)(s.Slot(0))
	if n := e.refs.Load(); n != 0 {
		t.Errorf("%d references to the event, want 0", n)
	}
	if err := s.InFlight(0, e); !errors.Is(err, ErrClosed) {
		t.Errorf("InFlight of a closed event: got %v, want ErrClosed", err)
	}
	check(t, s.Close())
	check(t, s.Close())
	if _, err := s.Slot(0); !errors.Is(err, ErrClosed) {
		t.Errorf("Slot after Close: got %v, want ErrClosed", err)
	}
	var none *Slab
	check(t, none.Close())
}

// Slots have exactly the requested size, and are in flight from a copy until its end.
func TestSlab(t *testing.T) {
	onGPU(t, 1)
	const n, slots = 3<<20 + 1, 3 // not a power of two
	before := PinnedBytes()
	s := must[*Slab](t)(NewSlab(slots, n))
	if got := PinnedBytes() - before; got < slots*n || got > slots*(n+slotAlign) {
		t.Errorf("%d bytes are pinned for %d slots of %d, want at least %v, at most %v",
			got, slots, n, slots*n, slots*(n+slotAlign))
	}
	stream := newStreams(t, 1)[0]
	load := newWork(t)
	device := must[*capi.Tensor](t)(capi.EmptyTensor([]int64{n}, capi.Uint8, 0, capi.Contiguous))
	defer capi.FreeTensor(device)
	memory := must[[]byte](t)(s.Slot(1))
	want := make([]byte, n)
	random := rand.NewChaCha8([32]byte{1})
	random.Read(want)
	copy(memory, want)
	host := must[*capi.Tensor](t)(capi.TensorFromMemory(memory, []int64{n}, capi.Uint8))
	defer capi.FreeTensor(host)
	copied := must[*Event](t)(NewEvent(EventOptions{}))
	if err := s.InFlight(1, copied); !errors.Is(err, ErrNotRecorded) {
		t.Errorf("InFlight of an event without a record: got %v, want ErrNotRecorded", err)
	}
	check(t, WithStream(stream, load.queue))
	check(t, stream.Wait(DefaultStream(0))) // device is memory of the default stream
	check(t, capi.CopyBatch(stream.s, nil, []*capi.Tensor{device}, []*capi.Tensor{host}, nil))
	check(t, copied.Record(stream))
	check(t, s.InFlight(1, copied))
	check(t, copied.Close())
	if _, err := s.Slot(1); !errors.Is(err, ErrInFlight) {
		t.Errorf("Slot behind tens of milliseconds of work: got %v, want ErrInFlight", err)
	}
	if err := s.Close(); !errors.Is(err, ErrInFlight) {
		t.Errorf("Close: got %v, want ErrInFlight", err)
	}
	must[[]byte](t)(s.Slot(0))
	check(t, s.Wait(1))
	clear(must[[]byte](t)(s.Slot(1)))
	got := make([]byte, n)
	check(t, capi.ReadTensor(device, got))
	if !bytes.Equal(got, want) {
		t.Errorf("byte %d on the device is not the host's, want equal bytes", firstDifference(got, want))
	}
	check(t, s.Close())
	if got := PinnedBytes(); got != before {
		t.Errorf("%d bytes are pinned, %d were before", got, before)
	}
}
