#include "cuda/partition.h"

#include <c10/cuda/CUDAException.h>
#include <cuda.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "base/error.h"
#include "torchstream.h"

namespace ts {
namespace {

// Finds a function of the driver, which this library does not link because machines without a GPU
// lack it.
template <typename Function>
Function* driver_function(const char* name) {
  // The first version of CUDA with streams of green contexts.
  constexpr unsigned kGreenContexts = 12050;
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion(name, &function, kGreenContexts, cudaEnableDefault, &found);
  if (status != cudaSuccess) C10_CUDA_CLEAR_ERROR();
  if (status != cudaSuccess || found != cudaDriverEntryPointSuccess || function == nullptr) {
    throw Failure(TS_ERROR_UNSUPPORTED,
                  std::string("the driver has no ") + name +
                      ", which a bound on the multiprocessors needs: it is of CUDA 12.5 and later");
  }
  return reinterpret_cast<Function*>(function);
}

void check(CUresult result, const char* call) {
  if (result == CUDA_SUCCESS) return;
  throw Failure(TS_ERROR_CUDA, std::string(call) + " failed: error " +
                                   std::to_string(static_cast<int>(result)) +
                                   " of CUDA's driver (CUresult)");
}

CUdevice driver_device(int32_t device) {
  CUdevice found = 0;
  check(driver_function<decltype(cuDeviceGet)>("cuDeviceGet")(&found, device), "cuDeviceGet");
  return found;
}

CUdevResource all_multiprocessors(int32_t device) {
  CUdevResource all = {};
  check(driver_function<decltype(cuDeviceGetDevResource)>("cuDeviceGetDevResource")(
            driver_device(device), &all, CU_DEV_RESOURCE_TYPE_SM),
        "cuDeviceGetDevResource");
  return all;
}

CUgreenCtx make_part(int32_t device, int32_t multiprocessors) {
  const CUdevResource all = all_multiprocessors(device);
  CUdevResource part = {};
  unsigned parts = 1;
  check(driver_function<decltype(cuDevSmResourceSplitByCount)>("cuDevSmResourceSplitByCount")(
            &part, &parts, &all, nullptr, 0, static_cast<unsigned>(multiprocessors)),
        "cuDevSmResourceSplitByCount");
  // The driver rounds up a size that it does not support.
  if (parts != 1 || part.sm.smCount != static_cast<unsigned>(multiprocessors)) {
    throw Failure(TS_ERROR_CUDA, "the driver cut a part of " + std::to_string(part.sm.smCount) +
                                     " multiprocessors, not of " + std::to_string(multiprocessors));
  }
  CUdevResourceDesc description = nullptr;
  check(driver_function<decltype(cuDevResourceGenerateDesc)>("cuDevResourceGenerateDesc")(
            &description, &part, 1),
        "cuDevResourceGenerateDesc");
  C10_CUDA_CHECK(cudaFree(nullptr));  // creates the device's context if there is none yet
  CUgreenCtx made = nullptr;
  check(driver_function<decltype(cuGreenCtxCreate)>("cuGreenCtxCreate")(
            &made, description, driver_device(device), CU_GREEN_CTX_DEFAULT_STREAM),
        "cuGreenCtxCreate");
  return made;
}

// The parts of all devices. They are never destroyed, because their streams are not.
struct Parts {
  std::mutex mutex;
  std::map<std::pair<int32_t, int32_t>, CUgreenCtx> made;  // by device and multiprocessors
};

Parts& all_parts() {
  static auto* parts = new Parts;  // never destroyed: threads may outlive main
  return *parts;
}

}  // namespace

int32_t multiprocessors_within(int32_t device, int32_t maximum) {
  const CUdevSmResource all = all_multiprocessors(device).sm;
  if (all.smCount == 0) {
    throw Failure(TS_ERROR_CUDA, "the driver does not say how many multiprocessors there are");
  }
  const auto count = static_cast<unsigned>(std::max(0, maximum));
  if (count >= all.smCount) return 0;
  // Older drivers do not report the two numbers.
  constexpr unsigned kOfHopper = 8;
  const unsigned smallest = all.minSmPartitionSize != 0 ? all.minSmPartitionSize : kOfHopper;
  const unsigned step = all.smCoscheduledAlignment != 0 ? all.smCoscheduledAlignment : kOfHopper;
  const unsigned within = count / step * step;
  if (within < smallest || within == 0) {
    throw Failure(TS_ERROR_INVALID_ARGUMENT,
                  "a bound of " + std::to_string(maximum) + " multiprocessors: device " +
                      std::to_string(device) + " has parts of at least " +
                      std::to_string(std::max(smallest, step)));
  }
  return static_cast<int32_t>(within);
}

cudaStream_t make_stream_on_part(int32_t device, int32_t priority, int32_t multiprocessors) {
  const auto make = driver_function<decltype(cuGreenCtxStreamCreate)>("cuGreenCtxStreamCreate");
  Parts& parts = all_parts();
  const std::lock_guard<std::mutex> lock(parts.mutex);
  CUgreenCtx& part = parts.made[{device, multiprocessors}];
  if (part == nullptr) part = make_part(device, multiprocessors);
  CUstream made = nullptr;
  check(make(&made, part, CU_STREAM_NON_BLOCKING, priority), "cuGreenCtxStreamCreate");
  return made;
}

}  // namespace ts
