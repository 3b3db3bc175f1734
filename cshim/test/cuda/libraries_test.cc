// The threads that use cuBLAS and related libraries: calls of all other threads run on stand-in
// threads.
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "support.h"

namespace {

using test::Call;
using test::Tensor;

constexpr int kMaxThreads = 20;  // the maximum of ts_library_thread_count

TEST(Libraries, NoThreadHasHandlesWithoutAGpu) {
  Tensor a = test::full({2, 2}, 1);
  Call("aten::mm").tensor(a).tensor(a).one();
  if (ts_device_count() == 0) {
    EXPECT_EQ(ts_library_thread_count(), 0);
  }
}

size_t free_bytes() {
  EXPECT_OK(ts_device_synchronize(0));
  ts_device_memory memory{};
  memory.size = sizeof memory;
  EXPECT_OK(ts_device_get_memory(0, &memory));
  return memory.free_bytes;
}

// While it exists, its threads have all handles, so that no other thread gets any.
class AllSeats {
 public:
  AllSeats() : product_(test::full({16, 16}, 1, 0)) {
    for (int i = 0; i < 40; ++i) {
      threads_.emplace_back([this] {
        EXPECT_EQ(test::read<float>(Call("aten::mm").tensor(product_).tensor(product_).one())[0],
                  16);
        std::unique_lock<std::mutex> lock(mutex_);
        ++arrived_;
        changed_.notify_all();
        changed_.wait(lock, [this] { return over_; });
      });
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return arrived_ == i + 1; });
      lock.unlock();
      if (i < 3 || i % 10 == 9) {
        std::printf("%d threads: %zu MiB free, %lld with handles\n", i + 1, free_bytes() >> 20,
                    static_cast<long long>(ts_library_thread_count()));
      }
    }
  }
  ~AllSeats() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      over_ = true;
    }
    changed_.notify_all();
    for (std::thread& each : threads_) each.join();
  }
  AllSeats(const AllSeats&) = delete;
  AllSeats& operator=(const AllSeats&) = delete;

 private:
  Tensor product_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int arrived_ = 0;
  bool over_ = false;
  std::vector<std::thread> threads_;
};

TEST(LibrariesGpu, ThreadsBeyondTheMaximumGetResultsAndNoHandles) {
  NEEDS_GPUS(1);
  const AllSeats taken;
  EXPECT_LE(ts_library_thread_count(), kMaxThreads);
  // Many at once, each on its own stream.
  std::vector<std::thread> threads;
  for (int i = 0; i < 32; ++i) {
    threads.emplace_back([i] {
      ts_stream_guard guard{};
      const ts_stream stream = test::pool_stream();
      ASSERT_OK(ts_stream_guard_enter(stream, &guard));
      Tensor a = test::full({32, 32}, static_cast<float>(i), 0);
      for (int n = 0; n < 20; ++n) {
        Tensor product = Call("aten::mm").tensor(a).tensor(a).one();
        EXPECT_EQ(test::read<float>(product)[0], 32.0F * static_cast<float>(i * i));
      }
      EXPECT_EQ(test::current_stream(), stream);
      EXPECT_FAILS(TS_ERROR_OPERATOR, "mat1 and mat2",
                   Call("aten::mm").tensor(a).tensor(test::full({3, 3}, 1, 0)).drop());
      EXPECT_OK(ts_stream_guard_exit(guard));
    });
  }
  for (std::thread& each : threads) each.join();
  EXPECT_LE(ts_library_thread_count(), kMaxThreads);
}

TEST(LibrariesGpu, AThreadBeyondTheMaximumKeepsItsMemoryPool) {
  NEEDS_GPUS(1);
  const AllSeats taken;
  std::thread([] {
    ts_memory_pool* pool = nullptr;
    ASSERT_OK(ts_memory_pool_new(0, &pool));
    Tensor a = test::full({512, 512}, 1, 0);
    ASSERT_OK(ts_memory_pool_enter(pool));
    Tensor product = Call("aten::mm").tensor(a).tensor(a).one();
    EXPECT_OK(ts_memory_pool_exit(pool));
    size_t reserved = 0;
    size_t allocated = 0;
    EXPECT_OK(ts_memory_pool_get_bytes(pool, &reserved, &allocated));
    EXPECT_GE(allocated, 512U * 512 * sizeof(float));
    EXPECT_EQ(test::read<float>(product)[0], 512);
    product.free();
    EXPECT_OK(ts_memory_pool_destroy(pool));
  }).join();
}

TEST(LibrariesGpu, AThreadBeyondTheMaximumCaptures) {
  NEEDS_GPUS(1);
  const AllSeats taken;
  std::thread([] {
    Tensor a = test::full({32, 32}, 2, 0);
    Tensor out = test::full({32, 32}, 0, 0);
    const ts_stream stream = test::pool_stream();
    ts_stream_guard guard{};
    ASSERT_OK(ts_stream_guard_enter(stream, &guard));
    ASSERT_OK(ts_device_synchronize(0));
    ts_graph* graph = nullptr;
    ASSERT_OK(ts_graph_begin(stream, nullptr, &graph));
    {
      Tensor product = Call("aten::mm").tensor(a).tensor(a).one();
      EXPECT_OK(ts_tensor_copy(out, product, true));
    }
    EXPECT_FAILS(
        TS_ERROR_OPERATOR, "mat1 and mat2",
        Call("aten::mm").tensor(a).tensor(test::empty({3, 3}, TS_DTYPE_FLOAT32, 0)).drop());
    EXPECT_OK(ts_graph_end(graph));
    EXPECT_OK(ts_graph_replay(graph, stream));
    ASSERT_OK(ts_stream_synchronize(stream));
    EXPECT_EQ(test::read<float>(out)[0], 128);
    EXPECT_OK(ts_graph_destroy(graph));
    EXPECT_OK(ts_stream_guard_exit(guard));
  }).join();
}

}  // namespace
