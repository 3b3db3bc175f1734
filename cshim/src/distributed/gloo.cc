// Gloo, with the part of its headers that LibTorch's header needs (gloo_headers).
#include <utility>

#include "distributed/backend.h"

#ifndef USE_C10D_GLOO
#define USE_C10D_GLOO
#endif
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

namespace ts::distributed {
namespace {

class Gloo final : public c10d::ProcessGroupGloo {
 public:
  using c10d::ProcessGroupGloo::ProcessGroupGloo;

  // LibTorch's abort does nothing. Closing the connections ends the waits of other ranks.
  void abort() override {
    for (const auto& context : contexts_) context->closeConnections();
  }
  c10d::ErrorType getError() override { return c10d::ErrorType::SUCCESS; }
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> new_gloo(const Members& members) {
  // Uses the interfaces named by GLOO_SOCKET_IFNAME, or the interface of this host's name.
  auto options = c10d::ProcessGroupGloo::Options::create_default(members.timeout);
  options->group_name = members.name;
  options->global_ranks_in_group = members.ranks;
  auto made = c10::make_intrusive<Gloo>(members.store, members.rank, members.size, options);
  made->setGroupUid(members.name);
  return made;
}

}  // namespace ts::distributed
