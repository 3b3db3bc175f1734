// CUDA graphs: capture, memory, random numbers, replay.
//
// The capture is implemented here, over cudaStreamBeginCapture and the caching allocators' private
// pools. at::cuda::CUDAGraph has three faults. When a capture fails, it leaves the allocator and
// the generator in it. It writes the generator's device state on the capturing stream, concurrently
// with replays that read it. It fills that state at every replay, even without random numbers.
#include <ATen/Context.h>
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/AllocatorConfig.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <sstream>
#include <type_traits>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/thread.h"
#include "cuda/allocator.h"
#include "cuda/capture.h"
#include "cuda/device.h"
#include "cuda/event.h"
#include "cuda/libraries.h"
#include "cuda/randomness.h"
#include "cuda/replay_order.h"
#include "cuda/same_stream.h"
#include "cuda/storage.h"
#include "cuda/stream.h"
#include "cuda/workspaces.h"
#include "torchstream.h"

namespace ts {

namespace {

using c10::cuda::CUDAStream;

// The allocators' private memory of one graph, or of several that share it.
class Pool {
 public:
  explicit Pool(c10::DeviceIndex device) : memory(device, PoolKind::kGraph) {}
  ~Pool() {
    const bool used = host_uses_ > 0;
    for (; host_uses_ > 0; --host_uses_) at::getHostAllocator(at::kCUDA)->release_pool(memory.id());
    if (used) note_ended_host_pool();
  }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // From now on, pinned memory on streams that the filter accepts is allocated from the pool. Each
  // begin adds a user of the pool until the pool ends, since copies in the graph may read the
  // memory at every replay.
  template <typename Filter>
  void begin_host(Filter&& of_capture) {
    at::getHostAllocator(at::kCUDA)->begin_allocate_to_pool(memory.id(), of_capture);
    ++host_uses_;
  }
  void end_host() { at::getHostAllocator(at::kCUDA)->end_allocate_to_pool(memory.id()); }

  PrivatePool memory;
  // Replays of the pool's graphs use the same memory, so they run one after the other.
  std::mutex mutex;
  ReplayOrder order;  // guarded by mutex

 private:
  int host_uses_ = 0;
};

class Capture;

using GraphPointer = std::unique_ptr<std::remove_pointer_t<cudaGraph_t>, void (*)(cudaGraph_t)>;

GraphPointer own(cudaGraph_t graph) {
  return {graph, [](cudaGraph_t each) { C10_CUDA_IGNORE_ERROR(cudaGraphDestroy(each)); }};
}

}  // namespace

// The numbers that a replay draws from one generator.
struct Draw {
  std::shared_ptr<Randomness> generator;
  uint64_t increment;
};

}  // namespace ts

struct ts_graph {
  ts_graph(c10::cuda::CUDAStream on, std::shared_ptr<ts::Pool> memory)
      : pool(std::move(memory)), record(on) {}
  ~ts_graph();
  ts_graph(const ts_graph&) = delete;
  ts_graph& operator=(const ts_graph&) = delete;

  void begin(std::unique_lock<std::shared_mutex> turn);
  void end();
  void replay(c10::cuda::CUDAStream on);
  void launch(c10::cuda::CUDAStream on, size_t next_draw);
  void check_held() const;
  void keep_for_replays();
  void require_thread() const;

  std::shared_ptr<ts::Pool> pool;  // first, since gradients in the record may be in its memory
  ts::CaptureRecord record;
  const uint64_t thread = ts::thread_number;  // the capturing thread, also after the capture
  std::unique_ptr<ts::Capture> capture;       // set during the capture
  cudaGraphExec_t exec = nullptr;
  ts::GraphPointer kept = ts::own(nullptr);  // for a debug dump
  bool debug = false;
  ts_graph_nodes kinds{};
  int64_t nodes = 0;
  std::vector<ts::Draw> random;           // in the order of locking
  std::vector<ts::Workspace> workspaces;  // of captured products; no other work uses them
};

