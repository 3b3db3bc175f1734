// DLPack: tensors shared with other libraries in the process, in both directions.
#include <ATen/dlpack.h>
#include <c10/core/ScalarType.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/thread.h"
#include "cuda/allocator.h"
#include "cuda/capture.h"
#include "cuda/device.h"
#include "cuda/foreign.h"
#include "cuda/order.h"
#include "cuda/sanitizer.h"
#include "cuda/stream.h"
#include "torch/pending.h"
#include "torch/tensor.h"
#include "torchstream.h"

namespace ts {
namespace {

using c10::cuda::CUDAStream;

constexpr int32_t kFlags = TS_DLPACK_FLAG_NO_ORDER | TS_DLPACK_FLAG_READ_ONLY;

struct Type {
  at::ScalarType dtype;
  uint8_t code;
  uint8_t bits;
};

constexpr std::array<Type, 14> kTypes = {{
    {at::ScalarType::Byte, kDLUInt, 8},
    {at::ScalarType::Char, kDLInt, 8},
    {at::ScalarType::Short, kDLInt, 16},
    {at::ScalarType::Int, kDLInt, 32},
    {at::ScalarType::Long, kDLInt, 64},
    {at::ScalarType::Half, kDLFloat, 16},
    {at::ScalarType::Float, kDLFloat, 32},
    {at::ScalarType::Double, kDLFloat, 64},
    {at::ScalarType::BFloat16, kDLBfloat, 16},
    {at::ScalarType::ComplexFloat, kDLComplex, 64},
    {at::ScalarType::ComplexDouble, kDLComplex, 128},
    {at::ScalarType::Bool, kDLBool, 8},
    {at::ScalarType::Float8_e4m3fn, kDLFloat8_e4m3fn, 8},
    {at::ScalarType::Float8_e5m2, kDLFloat8_e5m2, 8},
}};

DLDataType dlpack_type(at::ScalarType dtype) {
  for (const Type& type : kTypes) {
    if (type.dtype == dtype) return {type.code, type.bits, 1};
  }
  throw Failure(TS_ERROR_INVALID_ARGUMENT,
                std::string("DLPack has no form of ") + c10::toString(dtype));
}

at::ScalarType torch_type(DLDataType dtype) {
  for (const Type& type : kTypes) {
    if (type.code == dtype.code && type.bits == dtype.bits && dtype.lanes == 1) return type.dtype;
  }
  throw Failure(TS_ERROR_INVALID_ARGUMENT,
                "a DLPack dtype with code " + std::to_string(dtype.code) + ", " +
                    std::to_string(dtype.bits) + " bits and " + std::to_string(dtype.lanes) +
                    " lanes: tensors have no such type");
}

// Returns the other library's stream. A default stream means the default stream of the tensor's
// device.
CUDAStream other_stream(ts_stream stream, c10::Device device) {
  if (stream.id == 0) return c10::cuda::getDefaultCUDAStream(device.index());
  const CUDAStream checked = checked_stream(stream);
  require(checked.device_index() == device.index(), "the stream is not of the tensor's device");
  return checked;
}

// ---- out

template <typename Managed>
struct Exported {
  at::Tensor tensor;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  Managed managed{};

