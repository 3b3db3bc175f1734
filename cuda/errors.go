package cuda

import (
	"errors"
	"fmt"

	"github.com/torchstream/torchstream/internal/capi"
)

// Error is a failure that the C++ side returned: its kind (Code), the function that failed (Origin,
// for example "cuda.Elapsed") and its text (Message). Match the kind with errors.Is and the
// sentinels of this package. Offset is only for damaged images, which package imageloader/decode
// reports.
type Error = capi.Error

// Kinds of failure, for errors.Is.
var (
	// The argument can never work.
	ErrInvalidArgument error = capi.CodeInvalidArgument
	// Device, pinned or host memory is exhausted.
	ErrOutOfMemory error = capi.CodeOutOfMemory
	// The machine has no usable GPU, or fewer GPUs than the index needs.
	ErrNoDevice error = capi.CodeNoDevice
	// The shim or LibTorch is not installed, or has another version than this program needs. The
	// message gives the installed and the wanted version, and the command that installs it. Every
	// call that can fail returns this error then.
	ErrNoLibrary error = capi.CodeNoLibrary
	// The driver or the runtime failed. After an illegal access, only ending the process helps.
	ErrCUDA error = capi.CodeCUDA
	// A stream was restored on another OS thread than the thread that set it.
	ErrWrongThread error = capi.CodeWrongThread
	// A stream was restored before a stream that was set after it.
	ErrOutOfOrder error = capi.CodeOutOfOrder
	// An event was used before its first Record, or timed without EventOptions.Timing.
	ErrNotRecorded error = capi.CodeNotRecorded
	// The C++ side or a library below it has a defect.
	ErrInternal error = capi.CodeInternal
	// The call is not possible during a capture, or the capture failed.
	ErrCapture error = capi.CodeCapture
	// The memory of a graph's operand is not where it was at the capture.
	ErrStale error = capi.CodeStale
	// A goroutine, possibly the caller, is inside a section that the call needs exclusively, or
	// another process uses the memory. Call again when the goroutine, or the process, has left.
	ErrBusy error = capi.CodeBusy
	// A library that the call needs is not installed, or has no such function.
	ErrUnsupported error = capi.CodeUnsupported
	// The object is closed.
	ErrClosed = errors.New("cuda: used after Close")
)

// checked adds advice to an error. It is small enough to be inlined, so a call without an error
// pays for one comparison.
func checked(err error) error {
	if err == nil {
		return nil
	}
	return advised(err)
}

func advised(err error) error {
	if !errors.Is(err, ErrNoDevice) || DeviceCount() > 0 {
		return err
	}
	advice := "check that nvidia-smi lists a GPU and that CUDA_VISIBLE_DEVICES does not hide the GPU " +
		"(torchstream doctor says more)"
	if capi.CUDAVersion() == "" {
		advice = "torchstream doctor says more"
	}
	return fmt.Errorf("%w; %s, or run on cuda.CPU", err, advice)
}

func invalid(origin, format string, args ...any) error {
	return &Error{Code: capi.CodeInvalidArgument, Origin: "cuda." + origin, Message: fmt.Sprintf(format, args...)}
}
