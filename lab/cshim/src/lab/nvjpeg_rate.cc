// The number of JPEGs that NVIDIA's nvJPEG decodes in a second: a peer of the GPU decoder.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <ctime>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "lab/entry.h"
#include "lab/host_time.h"
#include "lab/nvjpeg.h"
#include "torchstream_lab.h"

namespace ts {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kAlignment = 256;  // of an image's pixels in device memory

at::Tensor memory_on(int32_t device, size_t bytes) {
  return at::empty({static_cast<int64_t>(bytes)},
                   at::TensorOptions()
                       .dtype(at::ScalarType::Byte)
                       .device(c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device))));
}

// A JPEG that the implementation decodes in batches.
struct Jpeg {
  const uint8_t* data;
  size_t bytes;
  size_t width, height;

  size_t pixel_bytes() const { return width * height * 3; }
  size_t room() const { return (pixel_bytes() + kAlignment - 1) / kAlignment * kAlignment; }
};

// An implementation of nvJPEG on the current device.
class Nvjpeg {
 public:
  explicit Nvjpeg(nvjpeg::Backend backend) : library_(nvjpeg::library()), backend_(backend) {
    nvjpeg::check(library_.create(backend, nullptr, nullptr, 0, &handle_), "nvjpegCreateEx");
    const nvjpeg::Status status = library_.stream_create(handle_, &header_);
    if (status != nvjpeg::kSuccess) library_.destroy(handle_);
    nvjpeg::check(status, "nvjpegJpegStreamCreate");
  }
  ~Nvjpeg() {
    library_.stream_destroy(header_);
    library_.destroy(handle_);
  }
  Nvjpeg(const Nvjpeg&) = delete;
  Nvjpeg& operator=(const Nvjpeg&) = delete;

  const nvjpeg::Library& operator*() const { return library_; }
  nvjpeg::Handle handle() const { return handle_; }

  // Whether the implementation decodes the image in a batch. If so, fills in its size.
  bool takes(Jpeg& jpeg) {
    int components = 0;
    int subsampling = 0;
    int widths[4] = {};
    int heights[4] = {};
    const nvjpeg::Status status = library_.image_info(handle_, jpeg.data, jpeg.bytes, &components,
                                                      &subsampling, widths, heights);
    if (status != nvjpeg::kSuccess || widths[0] <= 0 || heights[0] <= 0) return false;
    if (components != 1 && components != 3) return false;
    jpeg.width = static_cast<size_t>(widths[0]);
    jpeg.height = static_cast<size_t>(heights[0]);
    return backend_ != TS_BENCH_NVJPEG_HARDWARE || engines_take(jpeg);
  }

 private:
  // The engines decode baseline JPEGs of one scan. The other implementation decodes on the host
  // what the GPU cannot.
  bool engines_take(const Jpeg& jpeg) {
    int unsupported = 1;
    return library_.stream_parse(handle_, jpeg.data, jpeg.bytes, 0, 0, header_) ==
               nvjpeg::kSuccess &&
           library_.batch_supported(handle_, header_, &unsupported) == nvjpeg::kSuccess &&
           unsupported == 0;
  }

  const nvjpeg::Library& library_;
  nvjpeg::Backend backend_;
  nvjpeg::Handle handle_ = nullptr;
  nvjpeg::Stream header_ = nullptr;
};

// A thread's decoder: a state, a stream, and memory for the pixels of a batch. The calls of one
// decoder run one after the other.
class Decoder {
 public:
  Decoder(const Nvjpeg& nvjpeg, int32_t device, size_t batch, size_t room)
      : nvjpeg_(nvjpeg),
        device_(device),
        stream_(c10::cuda::getStreamFromPool(false, static_cast<c10::DeviceIndex>(device))),
        pixels_(memory_on(device, room)),
        data_(batch),
        bytes_(batch),
        images_(batch) {
    nvjpeg::check((*nvjpeg_).state_create(nvjpeg_.handle(), &state_), "nvjpegJpegStateCreate");
    const nvjpeg::Status status = (*nvjpeg_).batch_initialize(
        nvjpeg_.handle(), state_, static_cast<int>(batch), 1, nvjpeg::kOutputRgbInterleaved);
    if (status != nvjpeg::kSuccess) (*nvjpeg_).state_destroy(state_);
    nvjpeg::check(status, "nvjpegDecodeBatchedInitialize");
  }
  ~Decoder() { (*nvjpeg_).state_destroy(state_); }
  Decoder(const Decoder&) = delete;
  Decoder& operator=(const Decoder&) = delete;

  int32_t device() const { return device_; }

  // Decodes a batch, and waits for its pixels.
  void decode(const Jpeg* jpegs) {
    auto* to = pixels_.mutable_data_ptr<uint8_t>();
    for (size_t i = 0; i < images_.size(); ++i) {
      data_[i] = jpegs[i].data;
      bytes_[i] = jpegs[i].bytes;
      images_[i] = {{to}, {jpegs[i].width * 3}};
      to += jpegs[i].room();
    }
    const nvjpeg::Status status = (*nvjpeg_).batch_decode(
        nvjpeg_.handle(), state_, data_.data(), bytes_.data(), images_.data(), stream_.stream());
    C10_CUDA_CHECK(cudaStreamSynchronize(stream_.stream()));
    nvjpeg::check(status, "nvjpegDecodeBatched");
  }

 private:
  const Nvjpeg& nvjpeg_;
  int32_t device_;
  c10::cuda::CUDAStream stream_;
  at::Tensor pixels_;
  std::vector<const unsigned char*> data_;
  std::vector<size_t> bytes_;
  std::vector<nvjpeg::Image> images_;
  nvjpeg::State state_ = nullptr;
};

