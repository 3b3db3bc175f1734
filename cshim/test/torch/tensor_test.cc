// Creating, describing, reading and copying tensors.
#include <thread>

#include "support.h"

namespace {

using test::Call;
using test::describe;
using test::make;
using test::read;
using test::Sizes;
using test::Tensor;
using Floats = std::vector<float>;
using Ints = std::vector<int64_t>;

TEST(Tensor, FromDataCopies) {
  Floats values = {1, 2, 3, 4, 5, 6};
  Tensor tensor = make(values, {2, 3});
  values.assign(6, 0);
  EXPECT_EQ(read<float>(tensor), (Floats{1, 2, 3, 4, 5, 6}));
  const auto info = describe(tensor);
  EXPECT_EQ(info.numel, 6);
  EXPECT_EQ(info.bytes, 24);
  EXPECT_EQ(info.ndim, 2);
  EXPECT_EQ(info.dtype, TS_DTYPE_FLOAT32);
  EXPECT_EQ(info.device, TS_DEVICE_CPU);
  EXPECT_EQ(info.element_size, 4);
  EXPECT_TRUE(info.contiguous);
  EXPECT_FALSE(info.channels_last);
  EXPECT_FALSE(info.requires_grad);
  EXPECT_FALSE(info.pinned);
}

TEST(Tensor, KindsOfManyTensors) {
  Tensor floats = make<float>({1, 2}, {2});
  Tensor ints = make<int64_t>({3}, {1});
  ts_tensor* all[2] = {floats, ints};
  int32_t devices[2] = {7, 7};
  int32_t dtypes[2] = {-7, -7};
  ts_tensor* broken[2] = {floats, nullptr};
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "NULL", ts_tensor_get_kinds(broken, 2, devices, dtypes));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "NULL", ts_tensor_get_kinds(all, 2, devices, nullptr));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "negative",
               ts_tensor_get_kinds(all, -1, devices, dtypes));
  EXPECT_EQ(devices[0], 7);
  EXPECT_EQ(dtypes[0], -7);
  ASSERT_OK(ts_tensor_get_kinds(all, 2, devices, dtypes));
  EXPECT_EQ(devices[0], TS_DEVICE_CPU);
  EXPECT_EQ(devices[1], TS_DEVICE_CPU);
  EXPECT_EQ(dtypes[0], TS_DTYPE_FLOAT32);
  EXPECT_EQ(dtypes[1], TS_DTYPE_INT64);
  ASSERT_OK(ts_tensor_get_kinds(nullptr, 0, nullptr, nullptr));
}

TEST(Tensor, ScalarsAndEmptyTensorsKeepTheirShape) {
  EXPECT_EQ(describe(test::scalar(1)).ndim, 0);
  Tensor none = make<float>({}, {0, 3});
  EXPECT_EQ(describe(none).numel, 0);
  EXPECT_TRUE(read<float>(none).empty());
  EXPECT_EQ(test::shape(none), (Sizes{0, 3}));
}

TEST(Tensor, NewTensorsCanBeChannelsLast) {
  Tensor tensor =
      test::empty({2, 3, 4, 5}, TS_DTYPE_FLOAT16, TS_DEVICE_CPU, TS_MEMORY_FORMAT_CHANNELS_LAST);
  EXPECT_TRUE(describe(tensor).channels_last);
  EXPECT_FALSE(describe(tensor).contiguous);
  Sizes strides(4);
  ASSERT_OK(ts_tensor_get_shape(tensor, nullptr, strides.data(), 4));
  EXPECT_EQ(strides, (Sizes{60, 1, 15, 3}));
}

struct BadShape {
  Sizes sizes;
  int64_t ndim;
  int32_t dtype;
  int32_t format;
  const char* text;
};

