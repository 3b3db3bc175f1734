// Events. They replace at::cuda::CUDAEvent, which treats an event that was never recorded as
// complete, and whose creation by the first record is not thread-safe.
#pragma once

#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <memory>
#include <mutex>

#include "torchstream.h"

// Shared by its handle and by the graphs whose replays record it or wait for it.
struct ts_event : std::enable_shared_from_this<ts_event> {
  explicit ts_event(int32_t event_flags) : flags(event_flags) {}
  ~ts_event();
  ts_event(const ts_event&) = delete;
  ts_event& operator=(const ts_event&) = delete;

  // Throws INVALID_ARGUMENT if the event belongs to another device than the stream.
  void check_record(c10::cuda::CUDAStream stream) const;
  void record(c10::cuda::CUDAStream stream);
  // Called after a replay of a graph that records the event, which is external.
  void replayed() noexcept;
  // Called by the handle's owner.
  static ts_event* make(int32_t event_flags);
  static void free(ts_event* event) noexcept;

  // Throws NOT_RECORDED if the event was never recorded.
  void check_recorded() const;
  // Throws CAPTURE too if the latest record belongs to a graph: it never completes, and querying it
  // would invalidate the capture.
  void check_reachable() const;
  // Returns a handle for other processes, and creates the CUDA event if there is none. From then on
  // the event counts as recorded, since this process cannot see records of others.
  cudaIpcEventHandle_t share(int32_t on_device);
  // Opens an event that another process shared.
  void open(int32_t on_device, const cudaIpcEventHandle_t& handle);
  // Throws if block would fail. It fails in a capture if the record is outside that capture, and if
  // the record was made in a capture that has ended.
  void check_block(c10::cuda::CUDAStream stream) const;
  void block(c10::cuda::CUDAStream stream) const;  // makes the stream wait
  bool query() const;
  void synchronize() const;

  const int32_t flags;
  // Set once, by the first record, in this order: device, event, recorded. A thread that sees
  // recorded sees all three.
  std::atomic<int32_t> device{-1};
  std::atomic<cudaEvent_t> event{nullptr};
  std::atomic<bool> recorded{false};
  // The number of the capture with the latest record; 0: not captured.
  std::atomic<uint64_t> captured{0};

 private:
  std::shared_ptr<ts_event> handle_;   // while the caller has the handle
  std::atomic<bool> in_graph_{false};  // replays of a graph record it

  bool external() const noexcept { return (flags & TS_EVENT_FLAG_EXTERNAL) != 0; }
  void check_device(int32_t on_device) const;
  void create(int32_t on_device);
  std::mutex creation_;
};
