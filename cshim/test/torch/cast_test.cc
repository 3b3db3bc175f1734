// Casts of many tensors together.
#include "support.h"

namespace {

using test::Call;
using test::make;
using test::read;
using test::Tensor;
using Floats = std::vector<float>;

Tensor sum_of_squares(const Tensor& x) {
  Tensor square = Call("aten::mul", "Tensor").tensor(x).tensor(x).one();
  return Call("aten::sum").tensor(square).one();
}

TEST(CastAll, CastsAndItsGradients) {
  Tensor x = make<float>({1 + 1.F / 256, 3}, {2});  // the first one rounds to 1
  Tensor fixed = make<float>({2}, {1});
  Tensor whole = make<int64_t>({7}, {1});
  ASSERT_OK(ts_tensor_set_requires_grad(x, true));
  ts_tensor* given[3] = {x, fixed, whole};
  ts_tensor* made[3] = {};
  ASSERT_OK(ts_tensor_cast_all(given, 3, TS_DTYPE_BFLOAT16, made));
  EXPECT_EQ(made[2], nullptr);
  {
    Tensor cast;
    Tensor constant;
    *cast.out() = made[0];
    *constant.out() = made[1];
    EXPECT_EQ(test::describe(cast).dtype, TS_DTYPE_BFLOAT16);
    EXPECT_TRUE(test::describe(cast).requires_grad);
    EXPECT_EQ(test::describe(constant).dtype, TS_DTYPE_BFLOAT16);
    EXPECT_FALSE(test::describe(constant).requires_grad);
    Tensor loss = sum_of_squares(cast);
    ASSERT_OK(ts_tensor_backward(loss, nullptr, false));
  }
  Tensor gradient;
  ASSERT_OK(ts_tensor_get_grad(x, gradient.out()));
  EXPECT_EQ(read<float>(gradient), (Floats{2, 6}));
}

// Casts are in one allocation, without overlaps, each aligned as a separate allocation would be.
TEST(CastAll, CastsAreApartAndAligned) {
  Tensor first = make<float>({1, 2, 3}, {3});
  Tensor second = make<float>(Floats(300, 5), {300});
  Tensor third = make<float>({7}, {1});
  ts_tensor* given[3] = {first, second, third};
  ts_tensor* made[3] = {};
  ASSERT_OK(ts_tensor_cast_all(given, 3, TS_DTYPE_BFLOAT16, made));
  Tensor casts[3];
  uintptr_t address[3] = {};
  for (int i = 0; i < 3; ++i) {
    *casts[i].out() = made[i];
    ASSERT_OK(ts_tensor_get_address(casts[i], &address[i]));
    EXPECT_EQ((address[i] - address[0]) % 512, 0U) << i;
  }
  Call("aten::zero_").tensor(casts[1]).one();
  const auto values = [](const Tensor& cast) {
    return read<float>(Call("aten::to", "dtype").tensor(cast).integer(TS_DTYPE_FLOAT32).one());
  };
  EXPECT_EQ(values(casts[0]), (Floats{1, 2, 3}));
  EXPECT_EQ(values(casts[1]), Floats(300, 0));
  EXPECT_EQ(values(casts[2]), (Floats{7}));
}

TEST(CastAll, GradientsOfGradients) {
  Tensor x = make<float>({3}, {1});
  ASSERT_OK(ts_tensor_set_requires_grad(x, true));
  ts_tensor* given[1] = {x};
  Tensor cast;
  ASSERT_OK(ts_tensor_cast_all(given, 1, TS_DTYPE_BFLOAT16, cast.out()));
  ts_tensor* loss[1];
  Tensor value = sum_of_squares(cast);
  loss[0] = value;
  Tensor first;
  ASSERT_OK(ts_tensor_grads(loss, nullptr, 1, given, 1, TS_GRAD_FLAG_CREATE_GRAPH, first.out()));
  EXPECT_EQ(read<float>(first), (Floats{6}));
  Tensor second;
  ts_tensor* of[1] = {first};
  ASSERT_OK(ts_tensor_grads(of, nullptr, 1, given, 1, 0, second.out()));
  EXPECT_EQ(read<float>(second), (Floats{2}));
}

TEST(CastAll, Refuses) {
  Tensor x = make<float>({1}, {1});
  ts_tensor* given[2] = {x, nullptr};
  ts_tensor* none = nullptr;
  ts_tensor* made[2] = {x, x};
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "negative",
               ts_tensor_cast_all(given, -1, TS_DTYPE_BFLOAT16, made));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "NULL",
               ts_tensor_cast_all(nullptr, 1, TS_DTYPE_BFLOAT16, made));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "NULL",
               ts_tensor_cast_all(given, 1, TS_DTYPE_BFLOAT16, nullptr));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "NULL",
               ts_tensor_cast_all(given, 2, TS_DTYPE_FLOAT16, made));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "float16",
               ts_tensor_cast_all(given, 1, TS_DTYPE_FLOAT64, made));
  EXPECT_EQ(made[0], static_cast<ts_tensor*>(x));
  EXPECT_OK(ts_tensor_cast_all(&none, 0, TS_DTYPE_FLOAT16, &none));
}

}  // namespace
