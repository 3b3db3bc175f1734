// Calls of any LibTorch operator by name. ts_operator_find reads the schema once, so that a call
// only compares small numbers and fills the stack.
#include "torch/operator.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <ATen/core/stack.h>
#include <c10/core/GradMode.h>
#include <c10/core/Layout.h>
#include <c10/core/MemoryFormat.h>
#include <c10/util/SmallVector.h>
#include <torch/version.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/thread.h"
#include "cuda/capture.h"
#include "cuda/device.h"
#include "cuda/libraries.h"
#include "torch/generator.h"
#include "torch/numerics.h"
#include "torch/pending.h"
#include "torch/tensor.h"
#include "torch/unboxed.h"
#include "torchstream.h"

namespace ts {
namespace {

// The type of a parameter, without optionality.
enum class Type : uint8_t {
  kTensor,
  kTensors,
  kOptionalTensors,  // Tensor?[]
  kInt,
  kDtype,
  kLayout,
  kMemoryFormat,
  kFloat,
  kBool,
  kScalar,
  kInts,
  kFloats,
  kBools,
  kScalars,
  kDevice,
  kString,
  kGenerator,
  kOther  // Storage, Dimname and others: only the default or none
};

constexpr uint32_t bit(int32_t kind) { return 1U << kind; }

// Returns the header's argument kinds that a type accepts.
uint32_t kinds_of(Type type) {
  switch (type) {
    case Type::kTensor:
      return bit(TS_ARG_KIND_TENSOR);
    case Type::kTensors:
    case Type::kOptionalTensors:
      return bit(TS_ARG_KIND_TENSORS);
    case Type::kInt:
    case Type::kDtype:
    case Type::kLayout:
    case Type::kMemoryFormat:
      return bit(TS_ARG_KIND_INT);
    case Type::kFloat:
      return bit(TS_ARG_KIND_DOUBLE);
    case Type::kBool:
      return bit(TS_ARG_KIND_BOOL);
    case Type::kScalar:
      return bit(TS_ARG_KIND_INT) | bit(TS_ARG_KIND_DOUBLE) | bit(TS_ARG_KIND_BOOL) |
             bit(TS_ARG_KIND_COMPLEX);
    case Type::kInts:
      return bit(TS_ARG_KIND_INTS);
    case Type::kFloats:
      return bit(TS_ARG_KIND_DOUBLES);
    case Type::kBools:
      return bit(TS_ARG_KIND_BOOLS);
    case Type::kScalars:
      return bit(TS_ARG_KIND_INTS) | bit(TS_ARG_KIND_DOUBLES) | bit(TS_ARG_KIND_BOOLS);
    case Type::kDevice:
      return bit(TS_ARG_KIND_DEVICE);
    case Type::kString:
      return bit(TS_ARG_KIND_STRING);
    case Type::kGenerator:
      return bit(TS_ARG_KIND_GENERATOR);
    case Type::kOther:
      return 0;
  }
  return 0;
}

Type list_type_of(const c10::TypePtr& element) {
  switch (element->kind()) {
    case c10::TypeKind::TensorType:
      return Type::kTensors;
    case c10::TypeKind::OptionalType:
      return element->expectRef<c10::OptionalType>().getElementType()->kind() ==
                     c10::TypeKind::TensorType
                 ? Type::kOptionalTensors
                 : Type::kOther;
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
      return Type::kInts;
    case c10::TypeKind::FloatType:
      return Type::kFloats;
    case c10::TypeKind::BoolType:
      return Type::kBools;
    case c10::TypeKind::NumberType:
      return Type::kScalars;
    default:
      return Type::kOther;
  }
}

Type type_of(const c10::TypePtr& type) {
  switch (type->kind()) {
    case c10::TypeKind::TensorType:
      return Type::kTensor;
    case c10::TypeKind::ListType:
      return list_type_of(type->expectRef<c10::ListType>().getElementType());
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
      return Type::kInt;
    case c10::TypeKind::ScalarTypeType:
      return Type::kDtype;
    case c10::TypeKind::LayoutType:
      return Type::kLayout;
    case c10::TypeKind::MemoryFormatType:
      return Type::kMemoryFormat;
    case c10::TypeKind::FloatType:
    case c10::TypeKind::SymFloatType:
      return Type::kFloat;
    case c10::TypeKind::BoolType:
    case c10::TypeKind::SymBoolType:
      return Type::kBool;
    case c10::TypeKind::NumberType:
      return Type::kScalar;
    case c10::TypeKind::DeviceObjType:
      return Type::kDevice;
    case c10::TypeKind::StringType:
      return Type::kString;
    case c10::TypeKind::GeneratorType:
      return Type::kGenerator;
    default:
      return Type::kOther;
  }
}

struct Parameter {
  Type type;
  uint32_t kinds;  // bits of accepted kinds, TS_ARG_KIND_DEFAULT and TS_ARG_KIND_NONE included
  c10::IValue default_value;
  std::string name;
  std::string type_name;  // as the schema writes it, for messages
};

// The defaults of an operator's parameters for unboxed calls. A parameter without a default, or
// with a default that only the boxed call supports, is TS_ARG_KIND_DEFAULT.
struct Defaults {
  std::vector<ts_arg> args;
  std::vector<int64_t> ints;
  std::string text;
};

Parameter parameter_of(const c10::Argument& argument) {
  c10::TypePtr type = argument.real_type();
  Parameter parameter;
  parameter.name = argument.name();
  parameter.type_name = type->str();
  parameter.kinds = 0;
  if (type->kind() == c10::TypeKind::OptionalType) {
    parameter.kinds |= bit(TS_ARG_KIND_NONE);
    type = type->expectRef<c10::OptionalType>().getElementType();
  }
  parameter.type = type_of(type);
  parameter.kinds |= kinds_of(parameter.type);
  if (argument.default_value().has_value()) {
    parameter.kinds |= bit(TS_ARG_KIND_DEFAULT);
    parameter.default_value = *argument.default_value();
  }
  return parameter;
}

const char* kind_name(int32_t kind) {
  switch (kind) {
    case TS_ARG_KIND_DEFAULT:
      return "the default";
    case TS_ARG_KIND_NONE:
      return "none";
    case TS_ARG_KIND_TENSOR:
      return "a tensor";
    case TS_ARG_KIND_TENSORS:
      return "a list of tensors";
    case TS_ARG_KIND_INT:
      return "an int";
    case TS_ARG_KIND_DOUBLE:
      return "a double";
    case TS_ARG_KIND_BOOL:
      return "a bool";
    case TS_ARG_KIND_INTS:
      return "a list of ints";
    case TS_ARG_KIND_DOUBLES:
      return "a list of doubles";
    case TS_ARG_KIND_BOOLS:
      return "a list of bools";
    case TS_ARG_KIND_DEVICE:
      return "a device";
    case TS_ARG_KIND_STRING:
      return "a string";
    case TS_ARG_KIND_COMPLEX:
      return "a complex number";
    case TS_ARG_KIND_GENERATOR:
      return "a generator";
    default:
      return "an argument of unknown kind";
  }
}

// Whether an int is a value of the type. Enumerations are passed as ints, and LibTorch does not
// check them before it uses them as indices.
bool is_enumerator(Type type, int64_t value) {
  switch (type) {
    case Type::kDtype:
      return value >= 0 && value < static_cast<int64_t>(at::ScalarType::NumOptions) &&
             value != static_cast<int64_t>(at::ScalarType::Undefined);
    case Type::kLayout:
      return value >= 0 && value < static_cast<int64_t>(at::Layout::NumOptions);
    case Type::kMemoryFormat:
      return value >= 0 && value < static_cast<int64_t>(at::MemoryFormat::NumOptions);
    default:
      return true;
  }
}

double double_of(int64_t bits) {
  double value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

Operands operands_of(const ts_arguments& given, ts_tensor* const* tensors, int64_t tensor_count) {
  return {given.args, given.arg_count, tensors,    tensor_count,
          given.ints, given.int_count, given.text, static_cast<int64_t>(given.text_bytes)};
}

}  // namespace
}  // namespace ts

struct ts_operator : ts::UnboxedOperator {
  ts::Libraries libraries = ts::Libraries::kNone;  // libraries that it may use on a GPU
  bool random = false;                             // draws random numbers
  int32_t non_blocking = -1;                       // the index of this parameter; -1: none
  bool reads_values = false;  // its result, or the result's shape, makes the host wait for values
  bool takes_masks = false;   // reads the values of indices that are masks
  bool has_numerics = true;   // takes a turn of numerics.h
  ts::Defaults default_arrays;
  c10::OperatorHandle handle;
  std::string name;    // aten::add.Tensor
  std::string schema;  // as text
  std::vector<ts::Parameter> parameters;
  size_t returns = 0;
  // A result's type that has no form in C; "" if all types have one.
  std::string unknown_return = "";

