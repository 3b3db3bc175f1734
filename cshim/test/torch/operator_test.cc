// The generic operator call with every kind of argument, valid and invalid.
#include <ATen/record_function.h>
#include <dlfcn.h>
#include <pthread.h>

#include <cmath>
#include <memory>
#include <stdexcept>
#include <thread>

#include "support.h"

namespace {

using test::Call;
using test::make;
using test::read;
using test::scalar;
using test::shape;
using test::Tensor;
using Floats = std::vector<float>;
using Ints = std::vector<int64_t>;

TEST(Operator, FindsOnceAndDescribesItself) {
  const ts_operator* first = nullptr;
  const ts_operator* second = nullptr;
  ASSERT_OK(ts_operator_find("aten::add", "Tensor", &first));
  ASSERT_OK(ts_operator_find("aten::add", "Tensor", &second));
  EXPECT_EQ(first, second);
  EXPECT_STREQ(ts_operator_schema(first),
               "aten::add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor");
}

TEST(Operator, IsFoundFromManyThreads) {
  std::vector<const ts_operator*> found(8, nullptr);
  std::vector<std::thread> threads;
  for (auto& op : found) {
    threads.emplace_back([&op] { EXPECT_OK(ts_operator_find("aten::sub", "Tensor", &op)); });
  }
  for (auto& thread : threads) thread.join();
  for (const auto* op : found) EXPECT_EQ(op, found[0]);
}

TEST(Operator, NotFoundNamesTheOverloads) {
  const ts_operator* op = nullptr;
  EXPECT_FAILS(TS_ERROR_NOT_FOUND, "\"Tensor\"", ts_operator_find("aten::add", "Tensr", &op));
  EXPECT_FAILS(TS_ERROR_NOT_FOUND, "aten::no_such_thing",
               ts_operator_find("aten::no_such_thing", "", &op));
  EXPECT_FAILS(TS_ERROR_NOT_FOUND, "add", ts_operator_find("add", "", &op));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "NULL", ts_operator_find(nullptr, "", &op));
  EXPECT_EQ(op, nullptr);
}

TEST(Operator, TakesTensorsAndScalars) {
  Tensor a = make<float>({1, 2, 3}, {3});
  Tensor b = make<float>({10, 20, 30}, {3});
  EXPECT_EQ(read<float>(Call("aten::add", "Tensor").tensor(a).tensor(b).one()),
            (Floats{11, 22, 33}));
  EXPECT_EQ(read<float>(Call("aten::add", "Tensor").tensor(a).tensor(b).fallback().one()),
            (Floats{11, 22, 33}));
  EXPECT_EQ(read<float>(Call("aten::add", "Tensor").tensor(a).tensor(b).integer(2).one()),
            (Floats{21, 42, 63}));
  EXPECT_EQ(read<float>(Call("aten::add", "Tensor").tensor(a).tensor(b).real(0.5).one()),
            (Floats{6, 12, 18}));
  EXPECT_EQ(read<float>(Call("aten::mul", "Scalar").tensor(a).real(-1).one()),
            (Floats{-1, -2, -3}));
  EXPECT_EQ(read<float>(Call("aten::add", "Scalar").tensor(a).boolean(true).one()),
            (Floats{2, 3, 4}));
}

TEST(Operator, AScalarKeepsItsKind) {
  // An int times a bool scalar stays int, times a double becomes float: type promotion sees the
  // scalar.
  Tensor ints = make<int64_t>({2}, {1});
  EXPECT_EQ(test::describe(Call("aten::mul", "Scalar").tensor(ints).boolean(true).one()).dtype,
            TS_DTYPE_INT64);
  EXPECT_EQ(test::describe(Call("aten::mul", "Scalar").tensor(ints).real(1).one()).dtype,
            TS_DTYPE_FLOAT32);
}

TEST(Operator, TakesListsAndBools) {
  Tensor a = make<float>({1, 2, 3, 4, 5, 6}, {2, 3});
  EXPECT_EQ(read<float>(Call("aten::sum", "dim_IntList").tensor(a).ints({0}).boolean(true).one()),
            (Floats{5, 7, 9}));
  EXPECT_EQ(read<float>(Call("aten::sum", "dim_IntList").tensor(a).none().one()), (Floats{21}));
  EXPECT_EQ(shape(Call("aten::permute").tensor(a).ints({1, 0}).one()), (Ints{3, 2}));
  EXPECT_EQ(shape(Call("aten::reshape").tensor(a).ints({3, -1}).one()), (Ints{3, 2}));
  EXPECT_EQ(read<float>(Call("aten::flip").tensor(a).ints({1}).one()), (Floats{3, 2, 1, 6, 5, 4}));
  // double[]: explicit scale factors of an upsampling.
  Tensor image = make<float>({1, 2, 3, 4}, {1, 1, 2, 2});
  EXPECT_EQ(
      shape(Call("aten::upsample_nearest2d", "vec").tensor(image).none().doubles({2.0, 3.0}).one()),
      (Ints{1, 1, 4, 6}));
}

TEST(Operator, TakesListsOfTensors) {
  Tensor a = make<float>({1, 2}, {2});
  Tensor b = make<float>({3}, {1});
  EXPECT_EQ(read<float>(Call("aten::cat").tensors({a, b, a}).integer(0).one()),
            (Floats{1, 2, 3, 1, 2}));
  // Tensor?[]: NULL means an absent index, as in x[:, idx].
  Tensor x = make<float>({1, 2, 3, 4, 5, 6}, {2, 3});
  Tensor index = make<int64_t>({2, 0}, {2});
  EXPECT_EQ(read<float>(Call("aten::index", "Tensor").tensor(x).tensors({nullptr, index}).one()),
            (Floats{3, 1, 6, 4}));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "is NULL",
               Call("aten::cat").tensors({a, nullptr}).drop());
}

TEST(Operator, TakesListsOfScalars) {
  Tensor a = make<float>({1, 2}, {2});
  Tensor b = make<float>({3}, {1});
  ASSERT_OK(Call("aten::_foreach_mul_", "ScalarList").tensors({a, b}).doubles({2.0, 10.0}).drop());
  EXPECT_EQ(read<float>(a), (Floats{2, 4}));
  EXPECT_EQ(read<float>(b), (Floats{30}));
}

