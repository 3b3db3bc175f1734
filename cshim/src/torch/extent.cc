// The memory ranges of tensors, and the streams that an operator would run on, for the stream
// sanitizer.
#include <c10/core/TensorImpl.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <array>
#include <utility>

#include "base/thread.h"
#include "cuda/device.h"
#include "cuda/stream.h"
#include "torch/tensor.h"
#include "torchstream.h"

namespace ts {
namespace {

// Dimensions as (stride, size), from the largest stride to the smallest. Neighbours without a gap
// between them are joined.
using Dimension = std::pair<int64_t, int64_t>;

// Fills in the bytes of the elements as rows at equal distances. A tensor that needs more than two
// levels gets one row from the first byte to the last.
void describe_bytes(const at::Tensor& value, ts_tensor_extent& extent) {
  const auto element = static_cast<int64_t>(value.element_size());
  const auto data = reinterpret_cast<uintptr_t>(value.storage().data());
  extent.storage = data;
  extent.storage_bytes = value.storage().nbytes();
  extent.begin = data + static_cast<uintptr_t>(value.storage_offset() * element);
  if (value.numel() == 0 || data == 0) return;
  std::array<Dimension, 64> dims;
  size_t count = 0;
  for (int64_t i = 0; i < value.dim() && count < dims.size(); ++i) {
    if (value.size(i) > 1 && value.stride(i) > 0) dims[count++] = {value.stride(i), value.size(i)};
  }
  std::sort(dims.begin(), dims.begin() + count, [](auto& a, auto& b) { return a.first > b.first; });
  int64_t run = 1;  // elements of a row
  int64_t last = 0;
  for (size_t i = 0; i < count; ++i) last += dims[i].first * (dims[i].second - 1);
  while (count > 0 && dims[count - 1].first <= run) {
    run = std::max(run, dims[count - 1].first * (dims[count - 1].second - 1) + run);
    --count;
  }
  int64_t pitch = 0;
  int64_t rows = 1;
  if (count > 0) {
    pitch = dims[count - 1].first;
    while (count > 0 && dims[count - 1].first == pitch * rows) {
      rows *= dims[count - 1].second;
      --count;
    }
  }
  if (count > 0) {  // more than two levels
    run = last + 1;
    rows = 1;
    pitch = 0;
  }
  extent.row_bytes = static_cast<size_t>(run * element);
  extent.rows = rows;
  extent.pitch = static_cast<size_t>(pitch * element);
}

ts_tensor_extent extent_of(const at::Tensor& value) {
  ts_tensor_extent extent{};
  extent.device = value.is_cuda() ? value.get_device() : TS_DEVICE_CPU;
  extent.dtype = static_cast<int32_t>(value.scalar_type());
  extent.ndim = static_cast<int32_t>(value.dim());
  const auto sizes = value.sizes();
  std::copy_n(sizes.begin(), std::min<size_t>(sizes.size(), TS_EXTENT_SIZES), extent.sizes);
  if (value.is_cuda()) {
    extent.stream = to_value(c10::cuda::getCurrentCUDAStream(value.device().index()));
  }
  if (value.has_storage() && !value.is_sparse()) describe_bytes(value, extent);
  return extent;
}

}  // namespace
}  // namespace ts

ts_error* ts_tensor_get_extents(ts_tensor* const* tensors, int64_t count,
                                ts_tensor_extent* extents) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(count >= 0, "count is negative");
    ts::require(count == 0 || (tensors != nullptr && extents != nullptr),
                "tensors or extents is NULL");
    for (int64_t i = 0; i < count; ++i) {
      extents[i] = ts_tensor_extent{};
      extents[i].device = TS_DEVICE_CPU;
      if (tensors[i] != nullptr) extents[i] = ts::extent_of(ts::value_of(tensors[i]));
    }
  });
}
