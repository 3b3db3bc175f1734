// Graphs: refused calls, lifetimes and memory. Go tests cover captures and replays as well.
#include <optional>
#include <thread>

#include "support.h"

namespace {

TEST(Graph, BeginOnAnAbsentDeviceReturnsNoDevice) {
  ts_graph* graph = nullptr;
  EXPECT_FAILS(TS_ERROR_NO_DEVICE, "device",
               ts_graph_begin({0, ts_device_count()}, nullptr, &graph));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "is NULL", ts_graph_begin({0, 0}, nullptr, nullptr));
  EXPECT_EQ(graph, nullptr);
}

TEST(Graph, NullGraphsAreRefused) {
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "not being captured", ts_graph_end(nullptr));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "not captured", ts_graph_replay(nullptr, {0, 0}));
  EXPECT_EQ(ts_graph_node_count(nullptr), 0);
  EXPECT_OK(ts_graph_destroy(nullptr));
}

TEST(Graph, WaitReturnsAtOnceWithoutACapture) {
  EXPECT_OK(ts_capture_wait());
  bool here = true;
  EXPECT_OK(ts_capture_is_active(&here));
  EXPECT_FALSE(here);
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "NULL", ts_capture_is_active(nullptr));
}

TEST(GraphGpu, OnlyTheCurrentStreamOfTheThreadIsCaptured) {
  NEEDS_GPUS(1);
  ts_graph* graph = nullptr;
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "default stream",
               ts_graph_begin({0, 0}, nullptr, &graph));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "must be current",
               ts_graph_begin(test::pool_stream(), nullptr, &graph));
  EXPECT_EQ(graph, nullptr);
}

TEST(GraphGpu, CapturesOnceAndReplaysOften) {
  NEEDS_GPUS(1);
  test::Tensor x = test::empty({4}, TS_DTYPE_FLOAT32, 0);
  test::Tensor one = test::empty({4}, TS_DTYPE_FLOAT32, 0);
  ASSERT_OK(test::Call("aten::fill_", "Scalar").tensor(x).integer(0).drop());
  ASSERT_OK(test::Call("aten::fill_", "Scalar").tensor(one).integer(1).drop());
  ASSERT_OK(ts_device_synchronize(0));
  const ts_stream stream = test::pool_stream();
  ts_stream_guard guard{};
  ASSERT_OK(ts_stream_guard_enter(stream, &guard));
  ts_graph* graph = nullptr;
  ASSERT_OK(ts_graph_begin(stream, nullptr, &graph));
  EXPECT_OK(test::Call("aten::add_", "Tensor").tensor(x).tensor(one).drop());
  EXPECT_FAILS(TS_ERROR_CAPTURE, "aten::nonzero", test::Call("aten::nonzero").tensor(x).drop());
  EXPECT_FAILS(TS_ERROR_CAPTURE, "waiting for a stream", ts_stream_synchronize(stream));
  EXPECT_OK(ts_graph_end(graph));
  ASSERT_OK(ts_stream_guard_exit(guard));
  EXPECT_EQ(ts_graph_node_count(graph), 1);
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "not being captured", ts_graph_end(graph));
  for (int i = 0; i < 3; ++i) EXPECT_OK(ts_graph_replay(graph, stream));
  EXPECT_OK(ts_graph_destroy(graph));
  ASSERT_OK(ts_stream_synchronize(stream));
  EXPECT_EQ(test::read<float>(x), (std::vector<float>{3, 3, 3, 3}));
}

// Captures a stream on the calling thread, and makes the stream current meanwhile.
class Capture {
 public:
  Capture() : stream(test::pool_stream()) {
    EXPECT_OK(ts_stream_guard_enter(stream, &guard_));
    EXPECT_OK(ts_graph_begin(stream, nullptr, &graph));
  }
  ~Capture() { free(); }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

  void end() {
    EXPECT_OK(ts_graph_end(graph));
    leave();
  }
  void free() {
    EXPECT_OK(ts_graph_destroy(std::exchange(graph, nullptr)));
    leave();
  }

  const ts_stream stream;
  ts_graph* graph = nullptr;

 private:
  void leave() {
    if (std::exchange(left_, true)) return;
    EXPECT_OK(ts_stream_guard_exit(guard_));
  }
  ts_stream_guard guard_{};
  bool left_ = false;
};

