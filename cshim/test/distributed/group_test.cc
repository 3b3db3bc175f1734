// Groups, stores and collectives: two ranks on two threads of one process.
#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <functional>
#include <future>
#include <thread>
#include <vector>

#include "support.h"
#include "torchstream.h"

namespace {

constexpr int64_t kTimeout = 20'000'000'000;  // 20 s
constexpr ts_stream kNone = {0, 0};

ts_store* local_store() {
  ts_store* store = nullptr;
  EXPECT_OK(ts_store_new_local(kTimeout, &store));
  return store;
}

ts_tensor* doubles(std::vector<double> values) {
  ts_tensor* tensor = nullptr;
  const auto size = static_cast<int64_t>(values.size());
  EXPECT_OK(ts_tensor_from_data(reinterpret_cast<const uint8_t*>(values.data()),
                                values.size() * sizeof(double), &size, 1, TS_DTYPE_FLOAT64,
                                &tensor));
  return tensor;
}

std::vector<double> values_of(const ts_tensor* tensor, size_t count) {
  std::vector<double> values(count);
  EXPECT_OK(
      ts_tensor_read(tensor, reinterpret_cast<uint8_t*>(values.data()), count * sizeof(double)));
  return values;
}

// Runs `body` on both ranks of a group.
void both(const std::function<void(ts_group*, int32_t)>& body) {
  ts_store* store = local_store();
  std::array<std::thread, 2> threads;
  std::array<ts_group*, 2> groups{};
  for (int32_t rank = 0; rank < 2; ++rank) {
    ts_group*& group = groups[static_cast<size_t>(rank)];
    threads[static_cast<size_t>(rank)] = std::thread([&body, &group, store, rank] {
      const int32_t ranks[] = {0, 1};
      ASSERT_OK(ts_group_new(store, "g", rank, 2, ranks, TS_DEVICE_CPU, kTimeout, &group));
      body(group, rank);
      int32_t fault = -1;
      EXPECT_OK(ts_group_get_fault(group, &fault));
      EXPECT_EQ(fault, TS_GROUP_FAULT_NONE);
    });
  }
  for (std::thread& thread : threads) thread.join();
  // A group that ends while the other one still connects fails that one's connection.
  for (ts_group* group : groups) {
    if (group == nullptr) continue;
    EXPECT_OK(ts_group_shutdown(group));
    ts_group_free(group);
  }
  ts_store_free(store);
}

void finish(ts_work* work) {
  EXPECT_OK(ts_work_wait(work));
  EXPECT_OK(ts_work_wait(work));  // a second time: nothing happens
  ts_work_free(work);
}

TEST(Store, KeepsValues) {
  ts_store* store = local_store();
  const uint8_t value[] = {1, 2, 3};
  uint8_t read[3] = {};
  size_t bytes = 99;
  ASSERT_OK(ts_store_set(store, "k", value, 3));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "", ts_store_get(store, "k", read, 2, &bytes));
  EXPECT_EQ(bytes, 99U);
  ASSERT_OK(ts_store_get(store, "k", read, 3, &bytes));
  EXPECT_EQ(bytes, 3U);
  EXPECT_EQ(read[2], 3);
  ts_store_free(store);
}

TEST(Store, RefusesArguments) {
  ts_store* store = nullptr;
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "", ts_store_connect("", 1, true, "", kTimeout, &store));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "",
               ts_store_connect("localhost", 0, false, "", kTimeout, &store));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "",
               ts_store_connect("localhost", 65536, true, "", kTimeout, &store));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "",
               ts_store_connect("localhost", 0, true, "", 0, &store));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "", ts_store_new_local(-1, &store));
  EXPECT_EQ(store, nullptr);
}

TEST(Store, ServesAFreePort) {
  ts_store* store = nullptr;
  ASSERT_OK(ts_store_connect("127.0.0.1", 0, true, "prefix", kTimeout, &store));
  const uint8_t value = 7;
  uint8_t read = 0;
  size_t bytes = 0;
  ASSERT_OK(ts_store_set(store, "k", &value, 1));
  ASSERT_OK(ts_store_get(store, "k", &read, 1, &bytes));
  EXPECT_EQ(read, 7);
  ts_store_free(store);
}

TEST(Group, Collectives) {
  both([](ts_group* group, int32_t rank) {
    const double r = rank;
    ts_work* work = nullptr;
    ts_tensor* x = doubles({r, 2});
    ASSERT_OK(ts_group_all_reduce(group, kNone, x, TS_REDUCTION_AVERAGE, &work));
    finish(work);
    EXPECT_EQ(values_of(x, 2), (std::vector<double>{0.5, 2}));

    ts_tensor* y = doubles({r});
    ASSERT_OK(ts_group_broadcast(group, kNone, y, 1, &work));
    finish(work);
    EXPECT_EQ(values_of(y, 1), (std::vector<double>{1}));

    ts_tensor* z = doubles({10 * r, 10 * r + 1});
    ts_tensor* all = doubles({0, 0, 0, 0});
    ASSERT_OK(ts_group_all_gather(group, kNone, all, z, &work));
    finish(work);
    EXPECT_EQ(values_of(all, 4), (std::vector<double>{0, 1, 10, 11}));

    ASSERT_OK(ts_group_reduce_scatter(group, kNone, z, all, TS_REDUCTION_SUM, &work));
    finish(work);
    EXPECT_EQ(values_of(z, 2),
              rank == 0 ? (std::vector<double>{0, 2}) : (std::vector<double>{20, 22}));

    ts_tensor* from = doubles({r, r, r});
    ts_tensor* to =
        doubles(rank == 0 ? std::vector<double>{9, 9} : std::vector<double>{9, 9, 9, 9});
    const int64_t sent[] = {1, 2};
    const int64_t received[] = {rank + 1, rank + 1};
    ASSERT_OK(ts_group_all_to_all(group, kNone, to, from, received, sent, &work));
    finish(work);
    EXPECT_EQ(values_of(to, 2 * static_cast<size_t>(rank + 1)),
              rank == 0 ? (std::vector<double>{0, 1}) : (std::vector<double>{0, 0, 1, 1}));

    ASSERT_OK(rank == 0 ? ts_group_send(group, kNone, x, 1, kTimeout, &work)
                        : ts_group_receive(group, kNone, z, 0, kTimeout, &work));
    finish(work);
    if (rank == 1) {
      EXPECT_EQ(values_of(z, 2), (std::vector<double>{0.5, 2}));
    }
    for (ts_tensor* each : {x, y, z, all, from, to}) ts_tensor_free(each);
  });
}