TEST(Operator, TakesBoolLists) {
  // std::array<bool, 3> output_mask: only the gradient of the weight.
  Tensor x = make<float>({1, 2, 3, 4}, {1, 1, 2, 2});
  Tensor w = make<float>({1}, {1, 1, 1, 1});
  auto grads = Call("aten::convolution_backward")
                   .tensor(x)
                   .tensor(x)
                   .tensor(w)
                   .none()
                   .ints({1, 1})
                   .ints({0, 0})
                   .ints({1, 1})
                   .boolean(false)
                   .ints({0, 0})
                   .integer(1)
                   .ints({0, 1, 0}, TS_ARG_KIND_BOOLS)
                   .all();
  ASSERT_EQ(grads.size(), 3U);
  EXPECT_EQ(static_cast<ts_tensor*>(grads[0]), nullptr) << "an undefined result is NULL";
  EXPECT_EQ(read<float>(grads[1]), (Floats{30}));
  EXPECT_EQ(static_cast<ts_tensor*>(grads[2]), nullptr);
}

TEST(Operator, TakesDtypesLayoutsDevicesAndStrings) {
  Tensor made = Call("aten::full")
                    .ints({2, 2})
                    .real(3)
                    .integer(TS_DTYPE_INT32)
                    .integer(0)
                    .device(TS_DEVICE_CPU)
                    .boolean(false)
                    .one();
  EXPECT_EQ(test::describe(made).dtype, TS_DTYPE_INT32);
  EXPECT_EQ(read<int32_t>(made), (std::vector<int32_t>{3, 3, 3, 3}));
  Tensor image = make<float>(Floats(24, 1), {1, 2, 3, 4});
  EXPECT_TRUE(
      test::describe(
          Call("aten::contiguous").tensor(image).integer(TS_MEMORY_FORMAT_CHANNELS_LAST).one())
          .channels_last);
  Tensor x = make<float>({1}, {1});
  Tensor exact = Call("aten::gelu").tensor(x).one();
  Tensor close = Call("aten::gelu").tensor(x).text("tanh").one();
  EXPECT_NE(read<float>(exact)[0], read<float>(close)[0]);
  EXPECT_NEAR(read<float>(exact)[0], read<float>(close)[0], 1e-3);
  EXPECT_FAILS(TS_ERROR_OPERATOR, "approximate", Call("aten::gelu").tensor(x).text("cubic").drop());
}

TEST(Operator, FillsDefaultsOfTheSchema) {
  Tensor image = make<float>({1, 2, 3, 4, 5, 6, 7, 8, 9}, {1, 1, 3, 3});
  Tensor weight = make<float>({1}, {1, 1, 1, 1});
  // bias, stride, padding, dilation, groups are left out.
  EXPECT_EQ(shape(Call("aten::conv2d").tensor(image).tensor(weight).one()), (Ints{1, 1, 3, 3}));
  EXPECT_EQ(shape(Call("aten::conv2d").tensor(image).tensor(weight).fallback().ints({2, 2}).one()),
            (Ints{1, 1, 2, 2}));
}

TEST(Operator, HandsOutAllResultsInOrder) {
  Tensor x = make<float>({3, 1, 2}, {3});
  auto results = Call("aten::topk").tensor(x).integer(2).all();
  ASSERT_EQ(results.size(), 2U);
  EXPECT_EQ(read<float>(results[0]), (Floats{3, 2}));
  EXPECT_EQ(read<int64_t>(results[1]), (Ints{0, 2}));
  auto parts = Call("aten::split", "Tensor").tensor(x).integer(1).all();
  ASSERT_EQ(parts.size(), 3U);
  EXPECT_EQ(read<float>(parts[2]), (Floats{2}));
}

TEST(Operator, ChecksTheRoomForResults) {
  Tensor x = make<float>({3, 1, 2}, {3});
  Tensor kept;
  int64_t count = -7;
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "returns 2 tensors",
               Call("aten::topk").tensor(x).integer(2).run(kept.out(), 1, &count));
  ts_tensor* ten[10] = {};
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "call ts_operator_call_list",
               Call("aten::split", "Tensor").tensor(x).integer(1).run(ten, 10, &count));
  // It returns a tensor, and sometimes a second one.
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "call ts_operator_call_list",
               Call("quantized::linear_unpack", "legacy").tensor(x).run(ten, 1, &count));
  EXPECT_EQ(ten[0], nullptr);
  EXPECT_EQ(count, -7) << "a failed call leaves its outputs";
}

TEST(Operator, AListOfResultsThatIsNotTakenIsFreed) {
  Tensor x = make<float>({3, 1, 2}, {3});
  const int64_t before = ts_tensor_count();
  ts_tensor_list* list = nullptr;
  int64_t count = 0;
  ASSERT_OK(Call("aten::unbind", "int").tensor(x).run_list(nullptr, 0, &list, &count));
  EXPECT_EQ(count, 3);
  ts_tensor_list_free(list);
  ts_tensor_list_free(nullptr);
  EXPECT_EQ(ts_tensor_count(), before);
  list = nullptr;
  EXPECT_FAILS(
      TS_ERROR_OPERATOR, "",
      Call("aten::unbind", "int").tensor(x).integer(7).run_list(nullptr, 0, &list, &count));
  EXPECT_EQ(list, nullptr);
}

TEST(Operator, AListOfResultsIsWrittenWhereThereIsRoom) {
  Tensor x = make<float>({3, 1, 2}, {3});
  const int64_t before = ts_tensor_count();
  // Called unboxed, boxed, and for an operator that returns no list.
  const auto lists = [&] {
    return std::vector<std::pair<Call, int64_t>>{
        {Call("aten::unbind", "int").tensor(x), 3},
        {Call("aten::hsplit", "array").tensor(x).ints({1, 2}), 3},
        {Call("aten::topk").tensor(x).integer(2), 2},
    };
  };
  for (const auto& [call, length] : lists()) {
    for (int64_t capacity = 0; capacity <= 4; ++capacity) {
      SCOPED_TRACE(std::to_string(length) + " results and room for " + std::to_string(capacity));
      ts_tensor* out[4] = {};
      ts_tensor_list* list = nullptr;
      int64_t count = 0;
      ASSERT_OK(call.run_list(out, capacity, &list, &count));
      EXPECT_EQ(count, length);
      EXPECT_EQ(list == nullptr, length <= capacity);
      EXPECT_EQ(ts_tensor_count() - before, length <= capacity ? length : 0);
      for (int64_t i = 0; i < 4; ++i) {
        EXPECT_EQ(out[i] != nullptr, length <= capacity && i < length);
        ts_tensor_free(out[i]);
      }
      ts_tensor_list_free(list);
    }
  }
  EXPECT_EQ(ts_tensor_count(), before);
  ts_tensor_list* list = nullptr;
  int64_t count = -7;
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "results is NULL",
               Call("aten::unbind", "int").tensor(x).run_list(nullptr, 3, &list, &count));
  EXPECT_EQ(count, -7);
}

TEST(Operator, InPlaceResultsCanBeDropped) {
  Tensor a = make<float>({1, 2}, {2});
  const int64_t before = ts_tensor_count();
  int64_t count = 0;
  Tensor other = make<float>({1, 1}, {2});
  ASSERT_OK(Call("aten::add_", "Tensor").tensor(a).tensor(other).run(nullptr, 0, &count));
  EXPECT_EQ(count, 1);
  EXPECT_EQ(read<float>(a), (Floats{2, 3}));
  EXPECT_EQ(ts_tensor_count(), before + 1);
}