// Runs body(k) for each decoder in a separate thread. Throws the first error after all have ended.
template <typename Body>
void in_threads(const std::vector<std::unique_ptr<Decoder>>& decoders, const Body& body) {
  std::mutex mutex;
  std::exception_ptr error;
  std::vector<std::thread> threads;
  threads.reserve(decoders.size());
  const auto run = [&](size_t k) {
    try {
      const DeviceScope scope(decoders[k]->device());
      // A new thread has no context until it calls the runtime, and DeviceScope skips the call for
      // device 0. The engines' implementation may call the driver, which would find none.
      C10_CUDA_CHECK(cudaSetDevice(decoders[k]->device()));
      body(k);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex);
      if (!error) error = std::current_exception();
    }
  };
  const auto join = [&] {
    for (std::thread& thread : threads) thread.join();
  };
  try {
    for (size_t k = 0; k < decoders.size(); ++k) threads.emplace_back(run, k);
  } catch (...) {  // no more threads available
    join();
    throw;
  }
  join();
  if (error) std::rethrow_exception(error);
}

// Returns the CPU seconds of all threads of the process.
double cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

// Returns the images that the implementation decodes, in whole batches, or in one if there are too
// few.
std::vector<Jpeg> batches_of(Nvjpeg& nvjpeg, const uint8_t* data, const size_t* sizes,
                             int64_t count, size_t& batch, int64_t& left_out) {
  std::vector<Jpeg> jpegs;
  for (int64_t i = 0; i < count; ++i) {
    Jpeg jpeg{data, sizes[i], 0, 0};
    if (nvjpeg.takes(jpeg)) jpegs.push_back(jpeg);
    data += sizes[i];
  }
  left_out = count - static_cast<int64_t>(jpegs.size());
  if (jpegs.empty()) {
    throw Failure(TS_ERROR_UNSUPPORTED, "nvJPEG decodes none of the " + std::to_string(count) +
                                            " images in batches with this implementation");
  }
  batch = std::min(batch, jpegs.size());
  jpegs.resize(jpegs.size() / batch * batch);
  return jpegs;
}

ts_bench_nvjpeg_rate measure(int32_t device, nvjpeg::Backend backend, const uint8_t* data,
                             const size_t* sizes, int64_t count, size_t batch, int32_t threads,
                             double seconds) {
  ts_bench_nvjpeg_rate rate{};
  Nvjpeg nvjpeg(backend);
  if (backend == TS_BENCH_NVJPEG_HARDWARE) {
    unsigned engines = 0;
    unsigned cores = 0;
    nvjpeg::check((*nvjpeg).hardware_info(nvjpeg.handle(), &engines, &cores),
                  "nvjpegGetHardwareDecoderInfo");
    rate.engines = static_cast<int32_t>(engines);
    rate.cores_per_engine = static_cast<int32_t>(cores);
  }
  const std::vector<Jpeg> jpegs = batches_of(nvjpeg, data, sizes, count, batch, rate.left_out);
  rate.batch = static_cast<int64_t>(batch);
  const size_t batches = jpegs.size() / batch;
  size_t room = 0;
  for (size_t b = 0; b < batches; ++b) {
    size_t sum = 0;
    for (size_t i = 0; i < batch; ++i) sum += jpegs[b * batch + i].room();
    room = std::max(room, sum);
  }
  std::vector<std::unique_ptr<Decoder>> decoders;
  for (int32_t k = 0; k < threads; ++k) {
    decoders.push_back(std::make_unique<Decoder>(nvjpeg, device, batch, room));
  }
  // The caching allocator may have returned memory that another stream still uses.
  finish(c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device)));
  // nvJPEG allocates for the largest batch that a state has had.
  in_threads(decoders, [&](size_t k) {
    for (size_t b = 0; b < batches; ++b) decoders[k]->decode(&jpegs[b * batch]);
  });

  std::vector<int64_t> decoded(decoders.size());
  const double cpu = cpu_seconds();
  const Clock::time_point begin = Clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(Clock::now() - begin).count(); };
  in_threads(decoders, [&](size_t k) {
    for (size_t b = k; decoded[k] == 0 || elapsed() < seconds; ++b) {
      decoders[k]->decode(&jpegs[b % batches * batch]);
      decoded[k] += static_cast<int64_t>(batch);
    }
  });
  rate.seconds = elapsed();
  rate.cpu_seconds = cpu_seconds() - cpu;
  for (const int64_t images : decoded) rate.images += images;
  return rate;
}

}  // namespace
}  // namespace ts

ts_error* ts_bench_nvjpeg(int32_t device, int32_t backend, const uint8_t* data, const size_t* sizes,
                          int64_t count, int64_t batch, int32_t threads, double seconds,
                          ts_bench_nvjpeg_rate* rate) {
  return ts::guard(__func__, [&] {
    ts::lab::enter();
    ts::require(backend == TS_BENCH_NVJPEG_CUDA || backend == TS_BENCH_NVJPEG_HARDWARE,
                "backend has an unknown value");
    ts::require(data != nullptr && sizes != nullptr && rate != nullptr, "an argument is NULL");
    ts::require(count > 0 && batch > 0 && batch <= 4096, "count and batch must be at least 1");
    ts::require(threads > 0 && threads <= 64, "threads must be from 1 to 64");
    ts::require(seconds > 0 && seconds <= 3600, "seconds must be more than 0 and at most 3600");
    ts::lab::require_gpu(device);
    const ts::DeviceScope scope(device);
    *rate = ts::measure(device, backend, data, sizes, count, static_cast<size_t>(batch), threads,
                        seconds);
  });
}