TEST(Tensor, RefusesBadShapes) {
  const std::vector<BadShape> table = {
      {{-1}, 1, TS_DTYPE_FLOAT32, TS_MEMORY_FORMAT_CONTIGUOUS, "negative size in [-1]"},
      {{2}, -1, TS_DTYPE_FLOAT32, TS_MEMORY_FORMAT_CONTIGUOUS, "ndim"},
      {{2}, 65, TS_DTYPE_FLOAT32, TS_MEMORY_FORMAT_CONTIGUOUS, "ndim"},
      {{2}, (int64_t{1} << 32) + 1, TS_DTYPE_FLOAT32, TS_MEMORY_FORMAT_CONTIGUOUS, "ndim"},
      {{INT64_MAX, 2},
       2,
       TS_DTYPE_UINT8,
       TS_MEMORY_FORMAT_CONTIGUOUS,
       "more than memory can address"},
      {{INT64_MAX, 2, 0},
       3,
       TS_DTYPE_UINT8,
       TS_MEMORY_FORMAT_CONTIGUOUS,
       "more than memory can address"},
      {{INT64_MAX},
       1,
       TS_DTYPE_FLOAT32,
       TS_MEMORY_FORMAT_CONTIGUOUS,
       "more than memory can address"},
      {{2}, 1, 99, TS_MEMORY_FORMAT_CONTIGUOUS, "dtype 99"},
      {{2}, 1, -1, TS_MEMORY_FORMAT_CONTIGUOUS, "dtype -1"},
      {{2}, 1, 12, TS_MEMORY_FORMAT_CONTIGUOUS, "dtype 12"},
      {{2}, 1, TS_DTYPE_FLOAT32, TS_MEMORY_FORMAT_CHANNELS_LAST, "4 dimensions"},
      {{2}, 1, TS_DTYPE_FLOAT32, 1, "memory_format"},
  };
  for (const BadShape& bad : table) {
    SCOPED_TRACE(bad.text);
    Tensor tensor;
    EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, bad.text,
                 ts_tensor_new(bad.sizes.data(), bad.ndim, bad.dtype, TS_DEVICE_CPU, bad.format,
                               tensor.out()));
    EXPECT_EQ(static_cast<ts_tensor*>(tensor), nullptr);
  }
}

TEST(Tensor, TooMuchHostMemoryIsOutOfMemory) {
  const Sizes sizes = {int64_t{1} << 55};
  Tensor tensor;
  EXPECT_FAILS(TS_ERROR_OUT_OF_MEMORY, "",
               ts_tensor_new(sizes.data(), 1, TS_DTYPE_UINT8, TS_DEVICE_CPU,
                             TS_MEMORY_FORMAT_CONTIGUOUS, tensor.out()));
}

TEST(Tensor, ByteCountsMustFit) {
  const uint8_t data[8] = {};
  const Sizes sizes = {2};
  Tensor tensor;
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "7 bytes given where [2] of Float has 8",
               ts_tensor_from_data(data, 7, sizes.data(), 1, TS_DTYPE_FLOAT32, tensor.out()));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "data is NULL",
               ts_tensor_from_data(nullptr, 8, sizes.data(), 1, TS_DTYPE_FLOAT32, tensor.out()));
  const uint8_t flags[2] = {1, 2};
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "neither 0 nor 1",
               ts_tensor_from_data(flags, 2, sizes.data(), 1, TS_DTYPE_BOOL, tensor.out()));
  uint8_t small[3];
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "3 bytes to read a tensor of 4",
               ts_tensor_read(test::scalar(1), small, 3));
}

TEST(Tensor, FromMemorySharesAndDoesNotOwn) {
  alignas(16) float memory[4] = {1, 2, 3, 4};
  const Sizes sizes = {2, 2};
  auto* bytes = reinterpret_cast<uint8_t*>(memory);
  Tensor view;
  {
    Tensor tensor;
    ASSERT_OK(ts_tensor_from_memory(bytes, sizeof memory, sizes.data(), 2, TS_DTYPE_FLOAT32,
                                    tensor.out()));
    uintptr_t address = 0;
    ASSERT_OK(ts_tensor_get_address(tensor, &address));
    EXPECT_EQ(address, reinterpret_cast<uintptr_t>(memory));
    view = Call("aten::t").tensor(tensor).one();
  }
  // The view keeps the storage alive after the tensor is freed. Writes are visible in both
  // directions.
  memory[1] = 20;
  EXPECT_EQ(read<float>(view), (Floats{1, 3, 20, 4}));
  ASSERT_OK(Call("aten::zero_").tensor(view).drop());
  EXPECT_EQ(memory[3], 0);
  view.free();
  memory[0] = 5;  // the test still owns the memory
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "aligned",
               ts_tensor_from_memory(bytes + 1, 4, sizes.data(), 0, TS_DTYPE_FLOAT32, view.out()));
}

