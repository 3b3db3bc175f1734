// Tensor handles.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "error.h"

struct ts_tensor {
  explicit ts_tensor(at::Tensor tensor) noexcept : value(std::move(tensor)) {
    count.fetch_add(1, std::memory_order_relaxed);
  }
  ~ts_tensor() { count.fetch_sub(1, std::memory_order_relaxed); }
  ts_tensor(const ts_tensor&) = delete;
  ts_tensor& operator=(const ts_tensor&) = delete;

  at::Tensor value;  // always defined

  static std::atomic<int64_t> count;
};

namespace ts {

// A new reference for the caller of the C function.
inline ts_tensor* to_handle(at::Tensor tensor) {
  return std::make_unique<ts_tensor>(std::move(tensor)).release();
}

// The tensor of a handle that must be there.
inline const at::Tensor& value_of(const ts_tensor* tensor, const char* name = "tensor") {
  if (tensor == nullptr) {
    throw Failure(TS_ERROR_INVALID_ARGUMENT, std::string(name) + " is NULL");
  }
  return tensor->value;
}

// The type of the number, if it is one that memory can be made of.
at::ScalarType checked_dtype(int32_t dtype);

// Whether host memory is pinned.
bool is_pinned(const at::Tensor& tensor);

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
