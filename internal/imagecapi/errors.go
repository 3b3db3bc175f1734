//go:build linux

package imagecapi

/*
#include <stdlib.h>
#include "torchstream_image.h"

// An error does not copy its origin.
static const char* callback_origin(void) { return "callback"; }
*/
import "C"

import "unsafe"

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

func failure(e *C.ts_error) error {
	if e == nil {
		return nil
	}
	if absent(unsafe.Pointer(e)) {
		return NotLoaded(load())
	}
	return TakeError(unsafe.Pointer(e))
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
