// What other parts of the shim tell the recording that runs, if one does.
#pragma once

#include <cstdint>

namespace ts {

// Notes that a named range begins now; returns 0, and notes nothing, when nothing is recorded. name
// is borrowed for the call. Any thread. One load when nothing is recorded.
uint64_t trace_range_begin(const char* name) noexcept;
// Ends the range; on any thread. 0, and ranges of an earlier recording, are ignored.
void trace_range_end(uint64_t range) noexcept;

}  // namespace ts
