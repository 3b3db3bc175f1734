// The engines of collectives: LibTorch's Gloo for the CPU and NCCL for GPUs.
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
  c10::intrusive_ptr<c10d::Store> store;  // of this group alone
  std::string name;
  int rank;
  int size;
  std::vector<uint64_t> ranks;  // of the members in the whole job
  std::chrono::milliseconds timeout;
};

// Connect the calling rank with the others. Both block until all ranks have called, no longer than
// the store's timeout for what goes through the store.
c10::intrusive_ptr<c10d::Backend> new_gloo(const Members& members);
// device: the index of a GPU that exists. UNSUPPORTED in a build without NCCL.
c10::intrusive_ptr<c10d::Backend> new_nccl(const Members& members, int32_t device);

}  // namespace ts::distributed
