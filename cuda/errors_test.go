package cuda

import (
	"errors"
	"fmt"
	"testing"
)

func TestSentinelsMatchOnlyThemselves(t *testing.T) {
	sentinels := []error{ErrInvalidArgument, ErrOutOfMemory, ErrNoDevice, ErrCUDA, ErrWrongThread, ErrOutOfOrder, ErrNotRecorded, ErrInternal, ErrCapture, ErrStale, ErrClosed}
	for i, a := range sentinels {
		for j, b := range sentinels {
			if got := errors.Is(fmt.Errorf("batch 3: %w", a), b); got != (i == j) {
				t.Errorf("errors.Is(%v, %v) is %v", a, b, got)
			}
		}
	}
	err := invalid("NewPinned", "%d bytes", 0)
	var e *Error
	if !errors.As(err, &e) || e.Origin != "NewPinned" || e.Message != "0 bytes" || !errors.Is(err, ErrInvalidArgument) {
		t.Errorf("got %#v", err)
	}
}
