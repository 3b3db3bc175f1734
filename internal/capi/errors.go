//go:build linux

package capi

/*
#include "torchstream.h"
extern char torchstream_capi_absent;
*/
import "C"

import (
	"unsafe"

	"github.com/torchstream/torchstream/internal/imagecapi"
)

// Error is a failure that the shim returned. Both C headers share one set of errors.
type Error = imagecapi.Error

// Code is the kind of failure of an [Error].
type Code = imagecapi.Code

const (
	CodeInvalidArgument = imagecapi.CodeInvalidArgument
	CodeOutOfMemory     = imagecapi.CodeOutOfMemory
	CodeNoDevice        = imagecapi.CodeNoDevice
	CodeCUDA            = imagecapi.CodeCUDA
	CodeWrongThread     = imagecapi.CodeWrongThread
	CodeOutOfOrder      = imagecapi.CodeOutOfOrder
	CodeNotRecorded     = imagecapi.CodeNotRecorded
	CodeNotFound        = imagecapi.CodeNotFound
	CodeOperator        = imagecapi.CodeOperator
	CodeDecode          = imagecapi.CodeDecode
	CodeUnsupported     = imagecapi.CodeUnsupported
	CodeInternal        = imagecapi.CodeInternal
	CodeCapture         = imagecapi.CodeCapture
	CodeStale           = imagecapi.CodeStale
	CodeBusy            = imagecapi.CodeBusy
	CodeCallback        = imagecapi.CodeCallback
	CodeNoLibrary       = imagecapi.CodeNoLibrary
)

// failure takes ownership of a C error and returns its Go form; nil stays nil.
func failure(e *C.ts_error) error {
	if e == nil {
		return nil
	}
	if unsafe.Pointer(e) == unsafe.Pointer(&C.torchstream_capi_absent) {
		return imagecapi.NotLoaded(load())
	}
	return imagecapi.TakeError(unsafe.Pointer(e))
}
