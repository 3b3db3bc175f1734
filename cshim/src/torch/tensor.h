// Tensor handles.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/error.h"
#include "cuda/storage.h"
#include "torchstream.h"

// ts_tensor is never defined: its address is the TensorImpl's, and each handle is one of the
// TensorImpl's references. So a handle needs no memory, although every operator makes one.
namespace ts {

// The number of references that C callers hold.
extern std::atomic<int64_t> tensor_handles;

// Makes a new reference for the caller of the C function. tensor: defined.
inline ts_tensor* to_handle(at::Tensor tensor) noexcept {
  tensor_handles.fetch_add(1, std::memory_order_relaxed);
  return reinterpret_cast<ts_tensor*>(tensor.unsafeReleaseTensorImpl());
}

inline c10::TensorImpl* impl_of(const ts_tensor* tensor) noexcept {
  return reinterpret_cast<c10::TensorImpl*>(const_cast<ts_tensor*>(tensor));
}

// Returns the tensor of a reference that the caller gives up; undefined for NULL.
inline at::Tensor take_handle(ts_tensor* tensor) noexcept {
  if (tensor == nullptr) return {};
  tensor_handles.fetch_sub(1, std::memory_order_relaxed);
  return at::Tensor(
      c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim(impl_of(tensor)));
}

// Returns a handle borrowed for a call; NULL for an undefined tensor.
inline ts_tensor* borrowed_handle(const at::Tensor& tensor) noexcept {
  return tensor.defined() ? reinterpret_cast<ts_tensor*>(tensor.unsafeGetTensorImpl()) : nullptr;
}

// Returns the tensor of a handle that must not be NULL.
inline at::Tensor value_of(const ts_tensor* tensor, const char* name = "tensor") {
  if (tensor == nullptr) {
    throw Failure(TS_ERROR_INVALID_ARGUMENT, std::string(name) + " is NULL");
  }
  using Pointer = c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  return at::Tensor(Pointer::unsafe_reclaim_from_nonowning(impl_of(tensor)));
}

// Returns the tensor of a handle; undefined for NULL.
inline at::Tensor value_or_undefined(const ts_tensor* tensor) {
  return tensor == nullptr ? at::Tensor() : value_of(tensor);
}

// Returns the type of the number, if tensors can have it.
at::ScalarType checked_dtype(int32_t dtype);

// Returns the bytes from the first element to the end of the last, 0 without elements. Throws
// INVALID_ARGUMENT for negative sizes or strides, and for more bytes than memory can address.
size_t checked_extent(at::IntArrayRef sizes, const int64_t* strides, at::ScalarType dtype);

// Returns the strides of a contiguous tensor, and checks the sizes.
std::vector<int64_t> contiguous_strides(at::IntArrayRef sizes, at::ScalarType dtype);

// Whether host memory is pinned.
bool is_pinned(const at::Tensor& tensor);

// Whether one tensor is on the host, in memory that is not pinned, and the other on a GPU.
bool is_pageable_pair(const at::Tensor& a, const at::Tensor& b);

// Returns numel * element size, at most INT64_MAX: an expanded tensor can have more elements than
// memory has bytes.
inline int64_t bytes_of(const at::Tensor& tensor) {
  int64_t bytes = 0;
  const auto size = static_cast<int64_t>(tensor.element_size());
  return __builtin_mul_overflow(tensor.numel(), size, &bytes) ? INT64_MAX : bytes;
}

// Whether the memory holds the elements themselves. LibTorch's lazy negation and conjugation are
// marks on a view, which only its own kernels resolve.
inline bool is_resolved(const at::Tensor& tensor) { return !tensor.is_neg() && !tensor.is_conj(); }

// Tells autograd that the memory was written without LibTorch's knowledge. A backward that needs
// the old values then fails instead of using the new ones.
inline void mark_written(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

}  // namespace ts
