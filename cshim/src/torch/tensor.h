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

// A ts_tensor is never defined: its address is that of the TensorImpl, and each handle is one of
// the TensorImpl's references. So a handle costs no memory of its own; every operator makes one.
namespace ts {

// How many references C callers hold.
extern std::atomic<int64_t> tensor_handles;

// A new reference for the caller of the C function. tensor: defined.
inline ts_tensor* to_handle(at::Tensor tensor) noexcept {
  tensor_handles.fetch_add(1, std::memory_order_relaxed);
  return reinterpret_cast<ts_tensor*>(tensor.unsafeReleaseTensorImpl());
}

inline c10::TensorImpl* impl_of(const ts_tensor* tensor) noexcept {
  return reinterpret_cast<c10::TensorImpl*>(const_cast<ts_tensor*>(tensor));
}

// The tensor of a reference that the caller gives back; undefined for NULL.
inline at::Tensor take_handle(ts_tensor* tensor) noexcept {
  if (tensor == nullptr) return {};
  tensor_handles.fetch_sub(1, std::memory_order_relaxed);
  return at::Tensor(
      c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim(impl_of(tensor)));
}

// A handle that is borrowed for a call; NULL for an undefined tensor.
inline ts_tensor* borrowed_handle(const at::Tensor& tensor) noexcept {
  return tensor.defined() ? reinterpret_cast<ts_tensor*>(tensor.unsafeGetTensorImpl()) : nullptr;
}

// The tensor of a handle that must be there.
inline at::Tensor value_of(const ts_tensor* tensor, const char* name = "tensor") {
  if (tensor == nullptr) {
    throw Failure(TS_ERROR_INVALID_ARGUMENT, std::string(name) + " is NULL");
  }
  using Pointer = c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  return at::Tensor(Pointer::unsafe_reclaim_from_nonowning(impl_of(tensor)));
}

// The tensor of a handle, undefined for NULL.
inline at::Tensor value_or_undefined(const ts_tensor* tensor) {
  return tensor == nullptr ? at::Tensor() : value_of(tensor);
}

// The type of the number, if it is one that memory can be made of.
at::ScalarType checked_dtype(int32_t dtype);

// The bytes from the first element to the end of the last, 0 without elements. INVALID_ARGUMENT for
// negative sizes or strides, and for more than memory can address.
size_t checked_extent(at::IntArrayRef sizes, const int64_t* strides, at::ScalarType dtype);

// The strides of a contiguous tensor, whose sizes are checked.
std::vector<int64_t> contiguous_strides(at::IntArrayRef sizes, at::ScalarType dtype);

// Whether host memory is pinned.
bool is_pinned(const at::Tensor& tensor);

// Whether both are the host's and a GPU's, and the host's memory is not pinned.
bool is_pageable_pair(const at::Tensor& a, const at::Tensor& b);

// numel * element size, INT64_MAX if it is more: an expanded tensor can have more elements than
// memory has bytes.
inline int64_t bytes_of(const at::Tensor& tensor) {
  int64_t bytes = 0;
  const auto size = static_cast<int64_t>(tensor.element_size());
  return __builtin_mul_overflow(tensor.numel(), size, &bytes) ? INT64_MAX : bytes;
}

// Whether the memory holds the elements themselves. LibTorch's lazy negation and conjugation are
// marks on a view, which its own kernels resolve.
inline bool is_resolved(const at::Tensor& tensor) { return !tensor.is_neg() && !tensor.is_conj(); }

// Tells autograd that the memory was written without LibTorch's knowledge: a backward that needs
// the old values fails instead of using the new ones.
inline void mark_written(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

}  // namespace ts