std::vector<uint8_t> bytes(const ts_tensor* tensor) {
  std::vector<uint8_t> all(static_cast<size_t>(test::describe(tensor).bytes));
  EXPECT_OK(ts_tensor_read(tensor, all.data(), all.size()));
  return all;
}

void expect_same(const ts_tensor* got, const ts_tensor* want) {
  EXPECT_EQ(test::describe(got).dtype, test::describe(want).dtype);
  EXPECT_EQ(test::describe(got).channels_last, test::describe(want).channels_last);
  EXPECT_EQ(shape(got), shape(want));
  EXPECT_EQ(bytes(got), bytes(want));
}

// Counts this thread's operator calls, without calls made by operators. LibTorch shows an observer
// the arguments as boxed values. In a boxed call these are the caller's, on the heap; otherwise
// they are copies on the thread's stack.
class CallCounter {
 public:
  CallCounter() {
    depth = boxed = unboxed = 0;
    handle_ = function<decltype(at::addThreadLocalCallback)>(
        "_ZN2at22addThreadLocalCallbackENS_22RecordFunctionCallbackE")(
        at::RecordFunctionCallback(&start, &end)
            .needsInputs(true)
            .scopes({at::RecordScope::FUNCTION}));
  }
  ~CallCounter() { function<decltype(at::removeCallback)>("_ZN2at14removeCallbackEm")(handle_); }
  CallCounter(const CallCounter&) = delete;
  CallCounter& operator=(const CallCounter&) = delete;

  void expect(int want_boxed, int want_unboxed) const {
    EXPECT_EQ(boxed, want_boxed);
    EXPECT_EQ(unboxed, want_unboxed);
  }

 private:
  // A function of LibTorch, which torchstream has loaded. The program does not link it.
  template <typename F>
  static F* function(const char* mangled) {
    void* found = dlsym(RTLD_DEFAULT, mangled);
    if (found == nullptr) throw std::runtime_error(std::string("LibTorch has no ") + mangled);
    return reinterpret_cast<F*>(found);
  }

  static std::unique_ptr<at::ObserverContext> start(const at::RecordFunction& call) {
    if (depth++ == 0) ++(is_on_stack(call.inputs().data()) ? unboxed : boxed);
    return nullptr;
  }
  static void end(const at::RecordFunction& /*call*/, at::ObserverContext* /*context*/) { --depth; }

  static bool is_on_stack(const void* address) {
    pthread_attr_t attributes;
    void* lowest = nullptr;
    size_t size = 0;
    EXPECT_EQ(pthread_getattr_np(pthread_self(), &attributes), 0);
    EXPECT_EQ(pthread_attr_getstack(&attributes, &lowest, &size), 0);
    pthread_attr_destroy(&attributes);
    const auto at = reinterpret_cast<uintptr_t>(address);
    const auto from = reinterpret_cast<uintptr_t>(lowest);
    return at >= from && at - from < size;
  }

  static thread_local int depth, boxed, unboxed;
  at::CallbackHandle handle_ = 0;
};

thread_local int CallCounter::depth = 0;
thread_local int CallCounter::boxed = 0;
thread_local int CallCounter::unboxed = 0;

// Operators that are called unboxed, with every type of argument that they have. The call for lists
// of results, which is boxed for an operator that returns none, gives the expected results.
TEST(Operator, UnboxedCallsEqualBoxedOnes) {
  Tensor a = make<float>({1, -2, 3, 4, -5, 6}, {2, 3});
  Tensor b = make<float>({2, 7, 1, 8, 2, 8}, {2, 3});
  Tensor row = make<float>({1, 2, 4}, {3});
  Tensor image = make<float>({1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7}, {1, 1, 4, 4});
  Tensor kernel = make<float>({1, 0, 2, 1}, {1, 1, 2, 2});
  Tensor bias = make<float>({0.5F}, {1});
  Tensor two = make<int64_t>({1, 0}, {2});
  Tensor mask = make<float>({0, -1e9F, 0, 0}, {2, 2});
  Tensor heads = make<float>({1, 2, 3, 4}, {1, 1, 2, 2});
  const std::vector<Call> calls = {
      Call("aten::neg").tensor(a),
      Call("aten::add", "Tensor").tensor(a).tensor(b),
      Call("aten::add", "Tensor").tensor(a).tensor(b).fallback(),
      Call("aten::add", "Tensor").tensor(a).tensor(b).integer(3),
      Call("aten::add", "Tensor").tensor(a).tensor(b).real(0.25),
      Call("aten::mul", "Scalar").tensor(two).boolean(true),
      Call("aten::mul", "Scalar").tensor(two).real(1.5),
      Call("aten::mul", "Scalar").tensor(two).integer(2),
      Call("aten::clamp").tensor(a).real(-1).none(),
      Call("aten::clamp").tensor(a).none().integer(2),
      Call("aten::sum").tensor(a),
      Call("aten::sum").tensor(a).integer(TS_DTYPE_FLOAT64),
      Call("aten::sum", "dim_IntList").tensor(a).none(),
      Call("aten::sum", "dim_IntList").tensor(a).ints({-1}).boolean(true),
      Call("aten::sum", "dim_IntList").tensor(a).ints({}),
      Call("aten::amax").tensor(a),
      Call("aten::argmax").tensor(a).none(),
      Call("aten::argmax").tensor(a).integer(1),
      Call("aten::max", "dim").tensor(a).integer(1),
      Call("aten::topk").tensor(a).integer(2).integer(1).boolean(false),
      Call("aten::cat").tensors({a, b, a}).integer(1),
      Call("aten::stack").tensors({a, b}),
      Call("aten::reshape").tensor(a).ints({3, -1}),
      Call("aten::permute").tensor(a).ints({1, 0}),
      Call("aten::select", "int").tensor(a).integer(0).integer(-1),
      Call("aten::slice", "Tensor").tensor(a).integer(1).integer(1).none().integer(1),
      Call("aten::slice", "Tensor").tensor(a).integer(1).none().integer(INT64_MAX),
      Call("aten::clone").tensor(image).integer(TS_MEMORY_FORMAT_CHANNELS_LAST),
      Call("aten::gelu").tensor(a),
      Call("aten::gelu").tensor(a).text("tanh"),
      Call("aten::conv2d").tensor(image).tensor(kernel),
      Call("aten::conv2d").tensor(image).tensor(kernel).tensor(bias).ints({2}).ints({1, 0}),
      Call("aten::conv2d").tensor(image).tensor(kernel).none().fallback().ints({1}),
      Call("aten::layer_norm").tensor(a).ints({3}).tensor(row).none().real(1e-3),
      Call("aten::rms_norm").tensor(a).ints({3}).tensor(row).none(),
      Call("aten::rms_norm").tensor(a).ints({3}).none().real(0.5),
      Call("aten::batch_norm")
          .tensor(image)
          .tensor(bias)
          .none()
          .tensor(bias)
          .tensor(bias)
          .boolean(false)
          .real(0.1)
          .real(1e-5)
          .boolean(true),
      Call("aten::upsample_nearest2d", "vec").tensor(image).none().doubles({1.5, 2.0}),
      Call("aten::upsample_nearest2d", "vec").tensor(image).ints({5, 6}).none(),
      Call("aten::scaled_dot_product_attention").tensor(heads).tensor(heads).tensor(heads),
      Call("aten::scaled_dot_product_attention")
          .tensor(heads)
          .tensor(heads)
          .tensor(heads)
          .tensor(mask)
          .real(0)
          .boolean(false)
          .real(0.125),
      Call("aten::cross_entropy_loss").tensor(a).tensor(two),
      Call("aten::embedding").tensor(a).tensor(two),
  };
  for (size_t i = 0; i < calls.size(); ++i) {
    SCOPED_TRACE("call " + std::to_string(i));
    const std::vector<Tensor> boxed = [&] {
      const CallCounter counter;
      std::vector<Tensor> all = calls[i].all();
      counter.expect(1, 0);
      return all;
    }();
    ts_tensor* out[2] = {};
    int64_t count = 0;
    {
      const CallCounter counter;
      ASSERT_OK(calls[i].run(out, 2, &count));
      counter.expect(0, 1);
    }
    ASSERT_EQ(count, static_cast<int64_t>(boxed.size()));
    for (size_t j = 0; j < boxed.size(); ++j) {
      Tensor unboxed;
      *unboxed.out() = out[j];
      expect_same(unboxed, boxed[j]);
    }
    if (count != 1 || calls[i].has_text()) continue;
    Tensor only;
    {
      const CallCounter counter;
      ASSERT_OK(calls[i].run_one(only.out()));
      ASSERT_OK(calls[i].run_one(nullptr));
      counter.expect(0, 2);
    }
    expect_same(only, boxed[0]);
  }
}

