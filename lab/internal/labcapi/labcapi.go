// Package labcapi binds the C header lab/cshim/include/torchstream_lab.h, which declares the C++
// peers of torchstream-lab. Package capi binds the library that they measure.
package labcapi

/*
#cgo CFLAGS: -I${SRCDIR}/../../cshim/include -I${SRCDIR}/../../../cshim/include
#include "torchstream_lab.h"
#cgo nocallback ts_bench_noop
#cgo noescape ts_bench_add
#cgo nocallback ts_bench_add
#cgo noescape ts_bench_operator
#cgo nocallback ts_bench_operator
#cgo noescape ts_bench_nvjpeg
#cgo nocallback ts_bench_nvjpeg

const char* torchstream_labcapi_bind(void* library);
*/
import "C"

import (
	"sync"
	"unsafe"

	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/internal/imagecapi"
	"github.com/torchstream/torchstream/internal/library"
)

//go:generate go run ../../../internal/trampoline . ../../cshim/include/torchstream_lab.h

// LibraryName is the library's file name.
const LibraryName = "libtorchstream_lab.so"

var loading struct {
	once sync.Once
	err  error
}

// Check loads the shim and this package's library, unless they are loaded. If it cannot load them,
// its error wraps [imagecapi.CodeNoLibrary]. Every function of this package except Noop calls it.
// Until the library is loaded Noop does nothing.
func Check() error {
	loading.once.Do(func() {
		if loading.err = capi.Check(); loading.err != nil {
			return
		}
		_, loading.err = imagecapi.OpenLibrary(library.Here(imagecapi.Version()), LibraryName,
			"ts_bench_abi_version", C.TS_ABI_VERSION, bind)
	})
	return loading.err
}

// bind fills the table of functions.
func bind(handle unsafe.Pointer) string {
	if missing := C.torchstream_labcapi_bind(handle); missing != nil {
		return C.GoString(missing)
	}
	return ""
}

// failure takes ownership of a C error and returns it as a Go error; nil stays nil. The library
// must be loaded.
func failure(e *C.ts_error) error {
	if e == nil {
		return nil
	}
	return imagecapi.TakeError(unsafe.Pointer(e))
}

// Noop calls a C function that does nothing, to measure the cost of a call.
func Noop() { C.ts_bench_noop() }

// Add returns the host nanoseconds of one addition called directly from C++: in place, out of place
// with each result freed at once, and out of place with results freed in bulk.
func Add(device int32, rounds int) (inPlace, outOfPlace, held float64, err error) {
	if err := Check(); err != nil {
		return inPlace, outOfPlace, held, err
	}
	var i, o, h C.double
	err = failure(C.ts_bench_add(C.int32_t(device), C.int32_t(rounds), &i, &o, &h))
	return float64(i), float64(o), float64(h), err
}

// Operator returns the host nanoseconds of one operator call on tiny tensors in C++, measured in
// rounds of 400 calls. lab/cshim/src/lab/operators.cc defines the names.
func Operator(device int32, name string, rounds int) (nanoseconds float64, err error) {
	if err := Check(); err != nil {
		return nanoseconds, err
	}
	text := append([]byte(name), 0)
	var ns C.double
	err = failure(C.ts_bench_operator(C.int32_t(device), (*C.char)(unsafe.Pointer(&text[0])), C.int32_t(rounds), &ns))
	return float64(ns), err
}

// nvJPEG backends that NVJPEG measures.
const (
	NVJPEGCUDA     = C.TS_BENCH_NVJPEG_CUDA     // Huffman decoding on CUDA cores too, in large batches
	NVJPEGHardware = C.TS_BENCH_NVJPEG_HARDWARE // the GPU's JPEG engines
)

// NVJPEGRate mirrors ts_bench_nvjpeg_rate.
type NVJPEGRate struct {
	Images, LeftOut, Batch  int64
	Seconds, CPUSeconds     float64
	Engines, CoresPerEngine int32
}

// NVJPEG calls ts_bench_nvjpeg. It decodes JPEGs with nvJPEG for the given number of seconds, as
// whole images into GPU memory. data holds the JPEGs back to back. NVJPEG blocks.
func NVJPEG(device int32, implementation int, data []byte, sizes []uintptr, batch, threads int,
	seconds float64) (NVJPEGRate, error) {
	if err := Check(); err != nil {
		return NVJPEGRate{}, err
	}
	sum := uintptr(0)
	for _, size := range sizes {
		if size > uintptr(len(data))-sum {
			return NVJPEGRate{}, imagecapi.NewFailure(capi.CodeInvalidArgument, "the images have more bytes than data")
		}
		sum += size
	}
	var r C.ts_bench_nvjpeg_rate
	err := failure(C.ts_bench_nvjpeg(C.int32_t(device), C.int32_t(implementation), (*C.uint8_t)(unsafe.SliceData(data)),
		(*C.size_t)(unsafe.Pointer(unsafe.SliceData(sizes))), C.int64_t(len(sizes)), C.int64_t(batch),
		C.int32_t(threads), C.double(seconds), &r))
	return NVJPEGRate{int64(r.images), int64(r.left_out), int64(r.batch), float64(r.seconds),
		float64(r.cpu_seconds), int32(r.engines), int32(r.cores_per_engine)}, err
}
