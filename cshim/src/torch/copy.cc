// Copies of elements: between tensors, to the host, and of a whole batch at once.
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/PeerToPeerAccess.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/item.h>
#include <c10/core/GradMode.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/SmallVector.h>
#include <cuda_runtime_api.h>

#include <cstring>
#include <sstream>
#include <string>

#include "base/thread.h"
#include "cuda/capture.h"
#include "cuda/device.h"
#include "cuda/event.h"
#include "cuda/order.h"
#include "cuda/stream.h"
#include "torch/pending.h"
#include "torch/tensor.h"
#include "torchstream.h"

namespace ts {
namespace {

// One checked pair of ts_tensor_copy_batch.
struct Transfer {
  at::Tensor dst;
  at::Tensor src;
  cudaMemcpyKind kind;
  bool bytewise;  // equal dense layouts use one memcpy, others a kernel on the device
};

[[noreturn]] void throw_pair(int32_t index, const std::string& what) {
  throw Failure(TS_ERROR_INVALID_ARGUMENT, "pair " + std::to_string(index) + ": " + what);
}

std::string text_of(at::IntArrayRef sizes) {
  std::ostringstream text;
  text << sizes;
  return text.str();
}

bool same_dense_layout(const at::Tensor& a, const at::Tensor& b) {
  if (a.is_contiguous() && b.is_contiguous()) return true;
  return a.strides() == b.strides() && a.is_non_overlapping_and_dense() &&
         b.is_non_overlapping_and_dense();
}

void check_place(int32_t index, const char* name, const at::Tensor& tensor,
                 c10::DeviceIndex device) {
  if (tensor.is_cuda()) {
    if (tensor.get_device() != device) {
      throw_pair(index, std::string(name) + " is on GPU " + std::to_string(tensor.get_device()) +
                            " and the stream on GPU " + std::to_string(device) +
                            ": copies between GPUs are not made here");
    }
  } else if (!tensor.is_cpu()) {
    throw_pair(index, std::string(name) + " is on " + tensor.device().str());
  } else if (tensor.numel() > 0 && !is_pinned(tensor)) {
    throw_pair(index, std::string(name) + " is in host memory that is not pinned");
  }
}

// Checks that the tensors of a pair have equal shapes and dtypes, and memory that holds the
// elements.
Transfer alike(int32_t index, const ts_tensor* to, const ts_tensor* from) {
  if (to == nullptr || from == nullptr) throw_pair(index, "a tensor is NULL");
  at::Tensor dst = value_of(to);
  at::Tensor src = value_of(from);
  if (dst.sizes() != src.sizes()) {
    throw_pair(index, "dst has shape " + text_of(dst.sizes()) + " and src " + text_of(src.sizes()));
  }
  if (dst.scalar_type() != src.scalar_type()) {
    throw_pair(index, std::string("dst has dtype ") + c10::toString(dst.scalar_type()) +
                          " and src " + c10::toString(src.scalar_type()));
  }
  if (!is_resolved(dst) || !is_resolved(src)) {
    throw_pair(index, "a tensor is a lazily negated or conjugated view");
  }
  const bool bytewise = same_dense_layout(dst, src);
  return {std::move(dst), std::move(src), cudaMemcpyDeviceToDevice, bytewise};
}

Transfer checked_pair(int32_t index, const ts_tensor* to, const ts_tensor* from,
                      c10::DeviceIndex device) {
  Transfer pair = alike(index, to, from);
  const at::Tensor& dst = pair.dst;
  const at::Tensor& src = pair.src;
  check_place(index, "dst", dst, device);
  check_place(index, "src", src, device);
  if (dst.is_cpu() && src.is_cpu()) throw_pair(index, "both tensors are on the host");
  if (!pair.bytewise && (dst.is_cpu() || src.is_cpu())) {
    throw_pair(index, "a copy between host and device needs equal, dense strides");
  }
  if (src.is_cpu()) pair.kind = cudaMemcpyHostToDevice;
  if (dst.is_cpu()) pair.kind = cudaMemcpyDeviceToHost;
  return pair;
}

Transfer checked_peers(int32_t index, const ts_tensor* to, const ts_tensor* from,
                       c10::DeviceIndex dst_device, c10::DeviceIndex src_device) {
  Transfer pair = alike(index, to, from);
  const auto check = [&](const char* name, const at::Tensor& tensor, c10::DeviceIndex device) {
    if (tensor.is_cuda() && tensor.get_device() == device) return;
    throw_pair(index, std::string(name) + " is on " + tensor.device().str() +
                          " and its stream on GPU " + std::to_string(device));
  };
  check("dst", pair.dst, dst_device);
  check("src", pair.src, src_device);
  return pair;
}

// The first query also enables one device to access the other's memory.
bool can_write(c10::DeviceIndex device, c10::DeviceIndex peer) {
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed{cudaStreamCaptureModeRelaxed};
  return at::cuda::get_p2p_access(device, peer);
}

// Enqueues on the source's stream, which is ordered against the destination's before and after.
void enqueue_peers(const Transfer& transfer, c10::cuda::CUDAStream to, c10::cuda::CUDAStream from,
                   bool direct) {
  const at::Tensor& dst = transfer.dst;
  const at::Tensor& src = transfer.src;
  if (dst.numel() == 0) return;
  if (!transfer.bytewise) {
    const c10::NoGradGuard no_grad;
    if (to.device_index() == from.device_index()) {
      // A multi-stream guard with two streams of one device would leave the first one current.
      const c10::cuda::CUDAStreamGuard current(from.unwrap());
      dst.copy_(src, /*non_blocking=*/true);
      return;
    }
    const c10::cuda::CUDAMultiStreamGuard current({to, from});
    dst.copy_(src, /*non_blocking=*/true);
    return;
  }
  if (direct) {
    C10_CUDA_CHECK(cudaMemcpyAsync(dst.mutable_data_ptr(), src.const_data_ptr(), dst.nbytes(),
                                   cudaMemcpyDeviceToDevice, from.stream()));
  } else {
    C10_CUDA_CHECK(cudaMemcpyPeerAsync(dst.mutable_data_ptr(), to.device_index(),
                                       src.const_data_ptr(), from.device_index(), dst.nbytes(),
                                       from.stream()));
  }
  mark_written(dst);
}

// Prevents LibTorch's allocator from reusing pinned memory before the stream's work so far is done.
// Ignores memory of other allocators.
void note_pinned_use(const at::Tensor& host, c10::cuda::CUDAStream stream) {
  const at::DataPtr& memory = host.storage().data_ptr();
  at::getHostAllocator(at::kCUDA)->record_event(memory.get(), memory.get_context(),
                                                stream.unwrap());
}

void enqueue(const Transfer& transfer, c10::cuda::CUDAStream stream) {
  const at::Tensor& dst = transfer.dst;
  const at::Tensor& src = transfer.src;
  if (dst.numel() == 0) return;
  if (transfer.bytewise) {
    C10_CUDA_CHECK(cudaMemcpyAsync(dst.mutable_data_ptr(), src.const_data_ptr(), dst.nbytes(),
                                   transfer.kind, stream.stream()));
    mark_written(dst);
    if (dst.is_cpu()) note_pinned_use(dst, stream);
    if (src.is_cpu()) note_pinned_use(src, stream);
    return;
  }
  const c10::NoGradGuard no_grad;
  const c10::cuda::CUDAStreamGuard current(stream.unwrap());
  dst.copy_(src, /*non_blocking=*/true);
}

constexpr const char* kReading = "reading values back, which makes the host wait for them,";

at::Scalar only_element(const ts_tensor* tensor) {
  const at::Tensor value = value_of(tensor);
  if (value.numel() != 1) {
    throw Failure(TS_ERROR_INVALID_ARGUMENT, "item of a tensor with " +
                                                 std::to_string(value.numel()) +
                                                 " elements: it must have exactly one");
  }
  if (value.is_cuda()) refuse_in_capture(kReading);
  await_pending(value);
  return value.item();
}

constexpr const char* kWaitingCopy = "a copy between host and device that waits for its end";
constexpr const char* kPageableCopy =
    "a copy from or to host memory that is not pinned, which makes the host wait,";

c10::cuda::CUDAStream stream_of(const at::Tensor& on_gpu) {
  return c10::cuda::getCurrentCUDAStream(on_gpu.get_device());
}

// Waits until a copy between host and device reads the results of earlier copies into host memory.
// If the stream reads the source, it is enough that the stream waits.
void await_source(const at::Tensor& from, const at::Tensor* to_gpu) {
  if (!any_pending()) return;
  if (to_gpu != nullptr) {
    order_after_pending(stream_of(*to_gpu), from);
  } else {
    await_pending(from);
  }
}

// Records a copy from a device to the host that is only enqueued. A captured copy runs in replays.
void note_copy(const at::Tensor& host, const at::Tensor& from) {
  if (!host.is_cpu() || !from.is_cuda()) return;
  const auto stream = stream_of(from);
  if (somebody_captures() && in_capture(stream)) return;
  note_pending(host, stream);
}

}  // namespace
}  // namespace ts

