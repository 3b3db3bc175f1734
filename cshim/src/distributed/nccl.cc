// NCCL, if the build's LibTorch has it.
#include <utility>

#include "base/error.h"
#include "cuda/capture.h"
#include "cuda/device.h"
#include "distributed/backend.h"

#ifdef TS_NCCL
#ifndef USE_C10D_NCCL
#define USE_C10D_NCCL
#endif
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif

namespace ts::distributed {

#ifdef TS_NCCL
namespace {

// By default LibTorch ends the process after a timeout or an error of NCCL. This class makes it
// clean up only: its watchdog then aborts the communicators. Kernels that wait for a dead rank end,
// and every later collective fails.
class Nccl final : public c10d::ProcessGroupNCCL {
 public:
  Nccl(const Members& members, c10::intrusive_ptr<Options> options)
      : c10d::ProcessGroupNCCL(members.store, members.rank, members.size, std::move(options)) {
    asyncErrorHandling_ = c10d::CleanUpOnly;
  }
  ~Nccl() override {
    // The base's threads must not call this class after its destruction.
    if (terminateProcessGroup_.load()) return;
    try {
      abort();
    } catch (...) {
      // NCCL failed, or did not end within the timeout. abort has logged it and told the threads to
      // end.
    }
  }

  c10d::ErrorType getError() override {
    if (stuck_.load()) return c10d::ErrorType::TIMEOUT;
    return c10d::ProcessGroupNCCL::getError();
  }

 protected:
  // Called by the heartbeat monitor when the watchdog is stuck in a call of CUDA or NCCL.
  void terminateProcess(const std::string&) override { stuck_.store(true); }

 private:
  std::atomic<bool> stuck_{false};
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> new_nccl(const Members& members, int32_t device) {
  require_device(device);
  ensure_cuda();
  const DeviceScope scope(device);
  auto options = c10d::ProcessGroupNCCL::Options::create(/*is_high_priority_stream=*/true);
  options->timeout = members.timeout;
  options->group_name = members.name;
  options->global_ranks_in_group = members.ranks;
  auto made = c10::make_intrusive<Nccl>(members, std::move(options));
  made->setGroupUid(members.name);
  // Connects now: NCCL's first connection allocates memory and waits, which is impossible in a
  // capture.
  const c10::Device gpu(c10::kCUDA, static_cast<c10::DeviceIndex>(device));
  made->setBoundDeviceId(gpu);
  made->eagerConnectSingleDevice(gpu);
  return made;
}

#else

c10::intrusive_ptr<c10d::Backend> new_nccl(const Members&, int32_t device) {
  require_device(device);
  throw Failure(TS_ERROR_UNSUPPORTED, "the LibTorch of this build has no NCCL");
}

#endif

}  // namespace ts::distributed
