#include "torch/callback.h"

#include <ATen/DeviceAccelerator.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <atomic>
#include <string>

#include "base/error.h"
#include "base/thread.h"
#include "cuda/capture.h"
#include "cuda/sanitizer.h"
#include "torch/numerics.h"
#include "torch/pass.h"
#include "torch/returned.h"
#include "torch/tensor.h"

struct ts_hook {
  std::weak_ptr<ts::HookEntry> entry;
};

namespace ts {
namespace {

// The number of nested callbacks on the calling thread, and whether one is an accumulation hook.
thread_local int32_t callback_depth = 0;
thread_local bool accumulating = false;

// Atomic, since a pass uses other threads than the capture.
std::atomic<bool> no_leaf_hooks{false};

// The contexts of callbacks that nothing calls any more.
Returned& returned_contexts() {
  static auto* all = new Returned;  // never destroyed: a graph may end after main
  return *all;
}

class Depth {
 public:
  Depth() { ++callback_depth; }
  ~Depth() { --callback_depth; }
  Depth(const Depth&) = delete;
  Depth& operator=(const Depth&) = delete;
};

class Accumulating {
 public:
  Accumulating() : before_(std::exchange(accumulating, true)) {}
  ~Accumulating() { accumulating = before_; }
  Accumulating(const Accumulating&) = delete;
  Accumulating& operator=(const Accumulating&) = delete;

 private:
  const bool before_;
};

// Restores the current device and its stream on a device's backward thread, for the nodes that run
// after code that changes them. On the caller's own thread the code's changes stay.
class StreamRestored {
 public:
  StreamRestored() {
    if (!library_thread || at::accelerator::deviceCount() == 0) return;
    guard_.reset_stream(at::accelerator::getCurrentStream(at::accelerator::getDeviceIndex()));
  }

 private:
  c10::OptionalStreamGuard guard_;
};

class HookList {
 public:
  std::shared_ptr<HookEntry> add(Hook hook) {
    auto entry = std::make_shared<HookEntry>(std::move(hook));
    const std::lock_guard<std::mutex> lock(mutex_);
    drop_removed();
    entries_.push_back(entry);
    return entry;
  }

  // Returns the hooks in the order in which they were added. A hook that is added or removed
  // meanwhile takes effect at the next call.
  std::vector<std::shared_ptr<const Hook>> hooks() {
    std::vector<std::shared_ptr<const Hook>> found;
    const std::lock_guard<std::mutex> lock(mutex_);
    drop_removed();
    for (const auto& entry : entries_) {
      if (auto hook = entry->hook()) found.push_back(std::move(hook));
    }
    return found;
  }

 private:
  void drop_removed() {
    entries_.erase(std::remove_if(entries_.begin(), entries_.end(),
                                  [](const auto& entry) { return entry->hook() == nullptr; }),
                   entries_.end());
  }

  std::mutex mutex_;
  std::vector<std::shared_ptr<HookEntry>> entries_;  // guarded by mutex_
};

void check_hooked(const at::Tensor& gradient, const at::Tensor& result) {
  require(result.sizes() == gradient.sizes(),
          "a hook's result has another shape than the gradient");
  require(result.scalar_type() == gradient.scalar_type(),
          "a hook's result has another dtype than the gradient");
  require(result.device() == gradient.device(),
          "a hook's result is on another device than the gradient");
}

// LibTorch's form of hooks on the gradient of one output of an operator, or of a leaf.
class GradientHooks final : public torch::autograd::FunctionPreHook {
 public:
  GradientHooks(size_t output, bool leaf) : output(output), leaf_(leaf) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& grads) override {
    if (leaf_ && no_leaf_hooks.load(std::memory_order_acquire) && in_capture()) return grads;
    torch::autograd::variable_list changed = grads;
    at::Tensor& gradient = changed.at(output);
    const NumericsPause pause;
    for (const auto& hook : list.hooks()) {
      if (!gradient.defined()) break;
      at::Tensor result = (*hook)(gradient);
      if (!result.defined()) continue;
      check_hooked(gradient, result);
      gradient = std::move(result);
    }
    return changed;
  }

