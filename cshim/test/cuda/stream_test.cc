// Streams, the current stream, guards, and waiting.
#include <atomic>
#include <chrono>
#include <set>
#include <thread>

#include "support.h"

namespace {

using test::Call;
using test::current_stream;
using test::pool_stream;
using test::Tensor;

bool is_default(ts_stream stream) { return stream.id == 0; }

TEST(Stream, EveryCallOnAnAbsentDeviceReturnsNoDevice) {
  const int32_t beyond = ts_device_count();
  ts_stream out{-9, -9};
  int32_t number = 0;
  bool done = false;
  uintptr_t handle = 0;
  ts_stream_guard guard{};
  for (const int32_t device : {beyond, beyond + 200, -1, -3, INT32_MIN, INT32_MAX}) {
    SCOPED_TRACE(device);
    const ts_stream stream{0, device};
    EXPECT_FAILS(TS_ERROR_NO_DEVICE, "device", ts_stream_from_pool(device, 0, &out));
    EXPECT_FAILS(TS_ERROR_NO_DEVICE, "device", ts_stream_get_default(device, &out));
    EXPECT_FAILS(TS_ERROR_NO_DEVICE, "device", ts_stream_from_handle(0, device, &out));
    EXPECT_FAILS(TS_ERROR_NO_DEVICE, "device", ts_stream_forget(stream));
    EXPECT_FAILS(TS_ERROR_NO_DEVICE, "device", ts_stream_acquire(device, 0, &out));
    int32_t multiprocessors = -1;
    EXPECT_FAILS(TS_ERROR_NO_DEVICE, "device",
                 ts_stream_acquire_bounded(device, 0, 16, &out, &multiprocessors));
    EXPECT_EQ(multiprocessors, -1);
    EXPECT_FAILS(TS_ERROR_NO_DEVICE, "device", ts_stream_release(stream));
    EXPECT_FAILS(TS_ERROR_NO_DEVICE, "device", ts_stream_is_same(stream, stream, &done));
    EXPECT_FAILS(TS_ERROR_NO_DEVICE, "device", ts_stream_get_handle(stream, &handle));
    EXPECT_FAILS(TS_ERROR_NO_DEVICE, "device", ts_stream_get_priority(stream, &number));
    EXPECT_FAILS(TS_ERROR_NO_DEVICE, "device", ts_stream_query(stream, &done));
    EXPECT_FAILS(TS_ERROR_NO_DEVICE, "device", ts_stream_synchronize(stream));
    EXPECT_FAILS(TS_ERROR_NO_DEVICE, "device", ts_stream_delay(stream, 1));
    EXPECT_FAILS(TS_ERROR_NO_DEVICE, "device", ts_get_current_cuda_stream(device, &out));
    EXPECT_FAILS(TS_ERROR_NO_DEVICE, "device", ts_set_cuda_stream(stream));
    EXPECT_FAILS(TS_ERROR_NO_DEVICE, "device", ts_wait_cuda_stream(stream, stream));
    EXPECT_FAILS(TS_ERROR_NO_DEVICE, "device", ts_stream_guard_enter(stream, &guard));
    EXPECT_FAILS(TS_ERROR_NO_DEVICE, "device",
                 ts_tensor_copy_batch(stream, nullptr, nullptr, nullptr, 0, nullptr));
  }
  EXPECT_EQ(out.id, -9) << "a failed call leaves its outputs";
  EXPECT_EQ(guard.serial, 0U);
}

TEST(Stream, CallsWithoutGpuNameTheCause) {
  if (ts_device_count() > 0) GTEST_SKIP() << "there is a GPU";
  ts_stream out{};
  int32_t least = 0;
  int32_t greatest = 0;
  EXPECT_FAILS(TS_ERROR_NO_DEVICE, "no usable GPU", ts_stream_from_pool(0, 0, &out));
  EXPECT_FAILS(TS_ERROR_NO_DEVICE, "", ts_get_current_cuda_stream(TS_DEVICE_CURRENT, &out));
  EXPECT_FAILS(TS_ERROR_NO_DEVICE, "", ts_stream_get_priority_range(&least, &greatest));
}

TEST(Stream, ExitOfAGuardThatWasNeverEnteredIsAnError) {
  EXPECT_FAILS(TS_ERROR_WRONG_THREAD, "thread", ts_stream_guard_exit({0, 0}));
  EXPECT_FAILS(TS_ERROR_WRONG_THREAD, "thread", ts_stream_guard_exit({UINT64_MAX, 1}));
}

TEST(StreamGpu, ThePoolStartsAgainAfter32) {
  NEEDS_GPUS(1);
  std::vector<ts_stream> streams;
  for (int i = 0; i < 33; ++i) streams.push_back(pool_stream());
  std::set<int64_t> ids;
  std::set<uintptr_t> handles;
  for (const ts_stream stream : streams) {
    ids.insert(stream.id);
    uintptr_t handle = 0;
    EXPECT_OK(ts_stream_get_handle(stream, &handle));
    EXPECT_NE(handle, 0U);
    handles.insert(handle);
  }
  EXPECT_EQ(ids.size(), 32U);
  EXPECT_EQ(handles.size(), 32U);
  EXPECT_EQ(streams[32].id, streams[0].id);
}

TEST(StreamGpu, PoolStreamsHaveTheirPriority) {
  NEEDS_GPUS(1);
  int32_t least = 7;
  int32_t greatest = 7;
  ASSERT_OK(ts_stream_get_priority_range(&least, &greatest));
  EXPECT_EQ(least, 0);
  EXPECT_LE(greatest, -1);
  for (int32_t priority = least; priority >= greatest; --priority) {
    const ts_stream stream = pool_stream(0, priority);
    int32_t got = 7;
    EXPECT_OK(ts_stream_get_priority(stream, &got));
    EXPECT_EQ(got, priority);
    EXPECT_OK(ts_set_cuda_stream(stream));
    EXPECT_TRUE(current_stream() == stream);
  }
  EXPECT_OK(ts_set_cuda_stream({0, 0}));
  ts_stream out{};
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "priority 1", ts_stream_from_pool(0, 1, &out));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "most urgent",
               ts_stream_from_pool(0, greatest - 1, &out));
}

