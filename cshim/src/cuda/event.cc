#include "cuda/event.h"

#include <c10/cuda/CUDAException.h>

#include <cstring>
#include <memory>
#include <string>

#include "base/error.h"
#include "base/thread.h"
#include "cuda/capture.h"
#include "cuda/device.h"
#include "cuda/stream.h"
#include "torchstream.h"

ts_event::~ts_event() {
  cudaEvent_t created = event.load(std::memory_order_acquire);
  if (created == nullptr) return;
  // Runs on the event's device, so that no context is created on the current device. A destructor
  // cannot report errors, and after a failure of the driver the process is lost anyway.
  c10::DeviceIndex previous = 0;
  C10_CUDA_IGNORE_ERROR(c10::cuda::GetDevice(&previous));
  C10_CUDA_IGNORE_ERROR(c10::cuda::MaybeSetDevice(static_cast<c10::DeviceIndex>(device.load())));
  C10_CUDA_IGNORE_ERROR(cudaEventDestroy(created));
  C10_CUDA_IGNORE_ERROR(c10::cuda::MaybeSetDevice(previous));
}

void ts_event::check_device(int32_t on_device) const {
  const int32_t owner = device.load(std::memory_order_acquire);
  if (owner >= 0 && owner != on_device) {
    throw ts::Failure(TS_ERROR_INVALID_ARGUMENT,
                      "the event was first recorded on device " + std::to_string(owner) +
                          " and cannot be recorded on device " + std::to_string(on_device));
  }
}

void ts_event::check_record(c10::cuda::CUDAStream stream) const {
  check_device(stream.device_index());
}

// The device must be current.
void ts_event::create(int32_t on_device) {
  const std::lock_guard<std::mutex> lock(creation_);
  if (event.load(std::memory_order_relaxed) != nullptr) {
    check_device(on_device);
    return;
  }
  unsigned cuda_flags = cudaEventDefault;
  if ((flags & TS_EVENT_FLAG_TIMING) == 0) cuda_flags |= cudaEventDisableTiming;
  if ((flags & TS_EVENT_FLAG_BLOCKING) != 0) cuda_flags |= cudaEventBlockingSync;
  if ((flags & TS_EVENT_FLAG_INTERPROCESS) != 0) cuda_flags |= cudaEventInterprocess;
  cudaEvent_t created = nullptr;
  C10_CUDA_CHECK(cudaEventCreateWithFlags(&created, cuda_flags));
  device.store(on_device, std::memory_order_release);
  event.store(created, std::memory_order_release);
}

cudaIpcEventHandle_t ts_event::share(int32_t on_device) {
  check_device(on_device);
  const ts::DeviceScope scope(on_device);
  if (event.load(std::memory_order_acquire) == nullptr) create(on_device);
  check_device(on_device);
  cudaIpcEventHandle_t handle;
  C10_CUDA_CHECK(cudaIpcGetEventHandle(&handle, event.load(std::memory_order_acquire)));
  recorded.store(true, std::memory_order_release);
  return handle;
}

void ts_event::open(int32_t on_device, const cudaIpcEventHandle_t& handle) {
  const ts::DeviceScope scope(on_device);
  cudaEvent_t opened = nullptr;
  const cudaError_t status = cudaIpcOpenEventHandle(&opened, handle);
  if (status == cudaErrorInvalidValue || status == cudaErrorInvalidResourceHandle) {
    C10_CUDA_CLEAR_ERROR();
    throw ts::Failure(TS_ERROR_INVALID_ARGUMENT,
                      "not the handle of an event that a living process shares");
  }
  C10_CUDA_CHECK(status);
  device.store(on_device, std::memory_order_release);
  event.store(opened, std::memory_order_release);
  recorded.store(true, std::memory_order_release);
}

