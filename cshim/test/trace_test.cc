// Recordings.
#include <algorithm>
#include <thread>

#include "support.h"

namespace {

using test::Call;

// A finished recording.
class Trace {
 public:
  Trace() = default;
  ~Trace() { ts_trace_free(handle_); }
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;
  ts_trace** out() { return &handle_; }

  std::vector<ts_trace_event> named(const std::string& name, int32_t kind) const {
    std::vector<ts_trace_event> found;
    const ts_trace_event* events = ts_trace_events(handle_);
    for (int64_t i = 0; i < ts_trace_event_count(handle_); ++i) {
      if (events[i].kind == kind && ts_trace_names(handle_)[events[i].name] == name) {
        found.push_back(events[i]);
      }
    }
    return found;
  }

 private:
  ts_trace* handle_ = nullptr;
};

void add() {
  const auto x = test::full({4}, 1);
  Call("aten::add", "Tensor").tensor(x).tensor(x).one();
}

TEST(Trace, OperatorsOfAllThreads) {
  add();
  ASSERT_OK(ts_trace_start(0));
  add();
  std::thread(add).join();
  Trace trace;
  // Stopped on another thread than it was started on.
  std::thread([&] { ASSERT_OK(ts_trace_stop(trace.out())); }).join();
  add();
  const auto adds = trace.named("aten::add", TS_TRACE_OPERATOR);
  ASSERT_EQ(adds.size(), 2U);
  EXPECT_NE(adds[0].lane, adds[1].lane);
  for (const auto& event : adds) {
    EXPECT_EQ(event.device, TS_DEVICE_CPU);
    EXPECT_GT(event.duration_ns, 0);
    EXPECT_EQ(event.bytes, -1);
  }
}

TEST(Trace, OneAtATime) {
  Trace none;
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "nothing is being recorded", ts_trace_stop(none.out()));
  ASSERT_OK(ts_trace_start(0));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "one recording at a time", ts_trace_start(0));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "out is NULL", ts_trace_stop(nullptr));
  add();
  Trace trace;
  ASSERT_OK(ts_trace_stop(trace.out()));
  EXPECT_EQ(trace.named("aten::add", TS_TRACE_OPERATOR).size(), 1U);
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "unknown trace flag", ts_trace_start(1024));
  // And again.
  ASSERT_OK(ts_trace_start(0));
  Trace second;
  ASSERT_OK(ts_trace_stop(second.out()));
  EXPECT_EQ(second.named("aten::add", TS_TRACE_OPERATOR).size(), 0U);
}

}  // namespace
