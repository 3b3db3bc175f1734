//go:build linux

package cuda

import (
	"errors"
	"testing"

	"github.com/torchstream/torchstream/internal/capi"
)

// Fork and Join check every stream before they order anything.
func TestForkAndJoinErrors(t *testing.T) {
	good, none := DefaultStream(0), DefaultStream(1000)
	for name, err := range map[string]error{
		"fork from": Fork(none, good), "fork to": Fork(good, good, none), "join into": Join(none, good),
		"join from": Join(good, good, none), "fork from alone": Fork(none),
		"join into alone": Join(none), "not a GPU": Fork(Stream{capi.Stream{Device: -1}}),
	} {
		t.Run(name, func(t *testing.T) {
			if !errors.Is(err, ErrNoDevice) {
				t.Errorf("got %v, want ErrNoDevice", err)
			}
		})
	}
	if DeviceCount() == 0 {
		return
	}
	unknown := Stream{capi.Stream{ID: 3 << 20, Device: 0}}
	if err := Fork(good, unknown); !errors.Is(err, ErrInvalidArgument) {
		t.Errorf("a stream that was never made: got %v, want ErrInvalidArgument", err)
	}
	if err := errors.Join(Fork(good), Join(good), Fork(good, good), Join(good, good, good)); err != nil {
		t.Errorf("a fork and a join of no other streams: %v, want no error", err)
	}
}

// Every stream of a fork waits; other streams do not.
func TestFork(t *testing.T) {
	onGPU(t, 1)
	const stale, fresh, n = 3, 7, 1 << 20
	load, streams, made := newWork(t), newStreams(t, 5), tensor(t, n, stale)
	var read []*capi.Tensor
	for range streams {
		read = append(read, tensor(t, n, 0))
	}
	check(t, WithStream(streams[0], func() error { return errors.Join(load.queue(), fill(made, fresh)) }))
	check(t, Fork(streams[0], streams[1:4]...))
	for i := 1; i < 5; i++ { // queue all reads before waiting for any
		check(t, WithStream(streams[i], func() error { return capi.CopyTensor(read[i], made, true) }))
	}
	check(t, Device(0).Synchronize())
	for i := 1; i < 5; i++ {
		want := [2]float32{fresh, fresh}
		if i == 4 {
			want = [2]float32{stale, stale}
		}
		if got := firstAndLast(t, read[i], n); got != want {
			t.Errorf("stream %d reads %v, want %v", i, got, want)
		}
	}
}

// A join waits for every stream, whichever is slow.
func TestJoin(t *testing.T) {
	onGPU(t, 1)
	const stale, fresh, n = 3, 7, 1 << 20
	load, streams, read := newWork(t), newStreams(t, 5), tensor(t, n, 0)
	for slow := 1; slow < 5; slow++ {
		made := tensor(t, n, stale)
		check(t, WithStream(streams[slow], func() error { return errors.Join(load.queue(), fill(made, fresh)) }))
		check(t, Join(streams[0], streams[1:4]...))
		check(t, WithStream(streams[0], func() error { return capi.CopyTensor(read, made, true) }))
		check(t, Device(0).Synchronize())
		want := [2]float32{fresh, fresh}
		if slow == 4 { // not part of the join
			want = [2]float32{stale, stale}
		}
		if got := firstAndLast(t, read, n); got != want {
			t.Errorf("stream %d is slow: read %v, want %v", slow, got, want)
		}
	}
}

// A fork and a join over two devices, including default streams, whose handle is NULL on both
// devices.
func TestForkTwoDevices(t *testing.T) {
	onGPU(t, 2)
	load := newWork(t)
	there := must[Stream](t)(NewStream(1, StreamOptions{}))
	here := must[Stream](t)(NewStream(0, StreamOptions{}))
	for name, order := range map[string]struct {
		from, to Stream
		order    func(from, to Stream) error
	}{
		"fork": {here, there, func(from, to Stream) error { return Fork(from, to, here) }},
		"fork of default streams": {DefaultStream(0), DefaultStream(1),
			func(from, to Stream) error { return Fork(from, to) }},
		"join": {here, there, func(from, to Stream) error { return Join(to, to, from) }},
		"join of default streams": {DefaultStream(0), DefaultStream(1),
			func(from, to Stream) error { return Join(to, from) }},
		"fork onto a default queue": {here, DefaultStream(1),
			func(from, to Stream) error { return Fork(from, here, to) }},
	} {
		t.Run(name, func(t *testing.T) {
			check(t, WithStream(order.from, load.queue))
			check(t, order.order(order.from, order.to))
			// The event on the waiting stream is reached only after the slow work.
			reached := must[*Event](t)(NewEvent(EventOptions{}))
			check(t, reached.Record(order.to))
			check(t, reached.Synchronize())
			if done := must[bool](t)(order.from.Query()); !done {
				t.Error("Query of the stream waited for = false, want true")
			}
			check(t, reached.Close())
			check(t, Device(0).Synchronize())
		})
	}
}

func TestForkDoesNotAllocate(t *testing.T) {
	onGPU(t, 1)
	if RunningSanitizer() != nil {
		t.Skip("the sanitizer allocates")
	}
	s := newStreams(t, 4)
	check(t, Fork(s[0], s[1:]...))
	if n := testing.AllocsPerRun(100,
		func() { check(t, Fork(s[0], s[1:]...)); check(t, Join(s[0], s[1:]...)) }); n != 0 {
		t.Errorf("%v allocations a fork and join, want 0", n)
	}
}

func BenchmarkForkJoin(b *testing.B) {
	if DeviceCount() == 0 {
		b.Skip("no GPU")
	}
	var s []Stream
	for range 4 {
		stream, err := NewStream(0, StreamOptions{})
		if err != nil {
			b.Fatal(err)
		}
		s = append(s, stream)
	}
	b.Run("fork and join of 3", func(b *testing.B) {
		for b.Loop() {
			if err := errors.Join(Fork(s[0], s[1:]...), Join(s[0], s[1:]...)); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("by Wait", func(b *testing.B) {
		for b.Loop() {
			for _, side := range s[1:] {
				if err := errors.Join(side.Wait(s[0]), s[0].Wait(side)); err != nil {
					b.Fatal(err)
				}
			}
		}
	})
}
