// The stages of decoding a plan on the host, with loops instead of the device's grids.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "jpeg/stages.h"
#include "jpeg/steps.h"
#include "jpeg/sync.h"

namespace ts::jpeg {

inline void build_tables(const Plan& plan, const uint8_t* base, SearchTables* tables) {
  constexpr uint32_t kThreads = 3;
  for (uint32_t t = 0; t < kThreads; ++t) build_tables_1(plan, base, tables, t, kThreads);
  for (uint32_t t = 0; t < kThreads; ++t) build_tables_2(plan, base, tables, t, kThreads);
  for (uint32_t t = 0; t < kThreads; ++t) build_tables_3(plan, tables, t, kThreads);
}

// Returns what the passes of a search need of the tables.
inline PassTables pass_tables(const Plan& plan, const SearchTables& from) {
  constexpr uint32_t kThreads = 3;
  PassTables tables = {};
  for (uint32_t t = 0; t < kThreads; ++t) copy_pass_tables(plan, from, t, kThreads, &tables);
  return tables;
}

// The team of jpeg/sync.h on the host.
struct SyncLoop {
  bool backwards = false;  // the order must not matter

  template <typename F>
  void each(uint32_t count, F f) {
    for (uint32_t i = 0; i < count; ++i) f(backwards ? count - 1 - i : i);
  }
  template <typename F>
  void spread(uint32_t count, F f) {
    each(count, f);
  }
  uint32_t add(uint32_t* at) { return (*at)++; }
};

// Follows the paths of all guesses, as the kernels of decode/sync.cu do.
inline void follow_paths(const Plan& plan, const uint8_t* base, const PassTables& tables,
                         const PathMemory& memory) {
  for (const auto step : {begin_path, extend_path}) {
    for (uint32_t i = 0; i < path_count(plan); ++i) {
      step(plan, base, tables, i / plan.blocks, i % plan.blocks, memory);
    }
  }
  walk_paths(plan, memory.links, memory);
}

// Finds the states at the starts of all subsequences, with blocks of `threads` threads, as the
// kernel of decode/sync.cu does. Starts from the guesses in `paths`, if there are any.
// memory.borders has two states for each block. Returns the cost. Its rounds are those that run one
// after the other on the device: for each launch, the rounds of its slowest block.
inline SyncCost synchronise(const Plan& plan, const uint8_t* base, const PassTables& tables,
                            const SyncMemory& memory, uint32_t threads, uint32_t launches,
                            bool backwards = false, const PathMemory* paths = nullptr) {
  SyncCost cost;
  for (uint32_t i = 0; i < plan.subsequences; ++i) {
    memory.starts[i] =
        paths == nullptr ? first_state(plan, base, i) : guessed_state(plan, base, i, *paths);
  }
  SyncLoop team = {backwards};
  const uint32_t blocks = (plan.subsequences + threads - 1) / threads;
  std::vector<uint32_t> work(smaller(threads, plan.subsequences));
  for (uint32_t launch = 0; launch < launches; ++launch) {
    const SyncState* const before = memory.borders + (launch + 1) % 2 * blocks;
    SyncState* const after = memory.borders + launch % 2 * blocks;
    uint64_t rounds = 0;
    for (uint32_t block = 0; block < blocks; ++block) {
      const uint32_t first = block * threads;
      const uint32_t size = smaller(threads, plan.subsequences - first);
      if (launch != 0 && begins_well(memory, first, block, before)) {
        after[block] = before[block];
        continue;
      }
      if (launch != 0) memory.starts[first] = before[block - 1];
      uint32_t counts[2];
      const SyncCost one = synchronise_block(
          team, plan, base, tables, first, size, launch == 0,
          {memory.starts + first, memory.ends + first, memory.sums + first, work.data(), counts});
      after[block] = memory.ends[first + size - 1];
      cost.passes += one.passes;
      rounds = larger(rounds, one.rounds);
    }
    cost.rounds += rounds;
  }
  return cost;
}

// Sums everything before each subsequence. Returns false if a state differs from the end of the
// previous subsequence, or if blocks are missing.
inline bool sum_subsequences(const Plan& plan, const SyncMemory& memory) {
  SyncSum sum = {};
  bool good = true;
  for (uint32_t i = 0; i < plan.subsequences; ++i) {
    good = good && (i == 0 || memory.starts[i] == memory.ends[i - 1]);
    memory.before[i] = sum;
    sum = joined(sum, memory.sums[i]);
  }
  return good && sum.blocks >= plan.mcus * plan.blocks;
}

// Writes all entries to `entries`, from the states and sums. Returns false if the host must decode
// the image.
inline bool write_all_entries(const Plan& plan, const uint8_t* base, const PassTables& tables,
                              const SyncMemory& memory, uint8_t* entries) {
  bool good = true;
  for (uint32_t i = 0; i < plan.subsequences; ++i) {
    good = write_entries(plan, base, tables, end_of_subsequence(plan, i), memory.starts[i],
                         memory.before[i], memory.ends[i], entries) &&
           good;
  }
  return good;
}

// Decodes all segments, and so all blocks that the crop needs. Returns false if a segment fails.
inline bool decode_segments(const Plan& plan, const uint8_t* base, const HuffmanTables& tables,
                            int16_t* coefficients) {
  bool good = true;
  for (uint32_t i = 0; i < plan.segments; ++i) {
    int16_t values[64] = {};
    SegmentDecoder decoder = begin_segment(plan, base, tables, i, values);
    do {
      while (!decode_symbols(tables, &decoder)) {
      }
      if (decoder.place != kNotNeeded) {
        std::memcpy(coefficients + uint64_t{decoder.place} * 64, values, sizeof values);
        std::memset(values, 0, sizeof values);
      }
    } while (next_block(plan, tables, &decoder));
    good = end_segment(plan, base, i, decoder) && good;
  }
  return good;
}

inline void transform_blocks(const Plan& plan, const Memory& memory) {
  for (uint32_t i = 0; i < plan.total_blocks; ++i) {
    const BlockPlace place = place_of_block(plan, i);
    idct_block(memory.coefficients + uint64_t{i} * 64, quantisers_of(plan, memory, place.component),
               memory.samples + place.sample, place.stride);
  }
}

inline void weigh_axis(const Axis& axis, uint8_t* to) {
  if (axis.filter == kIdentity) return;
  double largest = axis.filter == kNearest ? 1.0 : 0.0;
  for (int32_t i = 0; i < axis.out; ++i) largest = larger(largest, largest_weight(axis, i));
  const Weights out = weights_at(axis, to);
  *out.precision = precision_of(largest);
  for (int32_t i = 0; i < axis.size; ++i) write_weights(axis, *out.precision, i, out);
}

inline void weigh_axes(const Plan& plan, const Memory& memory) {
  weigh_axis(plan.x, memory.weights);
  weigh_axis(plan.y, memory.weights + weights_bytes(plan.x));
}

inline void write_columns(const Plan& plan, const Memory& memory) {
  constexpr int32_t kThreads = 48;
  std::vector<uint32_t> strip(kStripWords);
  for (int32_t i = 0; i < strip_count(plan); ++i) {
    for (int32_t t = 0; t < kThreads; ++t) {
      fill_strips(plan, memory, {t, kThreads}, i, i + 1, strip.data(), [](int32_t) {});
    }
    for (int32_t t = 0; t < kThreads; ++t) {
      ColumnWriter(plan, memory, {t, kThreads}).write(i, strip.data());
    }
  }
}

inline void write_results(const Plan& plan, const Memory& memory) {
  constexpr int32_t kThreads = 32;
  constexpr int32_t kPixels = kThreads * 8;
  const int32_t count = result_count(plan);
  for (int32_t begin = 0; begin < count; begin += kPixels) {
    for (int32_t t = 0; t < kThreads; ++t) {
      write_results(plan, memory, t, kThreads, begin, smaller(begin + kPixels, count),
                    memory.result + static_cast<int64_t>(begin) * 3);
    }
  }
}

// The team of jpeg/steps.h on the host.
struct StepLoop {
  bool backwards = false;  // the order must not matter

  template <typename F>
  void each(int32_t count, F f) {
    for (int32_t i = 0; i < count; ++i) f(backwards ? count - 1 - i : i);
  }
  void add(int32_t* at) { ++*at; }
};

}  // namespace ts::jpeg
