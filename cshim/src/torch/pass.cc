// LibTorch's engine treats each node of a graph as if the next one could belong to another device,
// stream or pass. Around each node it sets the thread's state twice, goes through the locked queue
// of a thread and sets streams. That is about 20,000 instructions, more than most nodes need. If
// all nodes have one device and one stream, one node represents the whole graph here. The engine
// runs that node like any node, so thread, state, stream, errors and the end of the pass are the
// engine's. The node runs the graph's nodes in the engine's order, so that sums have the same bits.
#include "torch/pass.h"

#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/ops/ones_like.h>
#include <ATen/record_function.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/input_buffer.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cuda/trace.h"
#include "torch/node.h"
#include "torch/numerics.h"

namespace ts {
namespace {

using torch::autograd::Edge;
using torch::autograd::InputBuffer;
using torch::autograd::Node;
using torch::autograd::variable_list;

// A node that has not run.
struct Waiting {
  int64_t edges = 0;        // how many edges have not yet brought it a gradient, or none
  variable_list gradients;  // by input; empty before the first gradient
};

// The root, and all nodes that can be reached from it.
using Graph = std::unordered_map<Node*, Waiting>;

// Whether the engine would run the node on the device's thread and stream.
bool belongs_to(const Node& node, c10::Device device, c10::Stream stream) {
  bool found = device.is_cpu();
  for (uint32_t i = 0; i < node.num_inputs(); ++i) {
    const torch::autograd::InputMetadata& input = node.input_metadata(i);
    if (input.was_default_constructed()) continue;  // an output without a gradient
    if (input.device() != device) return false;
    if (!device.is_cpu() && input.stream() != stream) return false;
    found = true;
  }
  return found;
}

// Returns the graph, or nothing if it has several devices or streams.
std::optional<Graph> find_graph(Node* root, c10::Device device, c10::Stream stream) {
  Graph graph;
  graph.reserve(512);
  graph.emplace(root, Waiting{});
  std::vector<Node*> open{root};
  while (!open.empty()) {
    Node* node = open.back();
    open.pop_back();
    if (!belongs_to(*node, device, stream)) return std::nullopt;
    for (const Edge& edge : node->next_edges()) {
      if (!edge.is_valid()) continue;
      const auto [next, added] = graph.try_emplace(edge.function.get());
      ++next->second.edges;
      if (added) open.push_back(edge.function.get());
    }
  }
  return graph;
}

// Whether LibTorch adds to the gradient in place: nothing else refers to its memory. The conditions
// are those in InputBuffer.
bool is_reusable(const at::Tensor& gradient) {
  return gradient.layout() == at::kStrided && !at::isTensorSubclassLike(gradient) &&
         !gradient._is_zerotensor() && !gradient.is_neg() && !gradient.is_conj() &&
         gradient.is_non_overlapping_and_dense() && gradient.use_count() == 1 &&
         gradient.has_storage() && gradient.storage().use_count() == 1;
}

// Whether the sum of two gradients has the memory layout of both, so that it can overwrite either.
bool are_alike(const at::Tensor& a, const at::Tensor& b) {
  return a.layout() == b.layout() && a.scalar_type() == b.scalar_type() &&
         a.device() == b.device() && a.sizes() == b.sizes() && a.strides() == b.strides();
}

// A node that has all its gradients.
struct Ready {
  Node* node;
  variable_list gradients;
};

// The order of the engine's queue, as a heap: nodes made later run first.
bool comes_later(const Ready& a, const Ready& b) {
  return a.node->sequence_nr() < b.node->sequence_nr();
}

// The numerics of the pass whose PassNode the calling thread runs.
thread_local int32_t flags_of_pass = 0;

class FlagsOfPass {
 public:
  explicit FlagsOfPass(int32_t flags)
      : before_(std::exchange(flags_of_pass, flags & kNumericsFlags)) {}
  ~FlagsOfPass() { flags_of_pass = before_; }
  FlagsOfPass(const FlagsOfPass&) = delete;
  FlagsOfPass& operator=(const FlagsOfPass&) = delete;

 private:
  const int32_t before_;
};

class PassNode final : public Node {
 public:
  PassNode(Edge root, Graph graph, bool retain_graph, int32_t flags)
      : Node(root.function->sequence_nr()),
        root_(std::move(root)),
        graph_(std::move(graph)),
        retain_graph_(retain_graph),
        flags_(flags) {
    const auto& input = root_.function->input_metadata(root_.input_nr);
    if (!input.device().is_cpu()) stream_ = input.stream();
    input_metadata_.emplace_back(input);
  }

