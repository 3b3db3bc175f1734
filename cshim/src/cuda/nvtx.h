// Ranges: names for parts of the program, for NVTX tools and for the log of a trace.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ts {

// A range that ended, or a mark (end equals start), while the log was on. Times are nanoseconds of
// the system clock since 1970, from c10::getTime; threads are the kernel's ids.
struct LoggedRange {
  std::string name;
  int64_t start_ns;
  int64_t end_ns;
  int64_t start_thread;
  int64_t end_thread;
};

// Between start_range_log and stop_range_log ranges are logged, for the whole process. The log has
// the ranges that started and ended in that time, in the order of their ends.
void start_range_log();
std::vector<LoggedRange> stop_range_log();

}  // namespace ts
