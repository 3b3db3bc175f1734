// The instruction sets that a decoder may use. Tests choose a set; the library takes the best one.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace ts::image {

// kBmi2 has BMI1, BMI2 and LZCNT. A processor without LZCNT executes it as BSR: another result.
enum class Instructions { kBaseline, kBmi2 };

#if defined(__x86_64__)
// Clang 14 refuses __builtin_cpu_supports("lzcnt").
inline bool has_lzcnt() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(0x80000001, &a, &b, &c, &d) != 0 && (c & bit_LZCNT) != 0;
}
#endif

inline Instructions best_instructions() {
#if defined(__x86_64__)
  static const bool kHasBmi2 =
      __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") && has_lzcnt();
  if (kHasBmi2) return Instructions::kBmi2;
#endif
  return Instructions::kBaseline;
}

}  // namespace ts::image
