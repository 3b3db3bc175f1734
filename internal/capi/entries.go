package capi

/*
#include "torchstream.h"
#cgo noescape ts_image_decode_entries
#cgo nocallback ts_image_decode_entries
#cgo noescape ts_image_decode_make_entries
#cgo nocallback ts_image_decode_make_entries
#cgo noescape ts_image_entries_make
#cgo nocallback ts_image_entries_make
#cgo noescape ts_image_decoder_stats
#cgo nocallback ts_image_decoder_stats
*/
import "C"

import "unsafe"

// DecodeImageEntries is DecodeImage by a blob of entry points. proof: what stands for "compared with these bytes in this process"; 0 has it done, and set. nil: the
// blob's digests are enough.
func DecodeImageEntries(d *ImageDecoder, data []byte, g *ImageGeometry, dst []byte, stride int, entries []byte, proof *uint64) error {
	if err := room("DecodeImageEntries", int(g.WindowWidth), int(g.WindowHeight), len(dst), stride); err != nil {
		return err
	}
	return failure(C.ts_image_decode_entries(d, (*C.uint8_t)(unsafe.SliceData(data)), C.size_t(len(data)), geometry(g), (*C.uint8_t)(unsafe.SliceData(dst)), C.size_t(stride),
		(*C.uint8_t)(unsafe.SliceData(entries)), C.size_t(len(entries)), (*C.uint64_t)(proof)))
}

// DecodeImageMakeEntries is DecodeImage, and makes entry points on the way: n bytes of buffer; 0 if there are none for this image; more than len(buffer) if they
// did not fit, and were not written. spacing 0: about 1 % of the data.
func DecodeImageMakeEntries(d *ImageDecoder, data []byte, g *ImageGeometry, dst []byte, stride, spacing int, buffer []byte) (n int, proof uint64, err error) {
	if err := room("DecodeImageMakeEntries", int(g.WindowWidth), int(g.WindowHeight), len(dst), stride); err != nil {
		return 0, 0, err
	}
	var written C.size_t
	err = failure(C.ts_image_decode_make_entries(d, (*C.uint8_t)(unsafe.SliceData(data)), C.size_t(len(data)), geometry(g), (*C.uint8_t)(unsafe.SliceData(dst)),
		C.size_t(stride), C.int32_t(spacing), (*C.uint8_t)(unsafe.SliceData(buffer)), C.size_t(len(buffer)), &written, (*C.uint64_t)(&proof)))
	return int(written), proof, err
}

// MakeImageEntries makes entry points alone, as DecodeImageMakeEntries does.
func MakeImageEntries(d *ImageDecoder, data []byte, spacing int, buffer []byte) (n int, proof uint64, err error) {
	var written C.size_t
	err = failure(C.ts_image_entries_make(d, (*C.uint8_t)(unsafe.SliceData(data)), C.size_t(len(data)), C.int32_t(spacing), (*C.uint8_t)(unsafe.SliceData(buffer)),
		C.size_t(len(buffer)), &written, (*C.uint64_t)(&proof)))
	return int(written), proof, err
}

// ImageStats is ts_image_stats.
type ImageStats struct {
	JPEGOwn, JPEGLibjpeg, JPEGGaveUp                          int64
	EntriesUsed, EntriesVerified, EntriesRefused, EntriesMade int64
}

func DecoderStats(d *ImageDecoder) (ImageStats, error) {
	var s C.ts_image_stats
	if err := failure(C.ts_image_decoder_stats(d, &s)); err != nil {
		return ImageStats{}, err
	}
	return ImageStats{int64(s.jpeg_own), int64(s.jpeg_libjpeg), int64(s.jpeg_gave_up), int64(s.entries_used), int64(s.entries_verified), int64(s.entries_refused),
		int64(s.entries_made)}, nil
}
