// The shared memory of the kernels that decode Huffman codes. For nvcc only.
#pragma once

#include "decode/launch.h"
#include "jpeg/huffman.h"

namespace ts::decode::kernels {

__device__ __forceinline__ void load_tables(const jpeg::Plan&, const uint8_t* from, uint32_t thread,
                                            uint32_t threads, jpeg::HuffmanTables* tables) {
  const auto* const words = reinterpret_cast<const uint4*>(from);
  for (uint32_t i = thread; i < sizeof *tables / sizeof(uint4); i += threads) {
    reinterpret_cast<uint4*>(tables)[i] = words[i];
  }
}

__device__ __forceinline__ void load_tables(const jpeg::Plan& plan, const uint8_t* from,
                                            uint32_t thread, uint32_t threads,
                                            jpeg::PassTables* tables) {
  jpeg::copy_pass_tables(plan, *reinterpret_cast<const jpeg::SearchTables*>(from), thread, threads,
                         tables);
}

// Copies the plan and the tables of the block's image. All kThreads threads of the block call it.
template <uint32_t kThreads, typename Tables>
__device__ __forceinline__ void load_plan(const Work& work, jpeg::Plan* plan, Tables* tables) {
  static_assert(sizeof(jpeg::Plan) % sizeof(uint32_t) == 0, "a plan is copied by words");
  const jpeg::Place& place = work.places[blockIdx.y];
  const auto* words = reinterpret_cast<const uint32_t*>(work.staging + place.plan);
  for (uint32_t i = threadIdx.x; i < sizeof *plan / sizeof(uint32_t); i += kThreads) {
    reinterpret_cast<uint32_t*>(plan)[i] = words[i];
  }
  load_tables(*reinterpret_cast<const jpeg::Plan*>(words), work.scratch + place.tables, threadIdx.x,
              kThreads, tables);
  __syncthreads();
}

}  // namespace ts::decode::kernels
