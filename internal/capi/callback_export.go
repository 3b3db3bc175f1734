//go:build linux

package capi

// #include "torchstream.h"
import "C"

import "unsafe"

// torchstreamAutogradCallback is the ts_autograd_callback of this package. It is in a separate
// file, because the C code of a file with an exported function may contain only declarations.
//
//export torchstreamAutogradCallback
func torchstreamAutogradCallback(context C.int64_t, flags C.int32_t, tensors **C.ts_tensor, count C.int64_t,
	results **C.ts_tensor, resultCount C.int64_t) *C.ts_error {
	return call(int64(context), int32(flags), unsafe.Slice(tensors, int(count)),
		unsafe.Slice(results, int(resultCount)))
}
