// Pinned memory and the batch of copies on a stream.
#include <algorithm>

#include "support.h"

namespace {

using test::Call;
using test::Event;
using test::Pinned;
using test::pool_stream;
using test::read;
using test::Tensor;

TEST(Pinned, AllocationFailsWithoutGpu) {
  if (ts_device_count() > 0) GTEST_SKIP() << "there is a GPU";
  ts_pinned* pinned = nullptr;
  EXPECT_FAILS(TS_ERROR_NO_DEVICE, "", ts_pinned_new(4096, &pinned));
  EXPECT_EQ(pinned, nullptr);
  EXPECT_OK(ts_pinned_destroy(nullptr));
  EXPECT_EQ(ts_pinned_live_bytes(), 0);
}

TEST(Pinned, EmptyMemoryIsRefused) {
  ts_pinned* pinned = nullptr;
  uint8_t byte = 0;
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "0 bytes", ts_pinned_register(nullptr, 8, &pinned));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "0 bytes", ts_pinned_register(&byte, 0, &pinned));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "0 bytes", ts_pinned_new(0, &pinned));
}

TEST(PinnedGpu, IsZeroedCountedAndSeenAsPinned) {
  NEEDS_GPUS(1);
  const int64_t before = ts_pinned_live_bytes();
  {
    Pinned pinned(1000 * sizeof(float));
    EXPECT_EQ(ts_pinned_live_bytes(), before + 4000);
    EXPECT_TRUE(std::all_of(pinned.data(), pinned.data() + 4000, [](uint8_t b) { return b == 0; }));
    Tensor tensor = pinned.tensor({10, 100});
    EXPECT_TRUE(test::describe(tensor).pinned);
  }
  EXPECT_EQ(ts_pinned_live_bytes(), before);
  ts_pinned* huge = nullptr;
  EXPECT_FAILS(TS_ERROR_OUT_OF_MEMORY, "pin", ts_pinned_new(size_t{1} << 50, &huge));
  EXPECT_EQ(ts_pinned_live_bytes(), before);
}

TEST(PinnedGpu, RegistersExistingMemory) {
  NEEDS_GPUS(1);
  const int64_t before = ts_pinned_live_bytes();
  std::vector<uint8_t> memory(1 << 20, 7);
  ts_pinned* pinned = nullptr;
  ts_pinned* again = nullptr;
  ASSERT_OK(ts_pinned_register(memory.data(), memory.size(), &pinned));
  EXPECT_EQ(ts_pinned_data(pinned), memory.data());
  EXPECT_EQ(ts_pinned_live_bytes(), before + (1 << 20));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "already",
               ts_pinned_register(memory.data(), memory.size(), &again));
  EXPECT_OK(ts_pinned_destroy(pinned));
  EXPECT_EQ(ts_pinned_live_bytes(), before);
  EXPECT_EQ(memory[100], 7);
  EXPECT_OK(ts_pinned_register(memory.data(), memory.size(), &pinned));
  EXPECT_OK(ts_pinned_destroy(pinned));
}

constexpr int64_t kCount = 1 << 18;

std::vector<float> constant(float value) {
  return std::vector<float>(static_cast<size_t>(kCount), value);
}

// Returns the pairs of devices to copy between: one device with itself, and two devices if present.
std::vector<int32_t> peers() {
  return ts_device_count() < 2 ? std::vector<int32_t>{0} : std::vector<int32_t>{0, 1};
}

