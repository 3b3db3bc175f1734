// The threads that use cuBLAS, cuDNN and cuSOLVER. LibTorch keeps handles of these libraries, with
// device memory, for every OS thread that has called them. Go runs a goroutine on any of its
// threads, of which there may be hundreds. So only a limited number of threads get handles. A call
// on any other thread runs on one of a few stand-in threads.
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
  kBlas      // cuBLAS, which also needs a workspace; perhaps with cuDNN or cuSOLVER
};

// Returns the libraries that an operator may use on a GPU, by the operator's name, such as
// "aten::mm".
Libraries libraries_of(const std::string& name);

// Returns whether the calling thread may have handles. If so, it may use these libraries on the
// device as long as it holds the reference written to `workspace`, which must be empty before.
[[nodiscard]] bool use_libraries_here(Libraries used, c10::DeviceIndex device,
                                      std::unique_lock<std::mutex>& workspace);

// Runs the body, which uses these libraries on the device, on a thread that may have handles. The
// body finds the caller's device, streams and memory pool. It sets gradient mode and autocast
// itself.
void run_with_libraries(Libraries used, c10::DeviceIndex device, c10::function_ref<void()> body);

// Creates the handles of the calling thread that cannot be created during a capture, if the thread
// may have any. Otherwise its calls run on other threads, which may create them during the capture.
void prepare_libraries(c10::DeviceIndex device);

}  // namespace ts
