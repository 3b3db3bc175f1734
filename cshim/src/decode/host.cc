#include "decode/host.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "deflate/loop.h"
#include "jpeg/loops.h"

namespace ts::decode {
namespace {

using jpeg::Memory;
using jpeg::Plan;

// Returns the digest of a piece, which zeros follow up to kPieceBytes.
uint64_t digest_of(const DigestKey& key, const uint64_t* piece, uint32_t bytes) {
  uint64_t sum = 0;
  for (uint32_t pair = 0; pair < kLanes / 2; ++pair) {
    LanePair lanes = {};
    for (uint32_t stripe = 0; stripe < kStripes; ++stripe) {
      const uint64_t* const words = piece + stripe * kLanes + 2 * pair;
      add_words(key, stripe, pair, words[0], words[1], &lanes);
    }
    sum += merged(key, pair, lanes);
  }
  return finished(sum, bytes);
}

// Returns false if a piece has another digest.
bool read_range(const Read& read, const DigestKey& key, uint8_t* to) {
  bool same = true;
  for (uint32_t begin = 0; begin < read.bytes; begin += kPieceBytes) {
    const uint32_t bytes = std::min(kPieceBytes, read.bytes - begin);
    uint64_t piece[kPieceBytes / sizeof(uint64_t)] = {};
    std::memcpy(piece, read.from + begin, bytes);
    std::memcpy(to + begin, piece, jpeg::aligned_plan(bytes));
    if (read.digests == nullptr) continue;
    uint64_t expected;
    std::memcpy(&expected, read.digests + begin / kPieceBytes, sizeof expected);
    if (digest_of(key, piece, bytes) != expected) same = false;
  }
  if (read.digests != nullptr)
    std::memset(to + jpeg::aligned_plan(read.bytes), 0, jpeg::kScanSlack);
  return same;
}

// Returns false if the host's decoder must decode the image.
bool run_stage(Stage stage, const Work& work, const jpeg::Place& place) {
  const Memory memory = jpeg::memory_of(place, work.staging, work.scratch, work.results);
  const Plan& plan = jpeg::plan_at(memory.base);
  auto* const tables = reinterpret_cast<jpeg::SearchTables*>(work.scratch + place.tables);
  const jpeg::SyncMemory sync = jpeg::sync_memory(plan, work.scratch + place.sync);
  const jpeg::PathMemory paths = jpeg::path_memory(plan, work.scratch + place.sync);
  switch (stage) {
    case Stage::kTables:
      jpeg::build_tables(plan, memory.base, tables);
      return true;
    case Stage::kSync: {
      if (plan.subsequences == 0) return true;
      const jpeg::PassTables pass = jpeg::pass_tables(plan, *tables);
      if (follows_paths(work)) jpeg::follow_paths(plan, memory.base, pass, paths);
      jpeg::synchronise(plan, memory.base, pass, sync, jpeg::kSyncThreads, jpeg::kSyncLaunches,
                        false, follows_paths(work) ? &paths : nullptr);
      return true;
    }
    case Stage::kSums:
      return plan.subsequences == 0 || jpeg::sum_subsequences(plan, sync);
    case Stage::kEntries:
      return plan.subsequences == 0 ||
             jpeg::write_all_entries(plan, memory.base, jpeg::pass_tables(plan, *tables), sync,
                                     work.staging + place.plan + plan.entries_at);
    case Stage::kEntropy:
      return jpeg::decode_segments(plan, memory.base, *tables, memory.coefficients);
    case Stage::kTransform:
      jpeg::transform_blocks(plan, memory);
      return true;
    case Stage::kWeights:
      jpeg::weigh_axes(plan, memory);
      return true;
    case Stage::kColumns:
      jpeg::write_columns(plan, memory);
      return true;
    case Stage::kResults:
      jpeg::write_results(plan, memory);
      return true;
    case Stage::kAugment: {
      jpeg::StepState state;
      jpeg::StepLoop team;
      jpeg::run_steps(team, plan, memory, &state);
      return true;
    }
  }
  return false;
}

}  // namespace

void run_on_host(Stage stage, const Work& work) {
  for (uint32_t i = 0; i < work.images; ++i) {
    if (!run_stage(stage, work, work.places[i])) work.failed[i] = 1;
  }
}

void run_on_host(const InflateWork& work) {
  const auto state = std::make_unique<deflate::State>();
  deflate::Loop team;
  for (uint32_t i = 0; i < work.count; ++i) {
    work.results[i] = deflate::inflate(team, work.ranges[i], work.staging, work.rooms, state.get());
  }
}

void run_on_host(const GatherWork& work) {
  for (uint32_t i = 0; i < work.count; ++i) {
    const GatherWork::Piece& piece = work.pieces[i];
    std::memcpy(work.gathered + piece.to, work.staging + piece.from, piece.bytes);
  }
}

void run_on_host(const ReadWork& work) {
  for (uint32_t i = 0; i < work.count; ++i) {
    const Read& read = work.reads[i];
    if (!read_range(read, work.key, work.staging + read.to)) work.failed[read.image] = 1;
  }
}

}  // namespace ts::decode
