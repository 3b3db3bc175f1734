#include "cuda/nvtx.h"

#include <c10/util/ApproximateClock.h>
#include <nvtx3/nvToolsExt.h>

#include <atomic>
#include <map>
#include <mutex>
#include <utility>

#include "base/error.h"
#include "torchstream.h"

namespace ts {
namespace {

// Bits of `listeners`.
constexpr int32_t kTool = 1;
constexpr int32_t kLog = 2;

// NVTX looks for a tool once a process, in the environment in which the process was started.
int32_t attached_tool() noexcept {
  nvtxInitialize(nullptr);
  return NVTX_VERSIONED_IDENTIFIER(nvtxGlobals).nvtxRangeStartEx_impl_fnptr != nullptr ? kTool : 0;
}

std::atomic<int32_t>& listeners() noexcept {
  static std::atomic<int32_t> bits{attached_tool()};
  return bits;
}
static_assert(std::atomic<int32_t>::is_always_lock_free &&
              sizeof(std::atomic<int32_t>) == sizeof(int32_t));

nvtxEventAttributes_t attributes(const char* name) noexcept {
  nvtxEventAttributes_t result{};
  result.version = NVTX_VERSION;
  result.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  result.messageType = NVTX_MESSAGE_TYPE_ASCII;
  result.message.ascii = name;
  return result;
}

struct Open {
  LoggedRange range;
  nvtxRangeId_t tool;
  uint64_t log;  // the log that was on when it started; 0: none
};

// The open ranges, and the log. One lock guards both; it is taken only while there are listeners.
class Ranges {
 public:
  uint64_t start(const char* name, int32_t bits) {
    Open open{{name, c10::getTime(), 0, ts_thread_id(), 0}, 0, 0};
    if ((bits & kTool) != 0) {
      const auto event = attributes(name);
      open.tool = nvtxRangeStartEx(&event);
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    if (logging_) open.log = logs_;
    open_.emplace(++last_, std::move(open));
    return last_;
  }

  void end(uint64_t id) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = open_.find(id);
    require(found != open_.end(), "the range ended already, or was never started");
    Open open = std::move(found->second);
    open_.erase(found);
    if (open.tool != 0) nvtxRangeEnd(open.tool);
    if (!logging_ || open.log != logs_) return;
    open.range.end_ns = c10::getTime();
    open.range.end_thread = ts_thread_id();
    log_.push_back(std::move(open.range));
  }

  void mark(const char* name, int32_t bits) {
    if ((bits & kTool) != 0) {
      const auto event = attributes(name);
      nvtxMarkEx(&event);
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!logging_) return;
    const int64_t now = c10::getTime();
    const int64_t thread = ts_thread_id();
    log_.push_back({name, now, now, thread, thread});
  }

  void start_log() {
    const std::lock_guard<std::mutex> lock(mutex_);
    log_.clear();
    ++logs_;
    logging_ = true;
    listeners().fetch_or(kLog);
  }

  std::vector<LoggedRange> stop_log() {
    const std::lock_guard<std::mutex> lock(mutex_);
    listeners().fetch_and(~kLog);
    logging_ = false;
    return std::exchange(log_, {});
  }

 private:
  std::mutex mutex_;
  std::map<uint64_t, Open> open_;
  uint64_t last_ = 0;
  bool logging_ = false;
  uint64_t logs_ = 0;
  std::vector<LoggedRange> log_;
};

Ranges& ranges() {
  static auto* all = new Ranges;  // never destroyed: threads may outlive main
  return *all;
}

}  // namespace

void start_range_log() { ranges().start_log(); }

std::vector<LoggedRange> stop_range_log() { return ranges().stop_log(); }

}  // namespace ts

const int32_t* ts_range_listeners(void) {
  return reinterpret_cast<const int32_t*>(&ts::listeners());
}

ts_error* ts_range_start(const char* name, uint64_t* range) {
  return ts::guard(__func__, [&] {
    ts::require(name != nullptr, "name is NULL");
    ts::require(range != nullptr, "range is NULL");
    const int32_t bits = ts::listeners().load(std::memory_order_relaxed);
    *range = bits == 0 ? 0 : ts::ranges().start(name, bits);
  });
}

ts_error* ts_range_end(uint64_t range) {
  return ts::guard(__func__, [&] {
    if (range != 0) ts::ranges().end(range);
  });
}

ts_error* ts_range_mark(const char* name) {
  return ts::guard(__func__, [&] {
    ts::require(name != nullptr, "name is NULL");
    const int32_t bits = ts::listeners().load(std::memory_order_relaxed);
    if (bits != 0) ts::ranges().mark(name, bits);
  });
}
