#include "distributed/group.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/env.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/thread.h"
#include "cuda/capture.h"
#include "cuda/device.h"
#include "cuda/stream.h"
#include "distributed/backend.h"
#include "distributed/broken_pipe.h"
#include "distributed/store.h"
#include "torch/pending.h"
#include "torch/tensor.h"

namespace ts::distributed {
namespace {

using Work = c10::intrusive_ptr<c10d::Work>;
using Launch = std::function<Work(c10d::Backend&)>;

}  // namespace
}  // namespace ts::distributed

struct ts_work {
  c10::intrusive_ptr<c10d::Backend> backend;  // must outlive the work
  ts::distributed::Work work;
  std::optional<ts::distributed::Outcome> outcome;  // empty for a send or receive
  std::chrono::milliseconds timeout;                // of a send or receive
  std::function<void()> finish;                     // remaining steps once the work is done
  std::mutex finishing;  // held while `finished` changes from false to true
  bool finished = false;
};

namespace ts::distributed {
namespace {

at::Tensor checked_place(const ts_group& group, const ts_tensor* tensor, const char* name) {
  at::Tensor value = value_of(tensor, name);
  if (device_index(value.device()) != group.device) {
    throw Failure(TS_ERROR_INVALID_ARGUMENT,
                  std::string(name) + " is on another device than the group");
  }
  return value;
}

at::Tensor checked_operand(const ts_group& group, const ts_tensor* tensor, const char* name) {
  at::Tensor value = checked_place(group, tensor, name);
  if (!value.is_contiguous() || !is_resolved(value)) {
    throw Failure(TS_ERROR_INVALID_ARGUMENT, std::string(name) + " is not contiguous");
  }
  return value;
}

// Returns the elements of a tensor without gaps, in any order of dimensions, as one row.
at::Tensor checked_dense(const ts_group& group, const ts_tensor* tensor) {
  const at::Tensor value = checked_place(group, tensor, "tensor");
  require(value.is_non_overlapping_and_dense() && is_resolved(value), "tensor is not dense");
  const c10::NoGradGuard no_grad;
  return value.detach().as_strided({value.numel()}, {1});
}

void check_pair(const at::Tensor& whole, const at::Tensor& part, int size, const char* message) {
  require(whole.scalar_type() == part.scalar_type(), "input and output have different dtypes");
  require(whole.numel() == part.numel() * size, message);
}

void check_rank(const ts_group& group, int32_t rank) {
  require(rank >= 0 && rank < group.backend->getSize(), "there is no such rank in the group");
}

const ts_group& checked(const ts_group* group) {
  require(group != nullptr, "group is NULL");
  return *group;
}

// Runs the launch for the tensors: for a group of GPUs on the stream, otherwise on Gloo's threads.
// work: NULL for a group of GPUs.
void run(const ts_group& group, ts_stream stream, const char* name,
         const std::vector<at::Tensor>& writes, const std::vector<at::Tensor>& reads,
         const Launch& launch, std::function<void()> finish, bool peer,
         std::chrono::milliseconds timeout, ts_work** work) {
  const c10::NoGradGuard no_grad;
  if (group.on_gpu()) {
    require(work == nullptr, "work on a GPU is waited for on its stream: work must be NULL");
    const c10::cuda::CUDAStream on = checked_stream(stream);
    require(on.device_index() == group.device, "the stream is of another device than the group");
    const c10::cuda::CUDAStreamGuard current(on);
    if (somebody_captures()) {
      for (const at::Tensor& each : writes) hold_in_capture(each, on);
      for (const at::Tensor& each : reads) hold_in_capture(each, on);
    }
    const CaptureWatch watch(name);
    const Work launched = launch(*group.backend);
    // A send or receive runs on NCCL's own stream.
    if (peer) launched->wait();
    for (const at::Tensor& each : writes) mark_written(each);
    return;
  }
  require(work != nullptr, "work is NULL");
  for (const at::Tensor& each : writes) await_pending(each);
  for (const at::Tensor& each : reads) await_pending(each);
  auto made = std::make_unique<ts_work>();
  made->backend = group.backend;
  made->timeout = timeout;
  made->finish = std::move(finish);
  made->work = launch(*group.backend);
  for (const at::Tensor& each : writes) mark_written(each);
  if (!peer) made->outcome.emplace(*made->work);
  *work = made.release();
}

void run(const ts_group& group, ts_stream stream, const char* name,
         const std::vector<at::Tensor>& writes, const std::vector<at::Tensor>& reads,
         const Launch& launch, ts_work** work, std::function<void()> finish = {}) {
  run(group, stream, name, writes, reads, launch, std::move(finish), /*peer=*/false, {}, work);
}

std::vector<int64_t> checked_parts(const ts_group& group, const at::Tensor& tensor,
                                   const int64_t* parts, const char* name) {
  const int64_t size = group.backend->getSize();
  const int64_t rows = tensor.dim() == 0 ? 0 : tensor.size(0);
  if (parts == nullptr) {
    if (rows % size != 0) {
      throw Failure(TS_ERROR_INVALID_ARGUMENT, std::string(name) + " has " + std::to_string(rows) +
                                                   " rows, which " + std::to_string(size) +
                                                   " ranks cannot share equally");
    }
    return {};
  }
  int64_t sum = 0;
  for (int64_t i = 0; i < size; ++i) {
    require(parts[i] >= 0, "a part is negative");
    require(!__builtin_add_overflow(sum, parts[i], &sum), "the parts are too large");
  }
  if (sum != rows) {
    throw Failure(TS_ERROR_INVALID_ARGUMENT, std::string(name) + " has " + std::to_string(rows) +
                                                 " rows, and its parts " + std::to_string(sum));
  }
  return {parts, parts + size};
}

// LibTorch's flight recorder adds a group's first collective to a map without a lock, so concurrent
// collectives of several groups could end the process. This library does not use its records. It
// stays on if the program's environment sets its size.
void switch_off_flight_recorder() {
  static std::once_flag once;
  std::call_once(once, [] {
    if (!c10::utils::has_env("TORCH_NCCL_TRACE_BUFFER_SIZE")) {
      c10::utils::set_env("TORCH_FR_BUFFER_SIZE", "0", /*overwrite=*/false);
    }
  });
}

}  // namespace

Outcome::Outcome(c10d::Work& work) {
  work.getFuture()->addCallback([shared = shared_](c10::ivalue::Future& future) {
    const std::lock_guard<std::mutex> lock(shared->mutex);
    shared->done = true;
    if (future.hasError()) shared->error = future.tryRetrieveErrorMessage();
    shared->changed.notify_all();
  });
}

void Outcome::wait() const {
  std::unique_lock<std::mutex> lock(shared_->mutex);
  shared_->changed.wait(lock, [&] { return shared_->done || shared_->aborted; });
  if (!shared_->done) throw Failure(TS_ERROR_OPERATOR, "aborted");
  if (!shared_->error.empty()) throw Failure(TS_ERROR_OPERATOR, shared_->error);
}

bool Outcome::done() const {
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  return shared_->done;
}

void Outcome::abort() const {
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  shared_->aborted = true;
  shared_->changed.notify_all();
}

c10d::ReduceOp checked_reduction(const ts_group& group, int32_t reduction) {
  switch (reduction) {
    case TS_REDUCTION_SUM:
      return c10d::ReduceOp::SUM;
    case TS_REDUCTION_AVERAGE:
      return group.on_gpu() ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM;
    case TS_REDUCTION_PRODUCT:
      return c10d::ReduceOp::PRODUCT;
    case TS_REDUCTION_MIN:
      return c10d::ReduceOp::MIN;
    case TS_REDUCTION_MAX:
      return c10d::ReduceOp::MAX;
    default:
      throw Failure(TS_ERROR_INVALID_ARGUMENT, "unknown reduction");
  }
}

bool divides(const ts_group& group, int32_t reduction) {
  return !group.on_gpu() && reduction == TS_REDUCTION_AVERAGE;
}

}  // namespace ts::distributed

