// The reduction of gradients: two ranks on two threads of one process.
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <functional>
#include <future>
#include <thread>
#include <vector>

#include "support.h"
#include "torchstream.h"

namespace {

using test::Call;
using test::make;
using test::read;
using test::Tensor;
using Floats = std::vector<float>;

constexpr int64_t kTimeout = 20'000'000'000;  // 20 s
constexpr ts_stream kNone = {0, 0};

void both(const std::function<void(ts_group*, float)>& body) {
  ts_store* store = nullptr;
  ASSERT_OK(ts_store_new_local(kTimeout, &store));
  std::array<std::thread, 2> threads;
  std::array<ts_group*, 2> groups{};
  for (int32_t rank = 0; rank < 2; ++rank) {
    ts_group*& group = groups[static_cast<size_t>(rank)];
    threads[static_cast<size_t>(rank)] = std::thread([&body, &group, store, rank] {
      const int32_t ranks[] = {0, 1};
      ASSERT_OK(ts_group_new(store, "g", rank, 2, ranks, TS_DEVICE_CPU, kTimeout, &group));
      body(group, static_cast<float>(rank));
    });
  }
  for (std::thread& thread : threads) thread.join();
  // A group that ends while the other one still connects fails that one's connection.
  for (ts_group* group : groups) ts_group_free(group);
  ts_store_free(store);
}

// Two parameters, and a backward whose gradients are `scale` and 2 * scale.
struct Model {
  Tensor a = make<float>({1, 1, 1}, {3});
  Tensor b = make<float>({1, 1}, {2});

  Model() {
    EXPECT_OK(ts_tensor_set_requires_grad(a, true));
    EXPECT_OK(ts_tensor_set_requires_grad(b, true));
  }
  void backward(float scale, bool with_b = true) const {
    const Tensor factor = make<float>({scale}, {1});
    Tensor loss =
        Call("aten::sum").tensor(Call("aten::mul", "Tensor").tensor(a).tensor(factor).one()).one();
    if (with_b) {
      const Tensor twice = make<float>({2 * scale}, {1});
      Tensor other =
          Call("aten::sum").tensor(Call("aten::mul", "Tensor").tensor(b).tensor(twice).one()).one();
      loss = Call("aten::add", "Tensor").tensor(loss).tensor(other).one();
    }
    EXPECT_OK(ts_tensor_backward(loss, nullptr, false));
  }
  ts_reducer* reducer(ts_group* group) const {
    ts_tensor* parameters[] = {a, b};
    ts_reducer* made = nullptr;
    EXPECT_OK(ts_reducer_new(group, kNone, parameters, 2, -1, &made));
    return made;
  }
};

Floats grad(const Tensor& tensor) {
  Tensor gradient;
  EXPECT_OK(ts_tensor_get_grad(tensor, gradient.out()));
  return read<float>(gradient);
}

TEST(Reducer, AveragesGradients) {
  both([](ts_group* group, float rank) {
    const Model model;
    ts_reducer* reducer = model.reducer(group);
    const int64_t order[] = {1, 0};
    const int64_t ends[] = {1, 2};
    ASSERT_OK(ts_reducer_arrange(reducer, order, ends, 2));
    bool unused[] = {true, true};
    for (int pass = 0; pass < 2; ++pass) {
      ASSERT_OK(ts_reducer_begin(reducer));
      model.backward(1 + rank);
      ASSERT_OK(ts_reducer_join(reducer, unused));
      EXPECT_FALSE(unused[0] || unused[1]);
      EXPECT_EQ(grad(model.a), (Floats{1.5F, 1.5F, 1.5F}));
      EXPECT_EQ(grad(model.b), (Floats{3, 3}));
      ts_tensor* parameters[] = {model.a, model.b};
      ASSERT_OK(ts_tensor_clear_grads(parameters, 2));
    }
    int64_t made[2] = {};
    int64_t count = 0;
    ASSERT_OK(ts_reducer_get_order(reducer, made, &count));
    EXPECT_EQ(count, 2);
    // Without ts_reducer_begin, gradients stay on this rank.
    model.backward(1 + rank);
    EXPECT_EQ(grad(model.b), (Floats{2 + 2 * rank, 2 + 2 * rank}));
    ts_reducer_free(reducer);
    // A freed reducer has removed its hooks from the parameters.
    model.backward(1);
  });
}

TEST(Reducer, SendsZerosForWhatWasNotUsed) {
  both([](ts_group* group, float rank) {
    const Model model;
    ts_reducer* reducer = model.reducer(group);
    const int64_t order[] = {0, 1};
    const int64_t end = 2;
    ASSERT_OK(ts_reducer_arrange(reducer, order, &end, 1));
    bool unused[] = {true, true};
    ASSERT_OK(ts_reducer_begin(reducer));
    model.backward(4, rank == 0);
    ASSERT_OK(ts_reducer_join(reducer, unused));
    EXPECT_FALSE(unused[0]);
    EXPECT_EQ(unused[1], rank == 1);
    EXPECT_EQ(grad(model.a), (Floats{4, 4, 4}));
    EXPECT_EQ(grad(model.b), (Floats{4, 4}));
    ts_reducer_free(reducer);
  });
}

TEST(Reducer, AJoinThatFailsLeavesItsOutput) {
  both([](ts_group* group, float) {
    const Model model;
    ts_reducer* reducer = model.reducer(group);
    const int64_t order[] = {0, 1};
    const int64_t end = 2;
    ASSERT_OK(ts_reducer_arrange(reducer, order, &end, 1));
    bool unused[] = {true, true};
    ASSERT_OK(ts_reducer_begin(reducer));
    model.backward(1, /*with_b=*/false);
    ASSERT_OK(ts_reducer_abort(reducer));
    EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "aborted", ts_reducer_join(reducer, unused));
    EXPECT_TRUE(unused[0] && unused[1]);
    ASSERT_OK(ts_reducer_cancel(reducer));
    ts_reducer_free(reducer);
  });
}