  ts_operator(c10::OperatorHandle of, std::string full_name)
      : handle(std::move(of)), name(std::move(full_name)) {}
};

struct ts_tensor_list {
  std::vector<at::Tensor> tensors;
};

struct ts_results {
  std::vector<ts_arg> args;
  std::vector<at::Tensor> tensors;
  std::vector<int64_t> ints;
};

namespace ts {
namespace {

const ts_generator& generator_of(const ts_arg& arg) {
  return *reinterpret_cast<const ts_generator*>(static_cast<uintptr_t>(arg.value));
}

// Turns one argument into a value on the stack, or throws an error about it.
class Filler {
 public:
  Filler(const ts_operator& op, const Operands& operands, torch::jit::Stack& stack)
      : op_(op), operands_(operands), stack_(stack) {}

  void push(const Parameter& parameter, const ts_arg& arg) {
    if (arg.kind < 0 || arg.kind > TS_ARG_KIND_GENERATOR ||
        (parameter.kinds & bit(arg.kind)) == 0) {
      mismatch(parameter, arg.kind);
    }
    switch (arg.kind) {
      case TS_ARG_KIND_DEFAULT:
        stack_.push_back(parameter.default_value);
        return;
      case TS_ARG_KIND_NONE:
        stack_.emplace_back();
        return;
      case TS_ARG_KIND_TENSOR:
        stack_.emplace_back(tensor(parameter, arg.value));
        return;
      case TS_ARG_KIND_TENSORS:
        push_tensors(parameter, arg);
        return;
      case TS_ARG_KIND_INT:
        check_enum(parameter, arg.value);
        stack_.emplace_back(arg.value);
        return;
      case TS_ARG_KIND_DOUBLE:
        stack_.emplace_back(double_of(arg.value));
        return;
      case TS_ARG_KIND_BOOL:
        stack_.emplace_back(boolean(parameter, arg.value));
        return;
      case TS_ARG_KIND_INTS:
      case TS_ARG_KIND_DOUBLES:
      case TS_ARG_KIND_BOOLS:
        push_list(parameter, arg);
        return;
      case TS_ARG_KIND_DEVICE:
        push_device(parameter, arg.value);
        return;
      case TS_ARG_KIND_GENERATOR:
        if (arg.value == 0) fail(parameter, "the generator is NULL");
        stack_.emplace_back(generator_of(arg).generator);
        return;
      case TS_ARG_KIND_STRING:
        check_range(parameter, arg, operands_.text_bytes, "bytes of text");
        stack_.emplace_back(
            std::string(operands_.text + arg.value, static_cast<size_t>(arg.count)));
        return;
      case TS_ARG_KIND_COMPLEX:
        push_complex(parameter, arg);
        return;
    }
  }

  [[noreturn]] void fail(const Parameter& parameter, const std::string& what,
                         int32_t code = TS_ERROR_INVALID_ARGUMENT) const {
    throw Failure(code, op_.name + ": argument " + parameter.name + ": " + what);
  }

 private:
  [[noreturn]] void mismatch(const Parameter& parameter, int32_t kind) const {
    if (kind == TS_ARG_KIND_DEFAULT) {
      fail(parameter,
           "it is " + parameter.type_name + " and has no default; schema: " + op_.schema);
    }
    fail(parameter, "it takes " + parameter.type_name + ", not " + kind_name(kind));
  }

  // Checks the range [arg.value, arg.value + arg.count) of an array of `available` elements.
  void check_range(const Parameter& parameter, const ts_arg& arg, int64_t available,
                   const char* what) const {
    if (arg.count < 0 || arg.value < 0 || arg.value > available ||
        arg.count > available - arg.value) {
      fail(parameter, std::to_string(arg.count) + " from index " + std::to_string(arg.value) +
                          " are not inside the " + std::to_string(available) + " " + what);
    }
  }

  at::Tensor tensor(const Parameter& parameter, int64_t index) const {
    if (index < 0 || index >= operands_.tensor_count) {
      fail(parameter, "there is no tensor " + std::to_string(index) + " among the " +
                          std::to_string(operands_.tensor_count) + " given");
    }
    const ts_tensor* handle = operands_.tensors[index];
    if (handle == nullptr) fail(parameter, "tensor " + std::to_string(index) + " is NULL");
    return value_of(handle);
  }

