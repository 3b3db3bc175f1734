#include <algorithm>

#include "decode/launch.h"
#include "decode/load_plan.h"
#include "jpeg/stages.h"
#include "jpeg/steps.h"

namespace ts::decode {

// Named, because nvcc derives the name of an anonymous namespace from the path of its file, and two
// builds of a release would differ.
namespace kernels {

using jpeg::Axis;
using jpeg::Memory;
using jpeg::Plan;

// Every kernel has a grid of (work of the largest image, images), so that a block works on one
// image. Blocks after the end of a smaller image return at once. Where images differ much, most
// blocks do, so a block does the work of several iterations.
constexpr uint32_t kTableThreads = 256;
constexpr uint32_t kSegmentThreads = 128;
constexpr uint32_t kBlockThreads = 256;  // of the transform: eight for each block of 8 x 8
constexpr uint32_t kPixelThreads = 256;
constexpr uint32_t kResultsEach = 8;  // results of each thread of the resize
constexpr uint32_t kWeightThreads = 128;
constexpr int32_t kStepThreads = 512;

// The iterations of a block of threads: one if there are few images, since a GPU then has idle
// threads.
struct Each {
  uint32_t blocks, strips;
};

__host__ __device__ constexpr Each each_of(uint32_t images) {
  return images < 64 ? Each{1, 1} : Each{4, 2};
}

__device__ Memory memory_of_block(const Work& work) {
  return jpeg::memory_of(work.places[blockIdx.y], work.staging, work.scratch, work.results);
}

// One block for each image: its Huffman tables, for the kernels that decode it.
__global__ void __launch_bounds__(kTableThreads) build(Work work) {
  __shared__ __align__(16) jpeg::SearchTables tables;
  const uint8_t* const base = memory_of_block(work).base;
  const Plan& plan = jpeg::plan_at(base);
  jpeg::build_tables_1(plan, base, &tables, threadIdx.x, kTableThreads);
  __syncthreads();
  jpeg::build_tables_2(plan, base, &tables, threadIdx.x, kTableThreads);
  __syncthreads();
  jpeg::build_tables_3(plan, &tables, threadIdx.x, kTableThreads);
  __syncthreads();
  auto* const to = reinterpret_cast<uint4*>(work.scratch + work.places[blockIdx.y].tables);
  for (uint32_t i = threadIdx.x; i < sizeof tables / sizeof(uint4); i += kTableThreads) {
    to[i] = reinterpret_cast<const uint4*>(&tables)[i];
  }
}

constexpr uint32_t kAll = 0xFFFFFFFF;  // all threads of a warp

// The words of a block's coefficients in shared memory, padded by one, so that a warp's threads use
// different banks at a time.
constexpr uint32_t kBlockWords = 33;

// Writes the blocks that the warp's threads have completed, each to its place, and zeroes them.
// `blocks` has the warp's blocks. All threads write one block together: memory accepts whole
// sectors several times as fast as their parts one by one.
__device__ void store_blocks(uint32_t place, uint32_t* blocks, uint32_t* coefficients) {
  const uint32_t lane = threadIdx.x % 32;
  __syncwarp();
  for (uint32_t ended = __ballot_sync(kAll, place != jpeg::kNotNeeded); ended != 0;
       ended &= ended - 1) {
    const int thread = __ffs(static_cast<int>(ended)) - 1;
    uint32_t* const word = blocks + static_cast<uint32_t>(thread) * kBlockWords + lane;
    coefficients[uint64_t{__shfl_sync(kAll, place, thread)} * 32 + lane] = *word;
    *word = 0;
  }
  __syncwarp();
}

// One thread for each segment.
__global__ void __launch_bounds__(kSegmentThreads) entropy(Work work) {
  __shared__ Plan plan;
  __shared__ __align__(16) jpeg::HuffmanTables tables;
  __shared__ uint32_t blocks[kSegmentThreads * kBlockWords];
  const Memory memory = memory_of_block(work);
  const uint32_t first = blockIdx.x * kSegmentThreads;
  if (first >= jpeg::plan_at(memory.base).segments) return;
  for (uint32_t i = threadIdx.x; i < kSegmentThreads * kBlockWords; i += kSegmentThreads) {
    blocks[i] = 0;
  }
  load_plan<kSegmentThreads>(work, &plan, &tables);
  uint32_t* const mine = blocks + threadIdx.x * kBlockWords;
  uint32_t* const warp = blocks + threadIdx.x / 32 * 32 * kBlockWords;
  auto* const to = reinterpret_cast<uint32_t*>(memory.coefficients);
  const uint32_t segment = first + threadIdx.x;
  const bool real = segment < plan.segments;
  jpeg::SegmentDecoder decoder = jpeg::begin_segment(
      plan, memory.base, tables, real ? segment : first, reinterpret_cast<int16_t*>(mine));
  bool decoding = real;
  while (__any_sync(kAll, decoding)) {
    const bool ended = decoding && jpeg::decode_symbols(tables, &decoder);
    store_blocks(ended ? decoder.place : jpeg::kNotNeeded, warp, to);
    if (ended) decoding = jpeg::next_block(plan, tables, &decoder);
  }
  if (real && !jpeg::end_segment(plan, memory.base, segment, decoder)) {
    work.failed[blockIdx.y] = 1;
  }
}

// Eight threads for each block of 8 x 8: thread i transforms column i, then row i. In between, the
// columns are in shared memory. Four words after each block make the warp's threads use different
// banks at a time.
__global__ void __launch_bounds__(kBlockThreads) transform(Work work) {
  constexpr uint32_t kBlocks = kBlockThreads / 8;
  constexpr uint32_t kPitch = 9;  // columns
  __shared__ uint4 columns[kBlocks * kPitch];
  const Memory memory = memory_of_block(work);
  const Plan& plan = jpeg::plan_at(memory.base);
  const uint32_t lane = threadIdx.x % 8;
  uint4* const block_columns = columns + threadIdx.x / 8 * kPitch;
  const auto* const row = reinterpret_cast<const int16_t*>(block_columns) + lane;
  const uint32_t blocks = kBlocks * each_of(work.images).blocks;
  const uint32_t begin = blockIdx.x * blocks;
  const uint32_t end = min(begin + blocks, plan.total_blocks);
  for (uint32_t first = begin; first < end; first += kBlocks) {
    const uint32_t mine = first + threadIdx.x / 8;
    const uint32_t block = min(mine, end - 1);  // the whole warp works
    const jpeg::BlockPlace place = jpeg::place_of_block(plan, block);
    const uint4 read = reinterpret_cast<const uint4*>(memory.coefficients)[block * 8 + lane];
    const uint4 by =
        reinterpret_cast<const uint4*>(jpeg::quantisers_of(plan, memory, place.component))[lane];
    const uint32_t coefficients[4] = {read.x, read.y, read.z, read.w};
    const uint32_t quantisers[4] = {by.x, by.y, by.z, by.w};
    int32_t v[8];
    jpeg::dequantise(coefficients, quantisers, v);
    if (__any_sync(kAll, jpeg::overflows_flat(v[0]))) {
      const uint32_t rows = __ballot_sync(kAll, jpeg::has_rows(coefficients));
      if ((rows >> (threadIdx.x % 32 / 8 * 8) & 0xFF) == 0) v[0] = jpeg::flat_column(v[0]);
    }
    uint32_t column[4];
    jpeg::transform_column(v, column);
    __syncwarp();  // the previous iteration has read its rows
    block_columns[lane] = make_uint4(column[0], column[1], column[2], column[3]);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = row[8 * i];
    uint32_t samples[2];
    jpeg::transform_row(v, samples);
    if (mine != block) continue;
    *reinterpret_cast<uint2*>(memory.samples + place.sample + lane * place.stride) =
        make_uint2(samples[0], samples[1]);
  }
}

// One block for each axis.
__global__ void __launch_bounds__(kWeightThreads) weights(Work work) {
  __shared__ double largest[kWeightThreads];
  const Memory memory = memory_of_block(work);
  const Plan& plan = jpeg::plan_at(memory.base);
  const Axis axis = blockIdx.x == 0 ? plan.x : plan.y;
  if (axis.filter == jpeg::kIdentity) return;
  double mine = axis.filter == jpeg::kNearest ? 1.0 : 0.0;
  for (auto i = static_cast<int32_t>(threadIdx.x); i < axis.out; i += kWeightThreads) {
    mine = jpeg::larger(mine, jpeg::largest_weight(axis, i));
  }
  largest[threadIdx.x] = mine;
  __syncthreads();
  for (uint32_t half = kWeightThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) {
      largest[threadIdx.x] = jpeg::larger(largest[threadIdx.x], largest[threadIdx.x + half]);
    }
    __syncthreads();
  }
  const int32_t precision = jpeg::precision_of(largest[0]);
  const jpeg::Weights to =
      jpeg::weights_at(axis, memory.weights + (blockIdx.x == 0 ? 0 : jpeg::weights_bytes(plan.x)));
  if (threadIdx.x == 0) *to.precision = precision;
  for (auto i = static_cast<int32_t>(threadIdx.x); i < axis.size; i += kWeightThreads) {
    jpeg::write_weights(axis, precision, i, to);
  }
}

// The pixels of a strip are assembled in shared memory and never written to global memory.
__global__ void __launch_bounds__(kPixelThreads, 4) columns(Work work) {
  __shared__ __align__(16) uint32_t strip[jpeg::kStripWords];
  const Memory memory = memory_of_block(work);
  const Plan& plan = jpeg::plan_at(memory.base);
  const auto strips = static_cast<int32_t>(each_of(work.images).strips);
  const int32_t first = static_cast<int32_t>(blockIdx.x) * strips;
  const int32_t end = min(first + strips, jpeg::strip_count(plan));
  if (first >= end) return;
  const jpeg::Places places = {static_cast<int32_t>(threadIdx.x), kPixelThreads};
  const jpeg::ColumnWriter writer(plan, memory, places);
  jpeg::fill_strips(plan, memory, places, first, end, strip, [&](int32_t index) {
    __syncthreads();
    writer.write(index, strip);
    __syncthreads();
  });
}

// The pixels of a block are consecutive. They are assembled in shared memory and written in words
// of 16 bytes: memory accepts whole sectors several times as fast as single bytes.
__global__ void __launch_bounds__(kPixelThreads) results(Work work) {
  constexpr int32_t kPixels = kPixelThreads * kResultsEach;
  __shared__ __align__(16) uint8_t bytes[kPixels * 3];
  const Memory memory = memory_of_block(work);
  const Plan& plan = jpeg::plan_at(memory.base);
  const int32_t first = static_cast<int32_t>(blockIdx.x) * kPixels;
  const int32_t count = min(jpeg::result_count(plan) - first, kPixels);
  if (count <= 0) return;
  jpeg::write_results(plan, memory, static_cast<int32_t>(threadIdx.x), kPixelThreads, first,
                      first + count, bytes);
  __syncthreads();
  uint8_t* const to = memory.result + int64_t{first} * 3;
  // A result starts at any byte of a batch, which starts at any byte.
  const int32_t words = reinterpret_cast<uintptr_t>(to) % sizeof(uint4) == 0
                            ? count * 3 / static_cast<int32_t>(sizeof(uint4))
                            : 0;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  for (int32_t i = thread; i < words; i += kPixelThreads) {
    reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(bytes)[i];
  }
  for (int32_t i = words * static_cast<int32_t>(sizeof(uint4)) + thread; i < count * 3;
       i += kPixelThreads) {
    to[i] = bytes[i];
  }
}

// The team of jpeg/steps.h: the threads of a block.
struct StepTeam {
  template <typename F>
  __device__ void each(int32_t count, F f) {
    for (auto i = static_cast<int32_t>(threadIdx.x); i < count; i += kStepThreads) f(i);
    __syncthreads();
  }
  __device__ void add(int32_t* at) { atomicAdd(at, 1); }
};

// One block for each image. Two fit on a multiprocessor: otherwise the blur's loops would use all
// registers.
__global__ void __launch_bounds__(kStepThreads, 2) augment(Work work) {
  __shared__ jpeg::StepState state;
  const Memory memory = memory_of_block(work);
  StepTeam team;
  jpeg::run_steps(team, jpeg::plan_at(memory.base), memory, &state);
}

uint32_t blocks_of(uint32_t work, uint32_t each) { return (work + each - 1) / each; }

}  // namespace kernels