// The copy runs after all earlier work of both streams, and before their later work.
TEST(CopyPeerGpu, IsOrderedOnBothStreams) {
  NEEDS_GPUS(1);
  for (const int32_t device : peers()) {
    SCOPED_TRACE(device);
    const ts_stream from = pool_stream(0);
    const ts_stream to = pool_stream(device);
    Tensor src = test::full({kCount}, 0, 0);
    Tensor dst = test::full({kCount}, 0, device);
    Tensor one = test::full({kCount}, 1, 0);
    Tensor two = test::full({kCount}, 2, 0);
    Tensor three = test::full({kCount}, 3, device);
    Tensor seen = test::full({kCount}, 0, device);
    Event copied;
    ts_tensor* const dsts[] = {dst};
    ts_tensor* const srcs[] = {src};
    const auto copy = [](ts_stream stream, ts_tensor* a, ts_tensor* b) {
      ts_stream_guard guard{};
      ASSERT_OK(ts_stream_guard_enter(stream, &guard));
      EXPECT_OK(ts_tensor_copy(a, b, true));
      EXPECT_OK(ts_stream_guard_exit(guard));
    };
    // A first run loads and allocates everything, so that no gate blocks on it.
    ASSERT_OK(ts_tensor_copy_peer(to, dsts, from, srcs, 1));
    copy(from, src, one);
    copy(to, seen, dst);
    ASSERT_OK(ts_device_synchronize(0));
    ASSERT_OK(ts_device_synchronize(device));
    for (const ts_stream held : {from, to}) {
      copy(from, src, two);
      ASSERT_OK(ts_stream_synchronize(from));
      {
        test::Gate gate(held);
        copy(from, src, one);
        copy(to, dst, three);
        ASSERT_OK(ts_tensor_copy_peer(to, dsts, from, srcs, 1));
        copy(from, src, two);  // later work, which must not be copied
        copy(to, seen, dst);
        EXPECT_OK(ts_event_record(copied, from));
        EXPECT_FALSE(test::complete(copied));
        EXPECT_FALSE(test::idle(to));
        gate.open();
      }
      EXPECT_OK(ts_stream_synchronize(to));
      EXPECT_OK(ts_stream_synchronize(from));
      EXPECT_EQ(read<float>(seen), constant(1));
      EXPECT_EQ(read<float>(src), constant(2));
    }
  }
}

TEST(CopyPeerGpu, CopiesManyPairsWithOtherStrides) {
  NEEDS_GPUS(1);
  for (const int32_t device : peers()) {
    SCOPED_TRACE(device);
    const ts_stream from = pool_stream(0);
    const ts_stream to = pool_stream(device);
    Tensor values = test::make<float>({1, 2, 3, 4, 5, 6}, {2, 3});
    Tensor src;
    ASSERT_OK(ts_tensor_to(values, 0, -1, false, src.out()));
    Tensor across = Call("aten::t").tensor(src).one();
    Tensor dst = test::full({2, 3}, 0, device);
    Tensor transposed = test::full({3, 2}, 0, device);
    Tensor none_src = test::empty({0}, TS_DTYPE_FLOAT32, 0);
    Tensor none_dst = test::empty({0}, TS_DTYPE_FLOAT32, device);
    ASSERT_OK(ts_device_synchronize(0));
    ASSERT_OK(ts_device_synchronize(device));
    ts_tensor* const dsts[] = {dst, transposed, none_dst};
    ts_tensor* const srcs[] = {src, across, none_src};
    ASSERT_OK(ts_tensor_copy_peer(to, dsts, from, srcs, 3));
    ASSERT_OK(ts_stream_synchronize(to));
    EXPECT_EQ(read<float>(dst), (std::vector<float>{1, 2, 3, 4, 5, 6}));
    EXPECT_EQ(read<float>(transposed), (std::vector<float>{1, 4, 2, 5, 3, 6}));
    for (const int32_t here : {0, device}) {
      EXPECT_TRUE(test::current_stream(here) == (ts_stream{0, here}));
    }
    EXPECT_TRUE(test::current_stream(TS_DEVICE_CURRENT) == (ts_stream{0, 0}));
  }
}

