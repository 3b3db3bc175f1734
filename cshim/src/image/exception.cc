// Classifies exceptions of the image library. Only the standard library's exceptions get here, and
// each is a bug.
#include "base/error.h"

namespace ts {

ts_error* classify(const char* origin, const std::exception& exception) noexcept {
  return ts_error_new(TS_ERROR_INTERNAL, origin, exception.what());
}

}  // namespace ts
