#include "torch/tensor.h"

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/MemoryFormat.h>
#include <c10/core/ScalarType.h>
#include <c10/core/StorageImpl.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/thread.h"
#include "cuda/allocator.h"
#include "cuda/capture.h"
#include "cuda/device.h"
#include "cuda/stream.h"
#include "torch/pending.h"
#include "torch/returned.h"
#include "torchstream.h"

namespace ts {

std::atomic<int64_t> tensor_handles{0};

at::ScalarType checked_dtype(int32_t dtype) {
  const auto type = static_cast<at::ScalarType>(dtype);
  if (dtype < 0 || dtype >= static_cast<int32_t>(at::ScalarType::NumOptions) ||
      type == at::ScalarType::Undefined || c10::isQIntType(type)) {
    throw Failure(TS_ERROR_INVALID_ARGUMENT, "dtype " + std::to_string(dtype) +
                                                 ": not a data type that tensors can be made of");
  }
  return type;
}

bool is_pinned(const at::Tensor& tensor) {
  return tensor.is_cpu() && device_count() > 0 && tensor.has_storage() &&
         at::globalContext().isPinnedPtr(tensor.storage().data(), c10::DeviceType::CUDA);
}

bool is_pageable_pair(const at::Tensor& a, const at::Tensor& b) {
  if (a.is_cuda() == b.is_cuda()) return false;
  const at::Tensor& host = a.is_cuda() ? b : a;
  return host.numel() > 0 && !is_pinned(host);
}

namespace {

// The memory marked as lent.
struct Lent {
  using Weak = c10::weak_intrusive_ptr<c10::StorageImpl>;
  std::mutex mutex;
  // The weak reference prevents another storage from getting the same address.
  std::unordered_map<const c10::StorageImpl*, Weak> storages;
};

Lent& lent_memory() {
  static auto* all = new Lent;  // never destroyed: threads may outlive main
  return *all;
}

at::IntArrayRef checked_sizes(const int64_t* sizes, int64_t ndim) {
  require(ndim >= 0 && ndim <= 64, "ndim must be from 0 to 64");
  require(ndim == 0 || sizes != nullptr, "sizes is NULL");
  return {sizes, static_cast<size_t>(ndim)};
}

std::string shape_text(at::IntArrayRef sizes) {
  std::string text = "[";
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(sizes[i]);
  }
  return text + "]";
}

// Returns the size of a contiguous tensor in bytes.
size_t checked_bytes(at::IntArrayRef sizes, at::ScalarType dtype) {
  bool empty = false;
  for (const int64_t size : sizes) {
    if (size < 0) {
      throw Failure(TS_ERROR_INVALID_ARGUMENT, "a negative size in " + shape_text(sizes));
    }
    empty = empty || size == 0;
  }
  auto bytes = static_cast<int64_t>(c10::elementSize(dtype));
  for (const int64_t size : sizes) {
    // The product without zeros must fit too: LibTorch computes strides from it.
    if (__builtin_mul_overflow(bytes, size == 0 ? 1 : size, &bytes)) {
      throw Failure(TS_ERROR_INVALID_ARGUMENT,
                    "sizes " + shape_text(sizes) + " are more than memory can address");
    }
  }
  return empty ? 0 : static_cast<size_t>(bytes);
}

void require_bytes(size_t bytes, at::IntArrayRef sizes, at::ScalarType dtype) {
  const size_t needed = checked_bytes(sizes, dtype);
  if (bytes != needed) {
    throw Failure(TS_ERROR_INVALID_ARGUMENT, std::to_string(bytes) + " bytes given where " +
                                                 shape_text(sizes) + " of " + c10::toString(dtype) +
                                                 " has " + std::to_string(needed));
  }
}

c10::MemoryFormat checked_format(int32_t memory_format, int64_t ndim) {
  require(memory_format == TS_MEMORY_FORMAT_CONTIGUOUS ||
              memory_format == TS_MEMORY_FORMAT_CHANNELS_LAST,
          "memory_format must be TS_MEMORY_FORMAT_CONTIGUOUS or TS_MEMORY_FORMAT_CHANNELS_LAST");
  if (memory_format == TS_MEMORY_FORMAT_CONTIGUOUS) return c10::MemoryFormat::Contiguous;
  require(ndim == 4, "channels_last needs 4 dimensions");
  return c10::MemoryFormat::ChannelsLast;
}

// The tokens of borrowed memory that no tensor uses any more.
Returned& returned() {
  static auto* all = new Returned;  // never destroyed: a tensor may end after main
  return *all;
}

}  // namespace

