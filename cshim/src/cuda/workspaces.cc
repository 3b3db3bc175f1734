#include "cuda/workspaces.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>

#include "cuda/libtorch_version.h"

namespace ts {
namespace {

using c10::cuda::CUDAStream;
using Table = at::cuda::WorkspaceMapWithMutex;

// The workspaces of one of LibTorch's tables.
struct Kind {
  Table& table;
  size_t (*bytes)();
  // The workspace of each stream, as long as the table or a graph holds it. A default stream has
  // the handle NULL on every device.
  std::map<std::pair<c10::DeviceIndex, void*>, std::weak_ptr<c10::DataPtr>> of;
};

struct Shared {
  std::mutex mutex;
  // The turn to use a stream's workspaces. Entries are never removed, since threads wait for a turn
  // without the mutex above.
  std::map<std::pair<c10::DeviceIndex, void*>, std::mutex> turns;
  std::array<Kind, 2> kinds{
      Kind{at::cuda::cublas_handle_stream_to_workspace(), &at::cuda::getChosenWorkspaceSize, {}},
      // 1 MiB. LibTorch uses cuBLAS's handle for cuBLASLt.
      Kind{at::cuda::cublaslt_handle_stream_to_workspace(),
           &at::cuda::getCUDABlasLtWorkspaceSize,
           {}}};
};

Shared& shared() {
  static auto* all = new Shared;  // never destroyed: threads may outlive main
  return *all;
}

// How often workspaces were moved out of the tables. Changed after the tables, under Shared's
// mutex.
std::atomic<uint64_t> takings{0};

// The result of the calling thread's latest product. Most products are on the same stream as the
// previous one, and find the same result without a lock that all threads share.
struct Latest {
  c10::DeviceIndex device;
  c10::StreamId stream;  // getting its handle needs a call of LibTorch
  std::mutex* turn;      // NULL before the first product
  // The handle whose workspace was in the tables, and `takings` before they were read.
  cublasHandle_t handle;
  uint64_t takings;
};
thread_local Latest latest
    __attribute__((tls_model("initial-exec"))) = {-1, 0, nullptr, nullptr, 0};

std::mutex& turn_of(CUDAStream stream) {
  const c10::DeviceIndex device = stream.device_index();
  if (latest.turn != nullptr && latest.device == device && latest.stream == stream.id()) {
    return *latest.turn;
  }
  Shared& all = shared();
  const std::lock_guard<std::mutex> only(all.mutex);
  std::mutex& turn = all.turns[{device, stream.stream()}];
  latest = {device, stream.id(), &turn, nullptr, 0};
  return turn;
}

void release(void* holder) {
  const std::unique_ptr<Workspace> owned(static_cast<Workspace*>(holder));
}

// An entry of LibTorch's table that keeps the workspace alive.
WorkspaceEntry entry_of(const Workspace& workspace, size_t bytes) {
  void* data = workspace->get();
  const c10::Device device = workspace->device();
  return workspace_entry({data, std::make_unique<Workspace>(workspace).release(), &release, device},
                         bytes);
}

Workspace workspace_of(c10::DataPtr entry) {
  if (entry.get_deleter() == &release) return *static_cast<Workspace*>(entry.get_context());
  return std::make_shared<c10::DataPtr>(std::move(entry));
}

void take_from(Table& table, const std::set<void*>& streams, std::vector<Workspace>& out) {
  const std::unique_lock<std::shared_mutex> lock(table.mutex);
  for (auto it = table.map.begin(); it != table.map.end();) {
    if (streams.count(std::get<1>(it->first)) == 0) {
      ++it;
      continue;
    }
    Workspace workspace = workspace_of(take_memory(it->second));
    it = table.map.erase(it);
    if (std::find(out.begin(), out.end(), workspace) == out.end()) {
      out.push_back(std::move(workspace));
    }
  }
}

// Puts the stream's workspace of this kind into the table. The caller holds Shared's mutex.
void bind(Kind& kind, const std::tuple<void*, void*>& key, CUDAStream stream) {
  {
    const std::shared_lock<std::shared_mutex> lock(kind.table.mutex);
    if (kind.table.map.count(key) != 0) return;
  }
  const size_t bytes = kind.bytes();
  auto& known = kind.of[{stream.device_index(), stream.stream()}];
  Workspace workspace = known.lock();
  if (workspace == nullptr) {
    const c10::cuda::CUDAGuard device(stream.device_index());
    workspace =
        std::make_shared<c10::DataPtr>(c10::cuda::CUDACachingAllocator::get()->allocate(bytes));
    known = workspace;
  }
  WorkspaceEntry entry = entry_of(workspace, bytes);
  const std::unique_lock<std::shared_mutex> lock(kind.table.mutex);
  kind.table.map.try_emplace(key, std::move(entry));
}

// Whether both tables have the key. All calls on a stream except the first ones find it.
bool bound(const std::tuple<void*, void*>& key) {
  const auto has = [&](Table& table) {
    const std::shared_lock<std::shared_mutex> lock(table.mutex);
    return table.map.count(key) != 0;
  };
  return has(at::cuda::cublas_handle_stream_to_workspace()) &&
         has(at::cuda::cublaslt_handle_stream_to_workspace());
}

}  // namespace

std::unique_lock<std::mutex> bind_workspace(cublasHandle_t handle, CUDAStream stream) {
  std::unique_lock<std::mutex> turn(turn_of(stream));
  if (!keeps_workspaces()) return turn;
  const uint64_t before = takings.load(std::memory_order_acquire);
  if (latest.handle == handle && latest.takings == before) return turn;
  const std::tuple<void*, void*> key(handle, stream.stream());
  if (!bound(key)) {
    Shared& all = shared();
    const std::lock_guard<std::mutex> only(all.mutex);
    for (Kind& kind : all.kinds) bind(kind, key, stream);
  }
  latest.handle = handle;
  latest.takings = before;
  return turn;
}

std::vector<Workspace> take_workspaces(const std::set<void*>& streams) {
  std::vector<Workspace> taken;
  Shared& all = shared();
  const std::lock_guard<std::mutex> only(all.mutex);
  for (Kind& kind : all.kinds) {
    take_from(kind.table, streams, taken);
    for (auto it = kind.of.begin(); it != kind.of.end();) {
      it = streams.count(it->first.second) != 0 ? kind.of.erase(it) : std::next(it);
    }
  }
  takings.fetch_add(1, std::memory_order_release);
  return taken;
}

void drop_workspaces(cudaStream_t stream) { take_workspaces({stream}); }

cublasHandle_t make_blas_handle(c10::DeviceIndex device) {
  // LibTorch at once gives the handle a workspace of the current stream. On the default stream,
  // whose free memory everyone uses, the memory is soon reused.
  const c10::cuda::CUDAStreamGuard current(c10::cuda::getDefaultCUDAStream(device));
  cublasHandle_t handle = at::cuda::getCurrentCUDABlasHandle();
  Table& table = at::cuda::cublas_handle_stream_to_workspace();
  c10::DataPtr unused;  // freed after the lock
  const std::unique_lock<std::shared_mutex> lock(table.mutex);
  const auto found = table.map.find({handle, nullptr});
  if (found != table.map.end()) {
    unused = take_memory(found->second);
    table.map.erase(found);
  }
  return handle;
}

}  // namespace ts
