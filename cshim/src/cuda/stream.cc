#include "cuda/stream.h"

#include <ATen/cuda/Sleep.h>
#include <c10/core/Stream.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAMacros.h>
#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/thread.h"
#include "cuda/capture.h"
#include "cuda/device.h"
#include "cuda/partition.h"
#include "cuda/same_stream.h"
#include "cuda/workspaces.h"
#include "torchstream.h"

namespace ts {
namespace {

using c10::DeviceIndex;
using c10::StreamId;
using c10::cuda::CUDAStream;

// c10's stream ids (c10/cuda/CUDAStream.cpp, "StreamId assignment"). 0 is the default stream. An
// odd id is a pool stream: index << 5 | (priorities above normal + 1) << 1 | 1. Any other id is the
// cudaStream_t of an external stream.
constexpr int kTypeBits = 4;
constexpr uint64_t kStreamsPerPool = 32;

bool is_external(StreamId id) noexcept { return id != 0 && (id & 1) == 0; }

// The number of priorities of a device's pools. It is 0 until the pools are made, and a pool id is
// invalid until then.
std::array<std::atomic<uint8_t>, C10_COMPILE_TIME_MAX_GPUS> pool_priorities{};

bool names_pool_stream(StreamId id, unsigned priorities) noexcept {
  const auto bits = static_cast<uint64_t>(id);
  const uint64_t type = bits >> 1 & ((1U << kTypeBits) - 1);
  return (bits & 1) != 0 && type - 1 < priorities && bits >> (kTypeBits + 1) < kStreamsPerPool;
}

// Returns c10's most urgent priority, for example -3, the same for all devices. 0 is the normal
// priority.
int greatest_priority() {
  static const int greatest = std::get<1>(CUDAStream::priority_range());
  return greatest;
}

void check_priority(int32_t priority) {
  const int greatest = greatest_priority();
  if (priority > 0 || priority < greatest) {
    throw Failure(TS_ERROR_INVALID_ARGUMENT,
                  "priority " + std::to_string(priority) + ": streams have priorities from " +
                      "0 (normal) to " + std::to_string(greatest) + " (most urgent)");
  }
}

CUDAStream take_from_pool(int32_t priority, int32_t device) {
  std::optional<c10::cuda::CUDAStreamCaptureModeGuard> relaxed;  // the first makes the pools
  if (somebody_captures()) relaxed.emplace(cudaStreamCaptureModeRelaxed);
  auto stream =
      c10::cuda::getStreamFromPool(static_cast<int>(priority), static_cast<DeviceIndex>(device));
  pool_priorities[static_cast<size_t>(device)].store(static_cast<uint8_t>(1 - greatest_priority()),
                                                     std::memory_order_release);
  return stream;
}

// The streams whose id is their address: wrapped streams of other code, and this library's own
// streams, which are spare while they are not lent.
class AddressedStreams {
 public:
  enum class Kind { kExternal, kOwned, kSpare };

  // Wraps a stream of other code; a stream that is already known does not change. Returns false for
  // a spare stream.
  bool wrap(int32_t device, StreamId id) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return known_.try_emplace({device, id}, Kind::kExternal).first->second != Kind::kSpare;
  }

  bool usable(int32_t device, StreamId id) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = known_.find({device, id});
    return found != known_.end() && found->second != Kind::kSpare;
  }

