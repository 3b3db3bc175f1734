// Memory pools and the allocator's statistics.
#include <thread>

#include "support.h"

namespace {

struct Bytes {
  size_t reserved = SIZE_MAX;
  size_t allocated = SIZE_MAX;
};

class Pool {
 public:
  Pool() { EXPECT_OK(ts_memory_pool_new(0, &handle_)); }
  ~Pool() { EXPECT_OK(ts_memory_pool_destroy(handle_)); }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;
  operator ts_memory_pool*() const { return handle_; }  // NOLINT: as the C functions take it
  Bytes bytes() const {
    Bytes result;
    EXPECT_OK(ts_memory_pool_get_bytes(handle_, &result.reserved, &result.allocated));
    return result;
  }

 private:
  ts_memory_pool* handle_ = nullptr;
};

TEST(MemoryPool, ArgumentsAreChecked) {
  ts_memory_pool* pool = nullptr;
  ts_allocator_stats stats = {};
  stats.size = sizeof stats;
  size_t bytes = 0;
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "NULL", ts_memory_pool_new(0, nullptr));
  EXPECT_FAILS(TS_ERROR_NO_DEVICE, "device", ts_memory_pool_new(1000, &pool));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "pool", ts_memory_pool_enter(nullptr));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "pool", ts_memory_pool_exit(nullptr));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "pool",
               ts_memory_pool_get_bytes(nullptr, &bytes, &bytes));
  EXPECT_OK(ts_memory_pool_destroy(nullptr));
  for (const int32_t device : {1000, -1, INT32_MIN}) {
    EXPECT_FAILS(TS_ERROR_NO_DEVICE, "device", ts_allocator_get_stats(device, &stats));
    EXPECT_FAILS(TS_ERROR_NO_DEVICE, "device", ts_allocator_limit(device, 0.5));
  }
}

TEST(MemoryPoolGpu, TakesWhatItsThreadAllocates) {
  NEEDS_GPUS(1);
  const Pool pool;
  EXPECT_EQ(pool.bytes().allocated, 0);
  test::Tensor before = test::full({1 << 20}, 1, 0);
  ASSERT_OK(ts_memory_pool_enter(pool));
  test::Tensor inside = test::full({1 << 20}, 2, 0);
  test::Tensor elsewhere;
  std::thread([&] {
    elsewhere = test::full({1 << 20}, 3, 0);
    EXPECT_FAILS(TS_ERROR_WRONG_THREAD, "another OS thread", ts_memory_pool_exit(pool));
    EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "one thread at a time", ts_memory_pool_enter(pool));
  }).join();
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "one thread at a time", ts_memory_pool_enter(pool));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "leave it", ts_memory_pool_destroy(pool));
  ASSERT_OK(ts_memory_pool_exit(pool));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "not entered", ts_memory_pool_exit(pool));
  test::Tensor after = test::full({1 << 20}, 4, 0);
  EXPECT_EQ(pool.bytes().allocated, 4 << 20);
  EXPECT_GE(pool.bytes().reserved, 4 << 20);
  inside.free();
  EXPECT_EQ(pool.bytes().allocated, 0);
}

}  // namespace
