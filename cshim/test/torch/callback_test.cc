// Hooks and callbacks at the end of a backward pass.
#include <functional>
#include <map>
#include <set>

#include "support.h"

namespace {

using test::Call;
using test::make;
using test::read;
using test::Tensor;
using Floats = std::vector<float>;

// The functions of a test, by context.
using Body = std::function<ts_error*(int32_t flags, ts_tensor* const* tensors, int64_t count,
                                     ts_tensor** results, int64_t result_count)>;
std::map<int64_t, Body>& bodies() {
  static std::map<int64_t, Body> all;
  return all;
}

ts_error* dispatch(int64_t context, int32_t flags, ts_tensor* const* tensors, int64_t count,
                   ts_tensor** results, int64_t result_count) {
  return bodies().at(context)(flags, tensors, count, results, result_count);
}

std::set<int64_t> taken() {
  int64_t contexts[8];
  const int64_t count = ts_callbacks_take(contexts, 8);
  return {contexts, contexts + count};
}

Tensor parameter(const Floats& values) {
  Tensor tensor = make(values, {static_cast<int64_t>(values.size())});
  EXPECT_OK(ts_tensor_set_requires_grad(tensor, true));
  return tensor;
}

Tensor square_sum(const Tensor& x) {
  Tensor square = Call("aten::mul", "Tensor").tensor(x).tensor(x).one();
  return Call("aten::sum").tensor(square).one();
}

Floats grad(const Tensor& tensor) {
  Tensor gradient;
  EXPECT_OK(ts_tensor_get_grad(tensor, gradient.out()));
  return read<float>(gradient);
}

TEST(Callback, AGradientHookReplacesTheGradient) {
  Tensor x = parameter({1, 2});
  bodies()[1] = [](int32_t flags, ts_tensor* const* tensors, int64_t count, ts_tensor** results,
                   int64_t result_count) -> ts_error* {
    EXPECT_EQ(flags, 0);
    EXPECT_EQ(count, 1);
    EXPECT_EQ(result_count, 1);
    EXPECT_EQ(ts_callback_depth(), 1);
    EXPECT_EQ(read<float>(tensors[0]), (Floats{2, 4}));
    results[0] = make<float>({10, 20}, {2}).release();
    return nullptr;
  };
  const int64_t before = ts_tensor_count();
  ts_hook* hook = nullptr;
  ASSERT_OK(ts_tensor_add_gradient_hook(x, dispatch, 1, &hook));
  ASSERT_OK(ts_tensor_backward(square_sum(x), nullptr, false));
  EXPECT_EQ(ts_callback_depth(), 0);
  EXPECT_EQ(grad(x), (Floats{10, 20}));
  EXPECT_EQ(ts_tensor_count(), before);
  EXPECT_EQ(taken(), std::set<int64_t>{});
  ts_hook_remove(hook);
  ts_hook_remove(hook);
  EXPECT_EQ(taken(), std::set<int64_t>{1});
  ts_hook_free(hook);
  ASSERT_OK(ts_tensor_backward(square_sum(x), nullptr, false));
  EXPECT_EQ(grad(x), (Floats{12, 24}));
}

TEST(Callback, AnAccumulationHookSeesTheSum) {
  Tensor x = parameter({3});
  int calls = 0;
  bodies()[2] = [&](int32_t /*flags*/, ts_tensor* const* tensors, int64_t /*count*/,
                    ts_tensor** /*results*/, int64_t result_count) -> ts_error* {
    EXPECT_EQ(result_count, 0);
    Tensor gradient;
    EXPECT_OK(ts_tensor_get_grad(tensors[0], gradient.out()));
    EXPECT_EQ(read<float>(gradient), (Floats{6.0F * static_cast<float>(++calls)}));
    EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "post-accumulate-gradient hook",
                 ts_tensor_backward(square_sum(parameter({1})), nullptr, false));
    return nullptr;
  };
  ts_hook* hook = nullptr;
  ASSERT_OK(ts_tensor_add_accumulation_hook(x, dispatch, 2, &hook));
  ts_hook_free(hook);
  for (int i = 0; i < 2; ++i) ASSERT_OK(ts_tensor_backward(square_sum(x), nullptr, false));
  EXPECT_EQ(calls, 2);
  x.free();
  // Returned with the tensor, since the hook was not removed.
  EXPECT_EQ(taken(), std::set<int64_t>{2});
}

