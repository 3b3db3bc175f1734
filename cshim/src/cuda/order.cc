#include "cuda/order.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/SmallVector.h>
#include <cuda_runtime_api.h>

#include <array>
#include <mutex>
#include <vector>

#include "base/error.h"
#include "base/thread.h"
#include "cuda/capture.h"
#include "cuda/device.h"
#include "cuda/same_stream.h"
#include "cuda/stream.h"
#include "torchstream.h"

namespace ts {
namespace {

using c10::DeviceIndex;
using c10::cuda::CUDAStream;
using Streams = c10::SmallVector<CUDAStream, 8>;

// The events that ts_wait_cuda_stream records and immediately waits for. An event can be recorded
// again as soon as the wait is enqueued, so one event for each thread and device is enough, without
// a lock. When a thread ends, its events pass to the next thread.
class WaitEvents {
 public:
  WaitEvents() = default;
  WaitEvents(const WaitEvents&) = delete;
  WaitEvents& operator=(const WaitEvents&) = delete;
  ~WaitEvents() {
    for (size_t device = 0; device < events_.size(); ++device) {
      if (events_[device] != nullptr) give_back(device, events_[device]);
    }
  }

  // Returns an event of the device, which must be current.
  cudaEvent_t get(DeviceIndex device) {
    const auto index = static_cast<size_t>(device);
    if (index >= events_.size()) events_.resize(index + 1, nullptr);
    if (events_[index] == nullptr) events_[index] = take(index);
    return events_[index];
  }

 private:
  struct Spare {
    std::mutex mutex;
    // Capacity for every event ever made stays reserved, so that returning an event cannot fail.
    std::array<std::vector<cudaEvent_t>, C10_COMPILE_TIME_MAX_GPUS> events;
    std::array<size_t, C10_COMPILE_TIME_MAX_GPUS> made{};
  };

  static Spare& spare() {
    static auto* all = new Spare;  // never destroyed: threads may outlive main
    return *all;
  }

  static cudaEvent_t take(size_t device) {
    Spare& all = spare();
    const std::lock_guard<std::mutex> lock(all.mutex);
    auto& events = all.events[device];
    if (!events.empty()) {
      cudaEvent_t event = events.back();
      events.pop_back();
      return event;
    }
    events.reserve(all.made[device] + 1);
    cudaEvent_t event = nullptr;
    C10_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    ++all.made[device];
    return event;
  }

  static void give_back(size_t device, cudaEvent_t event) noexcept {
    Spare& all = spare();
    const std::lock_guard<std::mutex> lock(all.mutex);
    all.events[device].push_back(event);
  }

  std::vector<cudaEvent_t> events_;
};

// Returns an event of the device, which must be current, for a record with an immediate wait. All
// calls on a thread get the same event, which can be recorded again as soon as the waits are
// enqueued.
cudaEvent_t wait_event(DeviceIndex device) {
  thread_local WaitEvents here;
  return here.get(device);
}

// Returns the streams, checked before anything is enqueued, without those equal to `side`: a stream
// is always in its own order.
Streams others(CUDAStream side, const ts_stream* streams, int64_t count) {
  require(count >= 0, "count is negative");
  require(count == 0 || streams != nullptr, "the streams are NULL");
  Streams checked;
  for (int64_t i = 0; i < count; ++i) {
    const CUDAStream stream = checked_stream(streams[i]);
    if (!same_stream(stream, side)) checked.push_back(stream);
  }
  return checked;
}

// The devices matter for default streams: their handle is NULL on all of them.
cudaEvent_t record(CUDAStream on) {
  const DeviceScope scope(on.device_index());
  cudaEvent_t event = wait_event(on.device_index());
  C10_CUDA_CHECK(cudaEventRecord(event, on.stream()));
  return event;
}

void wait(CUDAStream waiter, cudaEvent_t event) {
  const DeviceScope scope(waiter.device_index());
  C10_CUDA_CHECK(cudaStreamWaitEvent(waiter.stream(), event, cudaEventWaitDefault));
}

}  // namespace

void order_after(CUDAStream waiter, CUDAStream on) {
  if (same_stream(waiter, on)) return;  // a stream is always in its own order
  require_in_capture_of(waiter, on);
  // The devices matter for default streams: their handle is NULL on all of them.
  const DeviceScope scope(on.device_index());
  cudaEvent_t event = wait_event(on.device_index());
  C10_CUDA_CHECK(cudaEventRecord(event, on.stream()));
  if (waiter.device_index() == on.device_index()) {
    C10_CUDA_CHECK(cudaStreamWaitEvent(waiter.stream(), event, cudaEventWaitDefault));
  } else {
    const DeviceScope other(waiter.device_index());
    C10_CUDA_CHECK(cudaStreamWaitEvent(waiter.stream(), event, cudaEventWaitDefault));
  }
}

}  // namespace ts

ts_error* ts_wait_cuda_stream(ts_stream waiter, ts_stream on) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    const auto waiting = ts::checked_stream(waiter);
    ts::order_after(waiting, ts::checked_stream(on));
  });
}

ts_error* ts_stream_fork(ts_stream from, const ts_stream* to, int64_t count) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    const auto source = ts::checked_stream(from);
    const auto waiters = ts::others(source, to, count);
    if (waiters.empty()) return;
    for (const auto waiter : waiters) ts::require_in_capture_of(waiter, source);
    cudaEvent_t event = ts::record(source);
    for (const auto waiter : waiters) ts::wait(waiter, event);
  });
}

ts_error* ts_stream_join(ts_stream into, const ts_stream* from, int64_t count) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    const auto waiter = ts::checked_stream(into);
    const auto sources = ts::others(waiter, from, count);
    for (const auto source : sources) ts::require_in_capture_of(waiter, source);
    for (const auto source : sources) ts::order_after(waiter, source);
  });
}
