// All differences between the versions of LibTorch that this library can be built with.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContextLight.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/version.h>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <utility>

namespace ts {

static_assert(TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 11 && TORCH_VERSION_MINOR <= 15,
              "this library is written for LibTorch 2.11 to 2.15");

// LibTorch's tables of cuBLAS workspaces have an entry for each handle and stream.
using WorkspaceEntry = decltype(at::cuda::WorkspaceMapWithMutex::map)::mapped_type;

#if TORCH_VERSION_MINOR < 13
inline WorkspaceEntry workspace_entry(at::DataPtr memory, size_t /*bytes*/) { return memory; }
inline at::DataPtr take_memory(WorkspaceEntry& entry) { return std::move(entry); }
#else
inline WorkspaceEntry workspace_entry(at::DataPtr memory, size_t bytes) {
  return {std::move(memory), bytes};
}
inline at::DataPtr take_memory(WorkspaceEntry& entry) { return std::move(entry.first); }
#endif

// Whether LibTorch keeps workspaces in its tables. Otherwise each product allocates its own, in its
// stream's order, and during a capture in the graph's memory.
#if TORCH_VERSION_MINOR < 15
inline bool keeps_workspaces() { return true; }
#else
inline bool keeps_workspaces() { return at::cuda::isCUDABlasWorkspaceCachingEnabled(); }
#endif

#if TORCH_VERSION_MINOR == 11

// The state of a CUDA generator. Captured kernels read seed and offset from memory given here. Each
// kernel's own addition to the offset is a constant in the graph. The caller locks the generator
// for every call. No capture draws from the generator when this object is made.
class GeneratorState {
 public:
  GeneratorState(const at::Generator& generator, at::Tensor seed, at::Tensor offset) {
    // A registration that lives as long as this object and keeps the state's memory alive.
    generator.get<at::CUDAGeneratorImpl>()->register_graph(&anchor_);
    state_ = anchor_.state();
    state_->seed_extragraph_ = std::move(seed);
    state_->offset_extragraph_ = std::move(offset);
  }
  GeneratorState(const GeneratorState&) = delete;
  GeneratorState& operator=(const GeneratorState&) = delete;

  uint64_t seed() const { return state_->seed_; }
  uint64_t offset() const { return state_->philox_offset_per_thread_; }
  void advance(uint64_t increment) { state_->philox_offset_per_thread_ += increment; }

  // From now on kernels draw that belong to the capture with CUDA's number id.
  void begin_capture(unsigned long long /*id*/) {
    state_->capturing_ = true;
    state_->offset_intragraph_ = 0;
  }
  // Returns how far the captured kernels advance the offset; 0 if begin_capture was not called.
  uint64_t end_capture() {
    if (!state_->capturing_) return 0;
    state_->capturing_ = false;
    return state_->offset_intragraph_;
  }

 private:
  struct Anchor : at::cuda::CUDAGraph {
    c10::intrusive_ptr<at::CUDAGeneratorState> state() const {
      return captured_generator_states_.begin()->first;
    }
  };

  Anchor anchor_;
  c10::intrusive_ptr<at::CUDAGeneratorState> state_;
};

#else

// As above. The state has memory for each capture and finds it by the capture's number. LibTorch
// would allocate that memory only for a capture by its own class of graphs.
class GeneratorState {
 public:
  // Gives the generator a copy of its state, because LibTorch does not hand out the state itself.
  // An earlier graph of LibTorch's own class that draws from the generator still advances the old
  // state.
  GeneratorState(const at::Generator& generator, at::Tensor seed, at::Tensor offset)
      : seed_(std::move(seed)), offset_(std::move(offset)) {
    auto* impl = generator.get<at::CUDAGeneratorImpl>();
    state_ = c10::make_intrusive<at::CUDAGeneratorState>(impl->current_seed(),
                                                         impl->philox_offset_per_thread());
    impl->graphsafe_set_state(
        c10::make_intrusive<at::CUDAGeneratorImpl>(impl->device().index(), state_));
  }
  GeneratorState(const GeneratorState&) = delete;
  GeneratorState& operator=(const GeneratorState&) = delete;

  uint64_t seed() const { return state_->seed_; }
  uint64_t offset() const { return state_->philox_offset_per_thread_; }
  void advance(uint64_t increment) { state_->philox_offset_per_thread_ += increment; }

  void begin_capture(unsigned long long id) {
    auto capture = c10::make_intrusive<at::CUDAGeneratorCaptureState>();
    capture->rng_state_seed_extragraph_ = seed_;
    capture->rng_state_offset_extragraph_ = offset_;
    const std::lock_guard<std::mutex> lock(state_->capture_states_mutex_);
    state_->capture_states_[id] = capture;
    capture_ = std::move(capture);
    capture_id_ = id;
  }
  uint64_t end_capture() {
    if (!capture_.defined()) return 0;
    const std::lock_guard<std::mutex> lock(state_->capture_states_mutex_);
    state_->capture_states_.erase(capture_id_);
    const uint64_t increment = capture_->offset_intragraph_;
    capture_.reset();
    return increment;
  }

 private:
  at::Tensor seed_;
  at::Tensor offset_;
  c10::intrusive_ptr<at::CUDAGeneratorState> state_;
  c10::intrusive_ptr<at::CUDAGeneratorCaptureState> capture_;  // set during a capture
  unsigned long long capture_id_ = 0;
};

#endif

}  // namespace ts
