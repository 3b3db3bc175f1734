//go:build linux

package cuda

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
	"testing"
)

func TestSentinelsMatchOnlyThemselves(t *testing.T) {
	sentinels := []error{ErrInvalidArgument, ErrOutOfMemory, ErrNoDevice, ErrCUDA, ErrWrongThread,
		ErrOutOfOrder, ErrNotRecorded, ErrInternal, ErrCapture, ErrStale, ErrClosed}
	for i, a := range sentinels {
		for j, b := range sentinels {
			if got := errors.Is(fmt.Errorf("batch 3: %w", a), b); got != (i == j) {
				t.Errorf("errors.Is(%v, %v) is %v", a, b, got)
			}
		}
	}
	err := invalid("NewPinned", "%d bytes", 0)
	var e *Error
	if !errors.As(err, &e) || e.Origin != "cuda.NewPinned" || e.Message != "0 bytes" ||
		!errors.Is(err, ErrInvalidArgument) {
		t.Errorf("got %#v", err)
	}
}

// saysGo fails unless an error starts with the name of the call and contains no name from the C
// headers.
func saysGo(t *testing.T, err error, call string) {
	t.Helper()
	if err == nil || !strings.HasPrefix(err.Error(), call+": ") ||
		regexp.MustCompile(`\b(?i:ts)_\w`).MatchString(err.Error()) {
		t.Errorf("the error is %v, want one that begins with %q and names nothing of C", err, call+": ")
	}
}

func second[T any](_ T, err error) error { return err }

func TestErrorsBeginWithTheCall(t *testing.T) {
	const none = Device(99)
	saysGo(t, second(none.Properties()), "cuda.Device.Properties")
	saysGo(t, second(NewOwnedStream(none, StreamOptions{})), "cuda.NewOwnedStream")
	saysGo(t, second(NewPinned(0)), "cuda.NewPinned")
	saysGo(t, second(NewPinned(1<<62)), "cuda.NewPinned")
	saysGo(t, WithStream(Stream{}, nil), "cuda.WithStream")
}

func TestErrorsOfGPUsBeginWithTheCall(t *testing.T) {
	device := Device(0)
	onGPU(t, 1)
	s, err := NewOwnedStream(device, StreamOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	events := make([]*Event, 2)
	for i := range events {
		if events[i], err = NewEvent(EventOptions{}); err != nil {
			t.Fatal(err)
		}
		defer events[i].Close()
	}
	saysGo(t, second(Elapsed(events[0], events[1])), "cuda.Elapsed")
	for _, e := range events {
		if err := e.Record(s.Stream); err != nil {
			t.Fatal(err)
		}
	}
	err = second(Elapsed(events[0], events[1]))
	saysGo(t, err, "cuda.Elapsed")
	if err != nil && !strings.Contains(err.Error(), "cuda.EventOptions{Timing: true}") {
		t.Errorf("the error is %v, want one that names cuda.EventOptions{Timing: true}", err)
	}
	saysGo(t, second(events[0].Export(device)), "cuda.Event.Export")
	_, err = Capture(CaptureOptions{Stream: s.Stream}, func() error {
		err := s.Synchronize()
		saysGo(t, err, "cuda.Stream.Synchronize")
		return err
	})
	if !errors.Is(err, ErrCapture) {
		t.Errorf("the capture's error is %v, want ErrCapture", err)
	}
}
