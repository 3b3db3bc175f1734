package cuda

import (
	"errors"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/torchstream/torchstream/internal/capi"
)

// Notify returns a channel that is closed when everything queued on the stream so far is done: the
// way to wait for a stream beside other things, in a select with a context. It does not wait. Later
// work of the stream starts after the notice is given, a microsecond; whoever receives from the
// channel is scheduled by Go as usual, tens of microseconds later on a busy machine.
//
//	done, err := stream.Notify()
//	...
//	select {
//	case <-done:
//	case <-ctx.Done():
//	}
//
// No thread waits and no driver thread runs Go code: the driver puts a token into a queue and wakes
// one goroutine, which exists while notices are under way, through the runtime's poller.
// [Stream.Synchronize] is quicker where there is nothing else to wait for; it blocks an OS thread.
//
// The channel is also closed, within a second or two, if the device has failed; the next call on
// the stream then returns the error. While the stream is captured Notify is refused with
// [ErrInvalidArgument]. Any goroutine may call it, on any thread.
func (s Stream) Notify() (<-chan struct{}, error) {
	return notices.add(s, func(n *capi.Notifier, token uint64) error { return capi.NotifyStream(s.s, n, token) })
}

// notices is one for the process, as the driver's thread that gives them is.
var notices noticeBoard

type noticeBoard struct {
	mu       sync.Mutex
	notifier *capi.Notifier // made by the first notice, and kept
	wake     *os.File
	waiting  map[uint64]notice
	last     uint64
	running  bool
	lost     func(Stream) bool // nil: lostDevice
}

type notice struct {
	stream Stream
	done   chan struct{}
}

// add makes a notice that enqueue sees to.
func (b *noticeBoard) add(s Stream, enqueue func(n *capi.Notifier, token uint64) error) (<-chan struct{}, error) {
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

func (b *noticeBoard) open() error {
	if b.notifier != nil {
		return nil
	}
	n, err := capi.NewNotifier()
	if err != nil {
		return err
	}
	// The file closes its own. One call, so that no process that is started meanwhile inherits it.
	fd, _, errno := syscall.Syscall(syscall.SYS_FCNTL, uintptr(capi.NotifierFD(n)), syscall.F_DUPFD_CLOEXEC, 0)
	if errno != 0 {
		capi.FreeNotifier(n)
		return os.NewSyscallError("fcntl", errno)
	}
	b.notifier, b.wake, b.waiting = n, os.NewFile(fd, "notices"), map[uint64]notice{}
	return nil
}

// deliver closes the channels of notices that have come, until none is under way.
func (b *noticeBoard) deliver() {
	for {
		b.wake.SetReadDeadline(time.Now().Add(time.Second))
		var count [8]byte
		_, err := b.wake.Read(count[:])
		if !b.close(errors.Is(err, os.ErrDeadlineExceeded)) {
			return
		}
	}
}

// close closes what has come, and if it is late what never will come, and reports whether notices
// are left. It is called by deliver alone.
func (b *noticeBoard) close(late bool) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	var tokens [64]uint64
	for n := len(tokens); n == len(tokens); {
		n, _ = capi.TakeNotices(b.notifier, tokens[:]) // its arguments are right
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

func (b *noticeBoard) end(token uint64) {
	if w, ok := b.waiting[token]; ok {
		close(w.done)
		delete(b.waiting, token)
	}
}