// An infrequent operator, wrong arguments, a flag and random numbers: cases that
// ts_operator_call_one leaves to the general call.
TEST(Operator, CallsOfOneResultThatAreNotUsual) {
  Tensor a = make<float>({1, 2, 3}, {3});
  Tensor two = make<float>({1, 2}, {2});
  Tensor out;
  ASSERT_OK(Call("aten::cosh").tensor(a).run_one(out.out()));
  expect_same(out, Call("aten::cosh").tensor(a).one());
  Tensor kept;
  ASSERT_OK(Call("aten::dropout").tensor(a).real(0).boolean(true).run_one(kept.out()));
  EXPECT_EQ(read<float>(kept), (Floats{1, 2, 3}));

  ASSERT_OK(ts_tensor_set_requires_grad(a, true));
  for (const int32_t flags : {0, TS_OPERATOR_FLAG_NO_GRAD + 0}) {
    Tensor sum;
    ASSERT_OK(Call("aten::sum").tensor(a).flags(flags).run_one(sum.out()));
    ts_error* error = ts_tensor_backward(sum, nullptr, false);
    EXPECT_EQ(error == nullptr, flags == 0);
    ts_error_free(error);
  }

  ts_tensor* none = nullptr;
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "argument other",
               Call("aten::add", "Tensor").tensor(a).boolean(true).run_one(&none));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "argument other",
               Call("aten::add", "Tensor")
                   .tensor(a)
                   .boolean(true)
                   .flags(TS_OPERATOR_FLAG_NO_GRAD)
                   .run_one(&none));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "argument mat2",
               Call("aten::mm").tensor(a).boolean(true).run_one(&none));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "no tensor 7",
               Call("aten::neg").raw(TS_ARG_KIND_TENSOR, 0, 7).run_one(&none));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "arguments for",
               Call("aten::neg").tensor(a).integer(1).run_one(&none));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "flag",
               Call("aten::neg").tensor(a).flags(8).run_one(&none));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "room",
               Call("aten::max", "dim").tensor(a).integer(0).run_one(&none));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "list",
               Call("aten::unbind", "int").tensor(a).run_one(&none));
  EXPECT_FAILS(TS_ERROR_OPERATOR, "size",
               Call("aten::add", "Tensor").tensor(a).tensor(two).run_one(&none));
  const ts_operator* op = nullptr;
  ASSERT_OK(ts_operator_find("aten::neg", "", &op));
  const ts_arg arg{TS_ARG_KIND_TENSOR, 0, 0};
  ts_tensor* tensors[1] = {a};
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "op is NULL",
               ts_operator_call_one(nullptr, &arg, tensors, nullptr, {0, 1, 1, 0}, &none));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "args",
               ts_operator_call_one(op, nullptr, tensors, nullptr, {0, 1, 1, 0}, &none));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "tensors",
               ts_operator_call_one(op, &arg, nullptr, nullptr, {0, 1, 1, 0}, &none));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "ints",
               ts_operator_call_one(op, &arg, tensors, nullptr, {0, 1, 1, 1}, &none));
  EXPECT_EQ(none, nullptr);
}

// LibTorch keeps such a number in separate memory, which an unboxed call would have to free.
TEST(Operator, AVeryNegativeIntIsCalledBoxed) {
  Tensor a = make<float>({1, 2, 3}, {3});
  const CallCounter counter;
  Tensor all = Call("aten::slice", "Tensor").tensor(a).integer(0).integer(INT64_MIN).one();
  EXPECT_EQ(read<float>(all), (Floats{1, 2, 3}));
  EXPECT_FAILS(TS_ERROR_OPERATOR, "",
               Call("aten::select", "int").tensor(a).integer(0).integer(INT64_MIN).drop());
  counter.expect(2, 0);
}

