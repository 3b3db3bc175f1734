// A part of a GPU's multiprocessors, as a green context of the driver.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace ts {

// Returns the number of multiprocessors in the device's largest part of at most `maximum`. The
// driver makes parts of a minimum size and of multiples of a number; both are 8 on compute
// capability 9.0. Returns 0 if the device has no more than `maximum`, so that no part is needed.
// Throws INVALID_ARGUMENT if the minimum is larger, UNSUPPORTED if the driver has no green
// contexts.
int32_t multiprocessors_within(int32_t device, int32_t maximum);

// Makes a stream whose kernels run on one part of the device, of a size that multiprocessors_within
// has returned. All streams of a device and size share a part, which lives until the process ends.
// The device must be current.
cudaStream_t make_stream_on_part(int32_t device, int32_t priority, int32_t multiprocessors);

}  // namespace ts
