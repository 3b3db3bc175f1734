// Recordings made with LibTorch's profiler: its observers report operators, Kineto and CUPTI report
// the GPU's work and CUDA calls.
#include "cuda/trace.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <kineto/libkineto.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/thread.h"
#include "base/thread_id.h"
#include "cuda/device.h"
#include "cuda/nvtx.h"
#include "cuda/stream.h"
#include "cuda/toolkit.h"
#include "torchstream.h"

namespace profiler = torch::autograd::profiler;
namespace impl = torch::profiler::impl;

struct ts_trace {
  std::vector<ts_trace_event> events;
  std::vector<ts_trace_launch> launches;  // of the events that are kernels
  std::vector<std::string> texts;
  std::vector<const char*> names;
};

namespace ts {
namespace {

// There is one recording at a time, since CUPTI and LibTorch's global observers are shared by the
// process.
struct Recorder {
  std::mutex mutex;  // serialises start and stop
  bool running = false;
};

Recorder& recorder() {
  static auto* instance = new Recorder;  // never destroyed: threads may outlive main
  return *instance;
}

std::optional<int32_t> kind_of(uint8_t activity) {
  using libkineto::ActivityType;
  switch (static_cast<ActivityType>(activity)) {
    case ActivityType::CPU_OP:
      return TS_TRACE_KIND_OPERATOR;
    case ActivityType::USER_ANNOTATION:
      return TS_TRACE_KIND_RANGE;
    case ActivityType::GPU_MEMCPY:
      return TS_TRACE_KIND_MEMCPY;
    case ActivityType::GPU_MEMSET:
      return TS_TRACE_KIND_MEMSET;
    case ActivityType::CONCURRENT_KERNEL:
      return TS_TRACE_KIND_KERNEL;
    case ActivityType::CUDA_RUNTIME:
    case ActivityType::CUDA_DRIVER:
      return TS_TRACE_KIND_RUNTIME;
    default:
      return std::nullopt;
  }
}

// Whether an event belongs to the node around a pass's nodes: its evaluation or its run.
bool is_whole_pass(const std::string& name) {
  constexpr size_t length = sizeof(kPassNode) - 1;
  return name.size() >= length && name.compare(name.size() - length, length, kPassNode) == 0;
}

bool on_device(int32_t kind) {
  return kind == TS_TRACE_KIND_KERNEL || kind == TS_TRACE_KIND_MEMCPY ||
         kind == TS_TRACE_KIND_MEMSET;
}

// Finds a key in Kineto's text about an event, for example `"bytes": 67108864, "grid": [256, 1,
// 1]`, and returns the numbers after it, at most three of a list. A missing number is -1.
std::array<int64_t, 3> numbers_in(const std::string& metadata, const char* key) {
  std::array<int64_t, 3> numbers = {-1, -1, -1};
  const std::string quoted = std::string("\"") + key + "\":";
  const size_t found = metadata.find(quoted);
  if (found == std::string::npos) return numbers;
  const char* at = metadata.c_str() + found + quoted.size();
  at += std::strspn(at, " [");
  for (int64_t& number : numbers) {
    char* end = nullptr;
    const int64_t value = std::strtoll(at, &end, 10);
    if (end == at) break;
    number = value;
    at = end + std::strspn(end, " ");
    if (*at++ != ',') break;
  }
  return numbers;
}

int64_t number_in(const std::string& metadata, const char* key) {
  return numbers_in(metadata, key)[0];
}

// Reads launches from Kineto's text, and asks the occupancy calculator once for equal launches.
class Launches {
 public:
  ts_trace_launch operator()(int32_t device, const std::string& metadata) {
    const auto grid = numbers_in(metadata, "grid");
    const auto block = numbers_in(metadata, "block");
    ts_trace_launch launch{};
    launch.blocks = grid[0] * grid[1] * grid[2];
    launch.threads = static_cast<int32_t>(block[0] * block[1] * block[2]);
    launch.registers = static_cast<int32_t>(number_in(metadata, "registers per thread"));
    launch.shared_bytes = static_cast<int32_t>(number_in(metadata, "shared memory"));
    if (launch.blocks <= 0 || launch.threads <= 0 || launch.registers < 0 ||
        launch.shared_bytes < 0) {
      return {};
    }
    const auto [at, added] = known_.emplace(
        std::array<int32_t, 4>{device, launch.threads, launch.registers, launch.shared_bytes}, 0);
    if (added) {
      at->second = occupancy(device, launch.threads, launch.registers, launch.shared_bytes);
    }
    launch.occupancy = at->second;
    return launch;
  }

