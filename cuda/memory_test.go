package cuda

import (
	"bytes"
	"encoding/hex"
	"errors"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"sync/atomic"
	"syscall"
	"testing"
	"unsafe"

	"github.com/torchstream/torchstream/internal/capi"
)

// mapped returns memory that is not the Go heap's.
func mapped(t *testing.T, bytes int) []byte {
	t.Helper()
	m, err := syscall.Mmap(-1, 0, bytes, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_PRIVATE|syscall.MAP_ANON)
	check(t, err)
	t.Cleanup(func() { syscall.Munmap(m) })
	return m
}

func TestRegisterPinnedArguments(t *testing.T) {
	for name, memory := range map[string][]byte{"nothing": nil, "small Go memory": make([]byte, 100), "large Go memory": make([]byte, 1<<22)} {
		if _, err := RegisterPinned(memory); !errors.Is(err, ErrInvalidArgument) {
			t.Errorf("%s: got %v, want ErrInvalidArgument", name, err)
		}
	}
	if DeviceCount() > 0 {
		return
	}
	// What is no Go memory, or held, gets as far as to the missing GPU.
	held := make([]byte, 1<<16)
	var pinner runtime.Pinner
	defer pinner.Unpin()
	pinner.Pin(&held[0])
	for name, memory := range map[string][]byte{"a mapping": mapped(t, 4096), "held Go memory": held} {
		if _, err := RegisterPinned(memory); !errors.Is(err, ErrNoDevice) {
			t.Errorf("%s: got %v, want ErrNoDevice", name, err)
		}
	}
}

func TestWithStreamsArguments(t *testing.T) {
	fn := func() error { return errors.New("fn was called") }
	for name, err := range map[string]error{
		"no stream":                WithStreams(nil, fn),
		"two of a device":          WithStreams([]Stream{DefaultStream(0), DefaultStream(1), DefaultStream(0)}, fn),
		"no function":              WithStreams([]Stream{DefaultStream(0), DefaultStream(1)}, nil),
		"no function, one stream":  WithStreams([]Stream{DefaultStream(0)}, nil),
		"two of a device, swapped": WithStreams([]Stream{DefaultStream(1), DefaultStream(0), DefaultStream(0)}, fn),
	} {
		if !errors.Is(err, ErrInvalidArgument) {
			t.Errorf("%s: got %v, want ErrInvalidArgument", name, err)
		}
	}
}

func TestTimingBetweenProcesses(t *testing.T) {
	if _, err := NewEvent(EventOptions{Timing: true, Interprocess: true}); !errors.Is(err, ErrInvalidArgument) {
		t.Errorf("got %v, want ErrInvalidArgument", err)
	}
}

// fakeSlab has Go memory and events whose state the test sets.
type fakeSlab struct {
	*Slab
	pending map[*capi.Event]error // nil: not done
}

func newFakeSlab(slots, bytes, stride int) *fakeSlab {
	f := &fakeSlab{newSlab(newPinned(nil, make([]byte, slots*stride)), slots, bytes, stride), map[*capi.Event]error{}}
	f.done = func(c *capi.Event) (bool, error) {
		err, pending := f.pending[c]
		return !pending, err
	}
	return f
}

func TestSlabArguments(t *testing.T) {
	for _, c := range [][2]int{{0, 1}, {1, 0}, {-1, 1}, {1, -1}, {1 << 40, 1 << 40}, {1, 1<<63 - 1}} {
		if _, err := NewSlab(c[0], c[1]); !errors.Is(err, ErrInvalidArgument) {
			t.Errorf("%d slots of %d bytes: got %v, want ErrInvalidArgument", c[0], c[1], err)
		}
	}
	s := newFakeSlab(2, 10, 256)
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
		t.Errorf("a failed InFlight left %d references to its event, want its own", e.refs.Load())
	}
}