  std::string name() const override { return kPassNode; }

  variable_list apply(variable_list&& gradients) override {
    const FlagsOfPass flags(flags_);
    variable_list first(root_.function->num_inputs());
    add(first, root_, std::move(gradients.front()));
    push(Ready{root_.function.get(), std::move(first)});
    while (!ready_.empty()) evaluate(pop());
    return {};
  }

 private:
  // Adds gradients with LibTorch's InputBuffer. Most inputs do not need it, because they have one
  // gradient. LibTorch adds to the first gradient in place if it can. If it can add only to the
  // second one, the two are swapped, which saves memory of their size. An example is a weight tied
  // to an embedding: one of its gradients is a view, the other is not.
  void add(variable_list& to, const Edge& edge, at::Tensor&& gradient) const {
    at::Tensor& sum = to[edge.input_nr];
    if (!gradient.defined()) return;
    if (!sum.defined()) {
      sum = std::move(gradient);
      return;
    }
    if (are_alike(sum, gradient) && !is_reusable(sum) && is_reusable(gradient)) {
      std::swap(sum, gradient);
    }
    InputBuffer both(edge.input_nr + 1);
    both.add(edge.input_nr, std::move(sum), stream_, stream_, edge.function.get());
    both.add(edge.input_nr, std::move(gradient), stream_, stream_, edge.function.get());
    sum = std::move(both.buffer[edge.input_nr]);
  }

  void push(Ready ready) {
    ready_.push_back(std::move(ready));
    std::push_heap(ready_.begin(), ready_.end(), comes_later);
  }

  Ready pop() {
    std::pop_heap(ready_.begin(), ready_.end(), comes_later);
    Ready next = std::move(ready_.back());
    ready_.pop_back();
    return next;
  }

  // A recording of operators has the engine's event for each node.
  void evaluate(Ready next) {
    std::optional<at::RecordFunction> event;
    if (auto recorders = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION)) {
      event.emplace(std::move(*recorders));
      event->before("autograd::engine::evaluate_function: " + next.node->name());
    }
    send(*next.node, run(*next.node, std::move(next.gradients)));
  }

  // Runs a node with its hooks. A leaf takes over a gradient that nothing else refers to, so no
  // copy of the gradients is kept unless a hook needs it.
  variable_list run(Node& node, variable_list gradients) const {
    for (const auto& hook : node.tensor_pre_hooks()) gradients = (*hook)(gradients);
    for (const auto& [output, hook] : node.retains_grad_hooks()) gradients = (*hook)(gradients);
    for (const auto& hook : node.pre_hooks()) gradients = (*hook)(gradients);
    if (!retain_graph_) node.will_release_variables();
    variable_list kept;
    const bool has_post_hooks = !node.post_hooks().empty();
    if (has_post_hooks) kept = gradients;
    variable_list results = run_in_turn(node, std::move(gradients));
    torch::autograd::validate_outputs(
        node.next_edges(), results, [&node](const std::string& message) {
          return "Function " + node.name() + " returned an " + message;
        });
    if (has_post_hooks) {
      for (const auto& hook : node.post_hooks()) results = (*hook)(results, kept);
    }
    if (!retain_graph_) node.release_variables();
    return results;
  }

  variable_list run_in_turn(Node& node, variable_list gradients) const {
    const NumericsTurn turn(flags_);
    return node(std::move(gradients));
  }

  // Passes a node's results to the nodes whose gradients they are.
  void send(const Node& node, variable_list&& results) {
    for (size_t i = 0; i < results.size(); ++i) {
      const Edge& edge = node.next_edge(i);
      if (!edge.is_valid()) continue;
      const auto found = graph_.find(edge.function.get());
      TORCH_CHECK(found != graph_.end(), "dependency not found for ", edge.function->name());
      Waiting& waiting = found->second;
      if (waiting.gradients.empty()) waiting.gradients.resize(edge.function->num_inputs());
      add(waiting.gradients, edge, std::move(results[i]));
      if (--waiting.edges > 0) continue;
      push(Ready{edge.function.get(), std::move(waiting.gradients)});
    }
  }

