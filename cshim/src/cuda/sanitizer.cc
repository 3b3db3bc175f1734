// The log of a stream sanitizer: LibTorch's own use of memory and streams. The caller logs the
// program's own calls.
#include "cuda/sanitizer.h"

#include <c10/core/impl/GPUTrace.h>
#include <c10/core/impl/PyInterpreter.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/thread.h"
#include "cuda/device.h"
#include "torchstream.h"

namespace ts {
namespace {

using Entry = ts_sanitizer_entry;
using TraceEntry = c10::CachingDeviceAllocator::TraceEntry;

// Limits the log of a program that starts logging and never takes entries.
constexpr size_t kMaxEntries = size_t{1} << 20;
constexpr size_t kMaxOwn = 4096;

struct Log {
  // Code that appends checks `running` again under the mutex: ts_sanitizer_stop leaves an empty
  // log.
  std::mutex mutex;
  // Memory events of all threads, and order made by the library's own work, in the order in which
  // they happened.
  std::deque<Entry> entries;
  // Events and waits of calls, by thread number. The thread that takes them knows which call they
  // belong to. A stand-in thread has the number of the thread that it stands in for.
  std::unordered_map<uint64_t, std::vector<Entry>> own;
  std::atomic<bool> running{false};
  std::once_flag attached;
};

Log& the_log() {
  static auto* log = new Log;  // never destroyed: threads may outlive main
  return *log;
}

bool running() { return the_log().running.load(std::memory_order_acquire); }

using Doer = LoggedFor::Doer;
thread_local Doer doer = Doer::kUnknown;

bool works_for_library() {
  if (doer != Doer::kUnknown) return doer == Doer::kLibrary;
  return thread_number == 0 || library_thread;
}

void append(Entry entry) noexcept {
  Log& log = the_log();
  const std::lock_guard<std::mutex> lock(log.mutex);
  if (!running()) return;
  try {
    if (log.entries.size() < kMaxEntries) log.entries.push_back(entry);
  } catch (...) {  // out of memory: the entry is lost
  }
}

// Appends an event, a wait, a synchronisation or an access. A hook inside a backward pass needs the
// order that the pass has made so far on any thread, so that order is in the log of all threads.
void append_order(int32_t kind, int32_t device, uintptr_t address, uintptr_t stream,
                  size_t bytes = 0) noexcept {
  const bool of_call = !works_for_library();
  const Entry entry{kind, device, address, stream, bytes, of_call};
  if (!of_call) return append(entry);
  Log& log = the_log();
  const std::lock_guard<std::mutex> lock(log.mutex);
  if (!running()) return;
  try {
    auto& own = log.own[thread_number];
    if (own.size() < kMaxOwn) own.push_back(entry);
  } catch (...) {  // out of memory: the entry is lost
  }
}

// Called under the allocator's lock, so it calls nothing of LibTorch.
void trace_memory(const TraceEntry& entry) {
  if (!running()) return;
  int32_t kind = 0;
  switch (entry.action_) {
    case TraceEntry::ALLOC:
      kind = TS_SANITIZER_ALLOCATED;
      break;
    case TraceEntry::FREE_REQUESTED:
      kind = TS_SANITIZER_FREED;
      break;
    case TraceEntry::SEGMENT_FREE:
    case TraceEntry::SEGMENT_UNMAP:
      kind = TS_SANITIZER_UNMAPPED;
      break;
    default:
      return;
  }
  append({kind, entry.device_, entry.addr_, reinterpret_cast<uintptr_t>(entry.stream_), entry.size_,
          /*of_call=*/false});
}

// LibTorch reports its events and waits to one tracer, which in Python is the interpreter. Only the
// trace_ methods are ever called, because no tensor has an interpreter's object.
struct Tracer final : c10::impl::PyInterpreterVTable {
  [[noreturn]] static void refuse() {
    throw Failure(TS_ERROR_INTERNAL, "the sanitizer's tracer is not an interpreter");
  }