test::Tensor zeros(int64_t elements = 4) {
  test::Tensor x = test::empty({elements}, TS_DTYPE_FLOAT32, 0);
  EXPECT_OK(test::Call("aten::zero_").tensor(x).drop());
  return x;
}

ts_error* add_one(ts_tensor* x) {
  return test::Call("aten::add_", "Scalar").tensor(x).integer(1).drop();
}

uintptr_t address(ts_tensor* x) {
  uintptr_t data = 0;
  EXPECT_OK(ts_tensor_get_address(x, &data));
  return data;
}

// Reports whether the allocator reuses the memory of a small tensor on the default stream.
bool handed_out(uintptr_t data) {
  std::vector<test::Tensor> others;
  for (int i = 0; i < 64; ++i) {
    others.push_back(test::empty({4}, TS_DTYPE_FLOAT32, 0));
    if (address(others.back()) == data) return true;
  }
  return false;
}

TEST(GraphGpu, AnUnfinishedCaptureEndsOnItsThread) {
  NEEDS_GPUS(1);
  test::Tensor x = zeros();
  EXPECT_OK(add_one(x));
  ASSERT_OK(ts_device_synchronize(0));
  Capture capture;
  EXPECT_OK(add_one(x));
  bool here = false;
  EXPECT_OK(ts_capture_is_active(&here));
  EXPECT_TRUE(here);
  std::thread([&] {
    EXPECT_OK(ts_capture_is_active(&here));
    EXPECT_FALSE(here);
    EXPECT_FAILS(TS_ERROR_WRONG_THREAD, "another OS thread", ts_graph_destroy(capture.graph));
    EXPECT_FAILS(TS_ERROR_WRONG_THREAD, "another OS thread", ts_graph_end(capture.graph));
  }).join();
  EXPECT_OK(add_one(x));
  capture.free();
  Capture next;
  EXPECT_OK(add_one(x));
  next.end();
  EXPECT_EQ(ts_graph_node_count(next.graph), 1);
}

TEST(GraphGpu, ACaptureIsRefusedInsideAMemoryPool) {
  NEEDS_GPUS(1);
  ts_memory_pool* pool = nullptr;
  ASSERT_OK(ts_memory_pool_new(0, &pool));
  const ts_stream stream = test::pool_stream();
  ts_stream_guard guard{};
  ASSERT_OK(ts_stream_guard_enter(stream, &guard));
  ASSERT_OK(ts_memory_pool_enter(pool));
  ts_graph* graph = nullptr;
  EXPECT_FAILS(TS_ERROR_CAPTURE, "inside a memory pool", ts_graph_begin(stream, nullptr, &graph));
  EXPECT_FAILS(TS_ERROR_BUSY, "inside a memory pool", ts_allocator_empty_cache());
  ASSERT_OK(ts_memory_pool_exit(pool));
  EXPECT_OK(ts_allocator_empty_cache());
  ASSERT_OK(ts_stream_guard_exit(guard));

  test::Tensor x = zeros();
  Capture capture;
  EXPECT_FAILS(TS_ERROR_CAPTURE, "entering a memory pool", ts_memory_pool_enter(pool));
  EXPECT_OK(add_one(x));
  capture.end();
  EXPECT_OK(ts_memory_pool_destroy(pool));
}