// The call of results of any type is always boxed.
TEST(Operator, UnboxedListsEqualBoxedOnes) {
  Tensor a = make<float>({1, -2, 3, 4, -5, 6}, {2, 3});
  Tensor b = make<float>({2, 7, 1, 8, 2, 8}, {2, 3});
  Tensor row = make<float>({1, 2, 4}, {3});
  Tensor two = make<float>({2}, {});
  const std::vector<Call> calls = {
      Call("aten::chunk").tensor(a).integer(2).integer(1),
      Call("aten::chunk").tensor(a).integer(2),
      Call("aten::split", "Tensor").tensor(a).integer(2).integer(-1),
      Call("aten::split", "sizes").tensor(a).ints({1, 2}).integer(1),
      Call("aten::split_with_sizes").tensor(a).ints({0, 3}).integer(1),
      Call("aten::tensor_split", "sections").tensor(a).integer(4).integer(1),
      Call("aten::unbind", "int").tensor(a).integer(1),
      Call("aten::broadcast_tensors").tensors({a, row}),
      Call("aten::meshgrid", "indexing").tensors({row, row}).text("xy"),
      Call("aten::_foreach_add", "List").tensors({a, row}).tensors({b, row}).real(0.5),
      Call("aten::_foreach_addcmul", "Scalar").tensors({a}).tensors({b}).tensors({a}).integer(3),
      Call("aten::_foreach_div", "List").tensors({a, row}).tensors({b, row}),
      Call("aten::_foreach_lerp", "Scalar").tensors({a, b}).tensors({b, a}).real(0.25),
      Call("aten::_foreach_mul", "Scalar").tensors({a, row}).real(0.5),
      Call("aten::_foreach_mul", "Tensor").tensors({a, row}).tensor(two),
      Call("aten::_foreach_norm", "Scalar").tensors({a, row}),
      Call("aten::_foreach_norm", "Scalar").tensors({a, row}).integer(1).integer(TS_DTYPE_FLOAT64),
      Call("aten::_foreach_sqrt").tensors({row, b}),
  };
  for (size_t i = 0; i < calls.size(); ++i) {
    SCOPED_TRACE("call " + std::to_string(i));
    const std::vector<Tensor> unboxed = [&] {
      const CallCounter counter;
      std::vector<Tensor> all = calls[i].all();
      counter.expect(0, 1);
      return all;
    }();
    ts_results* results = nullptr;
    ts_results_size size = {};
    {
      const CallCounter counter;
      ASSERT_OK(calls[i].run_results(&results, &size));
      counter.expect(1, 0);
    }
    ASSERT_EQ(size.args, 1);
    ASSERT_EQ(size.tensors, static_cast<int64_t>(unboxed.size()));
    ts_arg arg;
    std::vector<ts_tensor*> boxed(unboxed.size());
    ts_results_take(results, &arg, boxed.data(), nullptr);
    for (size_t j = 0; j < boxed.size(); ++j) {
      Tensor owned;
      *owned.out() = boxed[j];
      expect_same(unboxed[j], owned);
    }
  }
}

// The memory's token is returned once no tensor refers to it: an unboxed call neither keeps a
// reference to an operand nor drops one of the caller's.
TEST(Operator, UnboxedCallsKeepReferenceCounts) {
  std::vector<float> memory = {1, 2, 3, 4};
  const int64_t size[1] = {4};
  const int64_t stride[1] = {1};
  int64_t token = 0;
  Tensor other = make<float>({1, 1, 1, 1}, {4});
  Tensor three = make<float>({1, 1, 1}, {3});
  {
    Tensor a;
    ASSERT_OK(ts_tensor_borrow(reinterpret_cast<uint8_t*>(memory.data()), 16, size, stride, 1,
                               TS_DTYPE_FLOAT32, 4711, a.out()));
    for (int i = 0; i < 3; ++i) {
      Call("aten::neg").tensor(a).one();
      Tensor sum;
      ASSERT_OK(Call("aten::add", "Tensor").tensor(a).tensor(other).run_one(sum.out()));
      ASSERT_OK(Call("aten::add_", "Tensor").tensor(a).tensor(other).run_one(nullptr));
      ASSERT_OK(Call("aten::layer_norm").tensor(a).ints({4}).tensor(a).none().run_one(nullptr));
      Call("aten::cat").tensors({a, a, other}).one();
      Call("aten::view").tensor(a).ints({2, 2}).one();
      Call("aten::contiguous").tensor(a).one();
      Call("aten::layer_norm").tensor(a).ints({4}).tensor(a).tensor(a).one();
      Call("aten::add_", "Tensor").tensor(a).tensor(a).one();
      ASSERT_OK(Call("aten::add_", "Tensor").tensor(a).tensor(other).drop());
      ASSERT_OK(Call("aten::_foreach_mul_", "Scalar").tensors({a, other}).real(0.5).drop());
      Call("aten::chunk").tensor(a).integer(2).all();
      Call("aten::_foreach_add", "List").tensors({a, other}).tensors({other, a}).all();
      EXPECT_FAILS(TS_ERROR_OPERATOR, "size",
                   Call("aten::add", "Tensor").tensor(a).tensor(three).drop());
      EXPECT_FAILS(TS_ERROR_OPERATOR, "", Call("aten::cat").tensors({a, a}).integer(7).drop());
      EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "", Call("aten::cat").tensors({a, nullptr}).drop());
    }
    EXPECT_EQ(ts_borrowed_take(&token, 1), 0);
    EXPECT_EQ(read<float>(Call("aten::mul", "Scalar").tensor(a).real(0).one()),
              (Floats{0, 0, 0, 0}));
  }
  EXPECT_EQ(ts_borrowed_take(&token, 1), 1);
  EXPECT_EQ(token, 4711);
}

TEST(Operator, NamesTheArgumentAndBothTypes) {
  Tensor a = make<float>({1}, {1});
  const auto add = [&] { return std::move(Call("aten::add", "Tensor").tensor(a)); };
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "aten::add.Tensor: argument other: it takes Tensor",
               add().integer(1).drop());
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "not an int", add().integer(1).drop());
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "alpha: it takes Scalar, not a list of ints",
               add().tensor(a).ints({1}).drop());
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "not none", add().tensor(a).none().drop());
}

struct Wrong {
  const char* name;
  const char* overload;
  std::vector<ts_arg> args;
  const char* text;
};

