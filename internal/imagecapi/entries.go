//go:build linux

package imagecapi

/*
#include "torchstream_image.h"
#cgo noescape ts_image_decode_with_entries
#cgo nocallback ts_image_decode_with_entries
#cgo noescape ts_image_decode_make_entries
#cgo nocallback ts_image_decode_make_entries
#cgo noescape ts_image_transcode
#cgo nocallback ts_image_transcode
#cgo noescape ts_image_make_entries
#cgo nocallback ts_image_make_entries
#cgo noescape ts_image_plan_segments
#cgo nocallback ts_image_plan_segments
#cgo noescape ts_image_plan_head
#cgo nocallback ts_image_plan_head
#cgo noescape ts_image_plan_part
#cgo nocallback ts_image_plan_part
#cgo noescape ts_image_plan_append
#cgo nocallback ts_image_plan_append
#cgo noescape ts_image_plan_scan
#cgo nocallback ts_image_plan_scan
#cgo noescape ts_image_pack_entries
#cgo nocallback ts_image_pack_entries
#cgo noescape ts_image_decoder_get_stats
#cgo nocallback ts_image_decoder_get_stats
*/
import "C"

import (
	"runtime"
	"sync/atomic"
	"unsafe"
)

// DecodeEntries is Decode with the entry points in the blob entries.
//
// proof points to the token of an earlier comparison of the entry points with the same image in
// this process. If the token is 0, DecodeEntries makes the comparison and sets the token. If proof
// is nil, DecodeEntries trusts the blob's digests.
func DecodeEntries(d *Decoder, data []byte, g *Geometry, dst []byte, stride int, entries []byte, proof *uint64) error {
	if err := room(int(g.WindowWidth), int(g.WindowHeight), len(dst), stride); err != nil {
		return err
	}
	c := geometry(g)
	return failure(C.ts_image_decode_with_entries(d, (*C.uint8_t)(unsafe.SliceData(data)), C.size_t(len(data)), &c,
		C.ts_image_entries{data: (*C.uint8_t)(unsafe.SliceData(entries)), bytes: C.size_t(len(entries))},
		(*C.uint8_t)(unsafe.SliceData(dst)), C.size_t(stride), (*C.uint64_t)(proof)))
}

// DecodeMakeEntries is Decode that also writes the image's entry points to buffer and returns their
// size n in bytes. n is 0 if the image has none (small, not baseline, or damaged). n is more than
// len(buffer) if they did not fit; then it writes none. spacing is the number of MCUs between two
// entry points; 0 makes the entry points about 1 % as large as data. proof is the token for
// DecodeEntries.
func DecodeMakeEntries(d *Decoder, data []byte, g *Geometry, dst []byte, stride, spacing int,
	buffer []byte) (n int, proof uint64, err error) {
	if err := room(int(g.WindowWidth), int(g.WindowHeight), len(dst), stride); err != nil {
		return 0, 0, err
	}
	c := geometry(g)
	var made C.ts_image_entries_made
	err = failure(C.ts_image_decode_make_entries(d, (*C.uint8_t)(unsafe.SliceData(data)), C.size_t(len(data)), &c,
		(*C.uint8_t)(unsafe.SliceData(dst)), C.size_t(stride), entriesBuffer(buffer, spacing), &made))
	return int(made.bytes), uint64(made.proof), err
}

// MakeEntries makes the same entry points as DecodeMakeEntries, without decoding pixels.
func MakeEntries(d *Decoder, data []byte, spacing int, buffer []byte) (n int, proof uint64, err error) {
	var made C.ts_image_entries_made
	err = failure(C.ts_image_make_entries(d, (*C.uint8_t)(unsafe.SliceData(data)), C.size_t(len(data)),
		entriesBuffer(buffer, spacing), &made))
	return int(made.bytes), uint64(made.proof), err
}

// Transcode losslessly converts a progressive JPEG to a baseline JPEG in buffer. Coefficients,
// quantisers and frame stay the same, so the result decodes to the same pixels; metadata is
// dropped. n is the result's size in bytes, less than len(buffer). n is 0 if the image is not a
// progressive JPEG, is damaged, lacks coefficients, or has coefficients that a baseline file cannot
// represent. It is also 0 if the result did not fit. The buffer's content is then undefined.
func Transcode(d *Decoder, data, buffer []byte) (n int, err error) {
	var written C.size_t
	err = failure(C.ts_image_transcode(d, (*C.uint8_t)(unsafe.SliceData(data)), C.size_t(len(data)),
		(*C.uint8_t)(unsafe.SliceData(buffer)), C.size_t(len(buffer)), &written))
	return int(written), err
}

