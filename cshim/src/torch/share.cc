// Memory that processes share: GPU memory through CUDA's handles, host memory through mapped files.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/thread.h"
#include "cuda/capture.h"
#include "cuda/device.h"
#include "cuda/foreign.h"
#include "cuda/sanitizer.h"
#include "torch/tensor.h"
#include "torchstream.h"

namespace ts {
namespace {

using Handle = std::array<uint8_t, TS_IPC_HANDLE_BYTES>;

// Another process's allocation. CUDA maps it once for each device of a process. LibTorch has such a
// table too, but its entries end the process if CUDA cannot unmap one.
class Mapping {
 public:
  Mapping(c10::DeviceIndex device, const Handle& handle) : device_(device) {
    cudaIpcMemHandle_t shared;
    static_assert(sizeof shared == sizeof handle);
    std::memcpy(&shared, handle.data(), sizeof shared);
    const DeviceScope scope(device_);
    const cudaError_t status =
        cudaIpcOpenMemHandle(&begin_, shared, cudaIpcMemLazyEnablePeerAccess);
    if (status == cudaSuccess) return;
    C10_CUDA_CLEAR_ERROR();
    throw Failure(
        status == cudaErrorMemoryAllocation ? TS_ERROR_OUT_OF_MEMORY : TS_ERROR_INVALID_ARGUMENT,
        std::string("the handle cannot be opened: its memory is this process's own, or "
                    "of a process that has ended, or the two processes do not see the "
                    "same GPU: ") +
            cudaGetErrorString(status));
  }
  ~Mapping() {
    c10::DeviceIndex previous = 0;
    C10_CUDA_IGNORE_ERROR(c10::cuda::GetDevice(&previous));
    C10_CUDA_IGNORE_ERROR(c10::cuda::MaybeSetDevice(device_));
    C10_CUDA_IGNORE_ERROR(cudaIpcCloseMemHandle(begin_));
    C10_CUDA_IGNORE_ERROR(c10::cuda::MaybeSetDevice(previous));
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  uint8_t* begin() const noexcept { return static_cast<uint8_t*>(begin_); }

 private:
  const c10::DeviceIndex device_;
  void* begin_ = nullptr;
};

struct Mappings {
  std::mutex mutex;  // also held while a mapping is closed
  // An address belongs to one device: CUDA may map an allocation once for each device.
  std::map<std::pair<c10::DeviceIndex, Handle>, std::weak_ptr<Mapping>> all;
};

Mappings& mappings() {
  static auto* all = new Mappings;  // never destroyed: memory may be returned after main
  return *all;
}

// A use of a mapping, until this object is destroyed. It is destroyed under the table's lock: CUDA
// refuses to open memory again before it is closed.
class MappingUse {
 public:
  explicit MappingUse(std::shared_ptr<Mapping> mapping) : mapping_(std::move(mapping)) {}
  ~MappingUse() { end(); }
  MappingUse(MappingUse&&) noexcept = default;
  MappingUse& operator=(MappingUse&&) = delete;

  const Mapping& operator*() const noexcept { return *mapping_; }
  const Mapping* operator->() const noexcept { return mapping_.get(); }

  void end() noexcept {
    if (mapping_ == nullptr) return;
    const std::lock_guard<std::mutex> lock(mappings().mutex);
    mapping_.reset();
  }

 private:
  std::shared_ptr<Mapping> mapping_;
};

MappingUse open_mapping(c10::DeviceIndex device, const uint8_t* bytes) {
  Handle handle{};
  std::copy_n(bytes, handle.size(), handle.begin());
  Mappings& open = mappings();
  const std::lock_guard<std::mutex> lock(open.mutex);
  for (auto it = open.all.begin(); it != open.all.end();) {
    it = it->second.expired() ? open.all.erase(it) : std::next(it);
  }
  auto& entry = open.all[{device, handle}];
  auto found = entry.lock();
  if (found == nullptr) entry = found = std::make_shared<Mapping>(device, handle);
  return MappingUse(std::move(found));
}

// GPU memory that another process owns.
class DeviceMemory final : public Foreign {
 public:
  DeviceMemory(MappingUse mapping, c10::DeviceIndex device, const uint8_t* data, size_t bytes)
      : mapping_(std::move(mapping)), device_(device), data_(data), bytes_(bytes) {}
  void own(int lock) noexcept { lock_ = lock; }

 private:
  // First closes the mapping, then releases the lock: the owner may free the memory once it gets
  // the lock.
  void give_back(const std::vector<Use>& uses) override {
    for (const Use& use : uses) C10_CUDA_IGNORE_ERROR(cudaEventSynchronize(use.event));
    log_unmapped(device_, data_, bytes_);
    {
      const auto turn = wait_for_no_capture();  // unmapping may wait for the device
      mapping_.end();
    }
    if (lock_ >= 0) close(lock_);
  }

  MappingUse mapping_;
  const c10::DeviceIndex device_;
  const uint8_t* const data_;
  const size_t bytes_;
  int lock_ = -1;
};

// A mapped file.
class Mapped final : public Foreign {
 public:
  Mapped(void* begin, size_t bytes) : begin_(begin), bytes_(bytes) {}
  ~Mapped() override {
    if (bytes_ > 0) munmap(begin_, bytes_);
    if (file_ >= 0) close(file_);
  }
  void own(int file) noexcept { file_ = file; }

 private:
  void give_back(const std::vector<Use>& /*uses*/) override {}  // the destructor follows