// A pool may be destroyed at any time. Its memory returns to the driver at the next opportunity.
TEST(GraphGpu, MemoryPoolsEndBesideCapturesAndEachOther) {
  NEEDS_GPUS(1);
  constexpr int64_t kElements = 64 << 20;  // more than captures leave in the cache (cuBLAS)
  const auto filled = [] {
    ts_memory_pool* pool = nullptr;
    EXPECT_OK(ts_memory_pool_new(0, &pool));
    EXPECT_OK(ts_memory_pool_enter(pool));
    zeros(kElements);
    EXPECT_OK(ts_memory_pool_exit(pool));
    return pool;
  };
  const auto reserved = [] {
    ts_device_memory stats = {};
    stats.size = sizeof stats;
    EXPECT_OK(ts_device_get_memory(0, &stats));
    return stats.reserved_bytes;
  };
  test::Tensor x = zeros();
  ASSERT_OK(ts_allocator_empty_cache());
  const int64_t before = reserved();
  ts_memory_pool* in_capture = filled();
  ts_memory_pool* beside_capture = filled();
  ts_memory_pool* beside_pool = filled();
  ts_memory_pool* other = filled();
  EXPECT_GE(reserved(), before + 4 * 4 * kElements);
  {
    Capture capture;
    EXPECT_OK(add_one(x));
    EXPECT_OK(ts_memory_pool_destroy(in_capture));
    std::thread([&] { EXPECT_OK(ts_memory_pool_destroy(beside_capture)); }).join();
    EXPECT_OK(add_one(x));
    capture.end();
    EXPECT_EQ(ts_graph_node_count(capture.graph), 2);
  }
  ASSERT_OK(ts_memory_pool_enter(other));
  std::thread([&] {
    EXPECT_OK(ts_memory_pool_destroy(beside_pool));
    EXPECT_FAILS(TS_ERROR_BUSY, "inside a memory pool", ts_allocator_empty_cache());
    Capture capture;  // possible during another thread's pool
    EXPECT_OK(add_one(x));
    capture.end();
  }).join();
  ASSERT_OK(ts_memory_pool_exit(other));
  EXPECT_OK(ts_memory_pool_destroy(other));
  EXPECT_LT(reserved(), before + 4 * kElements);
}

TEST(GraphGpu, WhatBreaksACaptureIsRefused) {
  NEEDS_GPUS(1);
  test::Tensor x = zeros();
  alignas(4096) static uint8_t memory[1 << 16];
  const test::Event start(TS_EVENT_FLAG_TIMING);
  const test::Event end(TS_EVENT_FLAG_TIMING);
  const test::Event shared(TS_EVENT_FLAG_INTERPROCESS);
  const test::Event captured;
  const ts_stream outside = test::pool_stream();
  ASSERT_OK(ts_event_record(start, outside));
  ASSERT_OK(ts_event_record(end, outside));
  ASSERT_OK(ts_event_record(captured, outside));
  ts_pinned* pinned = nullptr;
  ASSERT_OK(ts_pinned_new(4096, &pinned));
  ts_pinned* registered = nullptr;
  ASSERT_OK(ts_pinned_register(memory + (1 << 15), 1 << 15, &registered));
  ASSERT_OK(ts_device_synchronize(0));
  Capture capture;
  EXPECT_OK(add_one(x));
  ts_pinned* none = nullptr;
  int64_t elapsed = 0;
  uint8_t handle[TS_EVENT_HANDLE_BYTES];
  EXPECT_FAILS(TS_ERROR_CAPTURE, "pinning", ts_pinned_register(memory, 1 << 15, &none));
  EXPECT_FAILS(TS_ERROR_CAPTURE, "time between", ts_event_get_elapsed(start, end, &elapsed));
  EXPECT_FAILS(TS_ERROR_CAPTURE, "exporting", ts_event_export(shared, 0, handle));
  EXPECT_FAILS(TS_ERROR_CAPTURE, "not: fork", ts_wait_cuda_stream(capture.stream, outside));
  EXPECT_FAILS(TS_ERROR_CAPTURE, "not: fork", ts_stream_join(capture.stream, &outside, 1));
  EXPECT_FAILS(TS_ERROR_CAPTURE, "not: fork", ts_stream_fork(outside, &capture.stream, 1));
  EXPECT_FAILS(TS_ERROR_CAPTURE, "outside of the capture",
               ts_stream_wait_event(capture.stream, captured));
  EXPECT_FAILS(TS_ERROR_CAPTURE, "outside of the capture",
               ts_tensor_copy_batch(capture.stream, captured, nullptr, nullptr, 0, nullptr));
  EXPECT_OK(ts_pinned_destroy(pinned));
  EXPECT_OK(ts_pinned_destroy(registered));
  EXPECT_OK(ts_event_record(captured, capture.stream));
  std::thread([&] {
    bool done = false;
    EXPECT_FAILS(TS_ERROR_CAPTURE, "captured", ts_event_query(captured, &done));
    EXPECT_FAILS(TS_ERROR_CAPTURE, "captured", ts_event_synchronize(captured));
    EXPECT_OK(ts_event_get_elapsed(start, end, &elapsed));
    EXPECT_OK(ts_event_export(shared, 0, handle));
    ts_pinned* here = nullptr;
    EXPECT_OK(ts_pinned_register(memory, 1 << 15, &here));
    EXPECT_OK(ts_pinned_destroy(here));
  }).join();
  EXPECT_OK(add_one(x));
  capture.end();
  bool done = false;
  EXPECT_FAILS(TS_ERROR_CAPTURE, "captured", ts_event_query(captured, &done));
  EXPECT_FAILS(TS_ERROR_CAPTURE, "captured", ts_stream_wait_event(outside, captured));
  {
    Capture another;
    EXPECT_OK(add_one(x));
    EXPECT_FAILS(TS_ERROR_CAPTURE, "captured", ts_stream_wait_event(outside, captured));
    EXPECT_FAILS(TS_ERROR_CAPTURE, "captured", ts_stream_wait_event(another.stream, captured));
    another.end();
  }
  EXPECT_OK(ts_event_record(captured, outside));
  EXPECT_OK(ts_stream_wait_event(capture.stream, captured));
  EXPECT_OK(ts_event_synchronize(captured));
  EXPECT_OK(ts_graph_replay(capture.graph, outside));
  ASSERT_OK(ts_stream_synchronize(outside));
  EXPECT_EQ(test::read<float>(x), (std::vector<float>{2, 2, 2, 2}));
}

