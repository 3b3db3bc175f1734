// DLPack: exported structs, imported structs, invalid structs, and order.
#include <ATen/dlpack.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "support.h"

namespace {

constexpr ts_stream kDefault = {0, 0};

// Another library's struct, which counts calls of its deleter and records the thread of the last
// call.
struct Producer {
  std::vector<int64_t> shape = {2, 3};
  std::vector<int64_t> strides = {3, 1};
  std::vector<float> values = {1, 2, 3, 4, 5, 6};
  DLManagedTensorVersioned managed{};
  DLManagedTensor old{};
  std::mutex mutex;
  std::condition_variable deleted;
  int deletes = 0;
  std::thread::id thread;

  Producer() {
    DLTensor& tensor = managed.dl_tensor;
    tensor.data = values.data();
    tensor.device = {kDLCPU, 0};
    tensor.ndim = 2;
    tensor.dtype = {kDLFloat, 32, 1};
    tensor.shape = shape.data();
    tensor.strides = strides.data();
    managed.version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION};
    managed.manager_ctx = this;
    managed.deleter = [](DLManagedTensorVersioned* self) {
      static_cast<Producer*>(self->manager_ctx)->note();
    };
    old.dl_tensor = tensor;
    old.manager_ctx = this;
    old.deleter = [](DLManagedTensor* self) { static_cast<Producer*>(self->manager_ctx)->note(); };
  }
  void note() {
    const std::lock_guard<std::mutex> lock(mutex);
    ++deletes;
    thread = std::this_thread::get_id();
    deleted.notify_all();
  }
  bool wait_for_delete() {
    std::unique_lock<std::mutex> lock(mutex);
    return deleted.wait_for(lock, std::chrono::seconds(20), [this] { return deletes > 0; });
  }
};

// Memory returned when the process starts to exit reaches its owner before the rest of the exit.
TEST(DLPackDeathTest, TheEndOfTheProcessWaitsForADeleter) {
  static std::atomic<bool> ends{false};
  static std::atomic<bool> deleted{false};
  static Producer producer;
  producer.managed.deleter = [](DLManagedTensorVersioned*) {
    while (!ends) std::this_thread::yield();
    const std::vector<char> work(size_t{32} << 20, 1);  // takes longer than the rest of the end
    deleted = work.back() == 1;
  };
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // in a separate process
  EXPECT_EXIT(
      {
        std::atexit([] { _exit(deleted ? 0 : 1); });
        test::Tensor tensor;
        EXPECT_OK(ts_dlpack_import_versioned(&producer.managed, kDefault, 0, tensor.out()));
        std::atexit([] { ends = true; });
        tensor.free();
        std::exit(2);
      },
      testing::ExitedWithCode(0), "");
}

TEST(DLPack, AnImportedStructIsTheSameMemory) {
  for (const bool versioned : {true, false}) {
    Producer producer;
    {
      test::Tensor tensor;
      if (versioned) {
        ASSERT_OK(ts_dlpack_import_versioned(&producer.managed, kDefault, 0, tensor.out()));
      } else {
        ASSERT_OK(ts_dlpack_import(&producer.old, kDefault, 0, tensor.out()));
      }
      uintptr_t address = 0;
      ASSERT_OK(ts_tensor_get_address(tensor, &address));
      EXPECT_EQ(address, reinterpret_cast<uintptr_t>(producer.values.data()));
      EXPECT_EQ(test::read<float>(tensor), producer.values);
      test::Tensor view;
      ASSERT_OK(ts_tensor_retain(tensor, view.out()));
      tensor.free();
      producer.values[0] = 7;
      EXPECT_EQ(test::read<float>(view)[0], 7);
      EXPECT_EQ(producer.deletes, 0);
    }
    ASSERT_TRUE(producer.wait_for_delete());
    EXPECT_EQ(producer.deletes, 1);
    // A Go deleter must not run inside a cgo call that promises not to call back.
    EXPECT_NE(producer.thread, std::this_thread::get_id());
  }
}

TEST(DLPack, StridesAndOffsetsCount) {
  Producer producer;
  producer.shape = {2, 2};
  producer.strides = {1, 3};  // a transposed part
  producer.managed.dl_tensor.byte_offset = sizeof(float);
  {
    test::Tensor tensor;
    ASSERT_OK(ts_dlpack_import_versioned(&producer.managed, kDefault, 0, tensor.out()));
    EXPECT_EQ(test::read<float>(tensor), (std::vector<float>{2, 5, 3, 6}));
  }
  ASSERT_TRUE(producer.wait_for_delete());
}

TEST(DLPack, WithoutStridesItIsContiguous) {
  Producer producer;
  producer.managed.dl_tensor.strides = nullptr;
  {
    test::Tensor tensor;
    ASSERT_OK(ts_dlpack_import_versioned(&producer.managed, kDefault, 0, tensor.out()));
    EXPECT_EQ(test::read<float>(tensor), producer.values);
  }
  ASSERT_TRUE(producer.wait_for_delete());
}

