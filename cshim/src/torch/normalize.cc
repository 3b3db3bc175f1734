// ts_tensor_normalize_images: checks, the CPU's loop, and the launch of the GPU's kernel
// (normalize.cu).
#include "torch/normalize.h"

#include <ATen/Parallel.h>
#include <c10/core/MemoryFormat.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <array>
#include <cmath>
#include <string>

#include "base/thread.h"
#include "cuda/capture.h"
#include "cuda/device.h"
#include "torch/pending.h"
#include "torch/tensor.h"
#include "torchstream.h"

namespace ts {
namespace {

// A byte has 256 values: their results are computed once for each channel, and the loop only looks
// them up.
template <typename T>
using Table = std::array<std::array<T, 256>, kMaxChannels>;

template <typename T>
Table<T> make_table(const Affine& affine, int channels) {
  Table<T> table{};
  for (int c = 0; c < channels; ++c) {
    for (int byte = 0; byte < 256; ++byte) {
      // volatile: rounded to float32 before the sum, even if the compiler may contract the two.
      const volatile float product =
          static_cast<float>(byte) * affine.scale[static_cast<size_t>(c)];
      const float value = product + affine.offset[static_cast<size_t>(c)];
      table[static_cast<size_t>(c)][static_cast<size_t>(byte)] = static_cast<T>(value);
    }
  }
  return table;
}

template <typename T>
void normalize_on_cpu(T* dst, const uint8_t* src, const NormalizeShape& shape,
                      const Affine& affine) {
  const auto table = make_table<T>(affine, shape.channels);
  const int64_t channels = shape.channels;
  const int64_t pixels = shape.pixels;
  at::parallel_for(0, shape.images, 1, [&](int64_t begin, int64_t end) {
    for (int64_t image = begin; image < end; ++image) {
      const uint8_t* from = src + image * pixels * channels;
      T* to = dst + image * pixels * channels;
      for (int64_t c = 0; c < channels; ++c) {
        const auto& values = table[static_cast<size_t>(c)];
        const int64_t step = shape.channels_last ? channels : 1;
        T* place = shape.channels_last ? to + c : to + c * pixels;
        for (int64_t pixel = 0; pixel < pixels; ++pixel) {
          place[pixel * step] = values[from[pixel * channels + c]];
        }
      }
    }
  });
}

PixelType pixel_type(at::ScalarType type) {
  switch (type) {
    case at::ScalarType::Float:
      return PixelType::kFloat32;
    case at::ScalarType::Half:
      return PixelType::kFloat16;
    case at::ScalarType::BFloat16:
      return PixelType::kBFloat16;
    default:
      throw Failure(TS_ERROR_INVALID_ARGUMENT, std::string("dst has dtype ") + c10::toString(type) +
                                                   ": it must be float32, float16 or bfloat16");
  }
}

Affine make_affine(const float* mean, const float* std, int channels) {
  Affine affine{};
  for (int c = 0; c < channels; ++c) {
    require(std::isfinite(mean[c]), "a mean is not finite");
    require(std::isfinite(std[c]) && std[c] != 0, "a standard deviation is zero or not finite");
    affine.scale[c] = static_cast<float>(1.0 / (255.0 * std[c]));
    affine.offset[c] = static_cast<float>(-static_cast<double>(mean[c]) / std[c]);
  }
  return affine;
}

}  // namespace
}  // namespace ts

ts_error* ts_tensor_normalize_images(ts_tensor* dst, const ts_tensor* src, const float* mean,
                                     const float* std, int64_t channels) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    const at::Tensor to = ts::value_of(dst, "dst");
    const at::Tensor from = ts::value_of(src, "src");
    ts::require(mean != nullptr && std != nullptr, "mean or std is NULL");
    ts::require(channels >= 1 && channels <= ts::kMaxChannels, "channels must be from 1 to 4");
    ts::require(from.scalar_type() == at::ScalarType::Byte, "src must be uint8");
    ts::require(from.dim() == 4 && from.is_contiguous(), "src must be contiguous [N,H,W,C]");
    ts::require(from.size(3) == channels, "src's last size is not the number of channels");
    ts::require(to.dim() == 4 && to.size(0) == from.size(0) && to.size(1) == channels &&
                    to.size(2) == from.size(1) && to.size(3) == from.size(2),
                "dst must be [N,C,H,W] of src's [N,H,W,C]");
    const bool contiguous = to.is_contiguous();
    ts::require(contiguous || to.is_contiguous(c10::MemoryFormat::ChannelsLast),
                "dst must be contiguous or channels_last");
    ts::require(to.device() == from.device(), "dst and src are on different devices");
    const auto type = ts::pixel_type(to.scalar_type());
    const int32_t device = ts::device_index(to.device());
    const ts::Affine affine = ts::make_affine(mean, std, static_cast<int>(channels));
    const ts::NormalizeShape shape{from.size(0), from.size(1) * from.size(2),
                                   static_cast<int>(channels), !contiguous};
    ts::await_pending(from);
    const auto* pixels = from.const_data_ptr<uint8_t>();
    if (device == TS_DEVICE_CPU) {
      switch (type) {
        case ts::PixelType::kFloat32:
          ts::normalize_on_cpu(to.mutable_data_ptr<float>(), pixels, shape, affine);
          break;
        case ts::PixelType::kFloat16:
          ts::normalize_on_cpu(to.mutable_data_ptr<c10::Half>(), pixels, shape, affine);
          break;
        case ts::PixelType::kBFloat16:
          ts::normalize_on_cpu(to.mutable_data_ptr<c10::BFloat16>(), pixels, shape, affine);
          break;
      }
    } else {
      ts::hold_in_capture(to);
      ts::hold_in_capture(from);
      const ts::DeviceScope scope(device);
      const auto stream =
          c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(device)).stream();
      C10_CUDA_CHECK(
          ts::launch_normalize(to.mutable_data_ptr(), type, pixels, shape, affine, stream));
    }
    ts::mark_written(to);
  });
}
