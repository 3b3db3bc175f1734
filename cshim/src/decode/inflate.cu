#include "decode/inflate.h"

namespace ts::decode {

// Named, as in decode.cu.
namespace kernels {

constexpr uint32_t kWarps = deflate::kThreads / 32;

// The team of deflate/parallel.h: the threads of a block.
class BlockTeam {
 public:
  __device__ explicit BlockTeam(uint32_t* warps) : warps_(warps) {}
  template <typename F>
  __device__ void each(F f) {
    f(threadIdx.x);
    __syncthreads();
  }
  template <typename F>
  __device__ bool any(F f) {
    return __syncthreads_or(f(threadIdx.x)) != 0;
  }
  template <typename F>
  __device__ uint32_t min(F f) {
    const uint32_t mine = __reduce_min_sync(~0u, f(threadIdx.x));
    if (threadIdx.x % 32 == 0) warps_[threadIdx.x / 32] = mine;
    __syncthreads();
    uint32_t min = warps_[0];
    for (uint32_t i = 1; i < kWarps; ++i) min = deflate::smaller(min, warps_[i]);
    __syncthreads();
    return min;
  }
  template <typename Value, typename Use>
  __device__ void scan(Value value, Use use) {
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t warp = threadIdx.x / 32;
    const uint32_t mine = value(threadIdx.x);
    uint32_t sum = mine;  // sum over the warp's threads up to this one
    for (uint32_t distance = 1; distance < 32; distance *= 2) {
      const uint32_t before = __shfl_up_sync(~0u, sum, distance);
      if (lane >= distance) sum += before;
    }
    if (lane == 31) warps_[warp] = sum;
    __syncthreads();
    uint32_t before = sum - mine;
    for (uint32_t i = 0; i < warp; ++i) before += warps_[i];
    use(threadIdx.x, before);
    __syncthreads();
  }
  template <typename T>
  __device__ T read(const T& v) {
    const T copy = v;
    __syncthreads();
    return copy;
  }

 private:
  uint32_t* warps_;  // kWarps numbers in shared memory
};

// One block for each range.
__global__ void __launch_bounds__(deflate::kThreads) inflate(InflateWork work) {
  extern __shared__ uint4 memory[];
  __shared__ uint32_t warps[kWarps];
  auto* const state = reinterpret_cast<deflate::State*>(memory);
  BlockTeam team(warps);
  const deflate::Result result =
      deflate::inflate(team, work.ranges[blockIdx.x], work.staging, work.rooms, state);
  if (threadIdx.x == 0) work.results[blockIdx.x] = result;
}

}  // namespace kernels

cudaError_t launch(const InflateWork& work, cudaStream_t stream) {
  // More than the 48 KB that a kernel has without this call.
  constexpr size_t kShared = sizeof(deflate::State);
  static_assert(kShared + sizeof(uint32_t[kernels::kWarps]) <= 98 * 1024,
                "GPUs of compute capability 8.6 and 8.9 have 99 KB for a block");
  const cudaError_t error = cudaFuncSetAttribute(
      kernels::inflate, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kShared));
  if (error != cudaSuccess) return error;
  kernels::inflate<<<work.count, deflate::kThreads, kShared, stream>>>(work);
  return cudaGetLastError();
}

}  // namespace ts::decode
