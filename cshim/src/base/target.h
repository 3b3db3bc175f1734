// Marks functions that g++ compiles for the host and nvcc for the device.
#pragma once

#if defined(__CUDACC__)
#define TS_HOST_DEVICE __host__ __device__ __forceinline__
// nvcc compiles these for the device alone, because they call functions of the device. g++ compiles
// them with the host's counterparts of those, for tests.
#define TS_DEVICE __device__ __forceinline__
// Of both, for what is rare: a call, so that a kernel's loop stays small.
#define TS_HOST_DEVICE_RARE __host__ __device__ __noinline__ inline
#else
#define TS_HOST_DEVICE inline
#define TS_DEVICE inline
#define TS_HOST_DEVICE_RARE inline
#endif

// Before a loop of a fixed number of turns: the device's code has each turn by itself. And
// before one of few turns: it has them once.
#if defined(__CUDA_ARCH__)
#define TS_UNROLL _Pragma("unroll")
#define TS_NO_UNROLL _Pragma("unroll 1")
#else
#define TS_UNROLL
#define TS_NO_UNROLL
#endif
