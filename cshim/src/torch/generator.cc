#include "torch/generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>

#include <memory>
#include <mutex>

#include "base/error.h"
#include "base/thread.h"
#include "cuda/device.h"

struct ts_generator {
  at::Generator value;
};

namespace ts {
namespace {

void seed_generator(at::Generator& generator, uint64_t seed) {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_current_seed(seed);
}

at::Generator make_generator(c10::Device device) {
  if (device.is_cpu()) return at::detail::createCPUGenerator();
  ensure_cuda();
  return at::cuda::detail::createCUDAGenerator(device.index());
}

}  // namespace

const at::Generator& generator_of(const ts_generator& generator) { return generator.value; }

}  // namespace ts

ts_error* ts_generator_new(int32_t device, uint64_t seed, ts_generator** generator) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(generator != nullptr, "generator is NULL");
    auto made = std::make_unique<ts_generator>(
        ts_generator{ts::make_generator(ts::checked_device(device))});
    ts::seed_generator(made->value, seed);
    *generator = made.release();
  });
}

ts_error* ts_generator_set_seed(ts_generator* generator, uint64_t seed) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(generator != nullptr, "generator is NULL");
    ts::seed_generator(generator->value, seed);
  });
}

void ts_generator_free(ts_generator* generator) {
  ts::enter_thread();
  delete generator;
}
