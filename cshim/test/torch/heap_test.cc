// The memory that a step frees is kept for the next step.
#include <link.h>
#include <malloc.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "support.h"

// Whether operator new fails on this thread. The library uses the operator below too.
thread_local bool without_memory = false;

void* operator new(size_t bytes) {
  void* memory = without_memory ? nullptr : std::malloc(bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t /*bytes*/) noexcept { std::free(memory); }

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

constexpr int64_t kMiB = 1 << 20;

// A tensor whose memory shows its origin: memory from the kernel is zero, an earlier tensor's is
// not.
class Marked {
 public:
  explicit Marked(int64_t bytes) {
    uintptr_t address = 0;
    EXPECT_OK(ts_tensor_new(&bytes, 1, TS_DTYPE_UINT8, TS_DEVICE_CPU, TS_MEMORY_FORMAT_CONTIGUOUS,
                            tensor_.out()));
    EXPECT_OK(ts_tensor_get_address(tensor_, &address));
    if (address == 0) return;
    auto* last = reinterpret_cast<uint8_t*>(address) + bytes - 1;
    was_used_ = std::exchange(*last, uint8_t{1}) == 1;
  }
  bool was_used() const { return was_used_; }

 private:
  test::Tensor tensor_;
  bool was_used_ = false;
};

bool was_used(int64_t bytes) { return Marked(bytes).was_used(); }

// The tests of large tensors start without kept memory: a tensor larger than all of it evicts it,
// and is not kept itself.
class LargeTensors : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(ts_abi_version(), TS_ABI_VERSION);  // the library is loaded
    if (std::getenv("GLIBC_TUNABLES") != nullptr) GTEST_SKIP() << "malloc has settings";
    was_used(1025 * kMiB);
    malloc_trim(0);  // otherwise large tensors would use memory that another test has freed
  }
};

TEST(Heap, AStepTakesTheMemoryOfTheOneBefore) {
  ASSERT_EQ(ts_abi_version(), TS_ABI_VERSION);  // the library is loaded
  if (std::getenv("GLIBC_TUNABLES") != nullptr) GTEST_SKIP() << "malloc has settings";
  const int64_t first = faults_of_a_step();
  EXPECT_GT(first, 0);
  faults_of_a_step();
  EXPECT_LT(faults_of_a_step(), first / 10);
}

// LibTorch stays loaded when a program closes the library, and calls its allocator.
TEST(Heap, TheLibraryIsNeverUnloaded) {
  void* const library = dlopen("libtorchstream.so", RTLD_NOW | RTLD_NOLOAD);
  ASSERT_NE(library, nullptr);
  link_map* map = nullptr;
  ASSERT_EQ(dlinfo(library, RTLD_DI_LINKMAP, &map), 0);
  uint64_t flags = 0;
  for (const ElfW(Dyn)* each = map->l_ld; each->d_tag != DT_NULL; ++each) {
    if (each->d_tag == DT_FLAGS_1) flags = each->d_un.d_val;
  }
  EXPECT_NE(flags & DF_1_NODELETE, 0U);
  dlclose(library);
}

TEST_F(LargeTensors, TakeTheMemoryOfThoseBefore) {
  EXPECT_FALSE(was_used(48 * kMiB));
  EXPECT_TRUE(was_used(48 * kMiB));
  {
    const Marked one(48 * kMiB);
    const Marked two(48 * kMiB);
    EXPECT_TRUE(one.was_used());
    EXPECT_FALSE(two.was_used());
  }
  EXPECT_TRUE(was_used(48 * kMiB));
}

TEST_F(LargeTensors, OfAnotherSizeTakeTheOldestMemorysPlace) {
  {
    const Marked one(50 * kMiB);
    const Marked two(51 * kMiB);
  }  // the second is freed first
  EXPECT_FALSE(was_used(40 * kMiB));
  EXPECT_TRUE(was_used(50 * kMiB));
  EXPECT_FALSE(was_used(51 * kMiB));
}

TEST_F(LargeTensors, AreKeptUpToOneGiB) {
  {
    const Marked one(400 * kMiB);
    const Marked two(401 * kMiB);
    const Marked three(402 * kMiB);
  }  // the third is freed first
  {
    const Marked one(400 * kMiB);
    EXPECT_TRUE(one.was_used());
    const Marked two(401 * kMiB);
    EXPECT_TRUE(two.was_used());
    const Marked three(402 * kMiB);
    EXPECT_FALSE(three.was_used());
  }
}

TEST_F(LargeTensors, OfMoreThanOneGiBAreNotKept) {
  was_used(1025 * kMiB);
  EXPECT_FALSE(was_used(1025 * kMiB));
  {
    const Marked other(1025 * kMiB);
    was_used(48 * kMiB);
  }
  EXPECT_TRUE(was_used(48 * kMiB));
}

// malloc adds its header and the alignment to a block, and maps blocks from 32 MiB on.
TEST_F(LargeTensors, BeginWhereMallocMapsThem) {
  for (const int64_t bytes : {32 * kMiB - 64, 32 * kMiB, 32 * kMiB + 64}) {
    was_used(bytes);
    EXPECT_TRUE(was_used(bytes)) << bytes;
  }
}

// Limits the process's address space to this many bytes more than it uses.
class AddressSpace {
 public:
  explicit AddressSpace(int64_t more) {
    EXPECT_EQ(getrlimit(RLIMIT_AS, &before_), 0);
    int64_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    rlimit limit = before_;
    limit.rlim_cur = static_cast<rlim_t>(pages * sysconf(_SC_PAGESIZE) + more);
    EXPECT_EQ(setrlimit(RLIMIT_AS, &limit), 0);
  }
  ~AddressSpace() { setrlimit(RLIMIT_AS, &before_); }
  AddressSpace(const AddressSpace&) = delete;
  AddressSpace& operator=(const AddressSpace&) = delete;

 private:
  rlimit before_ = {};
};

TEST_F(LargeTensors, LeaveTheirMemoryToSmallOnesThatFindNoOther) {
  was_used(1000 * kMiB);
  const AddressSpace limit(100 * kMiB);
  std::vector<Marked> small;
  small.reserve(20);
  for (int i = 0; i < 20; ++i) small.emplace_back(30 * kMiB);
}

TEST_F(LargeTensors, AreFreedWithoutMemory) {
  std::vector<test::Tensor> all;
  for (int i = 0; i < 20; ++i) all.push_back(test::empty({(100 + i) * kMiB}, TS_DTYPE_UINT8));
  without_memory = true;
  for (test::Tensor& tensor : all) tensor.free();
  without_memory = false;
  EXPECT_FALSE(was_used(48 * kMiB));
}

// A child has one thread, and locks that other threads held at the fork stay locked in it.
TEST_F(LargeTensors, AreThereInAForkedChild) {
  std::atomic<bool> done{false};
  std::thread other([&] {
    while (!done) test::empty({33 * kMiB}, TS_DTYPE_UINT8);
  });
  for (int i = 0; i < 100; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(10);
      test::empty({34 * kMiB}, TS_DTYPE_UINT8);
      _exit(0);
    }
    int status = -1;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
    if (status != 0) break;
  }
  done = true;
  other.join();
}

}  // namespace