 private:
  std::map<std::array<int32_t, 4>, double> known_;
};

class Names {
 public:
  explicit Names(std::vector<std::string>& texts) : texts_(texts) {}
  int32_t operator()(std::string name) {
    const auto [at, added] = index_.emplace(std::move(name), static_cast<int32_t>(texts_.size()));
    if (added) texts_.push_back(at->first);
    return at->second;
  }

 private:
  std::vector<std::string>& texts_;
  std::unordered_map<std::string, int32_t> index_;
};

impl::ProfilerConfig config(bool shapes) {
  impl::ExperimentalConfig more;
  more.profile_all_threads = true;           // callers may be on any thread
  more.expose_kineto_event_metadata = true;  // the bytes of copies, the grids of kernels
  return impl::ProfilerConfig(impl::ProfilerState::KINETO, shapes, /*profile_memory=*/false,
                              /*with_stack=*/false, /*with_flops=*/false, /*with_modules=*/false,
                              more);
}

// Creates the profiler at the first call, and keeps its messages off stderr unless they are errors.
void prepare(const impl::ProfilerConfig& config, const std::set<impl::ActivityType>& activities) {
  // LibTorch has registered itself with Kineto on the thread that loaded it, and Kineto requires
  // the profiler to be created on the same thread. Only the last registration counts.
  auto& api = libkineto::api();
  if (!api.isProfilerRegistered() && api.client() != nullptr) api.registerClient(api.client());
  profiler::prepareProfiler(config, activities);
  // Without a GPU Kineto would report that it found none. (Its own call to set the level of
  // messages, in kineto/LoggingAPI.h, is not exported.) With a GPU the level does not change: a
  // message such as a refusal of CUPTI then explains why nothing is recorded.
  if (device_count() > 0 || std::getenv("KINETO_LOG_LEVEL") != nullptr) return;
  constexpr int none = 99;
  auto* level =
      static_cast<std::atomic<int>*>(dlsym(RTLD_DEFAULT, "_ZN9libkineto6Logger14severityLevel_E"));
  if (level != nullptr) level->store(none);
}

}  // namespace

}  // namespace ts

ts_error* ts_trace_get_lane(ts_stream stream, int64_t* lane) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(lane != nullptr, "lane is NULL");
    const auto on = ts::checked_stream(stream);
    const ts::DeviceScope scope(stream.device);
    // CUPTI is in the process, since LibTorch links it; one function does not need its headers.
    // CUPTI knows the default stream, NULL, only together with its context.
    using GetContext = int(void** context);
    using GetStreamId = int(void* context, cudaStream_t stream, uint8_t per_thread, uint32_t* id);
    void* get_context = nullptr;
    cudaDriverEntryPointQueryResult found{};
    C10_CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuCtxGetCurrent", &get_context, 12000,
                                                    cudaEnableDefault, &found));
    auto* get_id = reinterpret_cast<GetStreamId*>(dlsym(RTLD_DEFAULT, "cuptiGetStreamIdEx"));
    if (get_context == nullptr || get_id == nullptr) {
      throw ts::Failure(TS_ERROR_INTERNAL, "the driver or CUPTI lacks a function");
    }
    const c10::cuda::CUDAStreamCaptureModeGuard relaxed{cudaStreamCaptureModeRelaxed};
    C10_CUDA_CHECK(cudaFree(nullptr));  // creates the device's context if there is none yet
    void* context = nullptr;
    uint32_t id = 0;
    const int no_context = reinterpret_cast<GetContext*>(get_context)(&context);
    const int no_id = no_context != 0 ? 0 : get_id(context, on.stream(), 0, &id);
    if (no_context != 0 || no_id != 0) {
      throw ts::Failure(TS_ERROR_CUDA, "the stream has no number: cuCtxGetCurrent " +
                                           std::to_string(no_context) + ", cuptiGetStreamIdEx " +
                                           std::to_string(no_id));
    }
    *lane = id;
  });
}

