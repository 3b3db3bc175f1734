// Backward passes.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include <cstdint>
#include <optional>

namespace ts {

// Adds the gradients of all leaves that the value depends on, as LibTorch's Tensor::backward does,
// to the same bits. gradient: that of the value, or undefined for a scalar's, which is 1. Each node
// has a turn under the numerics of the flags.
void run_backward(const at::Tensor& value, const at::Tensor& gradient, bool retain_graph,
                  int32_t flags);

// The flags of the numerics of the pass that the calling thread runs, for what the pass calls back.
int32_t numerics_of_pass();

// While it exists, each node that LibTorch's engine runs for a pass of the calling thread, on
// whatever thread, has a turn under the numerics of the flags; without flags no node has one from
// this or from the pass around it. LibTorch hands a thread's recorders on to the threads of its
// passes, and calls them around each node.
class NodeTurns {
 public:
  explicit NodeTurns(std::optional<int32_t> flags);
  ~NodeTurns();
  NodeTurns(const NodeTurns&) = delete;
  NodeTurns& operator=(const NodeTurns&) = delete;

 private:
  std::optional<at::RecordFunctionTLS> before_;  // if it had turns of the pass around this one
  std::optional<at::CallbackHandle> added_;
};

}  // namespace ts
