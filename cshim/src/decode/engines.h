// A GPU's JPEG engines, through nvJPEG: whole images, whose pixels differ from libjpeg-turbo's by
// some levels.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "decode/nvjpeg.h"
#include "decode/queue.h"
#include "torchstream.h"

namespace ts::decode {

// The engines' part of a decoder. One thread uses it at a time.
class Engines {
 public:
  // Loads nvJPEG. UNSUPPORTED without it, or without engines.
  Engines(int32_t device, int64_t max_images);
  ~Engines();
  Engines(const Engines&) = delete;
  Engines& operator=(const Engines&) = delete;

  // Reports whether nvJPEG reads this size from a file's header, and has the engines decode it.
  bool takes(const uint8_t* file, size_t bytes, int32_t width, int32_t height);
  // Adds an image to the next call: its rows of width * 3 bytes go to device memory. The file is
  // borrowed until the call's work is done.
  void add(const uint8_t* file, size_t bytes, uint8_t* to, int32_t width);
  // Enqueues the decoding of what was added, by one call of nvJPEG. Returns false if that fails:
  // the pixels are undefined. Waits for the work of the call before, whose memory nvJPEG uses
  // again.
  bool decode(const Queue& queue);

  ts_gpu_engines stats() const;

 private:
  // What nvJPEG allocates of one kind, on any thread: the context of an nvjpeg::Allocator.
  struct Memory {
    cudaError_t (*make)(void** block, size_t bytes);
    cudaError_t (*free)(void* block);
    std::mutex mutex;
    std::vector<std::pair<void*, size_t>> blocks;
    size_t bytes();
  };
  static int allocate(void* memory, void** block, size_t bytes, cudaStream_t stream);
  static int release(void* memory, void* block, size_t bytes, cudaStream_t stream);

  void create();
  void destroy() noexcept;
  nvjpeg::Status enqueue(const Queue& queue);

  const nvjpeg::Library& library_;
  const int32_t device_;
  mutable Memory memory_, pinned_;
  nvjpeg::Allocator allocator_, pinned_allocator_;
  nvjpeg::Handle handle_ = nullptr;
  nvjpeg::Stream header_ = nullptr;
  nvjpeg::State state_ = nullptr;
  cudaEvent_t idle_ = nullptr;  // NULL on the host
  unsigned engines_ = 0, cores_ = 0;

  // Of the next call.
  std::vector<const unsigned char*> files_;
  std::vector<size_t> bytes_;
  std::vector<nvjpeg::Image> images_;

  int64_t decoded_ = 0, refused_ = 0, failed_ = 0;
  const char* failure_ = nullptr;
};

}  // namespace ts::decode
