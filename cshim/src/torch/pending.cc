#include "torch/pending.h"

#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/util/SmallVector.h>

#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "cuda/capture.h"
#include "cuda/device.h"
#include "cuda/same_stream.h"
#include "cuda/storage.h"

namespace ts {

std::atomic<int64_t> pending_copies{0};

namespace {

using c10::cuda::CUDAStream;
using Weak = c10::weak_intrusive_ptr<c10::StorageImpl>;
using Event = std::shared_ptr<at::cuda::CUDAEvent>;

struct Copy {
  Event event;  // recorded after the copy
  CUDAStream stream;
  Weak storage;  // prevents another storage from getting the same address
};

struct Copies {
  std::mutex mutex;
  std::unordered_multimap<const c10::StorageImpl*, Copy> of;
};

Copies& copies() {
  static auto* all = new Copies;  // never destroyed: threads may outlive main
  return *all;
}

// Querying an event from outside a capture, or waiting for it, does not harm the capture.
using Relaxed = c10::cuda::CUDAStreamCaptureModeGuard;

// Removes copies that are done, or whose memory is freed. The caller holds the mutex.
void sweep(Copies& all) {
  const Relaxed relaxed{cudaStreamCaptureModeRelaxed};
  for (auto it = all.of.begin(); it != all.of.end();) {
    const Copy& copy = it->second;
    it = copy.storage.expired() || copy.event->query() ? all.of.erase(it) : std::next(it);
  }
  pending_copies.store(static_cast<int64_t>(all.of.size()), std::memory_order_release);
}

const c10::StorageImpl* key_of(const at::Tensor& host) {
  if (!host.defined() || !host.is_cpu() || !host.has_storage()) return nullptr;
  return host.storage().unsafeGetStorageImpl();
}

c10::SmallVector<Copy, 2> pending_of(const at::Tensor& host) {
  c10::SmallVector<Copy, 2> found;
  const c10::StorageImpl* key = key_of(host);
  if (key == nullptr) return found;
  Copies& all = copies();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto [first, last] = all.of.equal_range(key);
  for (auto it = first; it != last; ++it) found.push_back(it->second);
  return found;
}

}  // namespace

void note_pending(const at::Tensor& host, CUDAStream stream) {
  const c10::StorageImpl* key = key_of(host);
  if (key == nullptr) return;
  const DeviceScope device(stream.device_index());
  auto event =
      std::make_shared<at::cuda::CUDAEvent>(cudaEventDisableTiming | cudaEventBlockingSync);
  event->record(stream);
  Copies& all = copies();
  const std::lock_guard<std::mutex> lock(all.mutex);
  sweep(all);
  all.of.emplace(key, Copy{std::move(event), stream, Weak(storage_of(host))});
  pending_copies.store(static_cast<int64_t>(all.of.size()), std::memory_order_release);
}

void await_pending(const at::Tensor& host) {
  if (!any_pending()) return;
  const auto found = pending_of(host);
  if (found.empty()) return;
  for (const Copy& copy : found) {
    const Relaxed relaxed{cudaStreamCaptureModeRelaxed};
    copy.event->synchronize();
  }
  Copies& all = copies();
  const std::lock_guard<std::mutex> lock(all.mutex);
  sweep(all);
}

void order_after_pending(CUDAStream stream, const at::Tensor& host) {
  if (!any_pending()) return;
  // A captured stream cannot wait for an event from outside its capture.
  if (somebody_captures() && in_capture(stream)) return await_pending(host);
  for (const Copy& copy : pending_of(host)) {
    if (!same_stream(copy.stream, stream)) copy.event->block(stream);
  }
}

}  // namespace ts
