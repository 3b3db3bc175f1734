// Finds the entry points of a scan that has none, with many threads: after Weissenberger and
// Schmidt, "Accelerating JPEG Decompression on GPUs" (arXiv 2111.09219), on bytes as they are
// stored, with restart markers.
// The scan is divided into subsequences of equal size. One thread decodes each, from the guess that
// a block starts with the subsequence. Huffman codes synchronise: a decoder that started at a wrong
// position usually reaches the right one after some symbols. So each thread passes its state at the
// end of its subsequence to the next thread, which decodes again if it started with another state.
// This repeats until no state changes. The first thread's state is true, so then all are. Sums over
// the threads give the number of blocks before each subsequence, and its DC predictors. With these,
// each thread decodes its subsequence once more, and writes the entries of the MCUs that start in
// it.
// Whatever the bytes, a pass through a subsequence loads no byte outside the scan, and ends. The
// last step finds every anomaly that end_segment would find, or returns that the host must decode
// the image.
#pragma once

#include <cstdint>

#include "jpeg/plan.h"
#include "jpeg/words.h"

namespace ts::jpeg {

// The decoder's state before a symbol.
struct SyncState {
  uint32_t bit;    // of the scan, in the byte with the next bit; never in a stuffed byte
  uint16_t place;  // 64 * the block of the MCU + the coefficient; coefficient 0 is the block's DC
                   // difference
  uint16_t ended;  // 1: the data has ended
};

TS_HOST_DEVICE bool operator==(const SyncState& a, const SyncState& b) {
  return a.bit == b.bit && a.place == b.place && a.ended == b.ended;
}

// The sum of everything between two states.
struct SyncSum {
  uint32_t blocks;             // blocks that end there
  uint32_t markers;            // restart markers
  int32_t dc[kMaxComponents];  // sums of DC differences, since the last marker if there is one
};

// Returns the sum of two consecutive parts.
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

// In one launch a block of threads synchronises kSyncThreads consecutive subsequences. The blocks'
// last states synchronise the blocks, in this many launches. The first decodes. The second corrects
// the starts of blocks, and for nearly all images changes no block's last state.
constexpr uint32_t kSyncLaunches = 4;

// The memory of an image's search. For each subsequence: its first and last state, its sum, and the
// sum of everything before it. For each block of threads: its last state after the latest launch
// and after the previous one, alternating.
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

// The memory of an image's paths. For the path from each subsequence and block of the MCU: its
// states at the end of each subsequence that it passes, and where it meets another path (see
// extend_path). For each subsequence: the path that ends it (see walk_paths).
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

// Reports whether the block of threads that starts at subsequence `first` started with the right
// state. `before` has the blocks' last states after the previous launch.
TS_HOST_DEVICE bool begins_well(const SyncMemory& memory, uint32_t first, uint32_t block,
                                const SyncState* before) {
  return block == 0 || before[block - 1] == memory.starts[first];
}

// Returns the bit at which the states of subsequence `index` end.
TS_HOST_DEVICE uint32_t end_of_subsequence(const Plan& plan, uint32_t index) {
  return index + 1 >= plan.subsequences ? UINT32_MAX : (index + 1) * plan.subsequence_bytes * 8;
}

// Returns the state from which subsequence `index` is decoded first: the true one for the first
// subsequence, a guess for the others.
TS_HOST_DEVICE SyncState first_state(const Plan& plan, const uint8_t* base, uint32_t index) {
  uint32_t byte = index * plan.subsequence_bytes;
  // The byte after 0xFF is stuffed, or belongs to a marker.
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

// Returns an upper bound of the next bit's position. The next bit is earlier by the stuffed bytes
// among the loaded ones.
TS_HOST_DEVICE uint32_t bound_of(const BitReader& reader) {
  return reader.next * 8 - static_cast<uint32_t>(reader.count - reader.zeros);
}

// The maximum bits of kSymbolsAtOnce symbols.
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

// The maximum number of 0xFF bytes before a restart marker's number. The host decodes an image with
// more, since every thread that starts among them would read all of them.
constexpr uint32_t kMaxFill = 64;

// Moves from the end of the data to the end of the restart marker there. Returns false if there is
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

// Does pass_subsequence, whatever the bytes.
TS_HOST_DEVICE_RARE SyncSum pass_carefully(const Plan& plan, const uint8_t* base,
                                           const PassTables& tables, uint32_t until,
                                           SyncState* state) {
  SyncSum sum = {};
  if (state->ended != 0) return sum;
  Cursor at = cursor_at(plan, *state);
  BitReader reader = reader_at(plan, base, state->bit);
  while (true) {
    refill(&reader);
    const uint32_t bound = bound_of(reader);
    if (bound >= until && position_of(reader) >= until) break;
    // Near the end of the subsequence, or of the data, every symbol is checked separately.
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
      if (unknown) {  // not a code
        reader.bits <<= 1;
        --reader.count;
      } else if (step == Step::kBad) {  // a run beyond the block's end
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

// Returns the byte, a multiple of four, up to which a pass to bit `until` may read words.
TS_HOST_DEVICE uint32_t end_of_words(const Plan& plan, uint32_t until) {
  const uint32_t end = plan.scan_bytes < kWordMargin ? 0 : plan.scan_bytes - kWordMargin;
  return smaller(until >> 3, end) & ~3u;
}

// Returns the bit of the scan that is `count` bits after byte `from`, without the stuffed bytes
// between.
TS_HOST_DEVICE uint32_t bit_behind(const uint8_t* data, uint32_t from, uint32_t count) {
  uint32_t byte = from + (data[from - 1] == 0xFF ? 1 : 0);
  for (; count >= 8; count -= 8) byte += data[byte] == 0xFF ? 2 : 1;
  return byte * 8 + count;
}

// The look-up tables of a pass.
class Looks {
 public:
#if defined(__CUDA_ARCH__)
  // With the generic address the loop would compute the address of the shared memory each time.
  __device__ explicit Looks(const PassTables& tables) {
    asm volatile("mov.u32 %0, %1;"
                 : "=r"(from_)
                 : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(tables.look))));
  }
  // Returns the entry of the next bits in the table whose first entry this is.
  __device__ uint32_t at(uint32_t first, uint64_t bits) const {
    const uint32_t index = first + static_cast<uint32_t>(bits >> (64 - kLookBits));
    uint32_t entry;
    asm("ld.shared.u32 %0, [%1];" : "=r"(entry) : "r"(from_ + 4 * index));
    return entry;
  }

 private:
  uint32_t from_;
#else
  explicit Looks(const PassTables& tables) : from_(tables.look) {}
  uint32_t at(uint32_t first, uint64_t bits) const {
    return from_[first + static_cast<uint32_t>(bits >> (64 - kLookBits))];
  }

 private:
  const uint32_t* from_;
#endif
};

// The number of look-ups in a pass between two words, after the first one.
constexpr int kLooksAtOnce = 3;

// Returns the packed step of a code that is longer than an entry of `look`, or 0.
TS_HOST_DEVICE_RARE uint32_t find_longer(const PassTables& tables, uint32_t look, uint64_t bits) {
  return find_long_code(tables.longer[look >> kLookBits], static_cast<uint32_t>(bits >> 48));
}

// Decodes from *state, before byte `until`, to the first symbol that starts at or after that byte.
// Calls use->mcu() where an MCU starts, before its first symbol. Returns false, with *state and
// *sum unchanged, in three cases: words are not enough for these bytes, use->mcu() returns false,
// or, with Use::kStrict, there is no valid symbol. *sum is zero before.
// The threads of a warp take the same way through the loop, and a look-up waits only for the bits
// of the previous one: whether that one counts is known later.
template <typename Use>
TS_HOST_DEVICE bool pass_words(const Plan& plan, const uint8_t* base, const PassTables& tables,
                               uint32_t until, SyncState* state, SyncSum* sum, Use* use) {
  WordReader reader;
  if (!begin_words(base + plan.scan_at, state->bit, until, &reader)) return false;

  SyncSum part = {};
  uint32_t block = state->place >> 6;
  uint32_t coefficient = state->place & 63;
  uint32_t of = tables.block[block];
  const uint32_t blocks = plan.blocks;
  const Looks looks(tables);
  while (true) {
    if (!take_word(&reader)) return false;
    const int32_t inside = reader.count - reader.behind;  // bits before `until`
    if (inside <= 0) break;
    const bool dc = coefficient == 0;
    const uint32_t look = dc ? dc_look(of) : ac_look(of);
    uint32_t entry = looks.at(look, reader.bits);
    prepare_word(&reader);
    // Any symbol has less than 32 bits. A word with stuffed bytes is not enough.
    if (reader.count <= 32) continue;
    // A second symbol must start before `until`, and in the block.
    const bool pair = coefficient + (entry >> 24) < 64 && inside >= kLookBits;
    uint32_t step = pair ? entry & kPairBits : entry >> 16;
    if (dc || entry == 0) {
      if (Use::kMarks && dc && block == 0 && !use->mcu(plan, reader, part)) return false;
      if (entry == 0) {
        const uint32_t longer = find_longer(tables, look, reader.bits);
        if (longer == 0) {  // not a code
          if (Use::kStrict) return false;
          skip_bits(&reader, 1);
          continue;
        }
        entry = pass_entry(longer, 0);
        step = entry >> 16;
      }
      if (dc) {
        const auto difference = static_cast<uint32_t>(value_of(single_step(entry), reader));
        for (uint32_t c = 0; c < kMaxComponents; ++c) {
          const uint32_t value =
              static_cast<uint32_t>(part.dc[c]) + (c == component_of(of) ? difference : 0);
          part.dc[c] = static_cast<int32_t>(value);
        }
        step = (entry >> 16 & 31) | 1u << 8;  // whatever the size of the difference
      }
    }
    // From here on two symbols are passed at once, as long as the first one does not end the block,
    // and the second one ends before `until`. An entry of 0 passes nothing.
    const uint32_t ac = ac_look(of);
    // The bits before `until`, at most as many as skip_bits can pass at once.
    const auto most = static_cast<uint32_t>(smaller(inside, 63));
    uint64_t bits = shifted_left(reader.bits, step);
    uint32_t sum_of_all = (coefficient << 8) + step;  // with those that do not count
    uint32_t passed = sum_of_all;
    bool counts = true;  // whether the look-up counts: if not, no later one does
    TS_UNROLL
    for (int i = 0; i < kLooksAtOnce; ++i) {
      entry = looks.at(ac, bits);
      const uint32_t next = sum_of_all + (entry & kPairBits);
      counts = counts && sum_of_all + (entry >> 16) < 64 << 8 && (next & 255) <= most;
      passed = counts ? next : passed;
      sum_of_all = next;
      bits = shifted_left(bits, entry);
    }
    skip_bits(&reader, passed & 255);
    coefficient = passed >> 8;
    if (coefficient < 64) continue;
    // A run beyond the block's end ends it too.
    if (Use::kStrict && coefficient != 64 && coefficient < kBlockEnd) return false;
    coefficient = 0;
    ++part.blocks;
    if (++block == blocks) block = 0;
    of = tables.block[block];
  }
  state->bit = bit_behind(reader.data, until, static_cast<uint32_t>(reader.behind - reader.count));
  state->place = static_cast<uint16_t>(block << 6 | coefficient);
  *sum = part;
  return true;
}

// Does nothing where an MCU starts.
struct Passing {
  static constexpr bool kStrict = false, kMarks = false;
  TS_HOST_DEVICE bool mcu(const Plan& /*plan*/, const WordReader& /*reader*/,
                          const SyncSum& /*part*/) const {
    return true;
  }
};

// Decodes from *state to the first symbol that starts at or after bit `until`, and sets *state to
// its position. Continues after invalid symbols: in a wrong state nothing has a meaning. The next
// symbol depends only on the state and the bytes, so a pass may be divided anywhere.
TS_HOST_DEVICE SyncSum pass_subsequence(const Plan& plan, const uint8_t* base,
                                        const PassTables& tables, uint32_t until,
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
// The guess that an MCU starts with a subsequence stays wrong for long if its blocks have the same
// codes: a decoder that has reached the right bits still counts other blocks than the right one. So
// for a few images, for which a GPU has more threads than there are subsequences, a thread decodes
// each subsequence from the guess for each block of the MCU. One of these paths has nearly always
// reached the right state at the end of the subsequence. Each path continues until it is where a
// path of a later subsequence is, and the right path leads from one to the next. The result is only
// better guesses: `synchronise_block` starts with them, and decodes wrong ones again.

TS_HOST_DEVICE SyncState* path_at(const Plan& plan, const PathMemory& memory, uint32_t index,
                                  uint32_t block) {
  return memory.ends + (uint64_t{index} * plan.blocks + block) * kPathReach;
}

// Decodes the first subsequence of a path.
TS_HOST_DEVICE void begin_path(const Plan& plan, const uint8_t* base, const PassTables& tables,
                               uint32_t index, uint32_t block, const PathMemory& memory) {
  SyncState state = first_state(plan, base, index);
  state.place = static_cast<uint16_t>(block << 6);
  pass_subsequence(plan, base, tables, end_of_subsequence(plan, index), &state);
  path_at(plan, memory, index, block)[0] = state;
}

// Continues a path, after begin_path of all. Writes its link: the number of subsequences to the one
// at whose end it meets another path << 4 | that path's block, or 0 if it meets none.
TS_HOST_DEVICE void extend_path(const Plan& plan, const uint8_t* base, const PassTables& tables,
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

// Follows the links from the first subsequence. Writes the route of each subsequence: the block of
// the path that ends it << 4 | the number of subsequences that the path has passed before. `links`
// are the memory's, or a copy.
TS_HOST_DEVICE void walk_paths(const Plan& plan, const uint8_t* links, const PathMemory& memory) {
  uint32_t block = 0;
  for (uint32_t index = 0; index < plan.subsequences;) {
    const uint32_t link = links[index * plan.blocks + block];
    const uint32_t left = plan.subsequences - index;
    // A path that meets no other one is abandoned after its last state, for any other path.
    const uint32_t passed = link == 0 ? smaller(kPathReach, left) : link >> 4;
    for (uint32_t i = 0; i < passed; ++i) {
      memory.routes[index + i] = static_cast<uint16_t>(block << 4 | i);
    }
    index += passed;
    block = link & 15;
  }
}

// Returns the state in which the path enters subsequence `index`, after walk_paths.
TS_HOST_DEVICE SyncState guessed_state(const Plan& plan, const uint8_t* base, uint32_t index,
                                       const PathMemory& memory) {
  if (index == 0) return first_state(plan, base, 0);
  const uint32_t route = memory.routes[index - 1];
  const uint32_t passed = route & 15;
  return path_at(plan, memory, index - 1 - passed, route >> 4)[passed];
}

// ---- blocks of threads -------------------------------------------------------------------------

// The subsequences of a block of threads during synchronisation.
struct SyncBlock {
  SyncState *starts, *ends;
  SyncSum* sums;
  uint32_t* work;    // the subsequences to decode
  uint32_t* counts;  // their number, and the number of the previous or next round, alternating
};

// The cost of a search: the number of decoded subsequences, counting repetitions, and the number of
// rounds.
struct SyncCost {
  uint64_t passes = 0;
  uint64_t rounds = 0;
};

// Synchronises `size` subsequences from `first` on, whose starts are set. A round decodes those
// whose start differs from the end of the previous one. In a first launch, whose starts are
// guesses, these are all. In any other launch, which has states, it is the first one. Few
// subsequences are left after some rounds, so the threads take them from a list, and whole warps
// are done. After n rounds the states of the first n subsequences no longer change, so there is at
// most one round more than subsequences.
// A team has each(count, f), which calls f for each number below count, in any order or
// concurrently, and returns when all calls have ended. So does spread(count, f), which makes few
// calls in different warps. It also has add(at), which counts and returns the count before.
template <typename Team>
TS_DEVICE SyncCost synchronise_block(Team& team, const Plan& plan, const uint8_t* base,
                                     const PassTables& tables, uint32_t first, uint32_t size,
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
    team.spread(count, [&](uint32_t k) {
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

// Writes entry `index` in the format of a plan of a whole scan (see kScanEntryBytes). Returns false
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

// Does write_entries, whatever the bytes.
TS_HOST_DEVICE_RARE bool write_carefully(const Plan& plan, const uint8_t* base,
                                         const PassTables& tables, uint32_t until,
                                         const SyncState& state, const SyncSum& before,
                                         const SyncState& end, uint8_t* entries) {
  const uint32_t total = plan.mcus * plan.blocks;
  if (before.blocks >= total) return true;  // after the last MCU
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
    // At the end of an interval the marker may be next.
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

// Writes the entries of the MCUs that start in words.
struct Writing {
  static constexpr bool kStrict = true, kMarks = true;
  uint8_t* entries;
  SyncSum before;
  uint32_t mcus;        // the MCUs that have not started
  uint32_t next_entry;  // the next entry to write
  uint32_t skips;       // the MCUs that start before the one with the next entry

  TS_HOST_DEVICE Writing(const Plan& plan, uint8_t* to, const SyncSum& sum, uint32_t next_mcu)
      : entries(to), before(sum), mcus(plan.mcus - next_mcu) {
    next_entry = (next_mcu + plan.spacing - 1) / plan.spacing;
    skips = next_entry * plan.spacing - next_mcu;
  }
  TS_HOST_DEVICE bool mcu(const Plan& plan, const WordReader& reader, const SyncSum& part) {
    if (mcus == 0) return false;
    --mcus;
    if (skips-- != 0) return true;
    skips = plan.spacing - 1;
    const uint32_t bit = position_before(
        reader.data, static_cast<uint32_t>(reader.from - reader.data) + (reader.stuffed >> 31),
        reader.count);
    return write_entry(entries, next_entry++, bit, joined(before, part).dc);
  }
};

// Decodes a subsequence from its true state, and writes the entries of the MCUs that start in it.
// `before` is the sum over all subsequences before it, `end` its last state. Returns false if the
// host must decode the image.
TS_HOST_DEVICE bool write_entries(const Plan& plan, const uint8_t* base, const PassTables& tables,
                                  uint32_t until, const SyncState& state, const SyncSum& before,
                                  const SyncState& end, uint8_t* entries) {
  SyncState at = state;
  SyncSum sum = before;
  const uint32_t words = end_of_words(plan, until);
  const uint32_t mcu = before.blocks / plan.blocks;
  // Only the careful way knows where restart markers belong, and it decodes unusual data again.
  if (plan.restart_interval == 0 && state.ended == 0 && state.bit < words * 8 &&
      before.blocks < plan.mcus * plan.blocks &&
      before.blocks - mcu * plan.blocks == state.place >> 6) {
    Writing use(plan, entries, before, mcu + (state.place != 0 ? 1 : 0));
    SyncSum part = {};
    if (pass_words(plan, base, tables, words, &at, &part, &use)) sum = joined(before, part);
  }
  if (at.ended == 0 && at.bit >= until) return at == end;
  return write_carefully(plan, base, tables, until, at, sum, end, entries);
}

}  // namespace ts::jpeg