void ts_event::record(c10::cuda::CUDAStream stream) {
  check_record(stream);
  ts::DeviceScope scope(stream.device_index());
  if (event.load(std::memory_order_acquire) == nullptr) create(stream.device_index());
  // Another thread may have made the first record meanwhile, on another device.
  check_record(stream);
  const bool in_graph = ts::somebody_captures() && ts::in_capture(stream);
  if (in_graph && external()) {  // a node of the graph: replays record the event
    C10_CUDA_CHECK(cudaEventRecordWithFlags(event.load(std::memory_order_acquire), stream.stream(),
                                            cudaEventRecordExternal));
    in_graph_.store(true, std::memory_order_release);
    ts::event_in_capture(shared_from_this(), stream);
    return;
  }
  // No other thread may query a captured event. So the mark is set before a captured record, and
  // cleared after a record that is not captured.
  const uint64_t before = captured.load(std::memory_order_acquire);
  if (in_graph) captured.store(ts::latest_capture(), std::memory_order_release);
  const cudaError_t status =
      cudaEventRecord(event.load(std::memory_order_acquire), stream.stream());
  if (in_graph && status != cudaSuccess) captured.store(before, std::memory_order_release);
  if (!in_graph && status == cudaSuccess) captured.store(0, std::memory_order_release);
  C10_CUDA_CHECK(status);
  recorded.store(true, std::memory_order_release);
}

void ts_event::replayed() noexcept {
  if (in_graph_.load(std::memory_order_acquire)) recorded.store(true, std::memory_order_release);
}

ts_event* ts_event::make(int32_t event_flags) {
  auto made = std::make_shared<ts_event>(event_flags);
  made->handle_ = made;
  return made.get();
}

void ts_event::free(ts_event* event) noexcept {
  const std::shared_ptr<ts_event> owned = std::move(event->handle_);
}

void ts_event::check_recorded() const {
  if (!recorded.load(std::memory_order_acquire)) {
    throw ts::Failure(TS_ERROR_NOT_RECORDED, "the event was never recorded");
  }
}

void ts_event::block(c10::cuda::CUDAStream stream) const {
  check_block(stream);
  ts::DeviceScope scope(stream.device_index());
  const bool node = external() && ts::somebody_captures() && ts::in_capture(stream);
  C10_CUDA_CHECK(cudaStreamWaitEvent(stream.stream(), event.load(std::memory_order_acquire),
                                     node ? cudaEventWaitExternal : cudaEventWaitDefault));
  if (node) {
    ts::event_in_capture(std::const_pointer_cast<ts_event>(shared_from_this()), stream);
  }
}

void ts_event::check_block(c10::cuda::CUDAStream stream) const {
  check_recorded();
  const uint64_t in = captured.load(std::memory_order_acquire);
  if (!ts::somebody_captures() || (in != 0 && in != ts::latest_capture())) {
    check_reachable();  // nothing can join a capture that has ended
  } else if (in == 0 && !external() && ts::in_capture(stream)) {
    throw ts::Failure(
        TS_ERROR_CAPTURE,
        "a stream that is captured cannot wait for an event that was recorded outside "
        "of the capture: wait for it before, or record it on a stream of the capture");
  }
}

void ts_event::check_reachable() const {
  check_recorded();
  if (captured.load(std::memory_order_acquire) == 0) return;
  throw ts::Failure(TS_ERROR_CAPTURE,
                    "the event's latest record was captured into a graph: record it on a stream "
                    "that is not captured, and ask for that");
}

bool ts_event::query() const {
  check_reachable();
  const cudaError_t status = cudaEventQuery(event.load(std::memory_order_acquire));
  if (status == cudaErrorNotReady) {
    C10_CUDA_CLEAR_ERROR();
    return false;
  }
  C10_CUDA_CHECK(status);
  return true;
}

void ts_event::synchronize() const {
  check_reachable();
  C10_CUDA_CHECK(cudaEventSynchronize(event.load(std::memory_order_acquire)));
}

ts_error* ts_event_new(int32_t flags, ts_event** event) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(event != nullptr, "event is NULL");
    ts::require((flags & ~(TS_EVENT_FLAG_TIMING | TS_EVENT_FLAG_BLOCKING |
                           TS_EVENT_FLAG_INTERPROCESS | TS_EVENT_FLAG_EXTERNAL)) == 0,
                "unknown event flag");
    ts::require((flags & TS_EVENT_FLAG_INTERPROCESS) == 0 || (flags & TS_EVENT_FLAG_TIMING) == 0,
                "an event between processes takes no time");
    ts::require_device(0);
    *event = ts_event::make(flags);
  });
}