TEST(Group, RefusesArgumentsWithoutAnEffect) {
  both([](ts_group* group, int32_t rank) {
    ts_work* work = nullptr;
    ts_tensor* two = doubles({1, 2});
    ts_tensor* three = doubles({1, 2, 3});
    const int64_t parts[] = {1, 1};
    const int64_t negative[] = {4, -1};
    EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "", ts_group_all_reduce(nullptr, kNone, two, 0, &work));
    EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "",
                 ts_group_all_reduce(group, kNone, nullptr, 0, &work));
    EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "", ts_group_all_reduce(group, kNone, two, 5, &work));
    EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "", ts_group_all_reduce(group, kNone, two, 0, nullptr));
    EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "", ts_group_broadcast(group, kNone, two, 2, &work));
    EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "",
                 ts_group_all_gather(group, kNone, three, two, &work));
    EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "",
                 ts_group_reduce_scatter(group, kNone, two, three, 0, &work));
    EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "",
                 ts_group_all_to_all(group, kNone, three, three, nullptr, nullptr, &work));
    EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "",
                 ts_group_all_to_all(group, kNone, three, three, parts, parts, &work));
    EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "",
                 ts_group_all_to_all(group, kNone, three, three, negative, negative, &work));
    EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "",
                 ts_group_send(group, kNone, two, rank, kTimeout, &work));
    EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "",
                 ts_group_receive(group, kNone, two, 1 - rank, 0, &work));
    EXPECT_EQ(work, nullptr);
    ts_tensor_free(two);
    ts_tensor_free(three);
  });
}

TEST(Group, RefusesMembers) {
  ts_store* store = local_store();
  ts_group* group = nullptr;
  const int32_t ranks[] = {0, -1};
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "",
               ts_group_new(store, "g", 2, 2, ranks, TS_DEVICE_CPU, kTimeout, &group));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "",
               ts_group_new(store, "g", 0, 2, ranks, TS_DEVICE_CPU, kTimeout, &group));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "",
               ts_group_new(store, "g", 0, 1, ranks, TS_DEVICE_CPU, 0, &group));
  EXPECT_FAILS(TS_ERROR_NO_DEVICE, "",
               ts_group_new(store, "g", 0, 1, ranks, 9999, kTimeout, &group));
  EXPECT_EQ(group, nullptr);
  ts_store_free(store);
}

// Rank 1 calls after rank 0 has given up.
TEST(Group, AbortEndsAWait) {
  std::promise<void> given_up;
  std::future<void> wait = given_up.get_future();
  both([&](ts_group* group, int32_t rank) {
    if (rank == 1) {
      wait.wait();
      return;
    }
    ts_tensor* x = doubles({1});
    ts_work* work = nullptr;
    ASSERT_OK(ts_group_all_reduce(group, kNone, x, TS_REDUCTION_SUM, &work));
    std::thread waiter([work] { EXPECT_FAILS(TS_ERROR_OPERATOR, "", ts_work_wait(work)); });
    EXPECT_OK(ts_work_abort(work));
    waiter.join();
    given_up.set_value();
    ts_work_free(work);
    ts_tensor_free(x);
  });
}

// Rank 1 calls after rank 0 has given up.
TEST(Group, AReceiveThatNobodyAnswersFails) {
  std::promise<void> given_up;
  std::future<void> wait = given_up.get_future();
  both([&](ts_group* group, int32_t rank) {
    if (rank == 1) {
      wait.wait();
      return;
    }
    ts_tensor* x = doubles({1});
    ts_work* work = nullptr;
    ASSERT_OK(ts_group_receive(group, kNone, x, 1, 1'000'000, &work));
    EXPECT_FAILS(TS_ERROR_OPERATOR, "", ts_work_wait(work));
    ts_work_free(work);
    // Gloo has closed the connection.
    EXPECT_FAILS(TS_ERROR_OPERATOR, "", ts_group_send(group, kNone, x, 1, kTimeout, &work));
    given_up.set_value();
    ts_tensor_free(x);
  });
}

// The null devices' NCCL can refuse to end a communicator.
TEST(GroupGpu, IsFreedWhereItsCommunicatorsDoNotEnd) {
  NEEDS_GPUS(1);
  ASSERT_EQ(setenv("NULL_NCCL_ABORT", "fails", /*replace=*/1), 0);
  ts_store* store = local_store();
  const int32_t ranks[] = {0};
  ts_group* group = nullptr;
  ASSERT_OK(ts_group_new(store, "g", 0, 1, ranks, 0, kTimeout, &group));
  ts_group_free(group);
  ts_store_free(store);
  unsetenv("NULL_NCCL_ABORT");
}

}  // namespace