  const Edge root_;
  Graph graph_;
  const bool retain_graph_;
  const int32_t flags_;
  std::optional<c10::Stream> stream_;  // none on the CPU
  std::vector<Ready> ready_;           // a heap
};

// A node's turn, from the start to the end of its recording.
struct RecordedTurn final : at::ObserverContext {
  explicit RecordedTurn(int32_t flags) : turn(flags) {}
  const NumericsTurn turn;
};

// LibTorch accepts only functions without state, so there is one for each value of the flags: 0,
// and own switches.
constexpr int32_t own(size_t switches) {
  const auto on = static_cast<int32_t>(switches);
  return on * TS_NUMERICS_ON + (kSwitches - on) * TS_NUMERICS_OFF;
}

template <int32_t kFlags>
std::unique_ptr<at::ObserverContext> begin_turn(const at::RecordFunction&) {
  return std::make_unique<RecordedTurn>(kFlags);
}

using BeginTurn = at::RecordFunctionCallback::StartCallback;

template <size_t... I>
constexpr std::array<BeginTurn, sizeof...(I)> own_turns(std::index_sequence<I...>) {
  return {&begin_turn<own(I)>...};
}

constexpr auto kOwnTurns = own_turns(std::make_index_sequence<kSwitches + 1>());

// Returns the flags of the turns that this function starts, if it is one of these functions.
std::optional<int32_t> flags_of(BeginTurn begin) {
  if (begin == &begin_turn<0>) return 0;
  const auto found = std::find(kOwnTurns.begin(), kOwnTurns.end(), begin);
  if (found == kOwnTurns.end()) return std::nullopt;
  return own(static_cast<size_t>(found - kOwnTurns.begin()));
}

}  // namespace

NodeTurns::NodeTurns(std::optional<int32_t> flags) {
  const auto is_turn = [](const auto& entry) {
    return flags_of(entry.callback_.start()).has_value();
  };
  const auto& recorders = at::get_record_function_tls_();
  const auto& all = recorders.sorted_tls_callbacks_;
  if (std::any_of(all.begin(), all.end(), is_turn)) {
    before_ = recorders;
    at::RecordFunctionTLS now = recorders;
    auto& kept = now.sorted_tls_callbacks_;
    kept.erase(std::remove_if(kept.begin(), kept.end(), is_turn), kept.end());
    at::set_record_function_tls_(now);
  }
  if (!flags) return;
  const int32_t on = *flags / TS_NUMERICS_ON & kSwitches;
  const BeginTurn begin =
      (*flags & kNumericsFlags) == 0 ? &begin_turn<0> : kOwnTurns.at(static_cast<size_t>(on));
  added_ = at::addThreadLocalCallback(
      at::RecordFunctionCallback(begin).scopes({at::RecordScope::BACKWARD_FUNCTION}));
}

NodeTurns::~NodeTurns() {
  if (before_) {
    at::set_record_function_tls_(*before_);
  } else if (added_) {
    at::removeCallback(*added_);
  }
}

int32_t numerics_of_pass() {
  for (const auto& entry : at::get_record_function_tls_().sorted_tls_callbacks_) {
    if (const auto flags = flags_of(entry.callback_.start())) return *flags;
  }
  return flags_of_pass;
}

void run_backward(const at::Tensor& value, const at::Tensor& gradient, bool retain_graph,
                  int32_t flags) {
  Edge root = torch::autograd::impl::gradient_edge(value);
  const auto& input = root.function->input_metadata(root.input_nr);
  std::optional<Graph> graph;
  // Without a gradient LibTorch refuses a complex value.
  const bool valid = gradient.defined() || value.is_floating_point();
  if (valid && !torch::autograd::AnomalyMode::is_enabled()) {
    graph = find_graph(root.function.get(), input.device(), input.stream());
  }
  if (!graph) {
    const NodeTurns turns(flags);
    value.backward(gradient, retain_graph, /*create_graph=*/false);
    return;
  }
  variable_list with{gradient.defined() ? gradient
                                        : at::ones_like(value, LEGACY_CONTIGUOUS_MEMORY_FORMAT)};
  const auto pass = make_node<PassNode>(std::move(root), std::move(*graph), retain_graph, flags);
  const NodeTurns turns(std::nullopt);
  torch::autograd::Engine::get_default_engine().execute({Edge(pass, 0)}, with, retain_graph,
                                                        /*create_graph=*/false,
                                                        /*accumulate_grad=*/true);
}

}  // namespace ts
