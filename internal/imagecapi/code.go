package imagecapi

import (
	"errors"
	"fmt"
	"strings"
)

// Code is the kind of failure of an [Error]. A Code is itself an error, so that errors.Is(err,
// CodeOutOfMemory) works on any error that wraps an *Error.
type Code int32

func (c Code) Error() string {
	switch c {
	case CodeInvalidArgument:
		return "invalid argument"
	case CodeOutOfMemory:
		return "out of memory"
	case CodeNoDevice:
		return "no CUDA device"
	case CodeCUDA:
		return "CUDA error"
	case CodeWrongThread:
		return "stream guard left on another thread"
	case CodeOutOfOrder:
		return "stream guard left out of order"
	case CodeNotRecorded:
		return "event not recorded"
	case CodeNotFound:
		return "no such operator"
	case CodeOperator:
		return "operator error"
	case CodeDecode:
		return "damaged image"
	case CodeUnsupported:
		return "not supported"
	case CodeCapture:
		return "graph capture"
	case CodeStale:
		return "stale graph"
	case CodeBusy:
		return "busy"
	case CodeCallback:
		return "error of a callback"
	case CodeNoLibrary:
		return "library not loaded"
	}
	return "internal error"
}

// Error is a failure that the shim returned.
type Error struct {
	Code    Code
	Origin  string // the function that failed, for example "cuda.Elapsed"
	Message string
	// Offset is the decoder's position in the image's bytes when it found the damage of CodeDecode,
	// or -1 if unknown. It is undefined for other codes.
	Offset int64
}

func (e *Error) Error() string        { return fmt.Sprintf("%s: %s: %s", e.Origin, e.Code.Error(), e.Message) }
func (e *Error) Is(target error) bool { return target == e.Code }

// NewFailure returns an error whose origin is the exported function that the program called.
func NewFailure(code Code, message string) *Error {
	return &Error{Code: code, Origin: callName(), Message: message}
}

// NotLoaded returns the error for a call made before the library was loaded. err is the error of
// loading the library, and NotLoaded returns it. If err is nil, the program has not called Check,
// and the error says so.
func NotLoaded(err error) error {
	if err == nil {
		err = NewFailure(CodeInternal,
			"a function was called before its library was loaded: this is a defect of torchstream")
	}
	return err
}

// Version returns the version of torchstream in the headers that the program was built with.
func Version() string { return fmt.Sprintf("%d.%d.%d", versionMajor, versionMinor, versionPatch) }

// CutOff reports whether an error of Inflate means that the stream ends too early. Otherwise the
// stream is damaged.
func CutOff(err error) bool {
	var e *Error
	return errors.As(err, &e) && e.Code == CodeDecode && strings.HasSuffix(e.Message, "cut off")
}

// FoundBytes returns the size in bytes of a GPU's result for PackEntries.
func (s *Search) FoundBytes() int { return searchEntryBytes * int(s.Entries) }
