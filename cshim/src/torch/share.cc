// Memory that processes share: of GPUs by CUDA's handles, of the host by files that are mapped.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
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

// A mapping that is about to end must not be found by an opening in LibTorch, which then fails.
std::mutex& mappings() {
  static auto* mutex = new std::mutex;  // never destroyed: memory may go back after main
  return *mutex;
}

// Memory of a GPU that another process owns.
class DeviceMemory final : public Foreign {
 public:
  DeviceMemory(std::shared_ptr<void> base, c10::DeviceIndex device, const uint8_t* data,
               size_t bytes)
      : base_(std::move(base)), device_(device), data_(data), bytes_(bytes) {}
  void own(int lock) noexcept { lock_ = lock; }

 private:
  // First the mapping, then the lock: the owner may free the memory when it gets the lock.
  void give_back(const std::vector<Use>& uses) override {
    for (const Use& use : uses) C10_CUDA_IGNORE_ERROR(cudaEventSynchronize(use.event));
    log_unmapped(device_, data_, bytes_);
    {
      const auto turn = wait_for_no_capture();  // unmapping may wait for the device
      const std::lock_guard<std::mutex> lock(mappings());
      base_.reset();
    }
    if (lock_ >= 0) close(lock_);
  }

  std::shared_ptr<void> base_;
  const c10::DeviceIndex device_;
  const uint8_t* const data_;
  const size_t bytes_;
  int lock_ = -1;
};

// A file that is mapped.
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

// The number of bytes from an address to the end of its allocation.
size_t bytes_behind(const uint8_t* address) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  C10_CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", &function, 12000,
                                                  cudaEnableDefault, &found));
  require(found == cudaDriverEntryPointSuccess, "the driver has no cuMemGetAddressRange");
  CUdeviceptr begin = 0;
  size_t bytes = 0;
  const auto range = reinterpret_cast<decltype(&cuMemGetAddressRange)>(function);
  const auto at = reinterpret_cast<CUdeviceptr>(address);
  if (range(&begin, &bytes, at) != CUDA_SUCCESS || at - begin > bytes) {
    throw Failure(TS_ERROR_CUDA, "the size of the other process's memory is unknown");
  }
  return bytes - (at - begin);
}

std::vector<int64_t> copied(const int64_t* values, int64_t count) {
  require(count >= 0 && count <= 64, "ndim must be from 0 to 64");
  require(count == 0 || values != nullptr, "sizes or strides is NULL");
  return {values, values + count};
}

std::shared_ptr<void> open_mapping(const uint8_t* handle) {
  const std::lock_guard<std::mutex> lock(mappings());
  try {
    // Of this length, LibTorch takes it for the handle of an allocation of cudaMalloc.
    return c10::cuda::CUDACachingAllocator::getIpcDevPtr(
        std::string(reinterpret_cast<const char*>(handle), TS_IPC_HANDLE_BYTES));
  } catch (const c10::Error& error) {
    throw Failure(TS_ERROR_INVALID_ARGUMENT,
                  std::string("the handle cannot be opened: its memory is this process's own, or "
                              "of a process that has ended, or the two processes do not see the "
                              "same GPU: ") +
                      error.what_without_backtrace());
  }
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
    auto base = ts::open_mapping(handle);
    const auto* begin = static_cast<const uint8_t*>(base.get());
    const size_t room = ts::bytes_behind(begin);
    ts::require(offset <= room && bytes <= room - offset,
                "the elements are not inside of the shared allocation");
    ts::require(offset % c10::elementSize(type) == 0, "offset is not aligned to the element size");
    auto* data = static_cast<uint8_t*>(base.get()) + offset;
    const auto index = static_cast<c10::DeviceIndex>(device);
    auto memory = std::make_unique<ts::DeviceMemory>(std::move(base), index, data, bytes);
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