  // Returns false if the stream is not external.
  bool forget(int32_t device, StreamId id) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = known_.find({device, id});
    if (found == known_.end() || found->second != Kind::kExternal) return false;
    known_.erase(found);
    changes_.fetch_add(1, std::memory_order_release);
    return true;
  }

  // Lends an exclusive stream: the one that has been spare for longest if its work is done,
  // otherwise a new one. It never lends a stream with unfinished work, which the next owner would
  // wait for. The stream's kernels run on a part of the multiprocessors, or on all if
  // `multiprocessors` is 0.
  StreamId take(int32_t device, int32_t priority, int32_t multiprocessors) {
    const DeviceScope scope(device);
    // Neither creating nor querying a stream may invalidate another thread's capture.
    const c10::cuda::CUDAStreamCaptureModeGuard relaxed{cudaStreamCaptureModeRelaxed};
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& spare = spare_[{device, priority, multiprocessors}];
    if (!spare.empty()) {
      const StreamId id = spare.front();
      const cudaError_t status = cudaStreamQuery(reinterpret_cast<cudaStream_t>(id));
      if (status == cudaSuccess) {
        spare.pop_front();
        known_[{device, id}] = Kind::kOwned;
        return id;
      }
      if (status != cudaErrorNotReady) C10_CUDA_CHECK(status);
      C10_CUDA_CLEAR_ERROR();
    }
    cudaStream_t made = nullptr;
    if (multiprocessors == 0) {
      C10_CUDA_CHECK(cudaStreamCreateWithPriority(&made, cudaStreamNonBlocking, priority));
    } else {
      made = make_stream_on_part(device, priority, multiprocessors);
    }
    const auto id = static_cast<StreamId>(reinterpret_cast<uintptr_t>(made));
    known_[{device, id}] = Kind::kOwned;
    if (multiprocessors != 0) part_[{device, id}] = multiprocessors;
    return id;
  }

  bool owned(int32_t device, StreamId id) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = known_.find({device, id});
    return found != known_.end() && found->second == Kind::kOwned;
  }

  // The stream has passed owned(). Returns false if another thread has returned it since.
  bool give_back(int32_t device, StreamId id, int32_t priority) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Kind& kind = known_[{device, id}];
    if (kind != Kind::kOwned) return false;
    const auto part = part_.find({device, id});
    spare_[{device, priority, part == part_.end() ? 0 : part->second}].push_back(id);
    kind = Kind::kSpare;
    changes_.fetch_add(1, std::memory_order_release);
    return true;
  }

  // Increases whenever a stream becomes unusable.
  uint64_t changes() const noexcept { return changes_.load(std::memory_order_acquire); }

 private:
  std::mutex mutex_;
  std::map<std::pair<int32_t, StreamId>, Kind> known_;
  // Multiprocessors of a bounded stream; unbounded streams have no entry.
  std::map<std::pair<int32_t, StreamId>, int32_t> part_;
  // Keyed by device, priority and multiprocessors.
  std::map<std::tuple<int32_t, int32_t, int32_t>, std::deque<StreamId>> spare_;
  std::atomic<uint64_t> changes_{1};
};

AddressedStreams& addressed_streams() {
  static auto* streams = new AddressedStreams;  // never destroyed: threads may outlive main
  return *streams;
}

// A cache of streams that this thread has found usable, so that streams in use need no lock.
struct Lately {
  StreamId id;
  int32_t device;
  uint64_t changes;  // the registry's `changes` at that time; 0: empty
};
thread_local std::array<Lately, 8> lately{};

bool usable(int32_t device, StreamId id) {
  const auto bits = static_cast<uint64_t>(id);
  Lately& entry = lately[(bits >> 4 ^ bits >> 9) % lately.size()];
  const uint64_t changes = addressed_streams().changes();
  if (entry.id == id && entry.device == device && entry.changes == changes) return true;
  if (!addressed_streams().usable(device, id)) return false;
  entry = {id, device, changes};
  return true;
}

[[noreturn]] void throw_no_stream(ts_stream stream) {
  throw Failure(TS_ERROR_INVALID_ARGUMENT, "stream id " + std::to_string(stream.id) +
                                               " on device " + std::to_string(stream.device) +
                                               " was not made by this library, or was given back");
}

CUDAStream unchecked(int32_t device, StreamId id) noexcept {
  return CUDAStream(
      CUDAStream::UNCHECKED,
      c10::Stream(c10::Stream::UNSAFE,
                  c10::Device(c10::DeviceType::CUDA, static_cast<DeviceIndex>(device)), id));
}

// The part of the check that streams in normal use do not reach.
void check_rare(ts_stream stream) {
  if (is_external(stream.id)) {
    if (!usable(stream.device, stream.id)) throw_no_stream(stream);
    return;
  }
  if (!names_pool_stream(stream.id, static_cast<unsigned>(1 - greatest_priority()))) {
    throw_no_stream(stream);
  }
  // A well-formed id on a device without pools, from elsewhere in the process or invented: make the
  // pools, so that it names a stream.
  take_from_pool(0, stream.device);
}

void check(ts_stream stream) {
  require_device(stream.device);
  if (stream.id == 0) return;
  const auto& priorities = pool_priorities[static_cast<size_t>(stream.device)];
  if (!names_pool_stream(stream.id, priorities.load(std::memory_order_acquire))) {
    check_rare(stream);
  }
}

// The state that exiting a guard restores.
struct Entered {
  uint64_t serial;
  CUDAStream stream;   // the previous current stream of the guard's device
  DeviceIndex device;  // the previous current device
};

struct Guards {
  std::vector<Entered> entered;
  uint64_t serial = 0;
};

Guards& guards() {
  thread_local Guards here;
  return here;
}

}  // namespace