TEST(Operator, RefusesEveryWrongKind) {
  Tensor a = make<float>({1, 2}, {2});
  const ts_arg t{TS_ARG_KIND_TENSOR, 0, 0};
  const std::vector<Wrong> table = {
      {"aten::sum", "dim_IntList", {t, {TS_ARG_KIND_INT, 0, 1}}, "int[]"},
      {"aten::sum", "dim_IntList", {t, {TS_ARG_KIND_DOUBLES, 1, 0}}, "a list of doubles"},
      {"aten::sum", "dim_IntList", {t, {TS_ARG_KIND_INTS, 1, 0}, {TS_ARG_KIND_INT, 0, 1}}, "bool"},
      {"aten::sum",
       "dim_IntList",
       {t, {TS_ARG_KIND_INTS, 1, 0}, {TS_ARG_KIND_BOOL, 0, 2}},
       "0 or 1"},
      {"aten::sum", "", {t, {TS_ARG_KIND_DOUBLE, 0, 0}}, "ScalarType"},
      {"aten::sum", "", {t, {TS_ARG_KIND_INT, 0, 4711}}, "4711 is not a dtype"},
      {"aten::sum", "", {t, {TS_ARG_KIND_INT, 0, -1}}, "-1 is not a dtype"},
      {"aten::contiguous", "", {t, {TS_ARG_KIND_INT, 0, 99}}, "99 is not one of"},
      {"aten::softmax", "int", {t, {TS_ARG_KIND_DOUBLE, 0, 0}}, "int"},
      {"aten::dropout", "", {t, {TS_ARG_KIND_INT, 0, 0}, {TS_ARG_KIND_BOOL, 0, 0}}, "float"},
      {"aten::gelu", "", {t, {TS_ARG_KIND_INT, 0, 0}}, "str"},
      {"aten::gelu", "", {t, {TS_ARG_KIND_STRING, 3, 0}}, "bytes of text"},
      {"aten::cat", "", {t}, "Tensor[]"},
      {"aten::cat", "", {{TS_ARG_KIND_TENSORS, 2, 0}}, "tensors given"},
      {"aten::cat", "", {{TS_ARG_KIND_TENSORS, -1, 0}}, "tensors given"},
      {"aten::relu", "", {{TS_ARG_KIND_TENSOR, 0, 1}}, "no tensor 1"},
      {"aten::relu", "", {{TS_ARG_KIND_TENSOR, 0, -1}}, "no tensor -1"},
      {"aten::relu", "", {{77, 0, 0}}, "unknown kind"},
      {"aten::relu", "", {{-1, 0, 0}}, "unknown kind"},
      {"aten::relu", "", {}, "has no default"},
      {"aten::relu", "", {t, t}, "2 arguments for 1"},
      {"aten::permute", "", {t, {TS_ARG_KIND_INTS, 2, 0}}, "ints given"},
      {"aten::permute", "", {t, {TS_ARG_KIND_INTS, INT32_MAX, 1}}, "ints given"},
      {"aten::to", "device", {t, {TS_ARG_KIND_INT, 0, -1}, {TS_ARG_KIND_INT, 0, 6}}, "Device"},
      {"aten::to",
       "device",
       {t, {TS_ARG_KIND_DEVICE, 0, -2}, {TS_ARG_KIND_INT, 0, 6}},
       "-1 is the CPU"},
      {"aten::multinomial",
       "",
       {t, {TS_ARG_KIND_INT, 0, 1}, {TS_ARG_KIND_BOOL, 0, 0}, t},
       "Generator"},
  };
  const std::vector<int64_t> ints = {0};
  for (const Wrong& wrong : table) {
    SCOPED_TRACE(std::string(wrong.name) + ", expecting: " + wrong.text);
    const ts_operator* op = nullptr;
    ASSERT_OK(ts_operator_find(wrong.name, wrong.overload, &op));
    ts_tensor* tensors[1] = {a};
    int64_t count = 0;
    EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, wrong.text,
                 ts_operator_call(op,
                                  {wrong.args.data(), static_cast<int64_t>(wrong.args.size()),
                                   ints.data(), 1, nullptr, 0},
                                  tensors, 1, 0, nullptr, 0, &count));
  }
  EXPECT_EQ(read<float>(a), (Floats{1, 2}));
}

TEST(Operator, RefusesBrokenCalls) {
  Tensor a = make<float>({1}, {1});
  const ts_operator* op = nullptr;
  ASSERT_OK(ts_operator_find("aten::relu", "", &op));
  const ts_arg arg{TS_ARG_KIND_TENSOR, 0, 0};
  ts_tensor* tensors[1] = {a};
  ts_tensor* out = nullptr;
  int64_t count = 0;
  EXPECT_FAILS(
      TS_ERROR_INVALID_ARGUMENT, "op is NULL",
      ts_operator_call(nullptr, {&arg, 1, nullptr, 0, nullptr, 0}, tensors, 1, 0, &out, 1, &count));
  EXPECT_FAILS(
      TS_ERROR_INVALID_ARGUMENT, "args",
      ts_operator_call(op, {nullptr, 1, nullptr, 0, nullptr, 0}, tensors, 1, 0, &out, 1, &count));
  EXPECT_FAILS(
      TS_ERROR_INVALID_ARGUMENT, "tensors",
      ts_operator_call(op, {&arg, 1, nullptr, 0, nullptr, 0}, tensors, -1, 0, &out, 1, &count));
  EXPECT_FAILS(
      TS_ERROR_INVALID_ARGUMENT, "results is NULL",
      ts_operator_call(op, {&arg, 1, nullptr, 0, nullptr, 0}, tensors, 1, 0, nullptr, 1, &count));
  EXPECT_FAILS(
      TS_ERROR_INVALID_ARGUMENT, "flag",
      ts_operator_call(op, {&arg, 1, nullptr, 0, nullptr, 0}, tensors, 1, 8, &out, 1, &count));
  EXPECT_EQ(out, nullptr);
}

TEST(Operator, LibTorchsRefusalIsAnOperatorError) {
  Tensor a = make<float>({1, 2, 3}, {3});
  Tensor b = make<float>({1, 2}, {2});
  testing::internal::CaptureStderr();
  const test::Outcome outcome(Call("aten::add", "Tensor").tensor(a).tensor(b).drop());
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  EXPECT_EQ(outcome.code, TS_ERROR_OPERATOR) << outcome;
  EXPECT_TRUE(outcome.says("must match the size of tensor b")) << outcome;
  EXPECT_FALSE(outcome.says("frame #")) << outcome;
  EXPECT_EQ(outcome.origin, "ts_operator_call");
}

TEST(Operator, WarningsDoNotReachStderr) {
  // torch.range is deprecated and warns.
  testing::internal::CaptureStderr();
  Tensor a = Call("aten::range").integer(0).integer(3).one();
  Tensor grown = make<float>({0}, {1});
  // An out= tensor of another size is resized with a warning.
  Tensor x = make<float>({1, 2}, {2});
  EXPECT_OK(Call("aten::add", "out").tensor(x).tensor(x).fallback().tensor(grown).drop());
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  EXPECT_EQ(read<float>(grown), (Floats{2, 4}));
}

TEST(Operator, NoGradIsForOneCall) {
  Tensor a = make<float>({2}, {1});
  ASSERT_OK(ts_tensor_set_requires_grad(a, true));
  Tensor quiet =
      Call("aten::mul", "Tensor").tensor(a).tensor(a).flags(TS_OPERATOR_FLAG_NO_GRAD).one();
  EXPECT_FALSE(test::describe(quiet).requires_grad);
  // An exception restores the mode too.
  Tensor b = make<float>({1, 2}, {2});
  Tensor c = make<float>({1, 2, 3}, {3});
  EXPECT_FAILS(
      TS_ERROR_OPERATOR, "",
      Call("aten::mul", "Tensor").tensor(b).tensor(c).flags(TS_OPERATOR_FLAG_NO_GRAD).drop());
  EXPECT_TRUE(test::describe(Call("aten::mul", "Tensor").tensor(a).tensor(a).one()).requires_grad);
}

