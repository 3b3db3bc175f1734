// The C++ peers of `torchstream-lab operators`: the operators of its table, on the same operands.
#include <ATen/ATen.h>

#include <chrono>
#include <cstring>
#include <string>
#include <vector>

#include "base/error.h"
#include "lab/entry.h"
#include "lab/host_time.h"
#include "torchstream_lab.h"

namespace ts {
namespace {

// So small that an operator takes no longer than its call.
struct Operands {
  at::Tensor a, b;           // [4]
  at::Tensor m, n;           // [4 4]
  at::Tensor batch;          // [2 4 4]
  at::Tensor image, kernel;  // [1 2 4 4], [2 2 3 3]
  at::Tensor pair;           // [2], for the channels of image
  at::Tensor heads;          // [1 2 4 8]
  at::Tensor index;          // [4] of int64
  at::Tensor mask;           // [4] of bool
  at::Tensor target;         // [4], written by operators in place

  explicit Operands(c10::Device device) {
    const auto floats = at::TensorOptions().dtype(at::kFloat).device(device);
    a = at::ones({4}, floats);
    b = at::ones({4}, floats);
    m = at::ones({4, 4}, floats);
    n = at::ones({4, 4}, floats);
    batch = at::ones({2, 4, 4}, floats);
    image = at::ones({1, 2, 4, 4}, floats);
    kernel = at::ones({2, 2, 3, 3}, floats);
    pair = at::ones({2}, floats);
    heads = at::ones({1, 2, 4, 8}, floats);
    index = at::ones({4}, floats.dtype(at::kLong));
    mask = at::ones({4}, floats.dtype(at::kBool));
    target = at::ones({4}, floats);
  }
};

// The calls of a round, whose results are freed together, as in a training step. They fit into a
// GPU's queue.
constexpr int32_t kHeldCalls = 400;

// The results of a round.
class Held {
 public:
  void operator()(at::Tensor result) { results_.push_back(std::move(result)); }
  void operator()(std::vector<at::Tensor> results) {
    for (auto& r : results) results_.push_back(std::move(r));
  }
  void free() { results_.clear(); }