ts_error* ts_group_new(ts_store* store, const char* name, int32_t rank, int32_t size,
                       const int32_t* ranks, int32_t device, int64_t timeout_nanoseconds,
                       ts_group** group) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(store != nullptr && name != nullptr && group != nullptr,
                "store, name or group is NULL");
    ts::require(size > 0 && rank >= 0 && rank < size, "rank must be 0 to size - 1");
    ts::require(ranks != nullptr, "ranks is NULL");
    ts::distributed::Members members;
    members.store = c10::make_intrusive<c10d::PrefixStore>(
        std::string(name) + (device == TS_DEVICE_CPU ? "/gloo" : "/nccl"), store->store);
    members.name = name;
    members.rank = rank;
    members.size = size;
    for (int32_t i = 0; i < size; ++i) {
      ts::require(ranks[i] >= 0, "a rank is negative");
      members.ranks.push_back(static_cast<uint64_t>(ranks[i]));
    }
    members.timeout = ts::distributed::checked_timeout(timeout_nanoseconds);
    ts::distributed::switch_off_flight_recorder();
    auto made = std::make_unique<ts_group>();
    made->device = device;
    const ts::distributed::BrokenPipeBlocked blocked;
    if (device == TS_DEVICE_CPU) {
      made->backend = ts::distributed::new_gloo(members);
    } else {
      ts::refuse_in_capture("the connection of a group");
      made->backend = ts::distributed::new_nccl(members, device);
    }
    *group = made.release();
  });
}

