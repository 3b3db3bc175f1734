// A part of a GPU's multiprocessors, as a green context of the driver.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace ts {

// Returns the number of multiprocessors of the device's largest part that has at most so many. The
// driver cuts parts of a minimum size and of multiples of a number: 8 both on compute capability
// 9.0. 0 if the device has no more than `maximum`, so that nothing is to be left out.
// INVALID_ARGUMENT if the minimum is larger, UNSUPPORTED if the driver has no green contexts.
int32_t multiprocessors_within(int32_t device, int32_t maximum);

// Makes a stream whose kernels run on one part of the device, which has as many multiprocessors as
// multiprocessors_within has returned. All streams of a device and a number share a part, which
// lives as long as the process. The device is the current one.
cudaStream_t make_stream_on_part(int32_t device, int32_t priority, int32_t multiprocessors);

}  // namespace ts
