//go:build linux

package capi

/*
#include "torchstream.h"
#cgo nocallback ts_gpu_decoder_new
#cgo nocallback ts_gpu_decoder_free
#cgo nocallback ts_gpu_decoder_head_bytes
#cgo nocallback ts_gpu_decoder_run
#cgo nocallback ts_gpu_decoder_new_inflating
#cgo nocallback ts_gpu_decoder_inflating_head_bytes
#cgo nocallback ts_gpu_decoder_run_inflating
#cgo nocallback ts_gpu_decoder_copy_entries
#cgo nocallback ts_gpu_decoder_reading_head_bytes
#cgo nocallback ts_gpu_decoder_run_reading
*/
import "C"

import (
	"unsafe"

	"github.com/torchstream/torchstream/internal/imagecapi"
	"github.com/torchstream/torchstream/internal/racecheck"
)

// GPUDecoder is a ts_gpu_decoder.
type GPUDecoder = C.ts_gpu_decoder

func NewGPUDecoder(device int32, maxImages, stagingBytes, scratchBytes int) (d *GPUDecoder, err error) {
	if err := Check(); err != nil {
		return nil, err
	}
	computing.enter()
	defer computing.leave()
	err = failure(C.ts_gpu_decoder_new(C.int32_t(device), C.int64_t(maxImages), C.size_t(stagingBytes),
		C.size_t(scratchBytes), &d))
	return d, err
}

// NewInflatingGPUDecoder makes a decoder for RunInflatingGPUDecoder.
func NewInflatingGPUDecoder(device int32, maxImages, stagingBytes, scratchBytes,
	roomsBytes int) (d *GPUDecoder, err error) {
	if err := Check(); err != nil {
		return nil, err
	}
	computing.enter()
	defer computing.leave()
	err = failure(C.ts_gpu_decoder_new_inflating(C.int32_t(device), C.int64_t(maxImages),
		C.size_t(stagingBytes), C.size_t(scratchBytes),
		C.size_t(roomsBytes), &d))
	return d, err
}

func FreeGPUDecoder(d *GPUDecoder) {
	C.ts_gpu_decoder_free(d)
	if s := sanitizer.Load(); s != nil {
		s.freed("the end of a decoder")
	}
}

// GPUDecoderHeadBytes returns the number of bytes that a run of so many images writes at the start
// of the staging memory.
func GPUDecoderHeadBytes(images int) int {
	if Check() != nil {
		return 0
	}
	return int(C.ts_gpu_decoder_head_bytes(C.int64_t(images)))
}

// GPUDecoderInflatingHeadBytes is GPUDecoderHeadBytes for RunInflatingGPUDecoder.
func GPUDecoderInflatingHeadBytes(images, members int) int {
	if Check() != nil {
		return 0
	}
	return int(C.ts_gpu_decoder_inflating_head_bytes(C.int64_t(images), C.int64_t(members)))
}

// GPUDecoderReadingHeadBytes is GPUDecoderHeadBytes for RunReadingGPUDecoder.
func GPUDecoderReadingHeadBytes(images, members, files int) int {
	if Check() != nil {
		return 0
	}
	return int(C.ts_gpu_decoder_reading_head_bytes(C.int64_t(images), C.int64_t(members), C.int64_t(files)))
}

// GPUDecodeMember has the layout of ts_gpu_decode_member.
type GPUDecodeMember struct {
	Image, Scan uintptr
	Range       GPUInflateRange
}

// A size that differs from C's fails to compile.
var _ = [1]struct{}{}[unsafe.Sizeof(GPUDecodeMember{})-C.sizeof_ts_gpu_decode_member]

// GPUDecodeImage has the layout of ts_gpu_decode_image.
type GPUDecodeImage struct {
	Plan, Result uintptr
}

// A size that differs from C's fails to compile.
var _ = [1]struct{}{}[unsafe.Sizeof(GPUDecodeImage{})-C.sizeof_ts_gpu_decode_image]

