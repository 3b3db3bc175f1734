// Generators of random numbers: seeds, states, refused arguments. Go tests cover graphs.
#include "support.h"

namespace {

using test::Call;
using test::read;
using test::Tensor;

class Generator {
 public:
  explicit Generator(uint64_t seed, int32_t device = TS_DEVICE_CPU) {
    EXPECT_OK(ts_generator_new(device, seed, &handle_));
  }
  ~Generator() { ts_generator_free(handle_); }
  Generator(const Generator&) = delete;
  Generator& operator=(const Generator&) = delete;
  operator ts_generator*() const { return handle_; }  // NOLINT: as the C functions take it

 private:
  ts_generator* handle_ = nullptr;
};

std::vector<float> draw(ts_generator* generator) {
  Tensor x = test::full({4}, 0);
  EXPECT_OK(Call("aten::uniform_")
                .tensor(x)
                .real(0)
                .real(1)
                .raw(TS_ARG_KIND_GENERATOR, 0,
                     static_cast<int64_t>(reinterpret_cast<uintptr_t>(generator)))
                .drop());
  return read<float>(x);
}

TEST(Generator, EqualStatesDrawEqualNumbers) {
  Generator a(3);
  Generator b(3);
  const auto first = draw(a);
  EXPECT_EQ(first, draw(b));
  Tensor state;
  EXPECT_OK(ts_generator_get_state(a, state.out()));
  const auto second = draw(a);
  EXPECT_NE(first, second);
  EXPECT_OK(ts_generator_set_state(b, state));
  EXPECT_EQ(second, draw(b));
  uint64_t seed = 0;
  EXPECT_OK(ts_generator_get_seed(a, &seed));
  EXPECT_EQ(seed, 3U);
  EXPECT_OK(ts_generator_set_seed(a, 3));
  EXPECT_EQ(first, draw(a));
}

TEST(Generator, TheDefaultIsThatOfOperators) {
  ts_generator* generator = nullptr;
  ASSERT_OK(ts_generator_new_default(TS_DEVICE_CPU, &generator));
  EXPECT_OK(ts_generator_set_seed(generator, 8));
  Tensor x = test::full({4}, 0);
  EXPECT_OK(Call("aten::uniform_").tensor(x).drop());
  Generator same(8);
  EXPECT_EQ(read<float>(x), draw(same));
  ts_generator_free(generator);
}

TEST(Generator, WrongArgumentsAreRefused) {
  ts_generator* made = nullptr;
  EXPECT_FAILS(TS_ERROR_NO_DEVICE, "device", ts_generator_new(ts_device_count(), 1, &made));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "NULL", ts_generator_new(TS_DEVICE_CPU, 1, nullptr));
  EXPECT_EQ(made, nullptr);
  uint64_t value = 7;
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "NULL", ts_generator_get_seed(nullptr, &value));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "NULL", ts_generator_set_seed(nullptr, 1));
  Generator cpu(1);
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "NULL", ts_generator_get_seed(cpu, nullptr));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "multiple of 4", ts_generator_set_offset(cpu, 3));
  EXPECT_FAILS(TS_ERROR_OPERATOR, "", ts_generator_get_offset(cpu, &value));
  EXPECT_EQ(value, 7U);
  Tensor state = test::full({4}, 0);
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "uint8", ts_generator_set_state(cpu, state));
  EXPECT_FAILS(
      TS_ERROR_INVALID_ARGUMENT, "generator is NULL",
      Call("aten::uniform_").tensor(state).real(0).real(1).raw(TS_ARG_KIND_GENERATOR, 0, 0).drop());
  ts_generator_free(nullptr);
}

}  // namespace
