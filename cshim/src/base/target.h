// Marks functions that g++ compiles for the host and nvcc for the device.
#pragma once

#if defined(__CUDACC__)
#define TS_HOST_DEVICE __host__ __device__ __forceinline__
// nvcc compiles these for the device alone, because they call functions of the device. g++ compiles
// them with the host's counterparts of those, for tests.
#define TS_DEVICE __device__ __forceinline__
#else
#define TS_HOST_DEVICE inline
#define TS_DEVICE inline
#endif
