// Backward passes.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <cstdint>
#include <optional>

namespace ts {

// Adds to the gradients of all leaves that the value depends on, as LibTorch's Tensor::backward
// does, with the same bits. gradient: the value's gradient; undefined for a scalar means 1. Each
// node has a turn under the numerics of the flags.
void run_backward(const at::Tensor& value, const at::Tensor& gradient, bool retain_graph,
                  int32_t flags);

// Returns the numerics flags of the pass that the calling thread runs, for callbacks of the pass.
int32_t numerics_of_pass();

// While it exists, each node that LibTorch's engine runs for a pass of the calling thread, on any
// thread, has a turn under the numerics of the flags. Without flags, nodes have no turn, neither
// from this object nor from the enclosing pass. LibTorch passes a thread's recorders to the threads
// of its passes, and calls them around each node.
class NodeTurns {
 public:
  explicit NodeTurns(std::optional<int32_t> flags);
  ~NodeTurns();
  NodeTurns(const NodeTurns&) = delete;
  NodeTurns& operator=(const NodeTurns&) = delete;

 private:
  std::optional<at::RecordFunctionTLS> before_;  // if it contained the turns of the enclosing pass
  std::optional<at::CallbackHandle> added_;
};

}  // namespace ts