TEST(CopyPeerGpu, ChecksEverythingBeforeItEnqueues) {
  NEEDS_GPUS(1);
  const ts_stream from = pool_stream(0);
  const ts_stream to = pool_stream(0);
  Tensor good = test::full({4}, 1, 0);
  Tensor target = test::full({4}, 0, 0);
  Tensor shorter = test::full({3}, 1, 0);
  Tensor host = test::full({4}, 1);
  Tensor integers = test::empty({4}, TS_DTYPE_INT32, 0);
  const auto refused = [&](ts_tensor* dst, ts_tensor* src, const char* text) {
    ts_tensor* const dsts[] = {target, dst};
    ts_tensor* const srcs[] = {good, src};
    EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, text, ts_tensor_copy_peer(to, dsts, from, srcs, 2));
  };
  refused(shorter, good, "pair 1: dst has shape");
  refused(integers, good, "pair 1: dst has dtype");
  refused(host, good, "pair 1: dst is on cpu");
  refused(good, host, "pair 1: src is on cpu");
  refused(nullptr, good, "pair 1: a tensor is NULL");
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "negative",
               ts_tensor_copy_peer(to, nullptr, from, nullptr, -1));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "NULL",
               ts_tensor_copy_peer(to, nullptr, from, nullptr, 1));
  EXPECT_OK(ts_tensor_copy_peer(to, nullptr, from, nullptr, 0));
  ASSERT_OK(ts_device_synchronize(0));
  EXPECT_EQ(read<float>(target), (std::vector<float>{0, 0, 0, 0}));
}

TEST(CopyPeerGpu, TensorsBelongToTheirStreamsDevices) {
  NEEDS_GPUS(2);
  Tensor here = test::full({4}, 1, 0);
  Tensor there = test::full({4}, 1, 1);
  ts_tensor* const heres[] = {here};
  ts_tensor* const theres[] = {there};
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "dst is on cuda:0",
               ts_tensor_copy_peer(pool_stream(1), heres, pool_stream(0), heres, 1));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "src is on cuda:1",
               ts_tensor_copy_peer(pool_stream(1), theres, pool_stream(0), theres, 1));
}

TEST(Peer, ArgumentsAreChecked) {
  const int32_t beyond = ts_device_count();
  bool can = false;
  for (const int32_t device : {beyond, beyond + 200, -1, INT32_MIN, INT32_MAX}) {
    EXPECT_FAILS(TS_ERROR_NO_DEVICE, "device", ts_device_can_access_peer(device, device, &can));
    EXPECT_FAILS(TS_ERROR_NO_DEVICE, "device",
                 ts_tensor_copy_peer({0, device}, nullptr, {0, device}, nullptr, 0));
  }
  if (ts_device_count() > 0) {
    EXPECT_OK(ts_device_can_access_peer(0, 0, &can));
    EXPECT_TRUE(can);
  }
}

TEST(CopyBatchGpu, IsAsynchronousAndOrdered) {
  NEEDS_GPUS(1);
  const ts_stream stream = pool_stream();
  const ts_stream other = pool_stream();
  Pinned in(kCount * sizeof(float));
  Pinned out(kCount * sizeof(float));
  Pinned probe(kCount * sizeof(float));
  Tensor host_in = in.tensor({kCount});
  Tensor host_out = out.tensor({kCount});
  Tensor host_probe = probe.tensor({kCount});
  Tensor device = test::full({kCount}, -1, 0);
  Event after;
  Event copied;
  Event done;
  std::fill_n(in.floats(), kCount, 1.0F);
  std::fill_n(out.floats(), kCount, -2.0F);
  ASSERT_OK(ts_device_synchronize(0));

  ts_tensor* to_device[2] = {device, host_in};
  ts_tensor* to_host[2] = {host_out, device};
  {
    test::Gate gate(other);
    ASSERT_OK(ts_event_record(after, other));
    // The call returns before `after` completes; the copy back follows in stream order.
    ASSERT_OK(ts_tensor_copy_batch(stream, after, &to_device[0], &to_device[1], 1, copied));
    ASSERT_OK(ts_tensor_copy_batch(stream, copied, &to_host[0], &to_host[1], 1, done));
    EXPECT_FALSE(test::complete(copied));
    EXPECT_FALSE(test::complete(done));
    // The poison is unchanged, on the device as well.
    EXPECT_EQ(out.floats()[kCount - 1], -2.0F);
    ts_tensor* peek[2] = {host_probe, device};
    const ts_stream third = test::free_stream();
    ASSERT_OK(ts_tensor_copy_batch(third, nullptr, &peek[0], &peek[1], 1, nullptr));
    ASSERT_OK(ts_stream_synchronize(third));
    EXPECT_EQ(probe.floats()[0], -1.0F);
    // The source has not been read yet, so bytes written now are copied. A staged copy would
    // already have read the source.
    std::fill_n(in.floats(), kCount, 5.0F);
  }
  ASSERT_OK(ts_event_synchronize(done));
  EXPECT_TRUE(std::all_of(out.floats(), out.floats() + kCount, [](float v) { return v == 5.0F; }));
}

