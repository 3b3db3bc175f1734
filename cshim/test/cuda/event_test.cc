// Events.
#include <atomic>
#include <thread>

#include "support.h"

namespace {

using test::complete;
using test::Event;
using test::pool_stream;

TEST(Event, CreationFailsWithoutGpu) {
  if (ts_device_count() > 0) GTEST_SKIP() << "there is a GPU";
  ts_event* event = nullptr;
  EXPECT_FAILS(TS_ERROR_NO_DEVICE, "", ts_event_new(0, &event));
  EXPECT_EQ(event, nullptr);
  ts_event_free(nullptr);
}

TEST(Event, NullsAreRefused) {
  bool done = false;
  int64_t nanoseconds = 0;
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "NULL", ts_event_query(nullptr, &done));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "NULL", ts_event_synchronize(nullptr));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "NULL", ts_event_record(nullptr, {0, 0}));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "NULL", ts_stream_wait_event({0, 0}, nullptr));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "NULL",
               ts_event_get_elapsed(nullptr, nullptr, &nanoseconds));
  ts_event* event = nullptr;
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "flag", ts_event_new(16, &event));
}

TEST(Event, ExportAndImportCheckTheirArguments) {
  uint8_t handle[TS_EVENT_HANDLE_BYTES] = {};
  ts_event* event = nullptr;
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "event is NULL", ts_event_export(nullptr, 0, handle));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "is NULL", ts_event_import(0, handle, nullptr));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "handle is NULL", ts_event_import(0, nullptr, &event));
  EXPECT_FAILS(TS_ERROR_NO_DEVICE, "device", ts_event_import(1000, handle, &event));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "takes no time",
               ts_event_new(TS_EVENT_FLAG_TIMING | TS_EVENT_FLAG_INTERPROCESS, &event));
}

TEST(EventGpu, AnExportedEventCountsAsRecorded) {
  NEEDS_GPUS(1);
  uint8_t handle[TS_EVENT_HANDLE_BYTES] = {};
  const Event plain;
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "TS_EVENT_FLAG_INTERPROCESS",
               ts_event_export(plain, 0, handle));
  const Event event(TS_EVENT_FLAG_INTERPROCESS);
  EXPECT_FAILS(TS_ERROR_NOT_RECORDED, "", ts_event_synchronize(event));
  ASSERT_OK(ts_event_export(event, 0, handle));
  EXPECT_OK(ts_event_synchronize(event));
  ASSERT_OK(ts_event_record(event, {0, 0}));
  EXPECT_OK(ts_event_synchronize(event));
}

TEST(EventGpu, UnrecordedIsAnErrorEverywhere) {
  NEEDS_GPUS(1);
  Event event(TS_EVENT_FLAG_TIMING);
  Event other(TS_EVENT_FLAG_TIMING);
  bool done = false;
  int64_t nanoseconds = 0;
  EXPECT_FAILS(TS_ERROR_NOT_RECORDED, "never recorded", ts_event_query(event, &done));
  EXPECT_FAILS(TS_ERROR_NOT_RECORDED, "never recorded", ts_event_synchronize(event));
  EXPECT_FAILS(TS_ERROR_NOT_RECORDED, "never recorded", ts_stream_wait_event({0, 0}, event));
  EXPECT_FAILS(TS_ERROR_NOT_RECORDED, "never recorded",
               ts_event_get_elapsed(event, other, &nanoseconds));
  EXPECT_FAILS(TS_ERROR_NOT_RECORDED, "never recorded",
               ts_tensor_copy_batch({0, 0}, event, nullptr, nullptr, 0, other));
  // The failed call enqueued no work, so the other event is still unrecorded.
  EXPECT_FAILS(TS_ERROR_NOT_RECORDED, "never recorded", ts_event_query(other, &done));
}

TEST(EventGpu, FollowsItsStream) {
  NEEDS_GPUS(1);
  const ts_stream stream = pool_stream();
  Event event;
  {
    test::Gate gate(stream);
    ASSERT_OK(ts_event_record(event, stream));
    EXPECT_FALSE(complete(event));
  }
  ASSERT_OK(ts_event_synchronize(event));
  EXPECT_TRUE(complete(event));
}

