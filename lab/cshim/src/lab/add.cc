// The C++ peer for benchmarks of the operator call.
#include <ATen/ops/add.h>
#include <ATen/ops/ones.h>

#include <vector>

#include "base/error.h"
#include "lab/entry.h"
#include "lab/host_time.h"
#include "torchstream_lab.h"

namespace ts {
namespace {

constexpr size_t kHeld = 400;

}  // namespace
}  // namespace ts

int32_t ts_bench_abi_version(void) { return TS_ABI_VERSION; }

void ts_bench_noop(void) {}

ts_error* ts_bench_add(int32_t device, int32_t rounds, double* in_place, double* out_of_place,
                       double* held) {
  return ts::guard(__func__, [&] {
    ts::lab::enter();
    ts::require(rounds > 0, "rounds must be at least 1");
    ts::require(in_place != nullptr && out_of_place != nullptr && held != nullptr,
                "an output is NULL");
    const auto where = ts::lab::checked_device(device);
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
