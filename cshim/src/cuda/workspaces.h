// The device memory in which cuBLAS adds up partial products. LibTorch keeps a workspace (32 MiB on
// an H200) for every pair of a cuBLAS handle and a stream, and never frees it. Work on one stream
// runs in order, so all handles can use one workspace for each stream in turn. bind_workspace puts
// it into LibTorch's table before LibTorch makes another.
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
// caller holds the result while it enqueues products. A product is several kernels, which write
// partial sums into the workspace and add them, and another thread's kernels must not run in
// between.
[[nodiscard]] std::unique_lock<std::mutex> bind_workspace(cublasHandle_t handle,
                                                          c10::cuda::CUDAStream stream);

// Moves the streams' workspaces out of LibTorch's tables, each once. The next product on such a
// stream gets a new workspace.
std::vector<Workspace> take_workspaces(const std::set<void*>& streams);

// Frees the workspaces of one stream. Their memory is reused in the stream's order.
void drop_workspaces(cudaStream_t stream);

// Returns a cuBLAS handle of the calling thread for the device. It leaves no workspace of the
// default stream in the tables.
cublasHandle_t make_blas_handle(c10::DeviceIndex device);

}  // namespace ts
