// Ranges: names for what the program does, for NVTX tools and for the log of a trace.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ts {

// A range that ended, or a mark (end equal to start), while the log was on. Times are nanoseconds
// of the system clock since 1970, as c10::getTime gives them; threads are the kernel's ids.
struct LoggedRange {
  std::string name;
  int64_t start_ns;
  int64_t end_ns;
  int64_t start_thread;
  int64_t end_thread;
};

// From start_range_log to stop_range_log ranges are logged, process-wide. The log is of those that
// began and ended in that time, in the order of their ends.
void start_range_log();
std::vector<LoggedRange> stop_range_log();

}  // namespace ts
