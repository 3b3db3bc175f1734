// Notices and ranges.
#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "support.h"

namespace {

class Notifier {
 public:
  Notifier() { EXPECT_OK(ts_notifier_new(&handle_)); }
  ~Notifier() { free(); }
  Notifier(const Notifier&) = delete;
  Notifier& operator=(const Notifier&) = delete;
  operator ts_notifier*() const { return handle_; }  // NOLINT: as the C functions take it
  void free() { ts_notifier_free(std::exchange(handle_, nullptr)); }

  bool readable(int milliseconds = 0) const {
    pollfd waiting{ts_notifier_fd(handle_), POLLIN, 0};
    return poll(&waiting, 1, milliseconds) == 1;
  }
  std::vector<uint64_t> take(int32_t capacity = 100) const {
    uint64_t count = 0;
    [[maybe_unused]] const auto bytes = read(ts_notifier_fd(handle_), &count, sizeof count);
    std::vector<uint64_t> tokens(static_cast<size_t>(capacity));
    int64_t taken = -1;
    EXPECT_OK(ts_notifier_take(handle_, tokens.data(), capacity, &taken));
    tokens.resize(static_cast<size_t>(taken));
    return tokens;
  }

 private:
  ts_notifier* handle_ = nullptr;
};

using Tokens = std::vector<uint64_t>;

TEST(Notify, TokensComeInOrderAndOnce) {
  const Notifier notifier;
  EXPECT_FALSE(notifier.readable());
  EXPECT_EQ(notifier.take(), Tokens{});
  for (uint64_t token = 1; token <= 5; ++token) EXPECT_OK(ts_notifier_post(notifier, token));
  EXPECT_TRUE(notifier.readable());
  EXPECT_EQ(notifier.take(2), (Tokens{1, 2}));
  EXPECT_EQ(notifier.take(), (Tokens{3, 4, 5}));
  EXPECT_FALSE(notifier.readable());
  EXPECT_EQ(notifier.take(), Tokens{});
}

TEST(Notify, ArgumentsAreChecked) {
  const Notifier notifier;
  uint64_t token = 0;
  int64_t count = 0;
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "NULL", ts_notifier_new(nullptr));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "notifier", ts_notifier_post(nullptr, 1));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "notifier", ts_notifier_take(nullptr, &token, 1, &count));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "count", ts_notifier_take(notifier, &token, 1, nullptr));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "tokens", ts_notifier_take(notifier, nullptr, 1, &count));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "negative",
               ts_notifier_take(notifier, &token, -1, &count));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "notifier", ts_stream_notify({0, 0}, nullptr, 1));
  EXPECT_FAILS(TS_ERROR_NO_DEVICE, "device", ts_stream_notify({0, 1000}, notifier, 1));
  ts_notifier_free(nullptr);
}

TEST(Notify, ManyThreadsPost) {
  const Notifier notifier;
  constexpr uint64_t kThreads = 8;
  constexpr uint64_t kEach = 1000;
  std::vector<std::thread> threads;
  for (uint64_t thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      for (uint64_t i = 0; i < kEach; ++i) {
        EXPECT_OK(ts_notifier_post(notifier, thread * kEach + i));
      }
    });
  }
  std::vector<uint64_t> last(kThreads, 0);
  for (uint64_t seen = 0; seen < kThreads * kEach;) {
    EXPECT_TRUE(notifier.readable(10'000));
    for (auto tokens = notifier.take(); !tokens.empty(); tokens = notifier.take()) {
      for (const uint64_t token : tokens) {
        EXPECT_EQ(token % kEach, last[token / kEach]++);  // the tokens of one thread stay in order
        ++seen;
      }
    }
    if (HasFailure()) break;
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(notifier.take(), Tokens{});
}

TEST(NotifyGpu, ANoticeComesWhenTheWorkIsDone) {
  NEEDS_GPUS(1);
  const Notifier notifier;
  const ts_stream stream = test::pool_stream();
  {
    test::Gate gate(stream);
    EXPECT_OK(ts_stream_notify(stream, notifier, 7));
    EXPECT_FALSE(notifier.readable());
    gate.open();
  }
  EXPECT_TRUE(notifier.readable(10'000));
  EXPECT_EQ(notifier.take(), Tokens{7});
}

TEST(NotifyGpu, ANoticeOutlivesItsNotifier) {
  NEEDS_GPUS(1);
  const ts_stream stream = test::pool_stream();
  {
    Notifier notifier;
    test::Gate gate(stream);
    EXPECT_OK(ts_stream_notify(stream, notifier, 7));
    notifier.free();
    gate.open();
  }
  EXPECT_OK(ts_stream_synchronize(stream));
}

TEST(Range, WithoutListenersNothingHappens) {
  if (*ts_range_listeners() != 0) GTEST_SKIP() << "an NVTX tool is attached";
  uint64_t range = 9;
  EXPECT_OK(ts_range_start("name", &range));
  EXPECT_EQ(range, 0U);
  EXPECT_OK(ts_range_end(range));
  EXPECT_OK(ts_range_end(range));
  EXPECT_OK(ts_range_mark("name"));
}

TEST(Range, ArgumentsAreChecked) {
  uint64_t range = 9;
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "name", ts_range_start(nullptr, &range));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "NULL", ts_range_start("name", nullptr));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "name", ts_range_mark(nullptr));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "ended", ts_range_end(1'000'000));
}

}  // namespace
