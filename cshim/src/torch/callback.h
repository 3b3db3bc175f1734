// Code of the library's caller that autograd calls: hooks, backward functions, and callbacks at the
// end of a backward pass.
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

// A function of the caller and its context. If keep was called, the context returns to the caller,
// through ts_callbacks_take, when the object is destroyed.
class Callback {
 public:
  Callback(ts_autograd_callback function, int64_t context);
  ~Callback();
  Callback(const Callback&) = delete;
  Callback& operator=(const Callback&) = delete;

  // From now on this object owns the context, and may be called. The call that passes the context
  // can no longer fail.
  void keep() noexcept { kept_ = true; }

  // Calls the function and returns its results; some may be undefined.
  std::vector<at::Tensor> operator()(const std::vector<at::Tensor>& tensors, size_t results) const;

 private:
  const ts_autograd_callback function_;
  const int64_t context_;
  bool kept_ = false;
};

// A hook: it receives a tensor, and returns its replacement, or an undefined tensor.
using Hook = std::function<at::Tensor(const at::Tensor&)>;

// A hook's entry in its list. Any thread may remove it, even while the hook runs.
class HookEntry {
 public:
  explicit HookEntry(Hook hook) : hook_(std::make_shared<const Hook>(std::move(hook))) {}
  std::shared_ptr<const Hook> hook() const;
  void remove() noexcept;

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<const Hook> hook_;  // null after removal
};

// Adds a hook on the gradient of a tensor that requires gradients.
std::shared_ptr<HookEntry> add_gradient_hook(const at::Tensor& tensor, Hook hook);
// Adds a hook that runs when a backward pass has added to the leaf's gradient. Its result is
// ignored. The thread holds the lock of the leaf's gradient during the hook. last: the hook runs
// after all hooks without this flag, even those added later.
std::shared_ptr<HookEntry> add_accumulation_hook(const at::Tensor& leaf, Hook hook,
                                                 bool last = false);

// While this object exists, captured backward passes do not call the hooks of leaves. The process
// has one capture at a time, made by this object's thread.
class NoLeafHooks {
 public:
  NoLeafHooks();
  ~NoLeafHooks();
  NoLeafHooks(const NoLeafHooks&) = delete;
  NoLeafHooks& operator=(const NoLeafHooks&) = delete;
};

// Throws INVALID_ARGUMENT in such a hook. For calls that would add to gradients and wait for that
// lock.
void refuse_in_accumulation();

}  // namespace ts