  bool boolean(const Parameter& parameter, int64_t value) const {
    if (value != 0 && value != 1) {
      fail(parameter, "a bool is 0 or 1, not " + std::to_string(value));
    }
    return value == 1;
  }

  void check_enum(const Parameter& parameter, int64_t value) const {
    if (is_enumerator(parameter.type, value)) return;
    fail(parameter, parameter.type == Type::kDtype
                        ? std::to_string(value) + " is not a dtype"
                        : std::to_string(value) + " is not one of " + parameter.type_name);
  }

  void push_device(const Parameter& parameter, int64_t value) const {
    if (value < TS_DEVICE_CPU || value >= device_count()) {
      if (value >= 0) throw_no_device(static_cast<int32_t>(std::min<int64_t>(value, INT32_MAX)));
      fail(parameter, "device " + std::to_string(value) + ": -1 is the CPU, 0 the first GPU");
    }
    stack_.emplace_back(checked_device(static_cast<int32_t>(value)));
  }

  void push_complex(const Parameter& parameter, const ts_arg& arg) const {
    check_range(parameter, {arg.kind, 2, arg.value}, operands_.int_count, "ints given");
    const int64_t* parts = operands_.ints + arg.value;
    stack_.emplace_back(at::Scalar(c10::complex<double>(double_of(parts[0]), double_of(parts[1]))));
  }

  void push_tensors(const Parameter& parameter, const ts_arg& arg) const {
    check_range(parameter, arg, operands_.tensor_count, "tensors given");
    if (parameter.type == Type::kOptionalTensors) {
      c10::List<std::optional<at::Tensor>> list;
      list.reserve(static_cast<size_t>(arg.count));
      for (int64_t i = arg.value; i < arg.value + arg.count; ++i) {
        // NULL means an absent element.
        if (operands_.tensors[i] == nullptr) {
          list.push_back(std::nullopt);
        } else {
          list.push_back(value_of(operands_.tensors[i]));
        }
      }
      stack_.emplace_back(std::move(list));
      return;
    }
    c10::List<at::Tensor> list;
    list.reserve(static_cast<size_t>(arg.count));
    for (int64_t i = arg.value; i < arg.value + arg.count; ++i) {
      list.push_back(tensor(parameter, i));
    }
    stack_.emplace_back(std::move(list));
  }

  template <typename Element, typename Convert>
  void push_as(const ts_arg& arg, Convert&& convert) const {
    c10::List<Element> list;
    list.reserve(static_cast<size_t>(arg.count));
    for (int64_t i = arg.value; i < arg.value + arg.count; ++i) {
      list.push_back(convert(operands_.ints[i]));
    }
    stack_.emplace_back(std::move(list));
  }

  void push_list(const Parameter& parameter, const ts_arg& arg) const {
    check_range(parameter, arg, operands_.int_count, "ints given");
    const auto as_int = [](int64_t value) { return value; };
    const auto as_bool = [&](int64_t value) { return boolean(parameter, value); };
    if (parameter.type == Type::kScalars) {
      if (arg.kind == TS_ARG_KIND_INTS) push_as<at::Scalar>(arg, as_int);
      if (arg.kind == TS_ARG_KIND_DOUBLES) push_as<at::Scalar>(arg, double_of);
      if (arg.kind == TS_ARG_KIND_BOOLS) push_as<at::Scalar>(arg, as_bool);
      return;
    }
    if (arg.kind == TS_ARG_KIND_INTS) push_as<int64_t>(arg, as_int);
    if (arg.kind == TS_ARG_KIND_DOUBLES) push_as<double>(arg, double_of);
    if (arg.kind == TS_ARG_KIND_BOOLS) push_as<bool>(arg, as_bool);
  }

  const ts_operator& op_;
  const Operands& operands_;
  torch::jit::Stack& stack_;
};

// The stack of one call. Its memory is kept for the thread's next call; a nested call finds none
// and allocates.
class CallStack {
 public:
  CallStack() noexcept { std::swap(stack_, kept()); }
  ~CallStack() {
    stack_.clear();
    std::swap(stack_, kept());
  }
  CallStack(const CallStack&) = delete;
  CallStack& operator=(const CallStack&) = delete;

  torch::jit::Stack& operator*() noexcept { return stack_; }

 private:
  static torch::jit::Stack& kept() noexcept {
    thread_local torch::jit::Stack here __attribute__((tls_model("initial-exec")));
    return here;
  }

