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
// memory, and RegisterPinned, which refuses Go memory unless a runtime.Pinner holds it. The two
// functions that run a backward pass call back into Go ([Callback]), and no other function of the
// header does. The others with out parameters or slices are therefore marked noescape and
// nocallback, so that their arguments can live on the caller's stack; cgo honours noescape only
// together with nocallback.
package capi

/*
#cgo CFLAGS: -I${SRCDIR}/../../cshim/include
#include "torchstream.h"

extern char torchstream_capi_absent;
const char* torchstream_capi_bind(void* library);
*/
import "C"

import (
	"math"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"unsafe"

	_ "github.com/torchstream/torchstream/cshim/include" // the headers, for go mod vendor
	"github.com/torchstream/torchstream/internal/imagecapi"
	"github.com/torchstream/torchstream/internal/library"
)

//go:generate go run ../trampoline . ../../cshim/include/torchstream.h

// LibraryName is the file name of the shim.
const LibraryName = "libtorchstream.so"

// abiVersion is the version of the header that this package is compiled with.
const abiVersion = C.TS_ABI_VERSION

// loaded is true once every function can be called.
var loaded atomic.Bool

// Check loads the shim and the image library, if nobody has done so yet, and returns an error that
// wraps [CodeNoLibrary] if that is not possible: there is none, or it has another version than this
// package. Every function that needs no object, and so can be the first of a program, calls Check.
// The first call also bounds LibTorch's threads, and starts the stream sanitizer, if the
// environment asks for it.
func Check() error {
	if loaded.Load() {
		return nil
	}
	return load()
}

var loading struct {
	once sync.Once
	err  error
}

func load() error {
	loading.once.Do(func() {
		if loading.err = imagecapi.Check(); loading.err != nil {
			return
		}
		if loading.err = open(library.Here(imagecapi.Version())); loading.err != nil {
			return
		}
		if loading.err = boundThreads(); loading.err != nil {
			return
		}
		loading.err = sanitizeFromEnvironment()
		loaded.Store(loading.err == nil)
	})
	return loading.err
}

// boundThreads bounds LibTorch's threads inside an operator by GOMAXPROCS, which follows the CPU
// quota of the process's cgroup. LibTorch counts cores, and more threads than the quota has CPUs
// wait for each other while the kernel holds some of them back. The variables by which users set
// LibTorch's threads take precedence.
func boundThreads() error {
	if os.Getenv("OMP_NUM_THREADS") != "" || os.Getenv("MKL_NUM_THREADS") != "" {
		return nil
	}
	limit := C.int32_t(min(runtime.GOMAXPROCS(0), math.MaxInt32))
	if C.ts_parallelism() <= limit {
		return nil
	}
	return failure(C.ts_parallelism_set(limit))
}

// open opens the shim, and checks that LibTorch has the version that the shim was built for.
func open(search library.Search) error {
	path, err := imagecapi.OpenLibrary(search, LibraryName, "ts_abi_version", abiVersion, bind)
	if err != nil {
		return err
	}
	if message := search.OtherLibTorch(path, C.GoString(C.ts_libtorch_version())); message != "" {
		return &Error{Code: CodeNoLibrary, Origin: LibraryName, Message: message}
	}
	return nil
}

// bind fills the table of this package's functions.
func bind(handle unsafe.Pointer) string {
	if missing := C.torchstream_capi_bind(handle); missing != nil {
		return C.GoString(missing)
	}
	return ""
}

// LibTorchVersion returns the version of the LibTorch that the shim was built with, or "" without
// the shim.
func LibTorchVersion() string {
	if Check() != nil {
		return ""
	}
	return C.GoString(C.ts_libtorch_version())
}

// CUDAVersion returns the version of the CUDA that the shim was built with, or "" if it was built
// without CUDA, or without the shim.
func CUDAVersion() string {
	if Check() != nil {
		return ""
	}
	return C.GoString(C.ts_cuda_version())
}

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
