// Reduction of gradients during backward: hooks of the parameters fill flat buckets, which are
// reduced one after the other, in the same order on all ranks.
#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/thread.h"
#include "cuda/allocator.h"
#include "cuda/capture.h"
#include "cuda/device.h"
#include "cuda/order.h"
#include "cuda/same_stream.h"
#include "cuda/sanitizer.h"
#include "cuda/stream.h"
#include "distributed/group.h"
#include "torch/callback.h"
#include "torch/tensor.h"
#include "torchstream.h"

namespace ts::distributed {
namespace {

using c10::cuda::CUDAStream;

// Fused optimizers read gradients 16 bytes at a time if all of them start at such a boundary.
constexpr int64_t kAlignment = 16;

struct Parameter {
  at::Tensor tensor;
  // The hook is on the tensor, not on the node that accumulates its gradient. Keeping that node
  // would also keep the stream of its first use, which a capture on another stream must not use.
  std::shared_ptr<HookEntry> hook;
  size_t bucket = 0;
  at::Tensor view;  // the parameter's part of the bucket
  bool ready = false;
};

struct Bucket {
  at::Tensor flat;
  std::vector<size_t> parameters;
  size_t missing = 0;                       // parameters whose gradients are not ready
  c10::SmallVector<CUDAStream, 2> streams;  // streams on which gradients were computed
  std::optional<Outcome> outcome;           // on the CPU, during its reduction
};

class Reducer {
 public:
  Reducer(const ts_group& group, std::optional<CUDAStream> stream, std::vector<at::Tensor> tensors,
          std::optional<at::ScalarType> dtype)
      : backend_(group.backend), group_(group), stream_(stream), dtype_(dtype) {
    for (at::Tensor& tensor : tensors) {
      Parameter parameter;
      parameter.tensor = std::move(tensor);
      parameters_.push_back(std::move(parameter));
    }
  }

  size_t size() const { return parameters_.size(); }

  // Installs the hooks, which do not keep the reducer alive.
  static void attach(const std::shared_ptr<Reducer>& reducer) {
    for (size_t i = 0; i < reducer->parameters_.size(); ++i) {
      auto hook = [weak = std::weak_ptr<Reducer>(reducer), i](const at::Tensor&) {
        if (const auto alive = weak.lock()) alive->ready(i);
        return at::Tensor();
      };
      Parameter& parameter = reducer->parameters_[i];
      // This hook is the last: hooks of the program may change the gradient before it is reduced.
      parameter.hook = add_accumulation_hook(parameter.tensor, std::move(hook), /*last=*/true);
    }
  }

  ~Reducer() {
    for (Parameter& parameter : parameters_) {
      if (parameter.hook != nullptr) parameter.hook->remove();
    }
  }
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // Makes the buckets: each has the parameters in `order` up to its end.
  void arrange(const std::vector<size_t>& order, const std::vector<int64_t>& ends) {
    const std::lock_guard<std::mutex> lock(mutex_);
    require(!armed_, "a backward is under way");
    std::vector<Bucket> buckets(ends.size());
    std::vector<at::Tensor> views(parameters_.size());
    size_t at = 0;
    for (size_t b = 0; b < ends.size(); ++b) {
      Bucket& bucket = buckets[b];
      for (; at < static_cast<size_t>(ends[b]); ++at) bucket.parameters.push_back(order[at]);
      fill_bucket(bucket, views);
    }
    buckets_ = std::move(buckets);
    for (size_t b = 0; b < buckets_.size(); ++b) {
      for (const size_t i : buckets_[b].parameters) {
        parameters_[i].bucket = b;
        parameters_[i].view = std::move(views[i]);
      }
    }
  }

  void begin() {
    const std::lock_guard<std::mutex> lock(mutex_);
    require(!buckets_.empty(), "there are no buckets");
    require(!armed_, "a backward is under way");
    for (const Bucket& bucket : buckets_) {
      require(!under_way(bucket), "reductions of a canceled backward are under way");
    }
    for (Parameter& parameter : parameters_) parameter.ready = false;
    for (Bucket& bucket : buckets_) {
      bucket.missing = bucket.parameters.size();
      bucket.streams.clear();
      bucket.outcome.reset();
    }
    order_.clear();
    next_ = 0;
    armed_ = true;
    aborted_ = false;
  }

