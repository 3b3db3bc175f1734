// Decodes plans on the host, with jpeg/loops.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "jpeg/loops.h"

namespace emulate {

using namespace ts::jpeg;

// One image's device memory. Every part is a separate allocation of exactly its size, so that the
// address sanitizer detects an access beyond it.
struct Device {
  static constexpr int16_t kUnwritten = 0x5A5A;

  explicit Device(const std::vector<uint8_t>& plan_bytes)
      : plan_memory((plan_bytes.size() + 15) / 16 * 2), plan_size(plan_bytes.size()) {
    std::memcpy(plan_memory.data(), plan_bytes.data(), plan_bytes.size());
    const Plan& p = plan();
    const Scratch scratch = scratch_of(p);
    coefficients.assign(size_t{p.total_blocks} * 64, kUnwritten);
    samples.resize(size_t{p.total_blocks} * 64);
    room.resize(scratch.room);
    columns.resize(static_cast<size_t>(p.x.size) * static_cast<size_t>(p.y.source_size));
    weights.resize(std::max(scratch.weights, kWeightsHeader));  // never NULL
    result.resize(static_cast<size_t>(result_count(p)) * 3);
  }

  const uint8_t* base() const { return reinterpret_cast<const uint8_t*>(plan_memory.data()); }
  const Plan& plan() const { return plan_at(base()); }
  Memory memory() {
    return {base(),         coefficients.data(), samples.data(), room.data(),
            columns.data(), weights.data(),      result.data()};
  }

  std::unique_ptr<SearchTables> build_tables() const {
    auto tables = std::make_unique<SearchTables>();
    ts::jpeg::build_tables(plan(), base(), tables.get());
    return tables;
  }

  std::unique_ptr<PassTables> pass_tables() const {
    return std::make_unique<PassTables>(ts::jpeg::pass_tables(plan(), *build_tables()));
  }

  // Finds the entries of a plan of a whole scan, as decode/sync.cu does with blocks of `threads`
  // threads. Starts from the guesses of paths if `guessed` is set. Returns false if the host must
  // decode the image.
  bool synchronise(uint32_t threads, uint32_t launches, bool backwards = false,
                   bool guessed = false) {
    const Plan& p = plan();
    starts.resize(p.subsequences);
    ends.resize(p.subsequences);
    sums.resize(p.subsequences);
    std::vector<SyncSum> before(p.subsequences);
    std::vector<SyncState> borders(2 * ((size_t{p.subsequences} + threads - 1) / threads));
    const SyncMemory memory = {starts.data(), ends.data(), borders.data(), sums.data(),
                               before.data()};
    auto* const entries = reinterpret_cast<uint8_t*>(plan_memory.data()) + p.entries_at;
    const auto tables = pass_tables();
    std::vector<SyncState> path_ends(guessed ? size_t{path_count(p)} * kPathReach : 0);
    std::vector<uint16_t> routes(guessed ? p.subsequences : 0);
    std::vector<uint8_t> links(guessed ? path_count(p) : 0);
    const PathMemory paths = {path_ends.data(), routes.data(), links.data()};
    if (guessed) follow_paths(p, base(), *tables, paths);
    const SyncCost cost = ts::jpeg::synchronise(p, base(), *tables, memory, threads, launches,
                                                backwards, guessed ? &paths : nullptr);
    passes += cost.passes;
    rounds += cost.rounds;
    return sum_subsequences(p, memory) && write_all_entries(p, base(), *tables, memory, entries);
  }

  // Decodes all segments. Returns false if one of them fails.
  bool entropy() { return decode_segments(plan(), base(), *build_tables(), coefficients.data()); }

  // Returns the number of blocks that entropy has not written: 0, whatever the bytes, since the
  // device's memory is not zeroed.
  size_t unwritten() const {
    size_t blocks = 0;
    for (size_t i = 0; i < coefficients.size(); i += 64) {
      const auto block = coefficients.begin() + static_cast<std::ptrdiff_t>(i);
      blocks += std::count(block, block + 64, kUnwritten) == 64;
    }
    return blocks;
  }

  // Computes the pixels after the entropy decoder, whatever it produced.
  void finish() {
    transform_blocks(plan(), memory());
    weigh_axes(plan(), memory());
    write_columns(plan(), memory());
    write_results(plan(), memory());
  }

  // Runs the operations on the result, with the threads in either order.
  void augment(bool backwards) {
    StepState state;
    StepLoop team = {backwards};
    run_steps(team, plan(), memory(), &state);
  }

  // For the subsequences, after synchronise; and how often one was decoded.
  std::vector<SyncState> starts, ends;
  std::vector<SyncSum> sums;
  uint64_t passes = 0;
  uint64_t rounds = 0;  // decodes that must run one after the other

  std::vector<uint64_t> plan_memory;
  size_t plan_size;
  std::vector<int16_t> coefficients;
  std::vector<uint8_t> samples, room, weights, result;
  std::vector<uint32_t> columns;
};

}  // namespace emulate