  static void free(Managed* self) {
    const std::unique_ptr<Exported> owned(static_cast<Exported*>(self->manager_ctx));
  }
};

void set_version(DLManagedTensor& /*managed*/) {}
void set_version(DLManagedTensorVersioned& managed) {
  managed.version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION};
}

void require_exportable(const at::Tensor& tensor) {
  require(tensor.has_storage() && tensor.layout() == at::kStrided && !tensor.is_quantized(),
          "only a tensor with strided memory can be exported");
  require(!tensor.requires_grad(),
          "the tensor requires a gradient, which another library does not compute: Detach it");
  require(is_resolved(tensor),
          "the tensor is a view that negates or conjugates its memory: Clone it");
  require(tensor.is_cpu() || tensor.is_cuda(), "the tensor is on neither the CPU nor a GPU");
}

// Orders the other library's work on `stream` after this library's, and keeps the memory from being
// reused before it.
void hand_to(const at::Tensor& tensor, ts_stream stream, int32_t flags) {
  if (!tensor.is_cuda()) return await_pending(tensor);
  if ((flags & TS_DLPACK_FLAG_NO_ORDER) != 0) return;
  const CUDAStream consumer = other_stream(stream, tensor.device());
  const CUDAStream producer = c10::cuda::getCurrentCUDAStream(tensor.device().index());
  order_after(consumer, producer);
  log_order(consumer, producer);
  record_use(storage_of(tensor), consumer);
}

template <typename Managed>
Managed* export_tensor(const ts_tensor* handle, ts_stream stream, int32_t flags) {
  at::Tensor tensor = value_of(handle);
  require((flags & ~kFlags) == 0, "unknown DLPack flag");
  require_exportable(tensor);
  auto exported = std::make_unique<Exported<Managed>>();
  exported->sizes = tensor.sizes().vec();
  exported->strides = tensor.strides().vec();
  // Strides of dimensions of size one are meaningless. Consumers expect 1 in a contiguous tensor.
  for (size_t i = 0; i < exported->sizes.size(); ++i) {
    if (exported->sizes[i] < 2) exported->strides[i] = 1;
  }
  DLTensor& described = exported->managed.dl_tensor;
  described.dtype = dlpack_type(tensor.scalar_type());
  described.device =
      tensor.is_cuda() ? DLDevice{kDLCUDA, tensor.device().index()} : DLDevice{kDLCPU, 0};
  if (tensor.is_cuda()) refuse_in_capture("exporting a tensor (DLPack)");
  hand_to(tensor, stream, flags);
  described.data = tensor.numel() == 0 ? nullptr : tensor.data_ptr();
  described.ndim = static_cast<int32_t>(tensor.dim());
  described.shape = exported->sizes.data();
  described.strides = exported->strides.data();
  described.byte_offset = 0;
  set_version(exported->managed);
  exported->managed.manager_ctx = exported.get();
  exported->managed.deleter = &Exported<Managed>::free;
  exported->tensor = std::move(tensor);
  return &exported.release()->managed;
}

// ---- in

// Another library's memory. Its deleter runs on this library's own thread: cgo calls that free
// tensors must not call back, and a deleter may be Go code.
template <typename Managed>
class Imported final : public Foreign {
 public:
  Imported(Managed* managed, std::optional<CUDAStream> producer)
      : managed_(managed), deleter_(managed->deleter), producer_(producer) {}

 private:
  void give_back(const std::vector<Use>& uses) override {
    if (producer_) {
      for (const Use& use : uses) {
        const DeviceScope device(producer_->device_index());
        C10_CUDA_IGNORE_ERROR(cudaStreamWaitEvent(producer_->stream(), use.event, 0));
        log_order(*producer_, use.stream);
      }
    }
    if (deleter_ != nullptr) deleter_(managed_);
  }