 private:
  std::vector<at::Tensor> results_;
};

struct Peer {
  const char* name;
  void (*run)(const Operands& o, Held& hold);
};

// The names and operands of operatorTable in lab/torchstream-lab/operators.go.
const Peer kPeers[] = {
    {"Abs", [](const Operands& o, Held& hold) { hold(at::abs(o.a)); }},
    {"Exp", [](const Operands& o, Held& hold) { hold(at::exp(o.a)); }},
    {"Log", [](const Operands& o, Held& hold) { hold(at::log(o.a)); }},
    {"Neg", [](const Operands& o, Held& hold) { hold(at::neg(o.a)); }},
    {"Sqrt", [](const Operands& o, Held& hold) { hold(at::sqrt(o.a)); }},
    {"Square", [](const Operands& o, Held& hold) { hold(at::square(o.a)); }},
    {"ReLU", [](const Operands& o, Held& hold) { hold(at::relu(o.a)); }},
    {"Sigmoid", [](const Operands& o, Held& hold) { hold(at::sigmoid(o.a)); }},
    {"Tanh", [](const Operands& o, Held& hold) { hold(at::tanh(o.a)); }},
    {"GELU", [](const Operands& o, Held& hold) { hold(at::gelu(o.a)); }},
    {"SiLU", [](const Operands& o, Held& hold) { hold(at::silu(o.a)); }},
    {"Add", [](const Operands& o, Held& hold) { hold(at::add(o.a, o.b)); }},
    {"Sub", [](const Operands& o, Held& hold) { hold(at::sub(o.a, o.b)); }},
    {"Mul", [](const Operands& o, Held& hold) { hold(at::mul(o.a, o.b)); }},
    {"Div", [](const Operands& o, Held& hold) { hold(at::div(o.a, o.b)); }},
    {"AddScalar", [](const Operands& o, Held& hold) { hold(at::add(o.a, 2.0)); }},
    {"MulScalar", [](const Operands& o, Held& hold) { hold(at::mul(o.a, 2.0)); }},
    {"Maximum", [](const Operands& o, Held& hold) { hold(at::maximum(o.a, o.b)); }},
    {"Minimum", [](const Operands& o, Held& hold) { hold(at::minimum(o.a, o.b)); }},
    {"Eq", [](const Operands& o, Held& hold) { hold(at::eq(o.a, o.b)); }},
    {"Gt", [](const Operands& o, Held& hold) { hold(at::gt(o.a, o.b)); }},
    {"Where", [](const Operands& o, Held& hold) { hold(at::where(o.mask, o.a, o.b)); }},
    {"MatMul", [](const Operands& o, Held& hold) { hold(at::matmul(o.m, o.n)); }},
    {"MM", [](const Operands& o, Held& hold) { hold(at::mm(o.m, o.n)); }},
    {"BMM", [](const Operands& o, Held& hold) { hold(at::bmm(o.batch, o.batch)); }},
    {"Linear", [](const Operands& o, Held& hold) { hold(at::linear(o.m, o.n, o.a)); }},
    {"Sum", [](const Operands& o, Held& hold) { hold(at::sum(o.a)); }},
    {"Mean", [](const Operands& o, Held& hold) { hold(at::mean(o.a)); }},
    {"SumDim", [](const Operands& o, Held& hold) { hold(at::sum(o.m, {1}, false)); }},
    {"MeanDim", [](const Operands& o, Held& hold) { hold(at::mean(o.m, {1}, false)); }},
    {"AMax", [](const Operands& o, Held& hold) { hold(at::amax(o.m, {1}, false)); }},
    {"ArgMax", [](const Operands& o, Held& hold) { hold(at::argmax(o.m, 1, false)); }},
    {"CumSum", [](const Operands& o, Held& hold) { hold(at::cumsum(o.m, 1)); }},
    {"Softmax", [](const Operands& o, Held& hold) { hold(at::softmax(o.m, 1)); }},
    {"LogSoftmax", [](const Operands& o, Held& hold) { hold(at::log_softmax(o.m, 1)); }},
    {"View", [](const Operands& o, Held& hold) { hold(o.m.view({2, 8})); }},
    {"Reshape", [](const Operands& o, Held& hold) { hold(at::reshape(o.m, {2, 8})); }},
    {"Flatten", [](const Operands& o, Held& hold) { hold(at::flatten(o.batch, 1, 2)); }},
    {"Permute", [](const Operands& o, Held& hold) { hold(at::permute(o.batch, {0, 2, 1})); }},
    {"Transpose", [](const Operands& o, Held& hold) { hold(at::transpose(o.m, 0, 1)); }},
    {"Squeeze", [](const Operands& o, Held& hold) { hold(at::squeeze(o.image)); }},
    {"Unsqueeze", [](const Operands& o, Held& hold) { hold(at::unsqueeze(o.a, 0)); }},
    {"Expand", [](const Operands& o, Held& hold) { hold(o.a.expand({3, 4})); }},
    {"Narrow", [](const Operands& o, Held& hold) { hold(at::narrow(o.m, 0, 1, 2)); }},
    {"Select", [](const Operands& o, Held& hold) { hold(at::select(o.m, 0, 1)); }},
    {"Chunk", [](const Operands& o, Held& hold) { hold(at::chunk(o.m, 2, 1)); }},
    {"Split", [](const Operands& o, Held& hold) { hold(at::split(o.m, 2, 1)); }},
    {"Unbind", [](const Operands& o, Held& hold) { hold(at::unbind(o.m, 0)); }},
    {"Cat", [](const Operands& o, Held& hold) { hold(at::cat({o.a, o.b}, 0)); }},
    {"Stack", [](const Operands& o, Held& hold) { hold(at::stack({o.a, o.b}, 0)); }},
    {"IndexSelect",
     [](const Operands& o, Held& hold) { hold(at::index_select(o.m, 0, o.index)); }},
    {"Clone", [](const Operands& o, Held& hold) { hold(at::clone(o.a)); }},
    {"Embedding", [](const Operands& o, Held& hold) { hold(at::embedding(o.m, o.index)); }},
    {"Conv2d",
     [](const Operands& o, Held& hold) {
       hold(at::conv2d(o.image, o.kernel, o.pair, 1, at::IntArrayRef({1, 1})));
     }},
    {"BatchNorm",
     [](const Operands& o, Held& hold) {
       hold(at::batch_norm(o.image, o.pair, o.pair, o.pair, o.pair, false, 0.1, 1e-5, true));
     }},
    {"LayerNorm",
     [](const Operands& o, Held& hold) { hold(at::layer_norm(o.m, {4}, o.a, o.b, 1e-5)); }},
    {"MaxPool2d", [](const Operands& o, Held& hold) { hold(at::max_pool2d(o.image, {2, 2})); }},
    {"AvgPool2d", [](const Operands& o, Held& hold) { hold(at::avg_pool2d(o.image, {2, 2})); }},
    {"AdaptiveAvgPool2d",
     [](const Operands& o, Held& hold) { hold(at::adaptive_avg_pool2d(o.image, {1, 1})); }},
    {"CrossEntropy",
     [](const Operands& o, Held& hold) { hold(at::cross_entropy_loss(o.m, o.index)); }},
    {"MSELoss", [](const Operands& o, Held& hold) { hold(at::mse_loss(o.a, o.b)); }},
    {"ScaledDotProductAttention",
     [](const Operands& o, Held& hold) {
       hold(at::scaled_dot_product_attention(o.heads, o.heads, o.heads));
     }},
    {"Add_", [](const Operands& o, Held&) { o.target.add_(o.b); }},
    {"Mul_", [](const Operands& o, Held&) { o.target.mul_(o.b); }},
    {"ReLU_", [](const Operands& o, Held&) { o.target.relu_(); }},
    {"Zero_", [](const Operands& o, Held&) { o.target.zero_(); }},
};

}  // namespace
}  // namespace ts

ts_error* ts_bench_operator(int32_t device, const char* name, int32_t rounds, double* nanoseconds) {
  return ts::guard(__func__, [&] {
    ts::lab::enter();
    ts::require(name != nullptr, "the name is NULL");
    ts::require(rounds > 0, "rounds must be at least 1");
    ts::require(nanoseconds != nullptr, "nanoseconds is NULL");
    const auto where = ts::lab::checked_device(device);
    for (const auto& peer : ts::kPeers) {
      if (std::strcmp(peer.name, name) != 0) continue;
      const ts::Operands operands(where);
      ts::Held held;
      const auto run = [&](int32_t calls) {
        for (int32_t i = 0; i < calls; ++i) peer.run(operands, held);
        held.free();
      };
      run(ts::kHeldCalls);
      std::chrono::duration<double, std::nano> took{};
      for (int32_t i = 0; i < rounds; ++i) {
        ts::finish(where);
        const auto start = std::chrono::steady_clock::now();
        run(ts::kHeldCalls);
        took += std::chrono::steady_clock::now() - start;
      }
      ts::finish(where);
      *nanoseconds = took.count() / rounds / ts::kHeldCalls;
      return;
    }
    throw ts::Failure(TS_ERROR_INVALID_ARGUMENT, std::string("there is no operator ") + name);
  });
}