  std::string name() const override { return "torchstream's sanitizer"; }
  void incref(PyObject* /*object*/) const override {}
  void decref(PyObject* /*object*/) const override {}
  bool try_incref(const c10::impl::PyObjectSlot& /*slot*/) const override { return false; }
  size_t refcnt(PyObject* /*object*/) const override { return 0; }
  c10::intrusive_ptr<c10::TensorImpl> detach(const c10::TensorImpl* /*self*/) const override {
    refuse();
  }
  void dispatch(const c10::OperatorHandle& /*op*/, torch::jit::Stack* /*stack*/) const override {
    refuse();
  }
  void reportErrorCallback(PyObject* /*callback*/, c10::DispatchKey /*key*/) const override {}
  void python_op_registration_trampoline(const c10::OperatorHandle& /*op*/,
                                         c10::DispatchKey /*key*/, c10::DispatchKeySet /*keyset*/,
                                         torch::jit::Stack* /*stack*/, bool /*with_keyset*/,
                                         bool /*with_op*/) const override {
    refuse();
  }
  void throw_abstract_impl_not_imported_error(std::string /*opname*/, const char* /*pymodule*/,
                                              const char* /*context*/) const override {
    refuse();
  }
  void python_dispatcher(const c10::OperatorHandle& /*op*/, c10::DispatchKeySet /*keyset*/,
                         torch::jit::Stack* /*stack*/) const override {
    refuse();
  }
  bool is_contiguous(const c10::TensorImpl* /*self*/, at::MemoryFormat /*format*/) const override {
    refuse();
  }
  c10::SymBool sym_is_contiguous(const c10::TensorImpl* /*self*/,
                                 at::MemoryFormat /*format*/) const override {
    refuse();
  }
  bool is_strides_like(const c10::TensorImpl* /*self*/,
                       at::MemoryFormat /*format*/) const override {
    refuse();
  }
  bool is_non_overlapping_and_dense(const c10::TensorImpl* /*self*/) const override { refuse(); }
  c10::Device device(const c10::TensorImpl* /*self*/) const override { refuse(); }
  int64_t dim(const c10::TensorImpl* /*self*/) const override { refuse(); }
  c10::IntArrayRef strides(const c10::TensorImpl* /*self*/) const override { refuse(); }
  c10::IntArrayRef sizes(const c10::TensorImpl* /*self*/) const override { refuse(); }
  c10::SymIntArrayRef sym_sizes(const c10::TensorImpl* /*self*/) const override { refuse(); }
  c10::Layout layout(const c10::TensorImpl* /*self*/) const override { refuse(); }
  int64_t numel(const c10::TensorImpl* /*self*/) const override { refuse(); }
  c10::SymInt sym_numel(const c10::TensorImpl* /*self*/) const override { refuse(); }
  c10::SymIntArrayRef sym_strides(const c10::TensorImpl* /*self*/) const override { refuse(); }
  c10::SymInt sym_storage_offset(const c10::TensorImpl* /*self*/) const override { refuse(); }

  void trace_gpu_event_creation(c10::DeviceType /*type*/, uintptr_t /*event*/) const override {}
  void trace_gpu_event_deletion(c10::DeviceType /*type*/, uintptr_t event) const override {
    if (running()) append_order(TS_SANITIZER_EVENT_DELETED, -1, event, 0);
  }
  void trace_gpu_event_record(c10::DeviceType /*type*/, uintptr_t event,
                              uintptr_t stream) const override {
    if (running()) append_order(TS_SANITIZER_EVENT_RECORDED, current(), event, stream);
  }
  void trace_gpu_event_wait(c10::DeviceType /*type*/, uintptr_t event,
                            uintptr_t stream) const override {
    if (running()) append_order(TS_SANITIZER_EVENT_AWAITED, current(), event, stream);
  }
  void trace_gpu_memory_allocation(c10::DeviceType /*type*/, uintptr_t /*memory*/) const override {}
  void trace_gpu_memory_deallocation(c10::DeviceType /*type*/,
                                     uintptr_t /*memory*/) const override {}
  void trace_gpu_stream_creation(c10::DeviceType /*type*/, uintptr_t /*stream*/) const override {}
  void trace_gpu_device_synchronization(c10::DeviceType /*type*/) const override {
    if (running()) append_order(TS_SANITIZER_DEVICE_SYNCHRONIZED, current(), 0, 0);
  }
  void trace_gpu_stream_synchronization(c10::DeviceType /*type*/, uintptr_t stream) const override {
    if (running()) append_order(TS_SANITIZER_STREAM_SYNCHRONIZED, current(), 0, stream);
  }
  void trace_gpu_event_synchronization(c10::DeviceType /*type*/, uintptr_t event) const override {
    if (running()) append_order(TS_SANITIZER_EVENT_SYNCHRONIZED, current(), event, 0);
  }
  void reset_backward_hooks(const c10::TensorImpl* /*self*/) const override {}

