// Package capi is the only package that speaks to the C++ shim: it turns the C header cshim/include/torchstream.h into Go types and errors, function by
// function, and decides nothing. Ownership, ordering and threads are what the header says; the packages above give them a Go shape.
//
// # Threads
//
// A goroutine may be on another OS thread at every call, so whoever sets thread state (SetCUDAStream, StreamGuardEnter) must hold runtime.LockOSThread from
// there until it is undone. Calls that compute, copy or wait pass a [gate]: it bounds how many OS threads are inside LibTorch at once, because LibTorch keeps
// OpenMP teams and library handles for every thread that ever entered it.
package capi

/*
#cgo CFLAGS: -I${SRCDIR}/../../cshim/include
#cgo LDFLAGS: -L${SRCDIR}/../../cshim/build/lib -ltorchstream -Wl,-rpath,${SRCDIR}/../../cshim/build/lib
#include "torchstream.h"
*/
import "C"

import (
	"fmt"
	"sync"
	"unsafe"
)

// Check reports whether the loaded shim is the one that this package was written for.
var Check = sync.OnceValue(func() error {
	if got := int(C.ts_abi_version()); got != C.TS_ABI_VERSION {
		return fmt.Errorf("capi: libtorchstream.so has ABI version %d, this program needs %d: rebuild the shim with `make shim`", got, C.TS_ABI_VERSION)
	}
	return nil
})

// Versions of what the shim was built with.
func LibTorchVersion() string { return C.GoString(C.ts_libtorch_version()) }
func CUDAVersion() string     { return C.GoString(C.ts_cuda_version()) }
func JPEGVersion() string     { return C.GoString(C.ts_jpeg_version()) }

// The Go structs that C reads in place have the size of their C twins: a difference in either direction fails to compile.
var (
	_ [unsafe.Sizeof(Stream{}) - unsafe.Sizeof(C.ts_stream{})]byte
	_ [unsafe.Sizeof(C.ts_stream{}) - unsafe.Sizeof(Stream{})]byte
	_ [unsafe.Sizeof(StreamGuard{}) - unsafe.Sizeof(C.ts_stream_guard{})]byte
	_ [unsafe.Sizeof(C.ts_stream_guard{}) - unsafe.Sizeof(StreamGuard{})]byte
	_ [unsafe.Sizeof(MemoryStats{}) - unsafe.Sizeof(C.ts_memory_stats{})]byte
	_ [unsafe.Sizeof(C.ts_memory_stats{}) - unsafe.Sizeof(MemoryStats{})]byte
	_ [unsafe.Sizeof(Arg{}) - unsafe.Sizeof(C.ts_arg{})]byte
	_ [unsafe.Sizeof(C.ts_arg{}) - unsafe.Sizeof(Arg{})]byte
	_ [unsafe.Sizeof(ImageGeometry{}) - unsafe.Sizeof(C.ts_image_geometry{})]byte
	_ [unsafe.Sizeof(C.ts_image_geometry{}) - unsafe.Sizeof(ImageGeometry{})]byte
)
