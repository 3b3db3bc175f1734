//go:build linux

// Package capi binds the C header cshim/include/torchstream.h, function by function, with Go types
// and errors. It adds no policy: the header defines ownership, ordering and threads, and the
// packages above adapt them to Go. internal/imagecapi binds the image library; no other package
// calls C.
//
// While a stream sanitizer runs ([StartSanitizer]), the functions that order, use or free memory
// report to it.
//
// # Threads
//
// A goroutine may run on another OS thread at every call. A caller that sets thread state
// (SetCUDAStream, StreamGuardEnter) must therefore hold runtime.LockOSThread until it has restored
// that state.
//
// Calls that can take long (they compute, copy, launch, wait, or take the allocator's lock) enter a
// [gate], which bounds the number of OS threads inside LibTorch. Go uses a separate thread for
// every blocked call, and LibTorch keeps OpenMP teams and library handles for every thread that
// ever entered it. Calls that only read or write a few words enter no gate.
//
// # Pointers
//
// C keeps no pointer beyond the call, with two exceptions: TensorFromMemory, whose memory must be C
// memory, and RegisterPinned, which refuses Go memory unless a runtime.Pinner holds it. Only the
// two functions that run a backward pass call back into Go ([Callback]). All others with out
// parameters or slices are marked noescape and nocallback, so that their arguments can live on the
// caller's stack; cgo honours noescape only together with nocallback.
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
	"github.com/torchstream/torchstream/internal/system"
)

//go:generate go run ../trampoline . ../../cshim/include/torchstream.h

// LibraryName is the file name of the shim.
const LibraryName = "libtorchstream.so"

// abiVersion is the header version that this package is compiled with.
const abiVersion = C.TS_ABI_VERSION

// loaded is true once every function can be called.
var loaded atomic.Bool

// Check loads the shim and the image library, if they are not loaded yet. If a library is missing
// or has another version than this package, Check returns an error that wraps [CodeNoLibrary].
// Every function that needs no object, and so can be a program's first call, calls Check. The first
// call also bounds LibTorch's threads, and starts the stream sanitizer if the environment requests
// it.
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

// boundThreads bounds LibTorch's threads inside an operator by GOMAXPROCS and by the CPU quota of
// the process's cgroup, rounded up. LibTorch counts cores, and GOMAXPROCS is at least 2 under a
// quota. With more threads than the quota has CPUs, threads wait for others that the kernel has
// throttled. The environment variables for the two numbers of threads take precedence.
func boundThreads() error {
	if os.Getenv("OMP_NUM_THREADS") != "" || os.Getenv("MKL_NUM_THREADS") != "" {
		return nil
	}
	threads := runtime.GOMAXPROCS(0)
	if os.Getenv("GOMAXPROCS") == "" {
		threads = system.WithinQuota(threads, system.CPUQuota(os.DirFS("/")))
	}
	limit := C.int32_t(min(threads, math.MaxInt32))
	if C.ts_parallelism() <= limit {
		return nil
	}
	return failure(C.ts_parallelism_set(limit))
}

// open opens the shim, and checks that LibTorch has the version for which the shim was built.
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

// LibTorchVersion returns the LibTorch version that the shim was built with, or "" without the
// shim.
func LibTorchVersion() string {
	if Check() != nil {
		return ""
	}
	return C.GoString(C.ts_libtorch_version())
}

// CUDAVersion returns the CUDA version that the shim was built with. It returns "" without the
// shim, or if the shim was built without CUDA.
func CUDAVersion() string {
	if Check() != nil {
		return ""
	}
	return C.GoString(C.ts_cuda_version())
}

// C reads these Go structs in place, so each must have the layout of its C counterpart. A size or
// offset that differs fails to compile.
const (
	_ = -(unsafe.Sizeof(Stream{}) ^ unsafe.Sizeof(C.ts_stream{}))
	_ = -(unsafe.Offsetof(Stream{}.Device) ^ unsafe.Offsetof(C.ts_stream{}.device))

	_ = -(unsafe.Sizeof(StreamGuard{}) ^ unsafe.Sizeof(C.ts_stream_guard{}))
	_ = -(unsafe.Offsetof(StreamGuard{}.Serial) ^ unsafe.Offsetof(C.ts_stream_guard{}.serial))

	_ = -(unsafe.Sizeof(Arg{}) ^ unsafe.Sizeof(C.ts_arg{}))
	_ = -(unsafe.Offsetof(Arg{}.Count) ^ unsafe.Offsetof(C.ts_arg{}.count))
	_ = -(unsafe.Offsetof(Arg{}.Value) ^ unsafe.Offsetof(C.ts_arg{}.value))
)
