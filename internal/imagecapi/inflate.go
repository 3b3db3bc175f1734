//go:build linux

package imagecapi

/*
#include "torchstream_image.h"
#cgo noescape ts_inflater_new
#cgo nocallback ts_inflater_new
#cgo noescape ts_inflater_reset
#cgo nocallback ts_inflater_reset
#cgo noescape ts_inflater_run
#cgo nocallback ts_inflater_run
#cgo noescape ts_inflater_get_checkpoint
#cgo nocallback ts_inflater_get_checkpoint
*/
import "C"

import (
	"unsafe"
)

// InflateWindow is the maximum distance, in bytes of output, of a back-reference in a deflate
// stream.
const InflateWindow = C.TS_INFLATER_WINDOW_BYTES

// Inflater is a ts_inflater. One goroutine at a time may use it.
type Inflater = C.ts_inflater

func NewInflater(spacing uint64) (i *Inflater, err error) {
	if err := Check(); err != nil {
		return nil, err
	}
	err = failure(C.ts_inflater_new(C.size_t(spacing), &i))
	return i, err
}

func FreeInflater(i *Inflater) { C.ts_inflater_free(i) }

func ResetInflater(i *Inflater, skipBits, history int) error {
	return failure(C.ts_inflater_reset(i, C.int32_t(skipBits), C.size_t(history)))
}

// Inflate inflates input into buffer[begin:]; buffer[:begin] is earlier output. last says that no
// input follows. It returns the input bytes consumed, the output bytes produced, and whether the
// stream is complete.
func Inflate(i *Inflater, input []byte, last bool, buffer []byte, begin int) (consumed, produced int,
	done bool, err error) {
	var p C.ts_inflate_progress
	err = failure(C.ts_inflater_run(i, (*C.uint8_t)(unsafe.SliceData(input)), C.size_t(len(input)), C.bool(last),
		(*C.uint8_t)(unsafe.SliceData(buffer)), C.size_t(begin), C.size_t(len(buffer)), &p))
	return int(p.consumed), int(p.produced), bool(p.done), err
}

// InflateCheckpoint is a ts_inflate_checkpoint. Its slices are the shim's memory, valid until the
// next call.
type InflateCheckpoint struct {
	Bit, Output uint64
	Window      []byte
	Used        []uint64
}

// NextInflateCheckpoint returns the next complete checkpoint. found is false if there is none.
func NextInflateCheckpoint(i *Inflater) (c InflateCheckpoint, found bool, err error) {
	var p C.ts_inflate_checkpoint
	if err := failure(C.ts_inflater_get_checkpoint(i, &p)); err != nil || p.window == nil {
		return InflateCheckpoint{}, false, err
	}
	return InflateCheckpoint{uint64(p.bit), uint64(p.output), unsafe.Slice((*byte)(p.window), InflateWindow),
		unsafe.Slice((*uint64)(unsafe.Pointer(p.used)), InflateWindow/64)}, true, nil
}