  torch::jit::Stack stack_;
};

void fill_stack(const ts_operator& op, const Operands& operands, torch::jit::Stack& stack) {
  const auto parameters = static_cast<int32_t>(op.parameters.size());
  if (operands.arg_count > parameters) {
    throw Failure(TS_ERROR_INVALID_ARGUMENT, op.name + ": " + std::to_string(operands.arg_count) +
                                                 " arguments for " + std::to_string(parameters) +
                                                 "; schema: " + op.schema);
  }
  stack.reserve(std::max(op.parameters.size(), op.returns));
  Filler filler(op, operands, stack);
  constexpr ts_arg kDefault{TS_ARG_KIND_DEFAULT, 0, 0};
  for (int32_t i = 0; i < parameters; ++i) {
    filler.push(op.parameters[static_cast<size_t>(i)],
                i < operands.arg_count ? operands.args[i] : kDefault);
  }
}

// Visits the tensors on the stack in order, including elements of lists.
template <typename Take>
void each_result(torch::jit::Stack& stack, Take&& take) {
  for (c10::IValue& value : stack) {
    if (value.isTensor()) {
      take(std::move(value).toTensor());
    } else if (value.isTensorList()) {
      for (const c10::IValue& element : value.toListRef()) take(element.toTensor());
    }
  }
}

// Some backward operators leave a result undefined: its handle is NULL.
ts_tensor* handle_or_null(at::Tensor tensor) {
  return tensor.defined() ? to_handle(std::move(tensor)) : nullptr;
}

int64_t count_results(const torch::jit::Stack& stack) {
  size_t count = 0;
  for (const c10::IValue& value : stack) {
    if (value.isTensor()) ++count;
    if (value.isTensorList()) count += value.toListRef().size();
  }
  return static_cast<int64_t>(count);
}

int64_t bits_of(double value) {
  int64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// Adds results to the arrays, encoded like arguments.
class Collector {
 public:
  explicit Collector(ts_results& results) : to_(results) {}

  void add(const c10::IValue& value) {
    if (value.isNone()) {
      put(TS_ARG_KIND_NONE, 0, 0);
    } else if (value.isTensor()) {
      to_.tensors.push_back(value.toTensor());
      put(TS_ARG_KIND_TENSOR, 1, to_.tensors.size() - 1);
    } else if (value.isTensorList()) {
      add_tensors(value);
    } else if (value.isInt()) {
      to_.args.push_back({TS_ARG_KIND_INT, 0, value.toInt()});
    } else if (value.isDouble()) {
      to_.args.push_back({TS_ARG_KIND_DOUBLE, 0, bits_of(value.toDouble())});
    } else if (value.isBool()) {
      put(TS_ARG_KIND_BOOL, 0, value.toBool() ? 1 : 0);
    } else if (value.isComplexDouble()) {
      add_complex(value.toComplexDouble());
    } else {
      throw Failure(TS_ERROR_INTERNAL, "a result is " + value.tagKind() + ", which has no form");
    }
  }

 private:
  void put(int32_t kind, size_t count, size_t value) {
    to_.args.push_back({kind, static_cast<int32_t>(count), static_cast<int64_t>(value)});
  }

  void add_tensors(const c10::IValue& value) {
    const auto elements = value.toListRef();
    put(TS_ARG_KIND_TENSORS, elements.size(), to_.tensors.size());
    for (const c10::IValue& element : elements) to_.tensors.push_back(element.toTensor());
  }

  void add_complex(c10::complex<double> value) {
    put(TS_ARG_KIND_COMPLEX, 2, to_.ints.size());
    to_.ints.push_back(bits_of(value.real()));
    to_.ints.push_back(bits_of(value.imag()));
  }

  ts_results& to_;
};

void check_capacity(const ts_operator& op, int64_t capacity) {
  if (capacity == 0) return;
  if (op.tensor_returns < 0) {
    throw Failure(TS_ERROR_INVALID_ARGUMENT,
                  op.name + " returns a list, or an optional tensor: call ts_operator_call_list");
  }
  if (capacity < op.tensor_returns) {
    throw Failure(TS_ERROR_INVALID_ARGUMENT,
                  op.name + " returns " + std::to_string(op.tensor_returns) +
                      " tensors and there is room for " + std::to_string(capacity));
  }
}

// Whether all arrays that have elements are not NULL.
inline bool are_there(const Operands& operands) {
  const auto there = [](int64_t count, const void* array) {
    return count == 0 || (count > 0 && array != nullptr);
  };
  return there(operands.arg_count, operands.args) &&
         there(operands.tensor_count, operands.tensors) &&
         there(operands.int_count, operands.ints) && there(operands.text_bytes, operands.text);
}

void check_arrays(const Operands& operands) {
  if (are_there(operands)) return;
  const auto check = [](int64_t count, const void* array, const char* name) {
    if (count < 0 || (count > 0 && array == nullptr)) {
      throw Failure(TS_ERROR_INVALID_ARGUMENT,
                    std::string(name) + ": a negative count, or NULL with a count above 0");
    }
  };
  check(operands.arg_count, operands.args, "args");
  check(operands.tensor_count, operands.tensors, "tensors");
  check(operands.int_count, operands.ints, "ints");
  check(operands.text_bytes, operands.text, "text");
}

// Visits the tensors of a value: a tensor, or a list in which some may be absent.
template <typename Take>
void each_tensor(const c10::IValue& value, Take&& take) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) take(value.toTensor());
  } else if (value.isTensorList() || value.isOptionalTensorList()) {
    for (const c10::IValue& element : value.toListRef()) each_tensor(element, take);
  }
}

// Whether an argument is on such a device, or names it.
template <typename Match>
bool is_there(const torch::jit::Stack& stack, Match&& match) {
  return std::any_of(stack.begin(), stack.end(), [&](const c10::IValue& value) {
    bool found = value.isDevice() && match(value.toDevice());
    each_tensor(value, [&](const at::Tensor& t) { found = found || match(t.device()); });
    return found;
  });
}

// For an operator without tensor arguments, the device is an argument.
bool works_on_gpu(const torch::jit::Stack& stack) {
  return is_there(stack, [](c10::Device device) { return device.is_cuda(); });
}

// Returns the GPU of the first argument on a GPU, or -1.
c10::DeviceIndex gpu_of(const torch::jit::Stack& stack) {
  c10::DeviceIndex gpu = -1;
  is_there(stack, [&](c10::Device device) {
    if (gpu < 0 && device.is_cuda()) gpu = device.index();
    return gpu >= 0;
  });
  return gpu;
}

// Whether a copy between host and device would block until it is done.
bool is_blocking_copy(const ts_operator& op, const torch::jit::Stack& stack) {
  if (op.non_blocking < 0) return false;
  const c10::IValue& non_blocking = stack[static_cast<size_t>(op.non_blocking)];
  if (non_blocking.isBool() && non_blocking.toBool()) return false;
  return works_on_gpu(stack) && is_there(stack, [](c10::Device device) { return device.is_cpu(); });
}

bool is_non_blocking(const ts_operator& op, const torch::jit::Stack& stack) {
  if (op.non_blocking < 0) return false;
  const c10::IValue& value = stack[static_cast<size_t>(op.non_blocking)];
  return value.isBool() && value.toBool();
}

// Whether a copy between host and device reads or writes host memory that is not pinned.
bool is_pageable_copy(const ts_operator& op, const torch::jit::Stack& stack) {
  if (op.non_blocking < 0 || !works_on_gpu(stack)) return false;
  bool pageable = false;
  for (const c10::IValue& value : stack) {
    each_tensor(value, [&](const at::Tensor& tensor) {
      pageable = pageable || (tensor.is_cpu() && tensor.numel() > 0 && !is_pinned(tensor));
    });
  }
  return pageable;
}

// Makes the call wait for earlier copies into its operands on the host. The destination of a copy
// is not an operand. If only a stream reads an operand, it is enough that the stream waits.
void await_operands(const ts_operator& op, const torch::jit::Stack& stack) {
  if (!any_pending()) return;
  const bool enqueued = is_non_blocking(op, stack);
  const c10::DeviceIndex gpu = gpu_of(stack);
  const bool in_place = op.handle.schema().is_mutable();
  for (size_t i = 0; i < stack.size(); ++i) {
    if (enqueued && gpu >= 0 && in_place && i == 0) continue;
    each_tensor(stack[i], [&](const at::Tensor& tensor) {
      if (enqueued && gpu >= 0) {
        order_after_pending(c10::cuda::getCurrentCUDAStream(gpu), tensor);
      } else {
        await_pending(tensor);
      }
    });
  }
}

// If an operator would wait for the device inside its turn (NumericsTurn), waits before the turn:
// the device's remaining work may depend on a call that waits for the turn to end. Masks are
// indices whose values the host reads.
void await_values(const ts_operator& op, const torch::jit::Stack& stack) {
  if (!numerics_state.differ.load(std::memory_order_relaxed)) return;
  const c10::DeviceIndex gpu = gpu_of(stack);
  if (gpu < 0) return;
  bool waits = op.reads_values;
  for (size_t i = 1; op.takes_masks && !waits && i < stack.size(); ++i) {
    each_tensor(stack[i], [&](const at::Tensor& index) {
      waits = waits || index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
    });
  }
  if (waits) c10::cuda::getCurrentCUDAStream(gpu).synchronize();
}

// Records results on the host that a copy on the device's stream has not written yet.
void note_copies(const torch::jit::Stack& stack, c10::DeviceIndex gpu) {
  for (const c10::IValue& value : stack) {
    each_tensor(value, [&](const at::Tensor& tensor) {
      if (tensor.is_cpu()) note_pending(tensor, c10::cuda::getCurrentCUDAStream(gpu));
    });
  }
}

// Tells the capture about a call's operands, and refuses calls that cannot be captured.
void prepare_capture(const ts_operator& op, const Operands& operands,
                     const torch::jit::Stack& stack) {
  const auto refuse = [&](const char* why) {
    throw Failure(TS_ERROR_CAPTURE, op.name + " is not possible while a graph is captured: " + why);
  };
  if (op.reads_values && works_on_gpu(stack)) {
    refuse("the host would have to wait for values that are not computed yet");
  }
  if (is_blocking_copy(op, stack)) {
    refuse("the copy between host and device would wait; use pinned memory and NonBlocking");
  }
  if (is_pageable_copy(op, stack)) {
    refuse("the host memory is not pinned, so the host would have to wait for the copy");
  }
  for (int64_t i = 0; i < operands.arg_count; ++i) {
    if (operands.args[i].kind != TS_ARG_KIND_GENERATOR) continue;
    const auto& randomness = generator_of(operands.args[i]).randomness;
    if (randomness != nullptr) draw_in_capture(randomness);
  }
  for (const c10::IValue& value : stack) {
    each_tensor(value, [](const at::Tensor& tensor) { hold_in_capture(tensor); });
  }
}

void note_results(const torch::jit::Stack& stack) {
  for (const c10::IValue& value : stack) {
    each_tensor(value, [](const at::Tensor& tensor) { made_in_capture(tensor); });
  }
}

constexpr int32_t kAutocastFlags =
    TS_OPERATOR_FLAG_AUTOCAST_BFLOAT16 | TS_OPERATOR_FLAG_AUTOCAST_FLOAT16;

// Autocast to one dtype on the CPU and on GPUs, until the end of the block. LibTorch caches casts
// of weights for the process until a forward pass ends. No call knows when it ends, and an
// optimizer that changes the weight before would leave old values in the cache. So the cache is
// off.
class Autocast {
 public:
  explicit Autocast(at::ScalarType dtype)
      : cached_(at::autocast::is_autocast_cache_enabled()),
        cpu_(at::kCPU, dtype),
        cuda_(at::kCUDA, dtype) {
    at::autocast::set_autocast_cache_enabled(false);
  }
  ~Autocast() { at::autocast::set_autocast_cache_enabled(cached_); }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  class On {
   public:
    On(at::DeviceType type, at::ScalarType dtype)
        : type_(type),
          enabled_(at::autocast::is_autocast_enabled(type)),
          dtype_(at::autocast::get_autocast_dtype(type)) {
      at::autocast::set_autocast_dtype(type, dtype);
      at::autocast::set_autocast_enabled(type, true);
    }
    ~On() {
      at::autocast::set_autocast_enabled(type_, enabled_);
      at::autocast::set_autocast_dtype(type_, dtype_);
    }
    On(const On&) = delete;
    On& operator=(const On&) = delete;

   private:
    at::DeviceType type_;
    bool enabled_;
    at::ScalarType dtype_;
  };

