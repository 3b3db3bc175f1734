// The shared memory of the kernels that decode Huffman codes. For nvcc only.
#pragma once

#include "decode/launch.h"
#include "jpeg/huffman.h"

namespace ts::decode::kernels {

// Copies the plan and the tables of the block's image, including the tables for the search if they
// are SearchTables. All kThreads threads of the block call it.
template <uint32_t kThreads, typename Tables>
__device__ __forceinline__ void load_plan(const Work& work, jpeg::Plan* plan, Tables* tables) {
  static_assert(sizeof(jpeg::Plan) % sizeof(uint32_t) == 0, "a plan is copied by words");
  const jpeg::Place& place = work.places[blockIdx.y];
  const auto* words = reinterpret_cast<const uint32_t*>(work.staging + place.plan);
  for (uint32_t i = threadIdx.x; i < sizeof *plan / sizeof(uint32_t); i += kThreads) {
    reinterpret_cast<uint32_t*>(plan)[i] = words[i];
  }
  const auto* from = reinterpret_cast<const uint4*>(work.scratch + place.tables);
  for (uint32_t i = threadIdx.x; i < sizeof *tables / sizeof(uint4); i += kThreads) {
    reinterpret_cast<uint4*>(tables)[i] = from[i];
  }
  __syncthreads();
}

}  // namespace ts::decode::kernels
