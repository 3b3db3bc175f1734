// The flags of operator calls.
#pragma once

#include <cstdint>

namespace ts {

// Throws INVALID_ARGUMENT unless these are flags of a call: TS_OPERATOR_FLAG_ values and own
// switches, as for ts_operator_call.
void check_flags(int32_t flags);

}  // namespace ts