// PlanSegments writes a plan to buffer, with which capi.RunGPUDecoder decodes the same pixels as
// DecodeEntries. It returns the plan's size n in bytes. The buffer is aligned to 16 bytes. n is 0
// if only the host decodes the image. n is more than len(buffer) if the plan did not fit; then the
// buffer's content is undefined. proof is as in DecodeEntries, but PlanSegments makes no
// comparison: n is 0 while the token is 0. With entries and proof nil, the GPU finds the entry
// points in the whole scan; an image that is cut off, or has wrong segments, is then an error with
// CodeDecode.
func PlanSegments(d *Decoder, data []byte, g *Geometry, entries []byte, proof *uint64,
	buffer []byte) (n int, err error) {
	c := geometry(g)
	var planned C.size_t
	err = failure(C.ts_image_plan_segments(d, (*C.uint8_t)(unsafe.SliceData(data)), C.size_t(len(data)), &c,
		C.ts_image_entries{data: (*C.uint8_t)(unsafe.SliceData(entries)), bytes: C.size_t(len(entries))},
		(*C.uint64_t)(proof),
		(*C.uint8_t)(unsafe.SliceData(buffer)), C.size_t(len(buffer)), &planned))
	return int(planned), err
}

// PlanAppend is PlanSegments with entry points for shared memory: several goroutines append plans
// to the memory, which is aligned to 16 bytes. used is the number of bytes taken from the start of
// the memory, a multiple of 16. PlanAppend reserves the plan's n bytes with one atomic addition. at
// is the offset where the plan starts. If there is no room, n is 0 as well. If there is no room or
// an error, PlanAppend reserves nothing.
func PlanAppend(d *Decoder, data []byte, g *Geometry, entries []byte, proof *uint64, memory []byte,
	used *atomic.Uint64) (at, n int, err error) {
	c := geometry(g)
	var place, planned C.size_t
	err = failure(C.ts_image_plan_append(d, (*C.uint8_t)(unsafe.SliceData(data)), C.size_t(len(data)), &c,
		C.ts_image_entries{data: (*C.uint8_t)(unsafe.SliceData(entries)), bytes: C.size_t(len(entries))},
		(*C.uint64_t)(proof),
		C.ts_image_plans{data: (*C.uint8_t)(unsafe.SliceData(memory)), bytes: C.size_t(len(memory)),
			used: (*C.uint64_t)(unsafe.Pointer(used))},
		&place, &planned))
	return int(place), int(planned), err
}

// PlanHead is PlanSegments for an image whose file is still deflate-compressed. The GPU decoder
// inflates it (capi.RunInflatingGPUDecoder). head holds the start of a file of fileBytes bytes, up
// to offset scan, where the scan's data starts. head may lack segments that decoding does not need.
// The caller guarantees that the entry points belong to the file.
func PlanHead(d *Decoder, head []byte, fileBytes, scan int, g *Geometry, entries, buffer []byte) (n int, err error) {
	c := geometry(g)
	var pin runtime.Pinner
	defer pin.Unpin()
	data := unsafe.SliceData(head)
	if data != nil {
		pin.Pin(data)
	}
	from := C.ts_image_head{data: (*C.uint8_t)(data), bytes: C.size_t(len(head)),
		file_bytes: C.size_t(fileBytes), scan: C.size_t(scan)}
	var planned C.size_t
	err = failure(C.ts_image_plan_head(d, &from, &c,
		C.ts_image_entries{data: (*C.uint8_t)(unsafe.SliceData(entries)), bytes: C.size_t(len(entries))},
		(*C.uint8_t)(unsafe.SliceData(buffer)), C.size_t(len(buffer)), &planned))
	return int(planned), err
}

// Search holds the facts about a file that PackEntries needs when a GPU finds the entry points in
// the file's scan. It has the layout of ts_image_search.
type Search struct {
	Digest, Proof, FileBytes, Scan uint64
	MCUs, Spacing                  uint32
	Entries                        uint32 // number of entry points that the GPU finds
	Wanted                         uint32 // 0: the file gets no entry points
}

// A size that differs from C's fails to compile.
var _ = [1]struct{}{}[unsafe.Sizeof(Search{})-C.sizeof_ts_image_search]

// searchEntryBytes is the size of an entry point found by a GPU.
const searchEntryBytes = 10

