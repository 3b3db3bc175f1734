#include "torch/unboxed.h"

#include <ATen/Operators.h>
#include <ATen/core/IListRef.h>
#include <c10/core/SymIntArrayRef.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <new>
#include <optional>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/error.h"
#include "torch/numerics.h"
#include "torch/tensor.h"

namespace ts {
namespace {

double double_of(int64_t bits) {
  double value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// A value that is never destroyed, because its destructor would do nothing or must not run.
template <typename T>
class Kept {
 public:
  Kept() noexcept {}
  ~Kept() {}
  Kept(const Kept&) = delete;
  Kept& operator=(const Kept&) = delete;

  template <typename... From>
  void emplace(From&&... from) {
    new (&value_) T(std::forward<From>(from)...);
  }
  T& operator*() noexcept { return value_; }

 private:
  union {
    T value_;
  };
};

// A tensor that shares the caller's reference, which outlives the call, so no count changes.
[[gnu::always_inline]] inline at::Tensor borrowed(const ts_tensor* handle) noexcept {
  return at::Tensor(
      c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim(impl_of(handle)));
}

// An argument with the arrays that it refers to, the caller's or the default's.
struct Argument {
  Argument(const Operands& given, const Operands& defaults, size_t i)
      : from(static_cast<int64_t>(i) < given.arg_count && given.args[i].kind != TS_ARG_KIND_DEFAULT
                 ? given
                 : defaults),
        arg(from.args[i]) {}

  const Operands& from;
  const ts_arg& arg;
};

// An argument's value as a parameter of the C++ type T, valid until the call returns. take returns
// false for an argument that needs the boxed call.
template <typename T>
class Value;

template <>
class Value<at::Tensor&> {
 public:
  [[gnu::always_inline]] bool take(const Operands& given, const Operands&, size_t i) noexcept {
    if (static_cast<int64_t>(i) >= given.arg_count) return false;
    const ts_arg& arg = given.args[i];
    if (arg.kind != TS_ARG_KIND_TENSOR || arg.value < 0 || arg.value >= given.tensor_count) {
      return false;
    }
    const ts_tensor* handle = given.tensors[arg.value];
    if (handle == nullptr) return false;
    tensor_.emplace(borrowed(handle));
    return true;
  }
  at::Tensor& get() noexcept { return *tensor_; }

 private:
  Kept<at::Tensor> tensor_;
};

template <>
class Value<const at::Tensor&> : public Value<at::Tensor&> {};

template <>
class Value<const std::optional<at::Tensor>&> {
 public:
  [[gnu::always_inline]] bool take(const Operands& given, const Operands& defaults, size_t i) {
    const Argument a(given, defaults, i);
    if (a.arg.kind == TS_ARG_KIND_NONE) {
      tensor_.emplace();
      return true;
    }
    if (a.arg.kind != TS_ARG_KIND_TENSOR || a.arg.value < 0 || a.arg.value >= given.tensor_count) {
      return false;
    }
    const ts_tensor* handle = given.tensors[a.arg.value];
    if (handle == nullptr) return false;
    tensor_.emplace(borrowed(handle));
    return true;
  }
  const std::optional<at::Tensor>& get() noexcept { return *tensor_; }

 private:
  Kept<std::optional<at::Tensor>> tensor_;
};

template <>
class Value<at::TensorList> {
 public:
  Value() = default;
  ~Value() {
    for (at::Tensor& tensor : tensors_) static_cast<void>(tensor.unsafeReleaseTensorImpl());
  }
  Value(const Value&) = delete;
  Value& operator=(const Value&) = delete;
  [[gnu::always_inline]] bool take(const Operands& given, const Operands& defaults, size_t i) {
    const Argument a(given, defaults, i);
    if (a.arg.kind != TS_ARG_KIND_TENSORS || !is_inside(a.arg, a.from.tensor_count)) return false;
    ts_tensor* const* const first = a.from.tensors + a.arg.value;
    ts_tensor* const* const last = first + a.arg.count;
    if (std::find(first, last, nullptr) != last) return false;
    tensors_.reserve(static_cast<size_t>(a.arg.count));  // so that the following code cannot throw
    for (auto each = first; each != last; ++each) tensors_.push_back(borrowed(*each));
    return true;
  }
  at::TensorList get() const noexcept { return tensors_; }

 private:
  c10::SmallVector<at::Tensor, 4> tensors_;
};

template <>
class Value<const at::ITensorListRef&> : public Value<at::TensorList> {
 public:
  at::ITensorListRef get() const noexcept { return {Value<at::TensorList>::get()}; }
};

// Conversion of an argument to a new value.
template <typename T>
struct Convert;

inline bool is_bool(const ts_arg& arg) { return arg.value == 0 || arg.value == 1; }

template <>
struct Convert<int64_t> {
  static bool takes(const Argument& a) { return a.arg.kind == TS_ARG_KIND_INT; }
  static int64_t of(const Argument& a) { return a.arg.value; }
};
// A SymInt of a very negative number owns memory.
template <>
struct Convert<c10::SymInt> {
  static bool takes(const Argument& a) {
    return a.arg.kind == TS_ARG_KIND_INT && c10::SymInt::check_range(a.arg.value);
  }
  static c10::SymInt of(const Argument& a) { return c10::SymInt(a.arg.value); }
};
template <>
struct Convert<double> {
  static bool takes(const Argument& a) { return a.arg.kind == TS_ARG_KIND_DOUBLE; }
  static double of(const Argument& a) { return double_of(a.arg.value); }
};
template <>
struct Convert<bool> {
  static bool takes(const Argument& a) { return a.arg.kind == TS_ARG_KIND_BOOL && is_bool(a.arg); }
  static bool of(const Argument& a) { return a.arg.value != 0; }
};
template <>
struct Convert<at::Scalar> {
  static bool takes(const Argument& a) {
    return a.arg.kind == TS_ARG_KIND_INT || a.arg.kind == TS_ARG_KIND_DOUBLE ||
           (a.arg.kind == TS_ARG_KIND_BOOL && is_bool(a.arg));
  }
  static at::Scalar of(const Argument& a) {
    if (a.arg.kind == TS_ARG_KIND_DOUBLE) return double_of(a.arg.value);
    if (a.arg.kind == TS_ARG_KIND_BOOL) return a.arg.value != 0;
    return a.arg.value;
  }
};
// Enumerations are passed as ints, and LibTorch does not check them before it uses them as indices.
template <>
struct Convert<at::ScalarType> {
  static bool takes(const Argument& a) {
    return a.arg.kind == TS_ARG_KIND_INT && a.arg.value >= 0 &&
           a.arg.value < static_cast<int64_t>(at::ScalarType::NumOptions) &&
           a.arg.value != static_cast<int64_t>(at::ScalarType::Undefined);
  }
  static at::ScalarType of(const Argument& a) { return static_cast<at::ScalarType>(a.arg.value); }
};
template <>
struct Convert<at::MemoryFormat> {
  static bool takes(const Argument& a) {
    return a.arg.kind == TS_ARG_KIND_INT && a.arg.value >= 0 &&
           a.arg.value < static_cast<int64_t>(at::MemoryFormat::NumOptions);
  }
  static at::MemoryFormat of(const Argument& a) {
    return static_cast<at::MemoryFormat>(a.arg.value);
  }
};
template <>
struct Convert<c10::string_view> {
  static bool takes(const Argument& a) {
    return a.arg.kind == TS_ARG_KIND_STRING && is_inside(a.arg, a.from.text_bytes);
  }
  static c10::string_view of(const Argument& a) {
    return {a.from.text + a.arg.value, static_cast<size_t>(a.arg.count)};
  }
};
template <>
struct Convert<at::IntArrayRef> {
  static bool takes(const Argument& a) {
    return a.arg.kind == TS_ARG_KIND_INTS && is_inside(a.arg, a.from.int_count);
  }
  static at::IntArrayRef of(const Argument& a) {
    return {a.from.ints + a.arg.value, static_cast<size_t>(a.arg.count)};
  }
};
template <>
struct Convert<c10::SymIntArrayRef> : Convert<at::IntArrayRef> {
  static c10::SymIntArrayRef of(const Argument& a) {
    return c10::fromIntArrayRefSlow(Convert<at::IntArrayRef>::of(a));
  }
};

template <typename T>
class Value {
 public:
  [[gnu::always_inline]] bool take(const Operands& given, const Operands& defaults, size_t i) {
    const Argument a(given, defaults, i);
    if (!Convert<T>::takes(a)) return false;
    value_.emplace(Convert<T>::of(a));
    return true;
  }
  // No value of the types above owns memory: a Scalar that is a number does not.
  const T& get() noexcept { return *value_; }

 private:
  Kept<T> value_;
};

template <>
class Value<const at::Scalar&> : public Value<at::Scalar> {};

// An optional parameter: Optional is constructed empty, or from a T.
template <typename Optional, typename T>
class OptionalValue {
 public:
  [[gnu::always_inline]] bool take(const Operands& given, const Operands& defaults, size_t i) {
    const Argument a(given, defaults, i);
    if (a.arg.kind == TS_ARG_KIND_NONE) {
      value_.emplace();
      return true;
    }
    if (!Convert<T>::takes(a)) return false;
    value_.emplace(Convert<T>::of(a));
    return true;
  }
  const Optional& get() noexcept { return *value_; }

 private:
  Kept<Optional> value_;
};

template <typename T>
class Value<std::optional<T>> : public OptionalValue<std::optional<T>, T> {};

template <>
class Value<const std::optional<at::Scalar>&> : public Value<std::optional<at::Scalar>> {};

template <typename T>
class Value<c10::OptionalArrayRef<T>>
    : public OptionalValue<c10::OptionalArrayRef<T>, c10::ArrayRef<T>> {};

template <>
class Value<std::optional<at::ArrayRef<double>>> {
 public:
  [[gnu::always_inline]] bool take(const Operands& given, const Operands& defaults, size_t i) {
    const Argument a(given, defaults, i);
    if (a.arg.kind == TS_ARG_KIND_NONE) return true;
    if (a.arg.kind != TS_ARG_KIND_DOUBLES || !is_inside(a.arg, a.from.int_count)) return false;
    values_.emplace();
    const int64_t* const first = a.from.ints + a.arg.value;
    std::transform(first, first + a.arg.count, std::back_inserter(*values_), double_of);
    return true;
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

// The result of an in-place operator is its first operand.
void hand_out(at::Tensor& operand, ts_tensor** results) {
  if (results != nullptr) *results = to_handle(operand);
}

template <typename... Tensors>
void hand_out(std::tuple<Tensors...>&& all, ts_tensor** results) {
  if (results == nullptr) return;
  std::apply([&](auto&... each) { (hand_out(std::move(each), results++), ...); }, all);
}

// The call of an operator in LibTorch's C++ interface, whose struct has the schema as a C++ type.
template <typename Operator, bool leaves_boxed, typename Schema = typename Operator::schema>
struct Caller;

template <typename Operator, bool leaves_boxed, typename Result, typename... Parameters>
struct Caller<Operator, leaves_boxed, Result(Parameters...)> {
  static constexpr size_t parameters = sizeof...(Parameters);

  static constexpr UnboxedCall call() {
    if constexpr (std::is_same_v<Result, std::vector<at::Tensor>>) {
      return {nullptr, nullptr, false, &list};
    } else {
      return {&tensors, &one, leaves_boxed, nullptr};
    }
  }

  static bool tensors(const UnboxedOperator& op, const Operands& given, ts_tensor** results) {
    return with_values(given, op.defaults, [&](auto&... values) { call_with(results, values...); });
  }

  [[gnu::flatten]] static ts_error* one(const UnboxedOperator& op, const ts_arg* args,
                                        ts_tensor* const* handles, const int64_t* ints,
                                        ts_call_counts counts, ts_tensor** result) {
    bool done = false;
    ts_error* error = guard("ts_operator_call", [&] {
      const Operands given{args, counts.args, handles, counts.tensors,
                           ints, counts.ints, nullptr, 0};
      done = true;
      done = with_values(given, op.defaults, [&](auto&... values) {
        const NumericsTurn turn(0);
        call_with(result, values...);
      });
    });
    if (__builtin_expect(!done, 0)) {
      return leaves_boxed ? needs_boxed_call() : call_one(&op, args, handles, ints, counts, result);
    }
    return error;
  }

  static bool list(const UnboxedOperator& op, const Operands& given,
                   std::vector<at::Tensor>& results) {
    return with_values(given, op.defaults,
                       [&](auto&... values) { results = Operator::call(values.get()...); });
  }

 private:
  template <typename... Values>
  [[gnu::always_inline]] static void call_with(ts_tensor** results, Values&... values) {
    if constexpr (std::is_void_v<Result>) {
      Operator::call(values.get()...);
    } else {
      hand_out(Operator::call(values.get()...), results);  // the result may be one of the values
    }
  }

  template <typename Body>
  [[gnu::always_inline]] static bool with_values(const Operands& given, const Operands& defaults,
                                                 Body&& body) {
    return with_values(given, defaults, body, std::index_sequence_for<Parameters...>());
  }

  template <typename Body, size_t... I>
  [[gnu::always_inline]] static bool with_values(const Operands& given, const Operands& defaults,
                                                 Body& body, std::index_sequence<I...>) {
    std::tuple<Value<Parameters>...> values;
    if (!(std::get<I>(values).take(given, defaults, I) && ...)) return false;
    body(std::get<I>(values)...);
    return true;
  }
};

struct Row {
  const char* name;
  const char* overload;
  size_t parameters;
  UnboxedCall call;
};

template <bool leaves_boxed, typename... Operators>
struct Table {
  static constexpr Row rows[] = {{Operators::name, Operators::overload_name,
                                  Caller<Operators, leaves_boxed>::parameters,
                                  Caller<Operators, leaves_boxed>::call()}...};
};

namespace op = at::_ops;

// Operators that use libraries on a GPU.
using Products = Table<true, op::addmm, op::batch_norm, op::bmm, op::conv1d, op::conv2d, op::linear,
                       op::matmul, op::mm, op::scaled_dot_product_attention>;

using Frequent = Table<
    false,
    // Arithmetic
    op::abs, op::add_Scalar, op::add_Tensor, op::addcmul, op::clamp, op::clamp_min, op::cos,
    op::div_Scalar, op::div_Tensor, op::exp, op::log, op::maximum, op::minimum, op::mul_Scalar,
    op::mul_Tensor, op::neg, op::pow_Tensor_Scalar, op::reciprocal, op::rsub_Scalar, op::rsqrt,
    op::sin, op::sqrt, op::square, op::sub_Scalar, op::sub_Tensor, op::where_self,
    // Comparison
    op::eq_Scalar, op::eq_Tensor, op::ge_Scalar, op::ge_Tensor, op::gt_Scalar, op::gt_Tensor,
    op::le_Scalar, op::le_Tensor, op::lt_Scalar, op::lt_Tensor, op::masked_fill_Scalar,
    op::ne_Scalar, op::ne_Tensor,
    // In place
    op::add__Scalar, op::add__Tensor, op::addcdiv_, op::addcmul_, op::div__Scalar, op::div__Tensor,
    op::fill__Scalar, op::mul__Scalar, op::mul__Tensor, op::relu_, op::sub__Tensor, op::zero_,
    // Networks
    op::adaptive_avg_pool2d, op::avg_pool2d, op::dropout, op::embedding, op::gelu, op::group_norm,
    op::hardsigmoid, op::hardswish, op::layer_norm, op::leaky_relu, op::log_softmax_int,
    op::max_pool2d, op::relu, op::rms_norm, op::sigmoid, op::silu, op::softmax_int, op::tanh,
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

template <typename Rows>
const Row* find(const Rows& rows, const std::string& name, const std::string& overload) {
  const auto found = std::find_if(std::begin(rows), std::end(rows), [&](const Row& row) {
    return name == row.name && overload == row.overload;
  });
  return found == std::end(rows) ? nullptr : &*found;
}

}  // namespace

UnboxedCall unboxed_call_of(const std::string& name, const std::string& overload,
                            size_t parameters) {
  const Row* row = find(Frequent::rows, name, overload);
  if (row == nullptr) row = find(Products::rows, name, overload);
  return row != nullptr && parameters == row->parameters ? row->call : UnboxedCall{};
}

}  // namespace ts