// A reduction that continues after a cancel writes to no gradient: the parameters of its bucket
// have none, and later gradients have separate memory.
TEST(Reducer, CanceledReductionsLeaveTheGradients) {
  std::promise<void> canceled;
  both([&](ts_group* group, float rank) {
    const Model model;
    ts_reducer* reducer = model.reducer(group);
    const int64_t order[] = {0, 1};
    const int64_t ends[] = {1, 2};
    ASSERT_OK(ts_reducer_arrange(reducer, order, ends, 2));
    if (rank == 1) canceled.get_future().wait();
    ASSERT_OK(ts_reducer_begin(reducer));
    model.backward(3, /*with_b=*/false);  // starts the reduction of the first bucket
    ASSERT_OK(ts_reducer_cancel(reducer));
    if (rank == 0) {
      EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "under way", ts_reducer_begin(reducer));
      Tensor none;
      ASSERT_OK(ts_tensor_get_grad(model.a, none.out()));
      EXPECT_EQ(none, nullptr);
      model.backward(1);
      canceled.set_value();
      const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(kTimeout);
      while (test::Outcome(ts_reducer_begin(reducer)).code != TS_ERROR_NONE) {
        ASSERT_LT(std::chrono::steady_clock::now(), end);
        std::this_thread::yield();
      }
      EXPECT_EQ(grad(model.a), (Floats{1, 1, 1}));
      EXPECT_EQ(grad(model.b), (Floats{2, 2}));
    }
    ts_reducer_free(reducer);
  });
}

TEST(Reducer, RefusesArguments) {
  both([](ts_group* group, float) {
    const Model model;
    ts_tensor* parameters[] = {model.a, model.b};
    const Tensor constant = make<float>({1}, {1});
    ts_tensor* no_parameter[] = {constant};
    ts_reducer* none = nullptr;
    EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "group",
                 ts_reducer_new(nullptr, kNone, parameters, 2, -1, &none));
    EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "no parameters",
                 ts_reducer_new(group, kNone, parameters, 0, -1, &none));
    EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "no leaf",
                 ts_reducer_new(group, kNone, no_parameter, 1, -1, &none));
    EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "no floating point type",
                 ts_reducer_new(group, kNone, parameters, 2, TS_DTYPE_INT64, &none));
    EXPECT_EQ(none, nullptr);
    ts_reducer* reducer = model.reducer(group);
    bool unused[2];
    EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "no buckets", ts_reducer_begin(reducer));
    EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "no backward", ts_reducer_join(reducer, unused));
    const int64_t order[] = {0, 1};
    const int64_t twice[] = {0, 0};
    const int64_t ends[] = {1, 2};
    const int64_t early[] = {1};
    const int64_t empty[] = {0, 2};
    EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "once", ts_reducer_arrange(reducer, twice, ends, 2));
    EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "end with",
                 ts_reducer_arrange(reducer, order, early, 1));
    EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "empty", ts_reducer_arrange(reducer, order, empty, 2));
    ASSERT_OK(ts_reducer_arrange(reducer, order, ends, 2));
    ASSERT_OK(ts_reducer_begin(reducer));
    EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "under way", ts_reducer_begin(reducer));
    EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "under way",
                 ts_reducer_arrange(reducer, order, ends, 2));
    EXPECT_OK(ts_reducer_cancel(reducer));
    EXPECT_OK(ts_reducer_abort(reducer));
    ts_reducer_free(reducer);
    ts_reducer_free(nullptr);
  });
}

}  // namespace
