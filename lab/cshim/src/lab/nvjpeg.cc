#include "lab/nvjpeg.h"

#include <dlfcn.h>

#include <memory>
#include <mutex>
#include <string>

#include "base/error.h"
#include "torchstream_image.h"

namespace ts::nvjpeg {
namespace {

class Loaded {
 public:
  explicit Loaded(const std::string& name)
      : name_(name), library_(dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    if (library_ == nullptr) {
      const char* reason = dlerror();
      throw Failure(TS_ERROR_UNSUPPORTED, "nvJPEG cannot be loaded (" +
                                              (reason == nullptr ? name : std::string(reason)) +
                                              "): " + how_to_install());
    }
    try {
      load("nvjpegCreateEx", functions_.create);
      load("nvjpegDestroy", functions_.destroy);
      load("nvjpegGetHardwareDecoderInfo", functions_.hardware_info);
      load("nvjpegJpegStateCreate", functions_.state_create);
      load("nvjpegJpegStateDestroy", functions_.state_destroy);
      load("nvjpegJpegStreamCreate", functions_.stream_create);
      load("nvjpegJpegStreamDestroy", functions_.stream_destroy);
      load("nvjpegJpegStreamParse", functions_.stream_parse);
      load("nvjpegDecodeBatchedSupported", functions_.batch_supported);
      load("nvjpegGetImageInfo", functions_.image_info);
      load("nvjpegDecodeBatchedInitialize", functions_.batch_initialize);
      load("nvjpegDecodeBatched", functions_.batch_decode);
    } catch (...) {
      dlclose(library_);
      throw;
    }
  }
  // Never unloaded, like every CUDA library.
  Loaded(const Loaded&) = delete;
  Loaded& operator=(const Loaded&) = delete;

  const Library& functions() const noexcept { return functions_; }

 private:
  std::string how_to_install() const {
    return "install the CUDA toolkit's nvJPEG (libnvjpeg in NVIDIA's packages, nvidia-nvjpeg from "
           "pip), and name the folder of " +
           name_ + " in LD_LIBRARY_PATH";
  }

  template <typename Function>
  void load(const char* name, Function*& function) {
    function = reinterpret_cast<Function*>(dlsym(library_, name));
    if (function != nullptr) return;
    throw Failure(TS_ERROR_UNSUPPORTED,
                  name_ + " has no function " + name + ": " + how_to_install());
  }

  std::string name_;
  void* library_;
  Library functions_{};
};

const char* name_of(Status status) {
  // In the order of nvjpegStatus_t.
  static constexpr const char* kNames[] = {"SUCCESS",
                                           "NOT_INITIALIZED",
                                           "INVALID_PARAMETER",
                                           "BAD_JPEG",
                                           "JPEG_NOT_SUPPORTED",
                                           "ALLOCATOR_FAILURE",
                                           "EXECUTION_FAILED",
                                           "ARCH_MISMATCH",
                                           "INTERNAL_ERROR",
                                           "IMPLEMENTATION_NOT_SUPPORTED",
                                           "INCOMPLETE_BITSTREAM"};
  constexpr Status kCount = sizeof kNames / sizeof *kNames;
  return status >= 0 && status < kCount ? kNames[status] : "an unknown status";
}

}  // namespace

const Library& library() {
  static std::mutex mutex;
  static const Loaded* loaded = nullptr;  // never destroyed: threads may outlive main
  const std::lock_guard<std::mutex> lock(mutex);
  if (loaded == nullptr) {
    int version = 0;  // 13000 is CUDA 13.0
    cudaRuntimeGetVersion(&version);
    const std::string name = "libnvjpeg.so." + std::to_string(version / 1000);
    loaded = std::make_unique<Loaded>(name).release();
  }
  return loaded->functions();
}

void check(Status status, const char* call) {
  if (status == kSuccess) return;
  const std::string message = std::string(call) + ": " + name_of(status);
  if (status == kArchMismatch || status == kNotImplemented) {
    throw Failure(TS_ERROR_UNSUPPORTED,
                  message + ": this GPU or its driver does not offer this implementation");
  }
  throw Failure(TS_ERROR_CUDA, message);
}

}  // namespace ts::nvjpeg