std::vector<int64_t> taken() {
  std::vector<int64_t> tokens(8);
  tokens.resize(static_cast<size_t>(ts_borrowed_take(tokens.data(), 8)));
  return tokens;
}

TEST(Tensor, BorrowedMemoryComesBackAfterTheLastTensor) {
  alignas(float) float memory[] = {1, 2, 0, 3, 4};
  auto* bytes = reinterpret_cast<uint8_t*>(memory);
  const Ints sizes{2, 2};
  const Ints strides{3, 1};
  Tensor view;
  {
    Tensor tensor;
    ASSERT_OK(ts_tensor_borrow(bytes, sizeof memory, sizes.data(), strides.data(), 2,
                               TS_DTYPE_FLOAT32, 41, tensor.out()));
    view = Call("aten::t").tensor(tensor).one();
  }
  EXPECT_EQ(read<float>(view), (Floats{1, 3, 2, 4}));
  EXPECT_EQ(taken(), Ints{});
  view.free();
  EXPECT_EQ(ts_borrowed_take(nullptr, 8), 0);
  EXPECT_EQ(taken(), Ints{41});
  EXPECT_EQ(taken(), Ints{});
  // A refused call does not take ownership of the memory.
  const auto borrow = [&](size_t count, const Ints& shape, const Ints& steps) {
    return ts_tensor_borrow(bytes, count, shape.data(), steps.data(),
                            static_cast<int64_t>(shape.size()), TS_DTYPE_FLOAT32, 42, view.out());
  };
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "20 bytes", borrow(19, sizes, strides));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "negative", borrow(20, sizes, {3, -1}));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "address", borrow(20, sizes, {INT64_MAX, 1}));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "aligned",
               ts_tensor_borrow(bytes + 1, 8, sizes.data(), strides.data(), 0, TS_DTYPE_FLOAT32, 42,
                                view.out()));
  EXPECT_EQ(taken(), Ints{});
  // A tensor without elements needs no memory.
  const Ints none{0, 5};
  ASSERT_OK(ts_tensor_borrow(nullptr, 0, none.data(), strides.data(), 2, TS_DTYPE_FLOAT32, 43,
                             view.out()));
  view.free();
  EXPECT_EQ(taken(), Ints{43});
}

TEST(Tensor, ReadsInLogicalOrder) {
  Tensor tensor = make<float>({1, 2, 3, 4, 5, 6}, {2, 3});
  EXPECT_EQ(read<float>(Call("aten::t").tensor(tensor).one()), (Floats{1, 4, 2, 5, 3, 6}));
  Tensor row = Call("aten::select", "int").tensor(tensor).integer(1).integer(1).one();
  EXPECT_EQ(read<float>(row), (Floats{2, 5}));
  // A tensor that is part of the autograd graph can be read.
  ASSERT_OK(ts_tensor_set_requires_grad(tensor, true));
  EXPECT_EQ(read<float>(Call("aten::t").tensor(tensor).one()).size(), 6U);
}

TEST(Tensor, ItemConvertsTheOnlyElement) {
  double real = 0;
  int64_t integer = 0;
  ASSERT_OK(ts_tensor_get_item(make<int64_t>({7}, {1, 1}), &real));
  EXPECT_EQ(real, 7);
  ASSERT_OK(ts_tensor_get_item_int(make<int64_t>({INT64_MAX - 1}, {}), &integer));
  EXPECT_EQ(integer, INT64_MAX - 1);
  ASSERT_OK(ts_tensor_get_item(test::scalar(0.5), &real));
  EXPECT_EQ(real, 0.5);
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "2 elements",
               ts_tensor_get_item(make<float>({1, 2}, {2}), &real));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "0 elements",
               ts_tensor_get_item(make<float>({}, {0}), &real));
}

