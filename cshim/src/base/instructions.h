// The instruction sets that a decoder may use. Tests choose a set; the library takes the best one.
#pragma once

namespace ts::image {

// kBmi2 has BMI1, BMI2 and LZCNT. A processor without LZCNT executes it as BSR: another result.
enum class Instructions { kBaseline, kBmi2 };

inline Instructions best_instructions() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
      __builtin_cpu_supports("lzcnt")) {
    return Instructions::kBmi2;
  }
#endif
  return Instructions::kBaseline;
}

}  // namespace ts::image
