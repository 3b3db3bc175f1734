// The device memory that cuBLAS adds parts of products in. LibTorch keeps a workspace (32 MiB on an
// H200) for every pair of a cuBLAS handle and a stream, for good. Work on one stream runs in order,
// so the handles can use one workspace for each stream, in turns: bind_workspace puts it into
// LibTorch's table before LibTorch makes another.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/cuda/CUDAStream.h>
#include <cublas_v2.h>

#include <memory>
#include <mutex>
#include <set>
#include <vector>

namespace ts {

using Workspace = std::shared_ptr<c10::DataPtr>;

// Makes the handle use the stream's workspace. The stream is the current one of its device. The
// caller holds the result while it enqueues products: a product is several kernels, which write
// parts into the workspace and add them, and kernels of another thread must not come in between.
[[nodiscard]] std::unique_lock<std::mutex> bind_workspace(cublasHandle_t handle,
                                                          c10::cuda::CUDAStream stream);

// Moves the workspaces of the streams out of LibTorch's tables, each once. The next product on such
// a stream gets a new one.
std::vector<Workspace> take_workspaces(const std::set<void*>& streams);

// Drops the workspaces of one stream. Their memory is reused in the order of the stream.
void drop_workspaces(cudaStream_t stream);

// Returns a cuBLAS handle of the calling thread for the device. No workspace of the default stream
// stays behind.
cublasHandle_t make_blas_handle(c10::DeviceIndex device);

}  // namespace ts