size_t checked_extent(at::IntArrayRef sizes, const int64_t* strides, at::ScalarType dtype) {
  if (checked_bytes(sizes, dtype) == 0) return 0;
  int64_t last = 1;
  for (size_t i = 0; i < sizes.size(); ++i) {
    int64_t distance = 0;
    if (strides[i] < 0 || __builtin_mul_overflow(sizes[i] - 1, strides[i], &distance) ||
        __builtin_add_overflow(last, distance, &last)) {
      throw Failure(TS_ERROR_INVALID_ARGUMENT,
                    "strides must not be negative, nor reach more than memory can address");
    }
  }
  int64_t bytes = 0;
  require(!__builtin_mul_overflow(last, static_cast<int64_t>(c10::elementSize(dtype)), &bytes),
          "strides reach more than memory can address");
  return static_cast<size_t>(bytes);
}

std::vector<int64_t> contiguous_strides(at::IntArrayRef sizes, at::ScalarType dtype) {
  checked_bytes(sizes, dtype);
  std::vector<int64_t> strides(sizes.size());
  int64_t step = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    strides[i] = step;
    step *= std::max<int64_t>(sizes[i], 1);
  }
  return strides;
}

}  // namespace ts

ts_error* ts_tensor_new(const int64_t* sizes, int64_t ndim, int32_t dtype, int32_t device,
                        int32_t memory_format, ts_tensor** tensor) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(tensor != nullptr, "tensor is NULL");
    const auto shape = ts::checked_sizes(sizes, ndim);
    const auto type = ts::checked_dtype(dtype);
    ts::checked_bytes(shape, type);
    const auto format = ts::checked_format(memory_format, ndim);
    const auto where = ts::checked_device(device);
    auto made =
        at::empty(shape, at::TensorOptions().dtype(type).device(where).memory_format(format));
    ts::made_in_capture(made);
    *tensor = ts::to_handle(std::move(made));
  });
}

ts_error* ts_tensor_new_pinned(const int64_t* sizes, int64_t ndim, int32_t dtype,
                               int32_t memory_format, ts_tensor** tensor) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(tensor != nullptr, "tensor is NULL");
    const auto shape = ts::checked_sizes(sizes, ndim);
    const auto type = ts::checked_dtype(dtype);
    ts::checked_bytes(shape, type);
    const auto format = ts::checked_format(memory_format, ndim);
    ts::require_device(0);
    ts::ensure_cuda();
    *tensor = ts::to_handle(at::empty(
        shape, at::TensorOptions().dtype(type).pinned_memory(true).memory_format(format)));
  });
}

ts_error* ts_tensor_set_lent(const ts_tensor* tensor, bool lent) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    const at::Tensor value = ts::value_of(tensor);
    ts::require(value.has_storage(), "the tensor has no memory");
    ts::Lent& all = ts::lent_memory();
    auto storage = ts::storage_of(value);
    const std::lock_guard<std::mutex> lock(all.mutex);
    for (auto it = all.storages.begin(); it != all.storages.end();) {
      it = it->second.expired() ? all.storages.erase(it) : std::next(it);
    }
    if (lent) {
      all.storages.try_emplace(storage.get(), ts::Lent::Weak(storage));
    } else {
      all.storages.erase(storage.get());
    }
  });
}

ts_error* ts_tensor_is_lent(const ts_tensor* tensor, bool* lent) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(lent != nullptr, "lent is NULL");
    const at::Tensor value = ts::value_of(tensor);
    ts::Lent& all = ts::lent_memory();
    const std::lock_guard<std::mutex> lock(all.mutex);
    *lent = value.has_storage() && all.storages.count(value.storage().unsafeGetStorageImpl()) != 0;
  });
}