  // Called by a parameter's hook, on a backward thread.
  void ready(size_t i) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!armed_) return;  // gradients only accumulate
    Parameter& parameter = parameters_[i];
    if (parameter.ready) {
      throw Failure(TS_ERROR_INVALID_ARGUMENT,
                    "the gradient of a parameter was computed twice in one backward");
    }
    parameter.ready = true;
    order_.push_back(static_cast<int64_t>(i));
    Bucket& bucket = buckets_[parameter.bucket];
    if (stream_) note_stream(bucket, c10::cuda::getCurrentCUDAStream(group_.device));
    --bucket.missing;
    while (next_ < buckets_.size() && buckets_[next_].missing == 0) launch(buckets_[next_++]);
  }

  // Reduces the buckets that are not full, and waits for all of them. Writes which parameters have
  // no gradient on this rank.
  void join(bool* unused) {
    std::vector<bool> without;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      require(armed_, "there is no backward to join");
      for (const Parameter& parameter : parameters_) {
        without.push_back(!parameter.ready && !grad_of(parameter).defined());
      }
      if (stream_) {
        const CUDAStream current = c10::cuda::getCurrentCUDAStream(group_.device);
        for (size_t b = next_; b < buckets_.size(); ++b) note_stream(buckets_[b], current);
      }
      while (next_ < buckets_.size()) launch(buckets_[next_++]);
    }
    const c10::NoGradGuard no_grad;
    for (Bucket& bucket : buckets_) {
      if (bucket.outcome) bucket.outcome->wait();
    }
    if (stream_) order(c10::cuda::getCurrentCUDAStream(group_.device), *stream_);
    const std::lock_guard<std::mutex> lock(mutex_);
    for (Bucket& bucket : buckets_) {
      // The caller uses the gradients on this stream, and may drop them before its work is done.
      // The memory belongs to the stream on which arrange allocated it.
      if (stream_) use(bucket.flat, c10::cuda::getCurrentCUDAStream(group_.device));
      if (divides(group_, TS_REDUCTION_AVERAGE)) bucket.flat.div_(backend_->getSize());
      hand_back(bucket);
    }
    std::copy(without.begin(), without.end(), unused);
    armed_ = false;
  }

  // Ends a backward that failed. Gloo keeps the memory of the buckets that it still reduces, and
  // writes to it, so no gradient may use that memory.
  void cancel() {
    const std::lock_guard<std::mutex> lock(mutex_);
    armed_ = false;
    for (const Bucket& bucket : buckets_) {
      if (!under_way(bucket)) continue;
      for (const size_t i : bucket.parameters) {
        const at::Tensor& grad = grad_of(parameters_[i]);
        if (grad.defined() && grad.is_alias_of(bucket.flat)) {
          parameters_[i].tensor.mutable_grad().reset();
        }
      }
    }
  }

  // Makes join fail, on any thread that waits in it.
  void abort() {
    const std::lock_guard<std::mutex> lock(mutex_);
    aborted_ = true;
    for (Bucket& bucket : buckets_) {
      if (bucket.outcome) bucket.outcome->abort();
    }
  }

  std::vector<int64_t> order() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return order_;
  }

 private:
  static const at::Tensor& grad_of(const Parameter& parameter) {
    return parameter.tensor.unsafeGetTensorImpl()->grad();
  }

  static bool under_way(const Bucket& bucket) { return bucket.outcome && !bucket.outcome->done(); }

  void fill_bucket(Bucket& bucket, std::vector<at::Tensor>& views) {
    const at::Tensor& first = parameters_[bucket.parameters.front()].tensor;
    const auto options = first.options().dtype(dtype_.value_or(first.scalar_type()));
    const int64_t align = kAlignment / static_cast<int64_t>(options.dtype().itemsize());
    int64_t elements = 0;
    std::vector<int64_t> begins;
    for (const size_t i : bucket.parameters) {
      const at::Tensor& tensor = parameters_[i].tensor;
      require(tensor.scalar_type() == first.scalar_type(),
              "the parameters of a bucket have different dtypes");
      begins.push_back(elements);
      elements += (tensor.numel() + align - 1) / align * align;
    }
    bucket.flat = at::zeros({elements}, options.requires_grad(false));
    for (size_t n = 0; n < bucket.parameters.size(); ++n) {
      const at::Tensor& tensor = parameters_[bucket.parameters[n]].tensor;
      // A gradient has its parameter's strides; fused optimizers compare them.
      views[bucket.parameters[n]] =
          tensor.is_non_overlapping_and_dense()
              ? bucket.flat.as_strided(tensor.sizes(), tensor.strides(), begins[n])
              : bucket.flat.narrow(0, begins[n], tensor.numel()).view(tensor.sizes());
    }
  }

  static void note_stream(Bucket& bucket, CUDAStream stream) {
    for (const CUDAStream known : bucket.streams) {
      if (same_stream(known, stream)) return;
    }
    bucket.streams.push_back(stream);
  }

  // Copies a bucket's gradients into it and starts its reduction. The caller holds the lock.
  void launch(Bucket& bucket) {
    require(!aborted_, "aborted");
    const c10::NoGradGuard no_grad;
    if (stream_) {
      const CUDAStream current = c10::cuda::getCurrentCUDAStream(group_.device);
      for (const CUDAStream stream : bucket.streams) {
        if (!same_stream(stream, current)) order(current, stream);
      }
      if (somebody_captures()) hold_in_capture(bucket.flat);
    }
    collect(bucket);
    c10d::AllreduceOptions options;
    options.reduceOp = checked_reduction(group_, TS_REDUCTION_AVERAGE);
    options.asyncOp = !stream_;
    std::vector<at::Tensor> tensors{bucket.flat};
    if (!stream_) {
      const auto work = backend_->allreduce(tensors, options);
      bucket.outcome.emplace(*work);
      return;
    }
    // After a failed backward nothing waits for running reductions, and the bucket may be destroyed
    // before they end.
    use(bucket.flat, c10::cuda::getCurrentCUDAStream(group_.device));
    use(bucket.flat, *stream_);
    order(*stream_, c10::cuda::getCurrentCUDAStream(group_.device));
    const c10::cuda::CUDAStreamGuard on(*stream_);
    const CaptureWatch watch("the reduction of gradients");
    log_access(bucket.flat, *stream_, /*write=*/true);
    backend_->allreduce(tensors, options);
  }

  void collect(Bucket& bucket) {
    std::vector<at::Tensor> views;
    std::vector<at::Tensor> grads;
    for (const size_t i : bucket.parameters) {
      Parameter& parameter = parameters_[i];
      const at::Tensor& grad = grad_of(parameter);
      if (!grad.defined()) {
        parameter.view.zero_();
        if (stream_) {
          log_access(parameter.view, c10::cuda::getCurrentCUDAStream(group_.device), true);
        }
      } else if (!grad.is_same(parameter.view) && grad.data_ptr() != parameter.view.data_ptr()) {
        views.push_back(parameter.view);
        grads.push_back(grad);
        // The bucket replaces the gradient, whose memory may belong to another stream.
        if (stream_) use(grad, c10::cuda::getCurrentCUDAStream(group_.device));
      }
    }
    copy(views, grads);
    if (dtype_) return;
    for (const size_t i : bucket.parameters) {
      if (!grad_of(parameters_[i]).is_same(parameters_[i].view)) {
        parameters_[i].tensor.mutable_grad() = parameters_[i].view;
      }
    }
  }

  // Writes the reduced values to gradients of another dtype than the bucket's.
  void hand_back(Bucket& bucket) {
    if (!dtype_) return;
    std::vector<at::Tensor> views;
    std::vector<at::Tensor> grads;
    for (const size_t i : bucket.parameters) {
      Parameter& parameter = parameters_[i];
      if (!grad_of(parameter).defined()) {
        parameter.tensor.mutable_grad() = at::empty_like(parameter.tensor).detach();
      }
      views.push_back(parameter.view);
      grads.push_back(grad_of(parameter));
    }
    copy(grads, views);
  }

  static void order(CUDAStream waiter, CUDAStream on) {
    order_after(waiter, on);
    log_order(waiter, on);
  }

  static void use(const at::Tensor& tensor, CUDAStream stream) {
    record_use(storage_of(tensor), stream);
    log_use(tensor, stream);
  }

  void copy(const std::vector<at::Tensor>& into, const std::vector<at::Tensor>& from) {
    if (into.empty()) return;
    at::_foreach_copy_(into, from);
    if (!stream_) return;
    const CUDAStream current = c10::cuda::getCurrentCUDAStream(group_.device);
    for (size_t i = 0; i < into.size(); ++i) {
      log_access(from[i], current, /*write=*/false);
      log_access(into[i], current, /*write=*/true);
    }
  }

  const c10::intrusive_ptr<c10d::Backend> backend_;
  const ts_group group_;
  const std::optional<CUDAStream> stream_;     // the stream that reduces buckets
  const std::optional<at::ScalarType> dtype_;  // the buckets' dtype, if not the parameters'
  std::mutex mutex_;
  std::vector<Parameter> parameters_;
  std::vector<Bucket> buckets_;
  std::vector<int64_t> order_;  // the order in which gradients became ready
  size_t next_ = 0;             // the first bucket that has not been launched
  bool armed_ = false;
  bool aborted_ = false;
};

}  // namespace
}  // namespace ts::distributed

