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

// An argument that was checked against its parameter, which takes its kind. Its range is inside of
// the call's arrays, and its tensors are there.
struct UnboxedArg {
  int32_t kind;  // NONE, TENSOR, TENSORS, INT, DOUBLE, BOOL, INTS, DOUBLES or STRING
  int32_t count;
  int64_t value;              // of INT, DOUBLE (its bits) and BOOL
  const int64_t* ints;        // of INTS and DOUBLES (their bits)
  const char* text;           // of STRING
  ts_tensor* const* tensors;  // of TENSOR and TENSORS
};

// The maximum number of parameters of such an operator.
constexpr size_t kMaxUnboxedArgs = 16;

// How to call an operator; at most one of the functions is there. args: one for each parameter of
// the operator's schema.
struct UnboxedCall {
  // For a fixed number of tensors. results: room for all, written if the call succeeds; NULL drops
  // them.
  void (*tensors)(const UnboxedArg* args, ts_tensor** results) = nullptr;
  // For a list of tensors.
  std::vector<at::Tensor> (*list)(const UnboxedArg* args) = nullptr;
};

// Returns the call of an operator ("aten::add", "Tensor"). It has no function if the operator is
// not a frequent one, or has another number of parameters than it had in the headers that this was
// compiled with: the function reads one argument for each of those.
UnboxedCall unboxed_call_of(const std::string& name, const std::string& overload,
                            size_t parameters);

}  // namespace ts
