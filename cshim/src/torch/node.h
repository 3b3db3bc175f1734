// Nodes of LibTorch's autograd graph, whose pointers and wrapping differ between its versions.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/edge.h>

#include <memory>
#include <optional>
#include <unordered_set>
#include <utility>
#include <vector>

namespace ts {

// std::shared_ptr<Node>, or in newer versions c10::intrusive_ptr<Node>.
using NodePointer = decltype(torch::autograd::Edge::function);

template <typename Pointer>
struct NodeMaker {
  template <typename Made, typename... Args>
  static auto make(Args&&... args) {
    return c10::make_intrusive<Made>(std::forward<Args>(args)...);
  }
};
template <typename Node>
struct NodeMaker<std::shared_ptr<Node>> {
  template <typename Made, typename... Args>
  static auto make(Args&&... args) {
    // LibTorch's deleter limits the stack depth of destroying a long graph.
    return std::shared_ptr<Made>(std::make_unique<Made>(std::forward<Args>(args)...).release(),
                                 [](Node* node) { deleteNode(node); });
  }
};

template <typename Made, typename... Args>
auto make_node(Args&&... args) {
  return NodeMaker<NodePointer>::template make<Made>(std::forward<Args>(args)...);
}

struct Outputs {
  const torch::autograd::variable_list& inputs;
  const std::unordered_set<at::TensorImpl*>& constant;
  const std::vector<std::optional<at::Tensor>>& outputs;
};

template <typename Pointer>
auto wrap(const Outputs& of, const Pointer& node, const torch::autograd::_jvp_fn_t& forward_mode,
          const torch::autograd::_view_as_self_fn_t& alias, int /*preferred*/)
    -> decltype(_wrap_outputs(of.inputs, of.constant, {}, of.outputs, node, forward_mode, {}, alias,
                              false)) {
  return _wrap_outputs(of.inputs, of.constant, {}, of.outputs, node, forward_mode, {}, alias,
                       false);
}
template <typename Pointer>
auto wrap(const Outputs& of, const Pointer& node, const torch::autograd::_jvp_fn_t& forward_mode,
          const torch::autograd::_view_as_self_fn_t& alias, ...)
    -> decltype(_wrap_outputs(of.inputs, of.constant, {}, of.outputs, node, forward_mode, {}, alias,
                              false, std::declval<Pointer&>())) {
  Pointer attached;
  return _wrap_outputs(of.inputs, of.constant, {}, of.outputs, node, forward_mode, {}, alias, false,
                       attached);
}

}  // namespace ts
