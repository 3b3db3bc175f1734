#include "decode/host.h"

#include <cstring>
#include <memory>

#include "deflate/loop.h"
#include "jpeg/loops.h"

namespace ts::decode {
namespace {

using jpeg::Memory;
using jpeg::Plan;

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

}  // namespace ts::decode