TEST(DLPack, EmptyTensorsAndScalars) {
  Producer empty;
  empty.shape = {0, INT64_MAX / 8};
  empty.strides = {-5, 0};  // meaningless, as there are no elements
  empty.managed.dl_tensor.data = nullptr;
  Producer scalar;
  scalar.managed.dl_tensor.ndim = 0;
  scalar.managed.dl_tensor.shape = nullptr;
  scalar.managed.dl_tensor.strides = nullptr;
  {
    test::Tensor a;
    ASSERT_OK(ts_dlpack_import_versioned(&empty.managed, kDefault, 0, a.out()));
    EXPECT_TRUE(test::read<float>(a).empty());
    test::Tensor b;
    ASSERT_OK(ts_dlpack_import_versioned(&scalar.managed, kDefault, 0, b.out()));
    EXPECT_EQ(test::read<float>(b), (std::vector<float>{1}));
  }
  ASSERT_TRUE(empty.wait_for_delete());
  ASSERT_TRUE(scalar.wait_for_delete());
}

TEST(DLPack, ANullDeleterIsNotCalled) {
  Producer producer;
  producer.managed.deleter = nullptr;
  test::Tensor tensor;
  ASSERT_OK(ts_dlpack_import_versioned(&producer.managed, kDefault, 0, tensor.out()));
  tensor.free();
  ts_dlpack_free_versioned(&producer.managed);
  ts_dlpack_free(nullptr);
  ts_dlpack_free_versioned(nullptr);
}

// An invalid struct is refused with the reason, and stays with the caller.
TEST(DLPack, HostileStructs) {
  const struct {
    const char* says;
    int32_t code;
    std::function<void(Producer&)> spoil;
  } cases[] = {
      {"ndim", TS_ERROR_INVALID_ARGUMENT, [](Producer& p) { p.managed.dl_tensor.ndim = -1; }},
      {"ndim", TS_ERROR_INVALID_ARGUMENT, [](Producer& p) { p.managed.dl_tensor.ndim = 65; }},
      {"ndim", TS_ERROR_INVALID_ARGUMENT,
       [](Producer& p) { p.managed.dl_tensor.ndim = INT32_MAX; }},
      {"shape is NULL", TS_ERROR_INVALID_ARGUMENT,
       [](Producer& p) { p.managed.dl_tensor.shape = nullptr; }},
      {"negative size", TS_ERROR_INVALID_ARGUMENT, [](Producer& p) { p.shape[0] = -2; }},
      {"memory can address", TS_ERROR_INVALID_ARGUMENT,
       [](Producer& p) {
         p.shape = {INT64_MAX, INT64_MAX};
       }},
      {"negative", TS_ERROR_INVALID_ARGUMENT, [](Producer& p) { p.strides[1] = -1; }},
      {"memory can address", TS_ERROR_INVALID_ARGUMENT,
       [](Producer& p) { p.strides[0] = INT64_MAX; }},
      {"memory can address", TS_ERROR_INVALID_ARGUMENT,
       [](Producer& p) { p.strides[0] = INT64_MAX / 4; }},
      {"data is NULL", TS_ERROR_INVALID_ARGUMENT,
       [](Producer& p) { p.managed.dl_tensor.data = nullptr; }},
      {"byte_offset", TS_ERROR_INVALID_ARGUMENT,
       [](Producer& p) { p.managed.dl_tensor.byte_offset = UINT64_MAX; }},
      {"beyond all memory", TS_ERROR_INVALID_ARGUMENT,
       [](Producer& p) { p.managed.dl_tensor.data = reinterpret_cast<void*>(UINTPTR_MAX - 7); }},
      {"aligned", TS_ERROR_INVALID_ARGUMENT,
       [](Producer& p) { p.managed.dl_tensor.byte_offset = 1; }},
      {"lanes", TS_ERROR_INVALID_ARGUMENT,
       [](Producer& p) { p.managed.dl_tensor.dtype.lanes = 4; }},
      {"lanes", TS_ERROR_INVALID_ARGUMENT,
       [](Producer& p) { p.managed.dl_tensor.dtype.lanes = 0; }},
      {"bits", TS_ERROR_INVALID_ARGUMENT, [](Producer& p) { p.managed.dl_tensor.dtype.bits = 24; }},
      {"code", TS_ERROR_INVALID_ARGUMENT,
       [](Producer& p) { p.managed.dl_tensor.dtype.code = 255; }},
      {"code", TS_ERROR_INVALID_ARGUMENT,
       [](Producer& p) { p.managed.dl_tensor.dtype.code = kDLOpaqueHandle; }},
      {"type 4", TS_ERROR_INVALID_ARGUMENT,
       [](Producer& p) {
         p.managed.dl_tensor.device = {kDLOpenCL, 0};
       }},
      {"type 13", TS_ERROR_INVALID_ARGUMENT,
       [](Producer& p) {
         p.managed.dl_tensor.device = {kDLCUDAManaged, 0};
       }},
      {"type", TS_ERROR_INVALID_ARGUMENT,
       [](Producer& p) {
         p.managed.dl_tensor.device = {static_cast<DLDeviceType>(INT32_MIN), 0};
       }},
      {"device", TS_ERROR_NO_DEVICE,
       [](Producer& p) {
         p.managed.dl_tensor.device = {kDLCUDA, 1000};
       }},
      {"read-only", TS_ERROR_INVALID_ARGUMENT,
       [](Producer& p) { p.managed.flags = DLPACK_FLAG_BITMASK_READ_ONLY; }},
      {"DLPack 2", TS_ERROR_UNSUPPORTED, [](Producer& p) { p.managed.version.major = 2; }},
      {"DLPack 0", TS_ERROR_UNSUPPORTED, [](Producer& p) { p.managed.version.major = 0; }},
  };
  for (const auto& c : cases) {
    Producer producer;
    c.spoil(producer);
    ts_tensor* tensor = nullptr;
    const test::Outcome outcome(
        ts_dlpack_import_versioned(&producer.managed, kDefault, 0, &tensor));
    EXPECT_EQ(outcome.code, c.code) << outcome;
    EXPECT_TRUE(outcome.says(c.says)) << c.says << ": " << outcome;
    EXPECT_EQ(tensor, nullptr);
    EXPECT_EQ(producer.deletes, 0);
    ts_dlpack_free_versioned(&producer.managed);
    EXPECT_EQ(producer.deletes, 1);
  }
  Producer producer;
  ts_tensor* tensor = nullptr;
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "flag",
               ts_dlpack_import_versioned(&producer.managed, kDefault, 64, &tensor));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "NULL",
               ts_dlpack_import_versioned(nullptr, kDefault, 0, &tensor));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "NULL",
               ts_dlpack_import(&producer.old, kDefault, 0, nullptr));
}

