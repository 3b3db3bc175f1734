//go:build linux

package capi

/*
#include "torchstream.h"
#cgo nocallback ts_gpu_inflater_new
#cgo nocallback ts_gpu_inflater_free
#cgo nocallback ts_gpu_inflater_head_bytes
#cgo nocallback ts_gpu_inflater_run
*/
import "C"

import (
	"unsafe"

	"github.com/torchstream/torchstream/internal/imagecapi"
)

// GPUInflater is a ts_gpu_inflater.
type GPUInflater = C.ts_gpu_inflater

func NewGPUInflater(device int32, maxRanges, stagingBytes int) (i *GPUInflater, err error) {
	if err := Check(); err != nil {
		return nil, err
	}
	computing.enter()
	defer computing.leave()
	err = failure(C.ts_gpu_inflater_new(C.int32_t(device), C.int64_t(maxRanges), C.size_t(stagingBytes), &i))
	return i, err
}

func FreeGPUInflater(i *GPUInflater) {
	C.ts_gpu_inflater_free(i)
	if s := sanitizer.Load(); s != nil {
		s.freed("the end of an inflater")
	}
}

// GPUInflaterHeadBytes returns the number of bytes that a run of so many ranges writes at the start
// of the staging memory.
func GPUInflaterHeadBytes(ranges int) int {
	if Check() != nil {
		return 0
	}
	return int(C.ts_gpu_inflater_head_bytes(C.int64_t(ranges)))
}

// GPUInflateRange has the layout of ts_gpu_inflate_range.
type GPUInflateRange struct {
	Input, InputBytes   uintptr
	Window, WindowBytes uintptr
	Skip, Bytes         uintptr
	Room                uintptr
	SkipBits            int32
}

// GPUInflateResult has the layout of ts_gpu_inflate_result.
type GPUInflateResult struct {
	Failed   int32
	Checksum uint32
}

// A size that differs from C's fails to compile.
var (
	_ = [1]struct{}{}[unsafe.Sizeof(GPUInflateRange{})-C.sizeof_ts_gpu_inflate_range]
	_ = [1]struct{}{}[unsafe.Sizeof(GPUInflateResult{})-C.sizeof_ts_gpu_inflate_result]
)

// RunGPUInflater calls ts_gpu_inflater_run. staging and results are pinned C memory, which the
// device uses after the call; results has one element per range. An inflater of DeviceCPU finishes
// using them before the call returns.
func RunGPUInflater(i *GPUInflater, staging []byte, ranges []GPUInflateRange, rooms *Tensor,
	results []GPUInflateResult, on Stream) error {
	if len(results) < len(ranges) {
		return imagecapi.NewFailure(CodeInvalidArgument, "there are fewer results than ranges")
	}
	computing.enter()
	defer computing.leave()
	s := sanitizer.Load()
	s.begin()
	defer s.end()
	err := failure(C.ts_gpu_inflater_run(i, (*C.uint8_t)(unsafe.SliceData(staging)), C.size_t(len(staging)),
		(*C.ts_gpu_inflate_range)(unsafe.Pointer(unsafe.SliceData(ranges))), C.int64_t(len(ranges)), rooms,
		(*C.ts_gpu_inflate_result)(unsafe.Pointer(unsafe.SliceData(results))), on.c()))
	if s != nil && err == nil && len(ranges) > 0 && on.Device != DeviceCPU {
		written := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(results))),
			len(ranges)*int(unsafe.Sizeof(results[0])))
		s.filled("RunGPUInflater", on, rooms, staging, written)
	}
	return err
}