  bool cached_;
  On cpu_;
  On cuda_;
};

// The modes of one call, set by its flags until the end of the block.
class Modes {
 public:
  explicit Modes(int32_t flags) {
    if (flags != 0) begin(flags);
  }

 private:
  [[gnu::noinline]] void begin(int32_t flags) {
    if ((flags & TS_OPERATOR_FLAG_NO_GRAD) != 0) no_grad_.emplace();
    if ((flags & kAutocastFlags) != 0) {
      autocast_.emplace((flags & TS_OPERATOR_FLAG_AUTOCAST_FLOAT16) != 0 ? at::kHalf
                                                                         : at::kBFloat16);
    }
  }

  std::optional<c10::NoGradGuard> no_grad_;
  std::optional<Autocast> autocast_;
};

// Runs the operator, and leaves the results on the stack.
void run(const ts_operator& op, const Operands& operands, int32_t flags, torch::jit::Stack& stack) {
  fill_stack(op, operands, stack);
  const bool captured = somebody_captures() && in_capture();
  if (captured) prepare_capture(op, operands, stack);
  std::optional<RandomTurn> turn;
  if (op.random && !captured && works_on_gpu(stack)) turn.emplace();
  const CaptureWatch watch(op.name.c_str());
  await_operands(op, stack);
  const c10::DeviceIndex copied_from =
      !captured && is_non_blocking(op, stack) ? gpu_of(stack) : static_cast<c10::DeviceIndex>(-1);
  const auto call = [&] {
    std::optional<NumericsTurn> numerics;
    if (op.has_numerics) numerics.emplace(flags);
    const Modes modes(flags);
    op.handle.callBoxed(&stack);
  };
  if (op.has_numerics && !captured) await_values(op, stack);
  const c10::DeviceIndex gpu = op.libraries == Libraries::kNone ? -1 : gpu_of(stack);
  if (gpu < 0) {
    call();
  } else {
    run_with_libraries(op.libraries, gpu, call);
  }
  if (captured) note_results(stack);
  if (copied_from >= 0) note_copies(stack, copied_from);
}

// Returns the GPU of the first tensor on a GPU, or -1.
c10::DeviceIndex gpu_of(ts_tensor* const* tensors, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if (tensors[i] == nullptr) continue;
    const c10::TensorImpl& tensor = *impl_of(tensors[i]);
    if (tensor.is_cuda()) return tensor.device().index();
  }
  return -1;
}