TEST(DLPack, ReadOnlyMemoryIsAllowedByAFlag) {
  Producer producer;
  producer.managed.flags = DLPACK_FLAG_BITMASK_READ_ONLY;
  {
    test::Tensor tensor;
    ASSERT_OK(ts_dlpack_import_versioned(&producer.managed, kDefault, TS_DLPACK_FLAG_READ_ONLY,
                                         tensor.out()));
  }
  ASSERT_TRUE(producer.wait_for_delete());
}

TEST(DLPack, AnExportedTensorDescribesItself) {
  const auto tensor = test::full({2, 1, 3}, 4, TS_DEVICE_CPU);
  DLManagedTensorVersioned* managed = nullptr;
  ASSERT_OK(ts_dlpack_export_versioned(tensor, kDefault, 0, &managed));
  EXPECT_EQ(managed->version.major, DLPACK_MAJOR_VERSION);
  EXPECT_EQ(managed->flags, 0);
  const DLTensor& described = managed->dl_tensor;
  EXPECT_EQ(described.device.device_type, kDLCPU);
  EXPECT_EQ(described.ndim, 3);
  EXPECT_EQ(described.dtype.code, kDLFloat);
  EXPECT_EQ(described.dtype.bits, 32);
  EXPECT_EQ(described.dtype.lanes, 1);
  EXPECT_EQ(described.byte_offset, 0);
  EXPECT_EQ(std::vector<int64_t>(described.shape, described.shape + 3),
            (std::vector<int64_t>{2, 1, 3}));
  EXPECT_EQ(std::vector<int64_t>(described.strides, described.strides + 3),
            (std::vector<int64_t>{3, 1, 1}));
  EXPECT_EQ(static_cast<float*>(described.data)[5], 4);
  ts_dlpack_free_versioned(managed);
}

TEST(DLPack, AnExportKeepsTheMemoryUntilItsDeleter) {
  DLManagedTensor* managed = nullptr;
  uintptr_t address = 0;
  {
    const auto tensor = test::full({1000}, 5, TS_DEVICE_CPU);
    ASSERT_OK(ts_tensor_get_address(tensor, &address));
    ASSERT_OK(ts_dlpack_export(tensor, kDefault, 0, &managed));
  }
  test::Tensor back;
  ASSERT_OK(ts_dlpack_import(managed, kDefault, 0, back.out()));
  uintptr_t again = 0;
  ASSERT_OK(ts_tensor_get_address(back, &again));
  EXPECT_EQ(again, address);
  EXPECT_EQ(test::read<float>(back)[999], 5);
}

TEST(DLPack, TensorsWithGradientsAreNotExported) {
  const auto tensor = test::full({2}, 1, TS_DEVICE_CPU);
  ASSERT_OK(ts_tensor_set_requires_grad(tensor, true));
  DLManagedTensor* managed = nullptr;
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "gradient",
               ts_dlpack_export(tensor, kDefault, 0, &managed));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "NULL", ts_dlpack_export(tensor, kDefault, 0, nullptr));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "NULL", ts_dlpack_export(nullptr, kDefault, 0, &managed));
}

TEST(DLPackGpu, HostMemoryIsNoGpus) {
  NEEDS_GPUS(1);
  Producer producer;
  producer.managed.dl_tensor.device = {kDLCUDA, 0};
  ts_tensor* tensor = nullptr;
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "not memory of CUDA device 0",
               ts_dlpack_import_versioned(&producer.managed, kDefault, 0, &tensor));
}

}  // namespace
