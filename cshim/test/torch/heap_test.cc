// What malloc does with the memory that a step frees.
#include <sys/resource.h>

#include <cstdlib>
#include <cstring>
#include <memory>

#include "support.h"

namespace {

using Block = std::unique_ptr<char[], decltype(&std::free)>;

// Allocates, writes and frees blocks as a step does, and returns the page faults.
int64_t faults_of_a_step() {
  constexpr size_t kBytes = 8 << 20;
  rusage before = {};
  getrusage(RUSAGE_SELF, &before);
  {
    std::vector<Block> blocks;
    for (int i = 0; i < 16; ++i) {
      blocks.emplace_back(static_cast<char*>(std::malloc(kBytes)), &std::free);
      std::memset(blocks.back().get(), 1, kBytes);
    }
  }
  rusage after = {};
  getrusage(RUSAGE_SELF, &after);
  return after.ru_minflt - before.ru_minflt;
}

TEST(Heap, AStepTakesTheMemoryOfTheOneBefore) {
  ASSERT_EQ(ts_abi_version(), TS_ABI_VERSION);  // the library is loaded
  if (std::getenv("GLIBC_TUNABLES") != nullptr) GTEST_SKIP() << "malloc has settings";
  const int64_t first = faults_of_a_step();
  EXPECT_GT(first, 0);
  faults_of_a_step();
  EXPECT_LT(faults_of_a_step(), first / 10);
}

}  // namespace
