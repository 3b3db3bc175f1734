// Fork and join.
#include "support.h"

namespace {

using test::pool_stream;

TEST(Fork, WrongArgumentsAreErrors) {
  const int32_t beyond = ts_device_count();
  const ts_stream none{0, beyond};
  EXPECT_FAILS(TS_ERROR_NO_DEVICE, "device", ts_stream_fork(none, nullptr, 0));
  EXPECT_FAILS(TS_ERROR_NO_DEVICE, "device", ts_stream_join(none, nullptr, 0));
}

TEST(ForkGpu, WrongArgumentsAreErrors) {
  NEEDS_GPUS(1);
  const ts_stream stream = pool_stream();
  const ts_stream some[2] = {pool_stream(), {0, ts_device_count()}};
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "negative", ts_stream_fork(stream, some, -1));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "negative", ts_stream_join(stream, some, -1));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "NULL", ts_stream_fork(stream, nullptr, 1));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "NULL", ts_stream_join(stream, nullptr, 1));
  EXPECT_OK(ts_stream_fork(stream, nullptr, 0));
  EXPECT_OK(ts_stream_join(stream, nullptr, 0));
  test::Gate gate(stream);
  EXPECT_FAILS(TS_ERROR_NO_DEVICE, "device", ts_stream_fork(stream, some, 2));
  EXPECT_TRUE(test::idle(some[0])) << "the failed call ordered a stream";
}

TEST(ForkGpu, EveryStreamWaitsAndNoOther) {
  NEEDS_GPUS(1);
  const ts_stream from = pool_stream();
  const ts_stream to[3] = {pool_stream(), from, pool_stream()};
  const ts_stream other = pool_stream();
  {
    test::Gate gate(from);
    ASSERT_OK(ts_stream_fork(from, to, 3));
    EXPECT_FALSE(test::idle(to[0]));
    EXPECT_FALSE(test::idle(to[2]));
    EXPECT_TRUE(test::idle(other));
  }
  ASSERT_OK(ts_device_synchronize(0));
  EXPECT_TRUE(test::idle(to[0]));
}

TEST(ForkGpu, AJoinWaitsForEveryStream) {
  NEEDS_GPUS(1);
  const ts_stream into = pool_stream();
  const ts_stream from[3] = {pool_stream(), into, pool_stream()};
  for (const int slow : {0, 2}) {
    {
      test::Gate gate(from[slow]);
      ASSERT_OK(ts_stream_join(into, from, 3));
      EXPECT_FALSE(test::idle(into)) << slow;
      EXPECT_TRUE(test::idle(from[2 - slow])) << slow;
    }
    ASSERT_OK(ts_device_synchronize(0));
  }
}

}  // namespace
