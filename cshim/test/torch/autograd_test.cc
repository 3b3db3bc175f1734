// Backward, gradients and the seed.
#include <functional>

#include "support.h"

namespace {

using test::Call;
using test::make;
using test::read;
using test::Tensor;
using Floats = std::vector<float>;

Tensor parameter(const Floats& values) {
  Tensor tensor = make(values, {static_cast<int64_t>(values.size())});
  EXPECT_OK(ts_tensor_set_requires_grad(tensor, true));
  return tensor;
}

// sum(x * x): its gradient is 2 x.
Tensor square_sum(const Tensor& x) {
  Tensor square = Call("aten::mul", "Tensor").tensor(x).tensor(x).one();
  return Call("aten::sum").tensor(square).one();
}

Tensor grad(const Tensor& tensor) {
  Tensor gradient;
  EXPECT_OK(ts_tensor_get_grad(tensor, gradient.out()));
  return gradient;
}

TEST(Autograd, BackwardAccumulatesIntoLeaves) {
  Tensor x = parameter({1, 2, 3});
  EXPECT_EQ(static_cast<ts_tensor*>(grad(x)), nullptr);
  ASSERT_OK(ts_tensor_backward(square_sum(x), nullptr, false));
  EXPECT_EQ(read<float>(grad(x)), (Floats{2, 4, 6}));
  ASSERT_OK(ts_tensor_backward(square_sum(x), nullptr, false));
  EXPECT_EQ(read<float>(grad(x)), (Floats{4, 8, 12}));
  ts_tensor* all[1] = {x};
  ASSERT_OK(ts_tensor_clear_grads(all, 1));
  EXPECT_EQ(static_cast<ts_tensor*>(grad(x)), nullptr);
  ASSERT_OK(ts_tensor_clear_grads(all, 1));
}

TEST(Autograd, GradientsOfManyTensors) {
  Tensor x = parameter({1, 2, 3});
  Tensor none = parameter({1});
  Tensor y = parameter({5});
  ASSERT_OK(ts_tensor_backward(square_sum(x), nullptr, false));
  ASSERT_OK(ts_tensor_backward(square_sum(y), nullptr, false));
  const int64_t before = ts_tensor_count();
  ts_tensor* leaves[3] = {x, none, y};
  ts_tensor* gradients[3] = {x, x, x};
  ASSERT_OK(ts_tensor_get_grads(leaves, 3, gradients));
  EXPECT_EQ(gradients[1], nullptr);
  EXPECT_EQ(ts_tensor_count(), before + 2);
  Tensor first;
  Tensor last;
  *first.out() = gradients[0];
  *last.out() = gradients[2];
  EXPECT_EQ(read<float>(first), (Floats{2, 4, 6}));
  EXPECT_EQ(read<float>(last), (Floats{10}));
  ASSERT_OK(ts_tensor_get_grads(nullptr, 0, nullptr));

  ts_tensor* broken[2] = {x, nullptr};
  ts_tensor* untouched[2] = {};
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "NULL", ts_tensor_get_grads(broken, 2, untouched));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "NULL", ts_tensor_get_grads(leaves, 2, nullptr));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "negative", ts_tensor_get_grads(leaves, -1, untouched));
  EXPECT_EQ(untouched[0], nullptr);
  EXPECT_EQ(ts_tensor_count(), before + 2);
}

TEST(Autograd, BackwardWithAGradient) {
  Tensor x = parameter({1, 2});
  Tensor y = Call("aten::mul", "Tensor").tensor(x).tensor(x).one();
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "needs a scalar", ts_tensor_backward(y, nullptr, false));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "shape",
               ts_tensor_backward(y, make<float>({1}, {1}), false));
  ASSERT_OK(ts_tensor_backward(y, make<float>({10, 100}, {2}), false));
  EXPECT_EQ(read<float>(grad(x)), (Floats{20, 400}));
}

TEST(Autograd, BackwardTwiceNeedsTheGraph) {
  Tensor x = parameter({3});
  Tensor loss = square_sum(x);
  ASSERT_OK(ts_tensor_backward(loss, nullptr, true));
  ASSERT_OK(ts_tensor_backward(loss, nullptr, false));
  EXPECT_EQ(read<float>(grad(x)), (Floats{12}));
  testing::internal::CaptureStderr();
  EXPECT_FAILS(TS_ERROR_OPERATOR, "second time", ts_tensor_backward(loss, nullptr, false));
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "requires grad",
               ts_tensor_backward(test::scalar(1), nullptr, false));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "NULL", ts_tensor_backward(nullptr, nullptr, false));
}