namespace ts {
namespace {

// The time from cudaStreamBeginCapture to cudaStreamEndCapture, with everything that LibTorch must
// be told. Created, started, ended and destroyed on one thread. Destroying it without ending it
// discards the captured work.
class Capture {
 public:
  Capture(ts_graph& graph, std::unique_lock<std::shared_mutex> turn)
      : graph_(graph), turn_(std::move(turn)), memory_(*this), host_(*this), numbers_(*this) {}
  ~Capture() {
    cudaGraph_t captured = nullptr;
    end(&captured);
    if (captured != nullptr) C10_CUDA_IGNORE_ERROR(cudaGraphDestroy(captured));
  }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

  // Called once graph.capture is this object.
  void start() {
    cudaStream_t stream = graph_.record.stream.stream();
    C10_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    begun_ = true;
    unsigned long long id = 0;
    capture_status(stream, &id);
    graph_.record.id.store(id, std::memory_order_release);
    numbers_.begin(id);
    open_capture(graph_.record);
  }

  cudaError_t end(cudaGraph_t* out) noexcept {
    if (!begun_) return cudaSuccess;
    begun_ = false;
    close_capture();
    const cudaError_t status = cudaStreamEndCapture(graph_.record.stream.stream(), out);
    if (status != cudaSuccess) C10_CUDA_CLEAR_ERROR();
    return status;
  }

  // Moves the turn out, which otherwise ends with this object. No other capture starts until it is
  // released.
  std::unique_lock<std::shared_mutex> take_turn() noexcept { return std::move(turn_); }

 private:
  struct Memory {
    explicit Memory(Capture& c) : pool(c.graph_.pool->memory) {
      release_ended_pools();  // from now on the allocator returns nothing to make room
      pool.begin([&c](cudaStream_t stream) { return c.graph_.record.has(stream); });
    }
    ~Memory() { pool.end(); }
    PrivatePool& pool;
  };
  struct HostMemory {
    explicit HostMemory(Capture& c) : pool(*c.graph_.pool) {
      pool.begin_host([&c](c10::Stream stream) {
        return c.graph_.record.has(CUDAStream(CUDAStream::UNCHECKED, stream).stream());
      });
    }
    ~HostMemory() { pool.end_host(); }
    Pool& pool;
  };
  struct Numbers {
    explicit Numbers(Capture& c) : graph(c.graph_) {}
    void begin(unsigned long long id) {
      graph.record.generators = {Randomness::of(graph.record.stream.device_index())};
      graph.record.generators.front()->begin(id);
    }
    ~Numbers() {
      for (const auto& each : graph.record.generators) {
        const uint64_t increment = each->end();
        if (increment != 0) graph.random.push_back({each, increment});
      }
      // Replays lock the generators in this order.
      std::sort(graph.random.begin(), graph.random.end(),
                [](const Draw& a, const Draw& b) { return a.generator < b.generator; });
    }
    ts_graph& graph;
  };

