#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "torch/normalize.h"

namespace ts {

// Named, because nvcc derives the name of an anonymous namespace from the path of its file, and two
// builds of a release would differ.
namespace normalize {

constexpr int kThreads = 256;
constexpr int kPixels = 4;  // pixels of each thread in the vector kernel: C words in, C vectors out

template <typename T>
__device__ T rounded(float value);
template <>
__device__ float rounded<float>(float value) {
  return value;
}
template <>
__device__ __half rounded<__half>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ __nv_bfloat16 rounded<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

template <typename T>
__device__ T apply(uint32_t byte, const Affine& affine, int channel) {
  // The intrinsics prevent the compiler from fusing the two.
  const float product = __fmul_rn(static_cast<float>(byte), affine.scale[channel]);
  return rounded<T>(__fadd_rn(product, affine.offset[channel]));
}

template <typename T>
struct alignas(sizeof(T) * kPixels) Vector {
  T values[kPixels];
};

// Each thread has four pixels. pixels is a multiple of 4; src and dst are aligned for the vectors.
template <int C, typename T, bool kChannelsLast>
__global__ void __launch_bounds__(kThreads)
    normalize_vector(T* dst, const uint8_t* src, int64_t images, int64_t pixels, Affine affine) {
  const int64_t groups = pixels / kPixels;
  for (int64_t image = blockIdx.y; image < images; image += gridDim.y) {
    const uint8_t* from = src + image * pixels * C;
    T* to = dst + image * pixels * C;
    for (int64_t group = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; group < groups;
         group += static_cast<int64_t>(gridDim.x) * kThreads) {
      uint32_t words[C];
      const auto* in = reinterpret_cast<const uint32_t*>(from) + group * C;
#pragma unroll
      for (int i = 0; i < C; ++i) words[i] = __ldg(in + i);
      Vector<T> out[C];
#pragma unroll
      for (int p = 0; p < kPixels; ++p) {
#pragma unroll
        for (int c = 0; c < C; ++c) {
          const int at = p * C + c;
          const uint32_t byte = words[at / 4] >> (at % 4 * 8) & 0xffU;
          const T value = apply<T>(byte, affine, c);
          if (kChannelsLast) {
            out[at / kPixels].values[at % kPixels] = value;
          } else {
            out[c].values[p] = value;
          }
        }
      }
#pragma unroll
      for (int i = 0; i < C; ++i) {
        T* place =
            kChannelsLast ? to + (group * C + i) * kPixels : to + i * pixels + group * kPixels;
        *reinterpret_cast<Vector<T>*>(place) = out[i];
      }
    }
  }
}

// Each thread has one pixel, for any size and alignment.
template <int C, typename T, bool kChannelsLast>
__global__ void __launch_bounds__(kThreads)
    normalize_pixel(T* dst, const uint8_t* src, int64_t images, int64_t pixels, Affine affine) {
  for (int64_t image = blockIdx.y; image < images; image += gridDim.y) {
    const uint8_t* from = src + image * pixels * C;
    T* to = dst + image * pixels * C;
    for (int64_t pixel = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; pixel < pixels;
         pixel += static_cast<int64_t>(gridDim.x) * kThreads) {
#pragma unroll
      for (int c = 0; c < C; ++c) {
        const T value = apply<T>(from[pixel * C + c], affine, c);
        to[kChannelsLast ? pixel * C + c : c * pixels + pixel] = value;
      }
    }
  }
}

bool aligned(const void* pointer, size_t to) {
  return reinterpret_cast<uintptr_t>(pointer) % to == 0;
}

template <int C, typename T, bool kChannelsLast>
cudaError_t launch(void* dst, const uint8_t* src, const NormalizeShape& shape, const Affine& affine,
                   cudaStream_t stream) {
  const bool vector = shape.pixels % kPixels == 0 && aligned(src, sizeof(uint32_t)) &&
                      aligned(dst, sizeof(Vector<T>));
  const int64_t work = vector ? shape.pixels / kPixels : shape.pixels;
  const dim3 grid(
      static_cast<unsigned>(std::min<int64_t>((work + kThreads - 1) / kThreads, 1 << 16)),
      static_cast<unsigned>(std::min<int64_t>(shape.images, 65535)));
  auto* to = static_cast<T*>(dst);
  if (vector) {
    normalize_vector<C, T, kChannelsLast>
        <<<grid, kThreads, 0, stream>>>(to, src, shape.images, shape.pixels, affine);
  } else {
    normalize_pixel<C, T, kChannelsLast>
        <<<grid, kThreads, 0, stream>>>(to, src, shape.images, shape.pixels, affine);
  }
  return cudaGetLastError();
}

template <int C, typename T>
cudaError_t launch_layout(void* dst, const uint8_t* src, const NormalizeShape& shape,
                          const Affine& affine, cudaStream_t stream) {
  return shape.channels_last ? launch<C, T, true>(dst, src, shape, affine, stream)
                             : launch<C, T, false>(dst, src, shape, affine, stream);
}

template <int C>
cudaError_t launch_type(void* dst, PixelType type, const uint8_t* src, const NormalizeShape& shape,
                        const Affine& affine, cudaStream_t stream) {
  switch (type) {
    case PixelType::kFloat32:
      return launch_layout<C, float>(dst, src, shape, affine, stream);
    case PixelType::kFloat16:
      return launch_layout<C, __half>(dst, src, shape, affine, stream);
    case PixelType::kBFloat16:
      return launch_layout<C, __nv_bfloat16>(dst, src, shape, affine, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace normalize

using namespace normalize;

cudaError_t launch_normalize(void* dst, PixelType type, const uint8_t* src,
                             const NormalizeShape& shape, const Affine& affine,
                             cudaStream_t stream) {
  if (shape.images == 0 || shape.pixels == 0) return cudaSuccess;
  switch (shape.channels) {
    case 1:
      return launch_type<1>(dst, type, src, shape, affine, stream);
    case 2:
      return launch_type<2>(dst, type, src, shape, affine, stream);
    case 3:
      return launch_type<3>(dst, type, src, shape, affine, stream);
    case 4:
      return launch_type<4>(dst, type, src, shape, affine, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace ts
