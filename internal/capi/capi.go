// Package capi is the only package that speaks to the C++ shim: it turns the C header
// cshim/include/torchstream.h into Go types and errors, function by function, and decides nothing.
// Ownership, ordering and threads are what the header says; the packages above give them a Go
// shape.
//
// # Threads
//
// A goroutine may be on another OS thread at every call, so whoever sets thread state
// (SetCUDAStream, StreamGuardEnter) must hold runtime.LockOSThread from there until it is undone.
// Calls that can take long (they compute, copy, launch, wait, or take the allocator's lock) pass a
// [gate]: it bounds how many OS threads are inside LibTorch at once, because Go gives every blocked
// call a thread of its own, and LibTorch keeps OpenMP teams and library handles for every thread
// that ever entered it. Calls that only read or write a few words pass none.
//
// # Pointers
//
// C keeps no pointer that it gets here beyond the call, with one exception, TensorFromMemory, whose
// memory must be C memory. No function of the header calls back into Go. So functions with out
// parameters or slices are marked noescape and nocallback, and what they point to can live on the
// caller's stack: cgo heeds noescape only beside nocallback.
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

// Check reports whether the loaded shim is the one that this package was written for. The functions
// that make or find the first object of their kind call it, so that no other can be reached past a
// wrong shim.
var Check = sync.OnceValue(func() error {
	if got := int(C.ts_abi_version()); got != C.TS_ABI_VERSION {
		return &Error{Code: CodeInternal, Origin: "ts_abi_version", Message: fmt.Sprintf("libtorchstream.so has ABI version %d, this program needs %d: rebuild the shim with `make shim`", got, C.TS_ABI_VERSION)}
	}
	return nil
})

// Versions of what the shim was built with.
func LibTorchVersion() string { return C.GoString(C.ts_libtorch_version()) }
func CUDAVersion() string     { return C.GoString(C.ts_cuda_version()) }

// The Go structs that C reads in place are laid out as their C twins: a difference of a size or an
// offset, in either direction, fails to compile.
const (
	_ = -(unsafe.Sizeof(Stream{}) ^ unsafe.Sizeof(C.ts_stream{}))
	_ = -(unsafe.Offsetof(Stream{}.Device) ^ unsafe.Offsetof(C.ts_stream{}.device))

	_ = -(unsafe.Sizeof(StreamGuard{}) ^ unsafe.Sizeof(C.ts_stream_guard{}))
	_ = -(unsafe.Offsetof(StreamGuard{}.Serial) ^ unsafe.Offsetof(C.ts_stream_guard{}.serial))

	_ = -(unsafe.Sizeof(Arg{}) ^ unsafe.Sizeof(C.ts_arg{}))
	_ = -(unsafe.Offsetof(Arg{}.Count) ^ unsafe.Offsetof(C.ts_arg{}.count))
	_ = -(unsafe.Offsetof(Arg{}.Value) ^ unsafe.Offsetof(C.ts_arg{}.value))
)
