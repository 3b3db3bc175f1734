// The threads that use cuBLAS, cuDNN and cuSOLVER. LibTorch keeps handles of these libraries, with
// device memory, for every OS thread that called them. Go runs a goroutine on any of its threads,
// of which there may be hundreds, so a maximum number of threads get handles. A call of another
// thread runs on one of a few threads that stand in for it.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <mutex>
#include <string>

namespace ts {

enum class Libraries : uint8_t {
  kNone,
  kHandles,  // cuDNN
  kBlas      // cuBLAS, which needs a workspace too, perhaps beside cuDNN, or cuSOLVER
};

// Returns what an operator may use on a GPU, by its name, such as "aten::mm".
Libraries libraries_of(const std::string& name);

// Returns whether the calling thread may have handles. If so, it may use these libraries on the
// device as long as it holds what is written to `workspace`, which must be empty before.
[[nodiscard]] bool use_libraries_here(Libraries used, c10::DeviceIndex device,
                                      std::unique_lock<std::mutex>& workspace);

// Runs the body, which uses these libraries on the device, on a thread that may have handles. The
// body finds the device, the streams and the memory pool of the caller. It sets gradient mode and
// autocast itself.
void run_with_libraries(Libraries used, c10::DeviceIndex device, c10::function_ref<void()> body);

// Makes the handles of the calling thread that a capture could not make, if the thread may have
// any. Otherwise its calls run on other threads, which may make them during the capture.
void prepare_libraries(c10::DeviceIndex device);

}  // namespace ts