TEST(EventGpu, AWaitIsForTheRecordBeforeIt) {
  NEEDS_GPUS(1);
  const ts_stream busy = pool_stream();
  const ts_stream waiter = pool_stream();
  const ts_stream free_one = test::free_stream();
  Event event;
  {
    test::Gate gate(busy);
    ASSERT_OK(ts_event_record(event, busy));
    ASSERT_OK(ts_stream_wait_event(waiter, event));
    // A second record does not release a wait for the first record.
    ASSERT_OK(ts_event_record(event, free_one));
    ASSERT_OK(ts_event_synchronize(event));
    EXPECT_TRUE(complete(event));
    EXPECT_FALSE(test::idle(waiter));
  }
  ASSERT_OK(ts_stream_synchronize(waiter));
}

TEST(EventGpu, CanBeFreedWhileWaitedFor) {
  NEEDS_GPUS(1);
  const ts_stream busy = pool_stream();
  const ts_stream waiter = pool_stream();
  {
    test::Gate gate(busy);
    {
      Event event;
      ASSERT_OK(ts_event_record(event, busy));
      ASSERT_OK(ts_stream_wait_event(waiter, event));
    }
    EXPECT_FALSE(test::idle(waiter));
  }
  ASSERT_OK(ts_stream_synchronize(waiter));
}

TEST(EventGpu, MeasuresTime) {
  NEEDS_GPUS(1);
  const ts_stream stream = pool_stream();
  Event start(TS_EVENT_FLAG_TIMING);
  Event end(TS_EVENT_FLAG_TIMING | TS_EVENT_FLAG_BLOCKING);
  Event plain;
  int64_t nanoseconds = -1;
  {
    test::Gate gate(stream);
    ASSERT_OK(ts_event_record(start, stream));
    ASSERT_OK(ts_event_record(end, stream));
    ASSERT_OK(ts_event_record(plain, stream));
    EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "not complete",
                 ts_event_get_elapsed(start, end, &nanoseconds));
  }
  ASSERT_OK(ts_event_synchronize(end));
  ASSERT_OK(ts_event_get_elapsed(start, end, &nanoseconds));
  EXPECT_GE(nanoseconds, 0);
  EXPECT_LT(nanoseconds, int64_t{10} * 1000 * 1000 * 1000);
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "without timing",
               ts_event_get_elapsed(start, plain, &nanoseconds));
}

TEST(EventGpu, BelongsToTheDeviceOfItsFirstRecord) {
  NEEDS_GPUS(2);
  Event event;
  ASSERT_OK(ts_event_record(event, pool_stream(0)));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "device 0", ts_event_record(event, pool_stream(1)));
  ASSERT_OK(ts_stream_wait_event(pool_stream(1), event));
}

TEST(EventGpu, IsRecordedAndUsedByManyThreads) {
  NEEDS_GPUS(1);
  for (int round = 0; round < 20; ++round) {
    Event event;  // created by the first record, for which all threads race
    std::atomic<int> wrong{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 6; ++i) {
      threads.emplace_back([&, i] {
        const ts_stream stream = pool_stream();
        for (int step = 0; step < 50; ++step) {
          if (i % 2 == 0) {
            if (ts_event_record(event, stream) != nullptr) ++wrong;
          } else {
            bool done = false;
            const test::Outcome query(ts_event_query(event, &done));
            if (query.code != TS_ERROR_NONE && query.code != TS_ERROR_NOT_RECORDED) ++wrong;
            const test::Outcome wait(ts_stream_wait_event(stream, event));
            if (wait.code != TS_ERROR_NONE && wait.code != TS_ERROR_NOT_RECORDED) ++wrong;
          }
        }
      });
    }
    for (auto& thread : threads) thread.join();
    EXPECT_EQ(wrong, 0);
  }
  ASSERT_OK(ts_device_synchronize(0));
}

}  // namespace