  Managed* const managed_;
  // Without a deleter the owner cannot know how long the struct is read, so it is read now.
  void (*const deleter_)(Managed*);
  const std::optional<CUDAStream> producer_;
};

struct Layout {
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  at::ScalarType dtype;
  size_t bytes;  // from the first element to the end of the last
  uint8_t* data;
};

Layout checked_layout(const DLTensor& described) {
  Layout layout{};
  layout.dtype = torch_type(described.dtype);
  require(described.ndim >= 0 && described.ndim <= 64, "ndim must be from 0 to 64");
  require(described.ndim == 0 || described.shape != nullptr, "shape is NULL");
  layout.sizes.assign(described.shape, described.shape + described.ndim);
  const auto compact = contiguous_strides(layout.sizes, layout.dtype);  // checks the sizes
  layout.strides = compact;
  bool empty = false;
  for (const int64_t size : layout.sizes) empty = empty || size == 0;
  for (size_t i = 0; described.strides != nullptr && !empty && i < layout.sizes.size(); ++i) {
    if (layout.sizes[i] > 1) layout.strides[i] = described.strides[i];
  }
  layout.bytes = checked_extent(layout.sizes, layout.strides.data(), layout.dtype);
  uintptr_t address = 0;
  require(!__builtin_add_overflow(reinterpret_cast<uintptr_t>(described.data),
                                  described.byte_offset, &address),
          "data and byte_offset are more than memory can address");
  if (layout.bytes > 0) {
    require(described.data != nullptr, "data is NULL");
    require(address % c10::elementSize(layout.dtype) == 0,
            "data is not aligned to the element size");
    require(layout.bytes <= UINTPTR_MAX - address, "the elements reach beyond all memory");
  }
  layout.data = reinterpret_cast<uint8_t*>(address);
  return layout;
}

c10::Device checked_location(const DLTensor& described, const Layout& layout) {
  const int32_t type = described.device.device_type;
  if (type == kDLCPU || type == kDLCUDAHost) return c10::Device(c10::DeviceType::CPU);
  if (type != kDLCUDA) {
    throw Failure(TS_ERROR_INVALID_ARGUMENT,
                  "a DLPack device of type " + std::to_string(type) +
                      ": only the CPU (1), pinned memory (3) and CUDA (2) can be used");
  }
  const c10::Device device = checked_device(std::max(described.device.device_id, 0));
  require(described.device.device_id >= 0, "the device's index is negative");
  if (layout.bytes == 0) return device;
  cudaPointerAttributes attributes{};
  const cudaError_t status = cudaPointerGetAttributes(&attributes, layout.data);
  if (status != cudaSuccess) C10_CUDA_CLEAR_ERROR();
  if (status != cudaSuccess || attributes.type != cudaMemoryTypeDevice ||
      attributes.device != device.index()) {
    throw Failure(TS_ERROR_INVALID_ARGUMENT,
                  "data is not memory of CUDA device " + std::to_string(device.index()));
  }
  return device;
}

template <typename Managed>
at::Tensor import_tensor(Managed* managed, ts_stream stream, int32_t flags) {
  const DLTensor& described = managed->dl_tensor;
  require((flags & ~kFlags) == 0, "unknown DLPack flag");
  const Layout layout = checked_layout(described);
  const c10::Device device = checked_location(described, layout);
  std::optional<CUDAStream> producer;
  std::optional<CUDAStream> consumer;
  if (device.is_cuda()) {
    refuse_in_capture("importing a tensor (DLPack)");
    consumer = c10::cuda::getCurrentCUDAStream(device.index());
    if ((flags & TS_DLPACK_FLAG_NO_ORDER) == 0) {
      producer = other_stream(stream, device);
    }
  }
  auto memory = std::make_unique<Imported<Managed>>(managed, producer);
  if (consumer) memory->use(*consumer);
  if (producer) {
    order_after(*consumer, *producer);
    log_order(*consumer, *producer);
  }
  return Foreign::tensor(std::move(memory), layout.data, layout.bytes, layout.sizes, layout.strides,
                         layout.dtype, device);
}

}  // namespace
}  // namespace ts

ts_error* ts_dlpack_export(const ts_tensor* tensor, ts_stream stream, int32_t flags,
                           DLManagedTensor** managed) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(managed != nullptr, "managed is NULL");
    *managed = ts::export_tensor<DLManagedTensor>(tensor, stream, flags);
  });
}

ts_error* ts_dlpack_export_versioned(const ts_tensor* tensor, ts_stream stream, int32_t flags,
                                     DLManagedTensorVersioned** managed) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(managed != nullptr, "managed is NULL");
    *managed = ts::export_tensor<DLManagedTensorVersioned>(tensor, stream, flags);
  });
}

ts_error* ts_dlpack_import(DLManagedTensor* managed, ts_stream stream, int32_t flags,
                           ts_tensor** tensor) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(tensor != nullptr, "tensor is NULL");
    ts::require(managed != nullptr, "managed is NULL");
    *tensor = ts::to_handle(ts::import_tensor(managed, stream, flags));
  });
}

ts_error* ts_dlpack_import_versioned(DLManagedTensorVersioned* managed, ts_stream stream,
                                     int32_t flags, ts_tensor** tensor) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(tensor != nullptr, "tensor is NULL");
    ts::require(managed != nullptr, "managed is NULL");
    if (managed->version.major != DLPACK_MAJOR_VERSION) {
      throw ts::Failure(TS_ERROR_UNSUPPORTED,
                        "a tensor of DLPack " + std::to_string(managed->version.major) +
                            ": this library reads version " + std::to_string(DLPACK_MAJOR_VERSION));
    }
    ts::require((managed->flags & DLPACK_FLAG_BITMASK_READ_ONLY) == 0 ||
                    (flags & TS_DLPACK_FLAG_READ_ONLY) != 0,
                "the memory is read-only, and operators could write to it: allow it if the program "
                "does not");
    *tensor = ts::to_handle(ts::import_tensor(managed, stream, flags));
  });
}

void ts_dlpack_free(DLManagedTensor* managed) {
  if (managed != nullptr && managed->deleter != nullptr) managed->deleter(managed);
}

void ts_dlpack_free_versioned(DLManagedTensorVersioned* managed) {
  if (managed != nullptr && managed->deleter != nullptr) managed->deleter(managed);
}
