// Notices: the host learns that a stream has reached a point, without a waiting thread.
#include <c10/cuda/CUDAException.h>
#include <cuda_runtime_api.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/thread.h"
#include "cuda/capture.h"
#include "cuda/device.h"
#include "cuda/stream.h"
#include "torchstream.h"

namespace ts {
namespace {

// The state that a notifier shares with notices in progress, which may outlive it.
class Mailbox {
 public:
  Mailbox() : fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    if (fd_ < 0) {
      throw Failure(TS_ERROR_INTERNAL, std::string("eventfd: ") + std::strerror(errno));
    }
  }
  ~Mailbox() { close(fd_); }
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  int fd() const noexcept { return fd_; }

  // Reserves room for a token in advance, so that put allocates nothing.
  void expect() {
    const std::lock_guard<std::mutex> lock(mutex_);
    tokens_.reserve(tokens_.size() + expected_ + 1);
    ++expected_;
  }
  void give_up() noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    --expected_;
  }

  // Runs on a driver thread: no CUDA call, no allocation, nothing that blocks for long.
  void put(uint64_t token) noexcept {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      --expected_;
      tokens_.push_back(token);
    }
    const uint64_t one = 1;
    // Fails only if the counter is full, and then the descriptor is already readable.
    [[maybe_unused]] const ssize_t written = write(fd_, &one, sizeof one);
  }

  int64_t take(uint64_t* tokens, int64_t capacity) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto count = std::min(static_cast<size_t>(capacity), tokens_.size());
    const auto end = tokens_.begin() + static_cast<ptrdiff_t>(count);
    std::copy(tokens_.begin(), end, tokens);
    tokens_.erase(tokens_.begin(), end);
    return static_cast<int64_t>(count);
  }

 private:
  const int fd_;
  std::mutex mutex_;
  std::vector<uint64_t> tokens_;
  size_t expected_ = 0;
};

struct Notice {
  std::shared_ptr<Mailbox> mailbox;
  uint64_t token;
};

void CUDART_CB deliver(void* argument) {
  const std::unique_ptr<Notice> notice(static_cast<Notice*>(argument));
  notice->mailbox->put(notice->token);
}

}  // namespace
}  // namespace ts

struct ts_notifier {
  std::shared_ptr<ts::Mailbox> mailbox = std::make_shared<ts::Mailbox>();
};

ts_error* ts_notifier_new(ts_notifier** notifier) {
  return ts::guard(__func__, [&] {
    ts::require(notifier != nullptr, "notifier is NULL");
    *notifier = std::make_unique<ts_notifier>().release();
  });
}

int32_t ts_notifier_fd(const ts_notifier* notifier) {
  return notifier == nullptr ? -1 : notifier->mailbox->fd();
}

ts_error* ts_notifier_take(ts_notifier* notifier, uint64_t* tokens, int64_t capacity,
                           int64_t* count) {
  return ts::guard(__func__, [&] {
    ts::require(notifier != nullptr, "notifier is NULL");
    ts::require(count != nullptr, "count is NULL");
    ts::require(capacity >= 0 && (capacity == 0 || tokens != nullptr),
                "tokens is NULL or capacity negative");
    *count = notifier->mailbox->take(tokens, capacity);
  });
}

ts_error* ts_notifier_post(ts_notifier* notifier, uint64_t token) {
  return ts::guard(__func__, [&] {
    ts::require(notifier != nullptr, "notifier is NULL");
    notifier->mailbox->expect();
    notifier->mailbox->put(token);
  });
}

void ts_notifier_free(ts_notifier* notifier) { delete notifier; }

ts_error* ts_stream_notify(ts_stream stream, ts_notifier* notifier, uint64_t token) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(notifier != nullptr, "notifier is NULL");
    const auto on = ts::checked_stream(stream);
    const ts::DeviceScope scope(on.device_index());
    // In a graph every replay would send the notice, but its memory exists only once.
    ts::require_no_capture(on);
    auto notice = std::make_unique<ts::Notice>(ts::Notice{notifier->mailbox, token});
    notifier->mailbox->expect();
    const cudaError_t status = cudaLaunchHostFunc(on.stream(), &ts::deliver, notice.get());
    if (status == cudaSuccess) {
      static_cast<void>(notice.release());  // deliver owns it now
      return;
    }
    notifier->mailbox->give_up();
    C10_CUDA_CHECK(status);
  });
}
