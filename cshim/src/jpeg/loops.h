// The stages of decoding a plan on the host, with loops in the place of the device's grids.
#pragma once

#include <cstdint>

#include "jpeg/stages.h"
#include "jpeg/steps.h"
#include "jpeg/sync.h"

namespace ts::jpeg {

inline void build_tables(const Plan& plan, const uint8_t* base, HuffmanTables* tables) {
  constexpr uint32_t kThreads = 3;
  for (uint32_t t = 0; t < kThreads; ++t) build_tables_1(plan, base, tables, t, kThreads);
  for (uint32_t t = 0; t < kThreads; ++t) build_tables_2(plan, base, tables, t, kThreads);
}

// What a search costs: the subsequences that were decoded, some of them several times, and the
// rounds of all launches that follow each other on the device, of each launch those of its slowest
// block.
struct SyncCost {
  uint64_t passes = 0;
  uint64_t rounds = 0;
};

// Synchronises the subsequences of one block of threads, from `first` on, in one launch: see the
// kernel of decode/sync.cu. `before` has the blocks' last states after the launch before, `after`
// receives this block's. Returns the cost.
inline SyncCost synchronise_block(const Plan& plan, const uint8_t* base,
                                  const HuffmanTables& tables, const SyncMemory& memory,
                                  uint32_t first, uint32_t threads, uint32_t launch,
                                  const SyncState* before, SyncState* after) {
  const uint32_t block = first / threads;
  const uint32_t end = smaller(plan.subsequences, first + threads);
  if (launch != 0 && (first == 0 || before[block - 1] == memory.starts[first])) {
    after[block] = before[block];
    return {};
  }
  SyncCost cost;
  const auto pass = [&](uint32_t i, const SyncState& start) {
    memory.starts[i] = memory.ends[i] = start;
    memory.sums[i] =
        pass_subsequence(plan, base, tables, end_of_subsequence(plan, i), &memory.ends[i]);
    ++cost.passes;
  };
  for (uint32_t i = first; i < end && launch == 0; ++i) pass(i, first_state(plan, base, i));
  if (launch != 0) pass(first, before[block - 1]);
  // A round of the device hands on the states of the round before, so the loop goes backwards.
  for (bool changed = true; changed;) {
    changed = false;
    ++cost.rounds;
    for (uint32_t i = end - 1; i > first; --i) {
      if (memory.starts[i] == memory.ends[i - 1]) continue;
      pass(i, memory.ends[i - 1]);
      changed = true;
    }
  }
  after[block] = memory.ends[end - 1];
  return cost;
}

// Finds the states at the beginnings of all subsequences, with blocks of `threads` threads.
// memory.borders has two states for each block. Returns the cost.
inline SyncCost synchronise(const Plan& plan, const uint8_t* base, const HuffmanTables& tables,
                            const SyncMemory& memory, uint32_t threads, uint32_t launches) {
  SyncCost cost;
  const uint32_t blocks = (plan.subsequences + threads - 1) / threads;
  for (uint32_t launch = 0; launch < launches; ++launch) {
    const SyncState* const before = memory.borders + (launch + 1) % 2 * blocks;
    SyncState* const after = memory.borders + launch % 2 * blocks;
    uint64_t rounds = 0;
    for (uint32_t first = 0; first < plan.subsequences; first += threads) {
      const SyncCost block =
          synchronise_block(plan, base, tables, memory, first, threads, launch, before, after);
      cost.passes += block.passes;
      rounds = larger(rounds, block.rounds);
    }
    cost.rounds += rounds;
  }
  return cost;
}

// Sums what lies before each subsequence. Returns false if a state is not the one in which the
// subsequence before ends, or if blocks are missing.
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
inline bool write_all_entries(const Plan& plan, const uint8_t* base, const HuffmanTables& tables,
                              const SyncMemory& memory, uint8_t* entries) {
  bool good = true;
  for (uint32_t i = 0; i < plan.subsequences; ++i) {
    good = write_entries(plan, base, tables, end_of_subsequence(plan, i), memory.starts[i],
                         memory.before[i], memory.ends[i], entries) &&
           good;
  }
  return good;
}

// Decodes all segments. Returns false if one of them fails.
inline bool decode_segments(const Plan& plan, const uint8_t* base, const HuffmanTables& tables,
                            int16_t* coefficients) {
  bool good = true;
  for (uint32_t i = 0; i < plan.segments; ++i) {
    good = decode_segment(plan, base, tables, i, coefficients) && good;
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

inline void write_pixels(const Plan& plan, const Memory& memory) {
  for (int32_t i = 0; i < pixel_count(plan); ++i) write_pixel(plan, memory, i);
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
  for (int32_t i = 0; i < column_count(plan); ++i) write_column(plan, memory, i);
}

inline void write_results(const Plan& plan, const Memory& memory) {
  for (int32_t i = 0; i < result_count(plan); ++i) write_result(plan, memory, i);
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