ts_error* ts_tensor_from_data(const uint8_t* data, size_t bytes, const int64_t* sizes, int64_t ndim,
                              int32_t dtype, ts_tensor** tensor) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(tensor != nullptr, "tensor is NULL");
    const auto shape = ts::checked_sizes(sizes, ndim);
    const auto type = ts::checked_dtype(dtype);
    ts::require_bytes(bytes, shape, type);
    ts::require(bytes == 0 || data != nullptr, "data is NULL");
    if (type == at::ScalarType::Bool) {
      for (size_t i = 0; i < bytes; ++i) {
        ts::require(data[i] <= 1, "a byte of a bool tensor is neither 0 nor 1");
      }
    }
    auto made = at::empty(shape, at::TensorOptions().dtype(type));
    if (bytes > 0) std::memcpy(made.mutable_data_ptr(), data, bytes);
    *tensor = ts::to_handle(std::move(made));
  });
}

ts_error* ts_tensor_from_memory(uint8_t* data, size_t bytes, const int64_t* sizes, int64_t ndim,
                                int32_t dtype, ts_tensor** tensor) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(tensor != nullptr, "tensor is NULL");
    const auto shape = ts::checked_sizes(sizes, ndim);
    const auto type = ts::checked_dtype(dtype);
    ts::require_bytes(bytes, shape, type);
    ts::require(data != nullptr, "data is NULL");
    ts::require(reinterpret_cast<uintptr_t>(data) % c10::elementSize(type) == 0,
                "data is not aligned to the element size");
    *tensor = ts::to_handle(at::from_blob(data, shape, at::TensorOptions().dtype(type)));
  });
}

ts_error* ts_tensor_borrow(uint8_t* data, size_t bytes, const int64_t* sizes,
                           const int64_t* strides, int64_t ndim, int32_t dtype, int64_t token,
                           ts_tensor** tensor) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(tensor != nullptr, "tensor is NULL");
    const auto shape = ts::checked_sizes(sizes, ndim);
    const auto type = ts::checked_dtype(dtype);
    ts::require(ndim == 0 || strides != nullptr, "strides is NULL");
    const size_t needed = ts::checked_extent(shape, strides, type);
    if (bytes < needed) {
      throw ts::Failure(TS_ERROR_INVALID_ARGUMENT, "the elements reach over " +
                                                       std::to_string(needed) + " bytes, and " +
                                                       std::to_string(bytes) + " are given");
    }
    ts::require(needed == 0 || data != nullptr, "data is NULL");
    ts::require(reinterpret_cast<uintptr_t>(data) % c10::elementSize(type) == 0,
                "data is not aligned to the element size");
    // from_blob may fail before or after it has taken the deleter. The deleter then does nothing,
    // and the caller still owns the memory.
    const auto armed = std::make_shared<bool>(false);
    auto made = at::from_blob(
        data, shape, at::IntArrayRef(strides, static_cast<size_t>(ndim)),
        [token, armed](void*) {
          if (*armed) ts::returned().put(token);
        },
        at::TensorOptions().dtype(type));
    ts::returned().expect();
    *armed = true;
    *tensor = ts::to_handle(std::move(made));
  });
}

int64_t ts_borrowed_take(int64_t* tokens, int64_t capacity) {
  return tokens == nullptr ? 0 : ts::returned().take(tokens, capacity);
}

ts_error* ts_tensor_retain(const ts_tensor* tensor, ts_tensor** reference) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(reference != nullptr, "reference is NULL");
    *reference = ts::to_handle(ts::value_of(tensor));
  });
}

void ts_tensor_free(ts_tensor* tensor) {
  ts::enter_thread();
  ts::take_handle(tensor);
}

void ts_tensor_free_all(ts_tensor* const* tensors, int64_t count) {
  ts::enter_thread();
  int64_t freed = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (tensors[i] == nullptr) continue;
    ++freed;
    at::Tensor(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim(
        ts::impl_of(tensors[i])));
  }
  ts::tensor_handles.fetch_sub(freed, std::memory_order_relaxed);
}

