//go:build linux

package capi

/*
#include <stdlib.h>
#include "torchstream.h"
#cgo noescape ts_model_open
#cgo nocallback ts_model_open
#cgo nocallback ts_model_free
#cgo noescape ts_model_get_structure
#cgo nocallback ts_model_get_structure
*/
import "C"

import "unsafe"

// Model is a loaded instance of a compiled model. C owns it.
type Model = C.ts_model

// RunModel is the name of the operator that runs a model.
const RunModel = "torchstream::run_model" // TS_MODEL_RUN

// OpenModel loads a compiled model for the device.
func OpenModel(library, kernels string, device int32) (*Model, error) {
	if err := Check(); err != nil {
		return nil, err
	}
	waiting.enter()
	defer waiting.leave()
	l, k := C.CString(library), C.CString(kernels)
	defer C.free(unsafe.Pointer(l))
	defer C.free(unsafe.Pointer(k))
	var m *Model
	err := failure(C.ts_model_open(l, k, C.int32_t(device), &m))
	return m, err
}

// FreeModel frees an instance on which no work is left.
func FreeModel(m *Model) {
	waiting.enter()
	defer waiting.leave()
	C.ts_model_free(m)
}

// ModelAddress returns the instance as an argument of the operator RunModel.
func ModelAddress(m *Model) int64 { return int64(uintptr(unsafe.Pointer(m))) }

// ModelStructure returns the structures of the arguments and the results, in PyTorch's JSON.
func ModelStructure(m *Model) (arguments, results string, err error) {
	var a, r *C.char
	if err := failure(C.ts_model_get_structure(m, &a, &r)); err != nil {
		return "", "", err
	}
	return C.GoString(a), C.GoString(r), nil
}
