// Memory that processes share. Package torch's tests use two processes.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <thread>

#include "support.h"

namespace {

// A file of the given size that only this process knows.
class File {
 public:
  explicit File(size_t bytes) : fd_(memfd_create("share_test", MFD_CLOEXEC)) {
    EXPECT_EQ(ftruncate(fd_, static_cast<off_t>(bytes)), 0);
  }
  ~File() {
    if (fd_ >= 0) close(fd_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int get() const { return fd_; }
  int another() const { return fcntl(fd_, F_DUPFD_CLOEXEC, 0); }

 private:
  int fd_;
};

ts_error* map(int file, size_t offset, std::vector<int64_t> sizes, ts_tensor** tensor) {
  return ts_tensor_map(file, offset, sizes.data(), static_cast<int64_t>(sizes.size()),
                       TS_DTYPE_FLOAT32, tensor);
}

TEST(Share, MappingsOfOneFileAreTheSameMemory) {
  const File file(2 * 4096);
  test::Tensor a;
  test::Tensor b;
  ASSERT_OK(map(file.another(), 4096, {2, 3}, a.out()));
  ASSERT_OK(map(file.another(), 4096, {6}, b.out()));
  ASSERT_OK(ts_tensor_copy(a, test::make<float>({1, 2, 3, 4, 5, 6}, {2, 3}), false));
  EXPECT_EQ(test::read<float>(b), (std::vector<float>{1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(test::shape(a), (test::Sizes{2, 3}));
  test::Tensor empty;
  ASSERT_OK(map(file.another(), 4096, {0, 3}, empty.out()));
  EXPECT_TRUE(test::read<float>(empty).empty());
}

// The descriptor is closed after the last tensor is freed, on another thread, and not before.
TEST(Share, TheLastTensorClosesTheFile) {
  const File file(4096);
  const int given = file.another();
  test::Tensor tensor;
  ASSERT_OK(map(given, 0, {16}, tensor.out()));
  test::Tensor view;
  ASSERT_OK(ts_tensor_retain(tensor, view.out()));
  tensor.free();
  EXPECT_NE(fcntl(given, F_GETFD), -1);
  view.free();
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (fcntl(given, F_GETFD) != -1 && std::chrono::steady_clock::now() < end) {
    std::this_thread::yield();
  }
  EXPECT_EQ(fcntl(given, F_GETFD), -1);
}

TEST(Share, WrongArgumentsLeaveTheFileToTheCaller) {
  const File file(4096);
  ts_tensor* tensor = nullptr;
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "inside of the file",
               map(file.get(), 0, {1025}, &tensor));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "inside of the file",
               map(file.get(), SIZE_MAX - 4095, {1}, &tensor));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "cannot be mapped", map(file.get(), 4, {1}, &tensor));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "negative size", map(file.get(), 0, {-1}, &tensor));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "memory can address",
               map(file.get(), 0, {INT64_MAX, INT64_MAX}, &tensor));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "not a regular file", map(-1, 0, {1}, &tensor));
  std::array<int, 2> pipes{};
  ASSERT_EQ(pipe2(pipes.data(), O_CLOEXEC), 0);
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "not a regular file", map(pipes[0], 0, {1}, &tensor));
  close(pipes[0]);
  close(pipes[1]);
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "NULL", map(file.get(), 0, {1}, nullptr));
  EXPECT_NE(fcntl(file.get(), F_GETFD), -1);
}

TEST(Share, HandlesOfGpuMemoryCheckTheirArguments) {
  const auto tensor = test::full({4}, 1, TS_DEVICE_CPU);
  std::array<uint8_t, TS_IPC_HANDLE_BYTES> handle{};
  size_t offset = 0;
  const std::vector<int64_t> four = {4};
  const std::vector<int64_t> one = {1};
  const auto open = [&](int32_t device, const uint8_t* from, const int64_t* sizes, int64_t ndim) {
    ts_tensor* opened = nullptr;
    return ts_ipc_open(device, from, 0, sizes, one.data(), ndim, TS_DTYPE_FLOAT32, -1, &opened);
  };
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "GPU", ts_ipc_export(tensor, handle.data(), &offset));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "NULL", ts_ipc_export(tensor, nullptr, &offset));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "NULL", open(0, nullptr, four.data(), 1));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "ndim", open(0, handle.data(), four.data(), 65));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "NULL", open(0, handle.data(), nullptr, 1));
  EXPECT_FAILS(TS_ERROR_NO_DEVICE, "device", open(1000, handle.data(), four.data(), 1));
}

TEST(ShareGpu, AHandleThatIsNoneIsRefused) {
  NEEDS_GPUS(1);
  const std::array<uint8_t, TS_IPC_HANDLE_BYTES> handle{};
  const std::vector<int64_t> four = {4};
  const std::vector<int64_t> one = {1};
  ts_tensor* opened = nullptr;
  EXPECT_FAILS(
      TS_ERROR_INVALID_ARGUMENT, "cannot be opened",
      ts_ipc_open(0, handle.data(), 0, four.data(), one.data(), 1, TS_DTYPE_FLOAT32, -1, &opened));
}

// The handle is invented, and null devices open it.
TEST(ShareGpu, EachDeviceHasAMappingOfItsOwn) {
  NEEDS_GPUS(2);
  std::array<uint8_t, TS_IPC_HANDLE_BYTES> handle{};
  handle[0] = 1;
  const std::vector<int64_t> four = {4};
  const std::vector<int64_t> one = {1};
  const auto open = [&](int32_t device, test::Tensor& tensor) {
    return test::Outcome(ts_ipc_open(device, handle.data(), 0, four.data(), one.data(), 1,
                                     TS_DTYPE_FLOAT32, -1, tensor.out()));
  };
  const auto address = [](const test::Tensor& tensor) {
    uintptr_t at = 0;
    EXPECT_OK(ts_tensor_get_address(tensor, &at));
    return at;
  };
  std::array<test::Tensor, 3> tensors;
  if (open(0, tensors[0]).code != TS_ERROR_NONE) GTEST_SKIP() << "needs devices that do nothing";
  EXPECT_EQ(open(1, tensors[1]).code, TS_ERROR_NONE);
  EXPECT_EQ(open(0, tensors[2]).code, TS_ERROR_NONE);
  EXPECT_NE(address(tensors[0]), address(tensors[1]));
  EXPECT_EQ(address(tensors[0]), address(tensors[2]));
}

TEST(ShareGpu, AHandleHasTheDistanceFromItsAllocation) {
  NEEDS_GPUS(1);
  const auto a = test::full({1 << 20}, 1, 0);
  std::array<uint8_t, TS_IPC_HANDLE_BYTES> handle{};
  size_t offset = 0;
  ASSERT_OK(ts_ipc_export(a, handle.data(), &offset));
  EXPECT_NE(handle, (std::array<uint8_t, TS_IPC_HANDLE_BYTES>{}));
  EXPECT_EQ(offset % 512, 0);  // LibTorch's blocks are aligned
}

}  // namespace
