// Generators of random numbers as handles.
#pragma once

#include <ATen/core/Generator.h>

#include <memory>

#include "cuda/randomness.h"
#include "torchstream.h"

struct ts_generator {
  at::Generator generator;
  std::shared_ptr<ts::Randomness> randomness;  // of a generator on a GPU, for captures
};