// PlanScan is PlanAppend without entry points: the plan includes the whole scan, and the GPU finds
// the entry points. If used is nil, the plan is at the start of memory, and n is greater than
// len(memory) if it did not fit. PlanScan plans only images that are good whatever their scan
// contains, so n is also 0 for an image whose scan decides whether it is good: see SetDamage.
// search, if not nil, is set for PackEntries.
func PlanScan(d *Decoder, data []byte, g *Geometry, memory []byte, used *atomic.Uint64, search *Search) (at,
	n int, err error) {
	c := geometry(g)
	var place, planned C.size_t
	err = failure(C.ts_image_plan_scan(d, (*C.uint8_t)(unsafe.SliceData(data)), C.size_t(len(data)), &c,
		C.ts_image_plans{data: (*C.uint8_t)(unsafe.SliceData(memory)), bytes: C.size_t(len(memory)),
			used: (*C.uint64_t)(unsafe.Pointer(used))},
		(*C.ts_image_search)(unsafe.Pointer(search)), &place, &planned))
	return int(place), int(planned), err
}

// PackEntries writes entry points to buffer and returns their size n in bytes, as DecodeMakeEntries
// does with a spacing of 0. found holds the entry points that a GPU found with a plan of PlanScan,
// in an image that it did not flag. n is also 0 if found has impossible entry points.
func PackEntries(search *Search, found, buffer []byte) (n int, proof uint64, err error) {
	var made C.ts_image_entries_made
	err = failure(C.ts_image_pack_entries((*C.ts_image_search)(unsafe.Pointer(search)),
		(*C.uint8_t)(unsafe.SliceData(found)), C.size_t(len(found)),
		entriesBuffer(buffer, 0), &made))
	return int(made.bytes), uint64(made.proof), err
}

func entriesBuffer(buffer []byte, spacing int) C.ts_image_entries_buffer {
	return C.ts_image_entries_buffer{data: (*C.uint8_t)(unsafe.SliceData(buffer)),
		capacity: C.size_t(len(buffer)), spacing: C.int64_t(spacing)}
}

// Stats has the fields of ts_image_decoder_stats.
type Stats struct {
	JPEGOwn, JPEGLibjpeg, JPEGGaveUp                          int64
	EntriesUsed, EntriesVerified, EntriesRefused, EntriesMade int64
}

func DecoderStats(d *Decoder) (Stats, error) {
	s := C.ts_image_decoder_stats{size: C.sizeof_ts_image_decoder_stats}
	if err := failure(C.ts_image_decoder_get_stats(d, &s)); err != nil {
		return Stats{}, err
	}
	return Stats{int64(s.jpeg_own), int64(s.jpeg_libjpeg), int64(s.jpeg_gave_up), int64(s.entries_used),
		int64(s.entries_verified), int64(s.entries_refused),
		int64(s.entries_made)}, nil
}

// Part describes a plan written by PlanPart, and the required part of the file.
type Part struct {
	At, Bytes int // range of the plan in the memory; Bytes is 0 if there is no plan
	// From is the file offset of the part's first byte.
	From int
	// The range for the part in the memory.
	Begin, End int
}

// PlanPart is PlanAppend for an image whose file the caller reads after the call. head, fileBytes
// and scan are as in PlanHead. The plan has room for the part of the file with the segments that
// the geometry needs. The part consists of whole pieces of the given number of bytes; only the
// file's last piece may be shorter. The caller writes the part's bytes to that room, and guarantees
// that the entry points belong to the file.
func PlanPart(d *Decoder, head []byte, fileBytes, scan int, g *Geometry, entries []byte, piece int,
	memory []byte, used *atomic.Uint64) (Part, error) {
	c := geometry(g)
	var pin runtime.Pinner
	defer pin.Unpin()
	data := unsafe.SliceData(head)
	if data != nil {
		pin.Pin(data)
	}
	from := C.ts_image_head{data: (*C.uint8_t)(data), bytes: C.size_t(len(head)),
		file_bytes: C.size_t(fileBytes), scan: C.size_t(scan)}
	var p C.ts_image_part
	err := failure(C.ts_image_plan_part(d, &from, &c,
		C.ts_image_entries{data: (*C.uint8_t)(unsafe.SliceData(entries)), bytes: C.size_t(len(entries))},
		C.size_t(piece), C.ts_image_plans{data: (*C.uint8_t)(unsafe.SliceData(memory)),
			bytes: C.size_t(len(memory)), used: (*C.uint64_t)(unsafe.Pointer(used))}, &p))
	return Part{int(p.at), int(p.planned), int(p.file), int(p.to), int(p.to + p.bytes)}, err
}