struct ts_reducer {
  std::shared_ptr<ts::distributed::Reducer> reducer;
};

ts_error* ts_reducer_new(ts_group* group, ts_stream stream, ts_tensor* const* parameters,
                         int64_t count, int32_t dtype, ts_reducer** reducer) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(group != nullptr && reducer != nullptr, "group or reducer is NULL");
    ts::require(count > 0 && parameters != nullptr, "there are no parameters");
    std::optional<at::ScalarType> reduced;
    if (dtype >= 0) reduced = ts::checked_dtype(dtype);
    ts::require(!reduced || at::isFloatingType(*reduced),
                "the dtype of the reduction is no floating point type");
    std::vector<at::Tensor> tensors;
    for (int64_t i = 0; i < count; ++i) {
      const at::Tensor tensor = ts::value_of(parameters[i], "a parameter");
      ts::require(tensor.is_leaf() && tensor.requires_grad(),
                  "a parameter is no leaf that requires grad");
      ts::require(tensor.is_floating_point(), "a parameter is no floating point tensor");
      ts::require(ts::device_index(tensor.device()) == group->device,
                  "a parameter is on another device than the group");
      tensors.push_back(tensor);
    }
    std::optional<ts::distributed::CUDAStream> on;
    if (group->on_gpu()) {
      on = ts::checked_stream(stream);
      ts::require(on->device_index() == group->device,
                  "the stream is of another device than the group");
    }
    auto made = std::make_unique<ts_reducer>();
    made->reducer =
        std::make_shared<ts::distributed::Reducer>(*group, on, std::move(tensors), reduced);
    ts::distributed::Reducer::attach(made->reducer);
    *reducer = made.release();
  });
}