CUDAStream checked_stream(ts_stream stream) {
  check(stream);
  return unchecked(stream.device, stream.id);
}

ts_stream to_value(CUDAStream stream) noexcept { return {stream.id(), stream.device_index()}; }

}  // namespace ts

ts_error* ts_stream_from_pool(int32_t device, int32_t priority, ts_stream* stream) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(stream != nullptr, "stream is NULL");
    ts::require_device(device);
    ts::check_priority(priority);
    *stream = ts::to_value(ts::take_from_pool(priority, device));
  });
}

ts_error* ts_stream_get_default(int32_t device, ts_stream* stream) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(stream != nullptr, "stream is NULL");
    ts::require_device(device);
    *stream = {0, device};
  });
}

ts_error* ts_stream_from_handle(uintptr_t cuda_stream, int32_t device, ts_stream* stream) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(stream != nullptr, "stream is NULL");
    ts::require_device(device);
    auto* const handle = reinterpret_cast<cudaStream_t>(cuda_stream);
    if (handle == nullptr) {
      *stream = {0, device};
      return;
    }
    ts::require(handle != cudaStreamLegacy && handle != cudaStreamPerThread,
                "cudaStreamLegacy and cudaStreamPerThread cannot be wrapped: use the default "
                "stream, or one from cudaStreamCreate");
    ts::require((cuda_stream & 1) == 0, "not a cudaStream_t: the address is odd");
    int owner = -1;
    C10_CUDA_CHECK(cudaStreamGetDevice(handle, &owner));
    if (owner != device) {
      throw ts::Failure(TS_ERROR_INVALID_ARGUMENT, "the stream belongs to device " +
                                                       std::to_string(owner) + ", not to device " +
                                                       std::to_string(device));
    }
    const auto wrapped =
        c10::cuda::getStreamFromExternal(handle, static_cast<c10::DeviceIndex>(device));
    ts::require(ts::addressed_streams().wrap(device, wrapped.id()),
                "the stream was this library's own and was given back with ts_stream_release");
    *stream = ts::to_value(wrapped);
  });
}

ts_error* ts_stream_forget(ts_stream stream) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require_device(stream.device);
    if (!ts::addressed_streams().forget(stream.device, stream.id)) {
      throw ts::Failure(TS_ERROR_INVALID_ARGUMENT,
                        "stream id " + std::to_string(stream.id) + " on device " +
                            std::to_string(stream.device) + " is not a wrapped external stream");
    }
  });
}

ts_error* ts_stream_acquire(int32_t device, int32_t priority, ts_stream* stream) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(stream != nullptr, "stream is NULL");
    ts::require_device(device);
    ts::check_priority(priority);
    *stream = {ts::addressed_streams().take(device, priority, 0), device};
  });
}

ts_error* ts_stream_acquire_bounded(int32_t device, int32_t priority, int32_t max_multiprocessors,
                                    ts_stream* stream, int32_t* multiprocessors) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(stream != nullptr && multiprocessors != nullptr, "an output parameter is NULL");
    ts::require_device(device);
    ts::check_priority(priority);
    ts::require(max_multiprocessors >= 1, "max_multiprocessors is less than 1");
    const int32_t within = ts::multiprocessors_within(device, max_multiprocessors);
    *stream = {ts::addressed_streams().take(device, priority, within), device};
    *multiprocessors = within;
  });
}

ts_error* ts_stream_release(ts_stream stream) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require_device(stream.device);
    auto& streams = ts::addressed_streams();
    constexpr auto not_owned = "not a stream of ts_stream_acquire, or given back before";
    ts::require(streams.owned(stream.device, stream.id), not_owned);
    const auto own = ts::unchecked(stream.device, stream.id);
    ts::require(!ts::is_capturing(own), "the stream is being captured: end the capture first");
    // While the stream has no owner its memory is free, and may return to the driver.
    ts::drop_workspaces(own.stream());
    ts::require(streams.give_back(stream.device, stream.id, own.priority()), not_owned);
  });
}

ts_error* ts_stream_is_same(ts_stream a, ts_stream b, bool* same) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(same != nullptr, "same is NULL");
    *same = ts::same_stream(ts::checked_stream(a), ts::checked_stream(b));
  });
}

ts_error* ts_stream_get_handle(ts_stream stream, uintptr_t* cuda_stream) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(cuda_stream != nullptr, "cuda_stream is NULL");
    *cuda_stream = reinterpret_cast<uintptr_t>(ts::checked_stream(stream).stream());
  });
}

