#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "torch/batch_norm.h"
#include "torch/batch_norm_blocks.h"

namespace ts {
// Named, because nvcc derives the name of an anonymous namespace from the path of its file, and two
// builds of a release would differ.
namespace norm {

struct Float16 {
  using Type = __half;
  static constexpr int kVector = 8;
  __device__ static float widen(__half value) { return __half2float(value); }
  __device__ static __half narrow(float value) { return __float2half_rn(value); }
};

// BFloat16 with the device's instruction.
struct DeviceBFloat16 : BFloat16 {
  __device__ static uint16_t narrow(float value) {
    return __bfloat16_as_ushort(__float2bfloat16_rn(value));
  }
};

struct Block {
  template <typename F>
  __device__ void each(F f) const {
    f(static_cast<int>(threadIdx.x));
    __syncthreads();
  }
};

template <typename E>
__global__ void __launch_bounds__(kSumThreads) sum_moments_kernel(Forward pass) {
  __shared__ SumMemory<E> memory;
  sum_moments<E>(Block(), pass, static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y), memory);
}

template <typename E, bool kResidual>
__global__ void __launch_bounds__(kOutputThreads) normalise_kernel(Forward pass) {
  __shared__ OutputMemory memory;
  normalise<E, kResidual>(Block(), pass, static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y),
                          memory);
}

template <typename E, bool kResidual>
__global__ void __launch_bounds__(kSumThreads) sum_gradients_kernel(Backward pass) {
  __shared__ SumMemory<E> memory;
  sum_gradients<E, kResidual>(Block(), pass, static_cast<int>(blockIdx.x),
                              static_cast<int>(blockIdx.y), memory);
}

template <typename E, bool kResidual>
__global__ void __launch_bounds__(kOutputThreads) differentiate_kernel(Backward pass) {
  __shared__ OutputMemory memory;
  differentiate<E, kResidual>(Block(), pass, static_cast<int>(blockIdx.x),
                              static_cast<int>(blockIdx.y), memory);
}

dim3 grid(const Plan& plan, const Parts& parts) {
  return {static_cast<unsigned>(plan.groups), static_cast<unsigned>(parts.count)};
}

template <typename E>
cudaError_t launch(const Forward& pass, cudaStream_t stream) {
  const dim3 sums = grid(pass.plan, pass.plan.sums);
  const dim3 outputs = grid(pass.plan, pass.plan.outputs);
  sum_moments_kernel<E><<<sums, kSumThreads, 0, stream>>>(pass);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  if (pass.residual != nullptr) {
    normalise_kernel<E, true><<<outputs, kOutputThreads, 0, stream>>>(pass);
  } else {
    normalise_kernel<E, false><<<outputs, kOutputThreads, 0, stream>>>(pass);
  }
  return cudaGetLastError();
}

template <typename E>
cudaError_t launch(const Backward& pass, cudaStream_t stream) {
  const dim3 sums = grid(pass.plan, pass.plan.sums);
  const dim3 outputs = grid(pass.plan, pass.plan.outputs);
  if (pass.dresidual != nullptr) {
    sum_gradients_kernel<E, true><<<sums, kSumThreads, 0, stream>>>(pass);
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
    differentiate_kernel<E, true><<<outputs, kOutputThreads, 0, stream>>>(pass);
  } else {
    sum_gradients_kernel<E, false><<<sums, kSumThreads, 0, stream>>>(pass);
    if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
    differentiate_kernel<E, false><<<outputs, kOutputThreads, 0, stream>>>(pass);
  }
  return cudaGetLastError();
}

template <typename Pass>
cudaError_t launch_element(Element element, const Pass& pass, cudaStream_t stream) {
  switch (element) {
    case Element::kFloat32:
      return launch<Float32>(pass, stream);
    case Element::kFloat16:
      return launch<Float16>(pass, stream);
    case Element::kBFloat16:
      return launch<DeviceBFloat16>(pass, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t launch(Element element, const Forward& pass, cudaStream_t stream) {
  return launch_element(element, pass, stream);
}

cudaError_t launch(Element element, const Backward& pass, cudaStream_t stream) {
  return launch_element(element, pass, stream);
}

}  // namespace norm
}  // namespace ts