  ts_graph& graph_;
  std::unique_lock<std::shared_mutex> turn_;
  bool begun_ = false;
  Memory memory_;
  HostMemory host_;
  Numbers numbers_;
};

// Describes why a capture was invalidated.
std::string broken_text(const ts_graph& graph, cudaError_t status) {
  switch (status) {
    case cudaErrorStreamCaptureUnjoined:
      return "work was forked to another stream and not joined before the end: Join every stream "
             "that was forked";
    case cudaErrorStreamCaptureInvalidated:
    case cudaErrorStreamCaptureUnsupported:
      if (graph.record.broken_by != nullptr) {
        return std::string("it was broken by ") + graph.record.broken_by +
               ", which cannot be captured: take it out of the captured function, or run the "
               "function once on this thread and stream before";
      }
      return "it was broken by a call that cannot be captured";
    default:
      return cudaGetErrorString(status);
  }
}

ts_graph_nodes kinds_of(cudaGraph_t graph, size_t count) {
  std::vector<cudaGraphNode_t> all(count);
  C10_CUDA_CHECK(cudaGraphGetNodes(graph, all.data(), &count));
  ts_graph_nodes kinds{};
  for (cudaGraphNode_t node : all) {
    auto type = cudaGraphNodeTypeCount;
    C10_CUDA_CHECK(cudaGraphNodeGetType(node, &type));
    switch (type) {
      case cudaGraphNodeTypeKernel:
        ++kinds.kernels;
        break;
      case cudaGraphNodeTypeMemcpy:
        ++kinds.copies;
        break;
      case cudaGraphNodeTypeMemset:
        ++kinds.fills;
        break;
      case cudaGraphNodeTypeHost:
        ++kinds.host_functions;
        break;
      case cudaGraphNodeTypeEventRecord:
        ++kinds.event_records;
        break;
      case cudaGraphNodeTypeWaitEvent:
        ++kinds.event_waits;
        break;
      case cudaGraphNodeTypeEmpty:
        ++kinds.empty;
        break;
      default:
        ++kinds.others;
    }
  }
  return kinds;
}

std::string text_of(const at::Tensor& tensor) {
  std::ostringstream text;
  text << c10::toString(tensor.scalar_type()) << " " << tensor.sizes();
  return text.str();
}

}  // namespace

}  // namespace ts

void ts_graph::begin(std::unique_lock<std::shared_mutex> turn) {
  // The first use of cuBLAS on this thread would invalidate the capture.
  ts::prepare_libraries(record.stream.device_index());
  record.add_stream(record.stream.stream());
  ts::Randomness::of(record.stream.device_index());  // allocates at the first call
  capture = std::make_unique<ts::Capture>(*this, std::move(turn));
  capture->start();
}

void ts_graph::end() {
  ts::close_capture();
  workspaces = ts::take_workspaces(record.streams);
  cudaGraph_t captured = nullptr;
  const cudaError_t status = capture->end(&captured);
  const auto turn = capture->take_turn();  // no other capture starts before this graph is complete
  capture.reset();
  record.made.clear();
  record.known.clear();
  ts::GraphPointer owned = ts::own(captured);
  if (status != cudaSuccess || captured == nullptr) {
    throw ts::Failure(TS_ERROR_CAPTURE, ts::broken_text(*this, status));
  }
  if (record.made_elsewhere) ts::throw_made_elsewhere();
  size_t count = 0;
  C10_CUDA_CHECK(cudaGraphGetNodes(captured, nullptr, &count));
  if (count == 0) {
    throw ts::Failure(TS_ERROR_CAPTURE,
                      "nothing was enqueued on the captured stream: was the work on another "
                      "stream or device?");
  }
  nodes = static_cast<int64_t>(count);
  kinds = ts::kinds_of(captured, count);
  C10_CUDA_CHECK(cudaGraphInstantiateWithFlags(
      &exec, captured,
      cudaGraphInstantiateFlagAutoFreeOnLaunch | cudaGraphInstantiateFlagUseNodePriority));
  // The first launch uploads the graph, on its own stream. An upload here would run after the
  // remaining work of the capture's stream, and CUDA would not order a launch on another stream
  // after it.
  if (debug) kept = std::move(owned);
  if (!record.gradients) return;
  for (ts::Held& each : record.held) each.gradient = each.tensor.unsafeGetTensorImpl()->grad();
}

void ts_graph::require_thread() const {
  if (thread != ts::thread_number) {
    throw ts::Failure(TS_ERROR_WRONG_THREAD,
                      "the capture was begun on another OS thread, and ends on that one");
  }
}

