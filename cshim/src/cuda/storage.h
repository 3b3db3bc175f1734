// The memory behind tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

namespace ts {

// Returns the memory of a tensor that has storage, to keep it alive or to compare it.
inline c10::intrusive_ptr<c10::StorageImpl> storage_of(const at::Tensor& tensor) {
  using Pointer = c10::intrusive_ptr<c10::StorageImpl>;
  return Pointer::reclaim_copy(tensor.storage().unsafeGetStorageImpl());
}

}  // namespace ts