TEST(Callback, ErrorsEndThePass) {
  Tensor x = parameter({3});
  const int64_t before = ts_tensor_count();
  bodies()[3] = [](int32_t, ts_tensor* const*, int64_t, ts_tensor** results, int64_t) -> ts_error* {
    results[0] = make<float>({1}, {1}).release();  // is freed
    return ts_error_new(TS_ERROR_CALLBACK, "test", "as planned");
  };
  ts_hook* hook = nullptr;
  ASSERT_OK(ts_tensor_add_gradient_hook(x, dispatch, 3, &hook));
  EXPECT_FAILS(TS_ERROR_CALLBACK, "as planned", ts_tensor_backward(square_sum(x), nullptr, false));
  EXPECT_EQ(ts_tensor_count(), before);
  bodies()[3] = [](int32_t, ts_tensor* const*, int64_t, ts_tensor** results, int64_t) -> ts_error* {
    results[0] = make<float>({1, 2}, {2}).release();
    return nullptr;
  };
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "another shape",
               ts_tensor_backward(square_sum(x), nullptr, false));
  EXPECT_EQ(ts_tensor_count(), before);
  ts_hook_remove(hook);
  ts_hook_free(hook);
  EXPECT_EQ(taken(), std::set<int64_t>{3});
}

TEST(Callback, TheEndOfAPass) {
  Tensor x = parameter({3});
  bool ended = false;
  bodies()[4] = [](int32_t, ts_tensor* const*, int64_t, ts_tensor**, int64_t) {
    return ts_backward_add_callback(dispatch, 5);
  };
  bodies()[5] = [&](int32_t, ts_tensor* const*, int64_t count, ts_tensor**,
                    int64_t result_count) -> ts_error* {
    EXPECT_EQ(count + result_count, 0);
    EXPECT_EQ(grad(x), (Floats{6}));
    ended = true;
    return nullptr;
  };
  ts_hook* hook = nullptr;
  ASSERT_OK(ts_tensor_add_gradient_hook(x, dispatch, 4, &hook));
  ASSERT_OK(ts_tensor_backward(square_sum(x), nullptr, false));
  EXPECT_TRUE(ended);
  EXPECT_EQ(taken(), std::set<int64_t>{5});
  ts_hook_remove(hook);
  ts_hook_free(hook);
  EXPECT_EQ(taken(), std::set<int64_t>{4});
}

// y = x * x as a function of the caller, whose backward returns 2 x times the gradient.
TEST(Callback, AFunctionIsANodeOfTheGraph) {
  Tensor x = parameter({3});
  Tensor w = parameter({5});
  bodies()[6] = [](int32_t flags, ts_tensor* const* tensors, int64_t count, ts_tensor** results,
                   int64_t result_count) -> ts_error* {
    EXPECT_EQ(flags, 0);
    EXPECT_EQ(count, 4);  // two gradients and two saved tensors
    EXPECT_EQ(result_count, 2);
    EXPECT_EQ(tensors[1], nullptr);
    EXPECT_EQ(read<float>(tensors[3]), (Floats{9}));
    results[0] =
        make<float>({read<float>(tensors[0])[0] * 2 * read<float>(tensors[2])[0]}, {1}).release();
    return nullptr;
  };
  Tensor square =
      Call("aten::mul", "Tensor").tensor(x).tensor(x).flags(TS_OPERATOR_FLAG_NO_GRAD).one();
  Tensor constant = make<float>({1}, {1});
  ts_tensor* inputs[2] = {x, w};
  ts_tensor* outputs[2] = {square, constant};
  const bool without_gradient[2] = {false, true};
  ts_tensor* saved[2] = {x, square};
  ts_function function{"square", inputs, 2, outputs, 2, without_gradient, saved, 2, dispatch, 6};
  ts_tensor* results[2] = {};
  ASSERT_OK(ts_function_attach(function, results));
  EXPECT_TRUE(test::describe(results[0]).requires_grad);
  EXPECT_FALSE(test::describe(results[1]).requires_grad);
  ASSERT_OK(ts_tensor_backward(results[0], nullptr, true));
  ASSERT_OK(ts_tensor_backward(results[0], nullptr, false));
  EXPECT_EQ(grad(x), (Floats{12}));
  EXPECT_FAILS(TS_ERROR_OPERATOR, "second time", ts_tensor_backward(results[0], nullptr, false));
  square.free();
  EXPECT_EQ(taken(), std::set<int64_t>{});
  ts_tensor_free_all(results, 2);
  EXPECT_EQ(taken(), std::set<int64_t>{6});

  results[0] = nullptr;
  Tensor recorded = square_sum(x);
  const auto refused = [&](const char* text, ts_function changed) {
    EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, text, ts_function_attach(changed, results));
    EXPECT_EQ(results[0], nullptr);
  };
  ts_tensor* constants[2] = {constant, constant};
  ts_tensor* with_history[1] = {recorded};
  ts_tensor* missing[1] = {nullptr};
  refused("name is NULL", {nullptr, inputs, 2, constants, 1, nullptr, nullptr, 0, dispatch, 6});
  refused("backward is NULL", {"f", inputs, 2, constants, 1, nullptr, nullptr, 0, nullptr, 6});
  refused("no outputs", {"f", inputs, 2, constants, 0, nullptr, nullptr, 0, dispatch, 6});
  refused("inputs", {"f", nullptr, 2, constants, 1, nullptr, nullptr, 0, dispatch, 6});
  refused("saved is NULL", {"f", inputs, 2, constants, 1, nullptr, missing, 1, dispatch, 6});
  refused("no input requires", {"f", constants, 2, constants, 1, nullptr, nullptr, 0, dispatch, 6});
  refused("has a history", {"f", inputs, 2, with_history, 1, nullptr, nullptr, 0, dispatch, 6});
  function.name = "f";
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "results is NULL", ts_function_attach(function, nullptr));
  EXPECT_EQ(taken(), std::set<int64_t>{});
}

