// The kernel behind ts_tensor_normalize_images. No LibTorch here: normalize.cu includes it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace ts {

constexpr int kMaxChannels = 4;

// value = src * scale + offset, both operations rounded to float32: not fused, so that the CPU and
// the GPU give the same bits.
struct Affine {
  float scale[kMaxChannels];
  float offset[kMaxChannels];
};

enum class PixelType { kFloat32, kFloat16, kBFloat16 };

struct NormalizeShape {
  int64_t images;
  int64_t pixels;  // in one image
  int channels;    // 1 to kMaxChannels
  bool channels_last;
};

// Enqueues the kernel on the stream of the current device.
cudaError_t launch_normalize(void* dst, PixelType type, const uint8_t* src,
                             const NormalizeShape& shape, const Affine& affine,
                             cudaStream_t stream);

}  // namespace ts
