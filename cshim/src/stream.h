// Streams: the header's values and c10's, checked on the way in.
#pragma once

#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include "error.h"
#include "torchstream.h"

namespace ts {

// The stream of the value, after checking that it names one that exists: NO_DEVICE or
// INVALID_ARGUMENT otherwise. c10 checks nothing and would write past its tables.
c10::cuda::CUDAStream checked_stream(ts_stream stream);

ts_stream to_value(c10::cuda::CUDAStream stream) noexcept;

bool is_capturing(c10::cuda::CUDAStream stream);

// INVALID_ARGUMENT while the stream is captured. CUDA refuses as well what cannot be captured, but
// ends the capture with it.
inline void require_no_capture(c10::cuda::CUDAStream stream) {
  require(!is_capturing(stream), "the stream is being captured: nothing runs on it now");
}

// The same stream, whatever the two values: one cudaStream_t may have a pool id and an external id.
inline bool same_stream(c10::cuda::CUDAStream a, c10::cuda::CUDAStream b) {
  return a.device_index() == b.device_index() && a.stream() == b.stream();
}

// CAPTURE if the waiter is captured and the other stream is not, which would end the capture.
void require_in_capture_of(c10::cuda::CUDAStream waiter, c10::cuda::CUDAStream on);

// What is enqueued on `waiter` from now on starts after what is on `on` now.
void order_after(c10::cuda::CUDAStream waiter, c10::cuda::CUDAStream on);

// An event of the device, which is the current one, for a record that is waited for at once: the
// same for every call on a thread, which may record it again as soon as the waits are enqueued.
cudaEvent_t wait_event(c10::DeviceIndex device);

}  // namespace ts