// A view can have more elements than memory has bytes. Its sizes do not overflow.
TEST(Tensor, ExpandedViewsDoNotOverflow) {
  Tensor wide = Call("aten::expand").tensor(test::scalar(1)).ints({int64_t{1} << 62}).one();
  EXPECT_EQ(describe(wide).numel, int64_t{1} << 62);
  EXPECT_EQ(describe(wide).bytes, INT64_MAX);
  uint8_t none = 0;
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "0 bytes to read", ts_tensor_read(wide, &none, 0));
}

// Reading a view that LibTorch negates lazily returns the negated elements.
TEST(Tensor, LazyNegationIsResolved) {
  Tensor values = make<float>({1, -2}, {2});
  EXPECT_EQ(read<float>(Call("aten::_neg_view").tensor(values).one()), (Floats{-1, 2}));
}

TEST(Tensor, ShapeNeedsRoom) {
  Tensor tensor = make<float>({1, 2}, {1, 2});
  int64_t sizes[1] = {-5};
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "capacity 1",
               ts_tensor_get_shape(tensor, sizes, nullptr, 1));
  EXPECT_EQ(sizes[0], -5);
  EXPECT_OK(ts_tensor_get_shape(tensor, nullptr, nullptr, 2));
}

TEST(Tensor, CountsReferences) {
  const int64_t before = ts_tensor_count();
  Tensor tensor = test::scalar(3);
  Tensor same;
  ASSERT_OK(ts_tensor_retain(tensor, same.out()));
  EXPECT_EQ(ts_tensor_count(), before + 2);
  ASSERT_OK(Call("aten::add_", "Scalar").tensor(tensor).integer(1).drop());
  double value = 0;
  ASSERT_OK(ts_tensor_get_item(same, &value));
  EXPECT_EQ(value, 4) << "a reference to the same tensor, not a copy";
  // Frees all references on another thread, in one call, with a NULL among them.
  ts_tensor* all[3] = {nullptr, nullptr, nullptr};
  ASSERT_OK(ts_tensor_retain(tensor, &all[0]));
  ASSERT_OK(ts_tensor_retain(tensor, &all[2]));
  std::thread([&] { ts_tensor_free_all(all, 3); }).join();
  EXPECT_EQ(ts_tensor_count(), before + 2);
  tensor.free();
  same.free();
  ts_tensor_free(nullptr);
  EXPECT_EQ(ts_tensor_count(), before);
}

TEST(Tensor, CopyConvertsAndBroadcasts) {
  Tensor dst = test::empty({2, 2}, TS_DTYPE_FLOAT64);
  ASSERT_OK(ts_tensor_copy(dst, make<int64_t>({1, 2}, {2}), false));
  EXPECT_EQ(read<double>(dst), (std::vector<double>{1, 2, 1, 2}));
  EXPECT_FAILS(TS_ERROR_OPERATOR, "", ts_tensor_copy(dst, make<float>({1, 2, 3}, {3}), false));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "src is NULL", ts_tensor_copy(dst, nullptr, false));
  // A parameter, which needs a gradient, can be filled by a copy.
  Tensor parameter = make<float>({0, 0}, {2});
  ASSERT_OK(ts_tensor_set_requires_grad(parameter, true));
  ASSERT_OK(ts_tensor_copy(parameter, make<float>({1, 2}, {2}), false));
  EXPECT_EQ(read<float>(parameter), (Floats{1, 2}));
  EXPECT_TRUE(describe(parameter).requires_grad);
}