void ts_graph::check_held() const {
  for (const auto& retired : record.retired) {
    if (retired->load(std::memory_order_acquire)) {
      throw ts::Failure(TS_ERROR_STALE,
                        "the weights of a compiled model were replaced since the capture, and the "
                        "graph has the old ones: capture again");
    }
  }
  for (size_t i = 0; i < record.held.size(); ++i) {
    const ts::Held& each = record.held[i];
    const c10::TensorImpl* impl = each.tensor.unsafeGetTensorImpl();
    if (impl->storage().unsafeGetStorageImpl() != each.storage.get() ||
        (!each.allocated && each.tensor.const_data_ptr() != each.data)) {
      throw ts::Failure(TS_ERROR_STALE, "operand " + std::to_string(i + 1) + " of the graph, " +
                                            ts::text_of(each.tensor) +
                                            ", was given other memory since the capture: capture "
                                            "again, or copy into the memory that it had");
    }
    if (record.gradients && !each.gradient.is_same(impl->grad())) {
      throw ts::Failure(
          TS_ERROR_STALE,
          "the gradient of operand " + std::to_string(i + 1) + " of the graph, " +
              ts::text_of(each.tensor) + ", " +
              (each.gradient.defined() ? "was dropped or replaced" : "has come to be") +
              " since the capture: the graph works on the gradients as they were at "
              "its end; zero them in place, or capture again");
    }
  }
}

void ts_graph::replay(c10::cuda::CUDAStream on) {
  check_held();
  const ts::DeviceScope scope(on.device_index());
  const std::lock_guard<std::mutex> lock(pool->mutex);
  pool->order.before(on);
  launch(on, 0);
  pool->order.after(on);
  for (const auto& event : record.events) event->replayed();
}

void ts_graph::launch(c10::cuda::CUDAStream on, size_t next_draw) {
  if (next_draw == random.size()) {
    C10_CUDA_CHECK(cudaGraphLaunch(exec, on.stream()));
    return;
  }
  const ts::Draw& draw = random[next_draw];
  draw.generator->draw(on, draw.increment, [&] { launch(on, next_draw + 1); });
}

// CUDA keeps an executable graph until its replays are done. The graph's own memory must live until
// then. The pool's memory needs no such care: cudaFree returns it to the driver and waits for the
// device.
void ts_graph::keep_for_replays() {
  std::optional<c10::cuda::CUDAStream> last;
  {
    const std::lock_guard<std::mutex> lock(pool->mutex);
    last = pool->order.unfinished();
    // Expandable segments are unmapped after a wait for the capture's stream only.
    if (last.has_value() &&
        c10::CachingAllocator::AcceleratorAllocatorConfig::use_expandable_segments()) {
      pool->order.wait();
      return;
    }
  }
  if (!last.has_value()) return;
  // Reference counts do not tell whether anyone else holds the memory, since views and gradients
  // share it.
  for (const ts::Held& each : record.held) {
    ts::record_use(each.storage, *last);
    if (each.gradient.defined() && each.gradient.is_cuda() && each.gradient.has_storage()) {
      ts::record_use(ts::storage_of(each.gradient), *last);
    }
  }
  for (const ts::Draw& each : random)
    ts::record_use(ts::storage_of(each.generator->inputs()), *last);
  for (const ts::Workspace& each : workspaces) {
    if (each->get() == nullptr) continue;
    ts::record_use(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), 0,
                                                         std::move(*each), nullptr, false),
                   *last);
  }
  workspaces.clear();
}

ts_graph::~ts_graph() {
  capture.reset();
  if (exec == nullptr) return;
  auto mode = cudaStreamCaptureModeRelaxed;  // this thread may be capturing
  C10_CUDA_IGNORE_ERROR(cudaThreadExchangeStreamCaptureMode(&mode));
  C10_CUDA_IGNORE_ERROR(cudaGraphExecDestroy(exec));
  C10_CUDA_IGNORE_ERROR(cudaThreadExchangeStreamCaptureMode(&mode));
}