  const size_t output;
  HookList list;

 private:
  const bool leaf_;
};

class AccumulationHooks final : public torch::autograd::PostAccumulateGradHook {
 public:
  void operator()(const at::Tensor& leaf) override {
    const Accumulating here;
    const NumericsPause pause;
    for (const auto& hook : list.hooks()) (*hook)(leaf);
    for (const auto& hook : last.hooks()) (*hook)(leaf);
  }

  HookList list;
  HookList last;  // called after the others, whenever the others are added
};

// Held while hooks are registered: LibTorch's lists of hooks have no lock.
std::mutex& registering() {
  static auto* all = new std::mutex;  // never destroyed: threads may outlive main
  return *all;
}

// Returns the hooks among the other hooks of a tensor or an operator, or null.
GradientHooks* find_hooks(
    const std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>>& hooks, size_t output) {
  for (const auto& each : hooks) {
    auto* found = dynamic_cast<GradientHooks*>(each.get());
    if (found != nullptr && found->output == output) return found;
  }
  return nullptr;
}

// Registers a callback as a hook that returns the callback's result.
template <typename Add>
void add_callback(ts_autograd_callback function, int64_t context, size_t results, ts_hook** hook,
                  Add&& add) {
  require(function != nullptr, "callback is NULL");
  require(hook != nullptr, "hook is NULL");
  auto made = std::make_unique<ts_hook>();
  const auto callback = std::make_shared<Callback>(function, context);
  made->entry = add([callback, results](const at::Tensor& tensor) {
    const auto returned = (*callback)({tensor}, results);
    return results == 0 ? at::Tensor() : returned.front();
  });
  callback->keep();
  *hook = made.release();
}

}  // namespace

Callback::Callback(ts_autograd_callback function, int64_t context)
    : function_(function), context_(context) {
  returned_contexts().expect();
}

Callback::~Callback() {
  if (kept_) {
    returned_contexts().put(context_);
  } else {
    returned_contexts().unexpect();
  }
}

std::vector<at::Tensor> Callback::operator()(const std::vector<at::Tensor>& tensors,
                                             size_t results) const {
  if (!kept_) throw Failure(TS_ERROR_INTERNAL, "a callback whose registration failed");
  enter_from_library();
  std::vector<ts_tensor*> given;
  given.reserve(tensors.size());
  for (const at::Tensor& each : tensors) given.push_back(borrowed_handle(each));
  std::vector<ts_tensor*> made(results, nullptr);
  std::vector<at::Tensor> taken;
  taken.reserve(results);
  // LibTorch's gradient mode says whether the gradients themselves are recorded. It becomes a flag
  // here, because a thread's mode would be lost if the caller continues on another thread.
  const int32_t flags =
      (at::GradMode::is_enabled() ? TS_CALLBACK_FLAG_CREATE_GRAPH : 0) | numerics_of_pass();
  ts_error* error = nullptr;
  {
    const at::AutoGradMode recording(true);
    const Depth deeper;
    const NumericsPause pause;
    const LoggedFor calls(LoggedFor::Doer::kCall);
    const StreamRestored restored;
    error = function_(context_, flags, given.data(), static_cast<int64_t>(given.size()),
                      made.data(), static_cast<int64_t>(made.size()));
  }
  for (ts_tensor* each : made) taken.push_back(take_handle(each));
  if (error != nullptr) throw_error(error);
  return taken;
}

std::shared_ptr<const Hook> HookEntry::hook() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return hook_;
}

void HookEntry::remove() noexcept {
  std::shared_ptr<const Hook> removed;  // destroyed after the lock
  const std::lock_guard<std::mutex> lock(mutex_);
  removed.swap(hook_);
}

