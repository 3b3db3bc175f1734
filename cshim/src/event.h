// Events. Own code instead of at::cuda::CUDAEvent, which takes an event that was never recorded for
// a complete one, and whose creation by the first record is not safe against other threads.
#pragma once

#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <mutex>

#include "torchstream.h"

struct ts_event {
  explicit ts_event(int32_t event_flags) : flags(event_flags) {}
  ~ts_event();
  ts_event(const ts_event&) = delete;
  ts_event& operator=(const ts_event&) = delete;

  // INVALID_ARGUMENT if the event belongs to another device than the stream.
  void check_record(c10::cuda::CUDAStream stream) const;
  void record(c10::cuda::CUDAStream stream);

  // NOT_RECORDED if it never was.
  void check_recorded() const;
  void block(c10::cuda::CUDAStream stream) const;  // makes the stream wait
  bool query() const;
  void synchronize() const;

  const int32_t flags;
  // Set once, by the first record, device before event before recorded: who sees recorded sees all.
  std::atomic<int32_t> device{-1};
  std::atomic<cudaEvent_t> event{nullptr};
  std::atomic<bool> recorded{false};

 private:
  void create(c10::cuda::CUDAStream stream);
  std::mutex creation_;
};