ts_error* ts_event_export(ts_event* event, int32_t device, uint8_t* handle) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(event != nullptr, "event is NULL");
    ts::require(handle != nullptr, "handle is NULL");
    ts::require((event->flags & TS_EVENT_FLAG_INTERPROCESS) != 0,
                "the event was not made with TS_EVENT_FLAG_INTERPROCESS");
    ts::require_device(device);
    ts::refuse_in_capture("exporting an event");
    const cudaIpcEventHandle_t shared = event->share(device);
    static_assert(sizeof shared == TS_EVENT_HANDLE_BYTES);
    std::memcpy(handle, &shared, sizeof shared);
  });
}

ts_error* ts_event_import(int32_t device, const uint8_t* handle, ts_event** event) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(event != nullptr, "event is NULL");
    ts::require(handle != nullptr, "handle is NULL");
    ts::require_device(device);
    ts::refuse_in_capture("importing an event");
    cudaIpcEventHandle_t shared;
    std::memcpy(&shared, handle, sizeof shared);
    std::unique_ptr<ts_event, void (*)(ts_event*)> opened(
        ts_event::make(TS_EVENT_FLAG_INTERPROCESS), &ts_event_free);
    opened->open(device, shared);
    *event = opened.release();
  });
}

void ts_event_free(ts_event* event) {
  if (event == nullptr) return;
  ts::enter_thread();
  ts_event::free(event);
}

ts_error* ts_event_get_handle(const ts_event* event, int32_t* device, uintptr_t* cuda_event) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(event != nullptr, "event is NULL");
    ts::require(device != nullptr && cuda_event != nullptr, "an output parameter is NULL");
    cudaEvent_t made = event->event.load(std::memory_order_acquire);
    if (made == nullptr) {
      throw ts::Failure(TS_ERROR_NOT_RECORDED,
                        "the event was never recorded: its first record makes the cudaEvent_t");
    }
    *device = event->device.load(std::memory_order_acquire);
    *cuda_event = reinterpret_cast<uintptr_t>(made);
  });
}

ts_error* ts_event_record(ts_event* event, ts_stream stream) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(event != nullptr, "event is NULL");
    const auto on = ts::checked_stream(stream);
    const ts::CaptureWatch watch("recording an event");
    event->record(on);
  });
}

ts_error* ts_stream_wait_event(ts_stream stream, const ts_event* event) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(event != nullptr, "event is NULL");
    const auto waiter = ts::checked_stream(stream);
    const ts::CaptureWatch watch("waiting for an event of a stream outside of the capture");
    event->block(waiter);
  });
}

ts_error* ts_event_query(const ts_event* event, bool* done) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(event != nullptr, "event is NULL");
    ts::require(done != nullptr, "done is NULL");
    ts::refuse_in_capture("asking for an event");
    *done = event->query();
  });
}

ts_error* ts_event_synchronize(const ts_event* event) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(event != nullptr, "event is NULL");
    ts::refuse_in_capture("waiting for an event");
    event->synchronize();
  });
}

ts_error* ts_event_get_elapsed(const ts_event* start, const ts_event* end, int64_t* nanoseconds) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(start != nullptr && end != nullptr, "an event is NULL");
    ts::require(nanoseconds != nullptr, "nanoseconds is NULL");
    start->check_recorded();
    end->check_recorded();
    if ((start->flags & end->flags & TS_EVENT_FLAG_TIMING) == 0) {
      throw ts::Failure(TS_ERROR_INVALID_ARGUMENT,
                        "an event was made without timing: elapsed time needs two events with "
                        "TS_EVENT_FLAG_TIMING");
    }
    ts::refuse_in_capture("asking for the time between events");
    start->check_reachable();
    end->check_reachable();
    ts::require(start->device.load() == end->device.load(),
                "the events were recorded on different devices");
    ts::require(start->query() && end->query(),
                "an event is not complete yet: synchronize the later one first");
    float elapsed = 0;
    C10_CUDA_CHECK(cudaEventElapsedTime(&elapsed, start->event.load(), end->event.load()));
    // CUDA returns milliseconds as a float; the double keeps all its bits.
    *nanoseconds = static_cast<int64_t>(static_cast<double>(elapsed) * 1e6);
  });
}
