// Generators of random numbers.
#include "torch/generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>

#include <mutex>
#include <optional>
#include <utility>

#include "base/thread.h"
#include "cuda/capture.h"
#include "cuda/device.h"
#include "torch/tensor.h"

namespace ts {
namespace {

// Returns what a call that reads or sets generators must hold: a capture owns the generators of its
// GPU.
std::optional<RandomTurn> turn_for(c10::Device device) {
  std::optional<RandomTurn> turn;
  if (!device.is_cuda()) return turn;
  ensure_cuda();
  refuse_in_capture("reading or setting a random generator");
  turn.emplace();
  return turn;
}

// Calls `use` with the locked generator.
template <typename Use>
void with(const at::Generator& generator, Use&& use) {
  const auto turn = turn_for(generator.device());
  at::Generator same = generator;
  const std::lock_guard<std::mutex> lock(same.mutex());
  use(same);
}

template <typename Use>
void with_default(int32_t device, Use&& use) {
  const c10::Device on = checked_device(device);
  if (on.is_cuda()) ensure_cuda();
  with(at::globalContext().defaultGenerator(on), std::forward<Use>(use));
}

at::Tensor checked_state(const ts_tensor* state) {
  at::Tensor value = value_of(state, "state");
  require(value.is_cpu() && value.scalar_type() == at::kByte && value.is_contiguous(),
          "the state of a generator is contiguous uint8 on the CPU");
  return value;
}

const at::Generator& generator_of(const ts_generator* generator) {
  require(generator != nullptr, "generator is NULL");
  return generator->generator;
}

}  // namespace
}  // namespace ts

ts_error* ts_random_seed(uint64_t seed) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    std::optional<ts::RandomTurn> turn;
    if (ts::device_count() > 0) turn = ts::turn_for(c10::Device(c10::DeviceType::CUDA, 0));
    at::manual_seed(seed);
  });
}

ts_error* ts_random_get_state(int32_t device, ts_tensor** state) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(state != nullptr, "state is NULL");
    ts::with_default(device,
                     [&](const at::Generator& g) { *state = ts::to_handle(g.get_state()); });
  });
}

ts_error* ts_random_set_state(int32_t device, const ts_tensor* state) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    const at::Tensor value = ts::checked_state(state);
    ts::with_default(device, [&](at::Generator& g) { g.set_state(value); });
  });
}

ts_error* ts_generator_new(int32_t device, uint64_t seed, ts_generator** generator) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(generator != nullptr, "generator is NULL");
    const c10::Device on = ts::checked_device(device);
    const auto turn = ts::turn_for(on);
    auto made = std::make_unique<ts_generator>();
    if (on.is_cpu()) {
      made->generator = at::detail::createCPUGenerator(seed);
    } else {
      made->generator = at::cuda::detail::createCUDAGenerator(on.index());
      made->generator.set_current_seed(seed);
      made->randomness = std::make_shared<ts::Randomness>(made->generator);
    }
    *generator = made.release();
  });
}

ts_error* ts_generator_new_default(int32_t device, ts_generator** generator) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(generator != nullptr, "generator is NULL");
    const c10::Device on = ts::checked_device(device);
    const auto turn = ts::turn_for(on);
    auto made = std::make_unique<ts_generator>();
    made->generator = at::globalContext().defaultGenerator(on);
    if (on.is_cuda()) made->randomness = ts::Randomness::of(on.index());
    *generator = made.release();
  });
}

void ts_generator_free(ts_generator* generator) {
  if (generator == nullptr) return;
  ts::enter_thread();
  const std::unique_ptr<ts_generator> owned(generator);
}

ts_error* ts_generator_get_seed(const ts_generator* generator, uint64_t* seed) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(seed != nullptr, "seed is NULL");
    ts::with(ts::generator_of(generator),
             [&](const at::Generator& g) { *seed = g.current_seed(); });
  });
}

ts_error* ts_generator_set_seed(ts_generator* generator, uint64_t seed) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::with(ts::generator_of(generator), [&](at::Generator& g) { g.set_current_seed(seed); });
  });
}

ts_error* ts_generator_get_offset(const ts_generator* generator, uint64_t* offset) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(offset != nullptr, "offset is NULL");
    ts::with(ts::generator_of(generator),
             [&](const at::Generator& g) { *offset = g.get_offset(); });
  });
}

ts_error* ts_generator_set_offset(ts_generator* generator, uint64_t offset) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(offset % 4 == 0, "the offset must be a multiple of 4");
    ts::with(ts::generator_of(generator), [&](at::Generator& g) { g.set_offset(offset); });
  });
}

ts_error* ts_generator_get_state(const ts_generator* generator, ts_tensor** state) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(state != nullptr, "state is NULL");
    ts::with(ts::generator_of(generator),
             [&](const at::Generator& g) { *state = ts::to_handle(g.get_state()); });
  });
}

ts_error* ts_generator_set_state(ts_generator* generator, const ts_tensor* state) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    const at::Tensor value = ts::checked_state(state);
    ts::with(ts::generator_of(generator), [&](at::Generator& g) { g.set_state(value); });
  });
}
