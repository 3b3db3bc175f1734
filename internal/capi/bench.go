package capi

/*
#include "torchstream_bench.h"
#cgo nocallback ts_bench_noop
#cgo noescape ts_bench_add
#cgo nocallback ts_bench_add
#cgo noescape ts_bench_peer
#cgo nocallback ts_bench_peer
*/
import "C"

// Noop does nothing: what a call costs.
func Noop() { C.ts_bench_noop() }

// BenchAdd returns host nanoseconds a call of C++'s own addition: in place, with each result freed
// at once, and with results freed many at a time.
func BenchAdd(device int32, rounds int) (inPlace, outOfPlace, held float64, err error) {
	computing.enter()
	defer computing.leave()
	var i, o, h C.double
	err = failure(C.ts_bench_add(C.int32_t(device), C.int32_t(rounds), &i, &o, &h))
	return float64(i), float64(o), float64(h), err
}

// BenchPeer returns seconds a copy.
func BenchPeer(dst, src int32, bytes, rounds int) (seconds float64, err error) {
	waiting.enter()
	defer waiting.leave()
	var ns C.double
	err = failure(C.ts_bench_peer(C.int32_t(dst), C.int32_t(src), C.size_t(bytes), C.int32_t(rounds), &ns))
	return float64(ns) / 1e9, err
}