ts_error* ts_tensor_copy(ts_tensor* dst, const ts_tensor* src, bool non_blocking) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    const at::Tensor to = ts::value_of(dst, "dst");
    const at::Tensor from = ts::value_of(src, "src");
    if (to.is_cuda() != from.is_cuda() && !non_blocking) ts::refuse_in_capture(ts::kWaitingCopy);
    if (ts::somebody_captures() && ts::is_pageable_pair(to, from)) {
      ts::refuse_in_capture(ts::kPageableCopy);
    }
    ts::await_source(from, to.is_cuda() && non_blocking ? &to : nullptr);
    ts::hold_in_capture(to);
    ts::hold_in_capture(from);
    const ts::CaptureWatch watch("a copy");
    const c10::NoGradGuard no_grad;
    to.copy_(from, non_blocking);
    if (non_blocking) ts::note_copy(to, from);
  });
}

ts_error* ts_tensor_to(const ts_tensor* tensor, int32_t device, int32_t dtype, bool non_blocking,
                       ts_tensor** result) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(result != nullptr, "result is NULL");
    const at::Tensor value = ts::value_of(tensor);
    const auto type = dtype == -1 ? value.scalar_type() : ts::checked_dtype(dtype);
    const auto where = ts::checked_device(device);
    if (value.is_cuda() != where.is_cuda() && !non_blocking) {
      ts::refuse_in_capture(ts::kWaitingCopy);
    }
    if (where.is_cuda() && ts::somebody_captures() && value.is_cpu() && !ts::is_pinned(value)) {
      ts::refuse_in_capture(ts::kPageableCopy);
    }
    ts::await_source(value, nullptr);
    ts::hold_in_capture(value);
    const ts::CaptureWatch watch("a copy");
    auto converted = value.to(where, type, non_blocking, /*copy=*/false);
    ts::made_in_capture(converted);
    if (non_blocking) ts::note_copy(converted, value);
    *result = ts::to_handle(std::move(converted));
  });
}