void ts_reducer_free(ts_reducer* reducer) { delete reducer; }

ts_error* ts_reducer_arrange(ts_reducer* reducer, const int64_t* order, const int64_t* ends,
                             int64_t bucket_count) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(reducer != nullptr && order != nullptr && ends != nullptr,
                "reducer, order or ends is NULL");
    ts::refuse_in_capture("the arrangement of buckets");
    const size_t size = reducer->reducer->size();
    std::vector<size_t> checked;
    std::vector<bool> seen(size);
    for (size_t i = 0; i < size; ++i) {
      ts::require(order[i] >= 0 && static_cast<size_t>(order[i]) < size &&
                      !seen[static_cast<size_t>(order[i])],
                  "order must have each parameter once");
      checked.push_back(static_cast<size_t>(order[i]));
      seen[checked.back()] = true;
    }
    int64_t begin = 0;
    for (int64_t b = 0; b < bucket_count; ++b) {
      ts::require(ends[b] > begin, "a bucket is empty");
      begin = ends[b];
    }
    ts::require(begin == static_cast<int64_t>(size), "the buckets must end with the parameters");
    reducer->reducer->arrange(checked, std::vector<int64_t>(ends, ends + bucket_count));
  });
}

ts_error* ts_reducer_begin(ts_reducer* reducer) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(reducer != nullptr, "reducer is NULL");
    reducer->reducer->begin();
  });
}

ts_error* ts_reducer_join(ts_reducer* reducer, bool* unused) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(reducer != nullptr && unused != nullptr, "reducer or unused is NULL");
    if (ts::somebody_captures()) ts::gradients_in_capture();
    // This call completes the backward.
    const ts::LoggedFor backward(ts::LoggedFor::Doer::kLibrary);
    reducer->reducer->join(unused);
  });
}

ts_error* ts_reducer_cancel(ts_reducer* reducer) {
  return ts::guard(__func__, [&] {
    ts::require(reducer != nullptr, "reducer is NULL");
    reducer->reducer->cancel();
  });
}

ts_error* ts_reducer_abort(ts_reducer* reducer) {
  return ts::guard(__func__, [&] {
    ts::require(reducer != nullptr, "reducer is NULL");
    reducer->reducer->abort();
  });
}

ts_error* ts_reducer_get_order(ts_reducer* reducer, int64_t* order, int64_t* count) {
  return ts::guard(__func__, [&] {
    ts::require(reducer != nullptr && order != nullptr && count != nullptr,
                "reducer, order or count is NULL");
    const std::vector<int64_t> made = reducer->reducer->order();
    std::copy(made.begin(), made.end(), order);
    *count = static_cast<int64_t>(made.size());
  });
}
