#include "decode/host.h"

#include <memory>

#include "deflate/loop.h"
#include "jpeg/loops.h"

namespace ts::decode {
namespace {

using jpeg::Memory;
using jpeg::Plan;

std::unique_ptr<jpeg::HuffmanTables> tables_of(const Plan& plan, const uint8_t* base) {
  auto tables = std::make_unique<jpeg::HuffmanTables>();
  jpeg::build_tables(plan, base, tables.get());
  return tables;
}

// Returns false if the host's decoder must decode the image.
bool run_stage(Stage stage, const Work& work, const jpeg::Place& place) {
  const Memory memory = jpeg::memory_of(place, work.staging, work.scratch, work.results);
  const Plan& plan = jpeg::plan_at(memory.base);
  switch (stage) {
    case Stage::kSync: {
      if (plan.subsequences == 0) return true;
      uint64_t passes = 0;
      return jpeg::synchronise(plan, memory.base, *tables_of(plan, memory.base),
                               jpeg::sync_memory(plan, work.scratch + place.sync),
                               jpeg::kSyncThreads, jpeg::kSyncLaunches,
                               work.staging + place.plan + plan.entries_at, &passes);
    }
    case Stage::kEntropy:
      return jpeg::decode_segments(plan, memory.base, *tables_of(plan, memory.base),
                                   memory.coefficients);
    case Stage::kTransform:
      jpeg::transform_blocks(plan, memory);
      return true;
    case Stage::kPixels:
      jpeg::write_pixels(plan, memory);
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

}  // namespace ts::decode
