// Ranges reach an NVTX tool: nvtx_probe.c, which ctest names in the environment as a profiler does.
#include <cstdlib>
#include <thread>

#include "support.h"

namespace {

TEST(Nvtx, AToolReceivesRangesAndMarks) {
  const char* probe = std::getenv("NVTX_INJECTION64_PATH");
  if (probe == nullptr) GTEST_SKIP() << "NVTX_INJECTION64_PATH does not name the probe";
  EXPECT_NE(*ts_range_listeners(), 0);
  uint64_t first = 0;
  uint64_t second = 0;
  EXPECT_OK(ts_range_start("one", &first));
  EXPECT_OK(ts_range_start("two", &second));
  EXPECT_OK(ts_range_mark("here"));
  // The first range ends before the second, and on another thread.
  std::thread([&] { EXPECT_OK(ts_range_end(first)); }).join();
  EXPECT_OK(ts_range_end(second));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "ended", ts_range_end(second));
  void* const library = dlopen(probe, RTLD_NOW | RTLD_NOLOAD);
  ASSERT_NE(library, nullptr) << dlerror();
  using Heard = const char*();
  auto* const heard = reinterpret_cast<Heard*>(dlsym(library, "nvtx_probe_heard"));
  ASSERT_NE(heard, nullptr);
  EXPECT_STREQ(heard(), "start one\nstart two\nmark here\nend 1\nend 2\n");
}

}  // namespace
