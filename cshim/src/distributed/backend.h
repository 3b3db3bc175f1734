// The backends of collectives: LibTorch's Gloo for the CPU and NCCL for GPUs.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

namespace ts::distributed {

// A group of ranks.
struct Members {
  c10::intrusive_ptr<c10d::Store> store;  // used by this group only
  std::string name;
  int rank;
  int size;
  std::vector<uint64_t> ranks;  // the members' ranks in the whole job
  std::chrono::milliseconds timeout;
};

// These functions connect the calling rank to the others, and block until all ranks have called.
// Waits for the store are limited by the store's timeout.
c10::intrusive_ptr<c10d::Backend> new_gloo(const Members& members);
// device: the index of an existing GPU. Throws UNSUPPORTED in a build without NCCL.
c10::intrusive_ptr<c10d::Backend> new_nccl(const Members& members, int32_t device);

}  // namespace ts::distributed