TEST(Tensor, ToConvertsOrReturnsTheSame) {
  Tensor tensor = make<float>({1.5, 2.5}, {2});
  Tensor same;
  ASSERT_OK(ts_tensor_to(tensor, TS_DEVICE_CPU, -1, false, same.out()));
  uintptr_t a = 0;
  uintptr_t b = 0;
  ASSERT_OK(ts_tensor_get_address(tensor, &a));
  ASSERT_OK(ts_tensor_get_address(same, &b));
  EXPECT_EQ(a, b);
  Tensor ints;
  ASSERT_OK(ts_tensor_to(tensor, TS_DEVICE_CPU, TS_DTYPE_INT64, false, ints.out()));
  EXPECT_EQ(read<int64_t>(ints), (std::vector<int64_t>{1, 2}));
  Tensor nowhere;
  EXPECT_FAILS(TS_ERROR_NO_DEVICE, "",
               ts_tensor_to(tensor, ts_device_count(), -1, false, nowhere.out()));
  EXPECT_FAILS(TS_ERROR_NO_DEVICE, "", ts_tensor_to(tensor, -2, -1, false, nowhere.out()));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "dtype",
               ts_tensor_to(tensor, TS_DEVICE_CPU, 1000, false, nowhere.out()));
}

TEST(Tensor, AStorageIsFreedAndAllocatedForAllWhoShareIt) {
  Tensor tensor = make<float>({1, 2, 3, 4}, {4});
  Tensor whole = test::empty({4}, TS_DTYPE_FLOAT32);
  Tensor part = Call("aten::narrow").tensor(whole).integer(0).integer(1).integer(2).one();
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "has memory", ts_tensor_resize_storage(whole, 16));
  ASSERT_OK(ts_tensor_resize_storage(whole, 0));
  ASSERT_OK(ts_tensor_resize_storage(whole, 0));
  ASSERT_OK(ts_tensor_resize_storage(part, 16));
  ASSERT_OK(ts_tensor_copy(whole, tensor, false));
  EXPECT_EQ(read<float>(part), (Floats{2, 3}));
}

