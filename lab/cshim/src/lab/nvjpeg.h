// The part of nvJPEG's interface that the measurement uses, as NVIDIA documents it
// (docs.nvidia.com/cuda/nvjpeg, nvjpeg.h of CUDA 13.0). The library is loaded when it is first
// needed, so the build does not need its header, and LibTorch's dependencies do not include it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace ts::nvjpeg {

// nvjpegStatus_t. The values that this library distinguishes.
using Status = int;
constexpr Status kSuccess = 0;
constexpr Status kArchMismatch = 7;
constexpr Status kNotImplemented = 9;  // NVJPEG_STATUS_IMPLEMENTATION_NOT_SUPPORTED

// nvjpegBackend_t
using Backend = int;

// nvjpegOutputFormat_t: interleaved RGB in the first channel.
constexpr int kOutputRgbInterleaved = 5;

// nvjpegImage_t
struct Image {
  unsigned char* channel[4];
  size_t pitch[4];
};

using Handle = struct nvjpegHandle*;
using State = struct nvjpegJpegState*;
using Stream = struct nvjpegJpegStream*;  // a parsed header, not a CUDA stream

// The functions of the library. They stay valid: it is never unloaded.
struct Library {
  Status (*create)(Backend, void*, void*, unsigned flags, Handle*);
  Status (*destroy)(Handle);
  Status (*hardware_info)(Handle, unsigned* engines, unsigned* cores_per_engine);
  Status (*state_create)(Handle, State*);
  Status (*state_destroy)(State);
  Status (*stream_create)(Handle, Stream*);
  Status (*stream_destroy)(Stream);
  Status (*stream_parse)(Handle, const unsigned char*, size_t, int metadata, int keep, Stream);
  Status (*batch_supported)(Handle, Stream, int* unsupported);
  Status (*image_info)(Handle, const unsigned char*, size_t, int* components, int* subsampling,
                       int* widths, int* heights);
  Status (*batch_initialize)(Handle, State, int batch, int max_threads, int format);
  Status (*batch_decode)(Handle, State, const unsigned char* const*, const size_t*, Image*,
                         cudaStream_t);
};

// Loads the libnvjpeg of the running CUDA. Throws UNSUPPORTED, with the way to install it, if it is
// missing or lacks a function. If loading fails, the next call tries again.
const Library& library();

// Throws an error for a status other than kSuccess: UNSUPPORTED if the GPU or the driver lacks the
// implementation, else CUDA.
void check(Status status, const char* call);

}  // namespace ts::nvjpeg
