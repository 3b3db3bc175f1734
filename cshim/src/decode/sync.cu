// The search for the entries of whole scans: jpeg/sync.h has its arithmetic.
#include "decode/launch.h"
#include "decode/load_plan.h"
#include "jpeg/stages.h"
#include "jpeg/sync.h"

namespace ts::decode {

// Named, as in decode.cu.
namespace kernels {

using jpeg::Plan;
using jpeg::SyncMemory;
using jpeg::SyncState;
using jpeg::SyncSum;

// Every kernel has a grid of (blocks of the largest image, images), as in decode.cu.
constexpr uint32_t kThreads = jpeg::kSyncThreads;
constexpr uint32_t kWalkThreads = 256;
constexpr uint32_t kSumThreads = 256;
constexpr uint32_t kEntryThreads = 256;

__device__ const uint8_t* plan_of_block(const Work& work) {
  return work.staging + work.places[blockIdx.y].plan;
}

__device__ SyncMemory sync_of_block(const Work& work, const Plan& plan) {
  return jpeg::sync_memory(plan, work.scratch + work.places[blockIdx.y].sync);
}

// The team of jpeg/sync.h: the threads of a block. Threads of one warp would wait for each other's
// branches, so consecutive calls of `spread` are in different warps.
struct Team {
  template <typename F>
  __device__ __forceinline__ void each(uint32_t count, F f) {
    for (uint32_t i = threadIdx.x; i < count; i += kThreads) f(i);
    __syncthreads();
  }
  template <typename F>
  __device__ __forceinline__ void spread(uint32_t count, F f) {
    constexpr uint32_t kWarps = kThreads / 32;
    const uint32_t first = threadIdx.x % 32 * kWarps + threadIdx.x / 32;
    for (uint32_t i = first; i < count; i += kThreads) f(i);
    __syncthreads();
  }
  __device__ __forceinline__ uint32_t add(uint32_t* at) { return atomicAdd(at, 1); }
};

__device__ jpeg::PathMemory paths_of_block(const Work& work, const Plan& plan) {
  return jpeg::path_memory(plan, work.scratch + work.places[blockIdx.y].sync);
}

// One thread for each path.
template <bool kBegins>
__global__ void __launch_bounds__(kThreads) paths(Work work) {
  __shared__ Plan plan;
  __shared__ __align__(16) jpeg::PassTables tables;
  const uint8_t* const base = plan_of_block(work);
  const uint32_t first = blockIdx.x * kThreads;
  if (first >= jpeg::path_count(jpeg::plan_at(base))) return;
  load_plan<kThreads>(work, &plan, &tables);
  const uint32_t path = first + threadIdx.x;
  if (path >= jpeg::path_count(plan)) return;
  const uint32_t index = path / plan.blocks;
  const uint32_t block = path - index * plan.blocks;
  const jpeg::PathMemory memory = paths_of_block(work, plan);
  if (kBegins) {
    jpeg::begin_path(plan, base, tables, index, block, memory);
  } else {
    jpeg::extend_path(plan, base, tables, index, block, memory);
  }
}

// One block for each image: the states that the paths lead to, as the starts of `synchronise`.
__global__ void __launch_bounds__(kWalkThreads) walk_paths(Work work) {
  __shared__ uint8_t links[kMaxImagePaths];
  const uint8_t* const base = plan_of_block(work);
  const Plan& plan = jpeg::plan_at(base);
  if (plan.subsequences == 0) return;
  const jpeg::PathMemory paths = paths_of_block(work, plan);
  for (uint32_t i = threadIdx.x; i < jpeg::path_count(plan); i += kWalkThreads) {
    links[i] = paths.links[i];
  }
  __syncthreads();
  if (threadIdx.x == 0) jpeg::walk_paths(plan, links, paths);
  __syncthreads();
  const SyncMemory memory = sync_of_block(work, plan);
  for (uint32_t i = threadIdx.x; i < plan.subsequences; i += kWalkThreads) {
    memory.starts[i] = jpeg::guessed_state(plan, base, i, paths);
  }
}

// A block of threads synchronises kThreads subsequences, and writes the last state to the borders.
// The starts are in memory if `guessed` is set or this is not the first launch.
__global__ void __launch_bounds__(kThreads) synchronise(Work work, uint32_t launch, bool guessed) {
  __shared__ Plan plan;
  __shared__ __align__(16) jpeg::PassTables tables;
  __shared__ SyncState starts[kThreads], ends[kThreads];
  __shared__ SyncSum sums[kThreads];
  __shared__ uint32_t list[kThreads], counts[2];
  const uint8_t* const base = plan_of_block(work);
  const uint32_t first = blockIdx.x * kThreads;
  if (first >= jpeg::plan_at(base).subsequences) return;
  const SyncMemory memory = sync_of_block(work, jpeg::plan_at(base));
  const uint32_t blocks = jpeg::sync_blocks(jpeg::plan_at(base));
  const SyncState* const before = memory.borders + (launch + 1) % 2 * blocks;
  SyncState* const after = memory.borders + launch % 2 * blocks;
  if (launch != 0 && jpeg::begins_well(memory, first, blockIdx.x, before)) {
    if (threadIdx.x == 0) after[blockIdx.x] = before[blockIdx.x];
    return;
  }
  load_plan<kThreads>(work, &plan, &tables);
  const uint32_t size = jpeg::smaller(kThreads, plan.subsequences - first);
  Team team;
  team.each(size, [&](uint32_t i) {
    if (launch == 0) {
      starts[i] = guessed ? memory.starts[first + i] : jpeg::first_state(plan, base, first + i);
      return;
    }
    starts[i] = i == 0 ? before[blockIdx.x - 1] : memory.starts[first + i];
    ends[i] = memory.ends[first + i];
    sums[i] = memory.sums[first + i];
  });
  jpeg::synchronise_block(team, plan, base, tables, first, size, launch == 0,
                          {starts, ends, sums, list, counts});
  team.each(size, [&](uint32_t i) {
    memory.starts[first + i] = starts[i];
    memory.ends[first + i] = ends[i];
    memory.sums[first + i] = sums[i];
  });
  if (threadIdx.x == 0) after[blockIdx.x] = ends[size - 1];
}

// One block for each image: for each subsequence, the sums over all subsequences before it. The
// image fails if a state differs from the state in which the previous subsequence ends, or if
// blocks are missing.
__global__ void __launch_bounds__(kSumThreads) sums(Work work) {
  __shared__ SyncSum parts[kSumThreads];
  const Plan& plan = jpeg::plan_at(plan_of_block(work));
  if (plan.subsequences == 0) return;
  const SyncMemory memory = sync_of_block(work, plan);
  const uint32_t each = (plan.subsequences + kSumThreads - 1) / kSumThreads;
  const uint32_t begin = jpeg::smaller(threadIdx.x * each, plan.subsequences);
  const uint32_t end = jpeg::smaller(begin + each, plan.subsequences);
  SyncSum sum = {};
  bool good = true;
  for (uint32_t i = begin; i < end; ++i) {
    sum = jpeg::joined(sum, memory.sums[i]);
    good = good && (i == 0 || memory.starts[i] == memory.ends[i - 1]);
  }
  parts[threadIdx.x] = sum;
  __syncthreads();
  for (uint32_t step = 1; step < kSumThreads; step *= 2) {
    if (threadIdx.x >= step) sum = jpeg::joined(parts[threadIdx.x - step], sum);
    __syncthreads();
    parts[threadIdx.x] = sum;
    __syncthreads();
  }
  if (threadIdx.x == kSumThreads - 1) good = good && sum.blocks >= plan.mcus * plan.blocks;
  sum = threadIdx.x == 0 ? SyncSum{} : parts[threadIdx.x - 1];
  for (uint32_t i = begin; i < end; ++i) {
    memory.before[i] = sum;
    sum = jpeg::joined(sum, memory.sums[i]);
  }
  if (!good) work.failed[blockIdx.y] = 1;
}

// One thread for each subsequence. Twice as many threads as in synchronise have the same tables.
__global__ void __launch_bounds__(kEntryThreads) entries(Work work) {
  __shared__ Plan plan;
  __shared__ __align__(16) jpeg::PassTables tables;
  const uint8_t* const base = plan_of_block(work);
  const uint32_t first = blockIdx.x * kEntryThreads;
  if (first >= jpeg::plan_at(base).subsequences) return;
  load_plan<kEntryThreads>(work, &plan, &tables);
  const uint32_t index = first + threadIdx.x;
  if (index >= plan.subsequences) return;
  const SyncMemory memory = sync_of_block(work, plan);
  uint8_t* const to = work.staging + work.places[blockIdx.y].plan + plan.entries_at;
  if (!jpeg::write_entries(plan, base, tables, jpeg::end_of_subsequence(plan, index),
                           memory.starts[index], memory.before[index], memory.ends[index], to)) {
    work.failed[blockIdx.y] = 1;
  }
}

// One block for each piece.
__global__ void __launch_bounds__(kThreads) gather(GatherWork work) {
  const GatherWork::Piece& piece = work.pieces[blockIdx.x];
  const auto* const from = reinterpret_cast<const uint16_t*>(work.staging + piece.from);
  auto* const to = reinterpret_cast<uint16_t*>(work.gathered + piece.to);
  for (uint32_t i = threadIdx.x; i < piece.bytes / 2; i += kThreads) to[i] = from[i];
}

}  // namespace kernels

cudaError_t launch(const GatherWork& work, cudaStream_t stream) {
  kernels::gather<<<work.count, kernels::kThreads, 0, stream>>>(work);
  return cudaGetLastError();
}

cudaError_t launch_search(Stage stage, const Work& work, cudaStream_t stream) {
  using namespace kernels;
  if (work.subsequences == 0) return cudaSuccess;
  const dim3 grid((work.subsequences + kThreads - 1) / kThreads, work.images);
  if (stage == Stage::kSync) {
    const bool guessed = follows_paths(work);
    if (guessed) {
      const dim3 all((work.paths + kThreads - 1) / kThreads, work.images);
      paths<true><<<all, kThreads, 0, stream>>>(work);
      paths<false><<<all, kThreads, 0, stream>>>(work);
      walk_paths<<<dim3(1, work.images), kWalkThreads, 0, stream>>>(work);
    }
    for (uint32_t launch = 0; launch < jpeg::kSyncLaunches; ++launch) {
      synchronise<<<grid, kThreads, 0, stream>>>(work, launch, guessed);
    }
  } else if (stage == Stage::kSums) {
    sums<<<dim3(1, work.images), kSumThreads, 0, stream>>>(work);
  } else {
    const dim3 all((work.subsequences + kEntryThreads - 1) / kEntryThreads, work.images);
    entries<<<all, kEntryThreads, 0, stream>>>(work);
  }
  return cudaGetLastError();
}

}  // namespace ts::decode