ts_error* ts_tensor_read(const ts_tensor* tensor, uint8_t* data, size_t bytes) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    const at::Tensor value = ts::value_of(tensor);
    const int64_t needed = ts::bytes_of(value);
    if (bytes != static_cast<size_t>(needed)) {
      throw ts::Failure(
          TS_ERROR_INVALID_ARGUMENT,
          std::to_string(bytes) + " bytes to read a tensor of " + std::to_string(needed));
    }
    if (bytes == 0) return;
    ts::require(data != nullptr, "data is NULL");
    ts::await_pending(value);
    if (value.is_cpu() && value.is_contiguous() && ts::is_resolved(value)) {
      std::memcpy(data, value.const_data_ptr(), bytes);
      return;
    }
    if (value.is_cuda()) ts::refuse_in_capture(ts::kReading);
    const c10::NoGradGuard no_grad;
    auto host = at::from_blob(data, value.sizes(), at::TensorOptions().dtype(value.scalar_type()));
    host.copy_(value, /*non_blocking=*/false);
  });
}

ts_error* ts_tensor_get_item(const ts_tensor* tensor, double* value) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(value != nullptr, "value is NULL");
    *value = ts::only_element(tensor).toDouble();
  });
}

ts_error* ts_tensor_get_item_int(const ts_tensor* tensor, int64_t* value) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(value != nullptr, "value is NULL");
    *value = ts::only_element(tensor).toLong();
  });
}