// Returns the GPU of an operator that uses a GPU's random numbers or libraries, or -1.
inline c10::DeviceIndex gpu_of_call(const ts_operator& op, ts_tensor* const* tensors,
                                    int64_t count) {
  return op.is_plain ? -1 : gpu_of(tensors, count);
}

// Makes an unboxed call (`body`) that needs modes, or random numbers or libraries of a GPU.
template <typename Body>
inline void run_within(const ts_operator& op, c10::DeviceIndex gpu, int32_t flags, Body&& body) {
  std::optional<RandomTurn> turn;
  if (op.random && gpu >= 0) turn.emplace();
  std::unique_lock<std::mutex> workspace;
  if (gpu >= 0 && op.libraries != Libraries::kNone &&
      !use_libraries_here(op.libraries, gpu, workspace)) {
    run_with_libraries(op.libraries, gpu, [&] {
      const NumericsTurn numerics(flags);
      const Modes modes(flags);
      body();
    });
    return;
  }
  const NumericsTurn numerics(flags);
  const Modes modes(flags);
  body();
}

inline bool call_unboxed(const ts_operator& op, const Operands& operands, ts_tensor** results) {
  return op.call.tensors(op, operands, results);
}

inline bool call_unboxed(const ts_operator& op, const Operands& operands,
                         std::vector<at::Tensor>* results) {
  return op.call.list(op, operands, *results);
}

// Makes an unboxed call of the operator, if its arguments can be unboxed, and if neither a capture
// nor a pending copy to the host must know its operands. Otherwise returns false, without any
// effect.
template <typename Results>
inline bool run_unboxed(const ts_operator& op, const Operands& operands, int32_t flags,
                        Results results) {
  if (somebody_captures() || any_pending() || operands.arg_count > op.defaults.arg_count) {
    return false;
  }
  bool done = false;
  run_within(op, gpu_of_call(op, operands.tensors, operands.tensor_count), flags,
             [&] { done = call_unboxed(op, operands, results); });
  return done;
}

// Adds a parameter's default for unboxed calls.
void add_default(const Parameter& parameter, Defaults& to) {
  ts_arg arg{TS_ARG_KIND_DEFAULT, 0, 0};
  const c10::IValue& value = parameter.default_value;
  if ((parameter.kinds & bit(TS_ARG_KIND_DEFAULT)) == 0) {
    // It has no default.
  } else if (value.isNone()) {
    arg.kind = TS_ARG_KIND_NONE;
  } else if (value.isInt()) {
    arg = {TS_ARG_KIND_INT, 0, value.toInt()};
  } else if (value.isDouble()) {
    arg = {TS_ARG_KIND_DOUBLE, 0, bits_of(value.toDouble())};
  } else if (value.isBool()) {
    arg = {TS_ARG_KIND_BOOL, 0, value.toBool() ? 1 : 0};
  } else if (value.isIntList()) {
    const auto ints = value.toIntVector();
    arg = {TS_ARG_KIND_INTS, static_cast<int32_t>(ints.size()),
           static_cast<int64_t>(to.ints.size())};
    to.ints.insert(to.ints.end(), ints.begin(), ints.end());
  } else if (value.isString()) {
    const std::string& text = value.toStringRef();
    arg = {TS_ARG_KIND_STRING, static_cast<int32_t>(text.size()),
           static_cast<int64_t>(to.text.size())};
    to.text += text;
  }
  to.args.push_back(arg);
}

inline bool are_flags(int32_t flags) {
  return (flags & ~(TS_OPERATOR_FLAG_NO_GRAD | kAutocastFlags | kNumericsFlags)) == 0 &&
         (flags & kAutocastFlags) != kAutocastFlags && are_numerics(flags);
}

// Checks a call for a number of tensors given by the schema. Errors have a separate function, so
// that the code of every call is short.
[[gnu::noinline]] void refuse_call(const ts_operator* op, const Operands& operands, int32_t flags,
                                   ts_tensor** results, int64_t capacity, const int64_t* count) {
  require(op != nullptr, "op is NULL");
  require(count != nullptr, "count is NULL");
  require(capacity >= 0 && (capacity == 0 || results != nullptr), "results is NULL");
  check_flags(flags);
  check_arrays(operands);
  check_capacity(*op, capacity);
}

inline void check_call(const ts_operator* op, const Operands& operands, int32_t flags,
                       ts_tensor** results, int64_t capacity, const int64_t* count) {
  const bool right = op != nullptr && count != nullptr && are_flags(flags) && are_there(operands) &&
                     (capacity == 0 || (capacity >= op->tensor_returns && op->tensor_returns >= 0 &&
                                        capacity > 0 && results != nullptr));
  if (!right) refuse_call(op, operands, flags, results, capacity, count);
}

[[gnu::noinline]] void call_boxed(const ts_operator& op, const Operands& operands, int32_t flags,
                                  ts_tensor** results, int64_t capacity, int64_t* count) {
  CallStack call;
  run(op, operands, flags, *call);
  const int64_t returned = count_results(*call);
  if (capacity > 0) {
    each_result(*call, [&](at::Tensor t) { *results++ = handle_or_null(std::move(t)); });
  }
  *count = returned;
}

// Calls an operator for a number of tensors given by the schema.
void call(const ts_operator* op, const Operands& operands, int32_t flags, ts_tensor** results,
          int64_t capacity, int64_t* count) {
  enter_thread();
  check_call(op, operands, flags, results, capacity, count);
  if (op->call.tensors != nullptr &&
      run_unboxed(*op, operands, flags, capacity > 0 ? results : nullptr)) {
    *count = op->tensor_returns;
    return;
  }
  call_boxed(*op, operands, flags, results, capacity, count);
}

std::string full_name(const std::string& name, const std::string& overload) {
  return overload.empty() ? name : name + "." + overload;
}

[[noreturn]] void throw_not_found(const std::string& name, const std::string& overload) {
  std::string known;
  for (const auto& each : c10::Dispatcher::singleton().getAllOpNames()) {
    if (each.name != name) continue;
    if (!known.empty()) known += ", ";
    known += "\"" + each.overload_name + "\"";
  }
  throw Failure(TS_ERROR_NOT_FOUND,
                "LibTorch " TORCH_VERSION " has no operator " + full_name(name, overload) +
                    (known.empty() ? "; names look like aten::add"
                                   : "; the overloads of " + name + " are " + known));
}