// A capture that holds a tensor without memory can give it memory, and free it. The tensor may have
// other memory between replays.
TEST(GraphGpu, AHeldStorageIsGivenMemoryWithinACapture) {
  NEEDS_GPUS(1);
  test::Tensor kept = zeros();
  test::Tensor passing = zeros();
  test::Tensor out = zeros();
  ASSERT_OK(ts_device_synchronize(0));
  ASSERT_OK(ts_tensor_resize_storage(passing, 0));
  Capture capture;
  // The capture holds the tensor.
  const test::Tensor view = test::Call("aten::view").tensor(passing).ints({2, 2}).one();
  for (int i = 0; i < 2; ++i) {
    EXPECT_OK(ts_tensor_resize_storage(passing, 16));
    EXPECT_OK(ts_tensor_copy(passing, kept, true));
    EXPECT_OK(test::Call("aten::add_", "Tensor").tensor(out).tensor(passing).drop());
    EXPECT_OK(ts_tensor_resize_storage(passing, 0));
    EXPECT_EQ(address(passing), 0U);
  }
  EXPECT_OK(add_one(kept));
  capture.end();
  for (int i = 0; i < 3; ++i) {
    EXPECT_OK(ts_graph_replay(capture.graph, {0, 0}));
    EXPECT_OK(ts_tensor_resize_storage(passing, i == 1 ? 0 : 16));
  }
  EXPECT_EQ(test::read<float>(out), (std::vector<float>{6, 6, 6, 6}));
}

// Memory that a tensor has only within a capture belongs to the graph, in each replay.
TEST(GraphGpu, AStorageHasMemoryWithinACapture) {
  NEEDS_GPUS(1);
  test::Tensor kept = zeros();
  test::Tensor passing = zeros();
  test::Tensor out = zeros();
  ASSERT_OK(ts_device_synchronize(0));
  ASSERT_OK(ts_tensor_resize_storage(passing, 0));
  Capture capture;
  EXPECT_FAILS(TS_ERROR_CAPTURE, "from before", ts_tensor_resize_storage(kept, 0));
  for (int i = 0; i < 2; ++i) {
    EXPECT_OK(ts_tensor_resize_storage(passing, 16));
    EXPECT_OK(ts_tensor_copy(passing, kept, true));
    EXPECT_OK(test::Call("aten::add_", "Tensor").tensor(out).tensor(passing).drop());
    EXPECT_OK(ts_tensor_resize_storage(passing, 0));
    EXPECT_EQ(address(passing), 0U);
  }
  EXPECT_OK(add_one(kept));
  capture.end();
  for (int i = 0; i < 3; ++i) EXPECT_OK(ts_graph_replay(capture.graph, {0, 0}));
  EXPECT_EQ(test::read<float>(out), (std::vector<float>{6, 6, 6, 6}));
  ASSERT_OK(ts_tensor_resize_storage(passing, 16));
  ASSERT_OK(ts_tensor_copy(passing, out, true));
  EXPECT_EQ(test::read<float>(passing), (std::vector<float>{6, 6, 6, 6}));
}

