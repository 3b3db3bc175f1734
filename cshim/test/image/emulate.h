// Decodes plans on the host, with loops in the place of the device's grids.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "jpeg/stages.h"
#include "jpeg/sync.h"

namespace emulate {

using namespace ts::jpeg;

// The device's memory of one image. Every part is an allocation of exactly its size, so that the
// address sanitizer sees an access beyond it.
struct Device {
  explicit Device(const std::vector<uint8_t>& plan_bytes)
      : plan_memory((plan_bytes.size() + 15) / 16 * 2), plan_size(plan_bytes.size()) {
    std::memcpy(plan_memory.data(), plan_bytes.data(), plan_bytes.size());
    const Plan& p = plan();
    const Scratch scratch = scratch_of(p);
    coefficients.resize(size_t{p.total_blocks} * 64);
    samples.resize(size_t{p.total_blocks} * 64);
    pixels.resize(static_cast<size_t>(pixel_count(p)));
    columns.resize(static_cast<size_t>(column_count(p)));
    weights.resize(std::max(scratch.weights, kWeightsHeader));  // never NULL
    result.resize(static_cast<size_t>(result_count(p)) * 3);
  }

  const uint8_t* base() const { return reinterpret_cast<const uint8_t*>(plan_memory.data()); }
  const Plan& plan() const { return plan_at(base()); }
  Memory memory() {
    return {base(),         coefficients.data(), samples.data(), pixels.data(),
            columns.data(), weights.data(),      result.data()};
  }

  std::unique_ptr<HuffmanTables> build_tables() const {
    auto tables = std::make_unique<HuffmanTables>();
    constexpr uint32_t kThreads = 3;
    for (uint32_t t = 0; t < kThreads; ++t) {
      build_tables_1(plan(), base(), tables.get(), t, kThreads);
    }
    for (uint32_t t = 0; t < kThreads; ++t) {
      build_tables_2(plan(), base(), tables.get(), t, kThreads);
    }
    return tables;
  }

  // Finds the entries of a plan of a whole scan, as decode/sync.cu does with blocks of `threads`
  // threads. Returns false if the host must decode the image.
  bool synchronise(uint32_t threads, uint32_t launches) {
    const Plan& p = plan();
    const auto tables = build_tables();
    const uint32_t count = p.subsequences;
    starts.resize(count);
    ends.resize(count);
    sums.resize(count);
    for (uint32_t launch = 0; launch < launches; ++launch) {
      const std::vector<SyncState> before = ends;  // of the launch before
      for (uint32_t first = 0; first < count; first += threads) {
        const uint32_t size = std::min(threads, count - first);
        std::vector<bool> changed(size, launch == 0);
        for (uint32_t t = 0; t < size && launch == 0; ++t) {
          starts[first + t] = first_state(p, base(), first + t);
        }
        if (launch != 0 && first != 0 && !(starts[first] == before[first - 1])) {
          starts[first] = before[first - 1];
          changed[0] = true;
        }
        for (bool any = true; any;) {
          for (uint32_t t = 0; t < size; ++t) {
            if (!changed[t]) continue;
            const uint32_t i = first + t;
            ends[i] = starts[i];
            sums[i] = pass_subsequence(p, base(), *tables, end_of_subsequence(p, i), &ends[i]);
            ++passes;
          }
          any = false;
          for (uint32_t t = 1; t < size; ++t) {
            changed[t] = !(starts[first + t] == ends[first + t - 1]);
            starts[first + t] = ends[first + t - 1];
            any = any || changed[t];
          }
          changed[0] = false;
        }
      }
    }
    SyncSum sum = {};
    std::vector<SyncSum> before;
    for (uint32_t i = 0; i < count; ++i) {
      if (i != 0 && !(starts[i] == ends[i - 1])) return false;
      before.push_back(sum);
      sum = joined(sum, sums[i]);
    }
    if (sum.blocks < p.mcus * p.blocks) return false;
    auto* const entries = reinterpret_cast<uint8_t*>(plan_memory.data()) + p.entries_at;
    bool good = true;
    for (uint32_t i = 0; i < count; ++i) {
      good = write_entries(p, base(), *tables, end_of_subsequence(p, i), starts[i], before[i],
                           ends[i], entries) &&
             good;
    }
    return good;
  }

  // Decodes all segments. Returns false if one of them fails.
  bool entropy() {
    const Plan& p = plan();
    const auto tables = build_tables();
    bool good = true;
    for (uint32_t i = 0; i < p.segments; ++i) {
      good = decode_segment(p, base(), *tables, i, coefficients.data()) && good;
    }
    return good;
  }

  void transform() {
    const Plan& p = plan();
    for (uint32_t i = 0; i < p.total_blocks; ++i) {
      const BlockPlace place = place_of_block(p, i);
      idct_block(coefficients.data() + size_t{i} * 64, quantisers_of(p, memory(), place.component),
                 samples.data() + place.sample, place.stride);
    }
  }

  void weigh(const Axis& axis, uint8_t* to) {
    if (axis.filter == kIdentity) return;
    double largest = axis.filter == kNearest ? 1.0 : 0.0;
    for (int32_t i = 0; i < axis.out; ++i) largest = larger(largest, largest_weight(axis, i));
    const Weights out = weights_at(axis, to);
    *out.precision = precision_of(largest);
    for (int32_t i = 0; i < axis.size; ++i) write_weights(axis, *out.precision, i, out);
  }

  // Computes the pixels after the entropy decoder, whatever it has left.
  void finish() {
    const Plan& p = plan();
    transform();
    for (int32_t i = 0; i < pixel_count(p); ++i) write_pixel(p, memory(), i);
    weigh(p.x, weights.data());
    weigh(p.y, weights.data() + weights_bytes(p.x));
    for (int32_t i = 0; i < column_count(p); ++i) write_column(p, memory(), i);
    for (int32_t i = 0; i < result_count(p); ++i) write_result(p, memory(), i);
  }

  // Of the subsequences, after synchronise, and the number of times that one was decoded.
  std::vector<SyncState> starts, ends;
  std::vector<SyncSum> sums;
  uint64_t passes = 0;

  std::vector<uint64_t> plan_memory;
  size_t plan_size;
  std::vector<int16_t> coefficients;
  std::vector<uint8_t> samples, weights, result;
  std::vector<uint32_t> pixels, columns;
};

}  // namespace emulate