ts_error* ts_stream_get_priority(ts_stream stream, int32_t* priority) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(priority != nullptr, "priority is NULL");
    *priority = ts::checked_stream(stream).priority();
  });
}

ts_error* ts_stream_get_priority_range(int32_t* least, int32_t* greatest) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(least != nullptr && greatest != nullptr, "an output parameter is NULL");
    ts::require_device(0);
    const int range = ts::greatest_priority();
    *least = 0;
    *greatest = range;
  });
}

ts_error* ts_stream_is_capturing(ts_stream stream, bool* capturing) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(capturing != nullptr, "capturing is NULL");
    *capturing = ts::is_capturing(ts::checked_stream(stream));
  });
}

ts_error* ts_stream_query(ts_stream stream, bool* done) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(done != nullptr, "done is NULL");
    const auto on = ts::checked_stream(stream);
    ts::refuse_in_capture("asking for a stream");
    ts::require_no_capture(on);
    *done = on.query();
  });
}

ts_error* ts_stream_synchronize(ts_stream stream) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    const auto on = ts::checked_stream(stream);
    ts::refuse_in_capture("waiting for a stream");
    ts::require_no_capture(on);
    on.synchronize();
  });
}

ts_error* ts_stream_delay(ts_stream stream, int64_t nanoseconds) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(nanoseconds >= 0 && nanoseconds <= int64_t{60'000'000'000},
                "the time must be 0 to 60 s");
    const auto on = ts::checked_stream(stream);
    const ts::CaptureWatch watch("delaying a stream");
    const c10::cuda::CUDAStreamGuard guard(on);
    // The kernel counts cycles of a multiprocessor, whose clock is at most this fast.
    int kilohertz = 0;
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&kilohertz, cudaDevAttrClockRate, on.device_index()));
    const auto cycles = static_cast<int64_t>(static_cast<double>(nanoseconds) * kilohertz / 1e6);
    if (cycles > 0) at::cuda::sleep(cycles);
  });
}

ts_error* ts_get_current_cuda_stream(int32_t device, ts_stream* stream) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(stream != nullptr, "stream is NULL");
    if (device == TS_DEVICE_CURRENT) {
      ts::require_device(0);
      // getCurrentCUDAStream(-1) would also create a context on the device.
      device = c10::cuda::current_device();
    }
    ts::require_device(device);
    const auto current = c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(device));
    // Other code in the process made the stream current. Every stream that the library returns must
    // be valid as an argument.
    if (ts::is_external(current.id()) && !ts::usable(device, current.id())) {
      ts::addressed_streams().wrap(device, current.id());
    }
    *stream = ts::to_value(current);
  });
}

ts_error* ts_set_cuda_stream(ts_stream stream) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    c10::cuda::setCurrentCUDAStream(ts::checked_stream(stream));
  });
}

ts_error* ts_stream_guard_enter(ts_stream stream, ts_stream_guard* guard) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(guard != nullptr, "guard is NULL");
    const auto inner = ts::checked_stream(stream);
    ts::Guards& guards = ts::guards();
    const auto outer = c10::cuda::getCurrentCUDAStream(inner.device_index());
    if (guards.entered.size() == guards.entered.capacity()) {
      guards.entered.reserve(2 * guards.entered.size() + 8);
    }
    const auto device = c10::cuda::ExchangeDevice(inner.device_index());
    c10::cuda::setCurrentCUDAStream(inner);
    guards.entered.push_back({guards.serial + 1, outer, device});
    *guard = {ts::thread_number, ++guards.serial};
  });
}

ts_error* ts_stream_guard_exit(ts_stream_guard guard) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    if (guard.thread != ts::thread_number) {
      throw ts::Failure(
          TS_ERROR_WRONG_THREAD,
          "the stream guard was entered on another OS thread: exit it on that thread");
    }
    ts::Guards& guards = ts::guards();
    if (guards.entered.empty() || guards.entered.back().serial != guard.serial) {
      const bool waiting = !guards.entered.empty() && guards.entered.back().serial > guard.serial;
      throw ts::Failure(TS_ERROR_OUT_OF_ORDER,
                        waiting ? "a stream guard entered later has not been left yet, or this one "
                                  "was left already"
                                : "the stream guard was left already");
    }
    const ts::Entered entered = guards.entered.back();
    if (c10::cuda::current_device() != entered.device) {
      C10_CUDA_CHECK(c10::cuda::MaybeSetDevice(entered.device));
    }
    c10::cuda::setCurrentCUDAStream(entered.stream);
    guards.entered.pop_back();
  });
}
