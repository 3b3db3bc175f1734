package cuda

import (
	"errors"
	"os"
	"sync"
	"time"

	"github.com/torchstream/torchstream/internal/capi"
)

// Notify returns a channel that is closed when everything queued on the stream so far is done. Use
// it to wait for a stream and other events in one select, for example with a context. Notify does
// not wait. Work that is queued on the stream later starts after the notice, which delays it by
// about a microsecond. Go schedules the receiver as usual, tens of microseconds later on a busy
// machine.
//
//	done, err := stream.Notify()
//	...
//	select {
//	case <-done:
//	case <-ctx.Done():
//	}
//
// No thread waits, and no driver thread runs Go code: the driver puts a token into a queue and
// wakes one goroutine through the runtime's poller. That goroutine exists only while notices are
// pending. [Stream.Synchronize] is faster if there is nothing else to wait for, but blocks an OS
// thread.
//
// If the device fails, the channel is also closed, within a second or two. The next call on the
// stream then returns the error. During a capture of the stream Notify returns
// [ErrInvalidArgument]. Any goroutine may call it, on any thread.
func (s Stream) Notify() (<-chan struct{}, error) {
	return notices.add(s, func(n *capi.Notifier, token uint64) error { return capi.NotifyStream(s.s, n, token) })
}

// notices delivers the notices of the whole process, because the driver has one thread for host
// functions.
var notices dispatcher

type dispatcher struct {
	mu       sync.Mutex
	notifier *capi.Notifier // made by the first notice, and kept
	wake     *os.File
	waiting  map[uint64]notice
	last     uint64
	running  bool
	lost     func(Stream) bool // nil means lostDevice; tests replace it
}

type notice struct {
	stream Stream
	done   chan struct{}
}

// add registers a notice for s and calls enqueue to queue its token.
func (b *dispatcher) add(s Stream, enqueue func(n *capi.Notifier, token uint64) error) (<-chan struct{}, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.open(); err != nil {
		return nil, checked(err)
	}
	b.last++
	if err := enqueue(b.notifier, b.last); err != nil {
		return nil, checked(err)
	}
	done := make(chan struct{})
	b.waiting[b.last] = notice{s, done}
	if !b.running {
		b.running = true
		go b.deliver()
	}
	return done, nil
}

func (b *dispatcher) open() error {
	if b.notifier != nil {
		return nil
	}
	n, err := capi.NewNotifier()
	if err != nil {
		return err
	}
	wake, err := duplicate(capi.NotifierFD(n), "notices") // because the os.File closes its descriptor
	if err != nil {
		capi.FreeNotifier(n)
		return err
	}
	b.notifier, b.wake, b.waiting = n, wake, map[uint64]notice{}
	return nil
}

// deliver closes the channels of delivered notices until none is pending.
func (b *dispatcher) deliver() {
	for {
		b.wake.SetReadDeadline(time.Now().Add(time.Second))
		var count [8]byte
		_, err := b.wake.Read(count[:])
		if !b.close(errors.Is(err, os.ErrDeadlineExceeded)) {
			return
		}
	}
}

// close closes the channels of delivered notices. If late is set, it also closes the channels of
// notices whose device is lost. It reports whether notices are still pending. Only deliver calls
// it.
func (b *dispatcher) close(late bool) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	var tokens [64]uint64
	for n := len(tokens); n == len(tokens); {
		n, _ = capi.TakeNotices(b.notifier, tokens[:]) // the arguments are valid
		for _, token := range tokens[:n] {
			b.end(token)
		}
	}
	if late {
		lost := b.lost
		if lost == nil {
			lost = lostDevice
		}
		for token, w := range b.waiting {
			if lost(w.stream) {
				b.end(token)
			}
		}
	}
	b.running = len(b.waiting) > 0
	return b.running
}

func lostDevice(s Stream) bool {
	_, err := s.Query()
	return errors.Is(err, ErrCUDA)
}

func (b *dispatcher) end(token uint64) {
	if w, ok := b.waiting[token]; ok {
		close(w.done)
		delete(b.waiting, token)
	}
}
