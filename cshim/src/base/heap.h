// Host memory of tensors.
#pragma once

#include <cstddef>

namespace ts {

// A tensor of this size or more is mapped, outside of malloc's heaps, and one freed block of its
// size is kept. malloc has a heap for each of several threads. Each would keep a copy of what is
// made on another thread each time.
constexpr size_t kMappedBlock = size_t{32} << 20;

}  // namespace ts
