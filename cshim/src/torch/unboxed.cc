#include "torch/unboxed.h"

#include <ATen/Operators.h>
#include <ATen/core/IListRef.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/util/SmallVector.h>

#include <cstring>
#include <optional>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "torch/tensor.h"

namespace ts {
namespace {

double double_of(int64_t bits) {
  double value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// A tensor that shares the caller's reference, which outlives the call, and so changes no count.
class Borrowed {
 public:
  explicit Borrowed(const ts_tensor* handle) noexcept
      : tensor_(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim(
            impl_of(handle))) {}
  ~Borrowed() { static_cast<void>(tensor_.unsafeReleaseTensorImpl()); }
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;

  at::Tensor& tensor() noexcept { return tensor_; }

 private:
  at::Tensor tensor_;
};

// The value of an argument as a parameter of the C++ type T. It lives until the call returns.
template <typename T>
class Value;

template <>
class Value<at::Tensor&> {
 public:
  explicit Value(const UnboxedArg& arg) : borrowed_(*arg.tensors) {}
  at::Tensor& get() noexcept { return borrowed_.tensor(); }

 private:
  Borrowed borrowed_;
};

template <>
class Value<const at::Tensor&> : public Value<at::Tensor&> {
  using Value<at::Tensor&>::Value;
};

template <>
class Value<const std::optional<at::Tensor>&> {
 public:
  explicit Value(const UnboxedArg& arg) {
    if (arg.kind == TS_ARG_KIND_TENSOR) {
      tensor_.emplace(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim(
          impl_of(*arg.tensors)));
    }
  }
  ~Value() {
    if (tensor_.has_value()) static_cast<void>(tensor_->unsafeReleaseTensorImpl());
  }
  Value(const Value&) = delete;
  Value& operator=(const Value&) = delete;
  const std::optional<at::Tensor>& get() const noexcept { return tensor_; }

 private:
  std::optional<at::Tensor> tensor_;
};

template <>
class Value<at::TensorList> {
 public:
  explicit Value(const UnboxedArg& arg) {
    tensors_.reserve(static_cast<size_t>(arg.count));  // so that what follows cannot throw
    for (int32_t i = 0; i < arg.count; ++i) {
      tensors_.emplace_back(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim(
          impl_of(arg.tensors[i])));
    }
  }
  ~Value() {
    for (at::Tensor& tensor : tensors_) static_cast<void>(tensor.unsafeReleaseTensorImpl());
  }
  Value(const Value&) = delete;
  Value& operator=(const Value&) = delete;
  at::TensorList get() const noexcept { return tensors_; }

 private:
  c10::SmallVector<at::Tensor, 4> tensors_;
};

template <>
class Value<const at::ITensorListRef&> : public Value<at::TensorList> {
 public:
  using Value<at::TensorList>::Value;
  at::ITensorListRef get() const noexcept { return {Value<at::TensorList>::get()}; }
};

template <>
class Value<const at::Scalar&> {
 public:
  explicit Value(const UnboxedArg& arg) : scalar_(of(arg)) {}
  const at::Scalar& get() const noexcept { return scalar_; }

  static at::Scalar of(const UnboxedArg& arg) {
    if (arg.kind == TS_ARG_KIND_DOUBLE) return double_of(arg.value);
    if (arg.kind == TS_ARG_KIND_BOOL) return arg.value != 0;
    return arg.value;
  }

 private:
  at::Scalar scalar_;
};

template <>
class Value<const std::optional<at::Scalar>&> {
 public:
  explicit Value(const UnboxedArg& arg) {
    if (arg.kind != TS_ARG_KIND_NONE) scalar_ = Value<const at::Scalar&>::of(arg);
  }
  const std::optional<at::Scalar>& get() const noexcept { return scalar_; }

 private:
  std::optional<at::Scalar> scalar_;
};

// Types that are made anew from the argument.
template <typename T>
T convert(const UnboxedArg& arg);

template <>
int64_t convert<int64_t>(const UnboxedArg& arg) {
  return arg.value;
}
template <>
c10::SymInt convert<c10::SymInt>(const UnboxedArg& arg) {
  return c10::SymInt(arg.value);
}
template <>
double convert<double>(const UnboxedArg& arg) {
  return double_of(arg.value);
}
template <>
bool convert<bool>(const UnboxedArg& arg) {
  return arg.value != 0;
}
template <>
at::ScalarType convert<at::ScalarType>(const UnboxedArg& arg) {
  return static_cast<at::ScalarType>(arg.value);
}
template <>
at::MemoryFormat convert<at::MemoryFormat>(const UnboxedArg& arg) {
  return static_cast<at::MemoryFormat>(arg.value);
}
template <>
c10::string_view convert<c10::string_view>(const UnboxedArg& arg) {
  return {arg.text, static_cast<size_t>(arg.count)};
}
template <>
at::IntArrayRef convert<at::IntArrayRef>(const UnboxedArg& arg) {
  return {arg.ints, static_cast<size_t>(arg.count)};
}
template <>
c10::SymIntArrayRef convert<c10::SymIntArrayRef>(const UnboxedArg& arg) {
  return c10::fromIntArrayRefSlow(convert<at::IntArrayRef>(arg));
}

template <typename T>
class Value {
 public:
  explicit Value(const UnboxedArg& arg) : arg_(arg) {}
  T get() const { return convert<T>(arg_); }

 private:
  const UnboxedArg& arg_;
};

template <typename T>
class Value<std::optional<T>> {
 public:
  explicit Value(const UnboxedArg& arg) : arg_(arg) {}
  std::optional<T> get() const {
    if (arg_.kind == TS_ARG_KIND_NONE) return std::nullopt;
    return convert<T>(arg_);
  }

 private:
  const UnboxedArg& arg_;
};

template <typename T>
class Value<c10::OptionalArrayRef<T>> {
 public:
  explicit Value(const UnboxedArg& arg) : arg_(arg) {}
  c10::OptionalArrayRef<T> get() const {
    if (arg_.kind == TS_ARG_KIND_NONE) return std::nullopt;
    return convert<c10::ArrayRef<T>>(arg_);
  }

 private:
  const UnboxedArg& arg_;
};

template <>
class Value<std::optional<at::ArrayRef<double>>> {
 public:
  explicit Value(const UnboxedArg& arg) {
    if (arg.kind == TS_ARG_KIND_NONE) return;
    values_.emplace();
    for (int32_t i = 0; i < arg.count; ++i) values_->push_back(double_of(arg.ints[i]));
  }
  std::optional<at::ArrayRef<double>> get() const {
    if (!values_.has_value()) return std::nullopt;
    return at::ArrayRef<double>(*values_);
  }

 private:
  std::optional<c10::SmallVector<double, 4>> values_;
};

void hand_out(at::Tensor&& result, ts_tensor** results) {
  if (results != nullptr) *results = result.defined() ? to_handle(std::move(result)) : nullptr;
}

// The result of an operator in place is its first operand.
void hand_out(at::Tensor& operand, ts_tensor** results) {
  if (results != nullptr) *results = to_handle(operand);
}

template <typename... Tensors>
void hand_out(std::tuple<Tensors...>&& all, ts_tensor** results) {
  if (results == nullptr) return;
  std::apply([&](auto&... each) { (hand_out(std::move(each), results++), ...); }, all);
}

// The call of an operator of LibTorch's C++ interface, whose struct has its schema as a C++ type.
template <typename Operator, typename Schema = typename Operator::schema>
struct Caller;

template <typename Operator, typename Result, typename... Parameters>
struct Caller<Operator, Result(Parameters...)> {
  static_assert(sizeof...(Parameters) <= kMaxUnboxedArgs);
  static constexpr size_t parameters = sizeof...(Parameters);

  static constexpr UnboxedCall call() {
    if constexpr (std::is_same_v<Result, std::vector<at::Tensor>>) {
      return {nullptr, &list};
    } else {
      return {&tensors, nullptr};
    }
  }

  static void tensors(const UnboxedArg* args, ts_tensor** results) {
    tensors(args, results, std::index_sequence_for<Parameters...>());
  }

  static Result list(const UnboxedArg* args) {
    return list(args, std::index_sequence_for<Parameters...>());
  }

 private:
  template <size_t... I>
  static void tensors(const UnboxedArg* args, ts_tensor** results, std::index_sequence<I...>) {
    std::tuple<Value<Parameters>...> values{args[I]...};  // the result may be one of them
    if constexpr (std::is_void_v<Result>) {
      Operator::call(std::get<I>(values).get()...);
    } else {
      hand_out(Operator::call(std::get<I>(values).get()...), results);
    }
  }

  template <size_t... I>
  static Result list(const UnboxedArg* args, std::index_sequence<I...>) {
    std::tuple<Value<Parameters>...> values{args[I]...};
    return Operator::call(std::get<I>(values).get()...);
  }
};

struct Row {
  const char* name;
  const char* overload;
  size_t parameters;
  UnboxedCall call;
};

template <typename... Operators>
struct Table {
  static constexpr Row rows[] = {{Operators::name, Operators::overload_name,
                                  Caller<Operators>::parameters, Caller<Operators>::call()}...};
};

namespace op = at::_ops;

using Frequent = Table<  //
                         // Arithmetic
    op::abs, op::add_Scalar, op::add_Tensor, op::addcmul, op::addmm, op::clamp, op::clamp_min,
    op::cos, op::div_Scalar, op::div_Tensor, op::exp, op::log, op::maximum, op::minimum,
    op::mul_Scalar, op::mul_Tensor, op::neg, op::pow_Tensor_Scalar, op::reciprocal, op::rsub_Scalar,
    op::rsqrt, op::sin, op::sqrt, op::square, op::sub_Scalar, op::sub_Tensor, op::where_self,
    // Comparison
    op::eq_Scalar, op::eq_Tensor, op::ge_Scalar, op::ge_Tensor, op::gt_Scalar, op::gt_Tensor,
    op::le_Scalar, op::le_Tensor, op::lt_Scalar, op::lt_Tensor, op::masked_fill_Scalar,
    op::ne_Scalar, op::ne_Tensor,
    // In place
    op::add__Scalar, op::add__Tensor, op::addcdiv_, op::addcmul_, op::div__Scalar, op::div__Tensor,
    op::fill__Scalar, op::mul__Scalar, op::mul__Tensor, op::relu_, op::sub__Tensor, op::zero_,
    // Products
    op::bmm, op::linear, op::matmul, op::mm,
    // Networks
    op::adaptive_avg_pool2d, op::avg_pool2d, op::batch_norm, op::conv1d, op::conv2d, op::dropout,
    op::embedding, op::gelu, op::group_norm, op::hardsigmoid, op::hardswish, op::layer_norm,
    op::leaky_relu, op::log_softmax_int, op::max_pool2d, op::relu, op::rms_norm,
    op::scaled_dot_product_attention, op::sigmoid, op::silu, op::softmax_int, op::tanh,
    op::upsample_bilinear2d_vec, op::upsample_nearest2d_vec,
    // Losses
    op::binary_cross_entropy_with_logits, op::cross_entropy_loss, op::l1_loss, op::mse_loss,
    op::nll_loss,
    // Reductions
    op::amax, op::amin, op::argmax, op::cumsum, op::max, op::max_dim, op::mean, op::mean_dim,
    op::sum, op::sum_dim_IntList, op::topk,
    // Shapes
    op::alias, op::cat, op::clone, op::contiguous, op::detach, op::expand, op::flatten_using_ints,
    op::gather, op::index_select, op::narrow, op::permute, op::reshape, op::select_int,
    op::slice_Tensor, op::squeeze, op::squeeze_dim, op::stack, op::t, op::transpose_int,
    op::unsqueeze, op::view,
    // Lists
    op::_foreach_add_List, op::_foreach_addcmul_Scalar, op::_foreach_div_List,
    op::_foreach_lerp_Scalar, op::_foreach_mul_Scalar, op::_foreach_mul_Tensor,
    op::_foreach_norm_Scalar, op::_foreach_sqrt, op::broadcast_tensors, op::chunk,
    op::meshgrid_indexing, op::split_Tensor, op::split_sizes, op::split_with_sizes,
    op::tensor_split_sections, op::unbind_int,
    // Many tensors
    op::_foreach_add__List, op::_foreach_add__Scalar, op::_foreach_addcdiv__Scalar,
    op::_foreach_addcmul__Scalar, op::_foreach_clamp_max__Scalar, op::_foreach_clamp_min__Scalar,
    op::_foreach_lerp__Scalar, op::_foreach_mul__Scalar, op::_foreach_mul__Tensor,
    op::_foreach_sqrt_, op::_foreach_zero_, op::_fused_adam_, op::_fused_adam__tensor_lr,
    op::_fused_adamw_, op::_fused_adamw__tensor_lr, op::_fused_sgd_, op::_fused_sgd__tensor_lr>;

}  // namespace

UnboxedCall unboxed_call_of(const std::string& name, const std::string& overload,
                            size_t parameters) {
  for (const Row& row : Frequent::rows) {
    if (name == row.name && overload == row.overload) {
      return parameters == row.parameters ? row.call : UnboxedCall{};
    }
  }
  return {};
}

}  // namespace ts
