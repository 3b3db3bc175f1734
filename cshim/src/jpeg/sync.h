// Finds the entry points of a scan that has none, with many threads: after Weissenberger and
// Schmidt, "Accelerating JPEG Decompression on GPUs" (arXiv 2111.09219), on bytes as they are
// stored, with restart markers.
//
// The scan is cut into subsequences of equal size. One thread decodes each, from a guess: that a
// block begins with the subsequence. Huffman codes synchronise: after some symbols a decoder that
// began at a wrong place mostly stands where the right one does. So each thread hands the state in
// which it leaves its subsequence to the next one, which decodes again if it began with another
// state, until no state changes. The first thread's state is true, so then all are. Sums over the
// threads give the number of blocks before each subsequence, and its DC predictors. With these
// each thread decodes its subsequence once more, and writes the entries of the MCUs that begin in
// it.
//
// Whatever the bytes, a pass through a subsequence loads no byte outside of the scan, and ends. The
// last step finds every anomaly that end_segment would find, or returns that the host must
// decode the image.
#pragma once

#include <cstdint>

#include "jpeg/plan.h"
#include "jpeg/words.h"

namespace ts::jpeg {

// Where a decoder stands before a symbol.
struct SyncState {
  uint32_t bit;    // of the scan, in the byte that holds the next bit; never in a stuffed byte
  uint16_t place;  // 64 * the block of the MCU + the coefficient; 0 of a block is its DC difference
  uint16_t ended;  // 1: the data have ended
};

TS_HOST_DEVICE bool operator==(const SyncState& a, const SyncState& b) {
  return a.bit == b.bit && a.place == b.place && a.ended == b.ended;
}

// What lies between two states.
struct SyncSum {
  uint32_t blocks;             // that end there
  uint32_t markers;            // restart markers
  int32_t dc[kMaxComponents];  // sums of DC differences, since the last marker if there is one
};

// Returns the sum of two parts that follow each other.
TS_HOST_DEVICE SyncSum joined(const SyncSum& a, const SyncSum& b) {
  SyncSum sum;
  sum.blocks = a.blocks + b.blocks;
  sum.markers = a.markers + b.markers;
  for (int c = 0; c < kMaxComponents; ++c) {
    const uint32_t before = b.markers == 0 ? static_cast<uint32_t>(a.dc[c]) : 0;
    sum.dc[c] = static_cast<int32_t>(before + static_cast<uint32_t>(b.dc[c]));
  }
  return sum;
}

// A block of threads synchronises kSyncThreads subsequences that follow each other in one launch.
// The blocks' last states synchronise the blocks, in this many launches: the first decodes, the
// second mends the beginnings of blocks, and for nearly all images changes no block's last state.
constexpr uint32_t kSyncLaunches = 4;

// The memory of an image's search. Of each subsequence: the states in which it begins and ends, its
// sum, and that of all before it. Of each block of threads: its last state after the latest launch,
// and after the launch before, in turns.
struct SyncMemory {
  SyncState *starts, *ends, *borders;
  SyncSum *sums, *before;
};

static_assert(2 * sizeof(SyncState) + 2 * sizeof(SyncSum) == kSubsequenceScratch &&
                  2 * sizeof(SyncState) == kSyncBlockScratch,
              "jpeg/plan.h has the sizes");

TS_HOST_DEVICE SyncMemory sync_memory(const Plan& plan, uint8_t* scratch) {
  SyncMemory memory;
  memory.starts = reinterpret_cast<SyncState*>(scratch);
  memory.ends = memory.starts + plan.subsequences;
  memory.borders = memory.ends + plan.subsequences;
  memory.sums = reinterpret_cast<SyncSum*>(memory.borders + 2 * sync_blocks(plan));
  memory.before = memory.sums + plan.subsequences;
  return memory;
}

// The memory of an image's paths. Of the path from each subsequence and block of the MCU: the
// states in which it ends each subsequence that it passes, and where it meets another path (see
// extend_path). Of each subsequence: the path that ends it (see walk_paths).
struct PathMemory {
  SyncState* ends;
  uint16_t* routes;
  uint8_t* links;
};

static_assert(kPathReach * sizeof(SyncState) + sizeof(uint8_t) == kPathScratch &&
                  sizeof(uint16_t) == kRouteScratch && kPathReach <= 16 && kMaxBlocks <= 16,
              "jpeg/plan.h has the sizes");

TS_HOST_DEVICE uint32_t path_count(const Plan& plan) { return plan.subsequences * plan.blocks; }

TS_HOST_DEVICE PathMemory path_memory(const Plan& plan, uint8_t* scratch) {
  PathMemory memory;
  memory.ends = reinterpret_cast<SyncState*>(sync_memory(plan, scratch).before + plan.subsequences);
  memory.routes =
      reinterpret_cast<uint16_t*>(memory.ends + uint64_t{path_count(plan)} * kPathReach);
  memory.links = reinterpret_cast<uint8_t*>(memory.routes + plan.subsequences);
  return memory;
}

// Reports whether the block of threads from subsequence `first` on has begun with the right state.
// `before` has the blocks' last states after the launch before.
TS_HOST_DEVICE bool begins_well(const SyncMemory& memory, uint32_t first, uint32_t block,
                                const SyncState* before) {
  return block == 0 || before[block - 1] == memory.starts[first];
}

// Returns the bit at which the states of subsequence `index` end.
TS_HOST_DEVICE uint32_t end_of_subsequence(const Plan& plan, uint32_t index) {
  return index + 1 >= plan.subsequences ? UINT32_MAX : (index + 1) * plan.subsequence_bytes * 8;
}

// Returns the state from which subsequence `index` is decoded first: the true one of the first
// subsequence, a guess for the others.
TS_HOST_DEVICE SyncState first_state(const Plan& plan, const uint8_t* base, uint32_t index) {
  uint32_t byte = index * plan.subsequence_bytes;
  // The byte behind 0xFF is stuffed, or belongs to a marker.
  if (index != 0 && base[plan.scan_at + byte - 1] == 0xFF) ++byte;
  return {byte * 8, 0, 0};
}

TS_HOST_DEVICE BitReader reader_at(const Plan& plan, const uint8_t* base, uint32_t bit) {
  BitReader reader;
  reader.data = base + plan.scan_at;
  reader.limit = reader.end = plan.scan_bytes;
  reader.next = smaller(bit >> 3, reader.end);
  reader.bits = 0;
  reader.count = reader.zeros = 0;
  refill(&reader);
  reader.bits <<= bit & 7;
  reader.count -= static_cast<int32_t>(bit & 7);
  return reader;
}

// Returns a bit that the next one does not lie behind. It lies before it by the stuffed bytes among
// those that were loaded.
TS_HOST_DEVICE uint32_t bound_of(const BitReader& reader) {
  return reader.next * 8 - static_cast<uint32_t>(reader.count - reader.zeros);
}

// The bits of kSymbolsAtOnce symbols.
constexpr uint32_t kMaxStepBits = kSymbolsAtOnce * 31;

// Fills in the block's members.
TS_HOST_DEVICE void enter_block(const Plan& plan, Cursor* at) {
  at->component = plan.block_component[at->block];
  at->dc_table = plan.block_dc[at->block];
  at->ac_table = plan.block_ac[at->block];
}

TS_HOST_DEVICE Cursor cursor_at(const Plan& plan, const SyncState& state) {
  Cursor at = {};
  at.block = state.place >> 6;
  at.coefficient = state.place & 63;
  enter_block(plan, &at);
  return at;
}

TS_HOST_DEVICE SyncState state_of(const BitReader& reader, const Cursor& at) {
  return {position_of(reader), static_cast<uint16_t>(at.block << 6 | at.coefficient), 0};
}

// The maximum number of bytes 0xFF before a restart marker's number. The host decodes an image with
// more: every thread that begins among them would look at all.
constexpr uint32_t kMaxFill = 64;

// Passes from the end of the data to behind the restart marker there. Returns false if there is
// none.
TS_HOST_DEVICE bool pass_marker(const Plan& plan, const uint8_t* base, BitReader* reader) {
  uint32_t byte = reader->next;
  const uint32_t end = smaller(reader->end, reader->next + kMaxFill);
  while (byte < end && reader->data[byte] == 0xFF) ++byte;
  if (plan.restart_interval == 0 || byte == reader->next || byte >= reader->end ||
      (reader->data[byte] & 0xF8) != 0xD0) {
    return false;
  }
  *reader = reader_at(plan, base, (byte + 1) * 8);
  return true;
}

// Computes pass_subsequence, whatever the bytes.
TS_HOST_DEVICE_RARE SyncSum pass_carefully(const Plan& plan, const uint8_t* base,
                                           const HuffmanTables& tables, uint32_t until,
                                           SyncState* state) {
  SyncSum sum = {};
  if (state->ended != 0) return sum;
  Cursor at = cursor_at(plan, *state);
  BitReader reader = reader_at(plan, base, state->bit);
  while (true) {
    refill(&reader);
    const uint32_t bound = bound_of(reader);
    if (bound >= until && position_of(reader) >= until) break;
    // Close to the end of the subsequence, or of the data, every symbol is looked at by itself.
    const bool close = reader.zeros != 0 || bound >= until - smaller(until, kMaxStepBits);
    bool ended = false;
    for (int i = 0; i < (close ? 1 : kSymbolsAtOnce) && at.coefficient < 64; ++i) {
      const BitReader before = reader;
      const Cursor was = at;
      const Step step = decode_symbol(tables, &reader, &at);
      if (step == Step::kNeedsBits) break;
      const bool beyond = reader.count < reader.zeros;
      const bool unknown = step == Step::kBad && at.coefficient < 64;
      if (beyond || (unknown && reader.count - reader.zeros < 16)) {
        reader = before;
        at = was;
        ended = true;
        break;
      }
      if (unknown) {  // no code
        reader.bits <<= 1;
        --reader.count;
      } else if (step == Step::kBad) {  // a run out of the block
        at.coefficient = 64;
      }
    }
    if (ended) {
      if (!pass_marker(plan, base, &reader)) {
        *state = {plan.scan_bytes * 8, 0, 1};
        for (int c = 0; c < kMaxComponents; ++c) sum.dc[c] = at.dc[c];
        return sum;
      }
      ++sum.markers;
      at = cursor_at(plan, {0, 0, 0});
      continue;
    }
    if (at.coefficient < 64) continue;
    at.coefficient = 0;
    ++sum.blocks;
    if (++at.block == plan.blocks) at.block = 0;
    enter_block(plan, &at);
  }
  for (int c = 0; c < kMaxComponents; ++c) sum.dc[c] = at.dc[c];
  *state = state_of(reader, at);
  return sum;
}

// Returns the byte, a multiple of four, up to which a pass to bit `until` may take words.
TS_HOST_DEVICE uint32_t end_of_words(const Plan& plan, uint32_t until) {
  const uint32_t end = plan.scan_bytes < kWordMargin ? 0 : plan.scan_bytes - kWordMargin;
  return smaller(until >> 3, end) & ~3u;
}

// Returns the bit of the scan `count` bits behind byte `from`, without the stuffed bytes between.
TS_HOST_DEVICE uint32_t bit_behind(const uint8_t* data, uint32_t from, uint32_t count) {
  uint32_t byte = from + (data[from - 1] == 0xFF ? 1 : 0);
  for (; count >= 8; count -= 8) byte += data[byte] == 0xFF ? 2 : 1;
  return byte * 8 + count;
}

// Decodes from *state, before byte `until`, to the first symbol that begins at or behind that byte.
// Calls use->mcu() where an MCU begins, before its first symbol. Returns false, with *state and
// *sum as they were, if there is more to the bytes than words, if use->mcu() does, or, with
// Use::kStrict, at whatever is no symbol. *sum is zero before.
template <typename Use>
TS_HOST_DEVICE bool pass_words(const Plan& plan, const uint8_t* base, const SearchTables& tables,
                               uint32_t until, SyncState* state, SyncSum* sum, Use* use) {
  WordReader reader;
  if (!begin_words(base + plan.scan_at, state->bit, until, &reader)) return false;

  SyncSum part = {};
  uint32_t block = state->place >> 6;
  uint32_t coefficient = state->place & 63;
  uint32_t component = plan.block_component[block];
  uint32_t dc_table = plan.block_dc[block];
  uint32_t ac_table = plan.block_ac[block];
  while (true) {
    if (reader.count <= 32 && !take_word(&reader, 0)) return false;
    if (reader.count <= reader.behind) break;
    const HuffmanTable& table = tables.table[coefficient == 0 ? dc_table : ac_table];
    uint32_t step = table.look[next_look(reader)];
    if (coefficient == 0 || step == 0) {
      // A DC difference, or a long code. One more word is enough for any.
      if (reader.count <= 32) continue;
      if (coefficient == 0 && block == 0 && !use->mcu(plan, reader, part)) return false;
      if (step == 0) step = find_long_code(table, static_cast<uint32_t>(reader.bits >> 48));
      if (step == 0) {  // no code
        if (Use::kStrict) return false;
        skip_bits(&reader, 1);
        continue;
      }
      if (coefficient == 0) {
        const auto difference = static_cast<uint32_t>(value_of(step, reader));
        for (uint32_t c = 0; c < kMaxComponents; ++c) {
          const uint32_t dc = static_cast<uint32_t>(part.dc[c]) + (c == component ? difference : 0);
          part.dc[c] = static_cast<int32_t>(dc);
        }
        coefficient = 1;
      } else {
        coefficient += passed_by(step);
      }
      skip_bits(&reader, step_bits(step));
    }
    // Without a branch, for which a warp would wait: what is not decoded has no bits.
    const uint16_t* const pairs = tables.pairs[ac_table];
    const uint16_t* const singles = tables.table[ac_table].look;
    TS_UNROLL
    for (int i = 0; i < kSymbolsAtOnce; ++i) {
      // A second symbol must begin before `until`, and in the block.
      const bool pair = reader.count - reader.behind >= kLookBits && coefficient <= kMaxPairPlace;
      const uint32_t both = (pair ? pairs : singles)[next_look(reader)];
      const uint32_t bits = step_bits(both);
      const bool decoded = bits != 0 && static_cast<int32_t>(bits) <= reader.count &&
                           reader.count > reader.behind && coefficient < 64;
      coefficient += decoded ? both >> (pair ? 8 : 9) : 0;
      skip_bits(&reader, decoded ? bits : 0);
    }
    if (coefficient < 64) continue;
    // A run out of the block ends it too.
    if (Use::kStrict && coefficient != 64 && coefficient < kBlockEnd) return false;
    coefficient = 0;
    ++part.blocks;
    if (++block == plan.blocks) block = 0;
    component = plan.block_component[block];
    dc_table = plan.block_dc[block];
    ac_table = plan.block_ac[block];
  }
  state->bit = bit_behind(reader.data, until, static_cast<uint32_t>(reader.behind - reader.count));
  state->place = static_cast<uint16_t>(block << 6 | coefficient);
  *sum = part;
  return true;
}

// Does nothing where an MCU begins.
struct Passing {
  static constexpr bool kStrict = false;
  TS_HOST_DEVICE bool mcu(const Plan& /*plan*/, const WordReader& /*reader*/,
                          const SyncSum& /*part*/) const {
    return true;
  }
};

// Decodes from *state to the first symbol that begins at or behind bit `until`, and leaves *state
// there. Goes on behind whatever is no symbol: in a state that is wrong, nothing means anything.
// What the next symbol is depends on the state and the bytes alone, so a pass may be cut anywhere.
TS_HOST_DEVICE SyncSum pass_subsequence(const Plan& plan, const uint8_t* base,
                                        const SearchTables& tables, uint32_t until,
                                        SyncState* state) {
  SyncSum sum = {};
  if (state->ended != 0) return sum;
  const uint32_t words = end_of_words(plan, until);
  Passing use;
  if (state->bit < words * 8) pass_words(plan, base, tables, words, state, &sum, &use);
  if (state->bit >= until) return sum;
  SyncState rest = *state;
  const SyncSum behind = pass_carefully(plan, base, tables, until, &rest);
  *state = rest;
  return joined(sum, behind);
}

// ---- paths -------------------------------------------------------------------------------------
//
// The guess that an MCU begins with a subsequence is wrong for long where its blocks have the same
// codes: a decoder that has met the right bits counts other blocks than the right one. So for a few
// images, for which a GPU has more threads than there are subsequences, a thread decodes each
// subsequence from the guess for each block of the MCU. One of these paths has nearly always met
// the right state at the end of the subsequence. Each then goes on until it stands where a path of
// a subsequence behind stands, and the right path leads from one to the next. What it finds are
// better guesses, and no more: `synchronise_block` begins with them, and decodes again what was
// wrong.

TS_HOST_DEVICE SyncState* path_at(const Plan& plan, const PathMemory& memory, uint32_t index,
                                  uint32_t block) {
  return memory.ends + (uint64_t{index} * plan.blocks + block) * kPathReach;
}

// Passes the first subsequence of a path.
TS_HOST_DEVICE void begin_path(const Plan& plan, const uint8_t* base, const SearchTables& tables,
                               uint32_t index, uint32_t block, const PathMemory& memory) {
  SyncState state = first_state(plan, base, index);
  state.place = static_cast<uint16_t>(block << 6);
  pass_subsequence(plan, base, tables, end_of_subsequence(plan, index), &state);
  path_at(plan, memory, index, block)[0] = state;
}

// Goes on with a path, after begin_path of all. Writes its link: the number of subsequences to the
// one at whose end it meets another path << 4 | the block of that, or 0 if it meets none.
TS_HOST_DEVICE void extend_path(const Plan& plan, const uint8_t* base, const SearchTables& tables,
                                uint32_t index, uint32_t block, const PathMemory& memory) {
  SyncState* const path = path_at(plan, memory, index, block);
  SyncState state = path[0];
  uint32_t link = 0;
  for (uint32_t i = 1; i < kPathReach && index + i < plan.subsequences && link == 0; ++i) {
    pass_subsequence(plan, base, tables, end_of_subsequence(plan, index + i), &state);
    path[i] = state;
    for (uint32_t other = 0; other < plan.blocks; ++other) {
      if (path_at(plan, memory, index + i, other)[0] == state) link = i << 4 | other;
    }
  }
  memory.links[index * plan.blocks + block] = static_cast<uint8_t>(link);
}

// Goes along the links from the first subsequence. Writes the route of each subsequence: the block
// of the path that ends it << 4 | the number of subsequences that the path has passed before.
// `links` are those of the memory, or a copy.
TS_HOST_DEVICE void walk_paths(const Plan& plan, const uint8_t* links, const PathMemory& memory) {
  uint32_t block = 0;
  for (uint32_t index = 0; index < plan.subsequences;) {
    const uint32_t link = links[index * plan.blocks + block];
    const uint32_t left = plan.subsequences - index;
    // A path that meets no other is left after its last state, for any.
    const uint32_t passed = link == 0 ? smaller(kPathReach, left) : link >> 4;
    for (uint32_t i = 0; i < passed; ++i) {
      memory.routes[index + i] = static_cast<uint16_t>(block << 4 | i);
    }
    index += passed;
    block = link & 15;
  }
}

// Returns the state in which the path before subsequence `index` leaves it, after walk_paths.
TS_HOST_DEVICE SyncState guessed_state(const Plan& plan, const uint8_t* base, uint32_t index,
                                       const PathMemory& memory) {
  if (index == 0) return first_state(plan, base, 0);
  const uint32_t route = memory.routes[index - 1];
  const uint32_t passed = route & 15;
  return path_at(plan, memory, index - 1 - passed, route >> 4)[passed];
}

// ---- blocks of threads -------------------------------------------------------------------------

// The subsequences of a block of threads, while it synchronises them.
struct SyncBlock {
  SyncState *starts, *ends;
  SyncSum* sums;
  uint32_t* work;    // those to decode
  uint32_t* counts;  // of them, and of the round before or behind, in turns
};

// What a search costs: the subsequences that were decoded, some of them several times, and the
// rounds.
struct SyncCost {
  uint64_t passes = 0;
  uint64_t rounds = 0;
};

// Synchronises `size` subsequences from `first` on, whose starts are there. In each round those are
// decoded whose beginning is not the state in which the one before has ended: all of them in a
// first launch, whose starts are guesses, and the first one of any other, whose states are there.
// Few subsequences are left after some rounds, so the threads take them from a list, and whole
// warps are done. After n rounds the states of the first n subsequences no longer change, so there
// are no more rounds than subsequences, and one.
//
// A team has each(count, f), which calls f for each number below count, in any order or at once,
// and ends when all calls have; and add(at), which counts and returns the count before.
template <typename Team>
TS_DEVICE SyncCost synchronise_block(Team& team, const Plan& plan, const uint8_t* base,
                                     const SearchTables& tables, uint32_t first, uint32_t size,
                                     bool guesses, const SyncBlock& block) {
  SyncCost cost;
  uint32_t count = guesses ? size : 1;
  team.each(size, [&](uint32_t i) {
    block.work[i] = i;
    if (i == 0) block.counts[0] = 0;
  });
  for (uint32_t turn = 0; count != 0; turn ^= 1) {
    cost.passes += count;
    ++cost.rounds;
    team.each(count, [&](uint32_t k) {
      const uint32_t i = block.work[k];
      SyncState state = block.starts[i];
      block.sums[i] =
          pass_subsequence(plan, base, tables, end_of_subsequence(plan, first + i), &state);
      block.ends[i] = state;
    });
    team.each(size, [&](uint32_t i) {
      // Every thread has read the other count before the last barrier.
      if (i == 0) block.counts[turn ^ 1] = 0;
      if (i == 0 || block.starts[i] == block.ends[i - 1]) return;
      block.starts[i] = block.ends[i - 1];
      block.work[team.add(&block.counts[turn])] = i;
    });
    count = block.counts[turn];
  }
  return cost;
}

// Writes entry `index` in the form of a plan that plans a scan (see kScanEntryBytes). Returns false
// if a predictor does not fit.
TS_HOST_DEVICE bool write_entry(uint8_t* entries, uint32_t index, uint32_t bit,
                                const int32_t dc[kMaxComponents]) {
  auto* const to = reinterpret_cast<uint16_t*>(entries + uint64_t{index} * kScanEntryBytes);
  to[0] = static_cast<uint16_t>(bit);
  to[1] = static_cast<uint16_t>(bit >> 16);
  bool fits = true;
  for (int c = 0; c < kMaxComponents; ++c) {
    to[2 + c] = static_cast<uint16_t>(dc[c]);
    fits = fits && static_cast<int16_t>(dc[c]) == dc[c];
  }
  return fits;
}

// Computes write_entries, whatever the bytes.
TS_HOST_DEVICE_RARE bool write_carefully(const Plan& plan, const uint8_t* base,
                                         const HuffmanTables& tables, uint32_t until,
                                         const SyncState& state, const SyncSum& before,
                                         const SyncState& end, uint8_t* entries) {
  const uint32_t total = plan.mcus * plan.blocks;
  if (before.blocks >= total) return true;  // behind the last MCU
  if (state.ended != 0) return false;
  uint32_t mcu = before.blocks / plan.blocks;
  Cursor at = cursor_at(plan, state);
  if (before.blocks - mcu * plan.blocks != at.block) return false;
  for (int c = 0; c < kMaxComponents; ++c) at.dc[c] = before.dc[c];
  const uint32_t interval = plan.restart_interval;
  uint32_t to_restart = UINT32_MAX;
  if (interval != 0) {
    to_restart = interval - mcu % interval;
    uint32_t markers = mcu / interval;
    // At the end of an interval the marker may be the next thing to pass.
    if (markers == before.markers + 1 && to_restart == interval && state.place == 0) {
      to_restart = 0;
      --markers;
    }
    if (markers != before.markers) return false;
  }
  uint32_t marker = before.markers & 7;
  BitReader reader = reader_at(plan, base, state.bit);
  while (true) {
    refill(&reader);
    const uint32_t bound = bound_of(reader);
    if (bound >= until && position_of(reader) >= until) break;
    if (at.block == 0 && at.coefficient == 0) {
      if (mcu == plan.mcus) return true;
      if (to_restart == 0) {
        if (!restart(&reader, marker)) return false;
        marker = (marker + 1) & 7;
        to_restart = interval;
        for (int c = 0; c < kMaxComponents; ++c) at.dc[c] = 0;
        continue;
      }
      if (mcu % plan.spacing == 0 &&
          !write_entry(entries, mcu / plan.spacing, position_of(reader), at.dc)) {
        return false;
      }
    }
    const bool close = bound >= until - smaller(until, kMaxStepBits);
    for (int i = 0; i < (close ? 1 : kSymbolsAtOnce) && at.coefficient < 64; ++i) {
      const Step step = decode_symbol(tables, &reader, &at);
      if (step == Step::kBad || reader.count < reader.zeros) return false;
      if (step == Step::kNeedsBits) break;
    }
    if (at.coefficient < 64) continue;
    at.coefficient = 0;
    if (++at.block == plan.blocks) {
      at.block = 0;
      ++mcu;
      if (interval != 0) --to_restart;
    }
    enter_block(plan, &at);
  }
  return state_of(reader, at) == end;
}

// Writes the entries of the MCUs that begin in words.
struct Writing {
  static constexpr bool kStrict = true;
  uint8_t* entries;
  uint32_t next_mcu;  // the next one that begins
  SyncSum before;