int64_t ts_tensor_count(void) { return ts::tensor_handles.load(std::memory_order_relaxed); }

ts_error* ts_tensor_get_info(const ts_tensor* tensor, ts_tensor_info* info) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(info != nullptr, "info is NULL");
    const at::Tensor value = ts::value_of(tensor);
    ts_tensor_info result{};
    result.numel = value.numel();
    result.element_size = static_cast<int32_t>(value.element_size());
    result.bytes = static_cast<size_t>(ts::bytes_of(value));
    result.ndim = static_cast<int32_t>(value.dim());
    result.dtype = static_cast<int32_t>(value.scalar_type());
    result.device = ts::device_index(value.device());
    result.contiguous = value.is_contiguous();
    result.channels_last = result.ndim == 4 && value.is_contiguous(c10::MemoryFormat::ChannelsLast);
    result.requires_grad = value.requires_grad();
    result.pinned = ts::is_pinned(value);
    *info = result;
  });
}

ts_error* ts_tensor_get_kinds(ts_tensor* const* tensors, int64_t count, int32_t* devices,
                              int32_t* dtypes) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(count >= 0, "count is negative");
    ts::require(count == 0 || (tensors != nullptr && devices != nullptr && dtypes != nullptr),
                "tensors, devices or dtypes is NULL");
    for (int64_t i = 0; i < count; ++i) ts::require(tensors[i] != nullptr, "a tensor is NULL");
    for (int64_t i = 0; i < count; ++i) {
      const c10::TensorImpl& tensor = *ts::impl_of(tensors[i]);
      devices[i] = ts::device_index(tensor.device());
      dtypes[i] = static_cast<int32_t>(c10::typeMetaToScalarType(tensor.dtype()));
    }
  });
}

ts_error* ts_tensor_get_shape(const ts_tensor* tensor, int64_t* sizes, int64_t* strides,
                              int64_t capacity) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    const at::Tensor value = ts::value_of(tensor);
    if (capacity < value.dim()) {
      throw ts::Failure(TS_ERROR_INVALID_ARGUMENT, "capacity " + std::to_string(capacity) +
                                                       " for a tensor of " +
                                                       std::to_string(value.dim()) + " dimensions");
    }
    const auto shape = value.sizes();
    const auto steps = value.strides();
    if (sizes != nullptr) std::copy(shape.begin(), shape.end(), sizes);
    if (strides != nullptr) std::copy(steps.begin(), steps.end(), strides);
  });
}

ts_error* ts_tensor_get_address(const ts_tensor* tensor, uintptr_t* address) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(address != nullptr, "address is NULL");
    const at::Tensor value = ts::value_of(tensor);
    ts::await_pending(value);
    *address = reinterpret_cast<uintptr_t>(value.data_ptr());
  });
}

ts_error* ts_tensor_record_stream(const ts_tensor* tensor, ts_stream stream) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    const at::Tensor value = ts::value_of(tensor);
    ts::require(value.is_cuda(), "record_stream is for tensors on a GPU");
    const auto used_on = ts::checked_stream(stream);
    ts::record_use(ts::storage_of(value), used_on);
  });
}

ts_error* ts_tensor_resize_storage(ts_tensor* tensor, size_t bytes) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    const at::Tensor value = ts::value_of(tensor);
    ts::require_own_memory_in_capture(value, "the resizing of a storage");
    ts::await_pending(value);
    c10::StorageImpl* const storage = value.storage().unsafeGetStorageImpl();
    ts::require(storage->resizable() && storage->allocator() != nullptr,
                "the memory is not LibTorch's");
    ts::require(bytes == 0 || storage->nbytes() == 0, "the tensor has memory");
    const c10::DeviceGuard on(value.device());
    c10::DataPtr memory = storage->allocator()->allocate(bytes);
    storage->set_data_ptr_noswap(std::move(memory));
    storage->set_nbytes(bytes);
    if (bytes != 0) ts::allocated_in_capture(value);
  });
}