TEST(Callback, GraphsAddToGradientsWithNodesOfTheirOwn) {
  Tensor x = parameter({3});
  Tensor first = square_sum(x);
  ts_tensor* leaves[1] = {x};
  ASSERT_OK(ts_tensor_forget_accumulators(leaves, 1));
  ASSERT_OK(ts_tensor_backward(square_sum(x), nullptr, false));
  ASSERT_OK(ts_tensor_backward(first, nullptr, false));
  EXPECT_EQ(grad(x), (Floats{12}));
  ts_tensor* results[1] = {first};
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "not a leaf", ts_tensor_forget_accumulators(results, 1));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "NULL", ts_tensor_forget_accumulators(nullptr, 1));
  ASSERT_OK(ts_tensor_forget_accumulators(nullptr, 0));
}

TEST(Callback, LeavesThatAreNotGivenAreFound) {
  Tensor x = parameter({3});
  Tensor w = parameter({4, 5});
  Tensor product = Call("aten::mul", "Tensor").tensor(x).tensor(w).one();
  ts_tensor* outputs[2] = {product, x};
  ts_tensor* leaves[2] = {x, w};
  EXPECT_OK(ts_tensor_check_leaves(outputs, 2, leaves, 2));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "Float [2]",
               ts_tensor_check_leaves(outputs, 2, leaves, 1));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "Float [1]",
               ts_tensor_check_leaves(outputs + 1, 1, leaves + 1, 1));
  EXPECT_OK(ts_tensor_check_leaves(nullptr, 0, nullptr, 0));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "NULL", ts_tensor_check_leaves(nullptr, 1, nullptr, 0));
}

TEST(Callback, RefusedArguments) {
  Tensor x = parameter({3});
  Tensor constant = make<float>({1}, {1});
  Tensor result = square_sum(x);
  auto* const untouched = reinterpret_cast<ts_hook*>(1);
  ts_hook* hook = untouched;
  const auto refused = [&](const char* text, ts_error* error) {
    EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, text, error);
    EXPECT_EQ(hook, untouched);
  };
  refused("callback is NULL", ts_tensor_add_gradient_hook(x, nullptr, 1, &hook));
  refused("hook is NULL", ts_tensor_add_gradient_hook(x, dispatch, 1, nullptr));
  refused("tensor is NULL", ts_tensor_add_gradient_hook(nullptr, dispatch, 1, &hook));
  refused("no gradient", ts_tensor_add_gradient_hook(constant, dispatch, 1, &hook));
  refused("only a leaf", ts_tensor_add_accumulation_hook(constant, dispatch, 1, &hook));
  refused("only a leaf", ts_tensor_add_accumulation_hook(result, dispatch, 1, &hook));
  refused("callback is NULL", ts_backward_add_callback(nullptr, 1));
  refused("no backward pass", ts_backward_add_callback(dispatch, 1));
  EXPECT_EQ(taken(), std::set<int64_t>{});  // contexts of failed calls stay with the caller
  EXPECT_EQ(ts_callbacks_take(nullptr, 1), 0);
  ts_hook_remove(nullptr);
  ts_hook_free(nullptr);
  const ts_operator* op = nullptr;
  EXPECT_FAILS(TS_ERROR_UNSUPPORTED, "ts_tensor_backward",
               ts_operator_find("aten::_backward", "", &op));
}

}  // namespace
