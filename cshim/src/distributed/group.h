// Groups of ranks and their collectives.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "torchstream.h"

struct ts_group {
  c10::intrusive_ptr<c10d::Backend> backend;
  int32_t device;  // TS_DEVICE_CPU for Gloo

  bool on_gpu() const { return device != TS_DEVICE_CPU; }
};

namespace ts::distributed {

// Gloo's work. One of Gloo's threads reports its end.
class Outcome {
 public:
  // Watches the work, which must have a future: not a send or receive.
  explicit Outcome(c10d::Work& work);
  // Blocks until the work is done or abort is called. Throws if the work was aborted or has failed.
  void wait() const;
  // Whether the work has ended, with or without an error.
  bool done() const;
  // Ends all waits. The work continues.
  void abort() const;

 private:
  struct Shared {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
    bool aborted = false;
    std::string error;
  };
  std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
};

// Returns LibTorch's reduction for the header's. Gloo has no average: it sums, and divide follows.
c10d::ReduceOp checked_reduction(const ts_group& group, int32_t reduction);
// Whether Gloo's sums must be divided by the number of ranks.
bool divides(const ts_group& group, int32_t reduction);

}  // namespace ts::distributed
