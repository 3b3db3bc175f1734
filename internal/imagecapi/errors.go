package imagecapi

/*
#include <stdlib.h>
#include "torchstream_image.h"

// An error does not copy its origin.
static const char* callback_origin(void) { return "callback"; }
*/
import "C"

import (
	"fmt"
	"unsafe"
)

// Code is the kind of failure of an [Error]. A Code is itself an error, so that errors.Is(err,
// CodeOutOfMemory) works on any error that wraps an *Error.
type Code int32

const (
	CodeInvalidArgument Code = C.TS_ERROR_INVALID_ARGUMENT
	CodeOutOfMemory     Code = C.TS_ERROR_OUT_OF_MEMORY
	CodeNoDevice        Code = C.TS_ERROR_NO_DEVICE
	CodeCUDA            Code = C.TS_ERROR_CUDA
	CodeWrongThread     Code = C.TS_ERROR_WRONG_THREAD
	CodeOutOfOrder      Code = C.TS_ERROR_OUT_OF_ORDER
	CodeNotRecorded     Code = C.TS_ERROR_NOT_RECORDED
	CodeNotFound        Code = C.TS_ERROR_NOT_FOUND
	CodeOperator        Code = C.TS_ERROR_OPERATOR
	CodeDecode          Code = C.TS_ERROR_DECODE
	CodeUnsupported     Code = C.TS_ERROR_UNSUPPORTED
	CodeInternal        Code = C.TS_ERROR_INTERNAL
	CodeCapture         Code = C.TS_ERROR_CAPTURE
	CodeStale           Code = C.TS_ERROR_STALE
	CodeBusy            Code = C.TS_ERROR_BUSY
	CodeCallback        Code = C.TS_ERROR_CALLBACK

	// CodeNoLibrary is the code of errors that this package returns without C: a shared library is
	// missing or unusable.
	CodeNoLibrary Code = -1
)

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

func failure(e *C.ts_error) error {
	if e == nil {
		return nil
	}
	if absent(unsafe.Pointer(e)) {
		return NotLoaded(load())
	}
	return TakeError(unsafe.Pointer(e))
}

// NewFailure returns an error whose origin is the exported function that the program called.
func NewFailure(code Code, message string) *Error {
	return &Error{Code: code, Origin: callName(), Message: message}
}

// NotLoaded returns the error for a call made before the library was loaded. This is err, the error
// of loading the library. If err is nil, it is an error about the missing call of Check.
func NotLoaded(err error) error {
	if err == nil {
		err = NewFailure(CodeInternal,
			"a function was called before its library was loaded: this is a defect of torchstream")
	}
	return err
}

// TakeError takes ownership of a non-NULL ts_error and returns its Go form, without C names: the
// origin is the exported function that the program called. The pointer is untyped because cgo gives
// each package a separate C type.
func TakeError(p unsafe.Pointer) *Error {
	e := (*C.ts_error)(p)
	err := NewFailure(Code(C.ts_error_code(e)), goWords(C.GoString(C.ts_error_message(e))))
	err.Offset = int64(C.ts_error_offset(e))
	C.ts_error_free(e)
	return err
}

// NewError returns a new ts_error for a Go function called from C. The pointer is untyped for the
// same reason as in TakeError.
func NewError(code Code, message string) unsafe.Pointer {
	text := C.CString(message)
	defer C.free(unsafe.Pointer(text))
	return unsafe.Pointer(C.ts_error_new(C.int32_t(code), C.callback_origin(), text))
}