ts_error* ts_tensor_copy_batch(ts_stream stream, const ts_event* after, ts_tensor* const* dst,
                               ts_tensor* const* src, int64_t count, ts_event* done) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    const auto on = ts::checked_stream(stream);
    ts::require(count >= 0, "count is negative");
    ts::require(count == 0 || (dst != nullptr && src != nullptr), "dst or src is NULL");
    ts::ensure_cuda();
    c10::SmallVector<ts::Transfer, 8> transfers;
    for (int32_t i = 0; i < count; ++i) {
      transfers.push_back(ts::checked_pair(i, dst[i], src[i], on.device_index()));
    }
    if (after != nullptr) after->check_block(on);
    if (done != nullptr) done->check_record(on);

    if (ts::somebody_captures()) {
      for (const ts::Transfer& transfer : transfers) {
        ts::hold_in_capture(transfer.dst, on);
        ts::hold_in_capture(transfer.src, on);
      }
    }
    // Default streams have the handle NULL, which means the current device's default stream.
    const ts::DeviceScope scope(on.device_index());
    const ts::CaptureWatch watch("a copy");
    if (after != nullptr) after->block(on);
    for (const ts::Transfer& transfer : transfers) {
      ts::order_after_pending(on, transfer.src);
      ts::enqueue(transfer, on);
    }
    if (done != nullptr) done->record(on);
  });
}

ts_error* ts_tensor_copy_peer(ts_stream dst_stream, ts_tensor* const* dst, ts_stream src_stream,
                              ts_tensor* const* src, int64_t count) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    const auto to = ts::checked_stream(dst_stream);
    const auto from = ts::checked_stream(src_stream);
    ts::require(count >= 0, "count is negative");
    ts::require(count == 0 || (dst != nullptr && src != nullptr), "dst or src is NULL");
    ts::ensure_cuda();
    c10::SmallVector<ts::Transfer, 8> transfers;
    for (int32_t i = 0; i < count; ++i) {
      transfers.push_back(
          ts::checked_peers(i, dst[i], src[i], to.device_index(), from.device_index()));
    }
    if (transfers.empty()) return;
    const bool one_device = to.device_index() == from.device_index();
    const bool captured = ts::somebody_captures() && (ts::in_capture(to) || ts::in_capture(from));
    if (captured && !one_device) {
      for (const ts::Transfer& transfer : transfers) {
        if (transfer.bytewise) continue;
        throw ts::Failure(
            TS_ERROR_CAPTURE,
            "a copy between GPUs that changes strides needs temporary memory of both, "
            "and a graph has that of one: make the tensors' strides equal");
      }
    }
    const ts::CaptureWatch watch("a copy between GPUs");
    const bool direct = one_device || ts::can_write(from.device_index(), to.device_index());
    const ts::DeviceScope scope(from.device_index());
    ts::order_after(from, to);
    if (captured) {  // now both streams are captured
      for (const ts::Transfer& transfer : transfers) {
        ts::hold_in_capture(transfer.dst, from);
        ts::hold_in_capture(transfer.src, from);
      }
    }
    for (const ts::Transfer& transfer : transfers) ts::enqueue_peers(transfer, to, from, direct);
    ts::order_after(to, from);
  });
}