TEST(StreamGpu, SetIsForThisThreadAlone) {
  NEEDS_GPUS(1);
  EXPECT_TRUE(is_default(current_stream()));
  const ts_stream mine = pool_stream();
  ASSERT_OK(ts_set_cuda_stream(mine));
  EXPECT_TRUE(current_stream() == mine);
  EXPECT_TRUE(current_stream(TS_DEVICE_CURRENT) == mine);
  std::thread([] {
    EXPECT_TRUE(is_default(current_stream()));
    EXPECT_OK(ts_set_cuda_stream(pool_stream()));
  }).join();
  EXPECT_TRUE(current_stream() == mine);
  ASSERT_OK(ts_set_cuda_stream({0, 0}));
  EXPECT_TRUE(is_default(current_stream()));
}

TEST(StreamGpu, MadeUpStreamsAreRefused) {
  NEEDS_GPUS(1);
  const ts_stream good = pool_stream();
  const ts_stream before = current_stream();
  const int64_t unknown_type = (31 << 5) | (15 << 1) | 1;
  const int64_t no_type = (1 << 5) | 1;
  const int64_t index_32 = (int64_t{32} << 5) | (1 << 1) | 1;
  for (const int64_t id : {int64_t{1}, int64_t{2}, int64_t{0x1000}, unknown_type, no_type, index_32,
                           int64_t{-1}, INT64_MIN, INT64_MAX, good.id | (int64_t{1} << 40)}) {
    SCOPED_TRACE(id);
    const ts_stream stream{id, 0};
    uintptr_t handle = 0;
    EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "was not made by", ts_set_cuda_stream(stream));
    EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "was not made by",
                 ts_stream_get_handle(stream, &handle));
    EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "was not made by", ts_wait_cuda_stream(stream, good));
    EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "was not made by", ts_wait_cuda_stream(good, stream));
  }
  EXPECT_TRUE(current_stream() == before);
}

