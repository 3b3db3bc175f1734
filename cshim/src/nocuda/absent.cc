// The functions of CUDA and of LibTorch's CUDA libraries that this library calls, for a build with
// a LibTorch without them. Everything here behaves as on a machine without a GPU. The linker
// reports a function that a version of LibTorch needs and this file lacks; a function that only
// other versions need is unused.
#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/CUDAGraph.h>
#include <ATen/cuda/MemPool.h>
#include <ATen/cuda/PeerToPeerAccess.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <torch/version.h>

#include <atomic>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "cuda/toolkit.h"
#include "decode/inflate.h"
#include "decode/launch.h"
#include "decode/read.h"
#include "torch/batch_norm.h"
#include "torch/normalize.h"
#include "torchstream.h"

namespace {

constexpr char kWhy[] =
    "libtorchstream was built for a LibTorch without CUDA: set it up for one with CUDA";

[[noreturn]] void absent() {
  throw ts::Failure(TS_ERROR_NO_DEVICE, std::string("there is no usable GPU: ") + kWhy);
}

}  // namespace

cudaError_t ts_no_cuda() noexcept { return cudaErrorNoDevice; }

const char* ts_cuda_version(void) { return ""; }

namespace ts {

std::string why_no_gpu() { return kWhy; }

double occupancy(int32_t, int32_t, int32_t, int32_t) { return 0; }

cudaError_t launch_normalize(void*, PixelType, const uint8_t*, const NormalizeShape&, const Affine&,
                             cudaStream_t) {
  return ts_no_cuda();
}

}  // namespace ts

namespace ts::norm {

cudaError_t launch(Element, const Forward&, cudaStream_t) { return ts_no_cuda(); }
cudaError_t launch(Element, const Backward&, cudaStream_t) { return ts_no_cuda(); }

}  // namespace ts::norm

namespace ts::decode {

cudaError_t launch(Stage, const Work&, cudaStream_t) { return ts_no_cuda(); }
cudaError_t launch_search(Stage, const Work&, cudaStream_t) { return ts_no_cuda(); }
cudaError_t launch(const InflateWork&, cudaStream_t) { return ts_no_cuda(); }
cudaError_t launch(const GatherWork&, cudaStream_t) { return ts_no_cuda(); }
cudaError_t launch(const ReadWork&, cudaStream_t) { return ts_no_cuda(); }

}  // namespace ts::decode

namespace c10::cuda {

DeviceIndex device_count() noexcept { return 0; }
DeviceIndex current_device() { absent(); }
DeviceIndex ExchangeDevice(DeviceIndex) { absent(); }
cudaError_t MaybeSetDevice(DeviceIndex) { return ts_no_cuda(); }
cudaError_t GetDevice(DeviceIndex*) { return ts_no_cuda(); }
cudaError_t SetDevice(DeviceIndex, bool) { return ts_no_cuda(); }
void device_synchronize() { absent(); }
bool hasPrimaryContext(DeviceIndex) { return false; }
std::optional<DeviceIndex> getDeviceIndexWithPrimaryContext() { return std::nullopt; }

CUDAStream getStreamFromPool(bool, DeviceIndex) { absent(); }
CUDAStream getStreamFromPool(int, DeviceIndex) { absent(); }
CUDAStream getStreamFromExternal(cudaStream_t, DeviceIndex) { absent(); }
CUDAStream getDefaultCUDAStream(DeviceIndex) { absent(); }
CUDAStream getCurrentCUDAStream(DeviceIndex) { absent(); }
void setCurrentCUDAStream(CUDAStream) { absent(); }
cudaStream_t CUDAStream::stream() const { absent(); }
bool CUDAStream::query() const { absent(); }
void CUDAStream::synchronize() const { absent(); }

void c10_cuda_check_implementation(int32_t error, const char*, const char*, uint32_t, bool) {
  if (error != cudaSuccess) absent();
}

namespace CUDACachingAllocator {
// Nothing requests an allocator without a device.
std::atomic<CUDAAllocator*> allocator{nullptr};
}  // namespace CUDACachingAllocator

}  // namespace c10::cuda

namespace at {

namespace cuda {

bool get_p2p_access(c10::DeviceIndex, c10::DeviceIndex) { absent(); }
void sleep(int64_t) { absent(); }
size_t getChosenWorkspaceSize() { absent(); }
size_t getCUDABlasLtWorkspaceSize() { absent(); }
cublasHandle_t getCurrentCUDABlasHandle() { absent(); }
WorkspaceMapWithMutex& cublas_handle_stream_to_workspace() { absent(); }
WorkspaceMapWithMutex& cublaslt_handle_stream_to_workspace() { absent(); }
MempoolId_t MemPool::graph_pool_handle(bool) { absent(); }
CUDAGraph::CUDAGraph(bool) : capture_stream_(c10::cuda::getCurrentCUDAStream()) {}
CUDAGraph::~CUDAGraph() = default;

namespace detail {
Generator createCUDAGenerator(c10::DeviceIndex) { absent(); }
const Generator& getDefaultCUDAGenerator(c10::DeviceIndex) { absent(); }
}  // namespace detail

}  // namespace cuda

#if TORCH_VERSION_MINOR == 11  // cuda/libtorch_version.h has the replacement in later versions
void CUDAGeneratorImpl::register_graph(cuda::CUDAGraph*) { absent(); }
#endif

}  // namespace at

namespace torch::cuda {

std::string _memory_snapshot_pickled() { absent(); }
void _record_memory_history(bool, bool, int64_t, bool, bool, bool, bool, bool,
                            const std::vector<std::string>&) {
  absent();
}

}  // namespace torch::cuda