ts_error* ts_graph_begin(ts_stream stream, const ts_graph* share, ts_graph** graph) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(graph != nullptr, "graph is NULL");
    const auto on = ts::checked_stream(stream);
    ts::require(on.stream() != nullptr, "the default stream cannot be captured");
    if (ts::this_thread_captures()) {
      throw ts::Failure(TS_ERROR_CAPTURE, "this thread captures already: captures do not nest");
    }
    if (ts::inside_memory_pool()) {
      throw ts::Failure(TS_ERROR_CAPTURE,
                        "this thread is inside a memory pool, and a graph has memory of its own: "
                        "leave the pool before the capture");
    }
    const auto device = on.device_index();
    ts::require(c10::cuda::current_device() == device &&
                    ts::same_stream(c10::cuda::getCurrentCUDAStream(device), on),
                "the stream must be current on the calling thread");
    ts::require(share == nullptr ||
                    (share->exec != nullptr && share->record.stream.device_index() == device),
                "the graph to share memory with is not captured, or on another device");
    ts::ensure_cuda();
    auto made = std::make_unique<ts_graph>(
        on, share != nullptr ? share->pool : std::make_shared<ts::Pool>(device));
    std::unique_lock<std::shared_mutex> turn = ts::take_capture_turn();
    // A capture by other code: a capture of this library would hold the turn.
    ts::require_no_capture(on);
    unsigned flags = 0;
    C10_CUDA_CHECK(cudaStreamGetFlags(on.stream(), &flags));
    ts::require((flags & cudaStreamNonBlocking) != 0,
                "the stream was made without cudaStreamNonBlocking: a capture on it would break at "
                "any use of a default stream");
    made->begin(std::move(turn));
    *graph = made.release();
  });
}

ts_error* ts_graph_end(ts_graph* graph) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(graph != nullptr && graph->capture != nullptr, "the graph is not being captured");
    graph->require_thread();
    graph->end();
  });
}

ts_error* ts_graph_replay(ts_graph* graph, ts_stream stream) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(graph != nullptr && graph->exec != nullptr, "the graph is not captured");
    const auto on = ts::checked_stream(stream);
    ts::require(on.device_index() == graph->record.stream.device_index(),
                "the graph was captured on another device than the stream's");
    if (ts::somebody_captures() && ts::is_capturing(on)) {
      throw ts::Failure(TS_ERROR_CAPTURE, "a replay cannot be captured into another graph");
    }
    graph->replay(on);
  });
}

ts_error* ts_graph_keep_for_dump(ts_graph* graph) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(graph != nullptr && graph->capture != nullptr, "the graph is not being captured");
    graph->debug = true;
  });
}

ts_error* ts_graph_dump(const ts_graph* graph, const char* path, bool verbose) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(graph != nullptr && graph->exec != nullptr, "the graph is not captured");
    ts::require(path != nullptr, "path is NULL");
    ts::require(graph->kept != nullptr,
                "the graph was captured without ts_graph_keep_for_dump: CUDA has forgotten it");
    C10_CUDA_CHECK(cudaGraphDebugDotPrint(graph->kept.get(), path,
                                          verbose ? cudaGraphDebugDotFlagsVerbose : 0));
  });
}

ts_error* ts_graph_get_nodes(const ts_graph* graph, ts_graph_nodes* nodes) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require_size(nodes, "nodes");
    ts::require(graph != nullptr && graph->exec != nullptr, "the graph is not captured");
    ts::fill(nodes, graph->kinds);
  });
}

ts_error* ts_graph_get_handles(const ts_graph* graph, uintptr_t* cuda_graph_exec,
                               uintptr_t* cuda_graph) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(cuda_graph_exec != nullptr && cuda_graph != nullptr, "an output parameter is NULL");
    ts::require(graph != nullptr && graph->exec != nullptr, "the graph is not captured");
    *cuda_graph_exec = reinterpret_cast<uintptr_t>(graph->exec);
    *cuda_graph = reinterpret_cast<uintptr_t>(graph->kept.get());
  });
}

int64_t ts_graph_node_count(const ts_graph* graph) { return graph == nullptr ? 0 : graph->nodes; }

ts_error* ts_graph_destroy(ts_graph* graph) {
  return ts::guard(__func__, [&] {
    if (graph == nullptr) return;
    ts::enter_thread();
    if (graph->capture != nullptr) graph->require_thread();
    if (graph->exec != nullptr) graph->keep_for_replays();
    const std::unique_ptr<ts_graph> owned(graph);
  });
}
