// Devices, versions, threads, and the errors that any call can return.
#include <atomic>
#include <cstring>
#include <thread>

#include "support.h"

namespace {

TEST(Version, MatchesTheBuild) {
  EXPECT_EQ(ts_abi_version(), TS_ABI_VERSION);
  EXPECT_EQ(std::string(ts_libtorch_version()).rfind("2.", 0), 0U);
  if (*ts_cuda_version() == '\0') {
    EXPECT_EQ(ts_device_count(), 0);  // a build without CUDA
  } else {
    EXPECT_NE(std::strchr(ts_cuda_version(), '.'), nullptr);
  }
  EXPECT_EQ(std::string(ts_jpeg_version()).rfind("libjpeg-turbo ", 0), 0U);
}

TEST(Device, AbsentOrdinalsReturnNoDevice) {
  testing::internal::CaptureStderr();
  const int32_t beyond = ts_device_count();
  ts_device_info properties = {};
  properties.size = sizeof properties;
  ts_device_memory stats = {};
  stats.size = sizeof stats;
  for (const int32_t device : {beyond, -1, -2, 1000}) {
    SCOPED_TRACE(device);
    EXPECT_FAILS(TS_ERROR_NO_DEVICE, "device", ts_device_get_info(device, &properties));
    EXPECT_FAILS(TS_ERROR_NO_DEVICE, "device", ts_device_get_memory(device, &stats));
    EXPECT_FAILS(TS_ERROR_NO_DEVICE, "device", ts_device_reset_peak_memory(device));
    EXPECT_FAILS(TS_ERROR_NO_DEVICE, "device", ts_device_synchronize(device));
  }
  if (beyond == 0) {
    EXPECT_FAILS(TS_ERROR_NO_DEVICE, "no usable GPU", ts_allocator_empty_cache());
  }
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

TEST(Device, ErrorsCanBeFreedAndNameTheirOrigin) {
  ts_error* error = ts_device_synchronize(-1);
  ASSERT_NE(error, nullptr);
  EXPECT_STREQ(ts_error_origin(error), "ts_device_synchronize");
  ts_error_free(error);
  ts_error_free(nullptr);
}

// Functions that return no error accept NULL.
TEST(Device, FunctionsWithoutErrorsAcceptNull) {
  EXPECT_EQ(ts_error_code(nullptr), TS_ERROR_NONE);
  EXPECT_STREQ(ts_error_message(nullptr), "");
  EXPECT_STREQ(ts_error_origin(nullptr), "");
  EXPECT_EQ(ts_pinned_data(nullptr), nullptr);
  EXPECT_EQ(ts_pinned_size(nullptr), 0U);
  EXPECT_EQ(ts_notifier_fd(nullptr), -1);
  EXPECT_STREQ(ts_operator_schema(nullptr), "");
  EXPECT_EQ(ts_trace_events(nullptr), nullptr);
  EXPECT_EQ(ts_trace_event_count(nullptr), 0);
  EXPECT_EQ(ts_trace_names(nullptr), nullptr);
  EXPECT_EQ(ts_trace_name_count(nullptr), 0);
  EXPECT_EQ(ts_graph_node_count(nullptr), 0);
  ts_tensor_list_take(nullptr, nullptr);
  ts_tensor_list_free(nullptr);
  ts_tensor_free_all(nullptr, 0);
  ts_trace_free(nullptr);
  ts_event_free(nullptr);
}

TEST(Thread, CountFollowsLiveThreads) {
  // No other thread of the process starts or ends here.
  test::Tensor tensor = test::scalar(1);
  const int64_t before = ts_thread_count();
  EXPECT_GE(before, 1);
  std::atomic<bool> entered{false};
  std::atomic<bool> leave{false};
  std::thread thread([&] {
    ts_thread_id();  // does not enter
    test::describe(tensor);
    entered = true;
    while (!leave) std::this_thread::yield();
  });
  while (!entered) std::this_thread::yield();
  EXPECT_EQ(ts_thread_count(), before + 1);
  leave = true;
  thread.join();
  EXPECT_EQ(ts_thread_count(), before);
  std::thread([] { ts_thread_id(); }).join();
  EXPECT_EQ(ts_thread_count(), before);
}

TEST(Thread, IdsAreStableAndDistinct) {
  const int64_t mine = ts_thread_id();
  EXPECT_EQ(ts_thread_id(), mine);
  int64_t other = 0;
  std::thread([&] { other = ts_thread_id(); }).join();
  EXPECT_NE(other, mine);
}

TEST(Thread, ParallelismCanBeSet) {
  const int32_t before = ts_parallelism();
  EXPECT_GE(before, 1);
  ASSERT_OK(ts_parallelism_set(1));
  EXPECT_EQ(ts_parallelism(), 1);
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "at least 1", ts_parallelism_set(0));
  ASSERT_OK(ts_parallelism_set(before));
}

TEST(DeviceGpu, DescribesItself) {
  NEEDS_GPUS(1);
  ts_device_info properties = {};
  properties.size = sizeof properties;
  ASSERT_OK(ts_device_get_info(0, &properties));
  EXPECT_GT(std::strlen(properties.name), 0U);
  EXPECT_GE(properties.major, 5);
  EXPECT_GT(properties.multiprocessors, 0);
  EXPECT_GT(properties.async_engines, 0);
  EXPECT_GT(properties.total_bytes, 1 << 28);
  ASSERT_OK(ts_device_synchronize(0));
}

}  // namespace