ts_error* ts_group_shutdown(ts_group* group) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::distributed::checked(group);
    if (!group->on_gpu()) return;
    ts::refuse_in_capture("the end of a group");
    const ts::DeviceScope scope(group->device);
    group->backend->shutdown();
  });
}

ts_error* ts_group_abort(ts_group* group) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::distributed::checked(group);
    std::optional<ts::DeviceScope> scope;
    if (group->on_gpu()) scope.emplace(group->device);
    group->backend->abort();
  });
}

void ts_group_free(ts_group* group) { delete group; }

ts_error* ts_group_get_fault(ts_group* group, int32_t* fault) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::distributed::checked(group);
    ts::require(fault != nullptr, "fault is NULL");
    switch (group->backend->getError()) {
      case c10d::ErrorType::SUCCESS:
        *fault = TS_GROUP_FAULT_NONE;
        return;
      case c10d::ErrorType::TIMEOUT:
        *fault = TS_GROUP_FAULT_TIMEOUT;
        return;
      default:
        *fault = TS_GROUP_FAULT_COMMUNICATION;
    }
  });
}

ts_error* ts_group_broadcast(ts_group* group, ts_stream stream, ts_tensor* tensor, int32_t root,
                             ts_work** work) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    const ts_group& of = ts::distributed::checked(group);
    ts::distributed::check_rank(of, root);
    const at::Tensor value = ts::distributed::checked_dense(of, tensor);
    ts::distributed::run(
        of, stream, "a broadcast", {value}, {},
        [&](c10d::Backend& backend) {
          c10d::BroadcastOptions options;
          options.rootRank = root;
          options.asyncOp = !of.on_gpu();
          std::vector<at::Tensor> tensors{value};
          return backend.broadcast(tensors, options);
        },
        work);
  });
}

ts_error* ts_group_all_reduce(ts_group* group, ts_stream stream, ts_tensor* tensor,
                              int32_t reduction, ts_work** work) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    const ts_group& of = ts::distributed::checked(group);
    const at::Tensor value = ts::distributed::checked_dense(of, tensor);
    const c10d::ReduceOp by = ts::distributed::checked_reduction(of, reduction);
    const bool divides = ts::distributed::divides(of, reduction);
    ts::require(reduction != TS_REDUCTION_AVERAGE || value.is_floating_point(),
                "an average needs a floating point tensor");
    std::function<void()> finish;
    if (divides) finish = [value, size = of.backend->getSize()]() mutable { value.div_(size); };
    ts::distributed::run(
        of, stream, "an all-reduce", {value}, {},
        [&](c10d::Backend& backend) {
          c10d::AllreduceOptions options;
          options.reduceOp = by;
          options.asyncOp = !of.on_gpu();
          std::vector<at::Tensor> tensors{value};
          return backend.allreduce(tensors, options);
        },
        work, std::move(finish));
  });
}

ts_error* ts_group_reduce_scatter(ts_group* group, ts_stream stream, ts_tensor* output,
                                  const ts_tensor* input, int32_t reduction, ts_work** work) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    const ts_group& of = ts::distributed::checked(group);
    at::Tensor part = ts::distributed::checked_operand(of, output, "output");
    const at::Tensor whole = ts::distributed::checked_operand(of, input, "input");
    const int size = of.backend->getSize();
    ts::distributed::check_pair(whole, part, size,
                                "input must have size times the elements of output");
    const c10d::ReduceOp by = ts::distributed::checked_reduction(of, reduction);
    ts::require(reduction != TS_REDUCTION_AVERAGE || part.is_floating_point(),
                "an average needs floating point tensors");
    if (of.on_gpu()) {
      ts::distributed::run(
          of, stream, "a reduce-scatter", {part}, {whole},
          [&](c10d::Backend& backend) {
            c10d::ReduceScatterOptions options;
            options.reduceOp = by;
            options.asyncOp = false;
            at::Tensor from = whole;
            return backend._reduce_scatter_base(part, from, options);
          },
          work);
      return;
    }
    // Gloo reduces everything on every rank too, and does it in wait, which cannot be abandoned.
    ts::await_pending(whole);
    const at::Tensor sum = whole.detach().clone().view({size, part.numel()});
    auto finish = [part, sum, rank = of.backend->getRank(), size,
                   divides = ts::distributed::divides(of, reduction)]() mutable {
      part.view(-1).copy_(sum[rank]);
      if (divides) part.div_(size);
    };
    ts::distributed::run(
        of, stream, "a reduce-scatter", {part}, {whole},
        [&](c10d::Backend& backend) {
          c10d::AllreduceOptions options;
          options.reduceOp = by;
          std::vector<at::Tensor> tensors{sum};
          return backend.allreduce(tensors, options);
        },
        work, std::move(finish));
  });
}

