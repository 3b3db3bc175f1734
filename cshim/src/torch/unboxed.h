// Calls of frequent operators as C++ code makes them: their arguments become C++ values, where the
// general call makes boxed ones and LibTorch unboxes them. A boxed tensor costs two changes of its
// reference count, and a boxed list an allocation or two.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "torchstream.h"

namespace ts {

// The arrays of one call. A ts_arg refers to the elements of the others.
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

// Whether [arg.value, arg.value + arg.count) is inside of an array of that length.
inline bool is_inside(const ts_arg& arg, int64_t length) {
  return arg.count >= 0 && arg.value >= 0 && arg.value <= length && arg.count <= length - arg.value;
}

struct UnboxedOperator;

// How to call an operator; it has the functions for a fixed number of tensors, or that for a list.
// The functions return false, and have done nothing, for arguments that need the boxed call, which
// also says what is wrong with them. given.arg_count: no more than there are parameters.
struct UnboxedCall {
  // results: room for all tensors, written if the call succeeds; NULL drops them.
  bool (*tensors)(const UnboxedOperator& op, const Operands& given, ts_tensor** results) = nullptr;
  // The same, of ts_operator_call_one without flags. It is its caller's last call, and does that
  // one's rest too: it takes the turn (numerics.h), returns errors, and makes the boxed call.
  ts_error* (*one)(const UnboxedOperator& op, const ts_arg* args, ts_tensor* const* tensors,
                   const int64_t* ints, ts_call_counts counts, ts_tensor** result) = nullptr;
  // `one` returns needs_boxed_call(), and has done nothing, in place of the boxed call, which its
  // caller makes without what it holds for the call (libraries.h).
  bool leaves_boxed = false;
  bool (*list)(const UnboxedOperator& op, const Operands& given,
               std::vector<at::Tensor>& results) = nullptr;
};

// What calls read of an operator, in few lines of the cache.
struct UnboxedOperator {
  UnboxedCall call = {};       // none: it is always called boxed
  int32_t tensor_returns = 0;  // -1: lists or optional tensors, only the call tells how many
  bool is_plain = false;       // it draws no random numbers and uses no libraries
  // One argument for each parameter of the schema. Those without a default are
  // TS_ARG_KIND_DEFAULT.
  Operands defaults = {};
};

// No error of a call: see UnboxedCall::leaves_boxed.
inline char boxed_call_mark;
inline ts_error* needs_boxed_call() noexcept {
  return reinterpret_cast<ts_error*>(&boxed_call_mark);
}

// Does ts_operator_call_one in general.
ts_error* call_one(const UnboxedOperator* op, const ts_arg* args, ts_tensor* const* tensors,
                   const int64_t* ints, ts_call_counts counts, ts_tensor** result) noexcept;

// Returns the call of an operator ("aten::add", "Tensor"). It has no function if the operator is
// not a frequent one, or has another number of parameters than it had in the headers that this was
// compiled with: the function reads one argument for each of those.
UnboxedCall unboxed_call_of(const std::string& name, const std::string& overload,
                            size_t parameters);

}  // namespace ts