// A captured copy between two streams keeps its tensors, as operators do.
TEST(GraphGpu, ACapturedPeerCopyKeepsItsTensors) {
  NEEDS_GPUS(1);
  test::Tensor src = test::full({4}, 7, 0);
  test::Tensor dst = zeros();
  test::Tensor out = zeros();
  const uintptr_t from = address(src);
  const uintptr_t to = address(dst);
  ASSERT_OK(ts_device_synchronize(0));
  const ts_stream side = test::pool_stream();
  Capture capture;
  ts_tensor* dsts[] = {dst};
  ts_tensor* srcs[] = {src};
  EXPECT_FAILS(TS_ERROR_CAPTURE, "not: fork",
               ts_tensor_copy_peer(side, dsts, capture.stream, srcs, 1));
  EXPECT_OK(ts_tensor_copy_peer(capture.stream, dsts, side, srcs, 1));
  EXPECT_OK(ts_tensor_copy(out, dst, true));
  capture.end();
  src.free();
  dst.free();
  EXPECT_FALSE(handed_out(from));
  EXPECT_FALSE(handed_out(to));
  EXPECT_OK(ts_graph_replay(capture.graph, {0, 0}));
  EXPECT_EQ(test::read<float>(out), (std::vector<float>{7, 7, 7, 7}));
}

TEST(GraphGpu, ACapturedCopyKeepsItsTensors) {
  NEEDS_GPUS(1);
  for (const bool peer : {false, true}) {
    test::Tensor src = test::full({4}, 7, 0);
    test::Tensor dst = zeros();
    const uintptr_t from = address(src);
    const uintptr_t to = address(dst);
    ASSERT_OK(ts_device_synchronize(0));
    Capture capture;
    ts_tensor* dsts[] = {dst};
    ts_tensor* srcs[] = {src};
    EXPECT_OK(peer ? ts_tensor_copy_peer(capture.stream, dsts, capture.stream, srcs, 1)
                   : ts_tensor_copy(dst, src, true));
    capture.end();
    src.free();
    dst.free();
    EXPECT_FALSE(handed_out(from)) << (peer ? "ts_tensor_copy_peer" : "ts_tensor_copy");
    EXPECT_FALSE(handed_out(to)) << (peer ? "ts_tensor_copy_peer" : "ts_tensor_copy");
  }
}

// The memory of a graph's operands outlives a graph that is freed while its replay runs, including
// memory shared by several graphs.
TEST(GraphGpu, OperandsOutliveTheGraphForItsReplays) {
  NEEDS_GPUS(1);
  for (const bool beside_a_capture : {false, true}) {
    test::Tensor base = zeros(8);
    test::Tensor first =
        test::Call("aten::narrow").tensor(base).integer(0).integer(0).integer(4).one();
    test::Tensor second =
        test::Call("aten::narrow").tensor(base).integer(0).integer(4).integer(4).one();
    const uintptr_t data = address(base);
    ASSERT_OK(ts_device_synchronize(0));
    Capture capture;
    EXPECT_OK(add_one(base));
    EXPECT_OK(add_one(first));
    EXPECT_OK(add_one(second));
    capture.end();
    const ts_stream stream = test::free_stream();
    EXPECT_OK(ts_graph_replay(capture.graph, stream));
    ASSERT_OK(ts_device_synchronize(0));
    test::Tensor other = zeros();
    ASSERT_OK(ts_allocator_empty_cache());  // so that no memory is freed while the gate is closed
    test::Gate gate(stream);
    EXPECT_OK(ts_graph_replay(capture.graph, stream));
    base.free();
    first.free();
    second.free();
    {
      std::optional<Capture> around;
      if (beside_a_capture) {
        around.emplace();
        EXPECT_OK(add_one(other));
      }
      capture.free();
    }
    EXPECT_FALSE(handed_out(data)) << (beside_a_capture ? "beside a capture" : "alone");
    gate.open();
    ASSERT_OK(ts_stream_synchronize(stream));
  }
}