// Whether a result of this type has a form in C. No operator of LibTorch returns the other types
// that an argument can have.
bool has_form(const c10::TypePtr& type) {
  switch (type_of(type->kind() == c10::TypeKind::OptionalType
                      ? type->expectRef<c10::OptionalType>().getElementType()
                      : type)) {
    case Type::kTensor:
    case Type::kTensors:
    case Type::kInt:
    case Type::kDtype:
    case Type::kFloat:
    case Type::kBool:
    case Type::kScalar:
      return true;
    default:
      return false;
  }
}

// Whether only the call tells how many tensors a result of this type has.
bool varies(const c10::Type& type) {
  if (type.kind() == c10::TypeKind::ListType) return true;
  if (type.kind() != c10::TypeKind::OptionalType) return false;
  const c10::TypePtr element = type.expectRef<c10::OptionalType>().getElementType();
  return element->kind() == c10::TypeKind::TensorType || varies(*element);
}

// Whether the operator returns the values, or the positions, of its operand to the host without
// arithmetic. It waits for a device, and must not do so in a turn.
bool only_reads(const std::string& name) {
  constexpr std::string_view kNames[] = {"aten::_local_scalar_dense", "aten::item", "aten::equal",
                                         "aten::is_nonzero", "aten::nonzero"};
  return std::find(std::begin(kNames), std::end(kNames), name) != std::end(kNames);
}

std::unique_ptr<ts_operator> read_operator(const std::string& name, const std::string& overload) {
  // Its hooks would call back into a caller that expects no such call.
  if (name == "aten::_backward") {
    throw Failure(TS_ERROR_UNSUPPORTED, "call ts_tensor_backward instead of aten::_backward");
  }
  const auto handle = c10::Dispatcher::singleton().findSchema({name, overload});
  if (!handle.has_value()) throw_not_found(name, overload);
  auto op = std::make_unique<ts_operator>(*handle, full_name(name, overload));
  const c10::FunctionSchema& schema = handle->schema();
  std::ostringstream text;
  text << schema;
  op->schema = text.str();
  for (const c10::Argument& argument : schema.arguments()) {
    op->parameters.push_back(parameter_of(argument));
  }
  op->random = handle->hasTag(at::Tag::nondeterministic_seeded);
  // Indexing by numbers gives the shape of the indices; only indexing by booleans waits.
  op->reads_values =
      handle->hasTag(at::Tag::data_dependent_output) ||
      (handle->hasTag(at::Tag::dynamic_output_shape) && name.rfind("aten::index", 0) != 0);
  for (size_t i = 0; i < op->parameters.size(); ++i) {
    if (op->parameters[i].name == "non_blocking") op->non_blocking = static_cast<int32_t>(i);
  }
  op->takes_masks = name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index_put", 0) == 0;
  op->has_numerics = op->non_blocking < 0 && !only_reads(name);
  op->libraries = libraries_of(name);
  op->is_plain = op->libraries == Libraries::kNone && !op->random;
  op->returns = schema.returns().size();
  for (const c10::Argument& result : schema.returns()) {
    if (varies(*result.type())) op->tensor_returns = -1;
    if (op->tensor_returns >= 0 && type_of(result.type()) == Type::kTensor) ++op->tensor_returns;
    if (!has_form(result.type())) op->unknown_return = result.type()->str();
  }
  op->call = op->non_blocking < 0 && !op->reads_values
                 ? unboxed_call_of(name, overload, op->parameters.size())
                 : UnboxedCall{};
  if (op->call.leaves_boxed) op->is_plain = false;
  Defaults& defaults = op->default_arrays;
  for (const Parameter& parameter : op->parameters) add_default(parameter, defaults);
  op->defaults = {defaults.args.data(),
                  static_cast<int64_t>(defaults.args.size()),
                  nullptr,
                  0,
                  defaults.ints.data(),
                  static_cast<int64_t>(defaults.ints.size()),
                  defaults.text.data(),
                  static_cast<int64_t>(defaults.text.size())};
  return op;
}

// All operators that were ever found.
class Operators {
 public:
  const ts_operator* find(const std::string& name, const std::string& overload) {
    const auto key = std::make_pair(name, overload);
    {
      const std::shared_lock<std::shared_mutex> lock(mutex_);
      const auto known = known_.find(key);
      if (known != known_.end()) return known->second.get();
    }
    auto op = read_operator(name, overload);
    const std::unique_lock<std::shared_mutex> lock(mutex_);
    // Another thread may have been faster: then its entry stays, since it may be in use.
    return known_.emplace(key, std::move(op)).first->second.get();
  }

 private:
  std::shared_mutex mutex_;
  std::map<std::pair<std::string, std::string>, std::unique_ptr<const ts_operator>> known_;
};

Operators& operators() {
  static auto* all = new Operators;  // never destroyed: handles stay valid until the process ends
  return *all;
}

// Does ts_operator_call_one without flags, for an operator whose `one` leaves the boxed call to its
// caller.
[[gnu::noinline]] ts_error* call_one_with_libraries(const ts_operator& op, const ts_arg* args,
                                                    ts_tensor* const* tensors, const int64_t* ints,
                                                    ts_call_counts counts,
                                                    ts_tensor** result) noexcept {
  const c10::DeviceIndex gpu = gpu_of(tensors, counts.tensors);
  ts_error* error = needs_boxed_call();
  ts_error* const before = guard("ts_operator_call", [&] {
    std::optional<RandomTurn> turn;
    if (op.random && gpu >= 0) turn.emplace();
    std::unique_lock<std::mutex> workspace;
    if (gpu < 0 || use_libraries_here(op.libraries, gpu, workspace)) {
      error = op.call.one(op, args, tensors, ints, counts, result);
    }
  });
  if (before != nullptr) return before;
  return error == needs_boxed_call() ? call_one(&op, args, tensors, ints, counts, result) : error;
}

// Does ts_operator_call_one for an operator that uses libraries or random numbers, or in modes.
[[gnu::noinline]] ts_error* call_one_within(const ts_operator& op, const ts_arg* args,
                                            ts_tensor* const* tensors, const int64_t* ints,
                                            ts_call_counts counts, ts_tensor** result) noexcept {
  const c10::DeviceIndex gpu = gpu_of_call(op, tensors, counts.tensors);
  if (gpu < 0 && counts.flags == 0) {
    return op.call.one(op, args, tensors, ints, counts, result);
  }
  bool done = false;
  ts_error* error = nullptr;
  if (are_flags(counts.flags)) {
    error = guard("ts_operator_call", [&] {
      const Operands given{args, counts.args, tensors, counts.tensors,
                           ints, counts.ints, nullptr, 0};
      run_within(op, gpu, counts.flags, [&] { done = op.call.tensors(op, given, result); });
    });
  }
  return done || error != nullptr ? error : call_one(&op, args, tensors, ints, counts, result);
}

}  // namespace

