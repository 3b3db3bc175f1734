// Graphs: what is refused before anything is done. Captures and replays are tested from Go.
#include "support.h"

namespace {

TEST(Graph, WithoutThatDeviceABeginSaysNoDevice) {
  ts_graph* graph = nullptr;
  EXPECT_FAILS(TS_ERROR_NO_DEVICE, "device",
               ts_graph_begin({0, ts_device_count()}, nullptr, &graph));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "out is NULL", ts_graph_begin({0, 0}, nullptr, nullptr));
  EXPECT_EQ(graph, nullptr);
}

TEST(Graph, NullIsNoGraph) {
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "not being captured", ts_graph_end(nullptr));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "not captured", ts_graph_replay(nullptr, {0, 0}));
  EXPECT_EQ(ts_graph_nodes(nullptr), 0);
  ts_graph_free(nullptr);
}

TEST(Graph, WithoutACaptureNobodyWaits) { EXPECT_OK(ts_capture_wait()); }

TEST(GraphGpu, OnlyTheCurrentStreamOfTheThreadIsCaptured) {
  NEEDS_GPUS(1);
  ts_graph* graph = nullptr;
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "default stream",
               ts_graph_begin({0, 0}, nullptr, &graph));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "must be current",
               ts_graph_begin(test::pool_stream(), nullptr, &graph));
  EXPECT_EQ(graph, nullptr);
}

TEST(GraphGpu, CapturesOnceAndReplaysOften) {
  NEEDS_GPUS(1);
  test::Tensor x = test::empty({4}, TS_FLOAT32, 0);
  test::Tensor one = test::empty({4}, TS_FLOAT32, 0);
  ASSERT_OK(test::Call("aten::fill_", "Scalar").tensor(x).integer(0).drop());
  ASSERT_OK(test::Call("aten::fill_", "Scalar").tensor(one).integer(1).drop());
  ASSERT_OK(ts_device_synchronize(0));
  const ts_stream stream = test::pool_stream();
  ts_stream_guard guard{};
  ASSERT_OK(ts_stream_guard_enter(stream, &guard));
  ts_graph* graph = nullptr;
  ASSERT_OK(ts_graph_begin(stream, nullptr, &graph));
  EXPECT_OK(test::Call("aten::add_", "Tensor").tensor(x).tensor(one).drop());
  EXPECT_FAILS(TS_ERROR_CAPTURE, "aten::nonzero", test::Call("aten::nonzero").tensor(x).drop());
  EXPECT_FAILS(TS_ERROR_CAPTURE, "waiting for a stream", ts_stream_synchronize(stream));
  EXPECT_OK(ts_graph_end(graph));
  ASSERT_OK(ts_stream_guard_exit(guard));
  EXPECT_EQ(ts_graph_nodes(graph), 1);
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "not being captured", ts_graph_end(graph));
  for (int i = 0; i < 3; ++i) EXPECT_OK(ts_graph_replay(graph, stream));
  ts_graph_free(graph);
  ASSERT_OK(ts_stream_synchronize(stream));
  EXPECT_EQ(test::read<float>(x), (std::vector<float>{3, 3, 3, 3}));
}

}  // namespace
