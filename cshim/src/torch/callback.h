// Code of the library's caller that autograd calls: hooks, the backward of functions, callbacks at
// the end of a backward pass.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "torchstream.h"

namespace ts {

// A function of the caller and its context. The context goes back to the caller, through
// ts_callbacks_take, when the object ends after keep.
class Callback {
 public:
  Callback(ts_autograd_callback function, int64_t context);
  ~Callback();
  Callback(const Callback&) = delete;
  Callback& operator=(const Callback&) = delete;

  // From now on the context belongs to this object, which may be called. The call that takes the
  // context over can no longer fail.
  void keep() noexcept { kept_ = true; }

  // Calls the function and returns its results, of which some may be undefined.
  std::vector<at::Tensor> operator()(const std::vector<at::Tensor>& tensors, size_t results) const;

 private:
  const ts_autograd_callback function_;
  const int64_t context_;
  bool kept_ = false;
};

// A hook: it gets a tensor, and returns the one that takes its place, or an undefined one.
using Hook = std::function<at::Tensor(const at::Tensor&)>;

// A hook's place in its list. It may be removed by any thread, also while the hook runs.
class HookEntry {
 public:
  explicit HookEntry(Hook hook) : hook_(std::make_shared<const Hook>(std::move(hook))) {}
  std::shared_ptr<const Hook> hook() const;
  void remove() noexcept;

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<const Hook> hook_;  // null after remove
};

// Adds a hook on the gradient of a tensor that requires gradients.
std::shared_ptr<HookEntry> add_gradient_hook(const at::Tensor& tensor, Hook hook);
// Adds a hook that runs when a backward pass has added to the gradient of the leaf. Its result is
// not used. The thread holds the lock of the leaf's gradient meanwhile. last: the hook runs after
// those without this flag, also if they are added later.
std::shared_ptr<HookEntry> add_accumulation_hook(const at::Tensor& leaf, Hook hook,
                                                 bool last = false);

// While it exists, captured backward passes do not call the hooks of leaves. There is one capture
// in the process at a time, and this object's thread makes the capture.
class NoLeafHooks {
 public:
  NoLeafHooks();
  ~NoLeafHooks();
  NoLeafHooks(const NoLeafHooks&) = delete;
  NoLeafHooks& operator=(const NoLeafHooks&) = delete;
};

// INVALID_ARGUMENT in such a hook, for calls that would add to gradients, and wait for that lock.
void refuse_in_accumulation();

}  // namespace ts
