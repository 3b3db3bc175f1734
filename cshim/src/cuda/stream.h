// Streams: conversion of the header's values to c10's, with checks.
#pragma once

#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include "torchstream.h"

namespace ts {

// Returns the stream of the value. Throws NO_DEVICE or INVALID_ARGUMENT unless the value names an
// existing stream. c10 checks nothing and would write past its tables.
c10::cuda::CUDAStream checked_stream(ts_stream stream);

ts_stream to_value(c10::cuda::CUDAStream stream) noexcept;

}  // namespace ts
