// Marks functions that g++ compiles for the host and nvcc for the device.
#pragma once

#if defined(__CUDACC__)
#define TS_HOST_DEVICE __host__ __device__ __forceinline__
// nvcc compiles these for the device only, because they call device functions. g++ compiles them
// for tests, with host counterparts of those functions.
#define TS_DEVICE __device__ __forceinline__
// For rare code on both sides: compiled as a call, so that a kernel's loop stays small.
#define TS_HOST_DEVICE_RARE __host__ __device__ __noinline__ inline
#else
#define TS_HOST_DEVICE inline
#define TS_DEVICE inline
#define TS_HOST_DEVICE_RARE inline
#endif

// The first is for a loop with a fixed number of iterations: device code unrolls it. The second is
// for a loop of few iterations: device code does not unroll it.
#if defined(__CUDA_ARCH__)
#define TS_UNROLL _Pragma("unroll")
#define TS_NO_UNROLL _Pragma("unroll 1")
#else
#define TS_UNROLL
#define TS_NO_UNROLL
#endif
