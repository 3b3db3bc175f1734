// Recordings.
#include <algorithm>
#include <cstdio>
#include <iterator>
#include <thread>

#include "support.h"

namespace {

using test::Call;
using test::pool_stream;

// A finished recording.
class Trace {
 public:
  Trace() = default;
  ~Trace() { ts_trace_free(handle_); }
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;
  ts_trace** out() { return &handle_; }

  std::vector<ts_trace_event> of(int32_t kind) const {
    const ts_trace_event* events = ts_trace_events(handle_);
    std::vector<ts_trace_event> found;
    std::copy_if(events, events + ts_trace_event_count(handle_), std::back_inserter(found),
                 [&](const auto& event) { return event.kind == kind; });
    return found;
  }
  std::vector<ts_trace_launch> launches() const {
    const ts_trace_launch* all = ts_trace_launches(handle_);
    return {all, all + ts_trace_launch_count(handle_)};
  }
  std::vector<ts_trace_event> named(const std::string& name, int32_t kind) const {
    auto found = of(kind);
    found.erase(std::remove_if(
                    found.begin(), found.end(),
                    [&](const auto& event) { return ts_trace_names(handle_)[event.name] != name; }),
                found.end());
    return found;
  }

 private:
  ts_trace* handle_ = nullptr;
};

void add() {
  const auto x = test::full({4}, 1);
  Call("aten::add", "Tensor").tensor(x).tensor(x).one();
}

TEST(Trace, RecordsOperatorsOfAllThreads) {
  add();
  ASSERT_OK(ts_trace_start(0));
  add();
  std::thread(add).join();
  Trace trace;
  // The recording stops on another thread than it started on.
  std::thread([&] { ASSERT_OK(ts_trace_stop(trace.out())); }).join();
  add();
  const auto adds = trace.named("aten::add", TS_TRACE_KIND_OPERATOR);
  ASSERT_EQ(adds.size(), 2U);
  EXPECT_NE(adds[0].lane, adds[1].lane);
  for (const auto& event : adds) {
    EXPECT_EQ(event.device, TS_DEVICE_CPU);
    EXPECT_GT(event.duration, 0);
    EXPECT_EQ(event.bytes, -1);
  }
}

TEST(Trace, OneRecordingAtATime) {
  Trace none;
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "nothing is being recorded", ts_trace_stop(none.out()));
  ASSERT_OK(ts_trace_start(0));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "one recording at a time", ts_trace_start(0));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "is NULL", ts_trace_stop(nullptr));
  add();
  Trace trace;
  ASSERT_OK(ts_trace_stop(trace.out()));
  EXPECT_EQ(trace.named("aten::add", TS_TRACE_KIND_OPERATOR).size(), 1U);
  EXPECT_EQ(trace.launches().size(), trace.of(TS_TRACE_KIND_KERNEL).size());
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "unknown trace flag", ts_trace_start(1024));
  // A second recording starts after the first.
  ASSERT_OK(ts_trace_start(0));
  Trace second;
  ASSERT_OK(ts_trace_stop(second.out()));
  EXPECT_EQ(second.named("aten::add", TS_TRACE_KIND_OPERATOR).size(), 0U);
}

TEST(Trace, NoLaneWithoutAStream) {
  int64_t lane = -9;
  EXPECT_FAILS(TS_ERROR_NO_DEVICE, "device", ts_trace_get_lane({0, ts_device_count()}, &lane));
  EXPECT_EQ(lane, -9);
}

TEST(Trace, RangesEndOnAnyThread) {
  ASSERT_OK(ts_trace_start(TS_TRACE_FLAG_NO_OPERATORS));
  uint64_t range = 0;
  uint64_t open = 0;
  ASSERT_OK(ts_range_start("step", &range));
  ASSERT_OK(ts_range_start("open", &open));
  std::thread([&] { EXPECT_OK(ts_range_end(range)); }).join();
  Trace trace;
  ASSERT_OK(ts_trace_stop(trace.out()));
  EXPECT_OK(ts_range_end(open));
  const auto steps = trace.named("step", TS_TRACE_KIND_RANGE);
  ASSERT_EQ(steps.size(), 1U);
  EXPECT_EQ(steps[0].lane, ts_thread_id());
  EXPECT_GT(steps[0].duration, 0);
  EXPECT_EQ(trace.named("open", TS_TRACE_KIND_RANGE).size(), 0U) << "the range had not ended";
}

