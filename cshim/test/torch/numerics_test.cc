// LibTorch's switches, for the process and for a call.
#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "support.h"

namespace {

using test::Call;
using test::make;
using test::Tensor;

constexpr int32_t kAll = 15;

// The flags of a call with its own switches.
constexpr int32_t own(int32_t switches) {
  return switches * TS_NUMERICS_ON + (kAll - switches) * TS_NUMERICS_OFF;
}

// An operator that LibTorch refuses if kernels must be deterministic. The boxed call runs it.
bool is_refused(int32_t flags) {
  Tensor x = make<float>({1, 2}, {2});
  Tensor index = make<int64_t>({0}, {1});
  Tensor source = make<float>({5}, {1});
  Tensor result;
  int64_t count = 0;
  ts_error* error = Call("aten::put")
                        .tensor(x)
                        .tensor(index)
                        .tensor(source)
                        .flags(flags)
                        .run(result.out(), 1, &count);
  if (error == nullptr) return false;
  EXPECT_NE(std::string(ts_error_message(error)).find("deterministic"), std::string::npos);
  ts_error_free(error);
  return true;
}

TEST(Numerics, AreSetTogether) {
  int32_t before = 0;
  ASSERT_OK(ts_numerics_get(&before));
  EXPECT_EQ(before, TS_NUMERICS_FLAG_CONVOLUTION_TF32) << "LibTorch's defaults";
  testing::internal::CaptureStderr();
  for (int32_t flags = 0; flags < 16; ++flags) {
    int32_t now = -1;
    ASSERT_OK(ts_numerics_set(flags));
    ASSERT_OK(ts_numerics_get(&now));
    EXPECT_EQ(now, flags);
  }
  ASSERT_OK(ts_numerics_set(before));
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "flag", ts_numerics_set(16));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "NULL", ts_numerics_get(nullptr));
}

TEST(Numerics, AreTheCalls) {
  for (const int32_t process : {0, int32_t{TS_NUMERICS_FLAG_DETERMINISTIC}}) {
    ASSERT_OK(ts_numerics_set(process));
    EXPECT_EQ(is_refused(0), process != 0);
    for (int32_t switches = 0; switches <= kAll; ++switches) {
      EXPECT_EQ(is_refused(own(switches)), (switches & TS_NUMERICS_FLAG_DETERMINISTIC) != 0);
    }
    EXPECT_EQ(is_refused(0), process != 0);
    int32_t now = -1;
    ASSERT_OK(ts_numerics_get(&now));
    EXPECT_EQ(now, process);
  }
  ASSERT_OK(ts_numerics_set(TS_NUMERICS_FLAG_CONVOLUTION_TF32));
}

TEST(Numerics, HalfOfTheSwitchesAreRefused) {
  const Tensor x = make<float>({1}, {1});
  for (const int32_t flags : {int32_t{TS_NUMERICS_ON}, int32_t{TS_NUMERICS_OFF}, own(1) | own(2)}) {
    Tensor result;
    int64_t count = 0;
    const Call add = Call("aten::add", "Tensor").tensor(x).tensor(x).flags(flags);
    EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "different switches", add.run(result.out(), 1, &count));
    EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "different switches", add.run_one(result.out()));
    EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "different switches",
                 ts_tensor_backward(x, nullptr, flags));
  }
}

// Threads under four values of the switches, with short and long calls, boxed and unboxed. Each
// continues until all have done their part, so none can be locked out.
TEST(Numerics, OfThreadsDoNotMix) {
  constexpr int kCalls = 1000;
  const std::vector<int32_t> flags{0, 0, own(TS_NUMERICS_FLAG_DETERMINISTIC), own(kAll), own(0)};
  std::atomic<size_t> working{flags.size()};
  std::vector<std::thread> threads;
  for (const int32_t each : flags) {
    threads.emplace_back([&, each] {
      const bool refuses = (each & TS_NUMERICS_FLAG_DETERMINISTIC * TS_NUMERICS_ON) != 0;
      const Tensor x = test::full({64, 64}, 1);
      for (int i = 0; working > 0; ++i) {
        if (i == kCalls) --working;
        EXPECT_EQ(is_refused(each), refuses);
        Tensor product;
        EXPECT_OK(Call("aten::mm").tensor(x).tensor(x).flags(each).run_one(product.out()));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
