// The C++ peers of operators called from Go.
#include <thread>

#include "support.h"
#include "torchstream_lab.h"

namespace {

TEST(Peers, AdditionHasTimes) {
  double in_place = 0;
  double out_of_place = 0;
  double held = 0;
  ASSERT_OK(ts_bench_add(TS_DEVICE_CPU, 100, &in_place, &out_of_place, &held));
  EXPECT_GT(in_place, 0);
  EXPECT_GT(out_of_place, 0);
  EXPECT_GT(held, 0);
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "rounds",
               ts_bench_add(TS_DEVICE_CPU, 0, &in_place, &out_of_place, &held));
  EXPECT_FAILS(TS_ERROR_NO_DEVICE, "",
               ts_bench_add(ts_device_count(), 10, &in_place, &out_of_place, &held));
}

TEST(Peers, OperatorsHaveTimes) {
  double nanoseconds = 0;
  ASSERT_OK(ts_bench_operator(TS_DEVICE_CPU, "Add", 1, &nanoseconds));
  EXPECT_GT(nanoseconds, 0);
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "no operator None",
               ts_bench_operator(TS_DEVICE_CPU, "None", 1, &nanoseconds));
}

// Peers enter LibTorch as the library's functions do.
TEST(Peers, ThreadsThatMeasureAreCounted) {
  const int64_t before = ts_thread_count();
  int64_t counted = 0;
  std::thread([&] {
    double nanoseconds = 0;
    EXPECT_OK(ts_bench_operator(TS_DEVICE_CPU, "Add", 1, &nanoseconds));
    counted = ts_thread_count();
  }).join();
  EXPECT_EQ(counted, before + 1);
}

}  // namespace
