// The log of the stream sanitizer.
#include <array>
#include <atomic>
#include <thread>

#include "support.h"

namespace {

// A thread may have tested whether the log runs just before it ends.
TEST(Sanitizer, NothingIsLoggedAfterTheStop) {
  NEEDS_GPUS(1);
  std::atomic<bool> done{false};
  std::atomic<uint64_t> rounds{0};
  std::thread logs([&] {
    while (!done) {
      test::empty({1}, TS_DTYPE_FLOAT32, 0);  // is allocated and freed
      ++rounds;
    }
  });
  const auto pass = [&] {
    for (const uint64_t end = rounds + 2; rounds < end;) std::this_thread::yield();
  };
  std::array<ts_sanitizer_entry, 64> entries{};
  int64_t left = 0;
  int logged = 0;
  for (int i = 0; i < 1000; ++i) {
    EXPECT_OK(ts_sanitizer_start());
    pass();
    logged += ts_sanitizer_take(entries.data(), 1) > 0 ? 1 : 0;
    ts_sanitizer_stop();
    pass();
    left += ts_sanitizer_take(entries.data(), entries.size());
  }
  done = true;
  logs.join();
  EXPECT_EQ(logged, 1000);
  EXPECT_EQ(left, 0);
}

}  // namespace