TEST(CopyBatchGpu, CopiesManyPairsOfAllKinds) {
  NEEDS_GPUS(1);
  const ts_stream stream = pool_stream();
  Pinned images(2 * 3 * 4 * 5);
  Pinned labels(2 * sizeof(int64_t));
  for (int i = 0; i < 120; ++i) images.data()[i] = static_cast<uint8_t>(i);
  reinterpret_cast<int64_t*>(labels.data())[1] = 42;
  Tensor host_images = images.tensor({2, 3, 4, 5}, TS_DTYPE_UINT8);
  Tensor host_labels = labels.tensor({2}, TS_DTYPE_INT64);
  Tensor device_images = test::empty({2, 3, 4, 5}, TS_DTYPE_UINT8, 0);
  Tensor device_labels = test::empty({2}, TS_DTYPE_INT64, 0);
  Tensor last = test::empty({2, 3, 4, 5}, TS_DTYPE_UINT8, 0, TS_MEMORY_FORMAT_CHANNELS_LAST);
  Tensor none_here = test::empty({0, 7}, TS_DTYPE_FLOAT32, 0);
  Tensor none_there = test::empty({0, 7}, TS_DTYPE_FLOAT32);
  ts_tensor* dst[4] = {device_images, device_labels, none_here, last};
  ts_tensor* src[4] = {host_images, host_labels, none_there, device_images};
  Event done;
  ASSERT_OK(ts_tensor_copy_batch(stream, nullptr, dst, src, 4, done));
  ASSERT_OK(ts_event_synchronize(done));
  EXPECT_EQ(read<uint8_t>(device_images)[119], 119);
  EXPECT_EQ(read<int64_t>(device_labels)[1], 42);
  EXPECT_EQ(read<uint8_t>(last), read<uint8_t>(device_images))
      << "the copy to another layout, by a kernel";
  EXPECT_TRUE(test::current_stream() == (ts_stream{0, 0}));
  // A batch without pairs still waits and records.
  Event empty;
  ASSERT_OK(ts_tensor_copy_batch(stream, done, nullptr, nullptr, 0, empty));
  ASSERT_OK(ts_event_synchronize(empty));
}

TEST(CopyBatchGpu, AWriteSpoilsWhatBackwardNeeds) {
  NEEDS_GPUS(1);
  Pinned pinned(4 * sizeof(float));
  Tensor host = pinned.tensor({4});
  Tensor slot = test::full({4}, 2, 0);
  Tensor weight = test::full({4}, 3, 0);
  ASSERT_OK(ts_tensor_set_requires_grad(weight, true));
  Tensor product = test::Call("aten::mul", "Tensor").tensor(slot).tensor(weight).one();
  Tensor loss = test::Call("aten::sum").tensor(product).one();
  ts_tensor* dst = slot;
  ts_tensor* src = host;
  ASSERT_OK(ts_tensor_copy_batch({0, 0}, nullptr, &dst, &src, 1, nullptr));
  EXPECT_FAILS(TS_ERROR_OPERATOR, "inplace operation", ts_tensor_backward(loss, nullptr, false));
  ASSERT_OK(ts_device_synchronize(0));
}

TEST(CopyBatchGpu, PinnedMemoryIsNotHandedOutBeforeTheCopiesAreDone) {
  NEEDS_GPUS(1);
  const ts_stream stream = pool_stream();
  const int64_t size = 1 << 20;
  const auto make = [size] {
    Tensor made;
    EXPECT_OK(ts_tensor_new_pinned(&size, 1, TS_DTYPE_UINT8, 0, made.out()));
    return made;
  };
  const auto address_of = [](const Tensor& tensor) {
    uintptr_t address = 0;
    EXPECT_OK(ts_tensor_get_address(tensor, &address));
    return address;
  };
  Tensor device = test::empty({size}, TS_DTYPE_UINT8, 0);
  ASSERT_OK(ts_device_synchronize(0));
  for (const bool reads : {true, false}) {
    SCOPED_TRACE(reads ? "copies from the host" : "copies to the host");
    Tensor host = make();
    const uintptr_t used = address_of(host);
    ts_tensor* dst = reads ? device : host;
    ts_tensor* src = reads ? host : device;
    std::vector<Tensor> others;
    {
      test::Gate gate(stream);
      ASSERT_OK(ts_tensor_copy_batch(stream, nullptr, &dst, &src, 1, nullptr));
      host.free();
      others.push_back(make());
      EXPECT_NE(address_of(others.back()), used);
    }
    ASSERT_OK(ts_stream_synchronize(stream));
  }
}

