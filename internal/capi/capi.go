// Package capi binds the C header cshim/include/torchstream.h, function by function, with Go types
// and errors. It makes no policy: the header defines ownership, ordering and threads, and the
// packages above give them a Go shape. internal/imagecapi binds the image library; no other package
// calls C.
//
// While a stream sanitizer runs ([StartSanitizer]), the functions that order, use or free memory
// tell it what they did.
//
// # Threads
//
// A goroutine may run on another OS thread at every call. A caller that sets thread state
// (SetCUDAStream, StreamGuardEnter) must therefore hold runtime.LockOSThread until it has restored
// that state.
//
// Calls that can take long (they compute, copy, launch, wait, or take the allocator's lock) pass a
// [gate], which bounds the number of OS threads inside LibTorch. Go gives every blocked call a
// thread of its own, and LibTorch keeps OpenMP teams and library handles for every thread that ever
// entered it. Calls that only read or write a few words pass no gate.
//
// # Pointers
//
// C keeps no pointer beyond the call, with two exceptions: TensorFromMemory, whose memory must be C
// memory, and RegisterPinned, which refuses Go memory unless a runtime.Pinner holds it. No function
// of the header calls back into Go. Functions with out parameters or slices are therefore marked
// noescape and nocallback, so that their arguments can live on the caller's stack; cgo honours
// noescape only together with nocallback.
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

	"github.com/torchstream/torchstream/internal/imagecapi"
)

// Check returns an error if the loaded shim, or the image library whose errors it returns, has
// another ABI version than this package. Functions that create or find the first object of a kind
// call it, so that a program with a wrong shim fails before it can reach any other function. The
// first call also starts the stream sanitizer, if the environment asks for it.
var Check = sync.OnceValue(func() error {
	if err := imagecapi.Check(); err != nil {
		return err
	}
	if got := int(C.ts_abi_version()); got != C.TS_ABI_VERSION {
		return &Error{Code: CodeInternal, Origin: "ts_abi_version", Message: fmt.Sprintf("libtorchstream.so has ABI version %d, this program needs %d: rebuild the shim with `make shim`", got, C.TS_ABI_VERSION)}
	}
	return sanitizeFromEnvironment()
})

// LibTorchVersion returns the version of the LibTorch that the shim was built with.
func LibTorchVersion() string { return C.GoString(C.ts_libtorch_version()) }

// CUDAVersion returns the version of the CUDA that the shim was built with.
func CUDAVersion() string { return C.GoString(C.ts_cuda_version()) }

// C reads these Go structs in place, so each must have the layout of its C counterpart. A size or
// an offset that differs, in either direction, fails to compile.
const (
	_ = -(unsafe.Sizeof(Stream{}) ^ unsafe.Sizeof(C.ts_stream{}))
	_ = -(unsafe.Offsetof(Stream{}.Device) ^ unsafe.Offsetof(C.ts_stream{}.device))

	_ = -(unsafe.Sizeof(StreamGuard{}) ^ unsafe.Sizeof(C.ts_stream_guard{}))
	_ = -(unsafe.Offsetof(StreamGuard{}.Serial) ^ unsafe.Offsetof(C.ts_stream_guard{}.serial))

	_ = -(unsafe.Sizeof(Arg{}) ^ unsafe.Sizeof(C.ts_arg{}))
	_ = -(unsafe.Offsetof(Arg{}.Count) ^ unsafe.Offsetof(C.ts_arg{}.count))
	_ = -(unsafe.Offsetof(Arg{}.Value) ^ unsafe.Offsetof(C.ts_arg{}.value))
)
