// Tensor handles.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
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

// Tells autograd that the memory was written without LibTorch's knowledge: a backward that needs
// the old values fails instead of using the new ones.
inline void mark_written(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

}  // namespace ts
