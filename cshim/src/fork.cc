// Fork and join: ordering one stream against several in one call.
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/SmallVector.h>
#include <cuda_runtime_api.h>

#include "device.h"
#include "error.h"
#include "stream.h"
#include "thread.h"

namespace ts {
namespace {

using c10::cuda::CUDAStream;
using Streams = c10::SmallVector<CUDAStream, 8>;

// All of them, checked before anything is enqueued, without those that are `side` itself: a stream
// is always in its own order.
Streams others(CUDAStream side, const ts_stream* streams, int32_t count) {
  require(count >= 0, "count is negative");
  require(count == 0 || streams != nullptr, "the streams are NULL");
  Streams checked;
  for (int32_t i = 0; i < count; ++i) {
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
}  // namespace ts

ts_error* ts_stream_fork(ts_stream from, const ts_stream* to, int32_t count) {
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

ts_error* ts_stream_join(ts_stream into, const ts_stream* from, int32_t count) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    const auto waiter = ts::checked_stream(into);
    const auto sources = ts::others(waiter, from, count);
    for (const auto source : sources) ts::require_in_capture_of(waiter, source);
    for (const auto source : sources) ts::order_after(waiter, source);
  });
}