std::shared_ptr<HookEntry> add_gradient_hook(const at::Tensor& tensor, Hook hook) {
  namespace impl = torch::autograd::impl;
  require(tensor.requires_grad(), "a tensor that does not require grad has no gradient to hook");
  const std::lock_guard<std::mutex> lock(registering());
  if (const auto& function = tensor.grad_fn()) {
    const auto output = static_cast<size_t>(tensor.output_nr());
    GradientHooks* hooks = find_hooks(function->tensor_pre_hooks(), output);
    if (hooks == nullptr) {
      auto made = std::make_unique<GradientHooks>(output, /*leaf=*/false);
      hooks = made.get();
      function->add_tensor_pre_hook(std::move(made));
    }
    return hooks->list.add(std::move(hook));
  }
  GradientHooks* hooks = find_hooks(impl::hooks(tensor), 0);
  if (hooks == nullptr) {
    auto made = std::make_unique<GradientHooks>(0, /*leaf=*/true);
    hooks = made.get();
    impl::add_hook(tensor, std::move(made));
  }
  return hooks->list.add(std::move(hook));
}

std::shared_ptr<HookEntry> add_accumulation_hook(const at::Tensor& leaf, Hook hook, bool last) {
  namespace impl = torch::autograd::impl;
  require(leaf.is_leaf() && leaf.requires_grad(),
          "only a leaf that requires grad accumulates a gradient");
  const std::lock_guard<std::mutex> lock(registering());
  auto* hooks = dynamic_cast<AccumulationHooks*>(impl::post_acc_grad_hooks(leaf).get());
  if (hooks == nullptr) {
    auto made = std::make_unique<AccumulationHooks>();
    hooks = made.get();
    impl::set_post_acc_grad_hooks(leaf, std::move(made));
  }
  return (last ? hooks->last : hooks->list).add(std::move(hook));
}

NoLeafHooks::NoLeafHooks() { no_leaf_hooks.store(true, std::memory_order_release); }
NoLeafHooks::~NoLeafHooks() { no_leaf_hooks.store(false, std::memory_order_release); }

void refuse_in_accumulation() {
  require(!accumulating,
          "backward in a post-accumulate-gradient hook would wait for the gradient that the hook's "
          "thread holds: call it after the backward pass, or in a callback at its end");
}

}  // namespace ts

ts_error* ts_tensor_add_gradient_hook(const ts_tensor* tensor, ts_autograd_callback callback,
                                      int64_t context, ts_hook** hook) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    const at::Tensor value = ts::value_of(tensor);
    ts::add_callback(callback, context, 1, hook,
                     [&](ts::Hook made) { return ts::add_gradient_hook(value, std::move(made)); });
  });
}

ts_error* ts_tensor_add_accumulation_hook(const ts_tensor* tensor, ts_autograd_callback callback,
                                          int64_t context, ts_hook** hook) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    const at::Tensor value = ts::value_of(tensor);
    ts::add_callback(callback, context, 0, hook, [&](ts::Hook made) {
      return ts::add_accumulation_hook(value, std::move(made));
    });
  });
}

void ts_hook_remove(ts_hook* hook) {
  if (hook == nullptr) return;
  const auto entry = hook->entry.lock();
  if (entry != nullptr) entry->remove();
}

void ts_hook_free(ts_hook* hook) { delete hook; }

ts_error* ts_backward_add_callback(ts_autograd_callback callback, int64_t context) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(callback != nullptr, "callback is NULL");
    ts::require(torch::autograd::get_current_graph_task_id() != -1,
                "no backward pass is under way on this thread: call it in a hook, or in the "
                "backward of a function");
    const auto made = std::make_shared<ts::Callback>(callback, context);
    torch::autograd::Engine::get_default_engine().queue_callback([made] { (*made)({}, 0); });
    made->keep();
  });
}

int32_t ts_callback_depth(void) { return ts::callback_depth; }

int64_t ts_callbacks_take(int64_t* contexts, int64_t capacity) {
  return contexts == nullptr ? 0 : ts::returned_contexts().take(contexts, capacity);
}
