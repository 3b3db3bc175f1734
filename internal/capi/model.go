//go:build linux

package capi

/*
#include <stdlib.h>
#include "torchstream.h"
#cgo noescape ts_model_open
#cgo nocallback ts_model_open
#cgo noescape ts_model_add_instance
#cgo nocallback ts_model_add_instance
#cgo nocallback ts_model_free
#cgo noescape ts_model_get_weight
#cgo nocallback ts_model_get_weight
#cgo noescape ts_model_get_structure
#cgo nocallback ts_model_get_structure

// ts_model_set_weights with handles as numbers: cgo checks pointers to memory with pointers.
static inline ts_error* set_weights(ts_model* model, const int64_t* places, const uintptr_t* values, int64_t count) {
  return ts_model_set_weights(model, places, (ts_tensor* const*)values, count);
}
#cgo noescape set_weights
#cgo nocallback set_weights
*/
import "C"

import "unsafe"

// Model is a loaded instance of a compiled model. C owns it.
type Model = C.ts_model

// Operators: RunModel runs a model, and ReadWeight copies a weight.
const (
	RunModel   = "torchstream::run_model"   // TS_MODEL_RUN
	ReadWeight = "torchstream::read_weight" // TS_MODEL_READ_WEIGHT
)

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

// AddModelInstance makes another instance, which has the same weights.
func AddModelInstance(m *Model) (*Model, error) {
	waiting.enter()
	defer waiting.leave()
	var added *Model
	err := failure(C.ts_model_add_instance(m, &added))
	return added, err
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

// ModelWeight describes a weight of a model.
type ModelWeight struct {
	Name  string
	DType int32
	Shape []int64
	Fixed bool // SetModelWeights cannot replace it
}

// ModelWeights returns all weights, sorted by name.
func ModelWeights(m *Model) ([]ModelWeight, error) {
	var all []ModelWeight
	for place := C.int64_t(0); ; place++ {
		var w C.ts_model_weight
		if err := failure(C.ts_model_get_weight(m, place, &w)); err != nil || w.name == nil {
			return all, err
		}
		shape := make([]int64, w.ndim)
		for i, size := range unsafe.Slice(w.sizes, w.ndim) {
			shape[i] = int64(size)
		}
		all = append(all, ModelWeight{C.GoString(w.name), int32(w.dtype), shape, bool(w.fixed)})
	}
}

// SetModelWeights replaces weights of all instances that share them. places are indexes of
// ModelWeights. It waits for the copies, and for runs that are being enqueued.
func SetModelWeights(m *Model, places []int64, values []*Tensor) error {
	waiting.enter()
	defer waiting.leave()
	err := failure(C.set_weights(m, sizes(places), numbers(values), C.int64_t(len(values))))
	if s := sanitizer.Load(); s != nil {
		s.freed("replacing a model's weights")
	}
	return err
}
