//go:build linux

package capi

/*
#include "torchstream.h"
#cgo noescape ts_ipc_export
#cgo nocallback ts_ipc_export
#cgo noescape ts_ipc_open
#cgo nocallback ts_ipc_open
#cgo noescape ts_tensor_map
#cgo nocallback ts_tensor_map
*/
import "C"

import "unsafe"

// IPCHandle identifies a GPU memory allocation in other processes.
type IPCHandle [C.TS_IPC_HANDLE_BYTES]byte

// ExportIPC returns the handle of the tensor's allocation, and the tensor's offset in it.
func ExportIPC(t *Tensor) (h IPCHandle, offset int64, err error) {
	computing.enter()
	defer computing.leave()
	var o C.size_t
	err = failure(C.ts_ipc_export(t, (*C.uint8_t)(unsafe.Pointer(&h[0])), &o))
	return h, int64(o), err
}

// OpenIPC returns a tensor in another process's memory. It takes ownership of the descriptor lock
// if it succeeds.
func OpenIPC(device int32, h IPCHandle, offset int64, size, stride []int64, dtype int32,
	lock int) (t *Tensor, err error) {
	if err := Check(); err != nil {
		return nil, err
	}
	computing.enter()
	defer computing.leave()
	s := sanitizer.Load()
	s.begin()
	defer s.end()
	err = failure(C.ts_ipc_open(C.int32_t(device), (*C.uint8_t)(unsafe.Pointer(&h[0])), C.size_t(offset),
		sizes(size), sizes(stride),
		C.int64_t(len(size)), C.int32_t(dtype), C.int32_t(lock), &t))
	if s != nil && err == nil {
		s.used("torch.OpenShared", []*Tensor{t}, nil, nil)
	}
	return t, err
}

// MapTensor returns a CPU tensor over a shared mapping of the file. It takes ownership of the
// descriptor if it succeeds.
func MapTensor(file int, offset int64, size []int64, dtype int32) (t *Tensor, err error) {
	if err := Check(); err != nil {
		return nil, err
	}
	computing.enter()
	defer computing.leave()
	s := sanitizer.Load()
	s.begin()
	defer s.end()
	err = failure(C.ts_tensor_map(C.int32_t(file), C.size_t(offset), sizes(size), C.int64_t(len(size)),
		C.int32_t(dtype), &t))
	if s != nil && err == nil {
		s.used("torch.OpenShared", []*Tensor{t}, nil, nil)
	}
	return t, err
}