  TS_HOST_DEVICE bool mcu(const Plan& plan, const WordReader& reader, const SyncSum& part) {
    if (next_mcu >= plan.mcus) return false;
    const uint32_t mcu = next_mcu++;
    if (mcu % plan.spacing != 0) return true;
    const uint32_t bit =
        position_before(reader.data, reader.next + (reader.stuffed ? 1 : 0), reader.count);
    return write_entry(entries, mcu / plan.spacing, bit, joined(before, part).dc);
  }
};

// Decodes a subsequence from its true state, and writes the entries of the MCUs that begin in it.
// `before` is the sum of all subsequences before it, `end` the state in which it was left. Returns
// false if the host must decode the image.
TS_HOST_DEVICE bool write_entries(const Plan& plan, const uint8_t* base, const SearchTables& tables,
                                  uint32_t until, const SyncState& state, const SyncSum& before,
                                  const SyncState& end, uint8_t* entries) {
  SyncState at = state;
  SyncSum sum = before;
  const uint32_t words = end_of_words(plan, until);
  const uint32_t mcu = before.blocks / plan.blocks;
  // Where restart markers belong only the careful way knows, and it decodes again what is odd.
  if (plan.restart_interval == 0 && state.ended == 0 && state.bit < words * 8 &&
      before.blocks < plan.mcus * plan.blocks &&
      before.blocks - mcu * plan.blocks == state.place >> 6) {
    Writing use = {entries, mcu + (state.place != 0 ? 1 : 0), before};
    SyncSum part = {};
    if (pass_words(plan, base, tables, words, &at, &part, &use)) sum = joined(before, part);
  }
  if (at.ended == 0 && at.bit >= until) return at == end;
  return write_carefully(plan, base, tables, until, at, sum, end, entries);
}

}  // namespace ts::jpeg