TEST(StreamGpu, WrappedHandlesAreStreams) {
  NEEDS_GPUS(1);
  using Create = int(void**, unsigned);
  using Destroy = int(void*);
  void* made = nullptr;
  ASSERT_EQ(test::cuda_function<Create>("cudaStreamCreateWithFlags")(&made, 1), 0);
  const auto handle = reinterpret_cast<uintptr_t>(made);
  // A handle that is not wrapped is not a stream.
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "was not made by",
               ts_set_cuda_stream({static_cast<int64_t>(handle), 0}));
  ts_stream stream{};
  ASSERT_OK(ts_stream_from_handle(handle, 0, &stream));
  uintptr_t back = 0;
  ASSERT_OK(ts_stream_get_handle(stream, &back));
  EXPECT_EQ(back, handle);
  ASSERT_OK(ts_set_cuda_stream(stream));
  EXPECT_TRUE(current_stream() == stream);
  ASSERT_OK(ts_wait_cuda_stream(stream, {0, 0}));
  ASSERT_OK(ts_wait_cuda_stream({0, 0}, stream));
  ASSERT_OK(ts_stream_synchronize(stream));
  EXPECT_TRUE(test::idle(stream));
  ASSERT_OK(ts_set_cuda_stream({0, 0}));
  EXPECT_EQ(test::cuda_function<Destroy>("cudaStreamDestroy")(made), 0);

  ASSERT_OK(ts_stream_from_handle(0, 0, &stream));
  EXPECT_TRUE(is_default(stream));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "cudaStreamLegacy", ts_stream_from_handle(1, 0, &stream));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "cudaStreamPerThread",
               ts_stream_from_handle(2, 0, &stream));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "odd", ts_stream_from_handle(0x1001, 0, &stream));
}

TEST(StreamGpu, AForgottenStreamIsRefused) {
  NEEDS_GPUS(1);
  const ts_stream pool = pool_stream();
  uintptr_t handle = 0;
  ASSERT_OK(ts_stream_get_handle(pool, &handle));
  ts_stream wrapped{};
  bool same = false;
  for (int round = 0; round < 2; ++round) {
    ASSERT_OK(ts_stream_from_handle(handle, 0, &wrapped));
    EXPECT_FALSE(wrapped == pool);
    ASSERT_OK(ts_stream_is_same(wrapped, pool, &same));
    EXPECT_TRUE(same);
    ASSERT_OK(ts_stream_is_same(wrapped, pool_stream(), &same));
    EXPECT_FALSE(same);
    ASSERT_OK(ts_stream_forget(wrapped));
    for (int twice = 0; twice < 2; ++twice) {
      EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "not made", ts_stream_synchronize(wrapped));
      EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "not a wrapped", ts_stream_forget(wrapped));
    }
  }
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "not a wrapped", ts_stream_forget(pool));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "not a wrapped", ts_stream_forget({0, 0}));
}

TEST(StreamGpu, AcquiredStreamsAreExclusive) {
  NEEDS_GPUS(1);
  const size_t many = 100;
  std::set<int64_t> ids;
  std::vector<ts_stream> streams(many);
  for (auto& stream : streams) {
    ASSERT_OK(ts_stream_acquire(0, -1, &stream));
    int32_t priority = 0;
    ASSERT_OK(ts_stream_get_priority(stream, &priority));
    EXPECT_EQ(priority, -1);
    ids.insert(stream.id);
  }
  EXPECT_EQ(ids.size(), many);
  for (const auto stream : streams) {
    ASSERT_OK(ts_wait_cuda_stream(stream, {0, 0}));
    ASSERT_OK(ts_stream_synchronize(stream));
    uintptr_t handle = 0;
    ASSERT_OK(ts_stream_get_handle(stream, &handle));
    EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "not a wrapped", ts_stream_forget(stream));
    ASSERT_OK(ts_stream_release(stream));
    EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "given back", ts_stream_synchronize(stream));
    EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "given back", ts_stream_release(stream));
    ts_stream wrapped{};
    EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "given back",
                 ts_stream_from_handle(handle, 0, &wrapped));
  }
  // Released streams are acquired again, for the same priority only.
  for (size_t i = 0; i < many; ++i) {
    ts_stream stream{};
    ASSERT_OK(ts_stream_acquire(0, -1, &stream));
    EXPECT_EQ(ids.count(stream.id), 1U);
    ASSERT_OK(ts_stream_synchronize(stream));
  }
  ts_stream other{};
  ASSERT_OK(ts_stream_acquire(0, 0, &other));
  EXPECT_EQ(ids.count(other.id), 0U);
  ASSERT_OK(ts_stream_release(other));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "priority 1", ts_stream_acquire(0, 1, &other));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "ts_stream_acquire", ts_stream_release(pool_stream()));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "ts_stream_acquire", ts_stream_release({0, 0}));
}