ts_error* ts_group_all_gather(ts_group* group, ts_stream stream, ts_tensor* output,
                              const ts_tensor* input, ts_work** work) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    const ts_group& of = ts::distributed::checked(group);
    at::Tensor whole = ts::distributed::checked_operand(of, output, "output");
    at::Tensor part = ts::distributed::checked_operand(of, input, "input");
    const int size = of.backend->getSize();
    ts::distributed::check_pair(whole, part, size,
                                "output must have size times the elements of input");
    ts::distributed::run(
        of, stream, "an all-gather", {whole}, {part},
        [&](c10d::Backend& backend) {
          c10d::AllgatherOptions options;
          options.asyncOp = !of.on_gpu();
          if (of.on_gpu()) return backend._allgather_base(whole, part, options);
          at::Tensor flat = whole.detach().view({size, part.numel()});
          std::vector<std::vector<at::Tensor>> outputs{flat.unbind(0)};
          std::vector<at::Tensor> inputs{part.detach().view(-1)};
          return backend.allgather(outputs, inputs, options);
        },
        work);
  });
}

ts_error* ts_group_all_to_all(ts_group* group, ts_stream stream, ts_tensor* output,
                              const ts_tensor* input, const int64_t* output_rows,
                              const int64_t* input_rows, ts_work** work) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    const ts_group& of = ts::distributed::checked(group);
    at::Tensor to = ts::distributed::checked_operand(of, output, "output");
    at::Tensor from = ts::distributed::checked_operand(of, input, "input");
    ts::require(to.scalar_type() == from.scalar_type(), "input and output have different dtypes");
    ts::require(to.dim() > 0 && from.dim() > 0 && to.sizes().slice(1) == from.sizes().slice(1),
                "input and output must have equal shapes but for their first dimension");
    std::vector<int64_t> receives = ts::distributed::checked_parts(of, to, output_rows, "output");
    std::vector<int64_t> sends = ts::distributed::checked_parts(of, from, input_rows, "input");
    ts::require(receives.empty() == sends.empty(),
                "output_rows and input_rows must both be NULL or neither");
    ts::require(!receives.empty() || to.size(0) == from.size(0),
                "input and output must have equally many rows");
    ts::distributed::run(
        of, stream, "an all-to-all", {to}, {from},
        [&](c10d::Backend& backend) {
          c10d::AllToAllOptions options;
          options.asyncOp = !of.on_gpu();
          return backend.alltoall_base(to, from, receives, sends, options);
        },
        work);
  });
}

ts_error* ts_group_send(ts_group* group, ts_stream stream, const ts_tensor* tensor, int32_t to,
                        int64_t timeout_nanoseconds, ts_work** work) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    const ts_group& of = ts::distributed::checked(group);
    ts::distributed::check_rank(of, to);
    ts::require(to != of.backend->getRank(), "a rank cannot send to itself");
    const at::Tensor value = ts::distributed::checked_operand(of, tensor, "tensor");
    ts::distributed::run(
        of, stream, "a send", {}, {value},
        [&](c10d::Backend& backend) {
          std::vector<at::Tensor> tensors{value};
          return backend.send(tensors, to, /*tag=*/0);
        },
        {}, /*peer=*/true, ts::distributed::checked_timeout(timeout_nanoseconds), work);
  });
}

ts_error* ts_group_receive(ts_group* group, ts_stream stream, ts_tensor* tensor, int32_t from,
                           int64_t timeout_nanoseconds, ts_work** work) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    const ts_group& of = ts::distributed::checked(group);
    ts::distributed::check_rank(of, from);
    ts::require(from != of.backend->getRank(), "a rank cannot receive from itself");
    const at::Tensor value = ts::distributed::checked_operand(of, tensor, "tensor");
    ts::distributed::run(
        of, stream, "a receive", {value}, {},
        [&](c10d::Backend& backend) {
          std::vector<at::Tensor> tensors{value};
          return backend.recv(tensors, from, /*tag=*/0);
        },
        {}, /*peer=*/true, ts::distributed::checked_timeout(timeout_nanoseconds), work);
  });
}

ts_error* ts_work_wait(ts_work* work) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(work != nullptr, "work is NULL");
    if (work->outcome) work->outcome->wait();
    const std::lock_guard<std::mutex> lock(work->finishing);
    if (work->finished) return;
    if (!work->outcome && !work->work->wait(work->timeout)) {
      throw ts::Failure(TS_ERROR_OPERATOR, "aborted");
    }
    if (work->finish) {
      const c10::NoGradGuard no_grad;
      work->finish();
    }
    work->finished = true;
  });
}

ts_error* ts_work_abort(ts_work* work) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(work != nullptr, "work is NULL");
    if (work->outcome) {
      work->outcome->abort();
    } else {
      work->work->abort();
    }
  });
}

void ts_work_free(ts_work* work) { delete work; }
