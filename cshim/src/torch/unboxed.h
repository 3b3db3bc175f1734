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

// How to call an operator; at most one of the functions is there. defaults has one argument for
// each parameter of the operator's schema; those without a default are TS_ARG_KIND_DEFAULT. The
// functions return false, and have done nothing, for arguments that need the boxed call, which also
// says what is wrong with them. given.arg_count: no more than there are parameters.
struct UnboxedCall {
  // For a fixed number of tensors. results: room for all, written if the call succeeds; NULL drops
  // them.
  bool (*tensors)(const Operands& given, const Operands& defaults, ts_tensor** results) = nullptr;
  // For a list of tensors.
  bool (*list)(const Operands& given, const Operands& defaults,
               std::vector<at::Tensor>& results) = nullptr;
};

// Returns the call of an operator ("aten::add", "Tensor"). It has no function if the operator is
// not a frequent one, or has another number of parameters than it had in the headers that this was
// compiled with: the function reads one argument for each of those.
UnboxedCall unboxed_call_of(const std::string& name, const std::string& overload,
                            size_t parameters);

}  // namespace ts