// Bounded streams are lent like others, and later only for the same bound.
TEST(StreamGpu, BoundedStreams) {
  NEEDS_GPUS(1);
  int32_t all = 0;
  ts_stream bounded{};
  ASSERT_OK(ts_stream_acquire_bounded(0, 0, 17, &bounded, &all));
  EXPECT_EQ(all, 16);  // of every device since compute capability 7.0
  ts_stream beside{};
  ASSERT_OK(ts_stream_acquire_bounded(0, -1, 16, &beside, &all));
  int32_t priority = 0;
  ASSERT_OK(ts_stream_get_priority(beside, &priority));
  EXPECT_EQ(priority, -1);
  ts_stream pool = pool_stream();
  for (const auto stream : {bounded, beside}) {
    ASSERT_OK(ts_wait_cuda_stream(stream, pool));
    ASSERT_OK(ts_wait_cuda_stream(pool, stream));
    ASSERT_OK(ts_stream_synchronize(stream));
  }
  ASSERT_OK(ts_stream_release(bounded));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "given back", ts_stream_synchronize(bounded));
  ts_stream unbounded{};
  ASSERT_OK(ts_stream_acquire(0, 0, &unbounded));
  EXPECT_FALSE(unbounded == bounded);
  ts_stream again{};
  ASSERT_OK(ts_stream_acquire_bounded(0, 0, 16, &again, &all));
  EXPECT_TRUE(again == bounded);
  ts_stream whole{};
  ASSERT_OK(ts_stream_acquire_bounded(0, 0, 1 << 20, &whole, &all));
  EXPECT_EQ(all, 0);
  for (const auto stream : {beside, unbounded, again, whole}) ASSERT_OK(ts_stream_release(stream));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "at least",
               ts_stream_acquire_bounded(0, 0, 1, &whole, &all));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "less than 1",
               ts_stream_acquire_bounded(0, 0, 0, &whole, &all));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "NULL",
               ts_stream_acquire_bounded(0, 0, 16, &whole, nullptr));
}

TEST(StreamGpu, AnOwnStreamWithWorkIsNotHandedOut) {
  NEEDS_GPUS(1);
  ts_stream busy{};
  ASSERT_OK(ts_stream_acquire(0, -2, &busy));
  {
    test::Gate gate(busy);
    ASSERT_OK(ts_stream_release(busy));
    ts_stream next{};
    ASSERT_OK(ts_stream_acquire(0, -2, &next));
    EXPECT_FALSE(next == busy);
    ASSERT_OK(ts_stream_release(next));
  }
}

TEST(StreamGpu, ACapturedStreamIsLeftAlone) {
  NEEDS_GPUS(1);
  using Begin = int(void*, int);
  using End = int(void*, void**);
  using Destroy = int(void*);
  ts_stream stream{};
  ASSERT_OK(ts_stream_acquire(0, 0, &stream));
  uintptr_t handle = 0;
  ASSERT_OK(ts_stream_get_handle(stream, &handle));
  auto* const raw = reinterpret_cast<void*>(handle);
  ASSERT_EQ(test::cuda_function<Begin>("cudaStreamBeginCapture")(raw, 1), 0);
  bool done = false;
  EXPECT_FAILS(TS_ERROR_CAPTURE, "captured", ts_stream_query(stream, &done));
  EXPECT_FAILS(TS_ERROR_CAPTURE, "captured", ts_stream_synchronize(stream));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "captured", ts_stream_release(stream));
  ts_notifier* notifier = nullptr;
  ASSERT_OK(ts_notifier_new(&notifier));
  EXPECT_FAILS(TS_ERROR_CAPTURE, "captured", ts_stream_notify(stream, notifier, 1));
  ts_notifier_free(notifier);
  // None of these calls invalidated the capture.
  void* graph = nullptr;
  EXPECT_EQ(test::cuda_function<End>("cudaStreamEndCapture")(raw, &graph), 0);
  ASSERT_NE(graph, nullptr);
  EXPECT_EQ(test::cuda_function<Destroy>("cudaGraphDestroy")(graph), 0);
  ASSERT_OK(ts_stream_synchronize(stream));
  ASSERT_OK(ts_stream_release(stream));
}

TEST(StreamGpu, ExternalStreamsOfAnotherDeviceAreRefused) {
  NEEDS_GPUS(2);
  uintptr_t handle = 0;
  ASSERT_OK(ts_stream_get_handle(pool_stream(0), &handle));
  ts_stream stream{};
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "device 0", ts_stream_from_handle(handle, 1, &stream));
}

TEST(StreamGpu, GuardsNest) {
  NEEDS_GPUS(1);
  const ts_stream a = pool_stream();
  const ts_stream b = pool_stream();
  ts_stream_guard outer{};
  ts_stream_guard inner{};
  ASSERT_OK(ts_stream_guard_enter(a, &outer));
  EXPECT_TRUE(current_stream() == a);
  ASSERT_OK(ts_stream_guard_enter(b, &inner));
  EXPECT_TRUE(current_stream() == b);
  ASSERT_OK(ts_stream_guard_exit(inner));
  EXPECT_TRUE(current_stream() == a);
  ASSERT_OK(ts_stream_guard_exit(outer));
  EXPECT_TRUE(is_default(current_stream()));
}