TEST(Autograd, AnInPlaceWriteIsFoundByBackward) {
  Tensor x = parameter({1, 2});
  Tensor y = Call("aten::exp").tensor(x).one();
  ASSERT_OK(Call("aten::add_", "Scalar").tensor(y).integer(1).drop());
  Tensor loss = Call("aten::sum").tensor(y).one();
  EXPECT_FAILS(TS_ERROR_OPERATOR, "inplace operation", ts_tensor_backward(loss, nullptr, false));
}

TEST(Autograd, NormalizeCountsAsAWrite) {
  Tensor images = make<uint8_t>({1, 2, 3, 4}, {1, 2, 2, 1});
  Tensor slot = test::empty({1, 1, 2, 2});
  const float mean = 0;
  const float std = 1;
  ASSERT_OK(ts_tensor_normalize_images(slot, images, &mean, &std, 1));
  Tensor w = make<float>({2}, {1, 1, 1, 1});
  ASSERT_OK(ts_tensor_set_requires_grad(w, true));
  Tensor loss =
      Call("aten::sum").tensor(Call("aten::mul", "Tensor").tensor(slot).tensor(w).one()).one();
  ASSERT_OK(ts_tensor_normalize_images(slot, images, &mean, &std, 1));
  EXPECT_FAILS(TS_ERROR_OPERATOR, "inplace operation", ts_tensor_backward(loss, nullptr, false));
}

TEST(Autograd, GradientsCanBeSet) {
  Tensor x = parameter({1, 2});
  ASSERT_OK(ts_tensor_set_grad(x, make<float>({5, 6}, {2})));
  EXPECT_EQ(read<float>(grad(x)), (Floats{5, 6}));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "shape", ts_tensor_set_grad(x, make<float>({5}, {1})));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "dtype",
               ts_tensor_set_grad(x, make<double>({5, 6}, {2})));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "its own", ts_tensor_set_grad(x, x));
  Tensor y = Call("aten::mul", "Tensor").tensor(x).tensor(x).one();
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "leaf", ts_tensor_set_grad(y, make<float>({5, 6}, {2})));
  ASSERT_OK(ts_tensor_set_grad(x, nullptr));
  EXPECT_EQ(static_cast<ts_tensor*>(grad(x)), nullptr);
  ASSERT_OK(ts_tensor_set_grad(x, nullptr));
}

TEST(Autograd, ClearChecksAllBeforeItClearsAny) {
  Tensor x = parameter({1});
  ASSERT_OK(ts_tensor_backward(square_sum(x), nullptr, false));
  ts_tensor* all[2] = {x, nullptr};
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "NULL", ts_tensor_clear_grads(all, 2));
  EXPECT_NE(static_cast<ts_tensor*>(grad(x)), nullptr);
}

TEST(Autograd, RequiresGradIsForLeavesOfFloats) {
  Tensor x = parameter({1});
  Tensor y = Call("aten::mul", "Tensor").tensor(x).tensor(x).one();
  EXPECT_OK(ts_tensor_set_requires_grad(y, true));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "computed", ts_tensor_set_requires_grad(y, false));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "floating point",
               ts_tensor_set_requires_grad(make<int64_t>({1}, {1}), true));
  ASSERT_OK(ts_tensor_set_requires_grad(x, false));
  EXPECT_FALSE(test::describe(x).requires_grad);
  // A tensor that is not a leaf has no gradient, and asking for it causes no warning.
  testing::internal::CaptureStderr();
  EXPECT_EQ(static_cast<ts_tensor*>(grad(y)), nullptr);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

TEST(Autograd, TheSeedRepeats) {
  const auto draw = [] { return read<float>(Call("aten::rand").ints({8}).one()); };
  ASSERT_OK(ts_random_seed(5));
  const Floats first = draw();
  EXPECT_NE(draw(), first);
  ASSERT_OK(ts_random_seed(5));
  EXPECT_EQ(draw(), first);
}

void draws_again(int32_t device, const std::function<Floats()>& draw) {
  ASSERT_OK(ts_random_seed(5));
  draw();
  Tensor state;
  ASSERT_OK(ts_random_get_state(device, state.out()));
  const Floats first = draw();
  EXPECT_NE(draw(), first);
  ASSERT_OK(ts_random_set_state(device, state));
  EXPECT_EQ(draw(), first);
}

