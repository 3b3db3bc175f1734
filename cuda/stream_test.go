//go:build linux

package cuda

import (
	"errors"
	"runtime"
	"testing"

	"github.com/torchstream/torchstream/internal/capi"
)

func TestDevicesAndStreamsHaveNames(t *testing.T) {
	for got, want := range map[string]string{
		Device(0).String():        "cuda:0",
		Device(7).String():        "cuda:7",
		CPU.String():              "cpu",
		DefaultStream(1).String(): "cuda:1 default stream",
		Stream{capi.Stream{ID: 35, Device: 2}}.String(): "cuda:2 stream 35",
	} {
		if got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	if got := DefaultStream(0); got != (Stream{}) {
		t.Errorf("DefaultStream(0) = %v, want the zero Stream", got)
	}
}

// A stream that waits for another reads the result of the other; a stream that does not wait reads
// the earlier contents.
func TestOrdering(t *testing.T) {
	onGPU(t, 1)
	const stale, fresh, n = 3, 7, 1 << 20
	load := newWork(t)
	made, read := tensor(t, n, stale), tensor(t, n, 0)
	event := must[*Event](t)(NewEvent(EventOptions{}))
	defer event.Close()
	side := newStreams(t, 2)
	pairs := map[string][2]Stream{
		"pool to pool":    {side[0], side[1]},
		"default to pool": {DefaultStream(0), side[0]},
		"pool to default": {side[0], DefaultStream(0)},
	}
	for _, c := range []struct {
		name  string
		order func(from, to Stream) error
		want  float32
	}{
		{"nothing", func(from, to Stream) error { return nil }, stale},
		{"a wait in the wrong direction", func(from, to Stream) error { return from.Wait(to) }, stale},
		{"WaitCUDAStream", func(from, to Stream) error { return WaitCUDAStream(to, from) }, fresh},
		{"Stream.Wait", func(from, to Stream) error { return to.Wait(from) }, fresh},
		{"event", func(from, to Stream) error { return errors.Join(event.Record(from), to.WaitEvent(event)) }, fresh},
		{"event recorded again elsewhere after the wait", func(from, to Stream) error {
			return errors.Join(event.Record(from), to.WaitEvent(event), event.Record(side[1]))
		}, fresh},
		{"Event.Synchronize", func(from,
			to Stream) error {
			return errors.Join(event.Record(from), event.Synchronize())
		}, fresh},
		{"Stream.Synchronize", func(from, to Stream) error { return from.Synchronize() }, fresh},
		{"Device.Synchronize", func(from, to Stream) error { return Device(0).Synchronize() }, fresh},
	} {
		for name, pair := range pairs {
			t.Run(c.name+"/"+name, func(t *testing.T) {
				from, to := pair[0], pair[1]
				check(t, WithStream(from, func() error { return errors.Join(fill(made, stale), from.Synchronize()) }))
				check(t, WithStream(from, func() error { return errors.Join(load.queue(), fill(made, fresh)) }))
				check(t, c.order(from, to))
				check(t, WithStream(to, func() error { return capi.CopyTensor(read, made, true) }))
				check(t, to.Synchronize())
				got := firstAndLast(t, read, n)
				check(t, Device(0).Synchronize())
				if got != [2]float32{c.want, c.want} {
					t.Errorf("read %v, want %v", got, c.want)
				}
			})
		}
	}
}

func TestPoolAndPriorities(t *testing.T) {
	onGPU(t, 1)
	least, greatest, err := PriorityRange()
	if err != nil || least != 0 || greatest >= 0 {
		t.Fatalf("priorities from %d to %d, %v, want 0, less than 0, nil", least, greatest, err)
	}
	for p := greatest; p <= least; p++ {
		s := must[Stream](t)(NewStream(0, StreamOptions{Priority: p}))
		if got := must[int](t)(s.Priority()); got != p {
			t.Errorf("asked for priority %d, got %d", p, got)
		}
	}
	for _, p := range []int{1, greatest - 1, -1 << 40, 1 << 32} {
		if s, err := NewStream(0, StreamOptions{Priority: p}); !errors.Is(err, ErrInvalidArgument) {
			t.Errorf("priority %d: got %v, %v, want ErrInvalidArgument", p, s, err)
		}
	}
	first := must[Stream](t)(NewStream(0, StreamOptions{}))
	for i := range 31 {
		if s := must[Stream](t)(NewStream(0, StreamOptions{})); s == first {
			t.Errorf("stream %d of the first 32 is %v, the first one, want another", i+2, s)
		}
	}
	if s := must[Stream](t)(NewStream(0, StreamOptions{})); s != first {
		t.Errorf("the 33rd stream is %v, not the first, %v", s, first)
	}
	if _, err := NewStream(Device(DeviceCount()), StreamOptions{}); !errors.Is(err, ErrNoDevice) {
		t.Errorf("one device too many: got %v, want ErrNoDevice", err)
	}
}

func TestExternalStream(t *testing.T) {
	onGPU(t, 1)
	for _, handle := range []uintptr{1, 2, 0x7f0000000001} {
		if s, err := ExternalStream(handle, 0); !errors.Is(err, ErrInvalidArgument) {
			t.Errorf("handle %#x: got %v, %v, want ErrInvalidArgument", handle, s, err)
		}
	}
	if s := must[Stream](t)(ExternalStream(0, 0)); s != DefaultStream(0) {
		t.Errorf("handle 0 is %v, want the default stream", s)
	}
	pool := newStreams(t, 1)[0]
	handle := must[uintptr](t)(pool.Handle())
	wrapped := must[Stream](t)(ExternalStream(handle, 0))
	if got := must[uintptr](t)(wrapped.Handle()); got != handle {
		t.Errorf("handle %#x became %#x", handle, got)
	}
	check(t, WithStream(wrapped, func() error { requireCurrent(t, wrapped); return nil }))
	if made := (Stream{capi.Stream{ID: 1 << 40, Device: 0}}); WaitCUDAStream(made, pool) == nil {
		t.Error("WaitCUDAStream of a stream that was never made: got no error, want one")
	}
}

func TestTwoDevices(t *testing.T) {
	onGPU(t, 2)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	a, b := must[Stream](t)(NewStream(0, StreamOptions{})), must[Stream](t)(NewStream(1, StreamOptions{}))
	check(t, WithStream(a, func() error {
		check(t, WithStream(b, func() error {
			requireCurrent(t, a)
			requireCurrent(t, b)
			current := must[capi.Stream](t)(capi.GetCurrentCUDAStream(capi.DeviceCurrent))
			if current != b.s {
				t.Errorf("the current device's stream is %v, want %v", Stream{current}, b)
			}
			return errors.Join(a.Wait(b), b.Wait(a))
		}))
		requireCurrent(t, a)
		requireCurrent(t, DefaultStream(1))
		return nil
	}))
	if current := must[capi.Stream](t)(capi.GetCurrentCUDAStream(capi.DeviceCurrent)); current != DefaultStream(0).s {
		t.Errorf("the current device's stream is %v afterwards, want %v",
			Stream{current}, DefaultStream(0).s)
	}
	for _, streams := range [][]Stream{{a, b}, {b, a}} {
		check(t, WithStreams(streams, func() error {
			requireCurrent(t, a)
			requireCurrent(t, b)
			if current := must[capi.Stream](t)(capi.GetCurrentCUDAStream(capi.DeviceCurrent)); current != streams[0].s {
				t.Errorf("the current device's stream is %v, want %v", Stream{current}, streams[0])
			}
			return nil
		}))
		requireCurrent(t, DefaultStream(0))
		requireCurrent(t, DefaultStream(1))
	}
	if can, back := must[bool](t)(Device(0).CanAccessPeer(1)), must[bool](t)(Device(1).CanAccessPeer(0)); can != back {
		t.Errorf("0 can access 1: %v, 1 can access 0: %v", can, back)
	}
	event := must[*Event](t)(NewEvent(EventOptions{}))
	defer event.Close()
	check(t, event.Record(a))
	check(t, b.WaitEvent(event))
	if err := event.Record(b); !errors.Is(err, ErrInvalidArgument) {
		t.Errorf("an event of device 0 recorded on device 1: got %v, want ErrInvalidArgument", err)
	}
	if s, err := ExternalStream(must[uintptr](t)(a.Handle()), 1); !errors.Is(err, ErrInvalidArgument) {
		t.Errorf("a stream of device 0 wrapped for device 1: got %v, %v, want ErrInvalidArgument", s, err)
	}
}

// The calls that a training step makes do not allocate.
func TestCallsDoNotAllocate(t *testing.T) {
	onGPU(t, 1)
	side := newStreams(t, 2)
	event := must[*Event](t)(NewEvent(EventOptions{}))
	defer event.Close()
	check(t, event.Record(side[0]))
	nothing := func() error { return nil }
	for name, call := range map[string]func() error{
		"GetCurrentCUDAStream": func() error { _, err := GetCurrentCUDAStream(0); return err },
		"WithStream":           func() error { return WithStream(side[0], nothing) },
		"WaitCUDAStream":       func() error { return WaitCUDAStream(side[0], side[1]) },
		"Event.Record":         func() error { return event.Record(side[0]) },
		"Stream.WaitEvent":     func() error { return side[1].WaitEvent(event) },
		"Event.Query":          func() error { _, err := event.Query(); return err },
	} {
		t.Run(name, func(t *testing.T) {
			check(t, call())
			if n := testing.AllocsPerRun(100, func() { call() }); n != 0 {
				t.Errorf("%v allocations per call, want 0", n)
			}
		})
	}
}

// SameQueue finds aliases in the pool, and Forget refuses later calls with a wrapped stream.
func TestSameQueueAndForget(t *testing.T) {
	onGPU(t, 1)
	pool := newStreams(t, 2)
	wrapped := must[Stream](t)(ExternalStream(must[uintptr](t)(pool[0].Handle()), 0))
	if wrapped == pool[0] || !must[bool](t)(wrapped.SameQueue(pool[0])) || must[bool](t)(wrapped.SameQueue(pool[1])) {
		t.Errorf("%v and %v: SameQueue is wrong", wrapped, pool)
	}
	check(t, wrapped.Synchronize())
	check(t, wrapped.Forget())
	if err := wrapped.Synchronize(); !errors.Is(err, ErrInvalidArgument) {
		t.Errorf("a forgotten stream: got %v, want ErrInvalidArgument", err)
	}
	check(t, pool[0].Synchronize())
}