TEST(StreamGpu, GuardsRestoreWhatWasSet) {
  NEEDS_GPUS(1);
  const ts_stream set = pool_stream();
  ASSERT_OK(ts_set_cuda_stream(set));
  ts_stream_guard guard{};
  ASSERT_OK(ts_stream_guard_enter({0, 0}, &guard));
  EXPECT_TRUE(is_default(current_stream()));
  ASSERT_OK(ts_set_cuda_stream(pool_stream()));  // inside the guard: undone by its exit
  ASSERT_OK(ts_stream_guard_exit(guard));
  EXPECT_TRUE(current_stream() == set);
  ASSERT_OK(ts_set_cuda_stream({0, 0}));
}

TEST(StreamGpu, GuardsAreLeftInOrderAndOnce) {
  NEEDS_GPUS(1);
  const ts_stream a = pool_stream();
  const ts_stream b = pool_stream();
  ts_stream_guard outer{};
  ts_stream_guard inner{};
  ASSERT_OK(ts_stream_guard_enter(a, &outer));
  ASSERT_OK(ts_stream_guard_enter(b, &inner));
  EXPECT_FAILS(TS_ERROR_OUT_OF_ORDER, "later", ts_stream_guard_exit(outer));
  EXPECT_TRUE(current_stream() == b) << "a refused exit changes nothing";
  ASSERT_OK(ts_stream_guard_exit(inner));
  EXPECT_FAILS(TS_ERROR_OUT_OF_ORDER, "already", ts_stream_guard_exit(inner));
  EXPECT_TRUE(current_stream() == a);
  ASSERT_OK(ts_stream_guard_exit(outer));
  EXPECT_FAILS(TS_ERROR_OUT_OF_ORDER, "already", ts_stream_guard_exit(outer));
  EXPECT_TRUE(is_default(current_stream()));
}

TEST(StreamGpu, GuardsBelongToTheirThread) {
  NEEDS_GPUS(1);
  const ts_stream a = pool_stream();
  std::thread([&] {
    ts_stream_guard guard{};
    EXPECT_OK(ts_stream_guard_enter(a, &guard));
    std::thread([&] {
      EXPECT_FAILS(TS_ERROR_WRONG_THREAD, "another OS thread", ts_stream_guard_exit(guard));
      // The same holds if that thread has a guard with the same serial.
      ts_stream_guard own{};
      EXPECT_OK(ts_stream_guard_enter(a, &own));
      EXPECT_EQ(own.serial, guard.serial);
      EXPECT_FAILS(TS_ERROR_WRONG_THREAD, "another OS thread", ts_stream_guard_exit(guard));
      EXPECT_OK(ts_stream_guard_exit(own));
    }).join();
    EXPECT_TRUE(current_stream() == a);
    EXPECT_OK(ts_stream_guard_exit(guard));
    EXPECT_TRUE(is_default(current_stream()));
  }).join();
}

TEST(StreamGpu, GuardsRestoreTheDevice) {
  NEEDS_GPUS(2);
  const ts_stream other = pool_stream(1);
  const ts_stream here = pool_stream(0);
  ts_stream_guard on_other{};
  ts_stream_guard on_here{};
  ASSERT_OK(ts_stream_guard_enter(other, &on_other));
  EXPECT_TRUE(current_stream(TS_DEVICE_CURRENT) == other);
  EXPECT_TRUE(is_default(current_stream(0)));
  ASSERT_OK(ts_stream_guard_enter(here, &on_here));
  EXPECT_TRUE(current_stream(TS_DEVICE_CURRENT) == here);
  EXPECT_TRUE(current_stream(1) == other);
  ASSERT_OK(ts_stream_guard_exit(on_here));
  EXPECT_TRUE(current_stream(TS_DEVICE_CURRENT) == other);
  ASSERT_OK(ts_stream_guard_exit(on_other));
  const ts_stream after = current_stream(TS_DEVICE_CURRENT);
  EXPECT_EQ(after.device, 0);
  EXPECT_TRUE(is_default(after));
  EXPECT_TRUE(is_default(current_stream(1)));
}

