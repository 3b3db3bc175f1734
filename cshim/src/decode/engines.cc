#include "decode/engines.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <string>

#include "base/error.h"
#include "cuda/device.h"

namespace ts::decode {
namespace {

// Makes the device current for calls of nvJPEG, which may allocate: also beside another thread that
// captures a graph.
class Calls {
 public:
  explicit Calls(int32_t device) {
    if (device == TS_DEVICE_CPU) return;
    scope_.emplace(device);
    relaxed_.emplace(cudaStreamCaptureModeRelaxed);
    // A new thread has no context until it calls the runtime, and DeviceScope leaves out the call
    // for device 0. nvJPEG may go to the driver, which would find none.
    C10_CUDA_CHECK(cudaSetDevice(device));
  }
  Calls(const Calls&) = delete;
  Calls& operator=(const Calls&) = delete;

 private:
  std::optional<DeviceScope> scope_;
  std::optional<c10::cuda::CUDAStreamCaptureModeGuard> relaxed_;
};

cudaError_t make_device(void** block, size_t bytes) { return cudaMalloc(block, bytes); }
cudaError_t make_pinned(void** block, size_t bytes) {
  return cudaHostAlloc(block, bytes, cudaHostAllocPortable);
}
cudaError_t free_device(void* block) { return cudaFree(block); }
cudaError_t free_pinned(void* block) { return cudaFreeHost(block); }

// Of a decoder of the host.
cudaError_t make_host(void** block, size_t bytes) {
  *block = std::malloc(bytes);
  return *block == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}
cudaError_t free_host(void* block) {
  std::free(block);
  return cudaSuccess;
}

}  // namespace

int Engines::allocate(void* memory, void** block, size_t bytes, cudaStream_t) {
  auto* const of = static_cast<Memory*>(memory);
  const std::lock_guard<std::mutex> lock(of->mutex);
  try {
    of->blocks.reserve(of->blocks.size() + 1);
  } catch (const std::exception&) {
    return 1;
  }
  void* made = nullptr;
  if (of->make(&made, bytes) != cudaSuccess) {
    cudaGetLastError();  // nvJPEG's status says it
    return 1;
  }
  of->blocks.emplace_back(made, bytes);
  *block = made;
  return 0;
}

int Engines::release(void* memory, void* block, size_t, cudaStream_t) {
  auto* const of = static_cast<Memory*>(memory);
  const std::lock_guard<std::mutex> lock(of->mutex);
  const auto at = std::find_if(of->blocks.begin(), of->blocks.end(),
                               [&](const auto& known) { return known.first == block; });
  if (at == of->blocks.end()) return block == nullptr ? 0 : 1;
  of->blocks.erase(at);
  return of->free(block) == cudaSuccess ? 0 : 1;
}

size_t Engines::Memory::bytes() {
  const std::lock_guard<std::mutex> lock(mutex);
  size_t sum = 0;
  for (const auto& block : blocks) sum += block.second;
  return sum;
}

Engines::Engines(int32_t device, int64_t max_images)
    : library_(nvjpeg::library()),
      device_(device),
      memory_{device == TS_DEVICE_CPU ? make_host : make_device,
              device == TS_DEVICE_CPU ? free_host : free_device,
              {},
              {}},
      pinned_{device == TS_DEVICE_CPU ? make_host : make_pinned,
              device == TS_DEVICE_CPU ? free_host : free_pinned,
              {},
              {}},
      allocator_{&Engines::allocate, &Engines::release, &memory_},
      pinned_allocator_{&Engines::allocate, &Engines::release, &pinned_} {
  files_.reserve(static_cast<size_t>(max_images));
  bytes_.reserve(static_cast<size_t>(max_images));
  images_.reserve(static_cast<size_t>(max_images));
  const Calls calls(device);
  try {
    create();
  } catch (...) {
    destroy();
    throw;
  }
}

void Engines::create() {
  // NVJPEG_FLAGS_UPSAMPLING_WITH_INTERPOLATION would interpolate chrominance, at a quarter of the
  // rate.
  nvjpeg::check(
      library_.create_allocating(nvjpeg::kHardware, &allocator_, &pinned_allocator_, 0, &handle_),
      "nvjpegCreateExV2");
  nvjpeg::check(library_.hardware_info(handle_, &engines_, &cores_),
                "nvjpegGetHardwareDecoderInfo");
  if (engines_ == 0) throw Failure(TS_ERROR_UNSUPPORTED, "this GPU has no JPEG engines");
  nvjpeg::check(library_.stream_create(handle_, &header_), "nvjpegJpegStreamCreate");
  nvjpeg::check(library_.state_create(handle_, &state_), "nvjpegJpegStateCreate");
  if (device_ == TS_DEVICE_CPU) return;
  C10_CUDA_CHECK(cudaEventCreateWithFlags(&idle_, cudaEventDisableTiming | cudaEventBlockingSync));
}

Engines::~Engines() {
  try {
    const Calls calls(device_);
    destroy();
  } catch (const std::exception&) {
    destroy();  // the device is lost, and what it had
  }
}

void Engines::destroy() noexcept {
  if (idle_ != nullptr) {
    C10_CUDA_IGNORE_ERROR(cudaEventSynchronize(idle_));
    C10_CUDA_IGNORE_ERROR(cudaEventDestroy(idle_));
  }
  if (state_ != nullptr) library_.state_destroy(state_);
  if (header_ != nullptr) library_.stream_destroy(header_);
  if (handle_ != nullptr) library_.destroy(handle_);
}

bool Engines::takes(const uint8_t* file, size_t bytes, int32_t width, int32_t height) {
  unsigned read_width = 0;
  unsigned read_height = 0;
  int unsupported = 1;
  // nvJPEG writes as many pixels as its own parser reads from the header.
  const bool taken =
      library_.stream_parse_header(handle_, file, bytes, header_) == nvjpeg::kSuccess &&
      library_.frame_size(header_, &read_width, &read_height) == nvjpeg::kSuccess &&
      read_width == static_cast<unsigned>(width) && read_height == static_cast<unsigned>(height) &&
      library_.batch_supported(handle_, header_, &unsupported) == nvjpeg::kSuccess &&
      unsupported == 0;
  if (!taken) ++refused_;
  return taken;
}

void Engines::add(const uint8_t* file, size_t bytes, uint8_t* to, int32_t width) {
  files_.push_back(file);
  bytes_.push_back(bytes);
  images_.push_back({{to}, {static_cast<size_t>(width) * 3}});
}

nvjpeg::Status Engines::enqueue(const Queue& queue) {
  const Calls calls(device_);
  if (idle_ != nullptr) C10_CUDA_CHECK(cudaEventSynchronize(idle_));
  const nvjpeg::Status status = library_.batch_initialize(
      handle_, state_, static_cast<int>(files_.size()), 1, nvjpeg::kOutputRgbInterleaved);
  if (status != nvjpeg::kSuccess) return status;
  const nvjpeg::Status decoded = library_.batch_decode(
      handle_, state_, files_.data(), bytes_.data(), images_.data(), queue.stream());
  if (idle_ != nullptr) C10_CUDA_CHECK(cudaEventRecord(idle_, queue.stream()));
  return decoded;
}

bool Engines::decode(const Queue& queue) {
  const auto count = static_cast<int64_t>(files_.size());
  if (count == 0) return true;
  const nvjpeg::Status status = enqueue(queue);
  files_.clear();
  bytes_.clear();
  images_.clear();
  if (status == nvjpeg::kSuccess) {
    decoded_ += count;
    return true;
  }
  failed_ += count;
  failure_ = nvjpeg::name_of(status);
  return false;
}

ts_gpu_engines Engines::stats() const {
  ts_gpu_engines stats = {};
  stats.engines = static_cast<int32_t>(engines_);
  stats.cores_per_engine = static_cast<int32_t>(cores_);
  stats.decoded = decoded_;
  stats.refused = refused_;
  stats.failed = failed_;
  stats.failure = failure_;
  stats.bytes = memory_.bytes();
  return stats;
}

}  // namespace ts::decode