// RunGPUDecoder calls ts_gpu_decoder_run. staging and failed are pinned C memory, which the device
// uses after the call; failed has one number per image. A decoder of DeviceCPU finishes using them
// before the call returns.
func RunGPUDecoder(d *GPUDecoder, staging []byte, images []GPUDecodeImage, results *Tensor, failed []int32,
	on Stream) error {
	if len(failed) < len(images) {
		return imagecapi.NewFailure(CodeInvalidArgument, "failed has fewer numbers than there are images")
	}
	computing.enter()
	defer computing.leave()
	s := sanitizer.Load()
	s.begin()
	defer s.end()
	err := failure(C.ts_gpu_decoder_run(d, (*C.uint8_t)(unsafe.SliceData(staging)), C.size_t(len(staging)),
		(*C.ts_gpu_decode_image)(unsafe.Pointer(unsafe.SliceData(images))), C.int64_t(len(images)), results,
		(*C.int32_t)(unsafe.SliceData(failed)), on.c()))
	if s != nil && err == nil && len(images) > 0 && on.Device != DeviceCPU {
		written := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(failed))), 4*len(images))
		s.filled("RunGPUDecoder", on, results, staging, written)
	}
	return err
}

// RunInflatingGPUDecoder calls ts_gpu_decoder_run_inflating. inflated is the same kind of memory as
// failed, with one result per member.
func RunInflatingGPUDecoder(d *GPUDecoder, staging []byte, images []GPUDecodeImage,
	members []GPUDecodeMember, results *Tensor, failed []int32,
	inflated []GPUInflateResult, on Stream) error {
	if len(failed) < len(images) || len(inflated) < len(members) {
		return imagecapi.NewFailure(CodeInvalidArgument,
			"failed or inflated has fewer numbers than there are images or members")
	}
	computing.enter()
	defer computing.leave()
	s := sanitizer.Load()
	s.begin()
	defer s.end()
	err := failure(C.ts_gpu_decoder_run_inflating(d, (*C.uint8_t)(unsafe.SliceData(staging)), C.size_t(len(staging)),
		(*C.ts_gpu_decode_image)(unsafe.Pointer(unsafe.SliceData(images))), C.int64_t(len(images)),
		(*C.ts_gpu_decode_member)(unsafe.Pointer(unsafe.SliceData(members))), C.int64_t(len(members)), results,
		(*C.int32_t)(unsafe.SliceData(failed)),
		(*C.ts_gpu_inflate_result)(unsafe.Pointer(unsafe.SliceData(inflated))), on.c()))
	if s != nil && err == nil && len(images) > 0 && on.Device != DeviceCPU {
		flags := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(failed))), 4*len(images))
		outcomes := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(inflated))),
			len(members)*int(unsafe.Sizeof(GPUInflateResult{})))
		s.filled("RunInflatingGPUDecoder", on, results, staging, flags, outcomes)
	}
	return err
}

// GPUDecodeFile has the layout of ts_gpu_decode_file.
type GPUDecodeFile struct {
	Image uintptr
	From  *byte
}

// GPUDecodeFiles are files and the key of their digests.
type GPUDecodeFiles struct {
	List []GPUDecodeFile
	Key  *[80]uint64
}

// A size that differs from C's fails to compile.
var _ = [1]struct{}{}[unsafe.Sizeof(GPUDecodeFile{})-C.sizeof_ts_gpu_decode_file]

// RunReadingGPUDecoder calls ts_gpu_decoder_run_reading. Like staging, the files' memory is C
// memory, which the device uses after the call. Otherwise like RunInflatingGPUDecoder.
func RunReadingGPUDecoder(d *GPUDecoder, staging []byte, images []GPUDecodeImage, members []GPUDecodeMember,
	files GPUDecodeFiles, results *Tensor, failed []int32, inflated []GPUInflateResult, on Stream) error {
	if len(failed) < len(images) || len(inflated) < len(members) {
		return imagecapi.NewFailure(CodeInvalidArgument,
			"failed or inflated has fewer numbers than there are images or members")
	}
	computing.enter()
	defer computing.leave()
	s := sanitizer.Load()
	s.begin()
	defer s.end()
	list := C.ts_gpu_decode_files{
		list:  (*C.ts_gpu_decode_file)(unsafe.Pointer(unsafe.SliceData(files.List))),
		count: C.int64_t(len(files.List)), key: (*C.uint64_t)(unsafe.Pointer(files.Key))}
	err := failure(C.ts_gpu_decoder_run_reading(d, (*C.uint8_t)(unsafe.SliceData(staging)), C.size_t(len(staging)),
		(*C.ts_gpu_decode_image)(unsafe.Pointer(unsafe.SliceData(images))), C.int64_t(len(images)),
		(*C.ts_gpu_decode_member)(unsafe.Pointer(unsafe.SliceData(members))), C.int64_t(len(members)), list, results,
		(*C.int32_t)(unsafe.SliceData(failed)),
		(*C.ts_gpu_inflate_result)(unsafe.Pointer(unsafe.SliceData(inflated))), on.c()))
	if s != nil && err == nil && len(images) > 0 && on.Device != DeviceCPU {
		flags := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(failed))), 4*len(images))
		outcomes := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(inflated))),
			len(members)*int(unsafe.Sizeof(GPUInflateResult{})))
		s.readFiles("RunReadingGPUDecoder", on, files.List)
		s.filled("RunReadingGPUDecoder", on, results, staging, flags, outcomes)
	}
	return err
}