TEST(StreamGpu, ManyThreadsKeepTheirStreams) {
  NEEDS_GPUS(1);
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 16; ++i) {
    threads.emplace_back([&] {
      const ts_stream mine = pool_stream();
      for (int round = 0; round < 2000; ++round) {
        ts_stream_guard guard{};
        ts_stream seen{};
        if (ts_stream_guard_enter(mine, &guard) != nullptr) ++wrong;
        std::this_thread::yield();
        if (ts_get_current_cuda_stream(0, &seen) != nullptr || !(seen == mine)) ++wrong;
        if (ts_stream_guard_exit(guard) != nullptr) ++wrong;
        if (ts_get_current_cuda_stream(0, &seen) != nullptr || !is_default(seen)) ++wrong;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST(StreamGpu, WaitOrdersOneStreamAfterAnother) {
  NEEDS_GPUS(1);
  const ts_stream first = pool_stream();
  const ts_stream second = pool_stream();
  constexpr int64_t kCount = 1 << 16;
  Tensor source = test::full({kCount}, 7, 0);
  Tensor middle = test::full({kCount}, -1, 0);
  Tensor result = test::full({kCount}, -2, 0);
  ASSERT_OK(ts_device_synchronize(0));
  const auto copy = [](ts_stream on, ts_tensor* dst, ts_tensor* src) {
    ASSERT_OK(ts_tensor_copy_batch(on, nullptr, &dst, &src, 1, nullptr));
  };
  {
    test::Gate gate(first);
    copy(first, middle, source);
    ASSERT_OK(ts_wait_cuda_stream(second, first));
    copy(second, result, middle);
    EXPECT_FALSE(test::idle(first));
    EXPECT_FALSE(test::idle(second)) << "the second stream waits for the first";
    // The wait's event is reused at once, which must not release the second stream.
    ASSERT_OK(ts_wait_cuda_stream(first, {0, 0}));
    ASSERT_OK(ts_wait_cuda_stream(pool_stream(), {0, 0}));
    EXPECT_FALSE(test::idle(second));
  }
  ASSERT_OK(ts_stream_synchronize(second));
  EXPECT_EQ(test::read<float>(result)[kCount - 1], 7);
}

TEST(StreamGpu, ADelayKeepsItsStreamBusyAndNoOther) {
  NEEDS_GPUS(1);
  const ts_stream delayed = pool_stream();
  const ts_stream other = pool_stream();
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "0 to 60 s", ts_stream_delay(delayed, -1));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "0 to 60 s", ts_stream_delay(delayed, 60'000'000'001));
  ASSERT_OK(ts_stream_delay(delayed, 0));
  ASSERT_OK(ts_stream_synchronize(delayed));
  const auto start = std::chrono::steady_clock::now();
  ASSERT_OK(ts_stream_delay(delayed, 100'000'000));
  EXPECT_FALSE(test::idle(delayed));
  ASSERT_OK(ts_stream_synchronize(other));
  EXPECT_FALSE(test::idle(delayed));
  ASSERT_OK(ts_stream_synchronize(delayed));
  EXPECT_GE(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(100));
}

TEST(StreamGpu, WaitingForItselfOrForAnIdleStreamSucceeds) {
  NEEDS_GPUS(1);
  const ts_stream stream = pool_stream();
  ASSERT_OK(ts_wait_cuda_stream(stream, stream));
  for (int i = 0; i < 1000; ++i) ASSERT_OK(ts_wait_cuda_stream(stream, {0, 0}));
  // Threads start and end; each reuses the previous thread's event.
  for (int i = 0; i < 100; ++i) {
    std::thread([&] { EXPECT_OK(ts_wait_cuda_stream({0, 0}, stream)); }).join();
  }
  ASSERT_OK(ts_stream_synchronize(stream));
}

TEST(StreamGpu, WaitOrdersStreamsOfTwoDevices) {
  NEEDS_GPUS(2);
  const ts_stream here = pool_stream(0);
  const ts_stream there = pool_stream(1);
  {
    test::Gate gate(here);
    ASSERT_OK(ts_wait_cuda_stream(there, here));
    ASSERT_OK(ts_wait_cuda_stream({0, 1}, here));
    EXPECT_FALSE(test::idle(there));
    EXPECT_FALSE(test::idle({0, 1}));
  }
  ASSERT_OK(ts_stream_synchronize(there));
  ASSERT_OK(ts_stream_synchronize({0, 1}));
  EXPECT_EQ(current_stream(TS_DEVICE_CURRENT).device, 0);
}

}  // namespace
