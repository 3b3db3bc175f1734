// How long each stage of decoding a batch on a GPU takes.
#include <c10/cuda/CUDAException.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <vector>

#include "base/error.h"
#include "base/thread.h"
#include "bench/torchstream_bench.h"
#include "cuda/device.h"
#include "cuda/stream.h"
#include "decode/decoder.h"
#include "torch/tensor.h"

namespace ts {
namespace {

static_assert(ts_gpu_decoder::kPieces == TS_BENCH_DECODE_ALL, "the pieces have these numbers");

// A timing event of the current device.
class Timer {
 public:
  Timer() { C10_CUDA_CHECK(cudaEventCreate(&event_)); }
  ~Timer() { cudaEventDestroy(event_); }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;
  void record(cudaStream_t stream) { C10_CUDA_CHECK(cudaEventRecord(event_, stream)); }
  double since(const Timer& begin) const {
    float milliseconds = 0;
    C10_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, begin.event_, event_));
    return milliseconds;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace
}  // namespace ts

ts_error* ts_bench_gpu_decode(ts_gpu_decoder* decoder, uint8_t* staging, size_t bytes,
                              const ts_gpu_decode_image* images, int64_t count, ts_tensor* results,
                              int32_t* failed, ts_stream stream, int32_t rounds,
                              double* milliseconds) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(rounds > 0, "rounds must be at least 1");
    ts::require(milliseconds != nullptr, "milliseconds is NULL");
    // Checks the arguments, and loads the kernels.
    if (ts_error* error =
            ts_gpu_decoder_run(decoder, staging, bytes, images, count, results, failed, stream)) {
      const ts::Failure failure(ts_error_code(error), ts_error_message(error));
      ts_error_free(error);
      throw failure;
    }
    const at::Tensor to = ts::value_of(results, "results");
    const auto on = ts::checked_stream(stream);
    const ts::DeviceScope scope(decoder->device);
    C10_CUDA_CHECK(cudaStreamSynchronize(on.stream()));
    const auto run = [&](const ts_gpu_decoder::Mark& mark) {
      decoder->run(staging, bytes, images, count, to.mutable_data_ptr<uint8_t>(), to.nbytes(),
                   failed, on, mark);
    };
    ts::Timer begin, end;
    begin.record(on.stream());
    for (int32_t i = 0; i < rounds; ++i) run(nullptr);
    end.record(on.stream());
    C10_CUDA_CHECK(cudaStreamSynchronize(on.stream()));
    milliseconds[TS_BENCH_DECODE_ALL] = end.since(begin) / rounds;

    std::array<std::vector<double>, TS_BENCH_DECODE_ALL> pieces;
    constexpr size_t kMarks = 1024;
    std::vector<ts::Timer> timers(kMarks);
    for (int32_t i = 0; i < rounds; ++i) {
      std::vector<int> marked;
      run([&](int piece) {
        ts::require(marked.size() < kMarks, "the batch is decoded in too many parts");
        timers[marked.size()].record(on.stream());
        marked.push_back(piece);
      });
      C10_CUDA_CHECK(cudaStreamSynchronize(on.stream()));
      std::array<double, TS_BENCH_DECODE_ALL> took{};
      for (size_t k = 1; k < marked.size(); ++k) {
        took[static_cast<size_t>(marked[k])] += timers[k].since(timers[k - 1]);
      }
      for (size_t k = 0; k < took.size(); ++k) pieces[k].push_back(took[k]);
    }
    for (size_t k = 0; k < pieces.size(); ++k) milliseconds[k] = ts::median(pieces[k]);
  });
}