TEST(Generator, AStateRepeats) {
  draws_again(TS_DEVICE_CPU, [] { return read<float>(Call("aten::rand").ints({8}).one()); });
}

TEST(Generator, WrongStatesAreRefused) {
  Tensor state;
  ASSERT_OK(ts_random_get_state(TS_DEVICE_CPU, state.out()));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "NULL", ts_random_get_state(TS_DEVICE_CPU, nullptr));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "NULL", ts_random_set_state(TS_DEVICE_CPU, nullptr));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "uint8",
               ts_random_set_state(TS_DEVICE_CPU, make<float>({1}, {1})));
  EXPECT_FAILS(TS_ERROR_OPERATOR, "",
               ts_random_set_state(TS_DEVICE_CPU, make<uint8_t>({1, 2}, {2})));
  EXPECT_FAILS(TS_ERROR_NO_DEVICE, "device", ts_random_set_state(ts_device_count(), state));
}

TEST(GeneratorGpu, AStateRepeats) {
  NEEDS_GPUS(1);
  draws_again(
      0, [] { return read<float>(Call("aten::rand").ints({8}).none().none().device(0).one()); });
}

TEST(AutogradGpu, GradientsAreOrderedOnTheCallersStream) {
  NEEDS_GPUS(1);
  Tensor x = test::full({1 << 16}, 3, 0);
  ASSERT_OK(ts_tensor_set_requires_grad(x, true));
  const ts_stream side = test::pool_stream();
  ASSERT_OK(ts_wait_cuda_stream(side, {0, 0}));
  ts_stream_guard guard{};
  ASSERT_OK(ts_stream_guard_enter(side, &guard));
  for (int round = 1; round <= 20; ++round) {
    ASSERT_OK(ts_tensor_backward(square_sum(x), nullptr, false));
    EXPECT_EQ(read<float>(grad(x))[(1 << 16) - 1], 6.0F * static_cast<float>(round));
  }
  EXPECT_TRUE(test::current_stream() == side) << "backward leaves the thread's streams alone";
  ASSERT_OK(ts_stream_guard_exit(guard));
}

TEST(AutogradGpu, TheSeedRepeatsOnTheGpu) {
  NEEDS_GPUS(1);
  const auto draw = [] {
    return read<float>(Call("aten::rand").ints({8}).none().none().device(0).one());
  };
  ASSERT_OK(ts_random_seed(5));
  const Floats first = draw();
  ASSERT_OK(ts_random_seed(5));
  EXPECT_EQ(draw(), first);
}

TEST(Autograd, GradsAccumulateNothing) {
  Tensor x = test::full({3}, 2);
  Tensor unused = test::full({3}, 2);
  EXPECT_OK(ts_tensor_set_requires_grad(x, true));
  EXPECT_OK(ts_tensor_set_requires_grad(unused, true));
  Tensor y = test::Call("aten::sum").tensor(test::Call("aten::square").tensor(x).one()).one();
  ts_tensor* outputs[] = {y};
  ts_tensor* inputs[] = {x, unused};
  ts_tensor* gradients[] = {nullptr, nullptr};
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "unknown flag",
               ts_tensor_grads(outputs, nullptr, 1, inputs, 1, 4096, gradients));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "no inputs",
               ts_tensor_grads(outputs, nullptr, 1, inputs, 0, 0, gradients));
  EXPECT_FAILS(
      TS_ERROR_OPERATOR, "",
      ts_tensor_grads(outputs, nullptr, 1, inputs, 2, TS_GRAD_FLAG_RETAIN_GRAPH, gradients));
  EXPECT_EQ(gradients[0], nullptr);
  ASSERT_OK(ts_tensor_grads(outputs, nullptr, 1, inputs, 2, TS_GRAD_FLAG_ALLOW_UNUSED, gradients));
  EXPECT_EQ(gradients[1], nullptr);
  EXPECT_EQ(test::read<float>(gradients[0]), (std::vector<float>{4, 4, 4}));
  ts_tensor_free(gradients[0]);
  ts_tensor* left = nullptr;
  EXPECT_OK(ts_tensor_get_grad(x, &left));
  EXPECT_EQ(left, nullptr);
}

}  // namespace
