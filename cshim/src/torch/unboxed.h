// Calls of frequent operators in the way of C++ code: arguments become C++ values. The general call
// boxes them, and LibTorch unboxes them again. A boxed tensor costs two changes of its reference
// count, and a boxed list an allocation or two.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "torchstream.h"

namespace ts {

// The arrays of one call. A ts_arg refers to elements of the others.
struct Operands {
  const ts_arg* args;
  int64_t arg_count;
  ts_tensor* const* tensors;
  int64_t tensor_count;
  const int64_t* ints;
  int64_t int_count;
  const char* text;
  int64_t text_bytes;
};

// Whether [arg.value, arg.value + arg.count) is inside an array of that length.
inline bool is_inside(const ts_arg& arg, int64_t length) {
  return arg.count >= 0 && arg.value >= 0 && arg.value <= length && arg.count <= length - arg.value;
}

struct UnboxedOperator;

// The ways to call an operator: it has the functions for a fixed number of tensors, or the one for
// a list. A function returns false, without any effect, for arguments that need the boxed call,
// which also reports errors in them. given.arg_count must not exceed the number of parameters.
struct UnboxedCall {
  // results: room for all tensors, written if the call succeeds; NULL drops them.
  bool (*tensors)(const UnboxedOperator& op, const Operands& given, ts_tensor** results) = nullptr;
  // The same, for ts_operator_call_one without flags. It is its caller's tail call, so it also does
  // the caller's remaining work: it takes the turn (numerics.h), returns errors, and makes the
  // boxed call.
  ts_error* (*one)(const UnboxedOperator& op, const ts_arg* args, ts_tensor* const* tensors,
                   const int64_t* ints, ts_call_counts counts, ts_tensor** result) = nullptr;
  // For arguments that need the boxed call, `one` returns needs_boxed_call() without any effect.
  // Its caller then makes the boxed call, after releasing what it holds for the call (libraries.h).
  bool leaves_boxed = false;
  bool (*list)(const UnboxedOperator& op, const Operands& given,
               std::vector<at::Tensor>& results) = nullptr;
};

// The data of an operator that calls read, in few cache lines.
struct UnboxedOperator {
  UnboxedCall call = {};       // none: always called boxed
  int32_t tensor_returns = 0;  // -1: lists or optional tensors, whose number only the call tells
  bool is_plain = false;       // draws no random numbers and uses no libraries
  // One argument for each parameter of the schema. Parameters without a default are
  // TS_ARG_KIND_DEFAULT.
  Operands defaults = {};
};

// A mark that is not an error: see UnboxedCall::leaves_boxed.
inline char boxed_call_mark;
inline ts_error* needs_boxed_call() noexcept {
  return reinterpret_cast<ts_error*>(&boxed_call_mark);
}

// Does ts_operator_call_one in general.
ts_error* call_one(const UnboxedOperator* op, const ts_arg* args, ts_tensor* const* tensors,
                   const int64_t* ints, ts_call_counts counts, ts_tensor** result) noexcept;

// Returns the unboxed call of an operator ("aten::add", "Tensor"). It has no function if the
// operator is not a frequent one. It has none either if the operator's number of parameters differs
// from the headers used at compile time, since the function reads one argument for each of those.
UnboxedCall unboxed_call_of(const std::string& name, const std::string& overload,
                            size_t parameters);

}  // namespace ts