TEST(TensorGpu, MovesThereAndBack) {
  NEEDS_GPUS(1);
  Tensor host = make<float>({1, 2, 3, 4, 5, 6}, {2, 3});
  Tensor device;
  ASSERT_OK(ts_tensor_to(host, 0, -1, false, device.out()));
  EXPECT_EQ(describe(device).device, 0);
  EXPECT_FALSE(describe(device).pinned);
  EXPECT_EQ(read<float>(device), (Floats{1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(read<float>(Call("aten::t").tensor(device).one()), (Floats{1, 4, 2, 5, 3, 6}));
  double value = 0;
  ASSERT_OK(ts_tensor_get_item(test::full({1}, 9, 0), &value));
  EXPECT_EQ(value, 9);
  EXPECT_OK(ts_tensor_record_stream(device, test::pool_stream()));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "on a GPU",
               ts_tensor_record_stream(host, test::pool_stream()));
}

TEST(TensorGpu, ReadsInTheOrderOfTheCurrentStream) {
  NEEDS_GPUS(1);
  Tensor x = test::full({1 << 20}, 1, 0);
  const ts_stream side = test::pool_stream();
  ASSERT_OK(ts_wait_cuda_stream(side, {0, 0}));
  ts_stream_guard guard{};
  ASSERT_OK(ts_stream_guard_enter(side, &guard));
  for (int i = 0; i < 50; ++i) ASSERT_OK(Call("aten::add_", "Scalar").tensor(x).integer(1).drop());
  EXPECT_EQ(read<float>(x)[12345], 51);
  ASSERT_OK(ts_stream_guard_exit(guard));
}

TEST(TensorGpu, StatisticsFollowTensors) {
  NEEDS_GPUS(1);
  ts_device_memory before = {};
  before.size = sizeof before;
  ts_device_memory during = {};
  during.size = sizeof during;
  ts_device_memory after = {};
  after.size = sizeof after;
  ASSERT_OK(ts_device_get_memory(0, &before));
  Tensor tensor = test::empty({1 << 22}, TS_DTYPE_FLOAT32, 0);
  ASSERT_OK(ts_device_get_memory(0, &during));
  EXPECT_GE(during.allocated_bytes, before.allocated_bytes + (4 << 22));
  EXPECT_GE(during.reserved_bytes, during.allocated_bytes);
  EXPECT_GT(during.free_bytes, 0);
  EXPECT_GT(during.total_bytes, during.free_bytes);
  tensor.free();
  ASSERT_OK(ts_device_get_memory(0, &after));
  EXPECT_EQ(after.allocated_bytes, before.allocated_bytes);
  EXPECT_GE(after.peak_allocated_bytes, during.allocated_bytes);
  ASSERT_OK(ts_allocator_empty_cache());
  ASSERT_OK(ts_device_reset_peak_memory(0));
  ASSERT_OK(ts_device_get_memory(0, &after));
  EXPECT_EQ(after.peak_allocated_bytes, after.allocated_bytes);
  EXPECT_LE(after.reserved_bytes, during.reserved_bytes);
}

TEST(TensorGpu, TooLargeIsOutOfMemoryAndTheDeviceStillWorks) {
  NEEDS_GPUS(1);
  const Sizes sizes = {int64_t{1} << 42};
  Tensor tensor;
  EXPECT_FAILS(TS_ERROR_OUT_OF_MEMORY, "",
               ts_tensor_new(sizes.data(), 1, TS_DTYPE_FLOAT32, 0, TS_MEMORY_FORMAT_CONTIGUOUS,
                             tensor.out()));
  EXPECT_EQ(read<float>(test::full({2}, 3, 0)), (Floats{3, 3}));
}

TEST(Tensor, LentMemoryIsKnownThroughItsViews) {
  Tensor owner = test::full({4}, 1);
  Tensor view = Call("aten::slice", "Tensor").tensor(owner).integer(0).integer(1).integer(3).one();
  Tensor other = test::full({4}, 1);
  bool lent = true;
  EXPECT_OK(ts_tensor_is_lent(view, &lent));
  EXPECT_FALSE(lent);
  EXPECT_OK(ts_tensor_set_lent(owner, true));
  EXPECT_OK(ts_tensor_is_lent(view, &lent));
  EXPECT_TRUE(lent);
  EXPECT_OK(ts_tensor_is_lent(other, &lent));
  EXPECT_FALSE(lent);
  EXPECT_OK(ts_tensor_set_lent(view, false));
  EXPECT_OK(ts_tensor_is_lent(owner, &lent));
  EXPECT_FALSE(lent);
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "NULL", ts_tensor_set_lent(nullptr, true));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "lent is NULL", ts_tensor_is_lent(owner, nullptr));
}

TEST(Tensor, PinnedMemoryNeedsAGpu) {
  const int64_t sizes[] = {2, 3};
  Tensor pinned;
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "NULL",
               ts_tensor_new_pinned(sizes, 2, TS_DTYPE_FLOAT32, 0, nullptr));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "memory_format",
               ts_tensor_new_pinned(sizes, 2, TS_DTYPE_FLOAT32, 7, pinned.out()));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "4 dimensions",
               ts_tensor_new_pinned(sizes, 2, TS_DTYPE_FLOAT32, TS_MEMORY_FORMAT_CHANNELS_LAST,
                                    pinned.out()));
  ts_host_stats stats{};
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "size", ts_host_allocator_get_stats(&stats));
  stats.size = sizeof stats;
  if (ts_device_count() == 0) {
    EXPECT_FAILS(TS_ERROR_NO_DEVICE, "device",
                 ts_tensor_new_pinned(sizes, 2, TS_DTYPE_FLOAT32, 0, pinned.out()));
    EXPECT_FAILS(TS_ERROR_NO_DEVICE, "device", ts_host_allocator_get_stats(&stats));
    return;
  }
  ASSERT_OK(ts_tensor_new_pinned(sizes, 2, TS_DTYPE_FLOAT32, 0, pinned.out()));
  EXPECT_TRUE(test::describe(pinned).pinned);
  EXPECT_OK(ts_host_allocator_get_stats(&stats));
  EXPECT_GE(stats.active_bytes, 24U);
}

}  // namespace