ts_error* ts_trace_start(int32_t flags) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require((flags & ~(TS_TRACE_FLAG_NO_OPERATORS)) == 0, "unknown trace flag");
    ts::Recorder& all = ts::recorder();
    const std::lock_guard<std::mutex> lock(all.mutex);
    if (all.running) {
      throw ts::Failure(TS_ERROR_INVALID_ARGUMENT,
                        "something is being recorded already: one recording at a time, stop it "
                        "first");
    }
    std::set<impl::ActivityType> activities;
    if (ts::device_count() > 0) {
      ts::ensure_cuda();
      activities.insert(impl::ActivityType::CUDA);
    }
    const bool operators = (flags & TS_TRACE_FLAG_NO_OPERATORS) == 0;
    if (operators || activities.empty()) activities.insert(impl::ActivityType::CPU);
    const auto config = ts::config(/*shapes=*/false);
    ts::prepare(config, activities);
    profiler::enableProfiler(config, activities, {});
    ts::start_range_log();
    all.running = true;
  });
}

ts_error* ts_trace_stop(ts_trace** trace) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(trace != nullptr, "trace is NULL");
    ts::Recorder& all = ts::recorder();
    const std::lock_guard<std::mutex> lock(all.mutex);
    ts::require(all.running, "nothing is being recorded");
    all.running = false;
    const auto ranges = ts::stop_range_log();
    const auto result = profiler::disableProfiler();

    auto stopped = std::make_unique<ts_trace>();
    ts::Names names(stopped->texts);
    ts::Launches launches;
    stopped->events.reserve(result->events().size() + ranges.size());
    for (const auto& from : result->events()) {
      const auto kind = ts::kind_of(from.activityType());
      if (!kind || ts::is_whole_pass(from.name())) continue;
      const bool device = ts::on_device(*kind);
      ts_trace_event event{};
      event.start = static_cast<int64_t>(from.startNs());
      event.duration = static_cast<int64_t>(from.durationNs());
      event.bytes = -1;
      if (*kind == TS_TRACE_KIND_KERNEL) {
        stopped->launches.push_back(launches(from.deviceIndex(), from.metadataJson()));
      } else if (device) {
        event.bytes = ts::number_in(from.metadataJson(), "bytes");
      }
      event.correlation = static_cast<int64_t>(from.correlationId());
      event.lane = from.deviceResourceId();
      if (*kind == TS_TRACE_KIND_RUNTIME) event.lane = ts::thread_id_of(event.lane);
      event.device = device ? from.deviceIndex() : TS_DEVICE_CPU;
      event.kind = *kind;
      event.name = names(from.name());
      stopped->events.push_back(event);
    }
    for (const auto& range : ranges) {
      ts_trace_event event{};
      event.start = range.start_ns;  // the clock that Kineto converts its own times to
      event.duration = range.end_ns - range.start_ns;
      event.bytes = -1;
      event.lane = range.start_thread;
      event.device = TS_DEVICE_CPU;
      event.kind = TS_TRACE_KIND_RANGE;
      event.name = names(range.name);
      stopped->events.push_back(event);
    }
    for (const auto& text : stopped->texts) stopped->names.push_back(text.c_str());
    *trace = stopped.release();
  });
}

const ts_trace_event* ts_trace_events(const ts_trace* trace) {
  return trace == nullptr ? nullptr : trace->events.data();
}
int64_t ts_trace_event_count(const ts_trace* trace) {
  return trace == nullptr ? 0 : static_cast<int64_t>(trace->events.size());
}
const char* const* ts_trace_names(const ts_trace* trace) {
  return trace == nullptr ? nullptr : trace->names.data();
}
int64_t ts_trace_name_count(const ts_trace* trace) {
  return trace == nullptr ? 0 : static_cast<int64_t>(trace->names.size());
}
const ts_trace_launch* ts_trace_launches(const ts_trace* trace) {
  return trace == nullptr ? nullptr : trace->launches.data();
}
int64_t ts_trace_launch_count(const ts_trace* trace) {
  return trace == nullptr ? 0 : static_cast<int64_t>(trace->launches.size());
}
void ts_trace_free(ts_trace* trace) { delete trace; }
