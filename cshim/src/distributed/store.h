// Stores that the processes of a job share.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "base/error.h"
#include "torchstream.h"

struct ts_store {
  c10::intrusive_ptr<c10d::Store> store;
};

namespace ts::distributed {

// Converts a timeout of the header for LibTorch, which counts milliseconds and takes 0 as no
// timeout.
inline std::chrono::milliseconds checked_timeout(int64_t nanoseconds) {
  require(nanoseconds > 0, "the timeout must be over 0");
  const auto whole =
      std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::nanoseconds(nanoseconds));
  return whole + std::chrono::milliseconds(whole.count() == 0 ? 1 : 0);
}

}  // namespace ts::distributed