TEST(CopyBatchGpu, ChecksEverythingBeforeItEnqueues) {
  NEEDS_GPUS(1);
  Pinned pinned(6 * sizeof(float));
  Tensor host = pinned.tensor({6});
  Tensor flat = test::full({6}, -1, 0);
  Tensor square = test::full({2, 3}, 0, 0);
  Tensor ints = test::empty({6}, TS_DTYPE_INT32, 0);
  Tensor pageable = test::full({6}, 1);
  Tensor strided = test::Call("aten::t").tensor(square).one();
  Tensor host_square = pinned.tensor({3, 2});
  Tensor more = pinned.tensor({6});
  struct Case {
    ts_tensor* dst;
    ts_tensor* src;
    const char* text;
  };
  const std::vector<Case> table = {
      {flat, pageable, "pair 1: src is in host memory that is not pinned"},
      {pageable, flat, "pair 1: dst is in host memory that is not pinned"},
      {square, host, "shape [2, 3] and src [6]"},
      {ints, host, "dst has dtype Int and src Float"},
      {host, more, "both tensors are on the host"},
      {strided, host_square, "equal, dense strides"},
      {nullptr, host, "NULL"},
  };
  std::fill_n(pinned.floats(), 6, 9.0F);
  for (const Case& each : table) {
    SCOPED_TRACE(each.text);
    Event done;
    ts_tensor* dst[2] = {flat, each.dst};
    ts_tensor* src[2] = {host, each.src};
    EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, each.text,
                 ts_tensor_copy_batch(pool_stream(), nullptr, dst, src, 2, done));
    bool recorded = false;
    EXPECT_FAILS(TS_ERROR_NOT_RECORDED, "", ts_event_query(done, &recorded));
  }
  ASSERT_OK(ts_device_synchronize(0));
  EXPECT_EQ(read<float>(flat)[0], -1) << "the good pair before the bad one was not copied";
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "negative",
               ts_tensor_copy_batch({0, 0}, nullptr, nullptr, nullptr, -1, nullptr));
}

TEST(CopyBatchGpu, RefusesAnotherDevice) {
  NEEDS_GPUS(2);
  Tensor here = test::full({4}, 1, 0);
  Tensor there = test::full({4}, 2, 1);
  ts_tensor* dst = here;
  ts_tensor* src = there;
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "src is on GPU 1",
               ts_tensor_copy_batch({0, 0}, nullptr, &dst, &src, 1, nullptr));
}

TEST(CopyGpu, NonBlockingFromPinnedMemoryDoesNotWait) {
  NEEDS_GPUS(1);
  const ts_stream stream = pool_stream();
  Pinned pinned(kCount * sizeof(float));
  Tensor host = pinned.tensor({kCount});
  Tensor device = test::full({kCount}, -1, 0);
  std::fill_n(pinned.floats(), kCount, 1.0F);
  ASSERT_OK(ts_device_synchronize(0));
  ts_stream_guard guard{};
  ASSERT_OK(ts_stream_guard_enter(stream, &guard));
  {
    test::Gate gate(stream);
    ASSERT_OK(ts_tensor_copy(device, host, true));
    EXPECT_FALSE(test::idle(stream));
    std::fill_n(pinned.floats(), kCount, 4.0F);
  }
  ASSERT_OK(ts_stream_synchronize(stream));
  EXPECT_EQ(read<float>(device)[kCount - 1], 4.0F);
  ASSERT_OK(ts_stream_guard_exit(guard));
}

}  // namespace