func TestSlabSlots(t *testing.T) {
	s := newFakeSlab(3, 10, 256)
	for i := range s.Slots() {
		memory := must[[]byte](t)(s.Slot(i))
		if len(memory) != 10 || cap(memory) != 10 || &memory[0] != &s.pinned.Bytes()[256*i] {
			t.Errorf("slot %d: %d bytes of capacity %d, or elsewhere", i, len(memory), cap(memory))
		}
	}
}

// A slot in flight is not handed out and not freed, whatever happens to its event.
func TestSlabInFlight(t *testing.T) {
	s := newFakeSlab(2, 10, 256)
	e := newEvent(nil)
	s.pending[nil] = nil // all events of this test are the C side's nil
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
		t.Errorf("%d references to the event, want one for each flight", n)
	}
	lost := errors.New("lost")
	s.pending[nil] = lost
	if _, err := s.Slot(0); !errors.Is(err, lost) {
		t.Errorf("Slot: got %v, want the device's error", err)
	}
	delete(s.pending, nil)
	must[[]byte](t)(s.Slot(0))
	if n := e.refs.Load(); n != 0 {
		t.Errorf("%d references to the event are left", n)
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

func TestNilMemoryPool(t *testing.T) {
	for _, p := range []*MemoryPool{nil, {}} {
		_, _, err := p.Bytes()
		for name, err := range map[string]error{"Use": p.Use(func() error { return nil }), "Bytes": err} {
			if !errors.Is(err, ErrInvalidArgument) {
				t.Errorf("%s: got %v, want ErrInvalidArgument", name, err)
			}
		}
		check(t, p.Close())
	}
}

// A Close that is refused can be made again, and until then the garbage collector sees to the pool.
func TestMemoryPoolRefusedClose(t *testing.T) {
	memory := mapped(t, 64)
	var tries atomic.Int64
	refusing := func() *MemoryPool {
		tries.Store(0)
		return newMemoryPool((*capi.MemoryPool)(unsafe.Pointer(&memory[0])), 0, func(*capi.MemoryPool) error {
			if tries.Add(1) == 1 {
				return invalid("test", "refused")
			}
			return nil
		})
	}
	p := refusing()
	if err := p.Close(); !errors.Is(err, ErrInvalidArgument) {
		t.Errorf("got %v, want ErrInvalidArgument", err)
	}
	check(t, p.Close())
	check(t, p.Close())
	if n := tries.Load(); n != 2 {
		t.Errorf("the C side was asked %d times, want 2", n)
	}
	if err := refusing().Close(); !errors.Is(err, ErrInvalidArgument) {
		t.Errorf("got %v, want ErrInvalidArgument", err)
	}
	until(t, "the collector's Close", func() bool { runtime.GC(); return tries.Load() == 2 })

	failed := errors.New("failed")
	p = newMemoryPool((*capi.MemoryPool)(unsafe.Pointer(&memory[0])), 0, func(*capi.MemoryPool) error { tries.Add(1); return failed })
	tries.Store(0)
	if err := p.Close(); err != failed {
		t.Errorf("got %v, want the C side's error", err)
	}
	check(t, p.Close()) // it is gone all the same
	if n := tries.Load(); n != 1 {
		t.Errorf("the C side was asked %d times, want once", n)
	}
}

// Inside a pool's own Use nothing waits for its end.
func TestMemoryPoolInsideUse(t *testing.T) {
	memory := mapped(t, 64)
	p := newMemoryPool((*capi.MemoryPool)(unsafe.Pointer(&memory[0])), 0, func(*capi.MemoryPool) error { return nil })
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	p.mu.Lock()
	p.user.Store(capi.ThreadID())
	for name, err := range map[string]error{"Use": p.Use(func() error { return nil }), "Close": p.Close()} {
		if !errors.Is(err, ErrInvalidArgument) {
			t.Errorf("%s: got %v, want ErrInvalidArgument", name, err)
		}
	}
	p.user.Store(0)
	p.mu.Unlock()
	check(t, p.Close())
}

// ---- with GPUs

// Slots are exactly as large as asked for, and in flight from a copy to its end.
func TestSlab(t *testing.T) {
	onGPU(t, 1)
	const n, slots = 3<<20 + 1, 3 // no power of two
	before := PinnedBytes()
	s := must[*Slab](t)(NewSlab(slots, n))
	if got := PinnedBytes() - before; got < slots*n || got > slots*(n+slotAlign) {
		t.Errorf("%d bytes are pinned for %d slots of %d", got, slots, n)
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
		t.Error("the bytes changed on their way")
	}
	check(t, s.Close())
	if got := PinnedBytes(); got != before {
		t.Errorf("%d bytes are pinned, %d were before", got, before)
	}
}

func TestRegisterPinned(t *testing.T) {
	onGPU(t, 1)
	memory := mapped(t, 1<<20+4096)
	before := PinnedBytes()
	p := must[*Pinned](t)(RegisterPinned(memory))
	if got := PinnedBytes() - before; got != int64(len(memory)) {
		t.Errorf("%d bytes more are pinned, want %d", got, len(memory))
	}
	if again, err := RegisterPinned(memory[4096:]); !errors.Is(err, ErrInvalidArgument) {
		t.Errorf("pinned twice: got %v, %v, want ErrInvalidArgument", again, err)
	}
	host := must[*capi.Tensor](t)(capi.TensorFromMemory(p.Bytes(), []int64{int64(len(memory))}, capi.Uint8))
	if info := must[capi.TensorInfo](t)(capi.DescribeTensor(host)); !info.Pinned {
		t.Error("LibTorch does not see that the memory is pinned")
	}
	capi.FreeTensor(host)
	check(t, p.Close())
	memory[0] = 1 // still there
	host = must[*capi.Tensor](t)(capi.TensorFromMemory(memory, []int64{int64(len(memory))}, capi.Uint8))
	defer capi.FreeTensor(host)
	if info := must[capi.TensorInfo](t)(capi.DescribeTensor(host)); info.Pinned {
		t.Error("the memory is still pinned after Close")
	}
}

func TestAllocatorStats(t *testing.T) {
	onGPU(t, 1)
	before := must[AllocatorStats](t)(Device(0).Allocator())
	x := must[*capi.Tensor](t)(capi.EmptyTensor([]int64{1000}, capi.Uint8, 0, capi.Contiguous))
	during := must[AllocatorStats](t)(Device(0).Allocator())
	capi.FreeTensor(x)
	after := must[AllocatorStats](t)(Device(0).Allocator())
	if during.RequestedBytes != before.RequestedBytes+1000 || during.Allocations != before.Allocations+1 || during.TotalAllocations != before.TotalAllocations+1 {
		t.Errorf("1000 bytes were allocated: before %+v, during %+v", before, during)
	}
	if after.RequestedBytes != before.RequestedBytes || after.Allocations != before.Allocations || after.Segments < 1 || after.DriverAllocations < after.Segments {
		t.Errorf("and freed: before %+v, after %+v", before, after)
	}
	for _, fraction := range []float64{0, -1, 1.5} {
		if err := Device(0).LimitMemory(fraction); !errors.Is(err, ErrInvalidArgument) {
			t.Errorf("LimitMemory(%v): got %v, want ErrInvalidArgument", fraction, err)
		}
	}
	check(t, Device(0).LimitMemory(0.001)) // about 140 MB
	if x, err := capi.EmptyTensor([]int64{8 << 30}, capi.Uint8, 0, capi.Contiguous); !errors.Is(err, ErrOutOfMemory) {
		t.Errorf("8 GiB beyond the limit: got %v, %v, want ErrOutOfMemory", x, err)
	}
	check(t, Device(0).LimitMemory(1))
}

// What Use allocates lies in the pool, on its goroutine alone, and the pool's end gives it back.
func TestMemoryPool(t *testing.T) {
	onGPU(t, 1)
	p := must[*MemoryPool](t)(NewMemoryPool(0))
	if p.Device() != 0 {
		t.Errorf("the pool is on %v", p.Device())
	}
	empty := func(n int64) *capi.Tensor {
		return must[*capi.Tensor](t)(capi.EmptyTensor([]int64{n}, capi.Uint8, 0, capi.Contiguous))
	}
	allocated := func() int64 {
		_, allocated, err := p.Bytes()
		check(t, err)
		return allocated
	}
	const n = 1 << 20
	var inside, elsewhere *capi.Tensor
	problem := errors.New("problem")
	err := p.Use(func() error {
		inside = empty(n)
		if got := allocated(); got != n {
			t.Errorf("inside: %d bytes are in the pool, want %d", got, n)
		}
		done := make(chan struct{})
		go func() { defer close(done); elsewhere = empty(n) }()
		<-done
		return problem
	})
	if err != problem {
		t.Errorf("got %v, want fn's error", err)
	}
	outside := empty(n)
	if got := allocated(); got != n {
		t.Errorf("%d bytes are in the pool, want %d", got, n)
	}
	func() {
		defer func() { recover() }()
		p.Use(func() error { panic("on purpose") })
	}()
	check(t, p.Use(func() error { capi.FreeTensor(empty(n)); return nil }))
	if n := threadsUsed(300, func() { p.Use(func() error { return nil }) }); n > 150 {
		t.Errorf("300 goroutines used %d threads: they ended locked", n)
	}
	reserved, _, err := p.Bytes()
	check(t, err)
	check(t, p.Close())
	check(t, p.Close())
	if err := p.Use(func() error { return nil }); !errors.Is(err, ErrClosed) {
		t.Errorf("Use after Close: got %v, want ErrClosed", err)
	}
	check(t, fill(inside, 3)) // a pool's tensors outlive it
	check(t, Device(0).Synchronize())
	before := must[MemoryStats](t)(Device(0).Memory())
	for _, x := range []*capi.Tensor{inside, elsewhere, outside} {
		capi.FreeTensor(x)
	}
	check(t, EmptyCache())
	if after := must[MemoryStats](t)(Device(0).Memory()); after.Reserved > before.Reserved-reserved {
		t.Errorf("the pool's %d bytes are still held: %d before, %d after", reserved, before.Reserved, after.Reserved)
	}
	runtime.KeepAlive(p)
}

const eventOfParent = "TORCHSTREAM_TEST_EVENT"

// An event of this process holds back a stream of another one, which is this test once more.
func TestEventBetweenProcesses(t *testing.T) {
	onGPU(t, 1)
	if handle := os.Getenv(eventOfParent); handle != "" {
		var h EventHandle
		copy(h[:], must[[]byte](t)(hex.DecodeString(handle)))
		e := must[*Event](t)(ImportEvent(0, h))
		defer e.Close()
		stream := newStreams(t, 1)[0]
		check(t, stream.WaitEvent(e))
		check(t, stream.Synchronize())
		if done := must[bool](t)(e.Query()); !done {
			t.Error("the parent's work is not done after the wait for its event")
		}
		return
	}
	load := newWork(t)
	stream := newStreams(t, 1)[0]
	e := must[*Event](t)(NewEvent(EventOptions{Interprocess: true}))
	defer e.Close()
	if _, err := must[*Event](t)(NewEvent(EventOptions{})).Export(0); !errors.Is(err, ErrInvalidArgument) {
		t.Errorf("export of a plain event: got %v, want ErrInvalidArgument", err)
	}
	if _, err := ImportEvent(0, EventHandle{}); err == nil {
		t.Error("import of no handle: no error")
	}
	check(t, WithStream(stream, load.queue))
	check(t, e.Record(stream))
	h := must[EventHandle](t)(e.Export(0))
	self := must[string](t)(os.Executable())
	child := exec.Command(self, "-test.run", "^TestEventBetweenProcesses$", "-test.v")
	child.Env = append(os.Environ(), eventOfParent+"="+hex.EncodeToString(h[:]))
	if out, err := child.CombinedOutput(); err != nil || !bytes.Contains(out, []byte("--- PASS: TestEventBetweenProcesses")) {
		t.Errorf("the other process: %v\n%s", err, out)
	}
	check(t, stream.Synchronize())
}
