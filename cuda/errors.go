package cuda

import (
	"errors"
	"fmt"

	"github.com/torchstream/torchstream/internal/capi"
)

// Error is a failure that the C++ side returned: its kind (Code), the C function that failed
// (Origin) and its text (Message). Match the kind with errors.Is and the sentinels of this package.
type Error = capi.Error

// Kinds of failure, for errors.Is.
var (
	ErrInvalidArgument error = capi.CodeInvalidArgument // an argument that can never work
	ErrOutOfMemory     error = capi.CodeOutOfMemory     // device, pinned or host memory
	ErrNoDevice        error = capi.CodeNoDevice        // there is no usable GPU, or not that many
	ErrCUDA            error = capi.CodeCUDA            // the driver or runtime failed; after an illegal access only ending the process helps
	ErrWrongThread     error = capi.CodeWrongThread     // a stream was restored on another OS thread than it was set on
	ErrOutOfOrder      error = capi.CodeOutOfOrder      // a stream was restored before one that was set after it
	ErrNotRecorded     error = capi.CodeNotRecorded     // an event was used before its first Record, or timed without EventOptions.Timing
	ErrInternal        error = capi.CodeInternal        // a defect of the C++ side or of a library below it
	ErrCapture         error = capi.CodeCapture         // not possible while a graph is captured, or the capture failed
	ErrStale           error = capi.CodeStale           // what a graph works on does not lie where it was captured
	ErrBusy            error = capi.CodeBusy            // a goroutine (it may be this one) is inside what the call needs for itself: call again when it has left
	ErrClosed                = errors.New("cuda: used after Close")
)

// checked adds to an error what to do about it. It is small enough to be inlined: the path without
// an error costs a comparison.
func checked(err error) error {
	if err == nil {
		return nil
	}
	return advised(err)
}

func advised(err error) error {
	if errors.Is(err, ErrNoDevice) && DeviceCount() == 0 {
		return fmt.Errorf("%w; see that nvidia-smi lists a GPU and that CUDA_VISIBLE_DEVICES does not hide it (torchstream doctor says more), or run on cuda.CPU", err)
	}
	return err
}

func invalid(origin, format string, args ...any) error {
	return &Error{Code: capi.CodeInvalidArgument, Origin: origin, Message: fmt.Sprintf(format, args...)}
}
