// The C++ peer of benchmarks of the operator call.
#include <ATen/cuda/PeerToPeerAccess.h>
#include <ATen/ops/add.h>
#include <ATen/ops/ones.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <chrono>
#include <vector>

#include "base/error.h"
#include "base/thread.h"
#include "bench/host_time.h"
#include "bench/torchstream_bench.h"
#include "cuda/device.h"
#include "torchstream.h"

namespace ts {
namespace {

constexpr size_t kHeld = 400;

}  // namespace
}  // namespace ts

void ts_bench_noop(void) {}

ts_error* ts_bench_add(int32_t device, int32_t rounds, double* in_place, double* out_of_place,
                       double* held) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(rounds > 0, "rounds must be at least 1");
    ts::require(in_place != nullptr && out_of_place != nullptr && held != nullptr,
                "an output is NULL");
    const auto where = ts::checked_device(device);
    const auto options = at::TensorOptions().dtype(at::ScalarType::Float).device(where);
    const at::Tensor one = at::ones({1}, options);
    at::Tensor sum = at::ones({1}, options);
    const double adding = ts::host_nanoseconds(where, rounds, [&] { sum.add_(one); });
    const double making =
        ts::host_nanoseconds(where, rounds, [&] { at::Tensor result = at::add(sum, one); });
    std::vector<at::Tensor> results;
    const double keeping = ts::host_nanoseconds(where, rounds, [&] {
      results.push_back(at::add(sum, one));
      if (results.size() == ts::kHeld) results.clear();
    });
    *in_place = adding;
    *out_of_place = making;
    *held = keeping;
  });
}

ts_error* ts_bench_peer(int32_t dst_device, int32_t src_device, size_t bytes, int32_t rounds,
                        double* nanoseconds) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(bytes > 0 && rounds > 0, "bytes and rounds must be at least 1");
    ts::require(nanoseconds != nullptr, "nanoseconds is NULL");
    ts::require(dst_device != src_device, "the devices are one");
    const auto to = ts::checked_device(dst_device);
    const auto from = ts::checked_device(src_device);
    at::cuda::get_p2p_access(from.index(), to.index());
    const auto options = at::TensorOptions().dtype(at::ScalarType::Byte);
    const auto size = static_cast<int64_t>(bytes);
    const at::Tensor src = at::ones({size}, options.device(from));
    at::Tensor dst = at::ones({size}, options.device(to));
    ts::finish(from);
    ts::finish(to);
    const ts::DeviceScope scope(src_device);
    const auto stream = c10::cuda::getStreamFromPool(false, from.index());
    const auto copy = [&] {
      C10_CUDA_CHECK(cudaMemcpyPeerAsync(dst.mutable_data_ptr(), dst_device, src.const_data_ptr(),
                                         src_device, bytes, stream.stream()));
    };
    copy();
    stream.synchronize();
    const auto start = std::chrono::steady_clock::now();
    for (int32_t i = 0; i < rounds; ++i) copy();
    stream.synchronize();
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - start;
    *nanoseconds = took.count() / rounds;
  });
}
