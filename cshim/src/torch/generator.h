// Random generators of a program's own.
#pragma once

#include <ATen/core/Generator.h>

#include "torchstream.h"

namespace ts {

const at::Generator& generator_of(const ts_generator& generator);

}  // namespace ts