// A copy and a kernel, each on its own stream, enqueued by another thread than the one that starts
// and stops the recording.
TEST(TraceGpu, RecordsDeviceWorkWithItsCalls) {
  NEEDS_GPUS(1);
  const ts_stream copying = pool_stream();
  const ts_stream computing = pool_stream();
  constexpr int64_t bytes = 8 << 20;
  const test::Pinned pinned(bytes);
  const auto host = pinned.tensor({bytes / 4});
  const auto device = test::empty({bytes / 4}, TS_DTYPE_FLOAT32, 0);
  const auto other = test::full({1024, 1024}, 1, 0);
  const auto work = [&] {
    ts_tensor* to = device;
    ts_tensor* from = host;
    EXPECT_OK(ts_tensor_copy_batch(copying, nullptr, &to, &from, 1, nullptr));
    ts_stream_guard guard{};
    EXPECT_OK(ts_stream_guard_enter(computing, &guard));
    Call("aten::mm").tensor(other).tensor(other).one();
    EXPECT_OK(ts_stream_guard_exit(guard));
  };
  work();  // loads the kernels
  EXPECT_OK(ts_device_synchronize(0));
  const auto start = std::chrono::steady_clock::now();
  ASSERT_OK(ts_trace_start(0));
  const auto started = std::chrono::steady_clock::now();
  std::thread(work).join();
  EXPECT_OK(ts_device_synchronize(0));
  Trace trace;
  const auto stop = std::chrono::steady_clock::now();
  ASSERT_OK(ts_trace_stop(trace.out()));
  const auto stopped = std::chrono::steady_clock::now();
  const auto in_ms = [](auto d) { return std::chrono::duration<double, std::milli>(d).count(); };
  std::printf("start %.1f ms, stop %.1f ms\n", in_ms(started - start), in_ms(stopped - stop));

  int64_t copy_lane = 0;
  int64_t compute_lane = 0;
  int64_t default_lane = 0;
  ASSERT_OK(ts_trace_get_lane(copying, &copy_lane));
  ASSERT_OK(ts_trace_get_lane(computing, &compute_lane));
  ASSERT_OK(ts_trace_get_lane({0, 0}, &default_lane));
  EXPECT_EQ(default_lane, 7);
  EXPECT_NE(copy_lane, compute_lane);

  const auto copies = trace.named("Memcpy HtoD (Pinned -> Device)", TS_TRACE_KIND_MEMCPY);
  ASSERT_EQ(copies.size(), 1U);
  EXPECT_EQ(copies[0].bytes, bytes);
  EXPECT_EQ(copies[0].device, 0);
  EXPECT_EQ(copies[0].lane, copy_lane);
  EXPECT_GT(copies[0].duration, 0);
  const auto calls = trace.named("cudaMemcpyAsync", TS_TRACE_KIND_RUNTIME);
  ASSERT_EQ(calls.size(), 1U);
  EXPECT_EQ(calls[0].correlation, copies[0].correlation);
  EXPECT_LT(calls[0].start, copies[0].start) << "one clock for the host and the device";
  const auto operators = trace.named("aten::mm", TS_TRACE_KIND_OPERATOR);
  ASSERT_EQ(operators.size(), 1U);
  EXPECT_EQ(operators[0].lane, calls[0].lane) << "calls and operators name threads alike";
  const auto kernels = trace.of(TS_TRACE_KIND_KERNEL);
  ASSERT_GE(kernels.size(), 1U);
  for (const auto& kernel : kernels) {
    EXPECT_EQ(kernel.lane, compute_lane);
    EXPECT_LT(operators[0].start, kernel.start);
  }
  const auto launches = trace.launches();
  ASSERT_EQ(launches.size(), kernels.size());
  for (const auto& launch : launches) {
    EXPECT_GE(launch.blocks, 1);
    EXPECT_GE(launch.threads, 32);
    EXPECT_GE(launch.registers, 8);
    EXPECT_GE(launch.shared_bytes, 0);
    EXPECT_GT(launch.occupancy, 0);
    EXPECT_LE(launch.occupancy, 1);
  }
}

// A thread that runs no operator is named by the kernel's thread id too, even if it reuses the
// pthread_t of a thread that ended.
TEST(TraceGpu, CallsNameTheirThreads) {
  NEEDS_GPUS(1);
  const ts_stream stream = pool_stream();
  constexpr int64_t bytes = 1 << 20;
  const test::Pinned pinned(bytes);
  const auto host = pinned.tensor({bytes / 4});
  const auto device = test::empty({bytes / 4}, TS_DTYPE_FLOAT32, 0);
  EXPECT_OK(ts_device_synchronize(0));
  ASSERT_OK(ts_trace_start(0));
  std::thread(add).join();
  int64_t thread = 0;
  std::thread([&] {
    ts_tensor* to = device;
    ts_tensor* from = host;
    EXPECT_OK(ts_tensor_copy_batch(stream, nullptr, &to, &from, 1, nullptr));
    thread = ts_thread_id();
  }).join();
  EXPECT_OK(ts_device_synchronize(0));
  Trace trace;
  ASSERT_OK(ts_trace_stop(trace.out()));
  const auto calls = trace.named("cudaMemcpyAsync", TS_TRACE_KIND_RUNTIME);
  ASSERT_EQ(calls.size(), 1U);
  EXPECT_EQ(calls[0].lane, thread);
}

}  // namespace