TEST(Operator, AutocastIsForOneCall) {
  const auto dtype = [](const Tensor& t) { return test::describe(t).dtype; };
  Tensor a = make<float>({1, 2, 3, 4}, {2, 2});
  ASSERT_OK(ts_tensor_set_requires_grad(a, true));
  const auto product = [&](int32_t flags) {
    return Call("aten::mm").tensor(a).tensor(a).flags(flags).one();
  };
  Tensor half = product(TS_OPERATOR_FLAG_AUTOCAST_BFLOAT16);
  EXPECT_EQ(dtype(half), TS_DTYPE_BFLOAT16);
  EXPECT_EQ(dtype(product(0)), TS_DTYPE_FLOAT32);
  EXPECT_EQ(dtype(product(TS_OPERATOR_FLAG_AUTOCAST_FLOAT16)), TS_DTYPE_FLOAT16);
  EXPECT_EQ(dtype(Call("aten::mse_loss")
                      .tensor(half)
                      .tensor(half)
                      .flags(TS_OPERATOR_FLAG_AUTOCAST_BFLOAT16)
                      .one()),
            TS_DTYPE_FLOAT32);
  // An exception restores the mode too.
  Tensor b = make<float>({1, 2, 3}, {1, 3});
  EXPECT_FAILS(
      TS_ERROR_OPERATOR, "",
      Call("aten::mm").tensor(a).tensor(b).flags(TS_OPERATOR_FLAG_AUTOCAST_BFLOAT16).drop());
  EXPECT_EQ(dtype(product(0)), TS_DTYPE_FLOAT32);
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "two dtypes",
               Call("aten::mm")
                   .tensor(a)
                   .tensor(a)
                   .flags(TS_OPERATOR_FLAG_AUTOCAST_BFLOAT16 | TS_OPERATOR_FLAG_AUTOCAST_FLOAT16)
                   .drop());
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "flag",
               Call("aten::mm").tensor(a).tensor(a).flags(8).drop());
}

// LibTorch's own cache of cast weights would return the old values.
TEST(Operator, AutocastSeesAnUpdatedWeight) {
  Tensor w = make<float>({1}, {1, 1});
  Tensor x = make<float>({1}, {1, 1});
  ASSERT_OK(ts_tensor_set_requires_grad(w, true));
  const auto value = [&] {
    Tensor y = Call("aten::mm").tensor(x).tensor(w).flags(TS_OPERATOR_FLAG_AUTOCAST_BFLOAT16).one();
    double item = 0;
    EXPECT_OK(ts_tensor_get_item(y, &item));
    return item;
  };
  EXPECT_EQ(value(), 1);
  EXPECT_OK(
      Call("aten::add_", "Scalar").tensor(w).integer(1).flags(TS_OPERATOR_FLAG_NO_GRAD).drop());
  EXPECT_EQ(value(), 2);
}

TEST(Operator, AnAbsentDeviceReturnsNoDevice) {
  const int32_t beyond = ts_device_count();
  EXPECT_FAILS(TS_ERROR_NO_DEVICE, "device",
               Call("aten::zeros").ints({1}).none().none().device(beyond).drop());
}