using namespace kernels;

cudaError_t launch(Stage stage, const Work& work, cudaStream_t stream) {
  const Each each = each_of(work.images);
  switch (stage) {
    case Stage::kTables:
      build<<<dim3(1, work.images), kTableThreads, 0, stream>>>(work);
      break;
    case Stage::kSync:
    case Stage::kSums:
    case Stage::kEntries:
      return launch_search(stage, work, stream);
    case Stage::kEntropy:
      entropy<<<dim3(blocks_of(work.segments, kSegmentThreads), work.images), kSegmentThreads, 0,
                stream>>>(work);
      break;
    case Stage::kTransform:
      transform<<<dim3(blocks_of(work.blocks, kBlockThreads / 8 * each.blocks), work.images),
                  kBlockThreads, 0, stream>>>(work);
      break;
    case Stage::kWeights:
      weights<<<dim3(2, work.images), kWeightThreads, 0, stream>>>(work);
      break;
    case Stage::kColumns:
      columns<<<dim3(blocks_of(work.strips, each.strips), work.images), kPixelThreads, 0, stream>>>(
          work);
      break;
    case Stage::kResults:
      results<<<dim3(blocks_of(work.outputs, kPixelThreads * kResultsEach), work.images),
                kPixelThreads, 0, stream>>>(work);
      break;
    case Stage::kAugment:
      if (work.steps == 0) break;
      augment<<<dim3(1, work.images), kStepThreads, 0, stream>>>(work);
      break;
  }
  return cudaGetLastError();
}

}  // namespace ts::decode
