// The part of CUDA's driver interface that this library and LibTorch's headers name, for a build
// without CUDA.
#pragma once

#include <cstddef>

#include "cuda_runtime_api.h"

#define CUDA_VERSION 13000

using CUdeviceptr = unsigned long long;
using CUdevice = int;
using CUstream = cudaStream_t;
enum CUresult { CUDA_SUCCESS = 0 };
extern "C" CUresult cuMemGetAddressRange(CUdeviceptr* begin, size_t* bytes, CUdeviceptr at);

// Parts of a device's multiprocessors.
using CUgreenCtx = struct CUgreenCtx_st*;
using CUdevResourceDesc = struct CUdevResourceDesc_st*;
enum CUdevResourceType { CU_DEV_RESOURCE_TYPE_SM = 1 };
enum CUgreenCtxCreate_flags { CU_GREEN_CTX_DEFAULT_STREAM = 1 };
enum CUstream_flags { CU_STREAM_NON_BLOCKING = 1 };
struct CUdevSmResource {
  unsigned smCount, minSmPartitionSize, smCoscheduledAlignment;
};
struct CUdevResource {
  CUdevResourceType type;
  CUdevSmResource sm;
};
extern "C" {
CUresult cuDeviceGet(CUdevice* device, int ordinal);
CUresult cuDeviceGetDevResource(CUdevice device, CUdevResource* resource, CUdevResourceType type);
CUresult cuDevSmResourceSplitByCount(CUdevResource* result, unsigned* groups,
                                     const CUdevResource* input, CUdevResource* remaining,
                                     unsigned flags, unsigned count);
CUresult cuDevResourceGenerateDesc(CUdevResourceDesc* description, CUdevResource* resources,
                                   unsigned count);
CUresult cuGreenCtxCreate(CUgreenCtx* context, CUdevResourceDesc description, CUdevice device,
                          unsigned flags);
CUresult cuGreenCtxStreamCreate(CUstream* stream, CUgreenCtx context, unsigned flags, int priority);
}