  void* const begin_;
  const size_t bytes_;
  int file_ = -1;
};

// Returns the size of a mapping in bytes, or SIZE_MAX if the driver does not report it.
size_t bytes_of_mapping(const Mapping& mapping) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  C10_CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", &function, 12000,
                                                  cudaEnableDefault, &found));
  if (found != cudaDriverEntryPointSuccess) return SIZE_MAX;
  CUdeviceptr begin = 0;
  size_t bytes = 0;
  const auto range = reinterpret_cast<decltype(&cuMemGetAddressRange)>(function);
  const auto at = reinterpret_cast<CUdeviceptr>(mapping.begin());
  return range(&begin, &bytes, at) == CUDA_SUCCESS && begin == at ? bytes : SIZE_MAX;
}

std::vector<int64_t> copied(const int64_t* values, int64_t count) {
  require(count >= 0 && count <= 64, "ndim must be from 0 to 64");
  require(count == 0 || values != nullptr, "sizes or strides is NULL");
  return {values, values + count};
}

}  // namespace
}  // namespace ts

ts_error* ts_ipc_export(const ts_tensor* tensor, uint8_t* handle, size_t* offset) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    const at::Tensor value = ts::value_of(tensor);
    ts::require(handle != nullptr && offset != nullptr, "an output parameter is NULL");
    ts::require(value.is_cuda() && value.has_storage(), "the tensor has no memory of a GPU");
    ts::require(value.storage().nbytes() > 0, "the tensor has no elements");
    ts::require(ts::Foreign::of(*ts::storage_of(value)) == nullptr,
                "the tensor's memory belongs to another process or library: Clone it");
    ts::refuse_in_capture("sharing a tensor");
    const ts::DeviceScope scope(value.device().index());
    const auto shared =
        c10::cuda::CUDACachingAllocator::shareIpcHandle(value.storage().mutable_data());
    // LibTorch writes a version and a kind before the handle.
    constexpr size_t kPrefix = 2;
    ts::require(shared.handle.size() == kPrefix + TS_IPC_HANDLE_BYTES && shared.handle[1] == 'c',
                "memory of expandable segments cannot be shared: allocate the tensor with the "
                "setting expandable_segments:False, or in a memory pool of its own");
    std::memcpy(handle, shared.handle.data() + kPrefix, TS_IPC_HANDLE_BYTES);
    *offset = static_cast<size_t>(shared.offset) +
              static_cast<size_t>(value.storage_offset()) * value.element_size();
  });
}

ts_error* ts_ipc_open(int32_t device, const uint8_t* handle, size_t offset, const int64_t* sizes,
                      const int64_t* strides, int64_t ndim, int32_t dtype, int32_t lock,
                      ts_tensor** tensor) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(tensor != nullptr, "tensor is NULL");
    ts::require(handle != nullptr, "handle is NULL");
    const auto shape = ts::copied(sizes, ndim);
    const auto steps = ts::copied(strides, ndim);
    const auto type = ts::checked_dtype(dtype);
    const size_t bytes = ts::checked_extent(shape, steps.data(), type);
    ts::require(bytes > 0, "the tensor has no elements");
    ts::require_device(device);
    ts::refuse_in_capture("opening a shared tensor");
    ts::ensure_cuda();
    const ts::DeviceScope scope(device);
    const auto index = static_cast<c10::DeviceIndex>(device);
    auto mapping = ts::open_mapping(index, handle);
    const size_t room = ts::bytes_of_mapping(*mapping);
    ts::require(offset <= room && bytes <= room - offset,
                "the elements are not inside of the shared allocation");
    ts::require(offset % c10::elementSize(type) == 0, "offset is not aligned to the element size");
    uint8_t* const data = mapping->begin() + offset;
    auto memory = std::make_unique<ts::DeviceMemory>(std::move(mapping), index, data, bytes);
    memory->use(c10::cuda::getCurrentCUDAStream(index));
    auto* const kept = memory.get();
    auto made = ts::Foreign::tensor(std::move(memory), data, bytes, shape, steps, type,
                                    c10::Device(c10::DeviceType::CUDA, index));
    kept->own(lock);
    *tensor = ts::to_handle(std::move(made));
  });
}

ts_error* ts_tensor_map(int32_t file, size_t offset, const int64_t* sizes, int64_t ndim,
                        int32_t dtype, ts_tensor** tensor) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(tensor != nullptr, "tensor is NULL");
    const auto shape = ts::copied(sizes, ndim);
    const auto type = ts::checked_dtype(dtype);
    const auto strides = ts::contiguous_strides(shape, type);
    const size_t bytes = ts::checked_extent(shape, strides.data(), type);
    struct stat state {};
    ts::require(fstat(file, &state) == 0 && S_ISREG(state.st_mode), "file is not a regular file");
    const auto size = static_cast<size_t>(state.st_size);
    ts::require(offset <= size && bytes <= size - offset,
                "the elements are not inside of the file");
    void* begin = nullptr;
    if (bytes > 0) {
      begin = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file,
                   static_cast<off_t>(offset));
      if (begin == MAP_FAILED) {
        throw ts::Failure(errno == ENOMEM ? TS_ERROR_OUT_OF_MEMORY : TS_ERROR_INVALID_ARGUMENT,
                          std::string("the file cannot be mapped: ") + std::strerror(errno));
      }
    }
    auto memory = std::make_unique<ts::Mapped>(begin, bytes);
    auto* const kept = memory.get();
    auto made = ts::Foreign::tensor(std::move(memory), begin, bytes, shape, strides, type,
                                    c10::Device(c10::DeviceType::CPU));
    kept->own(file);
    *tensor = ts::to_handle(std::move(made));
  });
}