// readFiles reports to the stream sanitizer that work on a stream reads parts of files, of which it
// names the first byte.
func (s *Sanitizer) readFiles(what string, on Stream, files []GPUDecodeFile) {
	q := s.queue(on)
	accesses := make([]racecheck.Access, len(files))
	for i, f := range files {
		at := uintptr(unsafe.Pointer(f.From))
		accesses[i] = racecheck.Access{Queue: q, Memory: racecheck.Memory{Device: DeviceCPU, Storage: at, StorageBytes: 1,
			Region: racecheck.Region{Begin: at, Row: 1, Rows: 1, Pitch: 1}}}
	}
	s.check.Do(racecheck.Launch{At: s.check.Here(what, 2), Accesses: accesses})
}

// GPUDecodeEntries has the layout of ts_gpu_decode_entries.
type GPUDecodeEntries struct {
	Plan, To, Bytes uintptr
}

// A size that differs from C's fails to compile.
var _ = [1]struct{}{}[unsafe.Sizeof(GPUDecodeEntries{})-C.sizeof_ts_gpu_decode_entries]

// CopyGPUDecoderEntries calls ts_gpu_decoder_copy_entries for the staging memory and the stream of
// the decoder's latest run. memory is pinned C memory, like staging.
func CopyGPUDecoderEntries(d *GPUDecoder, staging []byte, entries []GPUDecodeEntries, memory []byte, on Stream) error {
	computing.enter()
	defer computing.leave()
	s := sanitizer.Load()
	s.begin()
	defer s.end()
	err := failure(C.ts_gpu_decoder_copy_entries(d, (*C.uint8_t)(unsafe.SliceData(staging)), C.size_t(len(staging)),
		(*C.ts_gpu_decode_entries)(unsafe.Pointer(unsafe.SliceData(entries))), C.int64_t(len(entries)),
		(*C.uint8_t)(unsafe.SliceData(memory)), C.size_t(len(memory)), on.c()))
	if s != nil && err == nil && len(entries) > 0 && on.Device != DeviceCPU {
		s.filled("CopyGPUDecoderEntries", on, nil, nil, memory)
	}
	return err
}

// filled reports work on a stream to the stream sanitizer: the work reads staging and writes
// written on the host and, if results is not nil, the tensor's memory.
func (s *Sanitizer) filled(what string, on Stream, results *Tensor, staging []byte, written ...[]byte) {
	var room [1]C.ts_tensor_extent
	one := [1]*Tensor{results}
	at := s.check.Here(what, 2)
	own := s.take(what, at)
	q := s.queue(on)
	host := func(bytes []byte, write bool) racecheck.Access {
		b, n := uintptr(unsafe.Pointer(unsafe.SliceData(bytes))), uintptr(len(bytes))
		return racecheck.Access{Queue: q, Write: write, Memory: racecheck.Memory{
			Device: DeviceCPU, Storage: b, StorageBytes: n,
			Region: racecheck.Region{Begin: b, Row: n, Rows: 1, Pitch: n}, Track: true}}
	}
	var accesses []racecheck.Access
	if len(staging) > 0 {
		accesses = append(accesses, host(staging, false))
	}
	for _, bytes := range written {
		if len(bytes) > 0 {
			accesses = append(accesses, host(bytes, true))
		}
	}
	if results != nil {
		if all := extents(room[:], one[:]); all != nil {
			accesses = append(accesses, racecheck.Access{Memory: memoryOf(&all[0]), Queue: q, Write: true})
		}
	}
	s.check.Do(racecheck.Launch{At: at, Accesses: accesses})
	s.finish(own)
}