 private:
  // Returns the device of a default stream, whose handle is 0: LibTorch makes it current first.
  static int32_t current() noexcept {
    c10::DeviceIndex device = -1;
    return c10::cuda::GetDevice(&device) == cudaSuccess ? device : -1;
  }
};

// The number of events that exist only in the log.
std::atomic<uintptr_t> invented_events{0};

// Neither can be detached: both check Log::running.
void attach() {
  c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker(trace_memory);
  static const auto* tracer = new Tracer;
  static const auto* interpreter = new c10::impl::PyInterpreter(tracer);
  c10::impl::GPUTrace::set_trace(interpreter);
}

}  // namespace

void log_order(c10::cuda::CUDAStream waiter, c10::cuda::CUDAStream on) noexcept {
  if (!running()) return;
  const auto handle = [](c10::cuda::CUDAStream stream) {
    return reinterpret_cast<uintptr_t>(stream.stream());
  };
  // Odd, as no address of an event is.
  const uintptr_t event = 2 * invented_events.fetch_add(1, std::memory_order_relaxed) + 1;
  append_order(TS_SANITIZER_EVENT_RECORDED, on.device_index(), event, handle(on));
  append_order(TS_SANITIZER_EVENT_AWAITED, waiter.device_index(), event, handle(waiter));
  append_order(TS_SANITIZER_EVENT_DELETED, -1, event, 0);
}

void log_access(const at::Tensor& tensor, c10::cuda::CUDAStream stream, bool write) noexcept {
  if (!running() || !tensor.is_cuda() || !tensor.is_non_overlapping_and_dense()) return;
  const int32_t kind = write ? TS_SANITIZER_WRITTEN : TS_SANITIZER_READ;
  append_order(kind, tensor.get_device(), reinterpret_cast<uintptr_t>(tensor.const_data_ptr()),
               reinterpret_cast<uintptr_t>(stream.stream()), tensor.nbytes());
}

void log_use(const at::Tensor& tensor, c10::cuda::CUDAStream stream) noexcept {
  if (!running() || !tensor.is_cuda()) return;
  append_order(TS_SANITIZER_USED, tensor.get_device(),
               reinterpret_cast<uintptr_t>(tensor.storage().data()),
               reinterpret_cast<uintptr_t>(stream.stream()));
}

LoggedFor::LoggedFor(Doer now) noexcept : before_(std::exchange(doer, now)) {}
LoggedFor::~LoggedFor() { doer = before_; }

void log_unmapped(c10::DeviceIndex device, const void* memory, size_t bytes) noexcept {
  if (!running()) return;
  append({TS_SANITIZER_UNMAPPED, device, reinterpret_cast<uintptr_t>(memory), 0, bytes, false});
}

}  // namespace ts

ts_error* ts_sanitizer_start(void) {
  return ts::guard(__func__, [] {
    ts::enter_thread();
    ts::Log& log = ts::the_log();
    if (ts::device_count() == 0) return;
    ts::ensure_cuda();
    std::call_once(log.attached, ts::attach);
    log.running.store(true, std::memory_order_release);
  });
}

void ts_sanitizer_stop(void) {
  ts::Log& log = ts::the_log();
  const std::lock_guard<std::mutex> lock(log.mutex);
  log.running.store(false, std::memory_order_release);
  log.entries.clear();
  log.own.clear();
}

int64_t ts_sanitizer_take(ts_sanitizer_entry* entries, int64_t capacity) {
  ts::Log& log = ts::the_log();
  const std::lock_guard<std::mutex> lock(log.mutex);
  int64_t taken = 0;
  for (; taken < capacity && !log.entries.empty(); ++taken) {
    entries[taken] = log.entries.front();
    log.entries.pop_front();
  }
  const auto found = log.own.find(ts::thread_number);
  if (found == log.own.end()) return taken;
  auto& own = found->second;
  const auto count = std::min<int64_t>(capacity - taken, static_cast<int64_t>(own.size()));
  std::copy_n(own.begin(), count, entries + taken);
  own.erase(own.begin(), own.begin() + count);
  if (own.empty()) log.own.erase(found);
  return taken + count;
}
