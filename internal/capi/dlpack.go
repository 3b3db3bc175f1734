//go:build linux

package capi

/*
#include "torchstream.h"
#cgo noescape ts_dlpack_export
#cgo nocallback ts_dlpack_export
#cgo noescape ts_dlpack_export_versioned
#cgo nocallback ts_dlpack_export_versioned
#cgo nocallback ts_dlpack_import
#cgo nocallback ts_dlpack_import_versioned
*/
import "C"

import (
	"unsafe"

	"github.com/torchstream/torchstream/internal/imagecapi"
)

const (
	DLPackNoOrder  = C.TS_DLPACK_FLAG_NO_ORDER
	DLPackReadOnly = C.TS_DLPACK_FLAG_READ_ONLY
)

// ExportDLPack returns a DLManagedTensorVersioned, or a DLManagedTensor, over the tensor's memory.
func ExportDLPack(t *Tensor, stream Stream, flags int32, versioned bool) (managed unsafe.Pointer, err error) {
	waiting.enter() // for copies to host memory
	defer waiting.leave()
	export := func() error {
		if versioned {
			var m *C.struct_DLManagedTensorVersioned
			err := failure(C.ts_dlpack_export_versioned(t, stream.c(), C.int32_t(flags), &m))
			managed = unsafe.Pointer(m)
			return err
		}
		var m *C.struct_DLManagedTensor
		err := failure(C.ts_dlpack_export(t, stream.c(), C.int32_t(flags), &m))
		managed = unsafe.Pointer(m)
		return err
	}
	s := sanitizer.Load()
	if s == nil {
		err = export()
		return managed, err
	}
	err = s.call(export, func() { s.freed("Tensor.ToDLPack") })
	if info, unknown := DescribeTensor(t); err == nil && unknown == nil && info.Device >= 0 &&
		flags&DLPackNoOrder == 0 {
		if stream.ID == 0 {
			stream.Device = info.Device // a default stream means the one of the tensor's device
		}
		s.recordStream(t, stream)
	}
	return managed, err
}

// ImportDLPack returns a tensor over the struct's memory. It takes ownership of the struct if it
// succeeds.
func ImportDLPack(managed unsafe.Pointer, stream Stream, flags int32, versioned bool) (t *Tensor, err error) {
	if err := Check(); err != nil {
		return nil, err
	}
	if mustNotKeep((*C.uint8_t)(managed)) {
		return nil, imagecapi.NewFailure(CodeInvalidArgument,
			"the struct is Go memory, which the garbage collector may reuse: DLPack structs are C memory")
	}
	computing.enter()
	defer computing.leave()
	var made *Tensor
	imported := func() error {
		if versioned {
			return failure(C.ts_dlpack_import_versioned((*C.struct_DLManagedTensorVersioned)(managed),
				stream.c(), C.int32_t(flags), &made))
		}
		return failure(C.ts_dlpack_import((*C.struct_DLManagedTensor)(managed), stream.c(), C.int32_t(flags), &made))
	}
	if s := sanitizer.Load(); s != nil {
		err = s.call(imported, func() { s.freed("torch.FromDLPack") })
	} else {
		err = imported()
	}
	return made, err
}

// FreeDLPack calls the struct's deleter, which may be Go code: the call may call back into Go.
func FreeDLPack(managed unsafe.Pointer, versioned bool) {
	if Check() != nil {
		return // no struct can exist without the library
	}
	if versioned {
		C.ts_dlpack_free_versioned((*C.struct_DLManagedTensorVersioned)(managed))
	} else {
		C.ts_dlpack_free((*C.struct_DLManagedTensor)(managed))
	}
}