void check_flags(int32_t flags) {
  require((flags & ~(TS_OPERATOR_FLAG_NO_GRAD | kAutocastFlags | kNumericsFlags)) == 0,
          "unknown call flag");
  require((flags & kAutocastFlags) != kAutocastFlags, "autocast to two dtypes");
  check_numerics(flags);
}

[[gnu::noinline]] ts_error* call_one(const UnboxedOperator* op, const ts_arg* args,
                                     ts_tensor* const* tensors, const int64_t* ints,
                                     ts_call_counts counts, ts_tensor** result) noexcept {
  return guard("ts_operator_call", [&] {
    const Operands given{args, counts.args, tensors, counts.tensors, ints, counts.ints, nullptr, 0};
    int64_t count = 0;
    call(static_cast<const ts_operator*>(op), given, counts.flags, result,
         result == nullptr ? 0 : 1, &count);
  });
}

}  // namespace ts

ts_error* ts_operator_find(const char* name, const char* overload, const ts_operator** op) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(name != nullptr && overload != nullptr, "name or overload is NULL");
    ts::require(op != nullptr, "op is NULL");
    *op = ts::operators().find(name, overload);
  });
}

const char* ts_operator_schema(const ts_operator* op) {
  return op == nullptr ? "" : op->schema.c_str();
}

ts_error* ts_operator_call(const ts_operator* op, ts_arguments arguments, ts_tensor* const* tensors,
                           int64_t tensor_count, int32_t flags, ts_tensor** results,
                           int64_t capacity, int64_t* count) {
  return ts::guard(__func__, [&] {
    const ts::Operands operands = ts::operands_of(arguments, tensors, tensor_count);
    ts::call(op, operands, flags, results, capacity, count);
  });
}

ts_error* ts_operator_call_one(const ts_operator* op, const ts_arg* args, ts_tensor* const* tensors,
                               const int64_t* ints, ts_call_counts counts, ts_tensor** result) {
  ts::enter_thread();
  const bool usual =
      op != nullptr && op->call.one != nullptr && !ts::somebody_captures() && !ts::any_pending() &&
      counts.args <= op->defaults.arg_count && (counts.args == 0 || args != nullptr) &&
      (counts.tensors == 0 || tensors != nullptr) && (counts.ints == 0 || ints != nullptr) &&
      (result == nullptr || op->tensor_returns <= 1);
  if (__builtin_expect(!usual, 0)) {
    return ts::call_one(op, args, tensors, ints, counts, result);
  }
  if (counts.flags != 0 || !op->is_plain) {
    return counts.flags == 0 && op->call.leaves_boxed
               ? ts::call_one_with_libraries(*op, args, tensors, ints, counts, result)
               : ts::call_one_within(*op, args, tensors, ints, counts, result);
  }
  return op->call.one(*op, args, tensors, ints, counts, result);
}

ts_error* ts_operator_call_list(const ts_operator* op, ts_arguments arguments,
                                ts_tensor* const* tensors, int64_t tensor_count, int32_t flags,
                                ts_tensor** results, int64_t capacity, ts_tensor_list** list,
                                int64_t* count) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(op != nullptr, "op is NULL");
    ts::require(list != nullptr && count != nullptr, "list or count is NULL");
    ts::require(capacity >= 0 && (capacity == 0 || results != nullptr), "results is NULL");
    ts::check_flags(flags);
    const ts::Operands operands = ts::operands_of(arguments, tensors, tensor_count);
    ts::check_arrays(operands);
    std::vector<at::Tensor> all;
    if (op->call.list == nullptr || !ts::run_unboxed(*op, operands, flags, &all)) {
      ts::CallStack call;
      ts::run(*op, operands, flags, *call);
      ts::each_result(*call, [&](at::Tensor t) { all.push_back(std::move(t)); });
    }
    const auto length = static_cast<int64_t>(all.size());
    if (length <= capacity) {
      for (at::Tensor& t : all) *results++ = ts::handle_or_null(std::move(t));
      *list = nullptr;
    } else {
      *list = std::make_unique<ts_tensor_list>(ts_tensor_list{std::move(all)}).release();
    }
    *count = length;
  });
}

ts_error* ts_operator_call_results(const ts_operator* op, ts_arguments arguments,
                                   ts_tensor* const* tensors, int64_t tensor_count, int32_t flags,
                                   ts_results** results, ts_results_size* size) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(op != nullptr, "op is NULL");
    ts::require(results != nullptr && size != nullptr, "results or size is NULL");
    ts::check_flags(flags);
    if (!op->unknown_return.empty()) {
      throw ts::Failure(TS_ERROR_INVALID_ARGUMENT,
                        op->name + " returns " + op->unknown_return + ", which has no form in C");
    }
    const ts::Operands operands = ts::operands_of(arguments, tensors, tensor_count);
    ts::check_arrays(operands);
    ts::CallStack call;
    ts::run(*op, operands, flags, *call);
    auto all = std::make_unique<ts_results>();
    ts::Collector collector(*all);
    for (const c10::IValue& value : *call) collector.add(value);
    *size = {static_cast<int64_t>(all->args.size()), static_cast<int64_t>(all->tensors.size()),
             static_cast<int64_t>(all->ints.size())};
    *results = all.release();
  });
}

void ts_results_take(ts_results* results, ts_arg* args, ts_tensor** tensors, int64_t* ints) {
  if (results == nullptr) return;
  const std::unique_ptr<ts_results> owned(results);
  std::copy(owned->args.begin(), owned->args.end(), args);
  for (at::Tensor& tensor : owned->tensors) *tensors++ = ts::handle_or_null(std::move(tensor));
  std::copy(owned->ints.begin(), owned->ints.end(), ints);
}

void ts_results_free(ts_results* results) {
  ts::enter_thread();
  delete results;
}

void ts_tensor_list_take(ts_tensor_list* list, ts_tensor** tensors) {
  if (list == nullptr) return;
  const std::unique_ptr<ts_tensor_list> owned(list);
  for (at::Tensor& tensor : owned->tensors) *tensors++ = ts::handle_or_null(std::move(tensor));
}

void ts_tensor_list_free(ts_tensor_list* list) {
  ts::enter_thread();
  delete list;
}