TEST(Operator, ManyThreadsCallAtOnce) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([i] {
      Tensor sum = scalar(0);
      Tensor one = scalar(static_cast<float>(i));
      for (int round = 0; round < 500; ++round) {
        sum = Call("aten::add", "Tensor").tensor(sum).tensor(one).one();
      }
      double value = 0;
      EXPECT_OK(ts_tensor_get_item(sum, &value));
      EXPECT_EQ(value, 500.0 * i);
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST(OperatorGpu, RunsOnTheCurrentStream) {
  NEEDS_GPUS(1);
  Tensor x = test::full({1024}, 1, 0);
  // A first call loads the kernel and fills the stream's cache before the gate holds the stream.
  const ts_stream side = test::pool_stream();
  ts_stream_guard guard{};
  ASSERT_OK(ts_stream_guard_enter(side, &guard));
  Tensor y = Call("aten::add", "Tensor").tensor(x).tensor(x).one();
  y.free();
  ASSERT_OK(ts_device_synchronize(0));
  {
    test::Gate gate(side);
    y = Call("aten::add", "Tensor").tensor(x).tensor(x).one();
    EXPECT_FALSE(test::idle(side));
    EXPECT_TRUE(test::idle({0, 0})) << "the default stream got work";
  }
  EXPECT_EQ(read<float>(y)[1023], 2);
  ASSERT_OK(ts_stream_guard_exit(guard));
}

// Captures one addition on a separate stream, and runs beside() inside the capture.
template <typename Beside>
void capture_beside(Beside&& beside) {
  Tensor x = test::full({4}, 0, 0);
  Tensor one = test::full({4}, 1, 0);
  ASSERT_OK(ts_device_synchronize(0));
  const ts_stream stream = test::pool_stream();
  ts_stream_guard guard{};
  ASSERT_OK(ts_stream_guard_enter(stream, &guard));
  ts_graph* graph = nullptr;
  ASSERT_OK(ts_graph_begin(stream, nullptr, &graph));
  EXPECT_OK(Call("aten::add_", "Tensor").tensor(x).tensor(one).drop());
  beside();
  EXPECT_OK(ts_graph_end(graph));
  EXPECT_OK(ts_graph_replay(graph, stream));
  ts_graph_destroy(graph);
  ASSERT_OK(ts_stream_guard_exit(guard));
  ASSERT_OK(ts_stream_synchronize(stream));
  EXPECT_EQ(read<float>(x), (Floats{1, 1, 1, 1}));
}

// A capture owns the generators. A call on another thread that would draw from them returns
// TS_ERROR_BUSY, whichever argument shows that it uses a GPU.
TEST(OperatorGpu, RandomNumbersWaitForTheEndOfACapture) {
  NEEDS_GPUS(1);
  Tensor on_gpu = test::full({1, 1, 1}, 1, 0);
  Tensor on_host = test::full({1, 1, 1}, 1);
  const auto calls = [&] {
    return std::vector<Call>{
        Call("aten::rand").ints({4}).fallback().fallback().device(0),
        Call("aten::randperm").integer(4).fallback().fallback().device(0),
        Call("aten::rand_like").tensor(on_host).fallback().fallback().device(0),
        Call("aten::rand_like").tensor(on_gpu),
        Call("aten::uniform_").tensor(on_gpu),
        // An operand in a list.
        Call("aten::lstm", "input")
            .tensor(on_host)
            .tensors({on_gpu, on_gpu})
            .tensors({on_host, on_host, on_host, on_host})
            .boolean(true)
            .integer(1)
            .real(0)
            .boolean(false)
            .boolean(false)
            .boolean(false),
    };
  };
  capture_beside([&] {
    std::thread([&] {
      for (const Call& call : calls()) {
        EXPECT_FAILS(TS_ERROR_BUSY, "ts_capture_wait", call.drop());
      }
      EXPECT_OK(Call("aten::rand").ints({4}).drop());  // on the CPU no call waits
    }).join();
  });
  // After the capture the calls run, if their arguments are valid.
  const std::vector<Call> after = calls();
  for (size_t i = 0; i < 5; ++i) EXPECT_OK(after[i].drop());
}

// A graph also keeps the tensors that a captured operator takes in a list with absent elements.
TEST(OperatorGpu, AGraphKeepsTheIndicesOfAnIndex) {
  NEEDS_GPUS(1);
  Tensor values;
  ASSERT_OK(ts_tensor_to(make<float>({1, 2, 3, 4}, {1, 4}), 0, -1, false, values.out()));
  const auto indices = [](const Ints& at) {
    Tensor moved;
    EXPECT_OK(ts_tensor_to(make(at, {4}), 0, -1, false, moved.out()));
    return moved;
  };
  Tensor reversed = indices({3, 2, 1, 0});
  const auto index = [&] {
    return Call("aten::index", "Tensor").tensor(values).tensors({nullptr, reversed}).one();
  };
  index().free();  // loads the kernel
  ASSERT_OK(ts_device_synchronize(0));
  const ts_stream stream = test::pool_stream();
  ts_stream_guard guard{};
  ASSERT_OK(ts_stream_guard_enter(stream, &guard));
  ts_graph* graph = nullptr;
  ASSERT_OK(ts_graph_begin(stream, nullptr, &graph));
  Tensor result = index();
  EXPECT_OK(ts_graph_end(graph));
  ASSERT_OK(ts_stream_guard_exit(guard));
  reversed.free();
  std::vector<Tensor> others;  // would otherwise reuse the memory of the indices
  for (int i = 0; i < 8; ++i) others.push_back(indices({0, 0, 0, 0}));
  ASSERT_OK(ts_device_synchronize(0));
  EXPECT_OK(ts_graph_replay(graph, stream));
  ASSERT_OK(ts_stream_synchronize(stream));
  EXPECT_EQ(read<float>(result), (Floats{4, 3, 2, 1}));
  ts_graph_destroy(graph);
}

TEST(Operator, ResultsOfAnyType) {
  Tensor a = make<float>({1, 2}, {2});
  const auto results = [](const Call& call) {
    ts_results* all = nullptr;
    ts_results_size size{};
    EXPECT_OK(call.run_results(&all, &size));
    std::vector<ts_arg> args(static_cast<size_t>(size.args));
    std::vector<ts_tensor*> tensors(static_cast<size_t>(size.tensors));
    Ints ints(static_cast<size_t>(size.ints));
    ts_results_take(all, args.data(), tensors.data(), ints.data());
    for (ts_tensor* tensor : tensors) ts_tensor_free(tensor);
    return std::make_tuple(args, tensors.size(), ints);
  };
  const auto [equal, no_tensors, no_ints] = results(Call("aten::equal").tensor(a).tensor(a));
  ASSERT_EQ(equal.size(), 1U);
  EXPECT_EQ(equal[0].kind, TS_ARG_KIND_BOOL);
  EXPECT_EQ(equal[0].value, 1);
  EXPECT_EQ(no_tensors + no_ints.size(), 0U);
  const auto [parts, two, none] = results(Call("aten::unbind", "int").tensor(a));
  ASSERT_EQ(parts.size(), 1U);
  EXPECT_EQ(parts[0].kind, TS_ARG_KIND_TENSORS);
  EXPECT_EQ(parts[0].count, 2);
  EXPECT_EQ(two, 2U);
  Tensor sum = Call("aten::add", "Scalar").tensor(make<float>({3}, {})).complex(1, 2).one();
  const auto [item, nothing, bits] = results(Call("aten::item").tensor(sum));
  ASSERT_EQ(item.size(), 1U);
  EXPECT_EQ(item[0].kind, TS_ARG_KIND_COMPLEX);
  ASSERT_EQ(bits.size(), 2U);
  EXPECT_EQ(bits[1], test::bits_of(2));
  ts_results* all = nullptr;
  ts_results_size size{};
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "QScheme",
               Call("aten::qscheme").tensor(a).run_results(&all, &size));
  ASSERT_OK(Call("aten::neg").tensor(a).run_results(&all, &size));
  ts_results_free(all);
  ts_results_free(nullptr);
}

TEST(Operator, DrawsFromAGeneratorOfItsOwn) {
  ts_generator* generator = nullptr;
  ASSERT_OK(ts_generator_new(TS_DEVICE_CPU, 5, &generator));
  const auto draw = [&] {
    return read<float>(Call("aten::rand", "generator").ints({3}).generator(generator).one());
  };
  const Floats first = draw();
  EXPECT_NE(draw(), first);
  ASSERT_OK(ts_generator_set_seed(generator, 5));
  EXPECT_EQ(draw(), first);
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "generator is NULL",
               Call("aten::rand", "generator").ints({3}).generator(nullptr).drop());
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "NULL", ts_generator_new(TS_DEVICE_CPU, 5, nullptr));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "NULL", ts_generator_set_seed(nullptr, 5));
  ts_generator_free(generator);
  ts_generator_free(nullptr);
}

TEST(OperatorGpu, ACaptureMayDrawFromAGeneratorOfItsOwn) {
  NEEDS_GPUS(1);
  ts_generator* generator = nullptr;
  ASSERT_OK(ts_generator_new(0, 5, &generator));
  const auto draw = [&] {
    return Call("aten::rand", "generator").ints({3}).generator(generator).none().none().device(0);
  };
  ASSERT_OK(draw().drop());
  Tensor values;
  ASSERT_OK(ts_tensor_to(make<float>({1, 2}, {2}), 0, -1, false, values.out()));
  Call("aten::neg").tensor(values).one().free();  // loads the kernel
  ASSERT_OK(ts_device_synchronize(0));
  const ts_stream stream = test::pool_stream();
  ts_stream_guard guard{};
  ASSERT_OK(ts_stream_guard_enter(stream, &guard));
  ts_graph* graph = nullptr;
  ASSERT_OK(ts_graph_begin(stream, nullptr, &graph));
  EXPECT_OK(draw().drop());
  Tensor result = Call("aten::neg").tensor(values).one();  // the capture continues
  EXPECT_OK(ts_graph_end(graph));
  ASSERT_OK(ts_stream_guard_exit(guard));
  ts_graph_destroy(graph);
  ts_generator_free(generator);
}

}  // namespace
