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
#cgo noescape ts_inflater_follow
#cgo nocallback ts_inflater_follow
#cgo noescape ts_inflater_settle
#cgo nocallback ts_inflater_settle
#cgo noescape ts_inflater_finish
#cgo nocallback ts_inflater_finish
#cgo noescape ts_inflater_stop_at
#cgo nocallback ts_inflater_stop_at
#cgo noescape ts_inflater_get_state
#cgo nocallback ts_inflater_get_state
#cgo noescape ts_inflater_find
#cgo nocallback ts_inflater_find
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

// InflateCopy is a ts_inflate_copy: Length bytes, from Distance bytes before position At to At.
type InflateCopy struct {
	At               uint32
	Distance, Length uint16
}

// InflateState is a ts_inflate_state. Copies is the shim's memory, valid until the next call.
type InflateState struct {
	Bit     uint64
	Copies  []InflateCopy
	Reach   int
	AtBlock bool
	Lacking bool
	Rest    byte
}

// FollowInflater starts a stream at history 0. At history InflateWindow it enters a stream whose
// window is not known yet.
func FollowInflater(i *Inflater, skipBits, history int) error {
	return failure(C.ts_inflater_follow(i, C.int32_t(skipBits), C.size_t(history)))
}

// SettleInflater ends what FollowInflater has started. buffer ends with all output, which is right,
// after its window.
func SettleInflater(i *Inflater, buffer []byte, spacing int, last int64) error {
	return failure(C.ts_inflater_settle(i, (*C.uint8_t)(unsafe.SliceData(buffer)), C.size_t(len(buffer)),
		C.size_t(spacing), C.uint64_t(last)))
}

// FinishInflater completes all checkpoints, at a block from which another inflater has made copies.
// window has the InflateWindow bytes before the block.
func FinishInflater(i *Inflater, window []byte, copies []InflateCopy) error {
	_ = window[InflateWindow-1]
	return failure(C.ts_inflater_finish(i, (*C.uint8_t)(unsafe.SliceData(window)),
		(*C.ts_inflate_copy)(unsafe.Pointer(unsafe.SliceData(copies))), C.size_t(len(copies))))
}

// StopInflaterAt makes Inflate return at the first block that starts at this bit or after it.
func StopInflaterAt(i *Inflater, bit uint64) error {
	return failure(C.ts_inflater_stop_at(i, C.uint64_t(bit)))
}

// GetInflateState returns the state of an inflater between two calls of Inflate.
func GetInflateState(i *Inflater) (InflateState, error) {
	var c C.ts_inflate_state
	if err := failure(C.ts_inflater_get_state(i, &c)); err != nil {
		return InflateState{}, err
	}
	return InflateState{uint64(c.bit), unsafe.Slice((*InflateCopy)(unsafe.Pointer(c.copies)), int(c.copy_count)),
		int(c.reach), bool(c.at_block), bool(c.lacking), byte(c.rest)}, nil
}

// The kinds of places that FindInflate finds.
const (
	FoundNone    = C.TS_INFLATE_FOUND_NONE
	FoundDynamic = C.TS_INFLATE_FOUND_DYNAMIC
	FoundStored  = C.TS_INFLATE_FOUND_STORED
	FoundMember  = C.TS_INFLATE_FOUND_MEMBER
)

// FindInflate finds the first place from bit from to before bit to of input where a deflate stream
// may be entered. The place may be wrong.
func FindInflate(input []byte, from, to uint64) (bit uint64, kind int, err error) {
	var f C.ts_inflate_found
	err = failure(C.ts_inflater_find((*C.uint8_t)(unsafe.SliceData(input)), C.size_t(len(input)), C.uint64_t(from),
		C.uint64_t(to), &f))
	return uint64(f.bit), int(f.kind), err
}
