package capi

/*
#include "torchstream_bench.h"
#cgo nocallback ts_bench_noop
#cgo noescape ts_bench_add
#cgo nocallback ts_bench_add
#cgo noescape ts_bench_operator
#cgo nocallback ts_bench_operator
#cgo noescape ts_bench_peer
#cgo nocallback ts_bench_peer
#cgo noescape ts_bench_nvjpeg
#cgo nocallback ts_bench_nvjpeg
*/
import "C"

import (
	"unsafe"

	"github.com/torchstream/torchstream/internal/imagecapi"
)

// Noop makes a call into C that does nothing, to measure the cost of a call.
func Noop() { C.ts_bench_noop() }

// BenchAdd returns the host nanoseconds that one addition takes when C++ calls it directly: in
// place, out of place with each result freed at once, and out of place with results freed many at a
// time.
func BenchAdd(device int32, rounds int) (inPlace, outOfPlace, held float64, err error) {
	if err := Check(); err != nil {
		return inPlace, outOfPlace, held, err
	}
	computing.enter()
	defer computing.leave()
	var i, o, h C.double
	err = failure(C.ts_bench_add(C.int32_t(device), C.int32_t(rounds), &i, &o, &h))
	return float64(i), float64(o), float64(h), err
}

// BenchOperator returns the host nanoseconds that one call of an operator on tiny tensors takes in
// C++, in rounds of 400 calls. The names are those of cshim/src/bench/operators.cc.
func BenchOperator(device int32, name string, rounds int) (nanoseconds float64, err error) {
	if err := Check(); err != nil {
		return nanoseconds, err
	}
	text := append([]byte(name), 0)
	computing.enter()
	defer computing.leave()
	var ns C.double
	err = failure(C.ts_bench_operator(C.int32_t(device), (*C.char)(unsafe.Pointer(&text[0])), C.int32_t(rounds), &ns))
	return float64(ns), err
}

// BenchPeer returns the seconds that one copy of the given bytes between two GPUs takes.
func BenchPeer(dst, src int32, bytes, rounds int) (seconds float64, err error) {
	if err := Check(); err != nil {
		return seconds, err
	}
	waiting.enter()
	defer waiting.leave()
	var ns C.double
	err = failure(C.ts_bench_peer(C.int32_t(dst), C.int32_t(src), C.size_t(bytes), C.int32_t(rounds), &ns))
	return float64(ns) / 1e9, err
}

// The implementations of nvJPEG that BenchNVJPEG measures.
const (
	NVJPEGCUDA     = C.TS_BENCH_NVJPEG_CUDA     // Huffman codes on CUDA cores too, in large batches
	NVJPEGHardware = C.TS_BENCH_NVJPEG_HARDWARE // the GPU's JPEG engines
)

// NVJPEGRate has the members of ts_bench_nvjpeg_rate.
type NVJPEGRate struct {
	Images, LeftOut, Batch  int64
	Seconds, CPUSeconds     float64
	Engines, CoresPerEngine int32
}

// BenchNVJPEG calls ts_bench_nvjpeg: it decodes JPEGs, which lie behind one another in data, with
// nvJPEG for so many seconds, whole ones into the GPU's memory. It blocks.
func BenchNVJPEG(device int32, implementation int, data []byte, sizes []uintptr, batch, threads int, seconds float64) (NVJPEGRate, error) {
	if err := Check(); err != nil {
		return NVJPEGRate{}, err
	}
	sum := uintptr(0)
	for _, size := range sizes {
		if size > uintptr(len(data))-sum {
			return NVJPEGRate{}, imagecapi.NewFailure(CodeInvalidArgument, "the images have more bytes than data")
		}
		sum += size
	}
	waiting.enter()
	defer waiting.leave()
	var r C.ts_bench_nvjpeg_rate
	err := failure(C.ts_bench_nvjpeg(C.int32_t(device), C.int32_t(implementation), (*C.uint8_t)(unsafe.SliceData(data)),
		(*C.size_t)(unsafe.Pointer(unsafe.SliceData(sizes))), C.int64_t(len(sizes)), C.int64_t(batch), C.int32_t(threads), C.double(seconds), &r))
	return NVJPEGRate{int64(r.images), int64(r.left_out), int64(r.batch), float64(r.seconds), float64(r.cpu_seconds), int32(r.engines), int32(r.cores_per_engine)}, err
}