// LibTorch drops a use that is recorded during a capture; the shim keeps it.
TEST(GraphGpu, AUseRecordedBesideACaptureCounts) {
  NEEDS_GPUS(1);
  test::Tensor x = zeros();
  test::Tensor used = zeros();
  const uintptr_t data = address(used);
  // A first capture loads kernels of its own. Loading a kernel waits for the device, so the gate
  // would open by itself.
  ASSERT_OK(add_one(x));
  {
    Capture first;
    EXPECT_OK(add_one(x));
  }
  ASSERT_OK(ts_allocator_empty_cache());  // so that no memory is freed while the gate is closed
  const ts_stream stream = test::free_stream();
  test::Gate gate(stream);
  {
    Capture capture;
    EXPECT_OK(add_one(x));
    std::thread([&] {
      EXPECT_OK(ts_tensor_record_stream(used, stream));
      used.free();
    }).join();
    capture.free();
    EXPECT_FALSE(handed_out(data));
  }
  gate.open();
  ASSERT_OK(ts_stream_synchronize(stream));
  zeros();  // makes the allocator process completed events
  EXPECT_TRUE(handed_out(data));
}

// A graph would not keep the tensors that it makes on another GPU, so making them is refused.
TEST(GraphGpu, MakesNothingOnAnotherGpu) {
  NEEDS_GPUS(2);
  test::Tensor x = zeros();
  test::Tensor there = test::empty({4}, TS_DTYPE_FLOAT32, 1);
  ASSERT_OK(test::Call("aten::zero_").tensor(there).drop());
  ASSERT_OK(add_one(there));
  ASSERT_OK(ts_device_synchronize(1));
  const ts_stream other = test::pool_stream(1);
  Capture capture;
  EXPECT_OK(add_one(x));
  EXPECT_OK(ts_stream_fork(capture.stream, &other, 1));
  std::thread([&] {
    ts_stream_guard guard{};
    ASSERT_OK(ts_stream_guard_enter(other, &guard));
    EXPECT_OK(add_one(there));
    test::Tensor none;
    int64_t count = 0;
    EXPECT_FAILS(TS_ERROR_CAPTURE, "memory of one GPU",
                 test::Call("aten::neg").tensor(there).run(none.out(), 1, &count));
    EXPECT_OK(ts_stream_guard_exit(guard));
  }).join();
  EXPECT_OK(ts_stream_join(capture.stream, &other, 1));
  EXPECT_FAILS(TS_ERROR_CAPTURE, "memory of one GPU", ts_graph_end(capture.graph));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "not captured", ts_graph_replay(capture.graph, {0, 0}));
}

// CUDA may give a new stream the address of a destroyed one whose work is not done yet. Null
// devices always do so.
TEST(GraphGpu, ReplaysWaitForThoseOfADestroyedStreamAtTheSameAddress) {
  NEEDS_GPUS(1);
  using Waits = unsigned long long();
  auto* waits = reinterpret_cast<Waits*>(dlsym(RTLD_DEFAULT, "null_stream_waits"));
  if (waits == nullptr) GTEST_SKIP() << "needs devices that do nothing";
  using Create = int(void**, unsigned, int);
  using Destroy = int(void*);
  auto* create = test::cuda_function<Create>("cudaStreamCreateWithPriority");
  auto* destroy = test::cuda_function<Destroy>("cudaStreamDestroy");
  const test::Tensor x = zeros();
  Capture capture;
  ASSERT_OK(add_one(x));
  capture.end();
  const auto replay = [&](ts_stream stream) {
    const auto before = waits();
    EXPECT_OK(ts_graph_replay(capture.graph, stream));
    return waits() - before;
  };
  const auto wrapped = [](void* handle) {
    ts_stream stream{};
    EXPECT_OK(ts_stream_from_handle(reinterpret_cast<uintptr_t>(handle), 0, &stream));
    return stream;
  };
  void* first = nullptr;
  ASSERT_EQ(create(&first, 1, 0), 0);
  const ts_stream on_first = wrapped(first);
  EXPECT_EQ(replay(on_first), 0U);
  EXPECT_EQ(replay(on_first), 0U);
  ASSERT_OK(ts_stream_forget(on_first));
  ASSERT_EQ(destroy(first), 0);
  void* second = nullptr;
  ASSERT_EQ(create(&second, 1, 0), 0);
  ASSERT_EQ(second, first);
  EXPECT_EQ(replay(wrapped(second)), 1U);
  EXPECT_EQ(replay(wrapped(second)), 0U);
}

}  // namespace
